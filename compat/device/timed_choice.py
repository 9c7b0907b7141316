"""Timed choice of the fastest of several equivalent methods on a device: timed once, stored with its probes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from .facts import CLOCKED, DeviceFacts, value_or
from .failures import is_shortage
from .probe_store import ProbeStore

HOPELESS = 4.0  # times the best so far: measured once, not again


def stored_times(
    key: str, measure: Callable[[], Mapping[str, float]], facts: DeviceFacts, store: ProbeStore | None
) -> Mapping[str, float]:
    """Milliseconds by name from ``measure``, saved under ``key``; {} without a reliable clock, a store or a result."""
    if store is None or facts.device.type not in CLOCKED:
        return {}
    return value_or(lambda: {name: float(ms) for name, ms in store.remember(key, lambda: dict(measure())).items()}, {})


def milliseconds(ways: Mapping[str, Callable[[], Any]], device: torch.device, repeats: int) -> dict[str, float]:
    """Median milliseconds of ``repeats`` runs of each of ``ways``, after a first one that loads and tunes. Ways that
    raise RuntimeError are left out, those over :data:`HOPELESS` times the best are timed once; a shortage is raised."""
    times: dict[str, float] = {}
    for name, way in ways.items():
        once = partial(seconds_of, way, device)
        try:
            once()
            spent = [1e3 * once()]
            if spent[0] <= HOPELESS * min(times.values(), default=spent[0]):
                spent += [1e3 * once() for _ in range(repeats - 1)]
        except RuntimeError as error:
            if is_shortage(error):  # so that the choice is made another time
                raise
            continue
        times[name] = round(sorted(spent)[len(spent) // 2], 4)
    return times


def fastest(times: Mapping[str, float], default: str, worth: float) -> str:
    """The name of the fastest if it takes at most the share ``worth`` of the time of ``default``, else ``default``."""
    best = min(times, key=times.__getitem__)
    return best if times[best] <= worth * times[default] else default


def seconds_of(way: Callable[[], Any], device: torch.device, clock: Callable[[], float] | None = None) -> float:
    """Seconds that ``way()`` takes by ``clock`` on ``device``, which is synchronised before and after."""

    def now() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return (clock or time.perf_counter)()

    started = now()
    way()
    return now() - started
