"""Hands the jobs of a folder to workers, takes back what became of them, and writes down what nobody can do.

The driver remembers nothing that the folder does not have: another one goes on where it was killed.
"""

from __future__ import annotations

import os
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
from .worker import BROKEN, CANCELLED, DONE, FAILED, UNABLE, Outcome, Worker

MOST_DEATHS = 3  # of a job's workers without one further step: then it is the job that kills them
LOOK_SECONDS = 0.5  # between looks for cancelled jobs
SHOW_SECONDS = 2.0  # between two writings of what the workers do
ANSWERS = 4  # threads of a worker: one renders, the others tell of it
Say = Callable[[str], None]


@dataclass(slots=True)
class Hand:
    """A worker as the driver sees it.

    Args:
        actor: Ray's handle. task: what it renders. up: whether its process has answered. broken: why it gets no jobs.
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
        ray: the package, connected. task_of: a line to its task. reached: grows with the steps of a job that are kept.
        say: takes a line about each thing that happens.
    """

    def __init__(
        self, ray: Any, folder: JobFolder, task_of: Callable[[str], Task], reached: Callable[[Task], float], say: Say
    ) -> None:
        self.watching = False
        self.ray, self.folder, self.task_of, self.reached, self.say = ray, folder, task_of, reached, say
        self.name = f"{socket.gethostname()}-{os.getpid()}"
        self.schedule, self.hands, self.tally = Schedule(), [], Tally()
        self._calls: dict[Any, Hand] = {}
        self._open: set[str] = set()  # keys of jobs that wait or run
        self._read: dict[Path, int] = {}  # job files of a watched folder, and when each was changed
        self._looked = self._shown = 0.0
        self._steps: dict[str, float] = {}

    def hire(self, count: int, renderer: Any, needs: dict[str, float]) -> None:
        """Have Ray start ``count`` workers, each with ``needs`` (``num_cpus``, ``num_gpus``), once there is room."""
        actor = self.ray.remote(Worker)
        for _ in range(count):
            hand = Hand(f"{self.name}-{len(self.hands)}", None)
            options = {"name": hand.name, "max_restarts": -1, "max_concurrency": ANSWERS, **needs}
            hand.actor = actor.options(**options).remote(renderer)
            self.hands.append(hand)
            self._wait_for(hand)

    def add(self, lines: Iterable[str], again: bool) -> None:
        """Take jobs in that are not done; those that failed or were cancelled only where asked ``again``."""
        done, tasks = self.folder.done_keys(), []
        for line in lines:
            try:
                task = self.task_of(line)
            except PackError as error:
                self.say(f"a line is no job: {error}")
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
        while self.schedule or any(hand.task for hand in self.hands):
            self.turn()
        self._show(time.monotonic())
        return self.tally

    def turn(self) -> None:
        """Give work to whoever is free, then wait a moment for whatever happens first."""
        for hand in self.hands:
            if hand.up and hand.task is None and not hand.broken:
                self._give(hand)
        if self.schedule and not any(hand.task for hand in self.hands):
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
        ready, _ = self.ray.wait(list(self._calls), num_returns=1, timeout=LOOK_SECONDS)
        for call in ready:
            self._take(call, self._calls.pop(call))

    def _give(self, hand: Hand) -> None:
        task = self.schedule.take(hand.name)
        if task is not None:
            hand.task, hand.began = task, time.monotonic()
            self._calls[hand.actor.run.remote(task)] = hand

    def _wait_for(self, hand: Hand) -> None:
        """Count ``hand`` as up once its process answers: a call that is sent while Ray restarts it fails at once."""
        hand.up, hand.task = False, None
        ready = hand.actor.ready.options(max_task_retries=-1)
        self._calls[ready.remote()] = hand

    def _take(self, call: Any, hand: Hand) -> None:
        """Take in what became of a call."""
        try:
            answer = self.ray.get(call)
        except self.ray.exceptions.RayActorError as error:
            if hand.up:
                self._died(hand)
            else:  # Ray retries this call for as long as it restarts the process: it has given it up
                self._broke(hand, str(error).strip().splitlines()[-1])
            return
        except self.ray.exceptions.RayError as error:
            self._broke(hand, first_line(error))
            return
        if isinstance(answer, Outcome):
            self._ended(hand, answer)
        else:
            self._came_up(hand, answer)

    def _came_up(self, hand: Hand, who: dict[str, Any]) -> None:
        if not who["token"]:
            raise InputError(
                f"a worker on {who['host']} without token mode",
                expected="RAY_AUTH_MODE=token wherever `ray start` runs",
                fix="Anyone who reaches that machine runs code on it: stop Ray there, and start it with a token.",
            )
        hand.up, hand.host = True, str(who["host"])

    def _ended(self, hand: Hand, outcome: Outcome) -> None:
        task, hand.task = hand.task, None
        assert task is not None
        if outcome.status == DONE:
            hand.finished += 1
            self.tally.done += 1
            self._open.discard(task.key)
            self.say(f"{task.key[:12]} done by {hand.name} in {outcome.seconds:.1f} s")
        elif outcome.status in (FAILED, CANCELLED):
            self._fail(task, outcome.text)
        else:
            hand.error = f"{hand.name} on {hand.host}: {outcome.text}"
            self.say(hand.error)
            if outcome.status == UNABLE:
                self.schedule.refuse(hand.name, task.model)
            if outcome.status == BROKEN:
                hand.broken = outcome.text
            self.schedule.put_back(task)

    def _died(self, hand: Hand) -> None:
        """A worker's process or machine is gone: its job goes on elsewhere, from its last step."""
        task = hand.task
        hand.deaths += 1
        self.tally.deaths += 1
        self.schedule.forget(hand.name)
        self._wait_for(hand)
        if task is None:
            return
        reached = self.reached(task)
        task.deaths = task.deaths + 1 if reached <= self._steps.get(task.key, 0) else 1
        self._steps[task.key] = reached
        self.say(f"{task.key[:12]}: {hand.name} died; the job goes on{' from its last step' if reached else ''}")
        if task.deaths >= MOST_DEATHS:
            self._fail(task, f"{task.deaths} workers died at this job without a further step")
        else:
            self.schedule.put_back(task)

    def _broke(self, hand: Hand, text: str) -> None:
        """A worker gets no jobs any more, such as one whose packages cannot be imported; others do its job."""
        hand.broken = text
        if hand.task is not None:
            self.schedule.put_back(hand.task)
            hand.task = None
        self.say(f"{hand.name}: {text}")

    def _fail(self, task: Task, text: str) -> None:
        self.folder.fail(task.key, text)
        self.tally.failed[task.key] = text
        self._open.discard(task.key)
        self.say(f"{task.key[:12]} failed: {text}")

    def _refuse_what_nobody_can(self) -> None:
        """Fail the jobs that every worker has refused; all of them once no worker is left."""
        usable = [hand.name for hand in self.hands if not hand.broken]
        errors = "; ".join(dict.fromkeys(hand.error or hand.broken for hand in self.hands if hand.error or hand.broken))
        for task in self.schedule.without_worker(usable):
            self._fail(task, errors)

    def _cancel(self) -> None:
        keys = self.folder.cancelled() & self._open
        if not keys:
            return
        for task in self.schedule.drop(keys):
            self._fail(task, CANCELLED)
        for hand in self.hands:
            if hand.task is not None and hand.task.key in keys:
                hand.actor.cancel.remote(hand.task.key)

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
                    "worker": hand.name,
                    "host": hand.host,
                    "job": hand.task.key if hand.task else "",
                    "state": state_of(hand),
                    "seconds": round(now - hand.began, 1) if hand.task else 0.0,
                    "finished": hand.finished,
                    "deaths": hand.deaths,
                    "error": hand.error or hand.broken,
                }
                for hand in self.hands
            ],
        )


def state_of(hand: Hand) -> str:
    """A worker's state in a word or two."""
    if hand.broken:
        return "broken"
    if not hand.up:
        return "waiting for a process"
    return "rendering" if hand.task else "idle"


def lines_in(paths: Iterable[Path]) -> list[str]:
    """The lines of several job files."""
    return [line for path in paths for line in lines_of(path)]
