"""Memory statistics of a run: bytes copied to the device, the time it waited for them, and the peak of each stage."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from heapq import nlargest
from itertools import accumulate, pairwise
from operator import sub
from pathlib import Path
from typing import Any

import torch

from ..device.facts import GIBIBYTE, MEBIBYTE, indexed, peak_bytes, reset_peak, synchronize, value_or
from ..durable import write_json
from ..errors import PackError, json_file, json_within
from .parts import ProgressStage

FILE = "memory.json"
KEPT = 60  # stages, the newest last
WORTH_SHOWING = 0.1  # seconds of a step, from which on its pace is shown
# Shares of all steps: that a change of load must last, and that are looked back on, at least a cycle of a step cache.
LATEST, LAST, PERIOD = 0.1, 0.25, 9
CHANGED = 1.2  # times as long as each step before, or as short: a change of load
WAITED = 2.0  # times as long as all others of the last steps: a step that waited for something else
WORTH_TELLING = 5.0  # seconds of a stage, from which on it is shown beside its forecast


@dataclass(frozen=True, slots=True)
class StageNeed:
    """Memory that one stage needs on the device, in bytes: resident weights, its own weights, activations."""

    name: str
    kept: int
    weights: int
    activations: int
    form: str = ""  # how it is computed, if not whole, such as ``in chunks of 4 latent frames in bf16``
    ahead: int = 0  # of weights that come ahead or stay, which the stage can do without
    device: str = ""  # on which it computes, if not the pipeline's own
    room: int | None = None  # that it may take on this device
    stays: int = 0  # of weights that may stay

    @property
    def total(self) -> int:
        """Bytes at the stage's peak, with nothing ahead."""
        return self.kept + self.weights + self.activations


@dataclass(slots=True)
class StageCost:
    """One stage of one run."""

    stage: str
    pipeline: str
    mode: str
    device: str
    peak_bytes: int = 0  # of this process on the device; 0 where unknown
    moved_bytes: int = 0  # to the device and back
    moving_seconds: float = 0.0  # that it waited for them
    seconds: float = 0.0
    date: str = ""
    reading_seconds: float = 0.0  # of weights from disk
    precision: str = ""
    modelled_seconds: float = 0.0  # at the device's rates, without reading; 0 if unknown
    forecast_seconds: float = 0.0  # as the user was told, without reading
    first: bool = False  # nothing ran before it, so that it also imported libraries
    work: str = ""  # key of what it computed and how; empty in old rows
    ended: float = 0.0  # in seconds since 1970; 0 in old rows
    card: str = ""  # of ``DeviceFacts``; empty in old rows, which may be another card's and correct no forecast

    @property
    def own_seconds(self) -> float:
        return self.seconds - self.reading_seconds

    @property
    def against_forecast(self) -> str:
        """Time taken against the forecast, such as ``sampling took 61.0 s, 58.3 s forecast``; empty without one."""
        if not self.forecast_seconds:
            return ""
        imports = " with imports" if self.first else ""
        return f"{self.stage} took {self.own_seconds:.1f} s{imports}, {self.forecast_seconds:.1f} s forecast"

    def __str__(self) -> str:
        peak = f"peak {amount_of(self.peak_bytes)}, " if self.peak_bytes else ""
        slower = self.seconds / max(self.seconds - self.moving_seconds, 1e-9)
        times = f"{self.moving_seconds:.1f} of {self.seconds:.1f} s, {slower:.2f} times the time without copies"
        moved = f"moved {amount_of(self.moved_bytes)} in {times}" if self.moved_bytes else "nothing moved"
        return f"{self.stage} with offload {self.mode}: {peak}{moved}"


