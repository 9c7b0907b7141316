"""Reading and writing safetensors: headers are checked before any weights are read, and nothing is unpickled.
Weights are read in slices, so that progress is real, a cancel is obeyed soon, and the peak is the result alone. Where
mapped pages are fast, large tensors that need no cast are views of the file."""

from __future__ import annotations

import math
import mmap
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from ..device.execution import to_host
from ..device.facts import value_or
from ..durable import replacing
from ..errors import CheckpointError, PackError, json_file
from .headers import (
    STORED,
    TensorEntry,
    bytes_of,
    damaged,
    entries_and_notes,
    header_in,
    json_object,
    opened,
    plain_status,
    with_masks,
)
from .unpacking import ALL, PACKINGS, laid_out, rows_of, unnested, unpacked

SLICE_BYTES = 64 * 1024**2
CAST_BYTES = 4 * 1024**2  # of a slice that is cast, so that it stays in the processor's cache
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's value, which Python names from 3.13 on
READ_ONLY = sys.platform == "win32"  # Windows reserves memory for all of a view that may be written to
VIEW_BYTES = 1024**2  # smaller tensors are read: their pages would hold other tensors too
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
INDEX_SUFFIX = ".safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")  # a file of these alone has no packed weights


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError, which says ``what`` it is, if absent, not JSON, or no object."""
    try:
        plain_status(path)
        content = json_file(path)
    except FileNotFoundError as error:
        found = f"no {path.name} in {str(path.parent)!r}"
        raise CheckpointError(found, expected=what, fix="Download the whole folder again.") from error
    except PackError:
        raise
    except (OSError, ValueError) as error:
        found = f"{str(path)!r} cannot be read ({error})"
        raise CheckpointError(found, expected=f"{what} as JSON", fix="Download this file again.") from error
    if not isinstance(content, dict):
        found = f"{str(path)!r} holds a {type(content).__name__}"
        raise CheckpointError(found, expected=f"{what} as a JSON object", fix="Download this file again.")
    return content


def weight_files(folder: Path, subject: str) -> list[Path]:
    """The safetensors files of a part, ``subject`` in errors: all shards of the first complete index, else one file;
    plain names before variants. CheckpointError for none, only pickles, a missing shard, or shards without an index."""
    if not folder.is_dir():
        found, expected = f"no folder {str(folder)!r}", f"the {subject} of this model"
        raise CheckpointError(found, expected=expected, fix="Download the missing folder, and keep its published name.")
    incomplete: list[CheckpointError] = []
    for index in sorted(folder.glob("[!.]*.safetensors.index*.json"), key=_preference):
        try:
            return _shards(index, subject)
        except CheckpointError as error:  # a variant beside it may be whole
            incomplete.append(error)
    single = [file for file in sorted(folder.glob("[!.]*.safetensors"), key=_preference) if "-of-" not in file.name]
    if single:
        return single[:1]
    if incomplete:
        raise incomplete[0]
    if any(folder.glob("[!.]*.safetensors")):
        found = f"shards of the {subject} in {str(folder)!r} without their index"
        raise CheckpointError(found, expected=f"a *{INDEX_SUFFIX} file", fix="Download the index file of this folder.")
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    found = f"only the pickle {pickles[0]!r}" if pickles else "no weights"
    fix = "Download the files of this folder. A git clone without LFS does not include them."
    fix = "Download the safetensors version. Pickles can run code and are refused." if pickles else fix
    raise CheckpointError(f"{found} in {str(folder)!r}", expected=f"the {subject} as .safetensors", fix=fix)


def read_tensors(
    entries: Mapping[str, TensorEntry], dtype: torch.dtype | None, advance: Callable[[int], None], mapped: bool = False
) -> dict[str, torch.Tensor]:
    """The tensors of ``entries``, from :func:`described`, by name in ordinary host memory, contiguous.
    Floats are cast to ``dtype``, packed ones unpacked to it; None keeps the file's bytes. ``advance`` gets the bytes
    just read, at least every 64 MiB; it may raise to cancel. With ``mapped`` large tensors that need no cast may be
    views of the file, which must not be written to: on Windows that ends the process. Peak extra memory: one slice of
    64 MiB. Raises CheckpointError where a file is gone, or is not what it was when its header was read."""
    tensors: dict[str, torch.Tensor] = {}
    for path in dict.fromkeys(entry.file for entry in entries.values()):
        mine = [(name, entry) for name, entry in entries.items() if entry.file == path]
        with opened(path, buffering=0) as file:
            tensors |= _read_all(file, mine, dtype, advance, mapped)
    return tensors


class TensorFile(NamedTuple):
    """A safetensors file that stays open between its header and its tensors."""

    file: BinaryIO
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]

    def read(self, names: Iterable[str], advance: Callable[[int], None]) -> dict[str, torch.Tensor]:
        """The tensors of these names as the file has them; arguments and errors of :func:`read_tensors`."""
        return _read_all(self.file, [(name, self.entries[name]) for name in names], None, advance, mapped=False)


@contextmanager
def tensor_file(path: Path) -> Iterator[TensorFile]:
    """One safetensors file, opened once, its header checked before any tensor is read; errors raise CheckpointError."""
    with opened(path) as file:
        yield TensorFile(file, *header_in(file, path))


def _read_all(
    file: BinaryIO, wanted: Sequence[tuple[str, TensorEntry]], dtype: torch.dtype | None,
    advance: Callable[[int], None], mapped: bool,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """:func:`read_tensors` of one open file; CheckpointError if it changed since its header was read, or meanwhile."""
    tensors: dict[str, torch.Tensor] = {}
    if not wanted:
        return tensors
    _require_unchanged(file, wanted[0][1])
    if hasattr(os, "posix_fadvise"):  # makes Linux read twice as far ahead
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    pages = _pages(file) if mapped and any(is_view(entry) for _, entry in wanted) else None
    for name, entry in sorted(wanted, key=lambda item: item[1].start):
        if pages is not None and is_view(entry):
            tensors[name] = _viewed(pages, entry, dtype, advance)
        else:
            tensors[name] = _reorder_rows(_read_one(file, entry, dtype, advance), entry)
    _require_unchanged(file, wanted[0][1])
    return tensors


def release_pages(tensor: torch.Tensor) -> None:
    """Release the pages of a view of a file, and what was written to it, until it is read again; else do nothing."""
    place = getattr(tensor.untyped_storage(), "pages", None)
    if place is not None:
        _drop(*place)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Path:
    """Write a safetensors file whole or not at all, and return its path; it is on the disk then."""
    from safetensors.torch import save_file

    with replacing(path) as temporary:
        save_file({name: to_host(tensor).contiguous() for name, tensor in tensors.items()}, temporary, dict(metadata))
    return path


def is_view(entry: TensorEntry) -> bool:
    """True for a tensor whose bytes in its file are its values in order, aligned, and enough to be mapped."""
    plain = not entry.is_packed and not entry.swapped and not entry.heads
    return plain and entry.total_bytes >= VIEW_BYTES and entry.start % STORED[entry.dtype].itemsize == 0


def _pages(file: Any) -> mmap.mmap:
    """The file as memory whose changes would stay out of it; read-only on Windows. On a cold load the hint to read from
    front to back beat every other way. Linux reserves nothing for writes, or would refuse files above its memory."""
    if READ_ONLY:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if sys.platform == "linux":
        pages = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        pages.madvise(mmap.MADV_SEQUENTIAL)
        return pages
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _viewed(
    pages: mmap.mmap, entry: TensorEntry, dtype: torch.dtype | None, advance: Callable[[int], None]
) -> torch.Tensor:
    """The tensor as a view of the file; if it must be cast, a copy in ``dtype``, and its pages are released again."""
    stored = STORED[entry.dtype]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # and it is never written to
        flat = torch.frombuffer(pages, dtype=stored, count=entry.total_bytes // stored.itemsize, offset=entry.start)
    if dtype is None or dtype == stored or not stored.is_floating_point:
        flat.untyped_storage().pages = pages, entry.start, entry.end  # type: ignore[attr-defined]  # for release_pages
        advance(entry.total_bytes)
        return flat.view(entry.shape)
    tensor = torch.empty(entry.shape, dtype=dtype)
    count = max(1, SLICE_BYTES // stored.itemsize)
    for first in range(0, flat.numel(), count):
        part = flat[first : first + count]
        tensor.view(-1)[first : first + count].copy_(part)
        begin = entry.start + first * stored.itemsize
        _drop(pages, begin, begin + part.nbytes)
        advance(part.nbytes)
    return tensor


def _drop(pages: mmap.mmap, start: int, end: int) -> None:
    """Take the whole pages between two bytes of a file out of this process; they stay in the page cache."""
    start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start and hasattr(pages, "madvise"):
        pages.madvise(mmap.MADV_DONTNEED, start, end - start)


def _read_one(
    file: BinaryIO, entry: TensorEntry, dtype: torch.dtype | None, advance: Callable[[int], None]
) -> torch.Tensor:
    """The tensor of ``entry``, rows in the file's order: a sparse one made dense; a packed one unpacked to ``dtype``,
    for None left as (rows, elements); others read straight into their memory, floats through one slice if cast."""
    stored = STORED[entry.dtype]
    if entry.mask is not None:
        return _dense(file, entry, dtype or stored, advance)
    file.seek(entry.start)
    if entry.is_packed and dtype is not None:
        return _unpacked(file, entry, dtype, advance)
    wanted = dtype if dtype is not None and stored.is_floating_point else stored
    rows = entry.shape[0] if entry.codec else 1
    shape = (rows, entry.total_bytes // rows // stored.itemsize) if entry.codec else entry.shape
    tensor = torch.empty(shape, dtype=wanted)
    if not tensor.numel():
        return tensor
    flat = tensor.view(-1)
    per_slice = max(1, (SLICE_BYTES if wanted == stored else min(SLICE_BYTES, CAST_BYTES)) // stored.itemsize)
    buffer = None if wanted == stored else torch.empty(min(per_slice, flat.numel()), dtype=stored)
    for start in range(0, flat.numel(), per_slice):
        part = flat[start : start + per_slice]
        target = part if buffer is None else buffer[: part.numel()]
        _fill(file, target, entry.file)
        if buffer is not None:
            part.copy_(target)
        advance(part.numel() * stored.itemsize)
    return tensor


def _unpacked(file: BinaryIO, entry: TensorEntry, dtype: torch.dtype, advance: Callable[[int], None]) -> torch.Tensor:
    """The values of a packed tensor as ``dtype``, multiplied out in fp32, some rows at a time."""
    rows = entry.shape[0] if entry.shape else 1
    result = torch.empty((rows, math.prod(entry.shape[1:])), dtype=dtype)
    width = entry.total_bytes // rows
    sides = _sides(file, replace(entry, swapped=False, heads=0))  # rows in the file's order; the caller reorders
    file.seek(entry.start)
    for first in range(0, rows, max(1, SLICE_BYTES // width)):
        part = result[first : first + max(1, SLICE_BYTES // width)]
        raw = torch.empty((len(part), width), dtype=torch.uint8)
        _fill(file, raw, entry.file)
        mine = rows_of(sides, rows, slice(first, first + len(part)))
        part.copy_(unpacked(entry.codec, raw.view(STORED[entry.dtype]), mine, entry.group, dtype))
        advance(raw.numel())
    return result.view(entry.shape)


def _dense(file: BinaryIO, entry: TensorEntry, dtype: torch.dtype, advance: Callable[[int], None]) -> torch.Tensor:
    """A sparse tensor as ``dtype``, unpacked: values at set bits of its mask, else 0; CheckpointError for a misfit."""
    assert entry.mask is not None
    bits = _read_one(file, entry.mask, None, lambda _bytes: None)
    places = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)).bitwise_and_(1).flatten().nonzero()[:, 0]
    count = entry.total_bytes // STORED[entry.dtype].itemsize
    if len(places) != count or (count and int(places[-1]) >= math.prod(entry.shape)):
        raise damaged(entry.file, f"a mask of {len(places)} values where {count} are stored")
    entry, plain = replace(entry, swapped=False, heads=0), replace(entry, shape=(count,), codec="", sides=(), mask=None)
    result = torch.zeros(math.prod(entry.shape), dtype=torch.float32)
    result[places] = _read_one(file, plain, None, advance).to(torch.float32)
    if entry.codec:
        result = unpacked(entry.codec, result.view(entry.shape[0], -1), _sides(file, entry), entry.group, torch.float32)
    return result.view(entry.shape).to(dtype)


def described(files: Sequence[Path]) -> dict[str, TensorEntry]:
    """All tensors of a part's ``files`` by name, sparse ones with their masks, packed ones with their side tensors.
    Raises CheckpointError for damage or a name in two files, UnsupportedError for a format that is not read."""
    entries: dict[str, TensorEntry] = {}
    for file in files:
        found, notes = entries_and_notes(file)
        mine = with_masks(found, notes, file)
        if any(entry.dtype not in FLOATS for entry in mine.values()):
            from .quantised import with_scales

            mine = with_scales(mine, notes, file)
        twice = sorted(entries.keys() & mine.keys())
        if twice:
            raise damaged(file, f"tensor {twice[0]!r}, which {entries[twice[0]].file.name} has too")
        entries.update(mine)
    return entries


def read_sides(entry: TensorEntry) -> dict[str, torch.Tensor]:
    """The side tensors of a packed weight by name, with a row for each row of the weight, in its model's order."""
    with opened(entry.file, buffering=0) as file:
        return _sides(file, entry)


