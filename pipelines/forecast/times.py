"""Time of a stage: its work at the rates of the device, its copies over the link, and earlier runs."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Protocol, TypeVar

import torch

from ...compat.device.execution import HOST
from ...compat.device.facts import DeviceFacts, free_bytes, indexed
from ...compat.device.probe_store import ProbeStore
from ...compat.device.rates import PCIE_3, PINNED_LINK, PLAIN_LINK, rates_of
from ...compat.device.work import HEAD_WIDTH, PUBLISHED, TIMED, Pace, Work, pace_of
from ...compat.errors import InputError, PackError, UnsupportedError, first_line, json_within
from ...compat.memory.offloader import HOSTED
from ...compat.memory.statistics import StageCost, duration, saved_stages

log = logging.getLogger(__name__)
Value = TypeVar("Value")
Rooms = Callable[[torch.device], int | None]

TEXT, IMAGE = ONCE = "text", "image"  # stages that run once for several clips
STREAMED = ("group", "sequential")
MODEL = 3  # version of the model of time: runs of another version correct nothing
PUBLISHED_OFF = 1.34  # what a generation's shares of a data sheet may be off by; docs/performance.md counts how often
PROBED_OFF = 1.5  # what a few probes may be off by, in both directions: docs/memory.md has measured ratios
NEAR, FAR = 1.1, 1.25  # what runs of the same size, and of another, may be off by
SAME = 1.05  # by which two runs may differ in their work to be of one size
ROWS = 3  # newest runs whose median counts
PRICED = ("speed", "step cache", "form")  # entries of a key whose effect the model of time has too


@dataclass(frozen=True, slots=True)
class StageTime:
    """One stage of a run in seconds: as forecast, between which bounds, and before earlier runs corrected it."""

    name: str
    seconds: float
    low: float
    high: float
    modelled: float

    def __str__(self) -> str:
        return f"{self.name} {span(self.low, self.high)}"


@dataclass(frozen=True, slots=True)
class TimeForecast:
    mode: str
    stages: tuple[StageTime, ...]

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    def of_clips(self, count: int) -> TimeForecast:
        """The same for ``count`` clips, one after the other: text and pictures are encoded once."""
        terms = ("seconds", "low", "high", "modelled")
        longer = ({name: count * getattr(stage, name) for name in terms} for stage in self.stages)
        pairs = zip(self.stages, longer, strict=True)
        return TimeForecast(self.mode, tuple(one if one.name in ONCE else replace(one, **more) for one, more in pairs))

    def __str__(self) -> str:
        low, high = (sum(getattr(stage, bound) for stage in self.stages) for bound in ("low", "high"))
        return f"about {duration(self.seconds)} ({span(low, high)})"


class Times(dict[str, TimeForecast]):
    """Time of a run by offload mode; ``why`` a mode is left out, in one line; ``less`` are changes that save time."""

    why = ""
    less: Sequence[object] = ()

    @property
    def unknown(self) -> str:
        return f"time unknown: {self.why}" if self.why else ""


def room_now(pipeline: Any, device: torch.device | None = None) -> int | None:
    """Bytes of a device, by default the pipeline's own, that a run may take now; None where unknown."""
    free = free_bytes(device or pipeline.offloader.device)
    return None if free is None else max(0, free - pipeline.offloader.options.keep_free_bytes)


def room_of(pipeline: Any, device: torch.device, room: int | None, rooms: Rooms) -> int | None:
    """Bytes that a stage may take on ``device``: ``room`` on the pipeline's own device; None where unknown."""
    return room if room is None or device == pipeline.offloader.device else rooms(device)


def known_or_why(ask: Callable[[], Value]) -> tuple[Value | None, str]:
    """The result of ``ask``, or None and the reason in one line: a failed forecast stops no page or run."""
    try:
        return ask(), ""
    except PackError as error:
        return None, f"{error.found}; expected {error.expected}" if isinstance(error, InputError) else error.found
    except Exception as error:
        log.warning("AnyGPU: a forecast failed, please report this", exc_info=True)
        return None, f"the forecast failed ({type(error).__name__}: {first_line(error)})"


