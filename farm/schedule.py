"""Which job a worker that has nothing to do is given next. Ray runs it; this only says in what order.

A worker goes on with the model that it has loaded. Of one model the largest jobs come first, since a long job that is
begun last is what everybody waits for in the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Task:
    """One job on its way.

    Args:
        key: of the job's content.
        model: what has to be loaded for it.
        size: how much work it is beside others of this model, in any unit.
        text: the job's line.
        deaths: how often its worker died without a further step.
        begun: whether a worker has worked at it.
    """

    key: str
    model: str
    size: float
    text: str = ""
    deaths: int = 0
    begun: bool = False


class Schedule:
    """The jobs that wait, by model, and who has which model loaded."""

    def __init__(self, tasks: Iterable[Task] = ()) -> None:
        self._waiting: dict[str, deque[Task]] = {}
        self._work: dict[str, float] = {}  # of the jobs that wait, by model
        self._loaded: dict[str, str] = {}  # worker to model
        self._holders: dict[str, int] = {}  # workers by model
        self._missing: dict[str, set[str]] = {}  # worker to models that its machine cannot load
        self.add(tasks)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, tasks: Iterable[Task]) -> None:
        """Take further jobs in."""
        added: dict[str, list[Task]] = {}
        for task in tasks:
            added.setdefault(task.model, []).append(task)
        for model, several in added.items():
            whole = sorted([*self._waiting.get(model, ()), *several], key=lambda task: (not task.begun, -task.size))
            self._waiting[model] = deque(whole)
            self._work[model] = sum(task.size for task in whole)

    def put_back(self, task: Task) -> None:
        """Take a job in again whose worker is gone: it is the next of its model, since it was begun."""
        task.begun = True
        self._waiting.setdefault(task.model, deque()).appendleft(task)
        self._work[task.model] = self._work.get(task.model, 0.0) + task.size

    def take(self, worker: str) -> Task | None:
        """The job that ``worker`` does next; None where no job waits that it can do."""
        model = self._choice(worker)
        if model is None:
            return None
        waiting = self._waiting[model]
        task = waiting.popleft()
        self._work[model] -= task.size
        if not waiting:
            del self._waiting[model], self._work[model]
        self.forget(worker)
        self._loaded[worker] = model
        self._holders[model] = self._holders.get(model, 0) + 1
        return task

    def refuse(self, worker: str, model: str) -> None:
        """Give ``worker`` no further job of ``model``, which its machine cannot load."""
        self._missing.setdefault(worker, set()).add(model)

    def forget(self, worker: str) -> None:
        """Count ``worker`` no longer among those that have a model loaded: its process is gone."""
        if (model := self._loaded.pop(worker, None)) is not None:
            self._holders[model] -= 1

    def without_worker(self, workers: Iterable[str]) -> list[Task]:
        """Take out the jobs that none of ``workers`` can do."""
        everybody = list(workers)
        stuck = [m for m in self._waiting if all(m in self._missing.get(worker, ()) for worker in everybody)]
        tasks = [task for model in stuck for task in self._waiting.pop(model)]
        for model in stuck:
            del self._work[model]
        return tasks

    def drop(self, keys: Iterable[str]) -> list[Task]:
        """Take out the waiting jobs of ``keys``."""
        unwanted = set(keys)
        dropped = [task for several in self._waiting.values() for task in several if task.key in unwanted]
        if dropped:
            kept = [task for several in self._waiting.values() for task in several if task.key not in unwanted]
            self._waiting, self._work = {}, {}
            self.add(kept)
        return dropped

    def _choice(self, worker: str) -> str | None:
        """The loaded model while it has jobs; else the one with most work per worker that has it."""
        missing = self._missing.get(worker, ())
        loaded = self._loaded.get(worker)
        if loaded in self._waiting and loaded not in missing:
            return loaded
        open_models = [model for model in self._waiting if model not in missing]
        return max(open_models, key=lambda model: self._work[model] / (1 + self._holders.get(model, 0)), default=None)
