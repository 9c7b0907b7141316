"""What is interrupted: a tiny pipeline of each task or a tiny paint model, run anew each time, compared bit for bit."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from anygpu.paint.geometry.cameras import camera_table
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.sampling.painting import PaintInputs, PaintSettings, paint_views
from simulated.test_families import CASES, loaded_for, rendered

from paint import stored

NAMES = (*CASES, "paint")


@dataclass(frozen=True)
class Subject:
    """What runs: a function from a progress to frames or views."""

    run: Callable[[Any], torch.Tensor]


def arguments_of(description: str | None, count: int) -> argparse.Namespace:
    """``--count`` and ``--seed`` of a run from its command line; everything runs on one thread."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    torch.set_num_threads(1)
    return parser.parse_args()


def subjects(tiny_folder: Path) -> dict[str, Subject]:
    """Every subject by name."""
    with torch.no_grad():
        return {**{name: _video(name, tiny_folder) for name in CASES}, "paint": _painting(tiny_folder)}


def _video(name: str, tiny_folder: Path) -> Subject:
    pipeline = loaded_for(CASES[name], tiny_folder, "cpu")
    return Subject(lambda progress: rendered(pipeline, CASES[name], progress)[1])


def _painting(tiny_folder: Path) -> Subject:
    folder = stored.checkpoint("paint", Path(tempfile.mkdtemp(dir=tiny_folder)))
    pipeline = load_paint(PaintRequest(folder, precision="fp32", device="cpu"))
    inputs, settings = painting_inputs(), PaintSettings(size=64, steps=2, seed=3)
    return Subject(lambda progress: paint_views(pipeline, inputs, settings, progress).views)


def painting_inputs() -> PaintInputs:
    """Random pictures for two views."""
    generator = torch.Generator().manual_seed(0)
    pictures = [torch.rand(count, 64, 64, 3, generator=generator) for count in (1, 2, 2)]
    return PaintInputs(*pictures, camera_table([0, 180], [0], [1]))
