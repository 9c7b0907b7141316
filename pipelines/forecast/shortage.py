"""Settings to lower, and by how much, when memory ran out although all fallbacks were tried."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

from ...compat.device.facts import facts_for, free_bytes, value_or
from ...compat.errors import remember
from ...compat.memory.statistics import amount_of
from ..base import Latents, SampleSettings
from ..pipeline import Pipeline
from ..settings import SMALLEST_SIDE

UNITS = {"bytes": 1, "B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "KB": 1e3, "MB": 1e6, "GB": 1e9}
ASKED = re.compile(r"(?:tried to allocate|invalid buffer size:) ([\d.]+) (\w+)", re.IGNORECASE)
FREE = re.compile(r"of which ([\d.]+) (\w+) is free")
STREAMED = ("group", "sequential", "comfyui")  # weights already come and go by block, layer or need
LEAST_SHARE, MOST_SHARE = 0.1, 0.8
EXPLAINED = "_anygpu_explained"  # on an error that says already what to lower


@dataclass(frozen=True, slots=True)
class Shortage:
    """Numbers reported by one failed allocation."""

    asked_bytes: int = 0  # 0 where the message does not say
    free_bytes: int | None = None  # None where it does not

    @property
    def share(self) -> float:  # of the size that failed which should fit: a half where the numbers are unknown
        if not self.asked_bytes or self.free_bytes is None:
            return 0.5
        return min(MOST_SHARE, max(LEAST_SHARE, 0.8 * self.free_bytes / self.asked_bytes))

    def __str__(self) -> str:
        asked = f"{amount_of(self.asked_bytes)} asked for" if self.asked_bytes else "amount unknown"
        return asked if self.free_bytes is None else f"{asked}, {amount_of(self.free_bytes)} free"


def shortage_in(error: BaseException, free: int | None = None) -> Shortage:
    """Parse the message of an out-of-memory error; ``free`` stands in where it does not state the free memory."""
    asked, unused = ASKED.search(str(error)), FREE.search(str(error))
    wanted, left = _bytes(asked) if asked else 0, _bytes(unused) if unused else free
    if left is not None and wanted and left >= wanted:  # a limit of the process, or pieces: what is free says nothing
        left = None
    return Shortage(wanted, left)


def explain_shortage(
    error: BaseException,
    pipeline: Pipeline,
    stage: str,
    size: Latents | SampleSettings | None,
    hint: str = "",
    device: torch.device | None = None,
) -> BaseException:
    """``error`` of a stage that ran out of memory, with what to lower and by how much in its text; ``hint``, a way
    out that only this stage has, comes first. ``size`` is None for a stage that it does not matter to."""
    device = device or pipeline.offloader.device
    own = device == pipeline.offloader.device
    name = pipeline.facts.name if own else value_or(lambda: facts_for(device).name, str(device))
    short = shortage_in(error, free_bytes(device))
    fixes = lowered(pipeline, size, short, hint, device.type == "cpu")
    shape = "" if size is None else f" {size.width}x{size.height}, {size.frames} frames"
    kind = type(error) if isinstance(error, torch.OutOfMemoryError) else torch.OutOfMemoryError
    found = f"out of memory while {stage}{shape} on {name} ({short})"
    expected, fix = f"about {short.share:.0%} of that", f"{', or '.join(fixes)}."
    text = f"{found}; expected {expected}. {fix}\n{' '.join(str(error).split())}"
    explained = kind(remember(text, found, expected, fix))
    setattr(explained, EXPLAINED, True)
    return explained


def lowered(
    pipeline: Pipeline, size: Latents | SampleSettings | None, short: Shortage, hint: str = "", on_host: bool = False
) -> list[str]:
    """The ways out where the device, or the host, was short, the cheapest first, as phrases; ``hint`` is the first, in
    the place of advice on offload. Working memory grows with frames and with the area of a frame."""
    fixes, mode = [hint] if hint else [], pipeline.offloader.mode
    if not hint and not on_host and mode not in STREAMED:
        fixes.append(f"set offload to group on the load node (now {mode}), which keeps only one block on the device")
    fixes += [] if size is None else _smaller(pipeline, size, short)
    fixes = fixes or ["close other programs that use this device's memory"]
    return [fixes[0][0].upper() + fixes[0][1:], *fixes[1:]]


def _smaller(pipeline: Pipeline, size: Latents | SampleSettings, short: Shortage) -> list[str]:
    """Advice to lower frames, or width and height, to the share of ``size`` that should fit; empty at the smallest."""
    fixes, width, height, frames = [], size.width, size.height, size.frames
    family, stride = pipeline.spec, pipeline.spec.sizes.stride
    least = 1 + stride * (pipeline.model.task != "text")  # frames: one alone is the picture that it starts from
    fewer = max(least, 1 + (int(frames * short.share) - 1) // stride * stride)
    if fewer < frames and not family.recipes.sections:  # a section has its own length
        fixes.append(f"lower frames from {frames} to {fewer}")
    side, multiple = math.sqrt(short.share), family.sizes.multiple
    smaller = tuple(max(SMALLEST_SIDE, int(edge * side) // multiple * multiple) for edge in (width, height))
    if smaller != (width, height):
        fixes.append(f"lower width and height from {width}x{height} to {smaller[0]}x{smaller[1]}")
    return fixes


def _bytes(match: re.Match[str]) -> int:
    return int(float(match[1]) * UNITS.get(match[2], 1))
