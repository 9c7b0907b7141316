"""Whether weights reach the device faster from a mapped file or by way of memory of their own: timed once, kept, said.

On ROCm each copy from a mapped page stalled for half a second to two (Comfy-Org/ComfyUI#15001, ROCm/ROCm#5952 and
#6358). Which drivers do so changes, so a device that has a clock is asked, with a file of 32 MB.
"""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from .facts import CLOCKED, DeviceFacts
from .probe_store import ProbeStore

NAME, SAMPLE_BYTES, REPEATS = "copies of mapped pages", 32 * 1024**2, 5
WORTH = 1.25  # views save the host a second copy, so they are left only where they take longer than this
# The kinds of device whose driver takes a mapped page as it does any other that is not locked; of the rest nobody told.
MAPPED = {"cpu": "the page cache is the memory that computes", "cuda": "the driver stages mapped pages"}
Measure = Callable[[Path, torch.device], Mapping[str, float]]


def maps_files(facts: DeviceFacts, store: ProbeStore | None, measure: Measure | None = None) -> bool:
    """Whether large tensors that need no cast are left in their file as views, for the device of ``facts``.

    By the clock where the device has one and an answer can be kept, else by :data:`MAPPED`.

    Args:
        measure: from a folder and the device to milliseconds by way, ``mapped`` and ``own``.
    """
    clock = measure is not None or facts.device.type in CLOCKED
    if store is not None and store.folder is not None and clock:
        folder, timed = store.folder, measure or milliseconds
        name = f"{NAME}, system {facts.versions.get('kernel', '')}"  # part of these drivers
        found = store.remember(name, lambda: _timed(timed, folder, facts.device))
        if found:
            return bool(found["mapped"] <= WORTH * found["own"])
    return facts.backend in MAPPED


def milliseconds(folder: Path, device: torch.device) -> dict[str, float]:
    """The fastest of some turns by way: bytes of a file on the device, mapped anew or read into ordinary memory.

    Raises:
        OSError: nothing can be written into ``folder``.
    """
    spent: dict[str, list[float]] = {"mapped": [], "own": []}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(SAMPLE_BYTES))
        file.flush()
        for _ in range(REPEATS):
            for way, times in spent.items():
                torch.accelerator.synchronize(device)
                started = time.perf_counter()
                if way == "mapped":
                    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                    torch.frombuffer(pages, dtype=torch.uint8).to(device)
                else:
                    memory = torch.empty(SAMPLE_BYTES, dtype=torch.uint8)
                    file.seek(0)
                    file.readinto(memoryview(memory.numpy()))  # type: ignore[arg-type]
                    memory.to(device)
                torch.accelerator.synchronize(device)
                times.append(1e3 * (time.perf_counter() - started))
    return {way: round(min(times), 3) for way, times in spent.items()}


def _timed(measure: Measure, folder: Path, device: torch.device) -> dict[str, float]:
    """What ``measure`` found; nothing where the folder or the device does not let it."""
    try:
        return dict(measure(folder, device))
    except (OSError, RuntimeError):
        return {}
