"""Frames to an MP4 file and back, through PyAV: no ffmpeg binary, no subprocess."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..compat.checkpoints.headers import plain_status
from ..compat.checkpoints.identity import levels_content
from ..compat.durable import replacing
from ..compat.errors import CheckpointError, PackError, UnsupportedError, afford, first_line, reading_budget
from ..compat.packages import imported

MOST_PIXELS = 2**30  # frames x height x width that are read at once: 517 frames of 1920x1080
FRAME_BYTES = 6  # of a pixel while it is decoded, as the codec, PyAV and numpy have it
FLOAT_BYTES = (16, 34)  # of one that core reads in floats, besides those: of up to 16 bits, of more
STREAMS = 64  # of a file, whose first frames FFmpeg decodes when it is opened
PNG = b"\x89PNG\r\n\x1a\n"
PNG_TEXTS = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
BOXES = frozenset(b"moov trak mdia minf stbl moof traf mvex edts udta dinf tref gmhd wave meta".split())
TABLES = {b"stsz": 16, b"stz2": 16, b"trun": 12, b"stts": 12, b"ctts": 12, b"elst": 12}  # where an MP4 has counts
RUNS = (b"stts", b"ctts")  # whose entries have counts of their own
EDITED_BYTES = 32  # that FFmpeg takes for each sample in each edit of an MP4
# Other formats of FFmpeg's inflate tags without limit, have programs in them, or take no limit of pixels
FORMATS = "apng,avi,bmp_pipe,gif,ivf,jpeg_pipe,matroska,mov,mpegts,ogg,png_pipe,tiff_pipe,webp_pipe"
Check = Callable[[], None]
X264 = "libx264"
CODECS = (X264, "h264", "mpeg4")
IN_BYTES, BLOCK = ("yuvj420p", "yuvj422p", "yuvj444p", "rgb24", "rgba", "pal8"), 32  # as core reads them


def write_mp4(frames: torch.Tensor, fps: float, path: Path, tags: Mapping[str, str] | None = None) -> Path:
    """The path of an MP4 with ``frames`` (F, H, W, 3) in 0..1, written whole or not at all; odd sides lose a row.
    Raises UnsupportedError where PyAV has no encoder, CheckpointError where the file cannot be written."""
    av = imported("av")
    codec = _codec(av)
    rows, columns = (side // 2 * 2 for side in frames.shape[1:3])
    try:
        options = {"movflags": "use_metadata_tags"}  # without it MP4 drops names it does not know
        with replacing(path.absolute(), ".mp4") as new, av.open(str(new), "w", options=options) as container:
            container.metadata.update(tags or {})
            stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
            stream.width, stream.height, stream.pix_fmt = columns, rows, "yuv420p"
            for frame in frames[:, :rows, :columns]:  # one at a time: all at once would be three copies of a long video
                picture: Any = (frame.clamp(0, 1) * 255).round().to(torch.uint8).contiguous().numpy()
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode(None))
    except (OSError, av.FFmpegError) as error:
        expected, fix = "a writable folder with room for the video", "Free space on this disk or choose another folder."
        found = f"{str(path)!r} cannot be written ({first_line(error)})"
        raise CheckpointError(found, expected=expected, fix=fix) from error
    return path


def through_h264(picture: torch.Tensor, crf: int) -> torch.Tensor | None:
    """A picture (H, W, 3), uint8, as the one frame of a video; odd sides lose a row. None where PyAV has no x264."""
    av = imported("av")
    rows, columns = (side // 2 * 2 for side in picture.shape[:2])
    file = BytesIO()
    try:
        with av.open(file, "w", format="mp4") as container:
            stream = container.add_stream(X264, rate=1, options={"crf": str(crf), "preset": "veryfast"})
            stream.width, stream.height, stream.pix_fmt = columns, rows, "yuv420p"
            frame = av.VideoFrame.from_ndarray(picture[:rows, :columns].contiguous().numpy(), format="rgb24")
            container.mux(stream.encode(frame.reformat(format="yuv420p")))
            container.mux(stream.encode(None))
        file.seek(0)
        with av.open(file) as container:
            return torch.from_numpy(next(container.decode(video=0)).to_ndarray(format="rgb24"))
    except (OSError, ValueError, StopIteration, av.FFmpegError):
        return None


@dataclass(slots=True)
class Allowance:
    """The pixels that may still be decoded."""

    left: int = 2 * MOST_PIXELS  # frames x height x width; each frame is counted, then hashed


def read_frames(path: Path, most: int | None = None, check: Check = lambda: None) -> tuple[torch.Tensor, float]:
    """Upright frames (F, H, W, 3) in 0..1 of a picture or video file, and its frames per second; the first ``most``
    (1 or more), None for all, of at most :data:`MOST_PIXELS`. The file is decoded twice: first to count its frames, as
    headers lie. ``check``, called for each, may raise to cancel. Raises CheckpointError for no frames, or too many."""
    count = sum(1 for _ in islice(_decoded(path, check, Allowance(MOST_PIXELS)), most))
    frames, rate = torch.empty(0), 0.0
    for index, (upright, stream_rate) in enumerate(islice(_decoded(path, check, Allowance(MOST_PIXELS)), count)):
        pixels = upright()[..., :3]
        if not index:
            frames, rate = torch.empty(count, *pixels.shape), stream_rate
        frames[index] = pixels
    return frames[: index + 1].div_(255 if pixels.dtype is torch.uint8 else 1), rate


def content_in(path: Path, check: Check, allowance: Allowance) -> str:
    """The ``picture_content`` hash of a file, with one frame in memory; raises CheckpointError beyond ``allowance``."""
    count = sum(1 for _ in _decoded(path, check, allowance))
    pixels = (upright()[..., :3] for upright, _ in _decoded(path, check, allowance))
    frames = (each if each.dtype is torch.uint8 else each.clamp_(0, 1).mul_(255).round_().byte() for each in pixels)
    first = next(frames)
    return levels_content((count, *first.shape), (frame.flatten().numpy().data for frame in chain([first], frames)))


def transparency(path: Path, size: Sequence[int]) -> torch.Tensor | None:
    """The mask (1, H, W), 1 where transparent, of a picture file as core's Load Image gives it. None without alpha, at
    another size than (H, W) ``size``, or if unreadable."""
    with suppress(CheckpointError):
        pixels = next(_decoded(path, lambda: None, Allowance()))[0]()
        if pixels.shape[2] == 4 and pixels.shape[:2] == torch.Size(size):
            return 1 - pixels[None, ..., 3] / (255 if pixels.dtype is torch.uint8 else 1)
    return None


def size_in(path: Path) -> tuple[int, ...]:
    """Width and height as stored, by the header of a picture or video file; empty for another or a damaged file."""
    try:
        with _opened(path, "a picture or video file") as container:
            return container.streams.video[0].width, container.streams.video[0].height
    except CheckpointError:
        return ()


def _decoded(path: Path, check: Check, allowance: Allowance) -> Iterator[tuple[Callable[[], torch.Tensor], float]]:
    """For each frame of a file a call that gives its upright pixels, and the file's frames per second.
    Raises CheckpointError for no frame, frames of several sizes, or more pixels than ``allowance`` has left."""
    first = None
    with _opened(path, "a picture or video file") as container:
        stream = container.streams.video[0]
        for frame in _frames(container, stream):
            check()
            size = frame.width, frame.height
            first = first or size
            if size != first:
                found, fix = f"frames of several sizes in {str(path)!r}", "Convert the video to one size."
                raise CheckpointError(found, expected="one size", fix=fix)
            allowance.left -= frame.width * frame.height
            if allowance.left < 0:
                found = f"more frames of {frame.width}x{frame.height} in {str(path)!r} than are read at once"
                fix = "Cut the video, or make it smaller."
                raise CheckpointError(found, expected=f"at most {MOST_PIXELS:,} pixels in all", fix=fix)
            if frame.format.name not in IN_BYTES:
                needed = FLOAT_BYTES[frame.format.bits_per_pixel > 16] * frame.width * frame.height
                afford(f"a frame of {str(path)!r}", needed, path.stat().st_size, "Make it smaller.")
            yield partial(_upright, frame), float(stream.average_rate or 0)
    if first is None:
        found = f"no frames in {str(path)!r}"
        raise CheckpointError(found, expected="a picture or video file", fix="Choose another file.")


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """The frames of a stream; PNGs are decoded without their texts."""
    if stream.codec_context.name != "png":
        yield from container.decode(stream)
        return
    for packet in container.demux(stream):
        bare = imported("av").Packet(_without_texts(bytes(packet)))
        bare.is_keyframe = packet.is_keyframe  # FFmpeg adds one that is no key frame to the frame before
        yield from stream.codec_context.decode(bare)


def _upright(frame: Any) -> torch.Tensor:
    """A frame (H, W, 3 or 4) as core's Load Image and Load Video read and turn it: uint8 for :data:`IN_BYTES`, fp32 in
    0..1 for other formats, whose border core repeats up to whole blocks so that swscale reads nothing beyond it.
    Source: ComfyUI 0.33, ``VideoFromFile`` in ``comfy_api/latest/_input_impl/video_types.py``."""
    rows, columns, kind, quarters = frame.height, frame.width, frame.format, getattr(frame, "rotation", 0) // 90
    clear, in_bytes = any(each.is_alpha for each in kind.components) or kind.name == "pal8", kind.name in IN_BYTES
    if not in_bytes and columns % BLOCK:
        wide, tall = (-(-side // BLOCK) * BLOCK for side in (columns, rows))
        graph, smeared = imported("av").filter.Graph(), f"right={wide - columns}:bottom={tall - rows}:mode=smear"
        source = graph.add_buffer(width=columns, height=rows, format=kind.name, time_base=Fraction(1, 25))
        nodes = graph.add("pad", f"{wide}:{tall}:0:0"), graph.add("fillborders", smeared), graph.add("buffersink")
        graph.link_nodes(source, *nodes).configure()
        graph.push(frame)
        frame = graph.pull()
    forms = ("rgb24", "rgba") if in_bytes else ("gbrpf32le", "gbrapf32le")
    return torch.rot90(torch.from_numpy(frame.to_ndarray(format=forms[clear])[:rows, :columns]), quarters)


def tags_of(path: Path) -> dict[str, str]:
    """The texts in a video file's metadata, by name in small letters: Matroska writes capitals."""
    with _opened(path, "a video file") as container:
        return {str(name).lower(): str(text) for name, text in container.metadata.items()}


