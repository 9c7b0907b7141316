"""Real Ray on this machine: what a job costs beside its render, how well workers are used, how soon a cancel acts.

    python benchmarks/farm.py            # appends to benchmarks/results/farm.csv; needs anygpu[farm]

Workers sleep in place of rendering, so that the figures do not depend on how many fit beside one another. The last rows
set the same runs against ``scale.py``'s simulation, with the driver's time and the restarts measured here.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from anygpu.farm import cluster
from anygpu.farm.driver import Driver, WorkerHandle
from anygpu.farm.schedule import Task
from anygpu.farm.worker import Worker
from anygpu.pipelines.records.job_folder import JobFolder
from scale import Constants, Fleet, simulate
from table import append, machine

WORKERS, JOBS, DEATHS, SEED = 8, 240, 3, 5
SHORTEST, LONGEST = 1.0, 3.0  # seconds of a job
CALLS = 60


@dataclass
class Sleeper:
    """Sleeps as long as a line says."""

    folder: Path
    device: Any = None

    def render(self, line: str, progress: Any) -> dict[str, Any]:
        """Sleep in slices, as a render has layers at which it looks for a cancel."""
        end = time.monotonic() + float(line.split()[1])
        while (left := end - time.monotonic()) > 0:
            progress.step(1, 2, "sampling")
            time.sleep(min(left, 0.02))
        return {}


class Timed(Driver):
    """A driver that remembers how long each worker was away after its death."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.died_at: dict[str, float] = {}
        self.away: list[float] = []

    def _died(self, worker: WorkerHandle) -> None:
        self.died_at[worker.name] = time.monotonic()
        super()._died(worker)

    def _came_up(self, worker: WorkerHandle, who: dict[str, Any]) -> None:
        super()._came_up(worker, who)
        if worker.name in self.died_at:
            self.away.append(time.monotonic() - self.died_at.pop(worker.name))


def task_of(line: str) -> Task:
    """A line is a number and seconds."""
    number, seconds = line.split()
    return Task(f"{int(number):064x}", "sleep", float(seconds), line)


def with_driver(ray: Any, count: int, use: Callable[[Timed], Any]) -> Any:
    """What ``use`` makes of a driver whose workers are all up, over an empty folder."""
    with tempfile.TemporaryDirectory(prefix="anygpu-farm-") as root:
        driver = Timed(ray, JobFolder(Path(root)), task_of, lambda _task: 0.0, lambda _text: None)
        driver.start_workers(count, Sleeper(Path(root)), {"num_cpus": 1})
        while not all(worker.up for worker in driver.workers):
            driver.turn()
        try:
            return use(driver)
        finally:
            for worker in driver.workers:
                ray.kill(worker.actor)


def run(driver: Timed, lines: list[str], deaths: int = 0) -> float:
    """Seconds until all jobs are done; ``deaths`` workers are killed at moments spread over the first half."""
    rng, done = random.Random(SEED), driver.tally.done
    driver.add(lines, again=True)
    kills = [len(lines) * (n + 1) // (2 * deaths + 2) for n in range(deaths)]
    started = time.monotonic()
    while driver.schedule or any(worker.task for worker in driver.workers):
        driver.turn()
        if kills and driver.tally.done - done >= kills[0]:
            kills.pop(0)
            busy = [one for one in psutil.Process().children(True) if "ray::Worker.run" in " ".join(one.cmdline())]
            rng.choice(busy).kill()
    return time.monotonic() - started


def overhead(driver: Timed) -> float:
    """Seconds that a job takes through Ray beyond the same call in this process: the two by turns, on one disk."""
    here = Worker(Sleeper(driver.folder.root))
    more = []
    for number in range(CALLS):
        began = time.monotonic()
        here.run(task_of(f"{number} 0"))
        local = time.monotonic() - began
        more.append(run(driver, [f"{CALLS + number} 0"]) - local)
    return statistics.median(more)


def cancelled(driver: Timed) -> float:
    """Seconds from the file that asks for the end of a running job until the driver has written that it ended."""
    taken = []
    for number in range(10_000, 10_010):
        driver.add([f"{number} 60"], again=True)
        while not any(worker.task for worker in driver.workers):
            driver.turn()
        key = task_of(f"{number} 0").key
        began = time.monotonic()
        driver.folder.cancel([key])
        while not driver.folder.failure(key):
            driver.turn()
        taken.append(time.monotonic() - began)
    return max(taken)


def main() -> None:
    """Measure, print, and append the rows."""
    rng = random.Random(SEED)
    lines = [f"{number} {rng.uniform(SHORTEST, LONGEST):.3f}" for number in range(JOBS)]
    tasks = [task_of(line) for line in lines]
    rows: list[tuple[str, float, str]] = []
    began = time.monotonic()
    ray = cluster.start_here(WORKERS, 0)
    rows.append(("Ray starts on this machine", time.monotonic() - began, "s"))

    def alone(driver: Timed) -> None:
        rows.append(("a job through Ray beyond the same call here", overhead(driver), "s"))
        rows.append(("a cancel until the job has ended, longest of 10", cancelled(driver), "s"))

    def many(driver: Timed) -> None:
        empty = [f"{number} 0" for number in range(20_000, 20_000 + JOBS)]
        per_job = run(driver, empty) / JOBS
        rows.append(("the driver's time for a job", per_job, "s"))
        for deaths in (0, DEATHS):
            wall = run(
                driver, [f"{int(line.split()[0]) + 1000 * (1 + deaths)} {line.split()[1]}" for line in lines], deaths
            )
            away = statistics.mean(driver.away) if driver.away else 0.0
            share = sum(task.size for task in tasks) / WORKERS / wall
            rows.append((f"{JOBS} jobs, {WORKERS} workers, {deaths} deaths: wall", wall, "s"))
            rows.append((f"{JOBS} jobs, {WORKERS} workers, {deaths} deaths: share of ideal", share, ""))
            constants = Constants(driver=per_job, load=0.0, restart=away, notice=0.0, step=1e9)
            fleet = Fleet([1.0] * WORKERS, deaths / (wall * WORKERS) * 3600, resume=False)
            walls = [simulate([task_of(line) for line in lines], fleet, constants, seed).wall for seed in range(200)]
            if deaths:
                rows.append(("a worker is back after its death", away, "s"))
            rows.append((f"{JOBS} jobs, {WORKERS} workers, {deaths} deaths: simulated", statistics.mean(walls), "s"))
            rows.append(("simulated against real", statistics.mean(walls) / wall, ""))

    with_driver(ray, 1, alone)
    with_driver(ray, WORKERS, many)
    ray.shutdown()
    named = {**machine(), "ray": ray.__version__, "load": round(psutil.getloadavg()[0], 1)}
    append("farm", [{**named, "what": what, "value": round(value, 4), "unit": unit} for what, value, unit in rows])
    print(json.dumps({what: value for what, value, _ in rows}, indent=1))


if __name__ == "__main__":
    main()
