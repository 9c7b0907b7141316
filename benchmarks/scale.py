"""A farm of 1 to 10,000 workers on paper: discrete events, with the order of jobs of the farm itself.

    python benchmarks/scale.py       # writes benchmarks/results/scale.csv, the tables of docs/scale.md

``farm.schedule`` decides who does what, as in a real run. The driver's time is measured (``benchmarks/farm.py``, which
also sets this simulation against real Ray); the times of videos, loads and deaths are modelled: none of them was taken
on a GPU.
"""

from __future__ import annotations

import csv
import heapq
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from anygpu.farm.schedule import Task, TaskSchedule

TABLE = Path(__file__).resolve().parent / "results" / "scale.csv"
LONG, SHORT = 600.0, 17.0  # seconds of a job: HunyuanVideo at 480p, LTX-Video 2B, on one large card; modelled
SPREAD = 0.5  # of the logarithm of the times of jobs
DAY, OFTEN = 1 / 24, 1 / 4  # deaths of a machine per hour: a usual one, a spot machine


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
class Fleet:
    """The workers.

    Args:
        speeds: of each, 1 for the card that job sizes are seconds of. deaths_per_hour: of each worker's machine.
        resume: whether a job goes on from its last step. away: seconds until a machine that died is replaced.
    """

    speeds: Sequence[float]
    deaths_per_hour: float = 0.0
    resume: bool = True
    away: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """What one run took.

    Args:
        wall: seconds. ideal: seconds that the same jobs and loads would take if every worker were busy to the end.
        paid: worker-seconds, each until nothing is left for it. driver: share of the time that the driver is busy.
    """

    wall: float
    ideal: float
    paid: float
    deaths: int
    lost: float
    driver: float
    done: int


def simulate(tasks: Sequence[Task], fleet: Fleet, constants: Constants, seed: int = 0) -> Run:
    """One run of ``tasks``, whose sizes are seconds on a card of speed 1."""
    return _Simulation(tasks, fleet, constants, random.Random(seed)).run()


class _Simulation:
    """Events in the order of their times: a worker is free, or it died at a job and the driver has noticed."""

    def __init__(self, tasks: Sequence[Task], fleet: Fleet, constants: Constants, rng: random.Random) -> None:
        self.fleet, self.constants, self.rng = fleet, constants, rng
        self.schedule = TaskSchedule(tasks)
        self.work = sum(task.size for task in tasks)
        self.speed = {str(index): speed for index, speed in enumerate(fleet.speeds)}
        self.events = [(0.0, number, name, "free", None) for number, name in enumerate(self.speed)]
        self.count = len(self.events)
        self.loaded: dict[str, str] = {}
        self.idle: dict[str, float] = {}
        self.free_at = self.busy = self.lost = self.wall = self.loads = 0.0
        self.deaths = self.done = 0

    def run(self) -> Run:
        """What it took until the last job was done."""
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
        paid = sum(self.idle.values())
        ideal = (self.work + self.loads) / sum(self.speed.values())
        return Run(self.wall, ideal, paid, self.deaths, self.lost, self.busy / self.wall, self.done)

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
        self.loads += loading * speed
        self.loaded[name] = task.model
        end = start + loading + task.size / speed
        rate = self.fleet.deaths_per_hour / 3600
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
        """Have something happen later."""
        self.count += 1
        heapq.heappush(self.events, (when, self.count, name, what, task))


@dataclass(frozen=True, slots=True)
class Case:
    """One row: a fleet, its jobs, and what they are like.

    Args:
        each: jobs per worker. mean: seconds of a job. models: how many the jobs are of. slow: share of the workers that
            have 0.4 of the others' speed.
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

    def row(self, constants: Constants) -> dict[str, str | int | float]:
        """The case and what it took."""
        rng = random.Random(1)
        count = self.workers * self.each
        low = math.log(self.mean) - SPREAD**2 / 2
        tasks = [
            Task(str(n), f"model {rng.randrange(self.models)}", rng.lognormvariate(low, SPREAD)) for n in range(count)
        ]
        speeds = [0.4 if n < self.slow * self.workers else 1.0 for n in range(self.workers)]
        run = simulate(tasks, Fleet(speeds, self.deaths, self.resume, self.away), constants)
        assert run.done == count
        return {
            **asdict(self),
            "jobs": count,
            "share_of_ideal": round(run.ideal / run.wall, 3),
            "jobs_per_hour": round(count / run.wall * 3600),
            "worker_minutes_per_job": round(run.paid / count / 60, 2),
            "driver_busy": round(run.driver, 3),
            "died": run.deaths,
            "lost_hours": round(run.lost / 3600, 1),
        }


def cases() -> list[Case]:
    """Every row, by table."""
    sizes = [Case("size", workers, 60) for workers in (1, 8, 64, 200, 1000, 4000, 10_000)]
    sizes.append(Case("size", 10_000, 100))
    deaths = [
        Case("deaths", workers, 60, deaths=rate, resume=resume)
        for workers in (8, 200, 1000)
        for rate, resume in ((DAY, True), (DAY, False), (OFTEN, True), (OFTEN, False))
    ]
    spot = [
        Case("spot", 200, 30, deaths=OFTEN, away=600.0, resume=resume, mean=mean)
        for mean in (LONG, 4 * LONG)
        for resume in (True, False)
    ]
    driver = [Case("driver", workers, 60, mean=SHORT) for workers in (8, 200, 1000, 2000, 4000, 10_000)]
    unequal = [Case("unequal", 64, each, slow=slow) for slow in (0.0, 0.5) for each in (2, 6, 30)]
    models = [Case("models", 16, 30, models=count, mean=mean) for count in (1, 4, 16, 64) for mean in (LONG, SHORT)]
    return [*sizes, *deaths, *spot, *driver, *unequal, *models]


def main() -> None:
    """Simulate every case and write the table."""
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = None
        for case in cases():
            began = time.monotonic()
            row = case.row(Constants())
            writer = writer or csv.DictWriter(file, row)
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
            print(row, f"{time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
