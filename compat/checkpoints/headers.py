"""Headers of safetensors files, checked against the file before any weights are read."""

from __future__ import annotations

import math
import os
import stat
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..device.shortage import says_shortage
from ..errors import JSON_BYTES, CheckpointError, PackError, UnsupportedError, json_within, reading_budget, sentence

MOST_AXES, MOST_ENTRIES = 16, 100_000  # a file of weights has some thousand tensors
STORED: dict[str, torch.dtype] = {  # safetensors' names of dtypes
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
PICKLED = "Download the .safetensors version. Pickles can run code and are refused."
WEB_PAGE = ("a web page", "Download the file itself, after logging in if its page requires it.")
OTHER_FILES: tuple[tuple[bytes, str, str], ...] = (  # first bytes of what is often saved under this name instead
    (b"version https://git-lfs", "a Git LFS pointer in place of its content", "Fetch the file itself: git lfs pull."),
    (b"<!DOCTYPE", *WEB_PAGE),
    (b"<html", *WEB_PAGE),
    (b"PK\x03\x04", "a pickle of torch.save", PICKLED),
    (b"GGUF", "a GGUF file", "Rename it to end in .gguf."),
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as its file declares it."""

    file: Path
    dtype: str  # safetensors' name of what its bytes are; ``U8`` where ``codec`` says more
    shape: tuple[int, ...]  # as a tensor of values
    start: int  # offsets in bytes in the file
    end: int
    stamp: tuple[int, int] = (0, 0)  # size and time of the file's last change when its header was read
    codec: str = ""  # how rows are packed: GGUF's name, such as ``Q4_K``, or one of PACKINGS
    sides: tuple[tuple[str, TensorEntry], ...] = ()  # side tensors of packed values, such as scales, by name
    part: tuple[int, int] = (0, 0)  # the first row, and the rows that ``sides`` are for, if these are more
    group: int = 0  # columns that were rotated together before they were rounded
    swapped: bool = False  # the two halves of its rows change places
    heads: int = 0  # rows of each head are pairs side by side and come as halves, for transformers' rotary
    mask: TensorEntry | None = None  # the bitmap of the values that the file has; the others are zero

    @property
    def total_bytes(self) -> int:
        return self.end - self.start

    @property
    def is_floating(self) -> bool:
        """True if its values are floating-point, which a cast may change; packed ones are."""
        return bool(self.codec) or STORED[self.dtype].is_floating_point

    @property
    def is_packed(self) -> bool:
        """True if its bytes are not plain values: in a packed format, or sparse."""
        return bool(self.codec) or self.mask is not None

    def rows(self, first: int, count: int) -> TensorEntry:
        """``count`` rows from ``first`` on, as an entry of their own; its ``part`` finds them in the side tensors."""
        size = self.total_bytes // self.shape[0]
        start = self.start + first * size
        part = (self.part[0] + first, self.part[1] or self.shape[0])
        return replace(self, shape=(count, *self.shape[1:]), start=start, end=start + count * size, part=part)


def entries_and_notes(path: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors that one safetensors file declares, checked against its length, and its metadata.
    Raises CheckpointError where it is missing, cut, not safetensors, or has offsets that overlap or leave holes."""
    with opened(path) as file:
        return header_in(file, path)


@contextmanager
def opened(path: Path, buffering: int = -1) -> Iterator[BinaryIO]:
    """A file of weights, open for the block; CheckpointError if it is missing, a pipe, or the system refuses it."""
    with reading(path):  # a folder, a loop of links, no permission
        try:
            plain_status(path)
            with path.open("rb", buffering) as file:
                yield file  # type: ignore[misc]
        except FileNotFoundError as error:
            found, expected = f"no file {str(path)!r}", "a safetensors or GGUF file"
            raise CheckpointError(found, expected=expected, fix="Download this file again.") from error


def header_in(file: BinaryIO, path: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors and the metadata that the open file of ``path`` declares, checked as by :func:`entries_and_notes`."""
    status = os.fstat(file.fileno())
    begins = file.read(32)
    if len(begins) < 8:
        raise damaged(path, f"only {status.st_size} bytes")
    refuse_other(path, begins)
    (length,) = struct.unpack("<Q", begins[:8])
    if length > min(status.st_size - 8, JSON_BYTES):
        raise damaged(path, f"no safetensors header in its {status.st_size} bytes")
    file.seek(8)
    try:
        header = json_within(file.read(length), f"the header of {str(path)!r}", object_pairs_hook=_distinct)
    except ValueError as error:
        problem = f"{error.args[0]}" if isinstance(error, Repeated) else "a header that is not JSON"
        raise damaged(path, problem) from error
    if not isinstance(header, dict) or len(header) > MOST_ENTRIES:
        raise damaged(path, f"a header that is not an object of at most {MOST_ENTRIES:,} tensors")
    entries = _entries(path, header, 8 + length, (status.st_size, status.st_mtime_ns))
    notes = header.get("__metadata__")
    return entries, {str(k): str(v) for k, v in notes.items()} if isinstance(notes, dict) else {}


def damaged(
    path: Path, problem: str, fix: str = "The download was cut short. Download the file again.",
    expected: str = "a whole safetensors file",
) -> CheckpointError:  # fmt: skip
    """The error that the file at ``path`` has ``problem``: content that does not match its name."""
    return CheckpointError(f"{str(path)!r} has {problem}", expected=expected, fix=fix)


def unreadable(path: Path, error: OSError) -> Exception:
    """The error for a path that cannot be opened or read; torch's OutOfMemoryError where memory ran out."""
    if says_shortage(error):
        found, expected = f"out of memory while reading {str(path)!r} ({error})", "more free host memory"
        fix = "Close other programs, or add swap (on Windows: enlarge the page file)."
        return torch.OutOfMemoryError(sentence(found, expected, fix))
    found, expected = f"{str(path)!r} cannot be read ({error.strerror or error})", "a file that you may read"
    return CheckpointError(found, expected=expected, fix="Check the path, its links and its permissions.")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise an OSError of the block as :func:`unreadable` for the file that it names, else for ``path``."""
    try:
        yield
    except PackError:  # CheckpointError is an OSError too: what it says is better than what follows
        raise
    except OSError as error:
        raise unreadable(Path(error.filename or path), error) from error


def plain_status(path: Path) -> os.stat_result:
    """The status of a file; OSError for none, CheckpointError for a pipe, from which reading waits for ever."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):  # a folder says so itself when opened
        found = f"{str(path)!r} is a pipe or a device"
        raise CheckpointError(found, expected="a file", fix="Put the file itself into its place.")
    return status


def possible_shape(sides: Iterable[int]) -> tuple[int, ...]:
    """``sides`` as a shape; ValueError for a negative side, too many, or a product (0 counts as 1) of 2**60 or more."""
    shape = tuple(sides)
    if min(shape, default=0) < 0:
        raise ValueError(f"a shape with a side of {min(shape)}")
    if len(shape) > MOST_AXES or math.prod(max(side, 1) for side in shape) >= 2**60:
        raise ValueError(f"a shape of {len(shape)} sides up to {max(shape)}")
    return shape


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object in ``text``; None for anything else, or more than the reading budget allows."""
    try:
        content = json_within(text, "metadata")
    except (CheckpointError, ValueError):
        return None
    return content if isinstance(content, dict) else None


class Repeated(ValueError):
    """A name that an object has twice; the text says which."""


def refuse_other(path: Path, begins: bytes) -> None:
    """Raise CheckpointError if ``begins``, a file's first bytes, show another kind, such as a saved web page."""
    for magic, what, fix in OTHER_FILES:
        if begins[: len(magic)].lower() == magic.lower():
            raise damaged(path, what, fix)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An ``object_pairs_hook`` for JSON that raises :class:`Repeated` for a repeated name."""
    named = dict(pairs)
    if len(named) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise Repeated(f"the name {name!r} twice in its header")
    return named


def _entries(path: Path, header: dict[str, Any], base: int, stamp: tuple[int, int]) -> dict[str, TensorEntry]:
    """The tensors of a header. CheckpointError unless their bytes fill the file (``stamp[0]`` bytes) from ``base`` on,
    each byte once; UnsupportedError for a dtype that is not read."""
    entries: dict[str, TensorEntry] = {}
    try:
        for name, record in header.items():
            if name == "__metadata__":
                continue
            start, end = (_whole_number(number) for number in record["data_offsets"])
            shape = possible_shape(map(_whole_number, record["shape"]))
            entry = TensorEntry(path, str(record["dtype"]), shape, start=base + start, end=base + end, stamp=stamp)
            if entry.dtype not in STORED:
                raise unread(path, name, entry.dtype)
            if entry.total_bytes != STORED[entry.dtype].itemsize * math.prod(shape):
                raise damaged(path, f"tensor {name!r} of {entry.dtype} {shape} in {entry.total_bytes} bytes")
            entries[name] = entry
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, "a header without offsets") from error
    reached = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != reached:
            kind = "overlaps another" if entry.start < reached else "leaves a hole before it"
            raise damaged(path, f"tensor {name!r}, which {kind}")
        reached = entry.end
    if reached != stamp[0]:
        raise damaged(path, f"{stamp[0] - base} bytes of tensors where its header declares {reached - base}")
    return entries


def _whole_number(number: Any) -> int:
    """``number`` if it is an integer of at least 0, else ValueError: JSON may have a bool, a float or a text."""
    if type(number) is not int or number < 0:
        raise ValueError(number)
    return number


SPARSE, MASK = "anygpu_sparse", ".mask"  # shapes of tensors whose zeros a file leaves out, and the bitmap of each
WIDEST = 4  # bytes of a value in fp32


def with_masks(entries: Mapping[str, TensorEntry], notes: Mapping[str, str], path: Path) -> dict[str, TensorEntry]:
    """``entries`` with the masks of sparse tensors attached, in the shapes that the file's metadata gives them.
    A mask has a bit for each element. CheckpointError if shape, mask and values do not fit together, or if the dense
    tensors in fp32 would exceed the file's :func:`reading_budget`."""
    kept, dense_bytes = dict(entries), 0
    for name, sides in (json_object(notes.get(SPARSE, "{}")) or {}).items():
        values, mask = kept.get(name), kept.pop(name + MASK, None)
        try:
            shape = possible_shape(map(int, sides))
        except (TypeError, ValueError, OverflowError):
            shape = ()
        count = math.prod(shape)
        fits = mask is not None and mask.dtype == "U8" and mask.shape == ((count + 7) // 8,)
        if not shape or values is None or mask is None or not fits or len(values.shape) != 1 or values.shape[0] > count:
            raise damaged(path, f"the sparse tensor {name!r} of {sides} without a mask that fits")
        dense_bytes += count * WIDEST
        if dense_bytes > reading_budget(values.stamp[0]):
            raise damaged(path, f"sparse tensors of {dense_bytes / 1e6:,.0f} MB in {values.stamp[0] / 1e6:,.0f} MB")
        kept[name] = replace(values, shape=shape, mask=mask)
    return kept


def unread(
    path: Path, name: str, kind: str, expected: str = "bf16, fp16, fp32, GGUF, or a format of docs/models.md",
    fix: str = "Use another version of this file, such as bf16, scaled fp8 or GGUF.",
) -> UnsupportedError:  # fmt: skip
    """The error for the weight ``name``, which is stored as ``kind``, a format that is not read."""
    return UnsupportedError(f"the weight {name!r} of {str(path)!r} is stored as {kind}", expected=expected, fix=fix)


def bytes_of(entry: TensorEntry) -> bytes:
    with entry.file.open("rb") as file:
        file.seek(entry.start)
        return file.read(entry.total_bytes)
