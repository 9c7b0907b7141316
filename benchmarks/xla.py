"""Tiny models on torch_xla's own CPU device against the CPU: the same latents and frames behind a lazy backend.

    PJRT_DEVICE=CPU python benchmarks/xla.py --models mochi   # appends rows to benchmarks/results/xla.csv

It needs an environment in which torch and torch_xla are of one version, such as 2.9.0; torch_xla is not a dependency of
this pack. The device refuses ``parameter.data = ...``, so that weights get there another way. A minute or more each:
XLA compiles every shape.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from table import append, machine

FRAMES = {"ltx": 9, "mochi": 7}


def clip(model: Path, device: str, offload: str, frames: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Latents, frames and seconds of two steps."""
    from anygpu.pipelines import stages
    from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
    from anygpu.pipelines.load.folder import load
    from anygpu.pipelines.requests import LoadRequest

    started = time.perf_counter()
    pipeline = load(LoadRequest(model, precision="fp32", offload=offload, device=device))
    settings = SampleSettings(64, 64, frames, steps=2, seed=3, cfg=2.0)
    with torch.no_grad():
        prompt = stages.encode_prompt(pipeline, PromptRequest("a red fox", "blurry"), Silent())
        latents = stages.sample(pipeline, prompt, None, settings, Silent())
        video = stages.decode(pipeline, latents, Silent())
    return latents.samples, video, time.perf_counter() - started


def main() -> None:
    """A row per model."""
    import tiny
    import torch_xla

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mochi"])
    parser.add_argument("--offload", default="model")
    chosen = parser.parse_args()
    device, rows = str(torch_xla.device()), []
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.models:
            model, frames = tiny.build(name, Path(folder)), FRAMES.get(name, 5)
            here = clip(model, "cpu", "auto", frames)
            there = clip(model, device, chosen.offload, frames)
            apart = [float((one - other).abs().max()) for one, other in zip(here[:2], there[:2], strict=True)]
            rows.append(
                {
                    **machine(),
                    "torch_xla": torch_xla.__version__,
                    "model": name,
                    "offload": chosen.offload,
                    "latents apart": f"{apart[0]:.1e}",
                    "frames apart": f"{apart[1]:.1e}",
                    "seconds": round(there[2], 1),
                }
            )
    append("xla", rows)


if __name__ == "__main__":
    main()