@contextmanager
def _opened(path: Path, expected: str) -> Iterator[Any]:
    """A picture or video file open in PyAV; a failure to read it inside the block becomes a CheckpointError."""
    av, limit = imported("av"), {}
    try:
        plain_status(path)
        _require_samples(path)
        # A playlist could name any other file of this computer: PyAV gets an open file and no protocol to open more.
        options = {"protocol_whitelist": "none", "format_whitelist": FORMATS}
        with path.open("rb") as file:
            content: Any = SimpleNamespace(read=file.read, seek=file.seek, tell=file.tell)  # FFmpeg prefers a name
            head = file.peek()[:25]
            pixel_bytes = FLOAT_BYTES[1] if head.startswith(PNG) and head[24:] == b"\x10" else FRAME_BYTES  # 16 bits
            limit = {"max_pixels": str(reading_budget(path.stat().st_size) // pixel_bytes)}
            if head.startswith(PNG):
                content = BytesIO(_without_texts(file.read()))
            else:  # the PNGs in a video still have their texts when FFmpeg decodes one to know its size
                options["codec_whitelist"] = ",".join(av.codecs_available - {"png", "apng"})
            with av.open(content, options=options, stream_options=[limit] * STREAMS) as container:
                for stream in container.streams.video[:1]:
                    if stream.codec_context is None:  # PyAV before 18.1 crashes on it
                        raise ValueError("no decoder for its codec")
                    stream.codec_context.options = limit
                yield container
    except PackError:
        raise
    except (OSError, av.FFmpegError, LookupError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read ({first_line(error)})",
            expected=f"{expected}, of at most {int(limit['max_pixels']):,} pixels a frame" if limit else expected,
            fix="Choose another file, or convert this one to MP4 or PNG.",
        ) from error


def _require_samples(path: Path) -> None:
    """Raise CheckpointError for an MP4 whose tables claim more samples than it has bytes, or with edits more than
    memory affords (FFmpeg allocates an entry for each), or whose header is compressed, which hides them."""
    claimed, size, offset = Counter[bytes](), path.stat().st_size, 0
    with path.open("rb") as file:
        while len(head := file.read(16)) >= 8:
            length, kind = int.from_bytes(head[:4], "big"), head[4:8]
            header = 16 if length == 1 else 8  # 1: the length follows as 64 bits; 0: the box goes on to the file's end
            length = int.from_bytes(head[8:16], "big") if length == 1 else length or size
            if kind in TABLES:
                file.seek(offset + TABLES[kind] + header - 8)
                count = int.from_bytes(file.read(4), "big")
                if kind in RUNS:
                    runs = file.read(min(8 * count, max(length, 0), size))  # a buffer of that many bytes is made first
                    count = sum(int.from_bytes(runs[at : at + 4], "big") for at in range(0, len(runs), 8))
                claimed[kind] += count
            most = max(claimed.values(), default=0)
            if most > size or kind == b"cmov":
                found = "a compressed header" if kind == b"cmov" else f"a table of {most} samples"
                found += f" in {str(path)!r} of {size} bytes"
                expected = "a table of samples that are in the file"
                raise CheckpointError(found, expected=expected, fix="Convert the video.")
            afford(repr(str(path)), EDITED_BYTES * claimed[b"elst"] * most, size, "Convert the video.")
            if length < header:
                return
            file.seek(offset + header)
            version = 4 if kind == b"meta" and file.read(4) == bytes(4) else 0  # bytes that QuickTime's meta lacks
            offset += header + version if kind in BOXES else length  # into a box of boxes, past any other
            file.seek(offset)


def _without_texts(png: bytes) -> bytes:
    """A PNG without the chunks that describe it: FFmpeg inflates them whole, a file of 1 MB to 1 GB."""
    kept, at = [png[:8]], 8
    while at + 8 <= len(png):
        end = at + 12 + int.from_bytes(png[at : at + 4], "big")  # length, type and checksum, 4 bytes each, and the data
        if png[at + 4 : at + 8] not in PNG_TEXTS:
            kept.append(png[at:end])
        at = end
    return b"".join(kept)


def _codec(av: Any) -> str:
    """The first of CODECS that this PyAV encodes (``codecs_available`` has decoders too); UnsupportedError for none."""
    for codec in CODECS:
        with suppress(ValueError):  # av's UnknownCodecError
            av.Codec(codec, "w")
            return codec
    fix = "Install av from PyPI: pip install -U av"
    raise UnsupportedError("this PyAV has no MP4 encoder", expected=f"one of {', '.join(CODECS)}", fix=fix)
