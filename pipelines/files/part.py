"""The parts of a pipeline on disk: class, configuration, checked headers, and the bytes that they take in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...compat.checkpoints.headers import STORED, TensorEntry
from ...compat.checkpoints.packed import dense_bytes, memory_bytes, stays_packed, stays_plain
from ...compat.checkpoints.scaled import described
from ...compat.checkpoints.weights import is_view, read_json, weight_files
from ...compat.errors import CheckpointError
from ..base import Progress
from ..family import FamilySpec


@dataclass(frozen=True, slots=True)
class PartFiles:
    """One part of a pipeline on disk; headers were read, weights were not.

    Args:
        name: part name.
        library, cls: what builds it.
        folder: its folder, or its file.
        config: its ``config.json``.
        entries: its tensors.
        dtype: what floating tensors become.
        dtype_of: from name and shape of a floating tensor to what it becomes instead; one that does not fit stays as
            ``dtype``.
        storage: how its blocks' weights are kept in memory, of ``packed.CHOICES``.
        keeps_packed: whether those that the file has packed stay as they are.
        by_bits: whether the device's own cast of bf16 is broken.
        mapped: whether large tensors that need no cast may be views of the file.
        staged: whether such views go to a device by way of ordinary memory.
        settings: attributes that the module gets once it is built.
    """

    name: str
    library: str
    cls: str
    folder: Path
    config: Mapping[str, Any]
    entries: Mapping[str, TensorEntry]
    dtype: torch.dtype
    dtype_of: Callable[[str, tuple[int, ...]], torch.dtype] | None = None
    storage: str = "auto"
    keeps_packed: bool = False
    by_bits: bool = False
    mapped: bool = False
    staged: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Bytes of the part once it is in memory."""
        return sum(self.bytes_of(name, entry) for name, entry in self.entries.items())

    @property
    def view_bytes(self) -> int:
        """Bytes of the tensors that may be views of the file, where that is wanted."""
        return sum(entry.total_bytes for name, entry in self.entries.items() if self.may_be_view(name, entry))

    def may_be_view(self, name: str, entry: TensorEntry) -> bool:
        """Tell whether the tensor ``name`` is used as its file has it, so that it may be a view of the file."""
        uncast = not entry.is_floating or self.becomes(name) == STORED[entry.dtype]
        kept = uncast and self.storage in ("auto", "as in file")
        return is_view(entry) and (kept or stays(self, name, entry))

    def bytes_of(self, name: str, entry: TensorEntry) -> int:
        """Bytes of the tensor ``name`` once it is in memory."""
        if not entry.is_floating:
            return entry.total_bytes
        if self.dtype_of is not None or (self.storage == "auto" and not self.keeps_packed):
            return math.prod(entry.shape) * self.becomes(name).itemsize
        return memory_bytes(name, entry, self.storage, self.keeps_packed, self.dtype)

    @property
    def dense_bytes(self) -> int:
        """Bytes at the peak of making the largest packed weight dense, as each use does; 0 where none is packed."""
        if self.dtype_of is not None or (self.storage == "auto" and not self.keeps_packed):
            return 0
        how = (self.storage, self.keeps_packed, self.dtype)
        floats = ((name, entry) for name, entry in self.entries.items() if entry.is_floating)
        return max((dense_bytes(name, entry, *how) for name, entry in floats), default=0)

    def becomes(self, name: str) -> torch.dtype:
        """The dtype of the floating tensor ``name`` in memory."""
        return self.dtype if self.dtype_of is None else self.dtype_of(name, tuple(self.entries[name].shape))


def part_files(name: str, library: str, cls: str, folder: Path, dtype: torch.dtype) -> PartFiles:
    """The part in ``folder``, with every header checked.

    Raises:
        CheckpointError: configuration or weights are missing or damaged.
    """
    config = read_json(folder / "config.json", f"the configuration of the {name}") if folder.is_dir() else {}
    entries = described(weight_files(folder, name))
    if not entries:
        raise CheckpointError(
            f"no tensors in the weights of {str(folder)!r}", expected=f"the {name}", fix="Download this folder again."
        )
    return PartFiles(name=name, library=library, cls=cls, folder=folder, config=config, entries=entries, dtype=dtype)


def stays(files: PartFiles, name: str, entry: TensorEntry) -> bool:
    """Tell whether a layer's weight stays in memory as the file has it."""
    if files.keeps_packed and stays_packed(name, entry):
        return True
    return files.dtype_of is None and stays_plain(name, entry, files.storage, files.dtype)


def without_text(family: FamilySpec, has: Callable[[str], bool], progress: Progress) -> tuple[str, ...]:
    """The text parts and tokenizers of a model that ``has`` none of its text encoders, which is said; else none."""
    if any(map(has, family.files.text_parts)):
        return ()
    progress.notify("without text encoder: connect AnyGPU Load Prompt or core CONDITIONING")
    return (*family.files.text_parts, *(tool for tool in family.files.tools if tool.startswith("tokenizer")))


def tool_configs(family: FamilySpec) -> dict[str, dict[str, Any]]:
    """The small configurations that a family's pipelines were published with: scheduler, guider, index.

    None for a family that is read from folders alone.
    """
    if not (family.folder / "tools.json").is_file():
        return {}
    return read_json(family.folder / "tools.json", "the pipelines' settings")
