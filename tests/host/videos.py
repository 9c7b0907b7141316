"""What saved videos and pictures really hold."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

from .client import Run
from .prompts import PICTURES
from .server import Server


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


def pictures(server: Server, run: Run) -> np.ndarray:
    """The frames that a run of a pictured prompt saved without loss, (F, H, W, 3) uint8.

    Compare these. x264's macroblock tree reads memory that it never wrote: where a picture is not a multiple of 128
    pixels wide, the same frames may come out differently each time.
    """
    assert run.ending == "execution_success", run.message
    return np.stack([np.asarray(Image.open(server.output(record))) for record in run.outputs[PICTURES]["images"]])


def frames(path: Path) -> np.ndarray:
    """Every frame, (F, H, W, 3) uint8."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
