"""Storage of a pipeline's weights in memory, independent of the dtype that computes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...compat.checkpoints import packed
from ...compat.checkpoints.headers import STORED
from ...compat.decision import Decision
from ...compat.device import probes
from ...compat.device.execution import HOST
from ...compat.device.facts import DeviceFacts, locks_host_memory
from ...compat.device.failures import is_shortage
from ...compat.device.precision import FP32, Precision
from ...compat.device.probe_store import ProbeStore
from ...compat.errors import UnsupportedError, remember
from ...compat.memory.host_weights import DISK, HostWeights, choose_host_weights
from ...compat.memory.parts import PartBytes, denoises, part_bytes, role_of
from ...compat.memory.statistics import GIGABYTE, amount_of
from ...compat.memory.transfer import casts_wrongly, maps_files
from ...compat.transforms.fp16 import apply_fp16_safe, fp32_output_works
from ...compat.transforms.order import Order, Step
from ..files.part import PartFiles
from ..pipeline import Parts
from .reading import reader_of

log = logging.getLogger(__name__)
FILE_CHOICES = ("auto", "as in file")


def with_storage(
    files: Mapping[str, PartFiles],
    chosen: Any,
    text_parts: tuple[str, ...],
    precision: Precision,
    facts: DeviceFacts,
    probes: ProbeStore | None = None,
) -> dict[str, PartFiles]:
    """``files`` of every part with how it is kept: transformer and text encoders as chosen, all else as it computes.

    Where fp32 computes on a device with memory of its own, ``auto`` keeps the 16 bits that a file has: half as much to
    hold and to send, widened on the device at each use, which is exact and little beside the product. The VAE is small,
    and its convolutions run once per tile.

    Args:
        chosen: has ``weights``, ``text_weights`` and ``devices``, as :class:`~.folder.LoadRequest`.
        probes: what this device has answered and where it is kept; None relies on the tables.

    Raises:
        InputError, UnsupportedError: an unknown choice, or one that does not go with the others.
    """
    packed.require_storable(chosen.weights, "weights", precision)
    packed.require_storable(chosen.text_weights, "text_weights", precision)
    transformers = filter(denoises, files)
    choices = dict.fromkeys(transformers, chosen.weights) | dict.fromkeys(text_parts, chosen.text_weights)
    for name, choice in choices.items():
        place = chosen.devices.get(role_of(name), facts.device)
        if name in files and torch.device(place).type != HOST.type:
            choices[name] = choice = _narrow(files[name], facts.device) if choice == "auto" else choice
            _require_castable(files[name], choice, facts.device)
    broken, mapped = _casts_wrongly(facts.device, torch.bfloat16), maps_files(facts, probes)
    return {
        name: replace(_kept(part, choices.get(name, "auto"), facts.device), by_bits=broken, mapped=mapped)
        for name, part in files.items()
    }


def _casts_wrongly(device: torch.device, dtype: torch.dtype) -> bool:
    """``casts_wrongly``, where a device without room for the question says so in one line."""
    try:
        return casts_wrongly(device, dtype)
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        found, fix = f"no free memory on {device}", "Close other programs that use this device, or choose another one."
        expected = "room for 128 KB, to ask how it casts, and for one layer"
        raise torch.OutOfMemoryError(remember(f"{found}; expected {expected}. {fix}", found, expected, fix)) from error


def has_eight_bits(device: torch.device) -> bool:
    """Tell whether ``device`` holds float8 tensors and casts them right."""
    try:
        return not probes.eight_bits(device)
    except (RuntimeError, NotImplementedError, TypeError):
        return False


def storage_step(files: Mapping[str, PartFiles]) -> Step:
    """The step that packs weights as chosen; those that a file has packed were read so."""
    return Step(Order.STORAGE, "storage of weights", partial(_apply, dict(files)))


def decisions(files: Mapping[str, PartFiles]) -> tuple[Decision, ...]:
    """One for each part whose weights are kept smaller than they compute."""
    made = []
    for name, choice in smaller(files).items():
        how = "as in the file" if choice in FILE_CHOICES else choice
        size = f"{files[name].total_bytes / GIGABYTE:.1f} of {_dense_bytes(files[name]) / GIGABYTE:.1f} GB"
        made.append(Decision(f"{name} weights", f"kept {how}", size))
    return tuple(made)


def smaller(files: Mapping[str, PartFiles]) -> dict[str, str]:
    """Part to its choice of storage, where its weights are kept smaller than they compute."""
    return {name: part.storage for name, part in files.items() if part.total_bytes < _dense_bytes(part)}


def _dense_bytes(part: PartFiles) -> int:
    return replace(part, storage="auto", keeps_packed=False).total_bytes


def _narrow(part: PartFiles, device: torch.device) -> str:
    """The meaning of ``auto`` for a part that computes on ``device``; bf16 is always widened there, by bits."""
    halves = {entry.dtype for entry in part.entries.values()} & {"BF16", "F16"}
    if part.dtype is not torch.float32 or part.dtype_of is not None or not halves:
        return "auto"
    return "auto" if "F16" in halves and _casts_wrongly(device, torch.float16) else "as in file"


def _require_castable(part: PartFiles, choice: str, device: torch.device) -> None:
    """Raise where ``device`` would widen the fp16 weights of a file wrongly; bf16 has its integer route."""
    half = choice in ("as in file", "fp16") and any(entry.dtype == "F16" for entry in part.entries.values())
    if half and part.dtype is not torch.float16 and _casts_wrongly(device, torch.float16):
        raise UnsupportedError(
            f"weights {choice!r} of a file in fp16, which {device} casts wrongly",
            expected="a device that casts fp16 to fp32 and back correctly",
            fix="Choose weights auto, which casts them on the host.",
        )


def _kept(part: PartFiles, choice: str, device: torch.device) -> PartFiles:
    """A part under a choice; what a device without float8 cannot hold is made dense on the host while it is read."""
    dense = part.dtype_of is not None or choice not in FILE_CHOICES
    floats = any(e.dtype in ("F8_E4M3", "F8_E5M2") for e in part.entries.values())
    packs = any(packed.stays_packed(name, entry) for name, entry in part.entries.items())
    return replace(part, storage=choice, keeps_packed=packs and not dense and (not floats or has_eight_bits(device)))


def _apply(files: Mapping[str, PartFiles], part: str, module: nn.Module) -> Callable[[], Any] | None:
    described = files.get(part)
    if described is None or described.storage == "auto":
        return None
    own = {name: STORED[e.dtype] for name, e in described.entries.items() if not e.is_packed}
    back = packed.packed(module, described.storage, own, described.by_bits)
    if back is not None:
        log.info("%s: weights %s", part, described.storage)
    return back


@dataclass(slots=True)
class SafeFp16:
    """The rewrite of one pipeline's transformer, until it is abandoned.

    Args:
        family: a family id.
        device: where the transformer will run; it is asked once for fp32-output products.
        active: whether the transformer is rewritten when it is next read.
    """

    family: str
    device: Any
    active: bool = True

    def step(self) -> Step:
        """The rewrite as a step of the preparation."""
        return Step(Order.PRECISION, "safe fp16", self._apply)

    def abandon(self, parts: Parts, files: PartFiles) -> None:
        """From the next reading on the transformer is fp32."""
        self.active = False
        parts.readers[files.name] = reader_of(replace(files, dtype=FP32, dtype_of=None))

    def _apply(self, part: str, module: nn.Module) -> Callable[[], None] | None:
        if not denoises(part) or not self.active:
            return None
        applied = apply_fp16_safe(module, self.family, {"fp32_output": fp32_output_works(self.device)})
        (log.warning if applied.left else log.info)("%s", applied)
        return applied.restore


def sizes_of(files: Iterable[PartFiles]) -> dict[str, PartBytes]:
    """Part name to the bytes of the part, from what was read of its headers."""
    sizes = {}
    for part in files:
        size = part_bytes({name: part.bytes_of(name, entry) for name, entry in part.entries.items()})
        sizes[part.name] = replace(size, dense=part.dense_bytes)
    return sizes


def fit_host_memory(
    files: Mapping[str, PartFiles], facts: DeviceFacts, free: int, swap: int
) -> tuple[dict[str, PartFiles], HostWeights]:
    """``files`` read the way that host memory wants it, and how the host weights of each part are kept.

    Parts that do not fit together stay views of their files, the one that saves most first. Where views are avoided on
    this kind of device, they go there by way of ordinary memory, a slice at a time.

    Args:
        files: of each part.
        facts: of the device that computes.
        free: bytes of host memory that this process may take.
        swap: bytes beside them that are slow.

    Raises:
        UnsupportedError: a part that must be cast, unpacked or packed, so that it cannot stay in its file, and does not
            fit; said before anything is read.
    """
    sizes = {name: part.total_bytes for name, part in files.items()}
    views = {name: part.view_bytes for name, part in files.items()}
    host_weights = choose_host_weights(sizes, views, free, locks_host_memory(facts.device), facts.unified)
    left = host_weights.of(DISK)
    for name, part in files.items():
        held = sizes[name] - (views[name] if part.mapped or name in left else 0)
        if held > free + swap:
            raise UnsupportedError(
                f"{amount_of(free + swap)} of host memory for the {name}, which takes {amount_of(held)} of it",
                expected=f"{amount_of(held - free - swap)} more",
                fix="Close other programs, add swap (on Windows: enlarge the page file), or use a safetensors file in "
                "the precision that computes: it can stay on disk.",
            )
    kept = {name: replace(files[name], mapped=True, staged=not files[name].mapped) for name in left}
    return {**files, **kept}, host_weights
