"""What a saved video file really holds."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np


@dataclass(frozen=True, slots=True)
class Facts:
    """Pixels, decoded frames and frames per second."""

    width: int
    height: int
    frames: int
    fps: Fraction | float


def facts(path: Path) -> Facts:
    """Size, frame count by decoding, and rate of a video file."""
    found = frames(path)
    with av.open(str(path)) as container:
        rate = Fraction(container.streams.video[0].average_rate or 0)
    return Facts(found.shape[2], found.shape[1], found.shape[0], rate)


def frames(path: Path) -> np.ndarray:
    """Every frame, (F, H, W, 3) uint8."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
