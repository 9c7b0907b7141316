"""The content of a model, a file or pictures as one short hash that is the same on every machine.

Models are tens of gigabytes, so a file above :data:`WHOLE_BYTES` is identified by its size and by samples of its bytes,
spread evenly: a training changes nearly every weight. Neither paths nor times are part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ..device.execution import to_host
from .headers import unreadable

WHOLE_BYTES = 64 * 1024**2  # up to which a file is hashed whole: LoRAs, encoders' tokenizers, configurations
SAMPLES, SAMPLE_BYTES = 64, 64 * 1024  # of a larger one: one per block of the largest transformers here
SUFFIXES = frozenset((".safetensors", ".gguf", ".bin", ".json", ".txt", ".model"))
INDEX = "model_index.json"
DIGITS = 32  # of a hash: 128 bits

_known: dict[tuple[str, int, int], str] = {}  # of files, while they do not change


def content_of(path: Path) -> str:
    """The hash of a file, or of the files of a model folder that decide what it makes; empty where nothing is there.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        if path.is_file():
            return _file(path)
        return _folder(path) if path.is_dir() else ""
    except OSError as error:
        raise unreadable(path, error) from error


def picture_content(frames: torch.Tensor) -> str:
    """The hash of frames (F, H, W, 3 or 4) in 0..1, in steps of 8 bits as files have them, whatever file they came
    from."""
    levels = to_host(frames).clamp(0, 1).mul(255).round().to(torch.uint8)
    return levels_content(tuple(levels.shape), [bytes_of(levels)])


def levels_content(shape: Sequence[int], parts: Iterable[bytes]) -> str:
    """The same of frames (F, H, W, 3) in 8 bits that come one after the other."""
    digest = hashlib.sha256(json.dumps(list(shape)).encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:DIGITS]


def bytes_of(values: torch.Tensor) -> bytes:
    """Every bit of a tensor of any dtype, in the order of its indices."""
    return to_host(values).contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _folder(folder: Path) -> str:
    """Of a pipeline the parts that its index names, so that other files beside them do not count.

    Parts that a demo model borrows from another do not either: both ship with the pack, and so change together.
    """
    names: list[str] | None = None
    if (folder / INDEX).is_file():
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            index = None
        names = [INDEX, *index] if isinstance(index, dict) else None
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix()):
        place = path.relative_to(folder)
        hidden = any(name.startswith(".") for name in place.parts)
        if path.suffix in SUFFIXES and not hidden and (names is None or place.parts[0] in names) and path.is_file():
            digest.update(f"{place.as_posix()}\0{_file(path)}\0".encode())
    return digest.hexdigest()[:DIGITS]


def _file(path: Path) -> str:
    status = path.stat()
    key = (str(path), status.st_size, status.st_mtime_ns)
    if key not in _known:
        digest = hashlib.sha256(f"{status.st_size}\0".encode())
        with path.open("rb") as file:
            if status.st_size <= WHOLE_BYTES:
                digest.update(file.read())
            else:
                last = status.st_size - SAMPLE_BYTES
                for index in range(SAMPLES):
                    file.seek(last * index // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
        _known[key] = digest.hexdigest()[:DIGITS]
    return _known[key]