@dataclass(slots=True)
class MemoryStats:
    """Statistics of one pipeline's offloader: bytes moved so far, and finished stages.
    ``state`` is the folder that keeps the last ones for `anygpu report --memory`."""

    state: Path | None = None
    moved_bytes: int = 0
    moving_seconds: float = 0.0
    stages: list[StageCost] = field(default_factory=list)
    behind: deque[tuple[torch.Event, torch.Event]] = field(default_factory=deque)  # around copies nobody waits for

    def add(self, count: int, seconds: float) -> None:
        self.moved_bytes, self.moving_seconds = self.moved_bytes + count, self.moving_seconds + seconds

    @contextmanager
    def moving(self, count: int) -> Iterator[None]:
        """Add ``count`` bytes, and the seconds of the block, in which the host waits for them to move."""
        started = time.perf_counter()
        yield
        self.add(count, time.perf_counter() - started)

    @contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Time the block, in which ``device``, but not the host, waits for copies, by events that are read later."""
        while self.behind and self.behind[0][1].query():
            self._take_first()
        first = value_or(lambda: _mark(device), None)
        yield
        last = value_or(lambda: _mark(device), None)
        if first is not None and last is not None:
            self.behind.append((first, last))

    @contextmanager
    def stage(self, name: str, pipeline: str, mode: str, device: torch.device, **forecast: Any) -> Iterator[StageCost]:
        """The cost of the block, complete and saved once that ends without an error; ``forecast`` sets fields of it."""
        cost = StageCost(name, pipeline, mode, str(indexed(device)), first=not self.stages, **forecast)
        self._settle()  # copies of a stage that was cancelled
        before = self.moved_bytes, self.moving_seconds
        reset_peak(device)
        started = time.perf_counter()
        yield cost
        synchronize(device)
        self._settle()
        cost.seconds = time.perf_counter() - started
        cost.moved_bytes, cost.moving_seconds = self.moved_bytes - before[0], self.moving_seconds - before[1]
        cost.peak_bytes = peak_bytes(device) or 0
        cost.ended, cost.date = time.time(), time.strftime("%Y-%m-%d %H:%M")
        self.stages = [*self.stages, cost][-KEPT:]
        self._keep(cost)

    def _settle(self) -> None:
        """Add the time of asynchronous copies once the device has finished them."""
        for _, last in self.behind:
            value_or(lambda last=last: last.synchronize(), None)  # type: ignore[misc]
        while self.behind:
            self._take_first()

    def _take_first(self) -> None:
        """Add the time of the oldest asynchronous copy; nothing if the driver does not report it."""
        first, last = self.behind.popleft()
        with suppress(RuntimeError):  # an error here would lose the finished work of the stage
            self.moving_seconds += first.elapsed_time(last) / 1000.0

    def _keep(self, cost: StageCost) -> None:
        """Append ``cost`` to the saved stages, if there is a folder for them."""
        if self.state is None:
            return
        rows = [*saved_stages(self.state), cost][-KEPT:]
        with suppress(OSError):  # a full disk or a read-only folder costs the report, not the run
            write_json(self.state / FILE, [asdict(row) for row in rows], indent=1)


def _mark(device: torch.device) -> torch.Event:
    """An event behind the work of ``device`` so far."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))  # by default it would be the current device's stream
    return event


@contextmanager
def stage_cost(
    pipeline: Any, name: str, progress: Any, device: torch.device | None = None, **forecast: Any
) -> Iterator[StageCost]:
    """Record the block as a stage on ``device`` (None: the pipeline's own) in a pipeline's statistics; yields its cost.
    ``forecast`` has fields of the cost that are known before; ``progress`` is told how a long stage compares."""
    offloader, parts = pipeline.offloader, pipeline.parts
    title, before = f"{pipeline.family} {pipeline.variant}", parts.reading_seconds
    with offloader.memory_stats.stage(name, title, offloader.mode, device or offloader.device, **forecast) as cost:
        yield cost
        cost.mode, cost.precision = offloader.mode, str(pipeline.precision)
        cost.reading_seconds = parts.reading_seconds - before
    if progress is not None and max(cost.own_seconds, cost.forecast_seconds) >= WORTH_TELLING and cost.against_forecast:
        progress.notify(cost.against_forecast)


def saved_stages(state: Path) -> list[StageCost]:
    """The last stages of all pipelines, the newest last; none if the file is missing or any of its rows is damaged."""
    try:
        costs = [StageCost(**row) for row in json_file(state / FILE)]
        for cost in costs:  # use every field as readers do: in an edited file one may be of another type
            f"{cost}{cost.own_seconds:f}{cost.modelled_seconds:f}{cost.forecast_seconds:f}"
            {**json_within(cost.work or "{}", "a key")}
        return [cost for cost in costs if cost.ended >= 0]
    except (PackError, OSError, ValueError, TypeError, ArithmeticError):
        return []


