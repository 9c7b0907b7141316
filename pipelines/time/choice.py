"""Which offload mode a run takes by its time, and what more memory would save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...compat.device.facts import free_bytes
from ...compat.memory.statistics import amount_of, duration
from ...compat.memory.times import TimeForecast, Times, times_by_mode
from ..memory.estimates import SPARE
from ..memory.forecast import Forecast, Rooms
from ..pipeline import Pipeline
from .forecast import Run, time_forecast

WORTH = 0.9  # of the time, below which another mode is worth it


def times_of(
    pipeline: Pipeline, run: Run, modes: Sequence[str], room: int | None = None, rooms: Rooms = free_bytes
) -> Times:
    """How long a run takes under each mode that can be; without those whose time is unknown, and why."""
    return times_by_mode(pipeline, modes, lambda mode: time_forecast(pipeline, run, mode, room, rooms))


def quickest(modes: Sequence[str], times: Mapping[str, TimeForecast]) -> str:
    """The first mode, or the quickest where that is worth leaving the order for; empty for no modes.

    Where the time of a mode is not known, their order decides.
    """
    first = next(iter(modes), "")
    if any(mode not in times for mode in modes) or not first:
        return first
    best = min(modes, key=lambda mode: times[mode].seconds)
    return best if times[best].seconds < WORTH * times[first].seconds else first


def advice(needs: Sequence[Forecast], times: Mapping[str, TimeForecast], room: int | None) -> str:
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