def corrected(stage: str, modelled: float, source: str, rows: Sequence[StageCost], key: str = "") -> StageTime:
    """The time of a stage: ``modelled`` seconds times the median of measured to modelled time in the ROWS newest of the
    runs nearest in size, in a range that holds for each of them. ``rows`` are runs of one key, the newest last; the
    range is as wide as rates of ``source`` may be off where that key is not ``key``, or there are none."""
    off = PUBLISHED_OFF if source == PUBLISHED else PROBED_OFF

    def apart(row: StageCost) -> float:
        return abs(math.log(row.modelled_seconds / modelled))

    def ratio(row: StageCost) -> float:  # of measured to modelled time; a process's first run imports libraries too
        measured = row.own_seconds / row.modelled_seconds
        return min(measured, off) if row.first else measured

    rows = [row for row in rows if not row.first] or rows  # imports tell nothing of the next run
    least, same = min(map(apart, rows), default=0.0), math.log(SAME)
    ratios = [ratio(row) for row in rows if apart(row) <= least + same][-ROWS:] or [1.0]
    near = off if not rows or rows[0].work != key else NEAR if least <= same else FAR
    seconds, low, high = (modelled * each for each in (median(ratios), min(ratios), max(ratios)))
    low, high = min(low, seconds / near), max(high, seconds * near)
    return StageTime(name=stage, seconds=seconds, low=low, high=high, modelled=modelled)


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """One stage of a run, as a pipeline of any kind states it."""

    name: str
    facts: DeviceFacts  # of the device on which it computes
    probes: ProbeStore | None  # of the device on which it computes
    dtype: torch.dtype  # of its products
    work: Callable[[], Work]  # counts its work; called where the rates of the device are known
    weights: int  # bytes that it needs on the device
    key: str  # of :func:`key_of`, from all that changes its work or its rate and that ``work`` does not count
    kernel: str = ""  # of its attention, as ``Attention.label`` names it
    width: int = HEAD_WIDTH  # of the heads of attention
    quicker: Mapping[str, float] = field(default_factory=dict)  # kind of operation to its speed-up by lossy choices
    share: float = 1.0  # of the work that a step cache leaves to do
    pinned: bool = False  # whether streamed weights come from pinned host memory
    calls: int = 1  # forwards, each of which copies streamed weights again
    beside: int = 0  # bytes of activations
    stays: int = 0  # bytes of the weights that offload ``group`` leaves on the device between forwards


class PlannedRun(Protocol):
    """A run of a pipeline of any kind, as the forecast of its time asks for it."""

    def places(self, pipeline: Any, mode: str) -> Mapping[str, torch.device]:
        """The names of its stages under an offload mode, in their order, with the devices whose room they take."""

    def planned(self, pipeline: Any, name: str, room: int | None) -> PlannedStage:
        """One of its stages, with the bytes of its device that it may take; None for all that it needs."""


def times_of(
    pipeline: Any, run: PlannedRun, modes: Iterable[str], room: int | None = None, rooms: Rooms = free_bytes
) -> Times:
    """Forecast the time of a run under each of ``modes``; leaves out unknown times, with the first reason as ``why``,
    and on the CPU all modes but ``none`` and the host's."""
    times, moved = Times(), pipeline.offloader.device.type != HOST.type
    for mode in modes:
        if moved or mode in ("none", HOSTED):
            time, why = known_or_why(partial(time_forecast, pipeline, run, mode, room, rooms))
            times.why = times.why or why
            if time is not None:
                times[mode] = time
    return times


def time_forecast(
    pipeline: Any, run: PlannedRun, mode: str = "", room: int | None = None, rooms: Rooms = free_bytes
) -> TimeForecast:
    """Forecast the time of a run under ``mode``, by default the pipeline's own, in ``room`` bytes of its device, None
    for all that it needs, and ``rooms`` of others. Raises UnsupportedError where the rates of a device are unknown."""
    mode = mode or pipeline.offloader.mode
    own_rooms = {name: room_of(pipeline, device, room, rooms) for name, device in run.places(pipeline, mode).items()}
    return TimeForecast(mode, tuple(stage_time(pipeline, name, run, mode, own) for name, own in own_rooms.items()))


def expected(pipeline: Any, name: str, run: PlannedRun) -> dict[str, Any]:
    """Arguments of ``stage_cost`` for a stage that begins now; none if unknown: a failed forecast stops no run."""

    def arguments() -> dict[str, Any]:
        stage = run.planned(pipeline, name, None)
        time = stage_time(pipeline, name, run, room=room_now(pipeline, stage.facts.device))
        seconds = {"modelled_seconds": time.modelled, "forecast_seconds": time.seconds}
        return {**seconds, "work": stage.key, "card": stage.facts.card}

    return known_or_why(arguments)[0] or {}


