"""Which offload mode a run takes by its time, and what more memory would save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...compat.device.execution import HOST
from ...compat.device.facts import free_bytes, value_or
from ...compat.memory.offloader import HOSTED
from ...compat.memory.statistics import amount_of, duration
from ...compat.memory.times import TimeForecast
from ..base import Pipeline
from ..memory.estimates import SPARE
from ..memory.forecast import Forecast, Rooms
from .forecast import Run, time_forecast

Times = Mapping[str, TimeForecast]
WORTH = 0.9  # of the time, below which another mode is worth it


def times_of(
    pipeline: Pipeline, run: Run, modes: Sequence[str], room: int | None = None, rooms: Rooms = free_bytes
) -> dict[str, TimeForecast]:
    """How long a run takes under each mode that can be; empty if the device's rates are unknown.

    A forecast that fails costs the figure, never the page that shows it.
    """
    usable = [mode for mode in modes if mode in ("none", HOSTED) or pipeline.offloader.device.type != HOST.type]
    known = {mode: value_or(lambda mode=mode: time_forecast(pipeline, run, mode, room, rooms), None) for mode in usable}
    return {mode: each for mode, each in known.items() if each is not None}


def quickest(modes: Sequence[str], times: Times) -> str:
    """The first mode, or the quickest where that is worth leaving the order for; empty for no modes.

    Where the time of a mode is not known, their order decides.
    """
    first = next(iter(modes), "")
    if any(mode not in times for mode in modes) or not first:
        return first
    best = min(modes, key=lambda mode: times[mode].seconds)
    return best if times[best].seconds < WORTH * times[first].seconds else first


def advice(needs: Sequence[Forecast], times: Times, room: int | None) -> str:
    """What a run would take with more memory, such as ``with offload model 6 min, needs 3.0 GB more``; empty where
    nothing is gained."""
    if room is None:
        return ""
    now = quickest([each.mode for each in needs if each.fits(room)], times)
    larger = [each for each in needs if not each.fits(room) and each.mode in times]
    if now not in times or not larger:
        return ""
    best = min(larger, key=lambda each: (times[each.mode].seconds, each.peak))
    if times[best.mode].seconds > WORTH * times[now].seconds:
        return ""
    lacks = amount_of(best.peak * SPARE - room)
    return f"with offload {best.mode} {duration(times[best.mode].seconds)}, needs {lacks} more"