def outlined_sides(entry: TensorEntry) -> dict[str, torch.Tensor]:
    """The tensors of :func:`read_sides` on the meta device, without values."""
    return _sides(None, entry)


def _sides(file: BinaryIO | None, entry: TensorEntry) -> dict[str, torch.Tensor]:
    """:func:`read_sides` from an open file, or :func:`outlined_sides` for None; empty without side tensors."""
    packing = PACKINGS.get(entry.codec)
    if packing is None:
        return {}
    first, rows = entry.part[0], entry.part[1] or entry.shape[0]
    columns = math.prod(entry.shape[1:])

    def side(each: TensorEntry) -> torch.Tensor:
        outline = torch.empty(each.shape, dtype=STORED[each.dtype], device="meta")
        return outline if file is None else _read_one(file, each, None, lambda _: None)

    read = {name: side(each) for name, each in entry.sides if name != "state"}
    sides = {name: laid_out(side, packing.sides.get(name, ALL), rows, columns) for name, side in read.items()}
    if "nested" in sides:
        offset = (json_object(bytes_of(dict(entry.sides)["state"])) or {}).get("nested_offset")
        sides = unnested(sides, offset if isinstance(offset, float) else 0.0)
    mine = rows_of(sides, rows, slice(first, first + entry.shape[0]))
    per_row = {name for name, side in mine.items() if len(side) == entry.shape[0] > 1}
    return {name: _reorder_rows(side, entry) if name in per_row else side for name, side in mine.items()}


