"""Samplings that are cut short: in a process of their own that is killed, or by an exception."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny
import torch
from anygpu.pipelines import stages
from anygpu.pipelines.base import (
    FramePackSettings,
    ImageCondition,
    ImageRequest,
    Latents,
    Prompt,
    PromptRequest,
    SampleSettings,
    Silent,
)
from anygpu.pipelines.latents.recovery import SavedSections
from anygpu.pipelines.latents.steps import SavedSteps
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest

SIZE, STEPS = 64, 4
START = torch.rand(1, SIZE, SIZE, 3, generator=torch.Generator().manual_seed(0))
MODELS: dict[str, tuple[str, ...]] = {  # family: its tiny checkpoints, the model first
    "ltx": ("ltx_condition",),
    "hunyuan_video": ("hunyuan_video",),
    "hunyuan_video_15": ("hunyuan_video_15",),
    "framepack": ("framepack", "hunyuan_video", "siglip"),
    "mochi": ("mochi",),
}
SOLVERS = ("euler", "unipc", "dpm++_2m")


class Told(Silent):
    """Progress that keeps what it is told and calls ``then`` after each step, counted over all sections."""

    def __init__(self, then: Callable[[int], None] = lambda _count: None) -> None:
        self.said: list[str] = []
        self.count, self.then = 0, then

    def step(self, done: int, total: int, stage: Any, preview: Any = None) -> None:
        self.count += stage.name == "sampling"
        self.then(self.count)

    def notify(self, text: str) -> None:
        self.said.append(text)


def opened(family: str, built: Path) -> Pipeline:
    """The tiny pipeline of a family."""
    paths = [tiny.build(name, built) for name in MODELS[family]]
    return load(LoadRequest(*paths, precision="fp32", device="cpu"))


def encoded(pipeline: Pipeline) -> tuple[Prompt, ImageCondition | None]:
    """The prompt and the picture of every request, encoded once by each model in each precision on each device."""
    key = (pipeline.model.source, pipeline.facts.device, pipeline.precision)
    if key not in _encoded:
        prompt = stages.encode_prompt(pipeline, PromptRequest("a red fox", "blurry"), Silent())
        image = None
        if pipeline.spec.recipes.sections or pipeline.family == "ltx":
            image = stages.encode_image(pipeline, ImageRequest(START, SIZE, SIZE), "stretch", Silent())
        _encoded[key] = prompt, image
    return _encoded[key]


_encoded: dict[Any, tuple[Prompt, ImageCondition | None]] = {}


def sampled(
    pipeline: Pipeline, kept: Path | None, progress: Any, share: float = float("inf"), **changes: Any
) -> Latents:
    """Latents of the same request each time; ``kept`` has what an earlier run left, and every step of this one.

    Args:
        share: of the time that keeping steps may take.
    """
    prompt, image = encoded(pipeline)
    frames = pipeline.spec.sizes.stride + 1
    settings = SampleSettings(SIZE, SIZE, frames, steps=STEPS, seed=3, cfg=2.0)
    settings = replace(settings, **changes)
    steps = None if kept is None else SavedSteps(kept / "steps", progress.notify, share=share)
    if not pipeline.spec.recipes.sections:
        return stages.sample(pipeline, prompt, image, settings, progress, steps)
    sections = None if kept is None else SavedSections(kept, progress.notify)
    framepack = FramePackSettings(0.4, window=2)  # three sections
    assert image is not None
    return stages.sample_framepack(pipeline, prompt, image, settings, framepack, progress, sections, steps)


def die(family: str, built: Path, kept: Path, at: int, changes: dict[str, Any]) -> None:
    """Sample in this process, and kill it after ``at`` steps, as a power cut would: nothing runs after that."""
    torch.set_num_threads(1)

    def kill(count: int) -> None:
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)

    sampled(opened(family, built), kept, Told(kill), **changes)
    os._exit(3)  # it never came to that step
