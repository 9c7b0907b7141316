"""How long each stage of a run takes: its work at the rates of the device, its copies over the link, and what earlier
runs of the same kind showed."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from ...compat.device.execution import HOST
from ...compat.device.facts import DeviceFacts, facts_for, free_bytes, indexed, value_or
from ...compat.device.probe_results import probe_results_of
from ...compat.device.probe_store import ProbeStore
from ...compat.device.rates import published_rates
from ...compat.device.work import PUBLISHED, Pace, pace_of
from ...compat.memory.offloader import HOSTED
from ...compat.memory.statistics import StageCost, duration, kept_stages
from ..base import Pipeline, PromptRequest, SampleSettings
from ..memory.estimates import VAE, Size, sampling_bytes
from ..memory.forecast import COMPUTES, Rooms, room_of
from ..settings import guidance_steps, of_checkpoint, recipe_of
from ..vae.plan import planned_decode
from .counts import (
    IMAGE_ENCODER,
    batches_of,
    decoding_work,
    image_work,
    sampling_work,
    sections_of,
    text_lengths,
    text_work,
)

TEXT, IMAGE, SAMPLING, DECODING = "text", "image", "sampling", "decoding"
PARTS = {**COMPUTES, IMAGE: VAE}  # where the time of each stage passes
PAPER = 3.0  # times longer than on paper at most: no program reaches a data sheet's rates
PROBED_OFF = 1.5  # what a few probes may be off by, in both directions: docs/memory.md has measured ratios
NEAR, FAR = 1.1, 1.25  # what runs of the same size, and of another, may be off by
SAME = 1.05  # by which two runs may differ in their work to be of one size
ROWS = 3  # newest runs that count


@dataclass(frozen=True, slots=True)
class Run:
    """What is asked of a run: its size, its settings, complete, and its texts where they are known."""

    size: Size
    settings: SampleSettings
    texts: PromptRequest | None = None


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
    """The stages of a run under one mode, in seconds."""

    mode: str
    stages: tuple[StageTime, ...]

    @property
    def seconds(self) -> float:
        """All stages."""
        return sum(stage.seconds for stage in self.stages)

    def of_clips(self, count: int) -> TimeForecast:
        """The same for ``count`` clips, one after the other: the text is encoded once."""

        def times(stage: StageTime) -> StageTime:
            terms = {name: count * getattr(stage, name) for name in ("seconds", "low", "high", "modelled")}
            return stage if stage.name == TEXT else replace(stage, **terms)

        return TimeForecast(self.mode, tuple(map(times, self.stages)))

    def __str__(self) -> str:
        """About how long, such as ``about 14 min (11 to 18 min)``."""
        low, high = (sum(getattr(stage, bound) for stage in self.stages) for bound in ("low", "high"))
        return f"about {duration(self.seconds)} ({span(low, high)})"


def planned_run(pipeline: Pipeline, size: Size, asked: SampleSettings | None = None) -> Run:
    """A run of ``size`` with the steps and guidance that are ``asked``, else those of the checkpoint."""
    recipe = recipe_of(pipeline, asked)
    usual = of_checkpoint(pipeline, recipe).defaults
    settings = asked or SampleSettings(size.width, size.height, size.frames)
    cfg = settings.cfg or (usual.cfg if size.guided or asked is not None else 1.0)
    settings = replace(
        settings,
        width=size.width,
        height=size.height,
        frames=size.frames,
        fps=settings.fps or usual.fps,
        steps=settings.steps or usual.steps,
        cfg=cfg,
        guidance_steps=settings.guidance_steps or guidance_steps(recipe, settings, cfg),
    )
    return Run(replace(size, guided=cfg > 1.0), settings)


def time_forecast(
    pipeline: Pipeline, run: Run, mode: str = "", room: int | None = None, rooms: Rooms = free_bytes
) -> TimeForecast | None:
    """How long a run takes under ``mode``, by default the pipeline's own; None where nobody knows the device's rates.

    Args:
        room: bytes of the device that the run may take; None for all that it needs.
        rooms: the same for the devices of parts that compute elsewhere.
    """
    mode = mode or pipeline.offloader.mode
    names = (TEXT, *((IMAGE,) if pipeline.task == "image" else ()), SAMPLING, DECODING)
    stages = [stage_time(pipeline, name, run, mode, room_of(pipeline, name, room, rooms)) for name in names]
    known = tuple(stage for stage in stages if stage is not None)
    return TimeForecast(mode, known) if len(known) == len(names) else None


def stage_time(
    pipeline: Pipeline, stage: str, run: Run, mode: str = "", room: int | None = None, stays: bool = False
) -> StageTime | None:
    """How long one stage takes; None where nobody knows the rates of its device.

    Args:
        room: bytes of its device that it may take; None for all that it needs.
        stays: whether its weights are on the device from an earlier run.
    """
    mode = mode or pipeline.offloader.mode
    device = pipeline.offloader.device_of(PARTS[stage])
    precision = pipeline.precision
    dtype = {
        TEXT: precision.text,
        IMAGE: precision.vae,
        SAMPLING: precision.compute or precision.transformer,
        DECODING: precision.vae,
    }[stage]
    facts, probes = _machine_of(pipeline, device)
    pace = pace_of(facts, probes, dtype)
    if pace is None:
        return None
    state = pipeline.offloader.options.state
    rows = [] if state is None else kept_stages(state)
    link = 0.0 if stays else _link(facts, rows)
    modelled = _modelled(pipeline, stage, run, pace, mode, room, link)
    return corrected(stage, modelled, pace.source, _alike(rows, pipeline, stage, mode, device))


def _machine_of(pipeline: Pipeline, device: torch.device) -> tuple[DeviceFacts, ProbeStore | None]:
    """Facts of a device on which parts of a pipeline compute, and what it answered."""
    if device == pipeline.offloader.device:
        return pipeline.facts, pipeline.probes
    facts, state = facts_for(device), pipeline.offloader.options.state
    quiet = pipeline.probes is None or pipeline.probes.quiet
    return facts, None if state is None else probe_results_of(facts, state, quiet)


def corrected(stage: str, modelled: float, source: str, rows: Sequence[StageCost]) -> StageTime:
    """``modelled`` seconds of a stage as earlier runs of it were longer or shorter.

    Args:
        source: of the rates.
        rows: of such runs, the newest last.
    """
    low, high = (1.0, PAPER) if source == PUBLISHED else (1 / PROBED_OFF, PROBED_OFF)
    if not rows:
        return StageTime(stage, modelled * math.sqrt(low * high), modelled * low, modelled * high, modelled)

    rows = [row for row in rows if not row.first] or rows  # imports tell nothing of the next run

    def apart(row: StageCost) -> float:
        return abs(math.log(row.modelled_seconds / modelled))

    same = [row for row in rows if apart(row) <= math.log(SAME)][-ROWS:]
    nearest = same or [min(reversed(rows), key=apart)]

    def ratio(row: StageCost) -> float:
        longer = row.own_seconds / row.modelled_seconds
        return min(longer, high) if row.first else longer

    seconds = modelled * min(map(ratio, nearest))  # the quickest: the others shared the machine, or compiled
    off = NEAR if same else FAR
    return StageTime(stage, seconds, seconds / off, seconds * off, modelled)


def _modelled(pipeline: Pipeline, stage: str, run: Run, pace: Pace, mode: str, room: int | None, link: float) -> float:
    """Seconds of a stage at these rates: computing, and copies over ``link`` (bytes per second) that nothing hides."""
    if stage == TEXT:
        lengths = text_lengths(pipeline, run.texts)
        parts, calls, work = tuple(lengths), max(map(len, lengths.values()), default=0), text_work(pipeline, run.texts)
        beside = 0
    elif stage == IMAGE:
        parts, calls, work, beside = (IMAGE_ENCODER, VAE), 1, image_work(pipeline, run.size), 0
    elif stage == SAMPLING:
        parts, work = pipeline.spec.transformers, sampling_work(pipeline, run.size, run.settings)
        calls = sum(1 for _ in batches_of(pipeline, run.settings)) * sections_of(pipeline, run.size)
        beside = sampling_bytes(pipeline, run.size)
    else:
        weights = pipeline.weights[VAE].total if VAE in pipeline.weights else 0
        attempt, _ = planned_decode(pipeline, run.size, sys.maxsize if room is None else room - weights)
        parts, calls, work, beside = (VAE,), 1, decoding_work(pipeline, run.size, attempt), 0
    computing = pace.seconds(work)
    if not link:
        return computing
    total = sum(pipeline.weights[part].total for part in parts if part in pipeline.weights)
    if mode == HOSTED:
        streamed = 0 if room is None else min(total, max(0, total + beside - room))
        return max(computing, calls * streamed / link) + (total - streamed) / link
    if mode in ("group", "sequential"):  # copies come ahead, but where the host's memory is the device's
        copying = calls * total / link
        return computing + copying if pipeline.facts.unified else max(computing, copying)
    return computing + total / link


def _link(facts: DeviceFacts, rows: Sequence[StageCost]) -> float:
    """Bytes per second to a device: as earlier runs copied, else on paper; 0 where nothing is copied or known."""
    device = indexed(facts.device)
    if device.type == HOST.type:
        return 0.0
    rates = [
        row.moved_bytes / row.moving_seconds
        for row in rows
        if row.device == str(device)
        and row.moved_bytes
        and row.moving_seconds > 0
        and row.mode not in ("group", "sequential")  # whose seconds are those that computing waited for copies
    ]
    published = published_rates(facts.name)
    return median(rates) if rates else 0.0 if published is None else published.to_device


def _alike(
    rows: Sequence[StageCost], pipeline: Pipeline, stage: str, mode: str, device: torch.device
) -> list[StageCost]:
    """Runs of the same stage of this model on this device in this precision; of this mode where there are any."""
    title, precision = f"{pipeline.family} {pipeline.variant}", str(pipeline.precision)
    usable = [
        row
        for row in rows
        if (row.stage, row.pipeline, row.device, row.precision) == (stage, title, str(device), precision)
        and 0 < row.modelled_seconds < math.inf
        and 0 < row.own_seconds < math.inf
    ]
    return [row for row in usable if row.mode == mode] or usable


def expected(pipeline: Pipeline, stage: str, run: Run) -> StageTime | None:
    """How long a stage that begins now takes; a forecast that fails stops no run."""
    return value_or(lambda: stage_time(pipeline, stage, run, room=_room(pipeline, stage)), None)


def _room(pipeline: Pipeline, stage: str) -> int | None:
    """Bytes of its device that a stage may take now; None where nobody tells."""
    free = free_bytes(pipeline.offloader.device_of(PARTS[stage]))
    return None if free is None else max(0, free - pipeline.offloader.options.keep_free_bytes)


def span(low: float, high: float) -> str:
    """Two durations as one, such as ``11 to 18 min``."""
    first, second = duration(low), duration(high)
    if first == second:
        return first
    number, _, unit = first.partition(" ")
    return f"{number if second.endswith(f' {unit}') else first} to {second}"
