"""Clips of the demo models' world, drawn in batches: exact shapes with soft edges, each at a place of its own."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from anygpu.pipelines.demo.scenes import COLOURS, GROWTH, MEASURES, RADIUS, TRAVEL, Scene, scenes

SIZE, FRAMES = 64, 9
SPIN = math.radians(64)
HELD_OUT = 63  # a tenth of the scenes is never trained on


def at_night(colours: torch.Tensor) -> torch.Tensor:
    """``colours`` (..., 3) in 0..255 as the LoRA "night" shows them: dark and bluish."""
    return colours * torch.tensor([0.35, 0.4, 0.55]) + torch.tensor([0.0, 4.0, 30.0])


def trained_and_held_out() -> tuple[list[Scene], list[Scene]]:
    """Every scene, the held out ones chosen with a fixed seed."""
    every = scenes()
    random.Random(19).shuffle(every)
    return every[HELD_OUT:], every[:HELD_OUT]


@dataclass(frozen=True, slots=True)
class Path:
    """Where a shape is in each frame: x, y, scale and angle, each (B, F)."""

    x: torch.Tensor
    y: torch.Tensor
    scale: torch.Tensor
    angle: torch.Tensor


def draw(shown: list[Scene], generator: torch.Generator, spread: float = 1.0, frames: int = FRAMES) -> torch.Tensor:
    """Clips (B, 3, F, H, W) in -1..1 of these scenes; place, size and speed are drawn from ``generator``.

    Args:
        spread: how far they vary, 1 for all that fits into the picture, 0 for the same clip of a scene each time.
    """
    mask = shapes(shown, generator, spread, frames)
    palette = {name: torch.tensor(rgb) / 127.5 - 1 for name, rgb in COLOURS.items()}
    colour = torch.stack([palette[scene.colour] for scene in shown])[:, :, None, None, None]
    ground = torch.stack([palette[scene.ground] for scene in shown])[:, :, None, None, None]
    return ground + (colour - ground) * mask[:, None]


def shapes(shown: list[Scene], generator: torch.Generator, spread: float = 1.0, frames: int = FRAMES) -> torch.Tensor:
    """How much of each pixel (B, F, H, W) the shape of a scene covers, 0..1; further frames go on as the first 9."""
    path = _paths(shown, generator, spread, frames)
    return _masks(shown, path, 1 + 0.16 * spread * (torch.rand(len(shown), 1, generator=generator) - 0.5))


def _paths(shown: list[Scene], generator: torch.Generator, spread: float, frames: int) -> Path:
    rows = len(shown)

    def between(low: float, high: float) -> torch.Tensor:
        return (low + high) / 2 + spread * (high - low) * (torch.rand(rows, 1, generator=generator) - 0.5)

    phase = (torch.arange(frames) / (FRAMES - 1) - 0.5)[None]
    motions = [scene.motion for scene in shown]

    def where(**values: float) -> torch.Tensor:
        return torch.tensor([values.get(motion, 0.0) for motion in motions])[:, None]

    travel = between(*TRAVEL) * phase
    along_x, along_y = where(left=-1, right=1), where(up=-1, down=1)
    x = between(24, 40) * (along_x == 0) + between(29, 35) * (along_x != 0) + along_x * travel
    y = between(24, 40) * (along_y == 0) + between(29, 35) * (along_y != 0) + along_y * travel
    low, high = GROWTH
    grown = (low + high) / 2 + where(grow=1, shrink=-1) * (high - low) * phase
    scale = torch.where(where(grow=1, shrink=1) > 0, grown, torch.ones(1, frames))
    return Path(x, y, scale, where(spin=1) * SPIN * (phase + 0.5))


def _masks(shown: list[Scene], path: Path, size: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(SIZE) + 0.5
    dx = steps[None, None, None, :] - path.x[..., None, None]
    dy = steps[None, None, :, None] - path.y[..., None, None]
    cos, sin = path.angle.cos()[..., None, None], path.angle.sin()[..., None, None]
    u, v = cos * dx + sin * dy, cos * dy - sin * dx
    radius = torch.tensor([RADIUS[scene.shape] for scene in shown])[:, None] * size * path.scale
    distance = torch.empty_like(u)
    for shape, measure in MEASURES.items():
        rows = [row for row, scene in enumerate(shown) if scene.shape == shape]
        distance[rows] = measure(u[rows], v[rows])
    return (radius[..., None, None] - distance + 0.5).clamp(0, 1)
