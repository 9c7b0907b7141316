"""The order of jobs for idle workers: those of the loaded model first, of one model the largest, lest it end last."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any

FIRST_REST, LONGEST_REST = 30.0, 600.0  # seconds


@dataclass(slots=True)
class Rest:
    """The pause of something that failed: twice as long after each failure, until it succeeds."""

    count: int = 0  # of its failures in a row
    until: float = 0.0  # when it is tried again, in seconds of the driver's clock

    def begin(self, now: float) -> None:
        self.until = now + min(FIRST_REST * 2 ** min(self.count, 9), LONGEST_REST)
        self.count += 1


@dataclass(slots=True, eq=False)
class Task:
    """A job, and what the schedule knows of its attempts."""

    key: str  # hash of the job's content
    model: str  # key of the model that must be loaded for it
    size: float  # amount of work compared with others of this model, in any unit
    text: str = ""  # the job's line
    deaths: int = 0  # workers that died at it in a row without a further step
    begun: bool = False  # a worker has worked at it
    faults: int = 0  # failures of machines at it that were sound right after
    refused: dict[str, str] = field(default_factory=dict)  # by worker: why it cannot do this job
    # by worker that could not load the model for this job: its finished jobs of the model at the first time, and why
    unable: dict[str, tuple[int, str]] = field(default_factory=dict)


class TaskSchedule:
    """The jobs that wait, by model, and who has which model loaded."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Task]] = {}
        self._loaded: dict[str, str] = {}  # worker to model
        self._rests: dict[tuple[str, str], Rest] = {}  # worker and a model that its machine could not load

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, tasks: Iterable[Task]) -> None:
        """Queue jobs: of each model those begun first, then the largest."""
        added: dict[str, list[Task]] = {}
        for task in tasks:
            added.setdefault(task.model, []).append(task)
        for model, several in added.items():
            whole = sorted([*self._waiting.get(model, ()), *several], key=lambda task: (not task.begun, -task.size))
            self._waiting[model] = deque(whole)

    def put_back(self, task: Task, begun: bool = True) -> None:
        """Queue again a job that did not end, as the next of its model, or as the last if it is not ``begun``."""
        task.begun = begun
        waiting = self._waiting.setdefault(task.model, deque())
        (waiting.appendleft if begun else waiting.append)(task)

    def take(self, worker: str, now: float = 0.0) -> Task | None:
        """Dequeue the job that ``worker`` does next, noting its model as loaded; None if none waits for it ``now``."""
        model = self._choice(worker, now)
        if model is None:
            return None
        task = next(task for task in self._waiting[model] if worker not in task.refused)
        self.remove(task)
        self.forget(worker)
        self._loaded[worker] = model
        return task

    def remove(self, task: Task) -> bool:
        """Dequeue a job; returns True if it was waiting."""
        waiting = self._waiting.get(task.model, ())
        if task not in waiting:
            return False
        self._waiting[task.model].remove(task)
        if not waiting:
            del self._waiting[task.model]
        return True

    def refuse(self, worker: str, model: str, now: float = 0.0) -> None:
        """Give ``worker`` no job of ``model``, which its machine could not load, for a while."""
        self._rests.setdefault((worker, model), Rest()).begin(now)

    def accept(self, worker: str, model: str) -> None:
        """Forget that ``worker`` could not load ``model``: now it could."""
        self._rests.pop((worker, model), None)

    def refusals(self, worker: str, model: str) -> int:
        """Number of times in a row that ``worker`` could not load ``model``."""
        return self._rests.get((worker, model), Rest()).count

    def forget(self, worker: str) -> None:
        """Count ``worker`` no longer among those that have a model loaded: its process is gone."""
        self._loaded.pop(worker, None)

    def waiting(self) -> list[Task]:
        return [task for several in self._waiting.values() for task in several]

    def drop(self, keys: Container[str]) -> list[Task]:
        """Dequeue the waiting jobs with these keys, and return them."""
        dropped = [task for task in self.waiting() if task.key in keys]
        for task in dropped:
            self.remove(task)
        return dropped

    def _choice(self, worker: str, now: float) -> str | None:
        """The model for ``worker``: its loaded one while open, else the open one with most work per worker, or None."""

        def is_open(model: str) -> bool:
            rest = self._rests.get((worker, model))
            waiting = self._waiting.get(model, ())
            return (rest is None or rest.until <= now) and any(worker not in task.refused for task in waiting)

        loaded = self._loaded.get(worker)
        if loaded is not None and is_open(loaded):
            return loaded
        holders = Counter(self._loaded.values())
        work = {model: sum(task.size for task in self._waiting[model]) for model in filter(is_open, self._waiting)}
        return max(work, key=lambda model: work[model] / (1 + holders[model]), default=None)


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """A worker as the driver sees it."""

    name: str
    actor: Any  # Ray's handle
    start: Callable[[], Any]  # starts another actor in place of one that Ray has given up
    task: Task | None = None  # what it renders
    up: bool = False  # its process has answered
    broken: str = ""  # why it gets no jobs until it has rested and passed :meth:`.Worker.prove`
    sound: dict[str, int] = field(default_factory=dict)  # jobs done, by model
    rest: Rest = field(default_factory=Rest)  # from whatever broke it
    proving: bool = False  # the answer to its proof is awaited
    faults: int = 0  # times that it broke and was sound right after: others are given work first
    held: Task | None = None  # the job at which it broke, until the machine or the job is known to be at fault
    suspect: Task | None = None  # the job whose model it could not load, while another job of that model is tried
    host: str = ""
    finished: int = 0  # jobs
    deaths: int = 0  # of its processes
    began: float = 0.0  # when its job or its process began, in seconds of the driver's clock
    error: str = ""  # its latest, for those who see only the folder

    @property
    def state(self) -> str:
        busy = "rendering" if self.task else "idle"
        return "broken" if self.broken else busy if self.up else "waiting for a process"


@dataclass(slots=True)
class Tally:
    """Counts of a run's jobs; the reasons of those that failed, by key."""

    done: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    deaths: int = 0
