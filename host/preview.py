"""Pictures of results under a node: a small animated clip, and a sheet of views; both in ComfyUI's temporary folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from .api import io, ui

MOST_FRAMES, CLIP_PIXELS, SHEET_PIXELS = 48, 320, 1024
QUALITY, FASTEST = 70, 0


def clips(films: Sequence[torch.Tensor], fps: float, cls: Any) -> Any:
    """An animated preview of each clip, at its own speed, of at most 48 frames and 320 pixels.

    ``films`` are clips of one size, each (F, H, W, 3) in 0..1; ``cls`` is the node, for the metadata in the file.
    """
    stride = math.ceil(len(films[0]) / MOST_FRAMES)
    small = [_at_most(frames[::stride], CLIP_PIXELS) for frames in films]
    if len(small[0]) == 1:
        return ui.PreviewImage(torch.cat(small), cls=cls)
    speed = max(1.0, fps / stride)
    saved = [
        ui.ImageSaveHelper.save_animated_webp(
            frames, "anygpu_clip", io.FolderType.temp, cls, speed, False, QUALITY, FASTEST
        )
        for frames in small
    ]
    return ui.SavedImages(saved, is_animated=True)


def sheet(pictures: torch.Tensor, cls: Any) -> Any:
    """A preview of pictures (B, H, W, 3) beside one another, as near to a square as they go."""
    columns = math.ceil(math.sqrt(len(pictures)))
    return ui.PreviewImage(sheet_of(_at_most(pictures, SHEET_PIXELS // columns)), cls=cls)


def sheet_of(pictures: torch.Tensor) -> torch.Tensor:
    """Pictures (B, H, W, C) as one (1, rows * H, columns * W, C), row by row; empty places are 0."""
    count, height, width, channels = pictures.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    empty = pictures.new_zeros(rows * columns - count, height, width, channels)
    table = torch.cat((pictures, empty)).reshape(rows, columns, height, width, channels)
    return table.permute(0, 2, 1, 3, 4).reshape(1, rows * height, columns * width, channels)


def _at_most(pictures: torch.Tensor, pixels: int) -> torch.Tensor:
    """Pictures (B, H, W, C) whose longer side is at most ``pixels``; smaller ones are returned as they are."""
    longer = max(pictures.shape[1:3])
    if longer <= pixels:
        return pictures
    size = [max(1, round(side * pixels / longer)) for side in pictures.shape[1:3]]
    return functional.interpolate(pictures.movedim(-1, 1), size=size, mode="area").movedim(1, -1)
