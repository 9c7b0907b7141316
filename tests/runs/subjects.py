"""What is interrupted: a tiny video pipeline or a tiny paint model, run anew each time and compared bit for bit."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from anygpu.paint.geometry.cameras import camera_table
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.sampling.painting import PaintInputs, PaintSettings, paint_views
from anygpu.pipelines import stages, tiny
from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
from anygpu.pipelines.loading.folder import LoadRequest, load
from torch.nn.modules.module import register_module_forward_pre_hook

from paint import stored

VIDEO = ("ltx", "hunyuan_video", "mochi")
NAMES = (*VIDEO, "paint")
Run = Callable[[Any], torch.Tensor]


def arguments_of(description: str | None, count: int) -> argparse.Namespace:
    """``--count`` and ``--seed`` of a run from its command line; everything runs on one thread."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    torch.set_num_threads(1)
    return parser.parse_args()


def subject(name: str, tiny_folder: Path) -> Run:
    """A function from a progress to frames or views; what it loads stays loaded from run to run."""
    with torch.no_grad():
        return _painting(tiny_folder) if name == "paint" else partial(_video, _loaded(name, tiny_folder))


def forwards(run: Run) -> int:
    """How many modules run forward in one run."""
    count = 0

    def before(*_: Any) -> None:
        nonlocal count
        count += 1

    handle = register_module_forward_pre_hook(before)
    try:
        run(Silent())
    finally:
        handle.remove()
    return count


def raising(at: int, error: BaseException) -> Any:
    """A hook that raises ``error`` before the forward number ``at``, once; its ``remove`` takes it off."""
    count = 0

    def before(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == at:
            raise error

    return register_module_forward_pre_hook(before)


def _loaded(name: str, tiny_folder: Path) -> Any:
    return load(LoadRequest(tiny.build(name, tiny_folder), device="cpu", precision="fp32"), Silent())


def _video(pipeline: Any, progress: Any) -> torch.Tensor:
    with torch.no_grad():
        prompt = stages.encode_prompt(pipeline, PromptRequest("a red fox"), progress)
        settings = SampleSettings(64, 64, pipeline.spec.ratios[1] + 1, steps=2, seed=3)
        latents = stages.sample(pipeline, prompt, None, settings, progress)
        return stages.decode(pipeline, latents, progress, "auto")


def _painting(tiny_folder: Path) -> Run:
    folder = stored.checkpoint("paint", Path(tempfile.mkdtemp(dir=tiny_folder)))
    pipeline = load_paint(PaintRequest(folder, precision="fp32", device="cpu"))
    generator = torch.Generator().manual_seed(0)
    pictures = [torch.rand(count, 64, 64, 3, generator=generator) for count in (1, 2, 2)]
    inputs = PaintInputs(*pictures, camera_table([0, 180], [0], [1]))
    return lambda progress: paint_views(pipeline, inputs, PaintSettings(size=64, steps=2, seed=3), progress).views
