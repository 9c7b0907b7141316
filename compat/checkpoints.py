"""Reading and writing safetensors: headers checked before a byte of weights is touched, reads that obey a cancel.

Nothing here unpickles. Weights are read into ordinary memory in slices, never mapped: progress is real, a cancel acts
within one slice, no mapped page stays behind an offload hook, and the peak is the result, not the result and the file.
"""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .errors import CheckpointError

SLICE_BYTES = 64 * 1024**2
HEADER_LIMIT_BYTES = 100_000_000  # the safetensors library's own limit
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
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
INDEX_SUFFIX = ".safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as its file declares it; ``start`` and ``end`` are offsets in bytes after the header."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def total_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.end - self.start


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: the file.
        what: what the file is, for the error.

    Raises:
        CheckpointError: the file is absent, not JSON, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"no {path.name} in {str(path.parent)!r}", expected=what, fix="Download the whole folder again."
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read ({error})", expected=f"{what} as JSON", fix="Download this file again."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{str(path)!r} holds a {type(content).__name__}",
            expected=f"{what} as a JSON object",
            fix="Download this file again.",
        )
    return content


def header_of(path: Path) -> dict[str, TensorEntry]:
    """The tensors that one safetensors file declares, checked against the file's length.

    Raises:
        CheckpointError: the file is too short, truncated, or its header is not safetensors.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _damaged(path, f"only {size} bytes")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(size - 8, HEADER_LIMIT_BYTES):
                raise _damaged(path, f"a header of {length} bytes in a file of {size} bytes")
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"no file {str(path)!r}", expected="a safetensors file", fix="Download this file again."
        ) from error
    except ValueError as error:
        raise _damaged(path, "a header that is not JSON") from error
    return _entries(path, header, size - 8 - length)


def weight_files(folder: Path, subject: str) -> list[Path]:
    """The safetensors files that hold one part's weights, whole: a single file, or every shard of its index.

    Args:
        folder: the part's folder.
        subject: what the part is, for the error, such as ``transformer``.

    Raises:
        CheckpointError: no weights, only pickles, or a shard missing.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"no folder {str(folder)!r}",
            expected=f"the {subject} of this model",
            fix="Download the missing folder; its name must stay as published.",
        )
    incomplete: list[CheckpointError] = []
    for index in sorted(folder.glob("*.safetensors.index*.json"), key=_preference):
        try:
            return _shards(index, subject)
        except CheckpointError as error:  # a variant beside it may be whole
            incomplete.append(error)
    single = [file for file in sorted(folder.glob("*.safetensors"), key=_preference) if "-of-" not in file.name]
    if single:
        return single[:1]
    if incomplete:
        raise incomplete[0]
    if any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"shards of the {subject} in {str(folder)!r} without their index",
            expected=f"a *{INDEX_SUFFIX} file",
            fix="Download the index file of this folder.",
        )
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise CheckpointError(
            f"only the pickle {pickles[0]!r} in {str(folder)!r}",
            expected=f"the {subject} as .safetensors",
            fix="Download the safetensors version: a pickle can run code and is refused.",
        )
    raise CheckpointError(
        f"no weights in {str(folder)!r}",
        expected=f"the {subject} as .safetensors",
        fix="Download the files of this folder; a git clone without LFS leaves them out.",
    )


def declared(files: Sequence[Path]) -> dict[str, TensorEntry]:
    """All tensors that ``files`` declare, by name."""
    entries: dict[str, TensorEntry] = {}
    for file in files:
        entries.update(header_of(file))
    return entries


