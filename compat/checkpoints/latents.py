"""Tensors with their metadata in one safetensors file: written whole or not at all, bit for bit, from any device.
The metadata is JSON under ``anygpu``; other keys belong to others, such as the workflow that ComfyUI reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..device.execution import to_host
from ..errors import CheckpointError, InputError, first_line, require_choice
from .headers import STORED, entries_and_notes, json_object
from .weights import tensor_file, write_tensors

RECORD = "anygpu"
AGAIN = "Sample again with precision fp32 or bf16, or set not_finite to clamp to replace these values."
NOT_FINITE = ("refuse", "clamp")  # what is done about NaN and infinity; grows at the end


def write_record(
    path: Path, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """Write ``tensors`` as :func:`written`, with their ``record`` as JSON beside the other keys of ``metadata``."""
    return written(path, tensors, {**(metadata or {}), RECORD: json.dumps(record)})


def written(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Path:
    """Write ``tensors``, from any device, and return ``path``.
    Raises CheckpointError for an unwritable folder or a full disk; the old file, if any, is as it was."""
    here = _unshared({name: to_host(tensor).contiguous() for name, tensor in tensors.items()})
    size = sum(tensor.numel() * tensor.element_size() for tensor in here.values())
    try:
        return write_tensors(path, here, metadata)
    except Exception as error:  # the library that writes has an error class of its own, which is not an OSError
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        found = f"{str(path)!r} cannot be written ({first_line(error)})"
        fix = "Free space on this disk or choose another folder. Files that were there before are unchanged."
        raise CheckpointError(found, expected=f"a writable folder with {size / 1e6:.1f} MB free", fix=fix) from error


def read_record(path: Path, subject: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a file, in host memory, and its metadata; CheckpointError, which names ``subject``, for none."""
    with tensor_file(path) as file:
        if not file.entries:
            found = f"no tensors in {str(path)!r}"
            raise CheckpointError(found, expected=f"a file of {subject}", fix="Choose another.")
        return file.read(file.entries, lambda _bytes: None), dict(file.metadata)


def metadata_of(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; only its header is read."""
    return entries_and_notes(path)[1]


def record_in(metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    """Our record in a file's metadata; empty if another program wrote the file, CheckpointError if it is not JSON."""
    if RECORD not in metadata:
        return {}
    record = json_object(metadata[RECORD])
    if record is None:
        found = f"the metadata {RECORD!r} of {str(path)!r} is not a JSON object"
        expected = "a file that an AnyGPU node saved"
        raise CheckpointError(found, expected=expected, fix="Choose another file, or save it again.")
    return record


def require_version(path: Path, record: Mapping[str, Any], subject: str, newest: int) -> None:
    """Raise InputError, which names ``subject``, if a record has a version above ``newest``; without one it passes."""
    version = record.get("version")
    if isinstance(version, int) and version > newest:
        found = f"{subject} of version {version} in {path.name!r}"
        raise InputError(found, expected=f"version {newest} or older", fix="Update AnyGPU.")


def finite(tensor: torch.Tensor, subject: str, choice: str, fix: str = AGAIN) -> tuple[torch.Tensor, str]:
    """``tensor`` without NaN and infinity, and a text on what was done, empty for nothing. The choice ``refuse`` raises
    InputError; ``clamp`` makes NaN 0, and infinity the largest or least finite value in ``tensor``, 0 without one."""
    require_choice("not_finite", choice, NOT_FINITE, "Choose refuse.")
    if not tensor.is_floating_point():
        return tensor, ""
    whole = tensor if tensor.itemsize > 1 else tensor.float()  # torch cannot ask 8-bit floats
    sound = torch.isfinite(whole)
    broken, count = tensor.numel() - int(sound.sum()), tensor.numel()
    if not broken:
        return tensor, ""
    text = f"{broken} of {count} values of the {subject} are NaN or infinite"
    if choice == "refuse":
        raise InputError(text, expected="finite values", fix=fix)
    values = whole[sound]
    low, high = (float(values.min()), float(values.max())) if values.numel() else (0.0, 0.0)
    clamped = torch.nan_to_num(whole, nan=0.0, posinf=high, neginf=low).to(tensor.dtype)
    return clamped, f"{text}: NaN became 0, infinity {low:g} or {high:g}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype of a name in a record; None for one that safetensors cannot store."""
    return next((dtype for dtype in STORED.values() if dtype_name(dtype) == name), None)


def _unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``tensors``, cloned where two share memory, which safetensors refuses to write."""
    seen: set[int] = set()
    separate: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if place in seen and tensor.numel() else tensor
        seen.add(place)
    return separate
