"""The tensors that a GGUF file declares. Tables are those of the package gguf; the header is read here, bounded by the
file's size, since gguf loops for hours if a list is declared longer than its file."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointError, UnsupportedError, afford
from ..packages import imported
from .gguf_blocks import CODECS, OF_DIFFUSERS
from .headers import MOST_AXES, MOST_ENTRIES, TensorEntry, damaged, opened, possible_shape, refuse_other, unread

MAGIC = b"GGUF"
ENTRY_BYTES = 700  # of memory for each tensor or note, at most
MOST_ITEMS = 1_000_000  # of a list; the largest vocabularies have a quarter of it
MOST_BYTES = 2**28  # of a name or a text, the largest of which hold a tokenizer: a flipped bit makes many GB of it
ALIGNMENT = 32
PLAIN = ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64")
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # by type number
TEXT, LIST = 8, 9
SHAPE_NOTE = "comfy.gguf.orig_shape."  # of tensors that were flattened, since GGUF has at most four axes


class Header:
    """Reads a file's bytes in order; raises ValueError at the end of the file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.left, self.size, self.texts = file, size, size, 0  # texts in lists so far

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes; ValueError for more than are left or :data:`MOST_BYTES`."""
        if count > (most := min(self.left, MOST_BYTES)):
            raise ValueError(f"{count} bytes where at most {most} can be")
        self.left -= count
        return self.file.read(count)

    def number(self, code: str) -> Any:
        """The next number, by its code of the module struct."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        """A note's next value; None for a list of texts or many numbers, ValueError for unknown types or huge lists."""
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == TEXT:
            return self.text()
        if kind != LIST:
            raise ValueError(f"a value of type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if count > MOST_ITEMS:
            raise ValueError(f"a list of {count} items")
        if inner in NUMBERS:
            raw = self.take(count * struct.calcsize(NUMBERS[inner]))
            return list(struct.unpack(f"<{count}{NUMBERS[inner]}", raw)) if count <= MOST_AXES else None
        self.texts += count
        if inner != TEXT or self.texts > 2 * MOST_ITEMS:
            raise ValueError(f"a list of type {inner}, {self.texts} texts in all")
        for _ in range(count):
            self.take(self.number("Q"))
        return None


def gguf_header(path: Path) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
    """The tensors that a GGUF file declares, and its notes by name; a long list, such as a vocabulary, is None.
    Raises CheckpointError for a missing or damaged file or another version, UnsupportedError for formats that are not
    decoded, MissingPackageError without the package gguf."""
    try:
        with opened(path) as file:
            status = os.fstat(file.fileno())
            header = Header(file, status.st_size)
            if (begins := header.take(min(4, header.left))) != MAGIC:
                refuse_other(path, begins + header.take(min(28, header.left)))
                raise _damaged(path, "another beginning" if status.st_size else "0 bytes")
            return _contents(path, header, (status.st_size, status.st_mtime_ns))
    except (ValueError, struct.error, OverflowError) as error:  # UnicodeDecodeError is a ValueError
        raise _damaged(path, f"contents that cannot be read ({' '.join(str(error).split())})") from error


def _contents(path: Path, header: Header, stamp: tuple[int, int]) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
    """Tensors and notes as of :func:`gguf_header`, from behind the magic; damage may be a ValueError."""
    version, tensors, notes = header.number("I"), header.number("Q"), header.number("Q")
    if version not in (2, 3) or max(tensors, notes) > MOST_ENTRIES:
        raise _damaged(path, f"version {version}, {tensors} tensors and {notes} notes")
    afford(repr(str(path)), ENTRY_BYTES * (tensors + notes), header.size)
    noted: dict[str, Any] = {}
    for _ in range(notes):
        name, kind = header.text(), header.number("I")
        noted[name] = header.value(kind)
    records = []
    for _ in range(tensors):
        name, axes = header.text(), header.number("I")
        if axes > MOST_AXES:
            raise ValueError(f"a tensor of {axes} axes")
        records.append((name, [header.number("Q") for _ in range(axes)], header.number("I"), header.number("Q")))
    alignment = noted.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**20:
        raise ValueError(f"an alignment of {alignment}")
    base = -(-(header.size - header.left) // alignment) * alignment
    entries: dict[str, TensorEntry] = {}
    for name, sides, kind, offset in records:
        if name in entries:
            raise ValueError(f"tensor {name!r} twice")
        entries[name] = _entry(path, name, sides, kind, base + offset, noted, stamp)
    reached = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start < reached or entry.end > header.size:
            raise _damaged(path, f"tensor {name!r}, which {'overlaps another' if entry.start < reached else 'is cut'}")
        reached = entry.end
    return entries, noted


def _entry(
    path: Path, name: str, sides: list[int], kind: int, start: int, notes: Mapping[str, Any], stamp: tuple[int, int]
) -> TensorEntry:
    """The entry of a tensor of GGUF's type number ``kind``; ``sides`` are the lengths of its axes, last first, unless a
    note has the shape it had. UnsupportedError for a type that is not decoded, CheckpointError for broken blocks."""
    gguf = imported("gguf")
    try:
        codec = gguf.GGMLQuantizationType(kind)
    except ValueError:
        raise _unread(path, name, f"type {kind} of GGUF") from None
    block, size = gguf.GGML_QUANT_SIZES[codec]
    shape, total = possible_shape(reversed(sides)), math.prod(sides)
    original = notes.get(SHAPE_NOTE + name)
    if isinstance(original, list) and all(type(side) is int for side in original) and math.prod(original) == total:
        shape = possible_shape(original)
    entry = TensorEntry(path, codec.name, shape, start, end=start + total // block * size, stamp=stamp)
    if codec.name in PLAIN:
        return entry
    if codec.name not in (*CODECS, *OF_DIFFUSERS) or len(shape) < 2:
        raise _unread(path, name, f"{codec.name} of {shape}")
    if not (sides and total) or sides[0] % block or (total // shape[0]) % block:  # in the rows of either shape
        raise _damaged(path, f"tensor {name!r} of {shape} in blocks of {block}")
    return replace(entry, dtype="U8", codec=codec.name)


def _unread(path: Path, name: str, kind: str) -> UnsupportedError:
    expected = "a format that the package gguf decodes, such as Q8_0 or Q4_K"
    fix = "Use another version of this file, or update the package: python -m pip install -U gguf."
    return unread(path, name, kind, expected, fix)


def _damaged(path: Path, problem: str) -> CheckpointError:
    return damaged(path, problem, expected="a complete GGUF file")
