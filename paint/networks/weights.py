"""Weight files of paint checkpoints: safetensors, and the .bin that upstream publishes, read without running code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from ...compat.checkpoints.headers import TensorEntry
from ...compat.checkpoints.pickled import pickled_tensors
from ...compat.checkpoints.weights import described, read_tensors, weight_files
from ...compat.errors import CheckpointError, require_choice
from ..choices import STORED_AS as CHOICES

NO_WHOLE = re.compile(r"optimizer|scheduler|sampler|training_args|.*-\d+-of-\d+\.")  # .bin, but not a whole network's
DtypeOf = Callable[[str], torch.dtype]
Advance = Callable[[int], None]
Shapes = Mapping[str, tuple[int, ...]]  # tensor name to shape


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors that one part's files hold; shapes are known, values are read on demand."""

    path: Path  # the file, or the first of several
    shapes: Shapes
    entries: Mapping[str, TensorEntry] | None  # for safetensors; None for a pickle and for tensors of the host
    total_bytes: int  # of all tensors, as stored
    held: Callable[[str], torch.Tensor] | None = None  # a tensor that the host program has loaded
    file: Path | None = None  # that has the values of these; None where nobody knows one

    def bytes_as(self, dtype: torch.dtype) -> dict[str, int]:
        return {name: prod(shape) * dtype.itemsize for name, shape in self.shapes.items()}

    def bytes_of(self, names: Iterable[str]) -> int:
        """The bytes of some tensors, as stored; without entries, as if all tensors had one dtype."""
        if self.entries is not None:
            return sum(self.entries[name].total_bytes for name in names)
        values = sum(prod(self.shapes[name]) for name in names)
        return self.total_bytes * values // max(1, sum(map(prod, self.shapes.values())))

    def read(self, names: Iterable[str], dtype_of: DtypeOf, advance: Advance) -> dict[str, torch.Tensor]:
        """The tensors ``names`` in ordinary host memory, floating ones in ``dtype_of(name)``. ``advance`` gets the file
        bytes just read, and may raise to cancel. Peak extra memory: 64 MiB, and for a pickle one tensor more."""
        if self.entries is None:
            return _copies(self.held or pickled_tensors(self.path).pop, names, dtype_of, advance)
        groups: dict[torch.dtype | None, dict[str, TensorEntry]] = {}
        for name in names:
            entry = self.entries[name]
            groups.setdefault(dtype_of(name) if entry.is_floating else None, {})[name] = entry
        tensors: dict[str, torch.Tensor] = {}
        for dtype, entries in groups.items():
            tensors |= read_tensors(entries, dtype, advance)
        return tensors


def weights_in(place: Path, part: str, choice: str = "auto") -> Weights:
    """The weights of ``part``: in a folder as ``choice`` says, or in one .bin or .safetensors file, which ignores it.

    Of a .bin and a .safetensors in one folder ``auto`` takes the .bin, as upstream's own loader does: those of turbo
    are different trainings. Raises CheckpointError for missing or damaged weights, InputError for an unknown choice."""
    require_choice("weights", choice, CHOICES)
    if place.is_file():
        return _pickle(place) if place.suffix == ".bin" else _safetensors([place])
    pickles = [file for file in place.glob("[!.]*.bin") if not NO_WHOLE.match(file.name)] if place.is_dir() else []
    pickles.sort(key=lambda file: (file.name.count("."), file.name))  # model.bin before model.fp16.bin
    if choice == "bin" and not pickles:
        found, expected = f"no .bin in {str(place)!r}", f"the {part} as one .bin"
        raise CheckpointError(found, expected=expected, fix="Choose weights auto, or download the .bin file.")
    if pickles and choice != "safetensors":
        return _pickle(pickles[0])
    return _safetensors(weight_files(place, part))


def require_shapes(shapes: Shapes, wanted: Shapes, place: str, fix: str, why: str = "") -> None:
    """Raise CheckpointError unless ``shapes`` are exactly ``wanted``; ``place`` and ``why`` complete the message, such
    as "of the VAE in 'x'" and "as its config.json says"."""
    wrong = min((name for name in wanted.keys() | shapes.keys() if wanted.get(name) != shapes.get(name)), default=None)
    if wrong is not None:
        expected = str(wanted.get(wrong, "no such tensor")) + (f", {why}" if why else "")
        raise CheckpointError(f"{wrong!r} {place} is {shapes.get(wrong, 'missing')}", expected=expected, fix=fix)


def _safetensors(files: list[Path]) -> Weights:
    """The weights in one part's files; raises CheckpointError where they hold no tensor."""
    entries = described(files)
    if not entries:
        found = f"no tensors in the weights of {str(files[0])!r}"
        raise CheckpointError(found, expected="the weights of a network", fix="Download this file again.")
    shapes = {name: entry.shape for name, entry in entries.items()}
    return Weights(files[0], shapes, entries, sum(entry.total_bytes for entry in entries.values()))


def _pickle(path: Path) -> Weights:
    tensors = pickled_tensors(path)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Weights(path, shapes, None, sum(t.numel() * t.element_size() for t in tensors.values()))


def _copies(
    held: Callable[[str], torch.Tensor], names: Iterable[str], dtype_of: DtypeOf, advance: Advance
) -> dict[str, torch.Tensor]:
    """Copies of some tensors, so that no page of a file stays mapped, and no change reaches what the host has."""
    tensors = {}
    for name in names:
        tensor = held(name)
        dtype = dtype_of(name) if tensor.is_floating_point() else tensor.dtype
        tensors[name] = tensor.to(dtype, copy=True).contiguous()
        advance(tensor.numel() * tensor.element_size())
    return tensors
