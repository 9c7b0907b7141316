"""The picture and the clip that the templates load, drawn into ComfyUI's input folder where it has none."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path

import folder_paths
import torch
from torch.nn.functional import interpolate

from ..compat.durable import write_file
from ..pipelines.demo.scenes import EXAMPLE, first_frame
from .api import InputImpl, Types

PIXELS, FRAMES, SPEED = 512, 49, 4  # side of both; frames of the clip, in each of which its shape moves 4 pixels
PICTURE, CLIP = "example.png", "example.mp4"


def add() -> list[str]:
    """Write the files that are not there and return their names; CheckpointError where the folder takes none."""
    added = []
    for name, content in ((PICTURE, _picture), (CLIP, _clip)):
        path = Path(folder_paths.get_input_directory()) / name
        drawn = None if path.exists() else content()
        if drawn is not None and not path.exists():  # a file may have come while this one was drawn
            added.append(write_file(path, drawn).name)
    return added


def _frame(pixels: int) -> torch.Tensor:
    small = first_frame(EXAMPLE).movedim(-1, 1)
    return interpolate(small, (pixels, pixels), mode="bicubic")[0].movedim(0, -1).clamp(0, 1)


def _picture() -> bytes:
    from PIL import Image

    target = io.BytesIO()
    Image.fromarray((_frame(PIXELS) * 255).round().byte().numpy()).save(target, "PNG")
    return target.getvalue()


def _clip() -> bytes:
    frame, target = _frame(PIXELS), io.BytesIO()
    frames = torch.stack([frame.roll(-SPEED * index, 1) for index in range(FRAMES)])
    components = Types.VideoComponents(images=frames, frame_rate=Fraction(25))
    InputImpl.VideoFromComponents(components).save_to(target, format=Types.VideoContainer.MP4)
    return target.getvalue()
