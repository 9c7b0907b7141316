"""Which of several ways to the same result is the fastest on a device: timed once, kept with its probes.

One of them is settled here: whether weights reach the device faster from a mapped file or through memory of their own.
On ROCm each copy from a mapped page stalled for half a second to two (Comfy-Org/ComfyUI#15001, ROCm/ROCm#5952 and
#6358). The affected drivers change, so devices that can time copies are tested once with a 32 MB file.
"""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .facts import CLOCKED, DeviceFacts
from .probe_store import ProbeStore

HOPELESS = 4.0  # times the best so far: measured once, not again
COPIES, SAMPLE_BYTES, REPEATS = "copies of mapped pages", 32 * 1024**2, 5
WORTH = 0.8  # views save the host a second copy, so they are left only where a read takes at most this share
# The kinds of device whose driver takes a mapped page as it does any other that is not locked; of the rest nobody told.
MAPPED = {"cpu": "host and device share the page cache", "cuda": "the driver copies mapped pages through a buffer"}


def kept_times(
    key: str, measure: Callable[[], Mapping[str, float]], facts: DeviceFacts, store: ProbeStore | None
) -> Mapping[str, float]:
    """Milliseconds by name as ``measure`` gives them, asked once and kept under ``key``.

    Nothing where the device has no clock, nothing can be kept, or the measurement failed, which is tried again then.
    """
    if store is None or facts.device.type not in CLOCKED:
        return {}
    try:
        return store.remember(key, lambda: dict(measure())) or {}
    except (OSError, RuntimeError):
        return {}


def milliseconds(ways: Mapping[str, Callable[[], Any]], device: torch.device, repeats: int) -> dict[str, float]:
    """The median of some runs of each way that runs; the first run of each loads and tunes and is not counted."""
    times: dict[str, float] = {}

    def once(way: Callable[[], Any]) -> float:
        _wait_for(device)
        started = time.perf_counter()
        way()
        _wait_for(device)
        return 1e3 * (time.perf_counter() - started)

    for name, way in ways.items():
        try:
            once(way)
            spent = [once(way)]
            if spent[0] <= HOPELESS * min(times.values(), default=spent[0]):
                spent += [once(way) for _ in range(repeats - 1)]
        except RuntimeError:  # out of memory is one
            continue
        times[name] = round(sorted(spent)[len(spent) // 2], 4)
    return times


def fastest(times: Mapping[str, float], default: str, worth: float) -> str:
    """The name of the fastest way, but ``default`` where none takes at most a share of ``worth`` of its time."""
    best = min(times, key=times.__getitem__)
    return best if times[best] <= worth * times[default] else default


def maps_files(facts: DeviceFacts, store: ProbeStore | None) -> bool:
    """Whether large tensors that need no cast are left in their file as views, for the device of ``facts``.

    By the clock where the device has one and an answer can be kept, else by :data:`MAPPED`.
    """
    if store is not None and store.folder is not None:
        folder, key = store.folder, f"{COPIES}, system {facts.versions.get('kernel', '')}"  # part of these drivers
        times = kept_times(key, lambda: copy_times(folder, facts.device), facts, store)
        if len(times) > 1:
            return fastest(times, "mapped", WORTH) == "mapped"
    return facts.backend in MAPPED


def copy_times(folder: Path, device: torch.device) -> dict[str, float]:
    """Milliseconds for bytes of a file to be on the device: ``own``, read into ordinary memory, and ``mapped`` anew.

    Raises:
        OSError: nothing can be written into ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(SAMPLE_BYTES))
        file.flush()

        def own() -> None:
            memory = torch.empty(SAMPLE_BYTES, dtype=torch.uint8)
            file.seek(0)
            file.readinto(memoryview(memory.numpy()))  # type: ignore[arg-type]
            memory.to(device)

        def mapped() -> None:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            torch.frombuffer(pages, dtype=torch.uint8).to(device)

        return milliseconds({"own": own, "mapped": mapped}, device, REPEATS)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
