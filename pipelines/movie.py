"""Frames to an MP4 file and back, through PyAV: no ffmpeg binary, no subprocess."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from ..compat.checkpoints.headers import plain_status
from ..compat.device.facts import first_line
from ..compat.durable import replacing
from ..compat.errors import CheckpointError, PackError, UnsupportedError
from ..compat.packages import imported

CODECS = ("libx264", "h264", "mpeg4")


def write_mp4(frames: torch.Tensor, fps: float, path: Path, tags: Mapping[str, str] | None = None) -> Path:
    """The path of an MP4 with ``frames``, written whole or not at all.

    Args:
        frames: (F, H, W, 3) in 0..1; odd sides lose one row or column, as H.264 needs even ones.
        fps: frames per second.
        tags: texts by name, for the file's metadata.

    Raises:
        UnsupportedError: this PyAV has no encoder for MP4. CheckpointError: the file cannot be written.
    """
    av = imported("av")
    codec = _codec(av)
    rows, columns = (side // 2 * 2 for side in frames.shape[1:3])
    pixels: Any = (frames[:, :rows, :columns].clamp(0, 1) * 255).round().to(torch.uint8).contiguous().numpy()
    try:
        options = {"movflags": "use_metadata_tags"}  # without it MP4 drops names it does not know
        with replacing(path, ".mp4") as temporary, av.open(str(temporary), "w", options=options) as container:
            container.metadata.update(tags or {})
            stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
            stream.width, stream.height, stream.pix_fmt = pixels.shape[2], pixels.shape[1], "yuv420p"
            for picture in pixels:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode(None))
    except (OSError, av.FFmpegError) as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be written ({first_line(error)})",
            expected="a writable folder with room for the video",
            fix="Free space on this disk or choose another folder.",
        ) from error
    return path


def read_frames(path: Path) -> tuple[torch.Tensor, float]:
    """Frames (F, H, W, 3) in 0..1 of a picture or video file, and its frames per second.

    Raises:
        CheckpointError: no such file, or nothing in it can be decoded.
    """
    with _opened(path, "a picture or video file") as container:
        stream = container.streams.video[0]
        pictures = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(stream)]
        rate = float(stream.average_rate or 0)
    if not pictures:
        raise CheckpointError(
            f"no frames in {str(path)!r}", expected="a picture or video file", fix="Choose another file."
        )
    if any(picture.shape != pictures[0].shape for picture in pictures):
        raise CheckpointError(
            f"frames of several sizes in {str(path)!r}", expected="one size", fix="Convert the video to one size."
        )
    return torch.stack(pictures).float() / 255, rate


def tags_of(path: Path) -> dict[str, str]:
    """The texts in the metadata of a video file, by name in small letters: Matroska writes capitals.

    Raises:
        CheckpointError: no such file, or no video.
    """
    with _opened(path, "a video file") as container:
        return {str(name).lower(): str(text) for name, text in container.metadata.items()}


@contextmanager
def _opened(path: Path, expected: str) -> Iterator[Any]:
    """A video file as PyAV has it; a failure while it is read is one line.

    Args:
        expected: what the file should be.
    """
    av = imported("av")
    try:
        plain_status(path)
        # A playlist names further files, of anyone: from an open file, with no protocol, it can open none of them.
        with path.open("rb") as file, av.open(file, options={"protocol_whitelist": "none"}) as container:
            yield container
    except PackError:
        raise
    except (OSError, av.FFmpegError, LookupError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read ({first_line(error)})", expected=expected, fix="Choose another file."
        ) from error


def _codec(av: object) -> str:
    available: set[str] = getattr(av, "codecs_available", set())
    for codec in CODECS:
        if codec in available:
            return codec
    raise UnsupportedError(
        "this PyAV has no MP4 encoder",
        expected=f"one of {', '.join(CODECS)}",
        fix="Install av from PyPI: pip install -U av",
    )
