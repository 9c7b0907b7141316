"""Hands the jobs of a folder to workers, takes back what became of them, and writes down which ones failed.

The driver remembers nothing that the folder does not have: another one goes on where it was killed.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ..compat.device.facts import first_line, value_or
from ..compat.errors import InputError, PackError
from ..pipelines.job_folder import JobFolder, lines_of
from .schedule import Schedule, Task
from .worker import BROKEN, CANCELLED, DONE, FAILED, LOST, UNABLE, Outcome, Worker

MOST_DEATHS = 3  # of a job's workers without one further step: then it is the job that kills them
LOOK_SECONDS = 0.5  # between looks for cancelled jobs
SHOW_SECONDS = 2.0  # between two writings of what the workers do
ANSWERS = 4  # threads of a worker: one renders, the others tell of it
Say = Callable[[str], None]


@dataclass(slots=True)
class WorkerHandle:
    """A worker as the driver sees it.

    Args:
        actor: Ray's handle.
        task: what it renders.
        up: whether its process has answered.
        broken: why it gets no jobs.
    """

    name: str
    actor: Any
    task: Task | None = None
    up: bool = False
    broken: str = ""
    host: str = ""
    finished: int = 0
    deaths: int = 0
    began: float = 0.0
    error: str = ""


@dataclass(slots=True)
class Tally:
    """What became of the jobs so far."""

    done: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    deaths: int = 0


class Driver:
    """One driver over one folder.

    Args:
        ray: the package, connected.
        task_of: a line to its task.
        reached: grows with the steps of a job that are kept.
        say: takes a line about each thing that happens.
    """

    def __init__(
        self, ray: Any, folder: JobFolder, task_of: Callable[[str], Task], reached: Callable[[Task], float], say: Say
    ) -> None:
        self.watching = False
        self.ray, self.folder, self.task_of, self.reached, self.say = ray, folder, task_of, reached, say
        # In a container that was started again, host and process are those of the driver whose workers Ray still ends.
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self.schedule, self.workers, self.tally = Schedule(), [], Tally()
        self._calls: dict[Any, WorkerHandle] = {}
        self._open: set[str] = set()  # keys of jobs that wait or run
        self._read: dict[Path, int] = {}  # job files of a watched folder, and when each was changed
        self._looked = self._shown = 0.0
        self._steps: dict[str, float] = {}

    def start_workers(self, count: int, renderer: Any, needs: dict[str, float]) -> None:
        """Have Ray start ``count`` workers, each with ``needs`` (``num_cpus``, ``num_gpus``), once there is room."""
        actor = self.ray.remote(Worker)
        for _ in range(count):
            worker = WorkerHandle(f"{self.name}-{len(self.workers)}", None)
            options = {"name": worker.name, "max_restarts": -1, "max_concurrency": ANSWERS, **needs}
            worker.actor = actor.options(**options).remote(renderer)
            self.workers.append(worker)
            self._wait_for(worker)

    def add(self, lines: Iterable[str], again: bool) -> None:
        """Take jobs in that are not done; those that failed or were cancelled only where asked ``again``."""
        done, tasks = self.folder.done_keys(), []
        for line in lines:
            try:
                task = self.task_of(line)
            except PackError as error:
                self.say(f"a line is not a job: {error}")
                self.tally.failed[line[:60]] = str(error)
                continue
            if task.key in self._open:
                continue
            if task.key in done:
                self.tally.skipped += 1
            elif again or not self.folder.failure(task.key):
                self._open.add(task.key)
                tasks.append(task)
        if again:
            self.folder.ask_again(task.key for task in tasks)
        self.schedule.add(tasks)

    def watch(self) -> NoReturn:
        """Work at whatever is put into the folder, for ever."""
        self.watching = True
        while True:
            self.turn()

    def run(self) -> Tally:
        """Work until nothing waits and nothing runs."""
        while self.schedule or any(worker.task for worker in self.workers):
            self.turn()
        self._show(time.monotonic())
        return self.tally

    def turn(self) -> None:
        """Give work to free workers, then wait a moment for the first event."""
        for worker in self.workers:
            if worker.up and worker.task is None and not worker.broken:
                self._give(worker)
        if self.schedule and not any(worker.task for worker in self.workers):
            self._refuse_what_nobody_can()
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._cancel()
            if self.watching:
                self._read_jobs()
        if now - self._shown >= SHOW_SECONDS:
            self._show(now)
        if not self._calls:
            time.sleep(LOOK_SECONDS)
            return
        rest = max(0.0, self._looked + LOOK_SECONDS - time.monotonic())
        ready, _ = self.ray.wait(list(self._calls), num_returns=1, timeout=rest)
        for call in ready:
            self._take(call, self._calls.pop(call))

    def _give(self, worker: WorkerHandle) -> None:
        task = self.schedule.take(worker.name)
        if task is not None:
            worker.task, worker.began = task, time.monotonic()
            self._calls[worker.actor.run.remote(task)] = worker

    def _wait_for(self, worker: WorkerHandle) -> None:
        """Count ``worker`` as up once its process answers: a call that is sent while Ray restarts it fails at once."""
        worker.up, worker.task = False, None
        ready = worker.actor.ready.options(max_task_retries=-1)
        self._calls[ready.remote()] = worker

    def _take(self, call: Any, worker: WorkerHandle) -> None:
        """Take in what became of a call."""
        try:
            answer = self.ray.get(call)
        except self.ray.exceptions.RayActorError as error:
            if worker.up:
                self._died(worker)
            else:  # Ray retries this call for as long as it restarts the process: it has given it up
                self._broke(worker, str(error).strip().splitlines()[-1])
            return
        except self.ray.exceptions.RayError as error:
            self._broke(worker, first_line(error))
            return
        if isinstance(answer, Outcome):
            self._ended(worker, answer)
        else:
            self._came_up(worker, answer)

    def _came_up(self, worker: WorkerHandle, who: dict[str, Any]) -> None:
        if not who["token"]:
            raise InputError(
                f"a worker on {who['host']} without token mode",
                expected="RAY_AUTH_MODE=token wherever `ray start` runs",
                fix="Anyone who reaches that machine runs code on it: stop Ray there, and start it with a token.",
            )
        worker.up, worker.host = True, str(who["host"])

    def _ended(self, worker: WorkerHandle, outcome: Outcome) -> None:
        task, worker.task = worker.task, None
        assert task is not None
        if outcome.status == DONE:
            worker.finished += 1
            self.tally.done += 1
            self._open.discard(task.key)
            self.say(f"{task.key[:12]} done by {worker.name} in {outcome.seconds:.1f} s")
        elif outcome.status in (FAILED, CANCELLED):
            self._fail(task, outcome.text)
        elif outcome.status == LOST:
            worker.error = f"{worker.name} on {worker.host}: {outcome.text}"
            self._lost(worker, task, outcome.text)
        else:
            worker.error = f"{worker.name} on {worker.host}: {outcome.text}"
            self.say(worker.error)
            if outcome.status == UNABLE:
                self.schedule.refuse(worker.name, task.model)
            if outcome.status == BROKEN:
                worker.broken = outcome.text
            self.schedule.put_back(task)

    def _died(self, worker: WorkerHandle) -> None:
        """A worker's process or machine is gone: its job goes on elsewhere, from its last step."""
        task = worker.task
        self.schedule.forget(worker.name)
        self._wait_for(worker)
        self._lost(worker, task, f"{worker.name} died")

    def _lost(self, worker: WorkerHandle, task: Task | None, why: str) -> None:
        """A job lost the processes that rendered it: it goes on, but not for ever where it never comes further."""
        worker.deaths += 1
        self.tally.deaths += 1
        if task is None:
            return
        reached = self.reached(task)
        task.deaths = task.deaths + 1 if reached <= self._steps.get(task.key, 0) else 1
        self._steps[task.key] = reached
        self.say(f"{task.key[:12]}: {why.rstrip('.')}; the job goes on{' from its last step' if reached else ''}")
        if task.deaths >= MOST_DEATHS:
            self._fail(task, f"{task.deaths} workers died at this job without a further step, at last: {why}")
        else:
            self.schedule.put_back(task)

    def _broke(self, worker: WorkerHandle, text: str) -> None:
        """A worker gets no jobs any more, such as one whose packages cannot be imported; others do its job."""
        worker.broken = text
        if worker.task is not None:
            self.schedule.put_back(worker.task)
            worker.task = None
        self.say(f"{worker.name}: {text}")

    def _fail(self, task: Task, text: str) -> None:
        self.folder.fail(task.key, text)
        self.tally.failed[task.key] = text
        self._open.discard(task.key)
        self.say(f"{task.key[:12]} failed: {text}")

    def _refuse_what_nobody_can(self) -> None:
        """Fail the jobs that every worker has refused; all of them once no worker is left."""
        usable = [worker.name for worker in self.workers if not worker.broken]
        said = (worker.error or worker.broken for worker in self.workers)
        errors = "; ".join(dict.fromkeys(filter(None, said)))
        for task in self.schedule.without_worker(usable):
            self._fail(task, errors)

    def _cancel(self) -> None:
        keys = self.folder.cancelled() & self._open
        if not keys:
            return
        for task in self.schedule.drop(keys):
            self._fail(task, CANCELLED)
        for worker in self.workers:
            if worker.task is not None and worker.task.key in keys:
                worker.actor.cancel.remote(worker.task.key)

    def _read_jobs(self) -> None:
        """Take in the jobs of files that are new or were written again."""
        for path in self.folder.job_files():
            changed = value_or(lambda path=path: path.stat().st_mtime_ns, 0)
            if changed and self._read.get(path) != changed:
                self._read[path] = changed
                self.add(lines_of(path), again=False)

    def _show(self, now: float) -> None:
        """Write down what the workers do, for those who see only the folder."""
        self._shown = now
        self.folder.write_workers(
            self.name,
            [
                {
                    "worker": worker.name,
                    "host": worker.host,
                    "job": worker.task.key if worker.task else "",
                    "state": state_of(worker),
                    "seconds": round(now - worker.began, 1) if worker.task else 0.0,
                    "finished": worker.finished,
                    "deaths": worker.deaths,
                    "error": worker.error or worker.broken,
                }
                for worker in self.workers
            ],
        )


def state_of(worker: WorkerHandle) -> str:
    """A worker's state in a word or two."""
    if worker.broken:
        return "broken"
    if not worker.up:
        return "waiting for a process"
    return "rendering" if worker.task else "idle"


def lines_in(paths: Iterable[Path]) -> list[str]:
    """The lines of several job files."""
    return [line for path in paths for line in lines_of(path)]
