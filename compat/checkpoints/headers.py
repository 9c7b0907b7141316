"""Headers of safetensors files, checked against the file before any weights are read."""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..device.shortage import says_shortage
from ..errors import CheckpointError, PackError, UnsupportedError, remember

HEADER_LIMIT_BYTES = 100_000_000  # the safetensors library's own limit
READING_TIMES, READING_BYTES = 10, 200 * 10**6  # of a file of unknown origin: small ones can claim anything
MOST_AXES = 16
STORED: dict[str, torch.dtype] = {  # safetensors' names of dtypes
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
OTHER_FILES: tuple[tuple[bytes, str, str], ...] = (  # first bytes of what is often saved under this name instead
    (b"version https://git-lfs", "a Git LFS pointer in place of its content", "Fetch the file itself: git lfs pull."),
    (b"<!DOCTYPE", "a web page", "Download the file itself, after logging in if its page requires it."),
    (b"<html", "a web page", "Download the file itself, after logging in if its page requires it."),
    (
        b"PK\x03\x04",
        "a pickle of torch.save",
        "Download the .safetensors version. Pickles can run code and are refused.",
    ),
    (b"GGUF", "a GGUF file", "Rename it to end in .gguf."),
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as its file declares it.

    Args:
        file: where it is.
        dtype: safetensors' name of what its bytes are; ``U8`` where ``codec`` says more.
        shape: as a tensor of values.
        start, end: offsets in bytes in the file.
        stamp: size and time of the file's last change when its header was read.
        codec: GGUF's name of a block format, such as ``Q4_K``; rows are packed one after the other.
        scale: what the stored values are multiplied by: one number, or one per row.
        swapped: whether the two halves of its rows change places.
        heads: above 0, rows of each of so many heads are pairs side by side and come as first halves before second
            halves, as rotary embeddings of transformers want.
        mask: the bitmap of the values that the file has, in the order of the tensor's elements; the others are zero.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    stamp: tuple[int, int] = (0, 0)
    codec: str = ""
    scale: TensorEntry | None = None
    swapped: bool = False
    heads: int = 0
    mask: TensorEntry | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.end - self.start

    @property
    def is_floating(self) -> bool:
        """Tell whether its values are numbers to calculate with, which a cast may touch."""
        return bool(self.codec) or self.scale is not None or STORED[self.dtype].is_floating_point

    @property
    def is_packed(self) -> bool:
        """Tell whether its bytes are not plain values: a block format, numbers with a scale, or only some of them."""
        return bool(self.codec) or self.scale is not None or self.mask is not None

    def rows(self, first: int, count: int) -> TensorEntry:
        """``count`` rows from ``first`` on, as an entry of their own."""
        size = self.total_bytes // self.shape[0]
        start = self.start + first * size
        scale = self.scale
        if scale is not None and math.prod(scale.shape) > 1:
            scale = scale.rows(first, count)
        return replace(self, shape=(count, *self.shape[1:]), start=start, end=start + count * size, scale=scale)


def header_of(path: Path) -> dict[str, TensorEntry]:
    """The tensors that one safetensors file declares, checked against the file's length.

    Raises:
        CheckpointError: the file is missing, too short, truncated, or its header is not safetensors: not JSON, a name
            twice, offsets that overlap, leave a hole or pass the end.
    """
    return entries_and_notes(path)[0]


def entries_and_notes(path: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors that one safetensors file declares, and its metadata; checked and raising as :func:`header_of`."""
    with opened(path) as file:
        return header_in(file, path)


@contextmanager
def opened(path: Path, buffering: int = -1) -> Iterator[BinaryIO]:
    """A file of weights, open for the block; whatever the system refuses in the block is one line.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
    """
    try:
        plain_status(path)
        with path.open("rb", buffering) as file:
            yield file  # type: ignore[misc]
    except FileNotFoundError as error:
        raise CheckpointError(
            f"no file {str(path)!r}", expected="a safetensors or GGUF file", fix="Download this file again."
        ) from error
    except PackError:  # CheckpointError is an OSError too: what it says is better than what follows
        raise
    except OSError as error:  # a folder, a loop of links, no permission
        raise unreadable(path, error) from error


def header_in(file: BinaryIO, path: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors and the metadata that the open file of ``path`` declares, as :func:`entries_and_notes`."""
    status = os.fstat(file.fileno())
    prefix = file.read(8)
    _require_header(path, prefix + file.read(24), status.st_size)
    (length,) = struct.unpack("<Q", prefix)
    file.seek(8)
    try:
        header = json.loads(file.read(length), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        problem = f"{error.args[0]}" if isinstance(error, Repeated) else "a header that is not JSON"
        raise damaged(path, problem) from error
    if not isinstance(header, dict):
        raise damaged(path, "a header that is not an object")
    entries = _entries(path, header, 8 + length, (status.st_size, status.st_mtime_ns))
    notes = header.get("__metadata__")
    return entries, {str(k): str(v) for k, v in notes.items()} if isinstance(notes, dict) else {}


def declared(files: Sequence[Path]) -> dict[str, TensorEntry]:
    """All tensors that ``files`` declare, by name.

    Raises:
        CheckpointError: a file is damaged, or two of them have a tensor of the same name.
    """
    entries: dict[str, TensorEntry] = {}
    for file in files:
        mine = header_of(file)
        twice = sorted(entries.keys() & mine.keys())
        if twice:
            raise damaged(file, f"tensor {twice[0]!r}, which {entries[twice[0]].file.name} has too")
        entries.update(mine)
    return entries


def damaged(
    path: Path,
    problem: str,
    fix: str = "The download was cut short. Download the file again.",
    expected: str = "a whole safetensors file",
) -> CheckpointError:
    """The error for a file whose content does not match its name."""
    return CheckpointError(f"{str(path)!r} has {problem}", expected=expected, fix=fix)


def unreadable(path: Path, error: OSError) -> Exception:
    """The error for a path that cannot be opened; one of torch's own class where memory ran out."""
    if says_shortage(error):
        found, expected = f"out of memory while reading {str(path)!r} ({error})", "more free host memory"
        fix = "Close other programs, or add swap (on Windows: enlarge the page file)."
        return torch.OutOfMemoryError(remember(f"{found}; expected {expected}. {fix}", found, expected, fix))
    return CheckpointError(
        f"{str(path)!r} cannot be read ({error.strerror or error})",
        expected="a file that you may read",
        fix="Check the path, its links and its permissions.",
    )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever the system refuses inside the block, as one line that names the file; ``path`` where it names none.

    Raises:
        CheckpointError: it refused something.
    """
    try:
        yield
    except PackError:
        raise
    except OSError as error:
        raise unreadable(Path(error.filename or path), error) from error


def reading_budget(size: int) -> int:
    """The bytes of memory that reading a file of ``size`` bytes may take, beside what it gives back."""
    return READING_TIMES * size + READING_BYTES


def plain_status(path: Path) -> os.stat_result:
    """The status of a file of bytes.

    Raises:
        OSError: there is none, or it cannot be asked. CheckpointError: something else, such as a pipe, from which
            reading would wait for ever.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):  # a folder says so itself when opened
        raise CheckpointError(
            f"{str(path)!r} is a pipe or a device", expected="a file", fix="Put the file itself into its place."
        )
    return status


def possible_shape(sides: Iterable[int]) -> tuple[int, ...]:
    """The sides as a shape that a tensor can have: an empty one may have another side of any length in a file.

    Raises:
        ValueError: too many sides, too long ones, or negative ones.
    """
    shape = tuple(sides)
    if min(shape, default=0) < 0:
        raise ValueError(f"a shape with a side of {min(shape)}")
    if len(shape) > MOST_AXES or math.prod(max(side, 1) for side in shape) >= 2**60:
        raise ValueError(f"a shape of {len(shape)} sides up to {max(shape)}")
    return shape


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The object that ``text`` is in JSON; None for anything else, nesting without end included."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


class Repeated(ValueError):
    """A name that an object has twice; the text says which."""


def _require_header(path: Path, begins: bytes, size: int) -> None:
    """Raise unless the first bytes can be those of a safetensors file of ``size`` bytes."""
    if len(begins) < 8:
        raise damaged(path, f"only {size} bytes")
    for magic, what, fix in OTHER_FILES:
        if begins.startswith(magic):
            raise damaged(path, what, fix)
    (length,) = struct.unpack("<Q", begins[:8])
    if length > min(size - 8, HEADER_LIMIT_BYTES):
        raise damaged(path, f"no safetensors header in its {size} bytes")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) < len(pairs):
        names = [name for name, _ in pairs]
        raise Repeated(f"the name {next(n for n in names if names.count(n) > 1)!r} twice in its header")
    return named


def _entries(path: Path, header: dict[str, Any], base: int, stamp: tuple[int, int]) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    try:
        for name, record in header.items():
            if name == "__metadata__":
                continue
            start, end = (_whole(number) for number in record["data_offsets"])
            shape = possible_shape(map(_whole, record["shape"]))
            entry = TensorEntry(
                file=path, dtype=str(record["dtype"]), shape=shape, start=base + start, end=base + end, stamp=stamp
            )
            if entry.dtype not in STORED or entry.total_bytes != STORED[entry.dtype].itemsize * math.prod(shape):
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


def _whole(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(number)
    return number


SCALES = (".scale_weight", ".weight_scale", ".fp8_scale")  # of a weight: before and after ComfyUI 0.4, Tencent's
ASIDE = (".scale_input", ".input_scale", ".comfy_quant", ".pre_quant_scale")  # about the matrix product, not the weight
MARK = "scaled_fp8"
FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")  # values times one number, or one per row
NARROW = ("F8_E4M3", "F8_E5M2", "I8")
SPARSE, MASK = "anygpu_sparse", ".mask"  # shapes of tensors whose zeros a file leaves out, and the bitmap of each
WIDEST = 4  # bytes of a value in fp32


def described(files: Sequence[Path]) -> dict[str, TensorEntry]:
    """All tensors of a part's ``files`` by name, each with its scale and its mask.

    Raises:
        CheckpointError: a file is damaged, or two of them have a tensor of the same name. UnsupportedError: as
            :func:`with_scales`.
    """
    entries: dict[str, TensorEntry] = {}
    for file in files:
        found, notes = entries_and_notes(file)
        mine = with_scales(with_masks(found, notes, file), notes, file)
        twice = sorted(entries.keys() & mine.keys())
        if twice:
            raise damaged(file, f"tensor {twice[0]!r}, which {entries[twice[0]].file.name} has too")
        entries.update(mine)
    return entries


def with_masks(entries: Mapping[str, TensorEntry], notes: Mapping[str, str], path: Path) -> dict[str, TensorEntry]:
    """``entries`` with the masks of sparse tensors attached, in the shapes that the file's metadata gives them.

    A mask has a bit for each element, so that a file cannot claim more than eight elements a byte; in fp32 all of them
    may take what :func:`reading_budget` gives the file.

    Raises:
        CheckpointError: a shape, a mask and its values that do not go together, or too many values.
    """
    kept, dense = dict(entries), 0
    for name, sides in (json_object(notes.get(SPARSE, "{}")) or {}).items():
        values, mask = kept.get(name), kept.pop(name + MASK, None)
        try:
            shape = possible_shape(map(int, sides))
        except (TypeError, ValueError):
            shape = ()
        count = math.prod(shape)
        fits = mask is not None and mask.dtype == "U8" and mask.shape == ((count + 7) // 8,)
        if not shape or values is None or mask is None or not fits or len(values.shape) != 1 or values.shape[0] > count:
            raise damaged(path, f"the sparse tensor {name!r} of {sides} without a mask that fits")
        dense += count * WIDEST
        if dense > reading_budget(values.stamp[0]):
            raise damaged(path, f"sparse tensors of {dense / 1e6:,.0f} MB in {values.stamp[0] / 1e6:,.0f} MB")
        kept[name] = replace(values, shape=shape, mask=mask)
    return kept


def with_scales(entries: Mapping[str, TensorEntry], notes: Mapping[str, str], path: Path) -> dict[str, TensorEntry]:
    """``entries`` with each scale attached to its weight, and without the tensors that only describe scales.

    Raises:
        UnsupportedError: weights in a format other than :data:`FORMATS`. CheckpointError: a scale without its weight,
            or one that is neither a number nor one number per row.
    """
    for name, kind in _formats(entries, notes, path).items():
        if kind not in FORMATS:
            raise UnsupportedError(
                f"the weight {name!r} of {str(path)!r} is stored as {kind}",
                expected=f"bf16, fp16, fp32, GGUF, or {', '.join(FORMATS)}",
                fix="Use another version of this file, such as bf16, scaled fp8 or GGUF.",
            )
    kept = {name: e for name, e in entries.items() if not name.endswith(ASIDE) and name.rpartition(".")[2] != MARK}
    for name in [name for name in kept if name.endswith(SCALES)]:
        owner, scale = name.rpartition(".")[0] + ".weight", kept.pop(name)
        weight = entries.get(owner)
        empty = weight is None or 0 in (len(weight.shape), math.prod(weight.shape))
        if weight is None or empty or not scale.is_floating or math.prod(scale.shape) not in (1, weight.shape[0]):
            raise CheckpointError(
                f"the scale {name!r} of {scale.shape} in {str(path)!r} fits no weight {owner!r}",
                expected="one number per weight, or one per row",
                fix="Download this file again, or use another version of it.",
            )
        kept[owner] = replace(weight, scale=scale) if weight.dtype in NARROW else weight
    missing = sorted(name for name, e in kept.items() if e.dtype == "I8" and not e.is_packed)
    if missing:
        raise CheckpointError(
            f"no scale for the 8-bit weight {missing[0]!r} in {str(path)!r}",
            expected="its weight_scale beside it",
            fix="Use another version of this file.",
        )
    return kept


def _formats(entries: Mapping[str, TensorEntry], notes: Mapping[str, str], path: Path) -> dict[str, str]:
    """The format that the file names for each of its layers, from its metadata or from a small tensor beside each."""
    formats: dict[str, str] = {}
    if "_quantization_metadata" in notes:
        layers = (json_object(notes["_quantization_metadata"]) or {}).get("layers")
        formats |= {name: _named(about) for name, about in layers.items()} if isinstance(layers, dict) else {}
    for name, entry in entries.items():
        if name.endswith(".comfy_quant") and entry.total_bytes < 4096:
            with path.open("rb") as file:
                file.seek(entry.start)
                formats[name.removesuffix(".comfy_quant")] = _named(json_object(file.read(entry.total_bytes)) or {})
    return formats


def _named(about: Any) -> str:
    """A format's name; one with a rotation before it is another format."""
    if not isinstance(about, dict):
        return "an unknown format"
    inner = about.get("params")
    rotated = about.get("convrot") or (isinstance(inner, dict) and inner.get("convrot"))
    return f"{about.get('format')}{' with convrot' if rotated else ''}"
