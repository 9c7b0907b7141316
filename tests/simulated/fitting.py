"""Heavy pipelines on the simulated device: how they are loaded, run and measured, for tests and for docs/memory.md."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from anygpu.pipelines import tiny
from anygpu.pipelines.contract import Loaded
from anygpu.pipelines.estimates import Size, forecast
from anygpu.pipelines.loading import LoadRequest, load
from anygpu.pipelines.tiny.heavy import build_heavy

from simulated.test_families import CASES, rendered

FAMILIES = ("ltx", "hunyuan_video", "hunyuan_video_15", "framepack", "mochi")
SHARES = (100, 60, 40, 25, 15)


def size_of(family: str) -> Size:
    """The size of :func:`run`, which no fit was made at."""
    return Size(64, 64, CASES[family].frames, True, 2)


def heavy(family: str, folder: Path, device: Any, offload: str = "auto", **terms: Any) -> Loaded:
    """The heavy pipeline of a family."""
    model, base, encoder = build_heavy(family, folder), None, None
    if family == "framepack":
        base, encoder = build_heavy("hunyuan_video", folder), tiny.build("siglip", folder)
    return load(LoadRequest(model, base, encoder, precision="fp32", offload=offload, device=device, **terms))


def run(loaded: Loaded, progress: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and frames of one short run."""
    return rendered(loaded, CASES[loaded.family], progress)


def peak(loaded: Loaded) -> int:
    """The highest memory of a pipeline's stages so far."""
    return max(cost.peak_bytes for cost in loaded.residency.account.stages)


def full_residency(loaded: Loaded) -> int:
    """Bytes of a run with all parts on the device: their weights and the largest activations."""
    weights = sum(part.total for part in loaded.weights.values())
    return weights + max(need.activations for need in forecast(loaded, size_of(loaded.family), "none").stages)


def forget(loaded: Loaded) -> None:
    """Leave the device and host memory."""
    for part in list(loaded.parts):
        loaded.residency.release(part)
        loaded.parts.drop(part)
    gc.collect()
