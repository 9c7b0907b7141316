"""Priced advice: seconds that a change of settings would save of a run, by the forecast of its time itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ...compat.device.work import HEAD_WIDTH, PUBLISHED, pace_of
from ...compat.errors import PackError
from ...compat.memory.statistics import duration
from ...compat.transforms.attention import SPARSE, Attention
from ...compat.transforms.attention_kernels import LOSSY, kernels_for
from ...compat.transforms.fp16 import require_fp16_sums
from ...compat.transforms.step_cache import FIRST_BLOCK, StepCacheSettings
from ..base import FramePackSettings
from ..pipeline import Pipeline
from ..settings import clip_frames, of_checkpoint, snap
from ..sizes import TRANSFORMER
from .counts import stored_products
from .seconds import Run, planned_run
from .times import Rooms, TimeForecast, free_bytes, time_forecast

MOST, SHARE, LEAST_SECONDS = 3, 0.05, 20.0  # lines; the least that one saves of a run, as a share and in seconds
Changed = tuple[Pipeline, Run]
Change = tuple[str, Callable[[Pipeline, Run], Changed], Mapping[str, Any]]  # a note, what makes it, and its input


@dataclass(frozen=True, slots=True)
class Saving:
    change: str  # in words, with the place to make it
    seconds: float  # saved of a run that has the changes before it too
    note: str  # beside it, such as that it is lossy
    inputs: Mapping[str, Any]  # the input of a node that makes it, with its value

    def __str__(self) -> str:
        return f"{self.change}: {duration(self.seconds)} less ({self.note})"


def savings(
    pipeline: Pipeline, run: Run, mode: str = "", room: int | None = None, rooms: Rooms = free_bytes
) -> list[Saving]:
    """At most three changes that this device can make, the largest saving first, each on top of those before it and at
    least 20 s and 5 % of the run; a shorter video only where there are none. UnsupportedError for unknown rates."""

    def timed(changed: Changed) -> TimeForecast:
        return time_forecast(*changed, mode or pipeline.offloader.mode, room, rooms)

    state: Changed = (pipeline, run)  # with the changes so far
    now = before = timed(state)
    found, least = list[Saving](), max(LEAST_SECONDS, SHARE * now.seconds)
    own = pipeline.precision
    paced = pace_of(pipeline.facts, pipeline.device.probes, own.compute or own.transformer)
    by = "; by the card's data sheet" if paced is not None and paced.source == PUBLISHED else ""
    left = dict(_changes(pipeline, run))
    while left and len(found) < MOST:
        after = {name: timed(change(*state)) for name, (_, change, _) in left.items()}
        priced = {name: _saved(now, before, changed) for name, changed in after.items()}
        best = max(priced, key=priced.__getitem__)
        if priced[best] <= 0 or priced[best] < least:
            break
        note, change, inputs = left.pop(best)
        found.append(Saving(best, priced[best], note + by, inputs))
        state, before = change(*state), after[best]
    if not found and (shorter := _shorter(pipeline, run)) is not None:
        saved, frames = _saved(now, now, timed(shorter)), shorter[1].size.frames
        inputs = {"frames": frames, "clip_seconds": round(frames / shorter[1].settings.fps, 1)}
        found += [Saving(f"{frames} frames", saved, f"another video{by}", inputs)] if saved >= least else []
    return found


def _saved(now: TimeForecast, before: TimeForecast, after: TimeForecast) -> float:
    """Seconds that a change saves: its share of each stage's modelled time, of the seconds that ``now`` forecasts."""
    stages = zip(now.stages, before.stages, after.stages, strict=True)
    return sum(own.seconds * (one.modelled - two.modelled) / own.modelled for own, one, two in stages if own.modelled)


def _changes(pipeline: Pipeline, run: Run) -> Iterator[tuple[str, Change]]:
    """The changes that act on this device and are not made yet, in words, with what makes them."""
    speed, facts = pipeline.plan.speed, pipeline.facts
    dtype = pipeline.precision.compute or pipeline.precision.transformer
    with suppress(PackError):  # of a device, a package, a dtype or a width of heads without it
        width = int(pipeline.configs[TRANSFORMER].get("attention_head_dim", HEAD_WIDTH))
        if speed.attention.label not in LOSSY and kernels_for(LOSSY[0], facts, dtype, width, quiet=True):
            made = _changed(attention=Attention("sage"))
            yield "attention sage on the load node", ("lossy", made, {"attention": "sage"})
    if pipeline.spec.rewrites.sparse and speed.attention.choice != SPARSE and SPARSE in pipeline.model.source.name:
        made = _changed(attention=Attention(SPARSE))
        yield "attention sparse on the load node", ("as it was trained", made, {"attention": SPARSE})
    with suppress(PackError):  # of a device or dtype without them
        require_fp16_sums(facts, dtype)
        if not speed.request.fp16_sums:
            yield "fp16_accumulation on the load node", ("lossy", _changed(fp16_sums=True), {"fp16_accumulation": True})
    if not speed.request.stored_products and stored_products(pipeline):
        yield "stored_products on the load node", ("lossy", _changed(stored_products=True), {"stored_products": True})
    if pipeline.plan.step_cache is None:
        note = "lossy; how many steps are alike is assumed"
        cached = _changed(cache=StepCacheSettings(FIRST_BLOCK))
        yield "AnyGPU Step Cache, preset balanced", (note, cached, {"preset": "balanced"})


def _changed(
    attention: Attention | None = None, cache: StepCacheSettings | None = None, **asked: Any
) -> Callable[[Pipeline, Run], Changed]:
    """The change that makes these choices, where given, and sets the speed request's fields ``asked``."""

    def change(pipeline: Pipeline, run: Run) -> Changed:
        plan, own = pipeline.plan, pipeline.plan.speed
        speed = replace(own, request=replace(own.request, **asked), attention=attention or own.attention)
        return replace(pipeline, plan=replace(plan, speed=speed, step_cache=cache or plan.step_cache)), run

    return change


def _shorter(pipeline: Pipeline, run: Run) -> Changed | None:
    """The same run of half as many frames, or sections; None where the family has no fewer, or latents say how many."""
    size, fps = run.size, run.settings.fps
    if pipeline.spec.recipes.sections:
        frames = clip_frames(pipeline, FramePackSettings(size.frames / 2 / fps, size.window), fps)
    else:
        frames = snap(of_checkpoint(pipeline), size.width, size.height, max(1, size.frames // 2)).frames
    if frames >= size.frames or run.settings.latents is not None:
        return None
    asked = replace(run.settings, frames=frames, guidance_steps=())
    return pipeline, planned_run(pipeline, replace(size, frames=frames, sections=0), asked)
