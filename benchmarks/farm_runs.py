"""The farm: real Ray on this machine, and 1 to 10,000 workers on paper.

`farm`: what a job costs beside its render, how well workers are used, how soon a cancel acts; needs anygpu[farm].
Workers sleep in place of rendering, so that the figures do not depend on how many fit beside one another. The last rows
set the same runs against the simulation, with the driver's time and the restarts measured here.

`scale`: discrete events, with the order of jobs of the farm itself: ``farm.schedule`` decides who does what. The times
of videos, loads and deaths are modelled: none of them was taken on a GPU.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from anygpu.farm import cluster
from anygpu.farm.driver import Driver, WorkerHandle
from anygpu.farm.schedule import Task, TaskSchedule
from anygpu.farm.worker import Worker
from anygpu.pipelines.base import ProgressStage
from anygpu.pipelines.records.job_folder import JobFolder
from runner import Row, data

LONG = 600.0  # seconds of a job, as HunyuanVideo takes at 480p on one large card and LTX-Video 2B 17; modelled
SPREAD = 0.5  # of the logarithm of the times of jobs


@dataclass(frozen=True, slots=True)
class Constants:
    """What a farm spends its time on, in seconds.

    Args:
        driver: of the driver, for each job that it hands out and takes back. load: of a model into a worker.
        restart: from the death of a process until its successor is ready. notice: until a dead machine is known as one.
        step: of one step of a job, the most that a death costs where steps are kept.
    """

    driver: float = 0.005
    load: float = 90.0
    restart: float = 20.0
    notice: float = 63.0
    step: float = 30.0


@dataclass(frozen=True, slots=True)
class Farm:
    """Workers, their jobs, and what they are like.

    Args:
        each: jobs per worker. mean: seconds of a job. deaths: of each worker's machine, per hour. resume: whether a job
            goes on from its last step. away: seconds until a machine that died is replaced. models: how many the jobs
            are of. slow: share of the workers that have 0.4 of the others' speed, which is 1.
    """

    table: str
    workers: int
    each: int
    mean: float = LONG
    deaths: float = 0.0
    resume: bool = True
    away: float = 0.0
    models: int = 1
    slow: float = 0.0

    @property
    def speeds(self) -> list[float]:
        """Of each worker, 1 for the card that job sizes are seconds of."""
        return [0.4 if n < self.slow * self.workers else 1.0 for n in range(self.workers)]

    def row(self, constants: Constants) -> dict[str, str | int | float]:
        """The farm with its figures."""
        rng = random.Random(1)
        count = self.workers * self.each
        low = math.log(self.mean) - SPREAD**2 / 2
        tasks = [
            Task(str(n), f"model {rng.randrange(self.models)}", rng.lognormvariate(low, SPREAD)) for n in range(count)
        ]
        run = Simulation(tasks, self, constants).run()
        assert run.done == count
        return {
            **asdict(self), "jobs": count, "share_of_ideal": round(run.ideal / run.wall, 3),
            "jobs_per_hour": round(count / run.wall * 3600),
            "worker_minutes_per_job": round(run.paid / count / 60, 2), "driver_busy": round(run.busy / run.wall, 3),
            "died": run.deaths, "lost_hours": round(run.lost / 3600, 1),
        }  # fmt: skip


class Simulation:
    """One run of jobs whose sizes are seconds on a card of speed 1.

    Events come in the order of their times: a worker is free, or it died at a job and the driver has noticed. After
    :meth:`run`, ``wall`` has its seconds, ``ideal`` the seconds of the same jobs alone if every worker were busy with
    them to the end, ``paid`` the worker-seconds, each until nothing is left for it, and ``busy`` those of the driver.
    """

    def __init__(self, tasks: Sequence[Task], fleet: Farm, constants: Constants, seed: int = 0) -> None:
        self.fleet, self.constants, self.rng = fleet, constants, random.Random(seed)
        self.schedule = TaskSchedule()
        self.schedule.add(tasks)
        self.work = sum(task.size for task in tasks)
        self.speed = {str(index): speed for index, speed in enumerate(fleet.speeds)}
        self.events = [(0.0, number, name, "free", None) for number, name in enumerate(self.speed)]
        self.count = len(self.events)
        self.loaded: dict[str, str] = {}
        self.idle: dict[str, float] = {}
        self.free_at = self.busy = self.lost = self.wall = 0.0
        self.deaths = self.done = 0

    def run(self) -> Simulation:
        """The simulation, played until the last job is done."""
        while self.events:
            now, _, name, what, task = heapq.heappop(self.events)
            self.spend(now)
            if what == "died":
                self.schedule.put_back(task)
                for waiting in list(self.idle)[:1]:
                    self.idle.pop(waiting)
                    self.begin(waiting)
                continue
            if task is not None:
                self.done += 1
                self.wall = now
            self.begin(name)
        self.paid = sum(self.idle.values())
        self.ideal = self.work / sum(self.speed.values())
        return self

    def spend(self, now: float) -> None:
        """The driver handles one message."""
        self.free_at = max(self.free_at, now) + self.constants.driver / 2
        self.busy += self.constants.driver / 2

    def begin(self, name: str) -> None:
        """Give a worker its next job, and find out whether it lives to the end of it."""
        task = self.schedule.take(name)
        if task is None:
            self.idle[name] = self.free_at
            return
        self.spend(self.free_at)
        start, speed = self.free_at, self.speed[name]
        loading = 0.0 if self.loaded.get(name) == task.model else self.constants.load
        self.loaded[name] = task.model
        end = start + loading + task.size / speed
        rate = self.fleet.deaths / 3600
        death = start + self.rng.expovariate(rate) if rate else float("inf")
        if death >= end:
            self.put(end, name, "free", task)
            return
        self.deaths += 1
        worked = max(0.0, death - start - loading) * speed
        kept = worked // self.constants.step * self.constants.step if self.fleet.resume else 0.0
        self.lost += (worked - kept) / speed
        self.schedule.forget(name)
        self.loaded.pop(name)
        noticed = death + self.constants.notice
        self.put(noticed, name, "died", replace(task, size=task.size - kept))
        self.put(noticed + self.constants.restart + self.fleet.away, name, "free", None)

    def put(self, when: float, name: str, what: str, task: Task | None) -> None:
        """Schedule an event."""
        self.count += 1
        heapq.heappush(self.events, (when, self.count, name, what, task))


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
            progress.step(1, 2, ProgressStage("sampling"))
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


def measured(ray: Any) -> Iterator[tuple[str, float, str]]:
    """Name, value and unit of each figure."""
    rng = random.Random(SEED)
    lines = [f"{number} {rng.uniform(SHORTEST, LONGEST):.3f}" for number in range(JOBS)]
    tasks = [task_of(line) for line in lines]
    more, longest = with_driver(ray, 1, lambda driver: (overhead(driver), cancelled(driver)))
    yield "a job through Ray beyond the same call here", more, "s"
    yield "a cancel until the job has ended, longest of 10", longest, "s"

    def many(driver: Timed) -> Iterator[tuple[str, float, str]]:
        per_job = run(driver, [f"{number} 0" for number in range(20_000, 20_000 + JOBS)]) / JOBS
        yield "the driver's time for a job", per_job, "s"
        for deaths in (0, DEATHS):
            other = [f"{int(line.split()[0]) + 1000 * (1 + deaths)} {line.split()[1]}" for line in lines]
            wall = run(driver, other, deaths)
            away = statistics.mean(driver.away) if driver.away else 0.0
            what = f"{JOBS} jobs, {WORKERS} workers, {deaths} deaths"
            yield f"{what}: wall", wall, "s"
            yield f"{what}: share of ideal", sum(task.size for task in tasks) / WORKERS / wall, ""
            constants = Constants(driver=per_job, load=0.0, restart=away, notice=0.0, step=1e9)
            fleet = Farm("", WORKERS, 0, deaths=deaths / (wall * WORKERS) * 3600, resume=False)
            walls = [Simulation(tasks, fleet, constants, seed).run().wall for seed in range(200)]
            if deaths:
                yield "a worker is back after its death", away, "s"
            yield f"{what}: simulated", statistics.mean(walls), "s"
            yield "simulated against real", statistics.mean(walls) / wall, ""

    yield from with_driver(ray, WORKERS, lambda driver: list(many(driver)))


def farm_rows() -> Iterator[Row]:
    """A row per figure."""
    began = time.monotonic()
    ray = cluster.start_here(WORKERS, 0)
    figures = [("Ray starts on this machine", time.monotonic() - began, "s"), *measured(ray)]
    known = {"ray": ray.__version__, "load": round(psutil.getloadavg()[0], 1)}
    ray.shutdown()
    yield from (known | {"what": what, "value": round(value, 4), "unit": unit} for what, value, unit in figures)


def scale_rows() -> Iterator[Row]:
    """A row per simulated farm."""
    return (Farm(**farm).row(Constants()) for farm in data("farms"))


def no_ray() -> str:
    """The reason why no farm can start, or nothing."""
    return "" if find_spec("ray") else "Ray is not installed: pip install anygpu[farm]"