def read_tensors(
    entries: Mapping[str, TensorEntry],
    dtype: torch.dtype | None,
    advance: Callable[[int], None],
) -> dict[str, torch.Tensor]:
    """The tensors of ``entries`` in ordinary host memory.

    Args:
        entries: what to read, from :func:`declared`.
        dtype: floating tensors are cast to it; None keeps the file's dtype.
        advance: called with the file bytes just read, at least every 64 MiB; may raise to cancel.

    Returns:
        Name to tensor, contiguous. Peak extra memory: one slice of 64 MiB, and the file's page cache.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in dict.fromkeys(entry.file for entry in entries.values()):
        with path.open("rb", buffering=0) as file:
            (length,) = struct.unpack("<Q", file.read(8))
            mine = [(name, entry) for name, entry in entries.items() if entry.file == path]
            for name, entry in sorted(mine, key=lambda item: item[1].start):
                file.seek(8 + length + entry.start)
                tensors[name] = _read_one(file, entry, dtype, advance)
    return tensors


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Path:
    """Write a safetensors file whole or not at all, and return its path.

    The file is written beside its destination and renamed, so that a crash or a full disk leaves the old one.
    """
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(descriptor)
    try:
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary, dict(metadata)
        )
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _read_one(
    file: BinaryIO, entry: TensorEntry, dtype: torch.dtype | None, advance: Callable[[int], None]
) -> torch.Tensor:
    """The tensor at the file's position, read straight into its own memory, or through one slice where it is cast."""
    stored = STORED[entry.dtype]
    wanted = dtype if dtype is not None and stored.is_floating_point else stored
    tensor = torch.empty(entry.shape, dtype=wanted)
    if not tensor.numel():
        return tensor
    flat = tensor.view(-1)
    per_slice = max(1, SLICE_BYTES // stored.itemsize)
    buffer = None if wanted == stored else torch.empty(min(per_slice, flat.numel()), dtype=stored)
    for start in range(0, flat.numel(), per_slice):
        part = flat[start : start + per_slice]
        target = part if buffer is None else buffer[: part.numel()]
        _fill(file, target, entry.file)
        if buffer is not None:
            part.copy_(target)
        advance(part.numel() * stored.itemsize)
    return tensor


def _fill(file: BinaryIO, target: torch.Tensor, path: Path) -> None:
    array: Any = target.view(torch.uint8).numpy()
    view = memoryview(array)
    while view:
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise _damaged(path, "changed while it was read")
        view = view[count:]


def _entries(path: Path, header: Any, data_bytes: int) -> dict[str, TensorEntry]:
    if not isinstance(header, dict):
        raise _damaged(path, "a header that is not an object")
    entries: dict[str, TensorEntry] = {}
    try:
        for name, record in header.items():
            if name == "__metadata__":
                continue
            start, end = record["data_offsets"]
            shape = tuple(map(int, record["shape"]))
            entry = TensorEntry(path, str(record["dtype"]), shape, int(start), int(end))
            if entry.dtype not in STORED or entry.total_bytes != STORED[entry.dtype].itemsize * math.prod(shape):
                raise _damaged(path, f"tensor {name!r} of {entry.dtype} {shape} in {entry.total_bytes} bytes")
            entries[name] = entry
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, "a header without offsets") from error
    last = max((entry.end for entry in entries.values()), default=0)
    if last != data_bytes:
        raise _damaged(path, f"{data_bytes} bytes of tensors where its header declares {last}")
    return entries


def _shards(index: Path, subject: str) -> list[Path]:
    mapping = read_json(index, f"the shard index of the {subject}").get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointError(
            f"no weight_map in {str(index)!r}",
            expected=f"the shard index of the {subject}",
            fix="Download this file again.",
        )
    names = sorted(set(map(str, mapping.values())))
    missing = [name for name in names if Path(name).name != name or not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"shard {missing[0]!r} of the {subject} is missing from {str(index.parent)!r}",
            expected=f"{len(names)} shards, as {index.name} says",
            fix="Download the missing file into this folder.",
        )
    return [index.parent / name for name in names]


def _preference(file: Path) -> tuple[bool, str]:
    """Plain names before variants: ``model.fp16.safetensors``, ``model.safetensors.index.fp16.json`` (what diffusers
    and transformers write) and ``model.fp16.safetensors.index.json``.
    """
    return file.name.removesuffix(INDEX_SUFFIX).removesuffix(".safetensors").count(".") > 0, file.name


def _damaged(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} has {found}",
        expected="a whole safetensors file",
        fix="The download was cut short: fetch it again.",
    )