def duration(seconds: float) -> str:
    """Seconds in words: ``40 s``, ``14 min``, ``2.5 h``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.2g} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class TimeLeft:
    """Time left of a stage by the pace of its last steps: enough of them that the skips of a step cache come around.
    A step far longer than the others counts like them, and after a change of load only the steps since then count.
    ``forwards`` is the number of forwards in each step of a section; forwards take equally long."""

    def __init__(self, forwards: Sequence[int] = (1,)) -> None:
        self.forwards = forwards
        self.began = 0.0, 0  # when the first step ended, a later one if resumed, and its number
        self.alike = False  # True if steps, not forwards, take equally long: each waits for the same copies
        self.ends: list[tuple[float, int, int]] = []  # of the last steps: moment, steps and forwards so far

    def after(self, moment: float, done: int, total: int) -> str:
        """Seconds per step and what is left, such as ``, 4.1 s each, about 70 s left``, once step ``done`` has ended at
        ``moment``, in seconds of any clock; empty for a first step, which also loads and tunes."""
        if not self.ends or done <= self.ends[-1][1]:  # begun anew
            self.ends, self.alike, self.began = [], False, (moment, done)
        forwards = (1,) if total % len(self.forwards) else self.forwards
        # Until step n: forwards of whole sections, and of the first steps of the next.
        ran, needed = (n // len(forwards) * sum(forwards) + sum(forwards[: n % len(forwards)]) for n in (done, total))
        self.ends = [*self.ends, (moment, done, ran)][-1 - max(PERIOD, int(LAST * total)) :]
        if len(self.ends) == 1:
            return ""
        spans = [tuple(map(sub, new, old)) for old, new in pairwise(self.ends)]  # seconds, steps, forwards
        by_step = _without_waits([seconds / steps for seconds, steps, _ in spans])
        by_forward = _without_waits([seconds / count for seconds, _, count in spans])
        step_spread, forward_spread = (max(paces) / max(min(paces), 1e-9) for paces in (by_step, by_forward))
        if max(step_spread, forward_spread) > CHANGED * min(step_spread, forward_spread):  # else as before
            self.alike = step_spread < forward_spread
        paces, unit, rest = (by_step, 1, total - done) if self.alike else (by_forward, 2, needed - ran)
        since = _changed_at(paces, max(2, int(LATEST * total)))
        spent = sum(pace * span[unit] for pace, span in zip(paces[since:], spans[since:], strict=True))
        per_step = spent / (done - self.ends[since][1])
        seconds_left = rest * spent / (self.ends[-1][unit] - self.ends[since][unit])
        left = f", about {duration(seconds_left)} left" if done < total else ""
        return f", {per_step:.1f} s each{left}" if per_step >= WORTH_SHOWING else ""


def _without_waits(paces: list[float]) -> list[float]:
    """``paces`` with the largest lowered to the second if it is far above: that step waited for something else."""
    second = nlargest(2, paces)[-1]
    far = second * WAITED * (2 if len(paces) == 2 else 1)  # of two, either may be the usual one
    return [second if pace > far else pace for pace in paces]


def _changed_at(paces: list[float], fewest: int) -> int:
    """The last index from which on ``fewest`` or more ``paces`` are all far slower, or quicker, than before; else 0."""
    slowest_until, quickest_until = ([*accumulate(paces, each)] for each in (max, min))  # by step, which is included
    slowest_from, quickest_from = ([*accumulate(paces[::-1], each)][::-1] for each in (max, min))
    for since in range(len(paces) - fewest, 0, -1):
        slower = quickest_from[since] > CHANGED * slowest_until[since - 1]
        if slower or CHANGED * slowest_from[since] < quickest_until[since - 1]:
            return since
    return 0


def amount_of(count: float) -> str:
    """Bytes in words, as the tab and torch count them: ``3.2 GB``, ``14.0 MB``."""
    unit, name = _unit(count)
    return f"{count / unit:.1f} {name}"


def amount(done: int, total: int) -> str:
    """Bytes of bytes in words, such as ``11.2 of 23.9 GB``."""
    unit, name = _unit(total)
    return f"{done / unit:.1f} of {total / unit:.1f} {name}"


def _unit(count: float) -> tuple[int, str]:
    return (GIBIBYTE, "GB") if count >= 0.1 * GIBIBYTE else (MEBIBYTE, "MB")


def reading_of(part: str, total_bytes: int, progress: Any) -> Callable[[int], None]:
    """A function to call with the bytes of a part just read: it tells ``progress`` their sum and raises on cancel."""
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done = min(done + size, total_bytes)
        progress.step(done, total_bytes, ProgressStage("reading", f"{part} {amount(done, total_bytes)}", True))
        progress.check()

    return advance
