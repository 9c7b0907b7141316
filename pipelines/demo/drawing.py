"""Clips that a demo model draws on request, what the checker sees in them, and a sheet to look at."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...compat.device.execution import picture_of
from .. import stages
from ..base import FramePackSettings, ImageRequest, PromptRequest, SampleSettings, Silent
from ..pipeline import Pipeline
from ..vae.plan import Form
from .scenes import EXAMPLE, Scene, agreement, first_frame, scene_in, scene_of, scenes
from .stand_in import FIT, one_section

SHEET_FRAMES, SHEET_ROWS, ZOOM = 5, 12, 2


def chosen_scenes(count: int, seed: int = 19) -> list[Scene]:
    """Scenes drawn from all of them without repetition."""
    return random.Random(seed).sample(scenes(), count)


def drawn(pipeline: Pipeline, prompt: str, seed: int = 0, form: Form | None = None, **settings: Any) -> torch.Tensor:
    """The frames (F, H, W, 3) in 0..1 of one clip, in the size and steps of the model's own unless ``settings`` say.

    A model that starts from a picture is given that of the scene.
    """
    progress = Silent()
    with torch.no_grad():
        encoded = stages.encode_prompt(pipeline, PromptRequest(prompt), progress)
        chosen = SampleSettings(**{"width": 0, "height": 0, "frames": 0, "seed": seed, **settings})
        if pipeline.spec.recipes.sections:
            picture = first_frame(scene_in(prompt) or EXAMPLE)
            image = stages.encode_image(pipeline, ImageRequest(picture, *picture.shape[2:0:-1]), FIT, progress)
            framepack = FramePackSettings(*one_section(pipeline))
            latents = stages.sample_framepack(pipeline, encoded, image, chosen, framepack, progress)
        else:
            latents = stages.sample(pipeline, encoded, None, chosen, progress)
        return stages.decode(pipeline, latents, progress, form=form)


def scores(clips: Sequence[torch.Tensor], asked: Sequence[Scene]) -> dict[str, float]:
    """The share of clips that show what was asked for, in each respect, and ``shuffled`` against other prompts."""
    seen = [scene_of(clip) for clip in clips]
    return {**agreement(seen, asked), "shuffled": agreement(seen, [*asked[1:], asked[0]])["all"]}


def as_table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Scores by name as a Markdown table, in per cent."""
    columns = list(next(iter(rows.values())))
    lines = [f"| | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]
    lines += [f"| {name} | {' | '.join(f'{row[key]:.0%}' for key in columns)} |" for name, row in rows.items()]
    return "\n".join(lines) + "\n"


def side_by_side(clips: Sequence[torch.Tensor], columns: int = 4) -> torch.Tensor:
    """One clip (F, H, W, 3) of several of the same size, enlarged; those that do not fill a row are left out."""
    rows = [torch.cat(list(clips[i : i + columns]), dim=2) for i in range(0, len(clips) - columns + 1, columns)]
    return torch.cat(rows, dim=1).repeat_interleave(ZOOM, 1).repeat_interleave(ZOOM, 2)


def save_sheet(clips: Sequence[torch.Tensor], captions: Sequence[str], path: Path) -> Path:
    """Write clips below each other with their captions, evenly spaced frames from left to right."""
    from PIL import Image, ImageDraw

    frames, height, width = clips[0].shape[:3]
    places = torch.linspace(0, frames - 1, SHEET_FRAMES).round().long()
    label = 12
    sheet = Image.new("RGB", (SHEET_FRAMES * (width * ZOOM + 2), len(clips) * (height * ZOOM + label + 4)), "white")
    pen = ImageDraw.Draw(sheet)
    for row, (clip, caption) in enumerate(zip(clips, captions, strict=True)):
        top = row * (height * ZOOM + label + 4)
        pen.text((2, top), caption, fill="black")
        for column, frame in enumerate(clip[places]):
            picture = picture_of(frame).resize((width * ZOOM, height * ZOOM), 0)
            sheet.paste(picture, (column * (width * ZOOM + 2), top + label + 2))
    sheet.save(path)
    return path
