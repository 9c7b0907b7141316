"""What each lossy choice of AnyGPU Step Cache does to a video: PSNR and SSIM against off, and what it skipped.

    python benchmarks/steps.py            # appends rows to benchmarks/results/steps.csv

Tiny models with random weights, fp32, same seed, one run: the figures rank the presets and prove that each acts; they
do not say how good a video looks. ``--model FOLDER`` measures a model of yours instead.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path

import torch
from table import append, machine
from torch.nn import functional

CHECKPOINTS = {
    "ltx": ("ltx",),
    "hunyuan_video": ("hunyuan_video",),
    "hunyuan_video_15": ("hunyuan_video_15",),
    "framepack": ("framepack", "hunyuan_video", "siglip"),
    "mochi": ("mochi",),
}
FRAMES = {"ltx": 9, "mochi": 7}
STEPS, SEED, PROMPT = 20, 7, "a red fox walks through fresh snow"
PICTURE = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0))


class Heard:
    """A progress that remembers what a step cache says."""

    def __init__(self) -> None:
        self.line = ""

    def step(self, *_: object) -> None: ...

    def check(self) -> None: ...

    def notify(self, text: str) -> None:
        self.line = text if text.startswith("step cache ") else self.line


def psnr(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Peak signal to noise of frames in 0..1, in dB."""
    error = float((found - expected).double().square().mean())
    return math.inf if error == 0 else -10 * math.log10(error)


def ssim(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean structural similarity of frames (F, H, W, 3) in 0..1, over windows of 7 x 7 pixels."""
    a, b = (t.permute(0, 3, 1, 2).double() for t in (found, expected))

    def mean(t: torch.Tensor) -> torch.Tensor:
        return functional.avg_pool2d(t, 7, stride=1)

    first, second = mean(a), mean(b)
    spread, other, shared = mean(a * a) - first**2, mean(b * b) - second**2, mean(a * b) - first * second
    c, d = 0.01**2, 0.03**2
    alike = (2 * first * second + c) * (2 * shared + d) / ((first**2 + second**2 + c) * (spread + other + d))
    return float(alike.mean())


def clip(pipeline, width: int, height: int, frames: int) -> tuple[torch.Tensor, float, str]:
    """Frames, seconds of sampling, and what the cache said."""
    from anygpu.pipelines import stages
    from anygpu.pipelines.base import FramePackSettings, ImageRequest, PromptRequest, SampleSettings, Silent

    heard = Heard()
    with torch.no_grad():
        prompt = stages.encode_prompt(pipeline, PromptRequest(PROMPT), Silent())
        settings = SampleSettings(width, height, frames, STEPS, SEED, cfg=1.0)
        if pipeline.family == "framepack":
            image = stages.encode_image(pipeline, ImageRequest(PICTURE, width, height), "stretch", Silent())
            started = time.perf_counter()
            latents = stages.sample_framepack(pipeline, prompt, image, settings, FramePackSettings(13 / 30, 2), heard)
        else:
            started = time.perf_counter()
            latents = stages.sample(pipeline, prompt, None, settings, heard)
        seconds = time.perf_counter() - started
        return stages.decode(pipeline, latents, Silent()), seconds, heard.line


def rows(family: str, pipeline, width: int, height: int, frames: int):
    """A row for each kind and preset."""
    from anygpu.compat.transforms.step_cache import KINDS, PRESETS, StepCacheSettings
    from anygpu.pipelines.settings import with_step_cache

    clip(pipeline, width, height, frames)  # reads the weights
    expected, whole, _ = clip(pipeline, width, height, frames)
    for kind in list(KINDS)[1:]:  # but auto
        for preset in PRESETS:
            found, seconds, said = clip(
                with_step_cache(pipeline, preset, StepCacheSettings(kind)), width, height, frames
            )
            yield machine() | {
                "model": family,
                "kind": kind,
                "preset": preset,
                "steps": STEPS,
                "psnr_db": round(psnr(found, expected), 2),
                "ssim": round(ssim(found, expected), 4),
                "skipped": said.rpartition(", ")[2],
                "time_ratio": round(seconds / whole, 3),
            }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a diffusers folder in place of the tiny models")
    parser.add_argument("--width", type=int, default=0)
    parser.add_argument("--height", type=int, default=0)
    parser.add_argument("--frames", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    import tiny
    from anygpu.pipelines.load.folder import load
    from anygpu.pipelines.requests import LoadRequest

    if arguments.model:
        pipeline = load(LoadRequest(Path(arguments.model)))
        append("steps", rows(arguments.model, pipeline, arguments.width, arguments.height, arguments.frames))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for family, names in CHECKPOINTS.items():
            paths = [tiny.build(name, Path(folder)) for name in names]
            base, encoder = paths[1:] if len(paths) == 3 else (None, None)
            pipeline = load(LoadRequest(paths[0], base, encoder, precision="fp32", device="cpu"))
            append("steps", rows(f"tiny {family}", pipeline, 64, 64, FRAMES.get(family, 5)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
