"""How the weights of a pipeline are kept in memory, apart from what computes: the choice, its step, what it saves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ..compat import probes, quantized
from ..compat.device import DeviceFacts
from ..compat.headers import STORED
from ..compat.offload import GIGABYTE
from ..compat.precision import Precision
from ..compat.transfer import casts_wrongly
from .reading import PartFiles
from .rewriting import Order, Step

log = logging.getLogger(__name__)
FILE_CHOICES = ("auto", "as in file")
# Where large tensors that need no cast are views of their file: no second copy in memory, no copy at all before the
# device's own. Elsewhere weights are read into memory of their own: on ROCm each copy from a mapped page stalled for
# half a second to two (Comfy-Org/ComfyUI#15001, ROCm/ROCm#5952 and #6358); of the others nobody has told.
MAPPED: dict[str, str] = {
    "cpu": "the page cache is the memory that computes",
    "cuda": "the driver stages a mapped page as it does any other that is not pinned",
}


class Choices(Protocol):
    """What the user chose of storage and offload."""

    @property
    def weights(self) -> str: ...
    @property
    def text_weights(self) -> str: ...
    @property
    def offload(self) -> str: ...


def with_storage(
    files: Mapping[str, PartFiles],
    chosen: Choices,
    text_parts: tuple[str, ...],
    precision: Precision,
    facts: DeviceFacts,
) -> dict[str, PartFiles]:
    """``files`` of every part with how it is kept: transformer and text encoders as chosen, all else as it computes.

    Raises:
        InputError, UnsupportedError: an unknown choice, or one that does not go with the others.
    """
    quantized.require_storable(chosen.weights, "weights", chosen.offload, precision)
    quantized.require_storable(chosen.text_weights, "text_weights", chosen.offload, precision)
    choices = {"transformer": chosen.weights, **dict.fromkeys(text_parts, chosen.text_weights)}
    eight, broken = has_eight_bits(facts.device), casts_wrongly(facts.device, torch.bfloat16)
    mapped = facts.backend in MAPPED
    return {
        name: replace(_kept(part, choices.get(name, "auto"), eight), by_bits=broken, mapped=mapped)
        for name, part in files.items()
    }


def has_eight_bits(device: torch.device) -> bool:
    """Whether ``device`` holds float8 tensors and casts them right."""
    try:
        return not probes.eight_bits(device)
    except (RuntimeError, NotImplementedError, TypeError):
        return False


def storage_step(files: Mapping[str, PartFiles]) -> Step:
    """The step that packs weights as chosen; those that a file has packed were read so."""
    return Step(Order.STORAGE, "storage of weights", partial(_apply, dict(files)))


def notes(files: Mapping[str, PartFiles]) -> tuple[str, ...]:
    """One line for each part whose weights are kept smaller than they compute."""
    found = []
    for name, part in files.items():
        dense = replace(part, storage="auto", keeps_packed=False).total_bytes
        if part.total_bytes < dense:
            how = "as in the file" if part.storage in FILE_CHOICES else part.storage
            found.append(f"{name} kept {how}: {part.total_bytes / GIGABYTE:.1f} of {dense / GIGABYTE:.1f} GB")
    return tuple(found)


def _kept(part: PartFiles, choice: str, eight: bool) -> PartFiles:
    """A part under a choice; what a device without float8 cannot hold is made dense on the host while it is read."""
    dense = part.dtype_of is not None or part.library != "diffusers" or choice not in FILE_CHOICES
    floats = any(e.dtype in ("F8_E4M3", "F8_E5M2") for e in part.entries.values())
    packs = any(quantized.stays_packed(name, entry) for name, entry in part.entries.items())
    return replace(part, storage=choice, keeps_packed=packs and not dense and (eight or not floats))


def _apply(files: Mapping[str, PartFiles], part: str, module: nn.Module) -> Callable[[], Any] | None:
    described = files.get(part)
    if described is None or described.storage == "auto":
        return None
    own = {name: STORED[e.dtype] for name, e in described.entries.items() if not e.is_packed}
    back = quantized.packed(module, described.storage, own, described.by_bits)
    if back is not None:
        log.info("%s: weights %s", part, described.storage)
    return back
