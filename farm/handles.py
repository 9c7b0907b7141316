"""The workers as the driver sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .schedule import Rest, Task


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """A worker as the driver sees it.

    Args:
        actor: Ray's handle.
        task: what it renders.
        start: starts another actor in place of one that Ray has given up.
        up: whether its process has answered.
        broken: why it gets no jobs until it has rested and proved itself.
        sound: jobs done, by model.
        rest: from whatever broke it.
        proving: whether it does so now.
        faults: how often it broke and was sound right after: others are given work first.
        held: the job at which it broke: it goes on once the machine or the job is known to be at fault.
        suspect: the job for which it could not load a model, while another of that model shows which is at fault.
    """

    name: str
    actor: Any
    start: Callable[[], Any] | None = None
    task: Task | None = None
    up: bool = False
    broken: str = ""
    sound: dict[str, int] = field(default_factory=dict)
    rest: Rest = field(default_factory=Rest)
    proving: bool = False
    faults: int = 0
    held: Task | None = None
    suspect: Task | None = None
    host: str = ""
    finished: int = 0
    deaths: int = 0
    began: float = 0.0
    error: str = ""


@dataclass(slots=True)
class Tally:
    """The results of the jobs so far."""

    done: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    deaths: int = 0


def state_of(worker: WorkerHandle) -> str:
    """A worker's state in a word or two."""
    if worker.broken:
        return "broken"
    if not worker.up:
        return "waiting for a process"
    return "rendering" if worker.task else "idle"