def _reorder_rows(tensor: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """``tensor`` with its rows in the order of the model, by ``swapped`` and ``heads`` of its entry."""
    if entry.swapped:
        tensor = torch.cat(tensor.chunk(2)[::-1])
    if entry.heads:
        pairs = tensor.view(entry.heads, tensor.shape[0] // entry.heads // 2, 2, *tensor.shape[1:])
        tensor = pairs.transpose(1, 2).reshape(tensor.shape)
    return tensor


def _require_unchanged(file: Any, entry: TensorEntry) -> None:
    """Raise CheckpointError if a file changed since its header was read: another download wrote over it."""
    status = os.fstat(file.fileno())
    if entry.stamp != (0, 0) and entry.stamp != (status.st_size, status.st_mtime_ns):
        fix = "Wait until it has been written, then load it again."
        raise damaged(entry.file, "changed since its header was read", fix)


def _fill(file: BinaryIO, target: torch.Tensor, path: Path) -> None:
    """Read the next bytes of the file into all of ``target``; CheckpointError if it ends before."""
    array: Any = target.view(torch.uint8).numpy()
    view = memoryview(array)
    while view:
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise damaged(path, "changed while it was read")
        view = view[count:]


def _shards(index: Path, subject: str) -> list[Path]:
    """The files that a shard index names, sorted; CheckpointError if one is missing or not beside the index."""
    mapping = read_json(index, f"the shard index of the {subject}").get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        found = f"no weight_map in {str(index)!r}"
        raise CheckpointError(found, expected=f"the shard index of the {subject}", fix="Download this file again.")
    names = sorted(set(map(str, mapping.values())))
    missing = [name for name in names if Path(name).name != name or not value_or((index.parent / name).is_file, False)]
    if missing:
        found = f"shard {missing[0]!r} of the {subject} is missing from {str(index.parent)!r}"
        expected = f"{len(names)} shards, as {index.name} says"
        raise CheckpointError(found, expected=expected, fix="Download the missing file into this folder.")
    return [index.parent / name for name in names]


def _preference(file: Path) -> tuple[bool, str]:
    """Sort key: plain names before variants such as ``model.fp16.safetensors``, or with ``fp16`` beside ``index``."""
    return file.name.removesuffix(INDEX_SUFFIX).removesuffix(".safetensors").count(".") > 0, file.name
