"""Tiny models on torch_xla's own CPU device against the CPU: the same latents and frames behind a lazy backend.

It needs PJRT_DEVICE=CPU and torch_xla of torch's version, such as 2.9.0, which is not a dependency of this pack. The
device refuses ``parameter.data = ...``, so that weights get there another way. A minute or more each: XLA compiles
every shape.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import tiny
import torch
from anygpu.pipelines import stages
from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
from anygpu.pipelines.load.folder import LoadRequest, load
from runner import SCRATCH, Case, Row

FRAMES = {"ltx": 9, "mochi": 7}


def clip(model: Path, device: str, offload: str, frames: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Latents, frames and seconds of two steps."""
    started = time.perf_counter()
    pipeline = load(LoadRequest(model, precision="fp32", offload=offload, device=device))
    settings = SampleSettings(64, 64, frames, steps=2, seed=3, cfg=2.0)
    with torch.no_grad():
        prompt = stages.encode_prompt(pipeline, PromptRequest("a red fox", "blurry"), Silent())
        latents = stages.sample(pipeline, prompt, None, settings, Silent())
        video = stages.decode(pipeline, latents, Silent())
    return latents.samples, video, time.perf_counter() - started


def rows(models: tuple[str, ...], offload: str) -> Iterator[Row]:
    """A row per model."""
    import torch_xla

    for name in models:
        model, frames = tiny.build(name, SCRATCH), FRAMES.get(name, 5)
        here = clip(model, "cpu", "auto", frames)
        there = clip(model, str(torch_xla.device()), offload, frames)
        apart = [float((one - other).abs().max()) for one, other in zip(here[:2], there[:2], strict=True)]
        yield {
            "torch_xla": torch_xla.__version__,
            "model": name,
            "offload": offload,
            "latents apart": f"{apart[0]:.1e}",
            "frames apart": f"{apart[1]:.1e}",
            "seconds": round(there[2], 1),
        }


def lacks() -> str:
    """The reason why nothing can be compared here, or nothing."""
    return "" if find_spec("torch_xla") else "torch_xla is not installed"


CASES = [Case("xla", rows, {"models": ("mochi",), "offload": "model"}, "xla", lacks=lacks)]