def stage_time(
    pipeline: Any, name: str, run: PlannedRun, mode: str = "", room: int | None = None, stays: bool = False
) -> StageTime:
    """The seconds of one stage: its work and its copies at the rates of its device, corrected by earlier runs;
    ``stays`` has its weights there already. Raises UnsupportedError where the rates of its device are unknown."""
    mode = mode or pipeline.offloader.mode
    stage = run.planned(pipeline, name, room)
    facts, state = stage.facts, pipeline.offloader.options.state
    pace = pace_of(facts, stage.probes, stage.dtype, stage.kernel, stage.width)
    if pace is None:
        why, fix = "was not timed yet", "Run a model on it once."
        if facts.device.type not in TIMED:
            why, fix = "is of a kind that is not timed", "Add its data sheet to compat/device/cards.csv."
        found = f"{facts.name} {why}, and no data sheet of it is known"
        raise UnsupportedError(found, expected="a device that was timed, or one of compat/device/cards.csv", fix=fix)
    rows = [] if state is None else saved_stages(state)
    paced = replace(pace.quicker(stage.quicker), plain_link=link_of(facts, rows, pace))
    modelled, streamed = stage.share * paced.seconds(stage.work()), mode in STREAMED
    link = 0.0 if stays else link_of(facts, rows, pace, pinned=streamed and stage.pinned, staged=streamed)
    if link:
        modelled = _with_copies(stage, modelled, link, mode, room)
    return corrected(stage.name, modelled, pace.source, _comparable(rows, pipeline, stage, mode), stage.key)


def _with_copies(stage: PlannedStage, computing: float, link: float, mode: str, room: int | None) -> float:
    """Seconds of a stage with the copies of its weights over ``link`` (bytes per second) that nothing hides."""
    if mode == HOSTED:
        streamed = 0 if room is None else min(stage.weights, max(0, stage.weights + stage.beside - room))
        return max(computing, stage.calls * streamed / link) + (stage.weights - streamed) / link
    if mode in STREAMED:  # copies come ahead, but where the host's memory is the device's
        copying, calls = stage.weights / link, max(1, stage.calls)
        if stage.facts.unified:
            return computing + calls * copying
        again = copying - stage.stays / link * (mode == "group")  # in each forward after the first
        return max(computing / calls, copying) + (calls - 1) * max(computing / calls, again)
    return computing + stage.weights / link


def link_of(
    facts: DeviceFacts, rows: Sequence[StageCost], pace: Pace | None = None, pinned: bool = False, staged: bool = False
) -> float:
    """Bytes per second to a device: as it was probed, else the median of earlier runs, else the rate that links of its
    kind reach. ``pinned``: from pinned memory, of which earlier runs do not tell; ``staged``: from other memory through
    pinned buffers, or plainly where that is faster. 0 for the host, and for unified memory of no known rate."""
    device = indexed(facts.device)
    if device.type == HOST.type:
        return 0.0
    rates = [
        row.moved_bytes / row.moving_seconds
        for row in rows
        if (row.device, row.card) == (str(device), facts.card)
        and row.moved_bytes
        and row.moving_seconds > 0
        and row.mode not in STREAMED  # whose seconds are those that computing waited for copies
    ]
    probed = 0.0 if pace is None else pace.link if pinned else max(staged * pace.staged_link, pace.plain_link)
    if probed or (rates and not pinned):
        return probed or median(rates)
    published = rates_of(facts)
    paper = facts.link or (0.0 if published is None else published.link)
    if facts.unified:
        return paper
    reached = (paper or PCIE_3) * (PINNED_LINK if pinned else PLAIN_LINK)
    return max(reached, *rates) if rates else reached


def key_of(**values: Any) -> str:
    """A key, as JSON, of plain ``values`` and dataclasses with all their fields; empty values are left out."""
    values["model"] = MODEL
    return json.dumps({name: value for name, value in values.items() if value}, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return getattr(value, "__name__", type(value).__name__)


def _comparable(rows: Sequence[StageCost], pipeline: Any, stage: PlannedStage, mode: str) -> list[StageCost]:
    """The rows of this stage, model and card with a known time whose key is the nearest to the stage's, differing in
    :data:`PRICED` entries at most; those of this mode alone if there are any."""
    title, device = f"{pipeline.family} {pipeline.variant}", str(indexed(stage.facts.device))
    usable = [
        row
        for row in rows
        if (row.stage, row.pipeline, row.device, row.card) == (stage.name, title, device, stage.facts.card)
        and 0 < row.modelled_seconds < math.inf
        and 0 < row.own_seconds < math.inf
    ]
    distances = {key: _distance(stage.key, key) for key in dict.fromkeys(row.work for row in reversed(usable))}
    nearest = min(distances, key=distances.__getitem__, default="")
    found = [row for row in usable if row.work == nearest and distances[nearest] < math.inf]
    return [row for row in found if row.mode == mode] or found


def _distance(key: str, other: str) -> float:
    """The number of values in which two keys differ; infinite for runs that say nothing of each other."""
    first, second = ({**json_within(each, "a key"), **dict.fromkeys(PRICED)} for each in (key, other or "{}"))
    return len({*key.split(", ")} ^ {*other.split(", ")}) if first == second else math.inf


def span(low: float, high: float) -> str:
    """Two durations as one, such as ``11 to 18 min``."""
    first, second = duration(low), duration(high)
    if first == second:
        return first
    number, _, unit = first.partition(" ")
    return f"{number if second.endswith(f' {unit}') else first} to {second}"
