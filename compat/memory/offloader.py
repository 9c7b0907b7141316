"""Placement of the parts of a pipeline, on the device that computes or in host memory, and their moves:
:class:`Offloader` is what everybody asks; ours is in ``standalone.py``, and a host may hand in its own."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..decision import AUTO, Decision
from ..device.execution import HOST
from ..errors import first_line
from .parts import Adapters, denoises, role_of
from .statistics import MemoryStats, amount_of

log = logging.getLogger(__name__)

PINNED, PLAIN, DISK = "pinned", "unpinned", "disk-backed"
VIEWS = "_anygpu_views"  # on a module: which of its tensors are views of a file
PINNED_SHARE = 0.5  # of the free host memory: Windows locks no more, and others need some
SLICE_BYTES = 256 * 1024**2  # of a large tensor: half a second on a link of 0.5 GB/s, so that a cancel is obeyed
SLAB_BYTES = 2**30  # torch rounds each request for locked memory up to a power of two: smaller ones waste a third
ALIGNED_BYTES = 256  # where a tensor may begin on a device: what its allocators give, and more than vector loads need


@dataclass(frozen=True, slots=True)
class HostWeights:
    """Storage of each part's host weights, and the reason."""

    kinds: Mapping[str, str] = field(default_factory=dict)  # part to PINNED, PLAIN or DISK
    why: str = ""
    shared: bool = False  # host and device have one memory: weights there have no second copy

    def of(self, kind: str) -> tuple[str, ...]:
        return tuple(part for part, own in self.kinds.items() if own == kind)

    @property
    def decision(self) -> Decision:
        texts = {PINNED: "pinned while it comes by block or layer", DISK: DISK}
        verdicts = [f"{', '.join(self.of(kind))} {text}" for kind, text in texts.items() if self.of(kind)]
        return Decision("host weights", "; ".join(verdicts) or PLAIN, self.why)


@dataclass(frozen=True, slots=True)
class Views:
    """Tensors of a module that are views of its file."""

    pointers: frozenset[int]  # addresses of their data
    staged: bool = False  # they go to the device by way of ordinary memory, on drivers that stall at a mapped page

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self.pointers and tensor.device.type == "cpu"


NONE = Views(frozenset())


def choose_host_weights(
    part_bytes: Mapping[str, int], view_bytes: Mapping[str, int], free: int, pins: bool, unified: bool
) -> HostWeights:
    """Decide how each part's host weights are stored in ``free`` bytes of host memory. If not all fit, parts with the
    most ``view_bytes``, which need no cast, stay in their files until the rest fits. Else denoisers are pinned, if
    they are not too large, the device can use locked memory (``pins``) and has memory of its own (not ``unified``)."""
    kinds, lacking = dict.fromkeys(part_bytes, PLAIN), sum(part_bytes.values()) - free
    for part in sorted(part_bytes, key=lambda name: -view_bytes[name]):
        if lacking <= 0 or not view_bytes[part]:
            break
        kinds[part], lacking = DISK, lacking - view_bytes[part]
    have = f"{amount_of(free)} of host memory free for {amount_of(sum(part_bytes.values()))} of weights"
    if DISK in kinds.values():
        why = f"{have}; layers are read from disk if they are not in the page cache"
        return HostWeights(kinds, why, unified)
    repeated = [part for part in part_bytes if denoises(part)]  # pinning the others takes as long as it saves
    fits = sum(part_bytes[part] for part in repeated) <= PINNED_SHARE * free
    if unified or not pins:
        why = "host and device share one memory" if unified else "this device cannot use pinned host memory"
        return HostWeights(kinds, why, unified)
    if not fits:
        return HostWeights(kinds, f"{have}; {PINNED_SHARE:.0%} of it may be pinned at most")
    return HostWeights(kinds | dict.fromkeys(repeated, PINNED), f"{have}; copies from pinned memory need no staging")


def mark_views(module: nn.Module, views: Views) -> None:
    """Remember which tensors of ``module``, just read, are views of its file."""
    if views.pointers:
        module.__dict__[VIEWS] = views


def views_of(module: nn.Module) -> Views:
    return module.__dict__.get(VIEWS, NONE)


def pin(tensors: Iterable[torch.Tensor]) -> int:
    """Move the data of contiguous ``tensors`` into locked host memory, slab by slab; returns the bytes that were moved.
    Where the system locks no more, the rest stay as they are, and the log says so. Peak extra memory: one slab."""
    count, loose = 0, [t for t in tensors if t.data.nbytes and t.is_contiguous() and not t.is_pinned()]
    try:
        with torch.inference_mode(False), torch.no_grad():
            for group in _slabs(loose):
                slab, first = torch.empty(sum(map(padded, group)), dtype=torch.uint8, pin_memory=True), 0
                for tensor in group:
                    place = slab[first : first + tensor.data.nbytes].view(tensor.dtype)
                    tensor.data = place.view(tensor.shape).copy_(tensor.data)
                    first += padded(tensor)
                    count += tensor.data.nbytes
    except (RuntimeError, MemoryError, OSError) as error:  # the system locks no more: everything works without
        left = sum(tensor.data.nbytes for tensor in loose) - count
        log.warning("%s of weights stay unpinned: %s", amount_of(left), first_line(error))
    return count


def padded(tensor: torch.Tensor) -> int:
    """Bytes of a tensor up to where the next one begins, so that neighbours may travel in one copy."""
    return -(-tensor.data.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _slabs(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """``tensors`` in their order, as many together as a slab holds; a larger one by itself."""
    group: list[torch.Tensor] = []
    held = 0
    for tensor in tensors:
        size = padded(tensor)
        if group and held + size > SLAB_BYTES:
            yield group
            group, held = [], 0
        group, held = [*group, tensor], held + size
    if group:
        yield group


HOSTED = "comfyui"  # the memory manager of the host around us: its offloader is handed in
MODES = ("none", "model", "group", "sequential")  # of our own offloader, the fastest first
CHOICES = (AUTO, *MODES, HOSTED)
DEVICE_CHOICES = (AUTO, "cpu", "gpu:0", "gpu:1", "gpu:2", "gpu:3")  # the same list on every machine

COSTS: dict[str, str] = {
    "none": "every part but text encoders stays on the device once it has been used; fastest, needs room for "
    "transformer and VAE together",
    "model": "one part at a time; needs room for the largest part, and copies it once per stage",
    "group": "as many blocks of the transformer as fit stay, the others come one at a time while others compute; needs "
    "little room, but copies what does not stay at every step",
    "sequential": "one layer at a time; needs the least room, by far the slowest",
    HOSTED: "ComfyUI loads, streams and evicts the weights like those of its own models; this is auto inside ComfyUI",
}


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """The user's settings for an offloader besides its mode."""

    devices: Mapping[str, torch.device] = field(default_factory=dict)  # by :func:`role_of`, if not the pipeline's
    keep_free_bytes: int = 0  # of the device, left to others
    state: Path | None = None  # folder in which costs are kept
    host_weights: HostWeights = field(default_factory=HostWeights)

    def place(self, part: str, own: torch.device) -> torch.device:
        """The device of ``part``: its own by ``devices``, else ``own``, the pipeline's."""
        return self.devices.get(role_of(part), own)


class Offloader(Protocol):
    """Decides where the parts of one pipeline are, and moves them."""

    @property
    def mode(self) -> str:
        """The offload mode in force: one of :data:`CHOICES`, but for ``auto``."""

    @property
    def automatic(self) -> bool:
        """True if the mode was decided for the user, so that :meth:`switch` may decide it again for a stage."""

    @property
    def options(self) -> OffloadOptions:
        """User's settings besides the mode."""

    @property
    def device(self) -> torch.device:
        """Device that computes the parts."""

    @property
    def evicts(self) -> bool:
        """True if other models leave the device when this pipeline needs the memory."""

    @property
    def memory_stats(self) -> MemoryStats:
        """Moves so far, and the cost of each stage."""

    @property
    def adapters(self) -> Adapters | None:
        """The adapters of this pipeline; None for none."""

    @property
    def patcher(self) -> Any:
        """The host's own handle of the transformer; None where no host manages memory."""

    def get_models(self) -> list[Any]:
        """The host's own handles of all parts that were used."""

    def device_of(self, part: str) -> torch.device:
        """Device that computes ``part``."""

    def hold(self, part: str, activation_bytes: int = 0, progress: Any = None) -> AbstractContextManager[nn.Module]:
        """The part with this pipeline's adapters, able to run on its device inside the block.
        ``activation_bytes`` is what its forward needs beside the weights; ``progress`` hears of what moves."""

    def release(self, part: str) -> None:
        """Take the part off its device; where that is the host, free its memory."""

    def detach(self, part: str) -> None:
        """Bring the part to host memory, without hooks: it is about to change."""

    def switch(self, mode: str) -> None:
        """Use ``mode`` from the next use of each part on; what is on the device leaves it.
        Raises InputError for a mode that cannot be switched to, or a part in use."""

    def reduce_memory(self, part: str, *beside: str) -> str:
        """Make room in a stage with these parts, of other models first; what was done, empty if nothing is left."""

    def with_adapters(self, adapters: Adapters | None) -> Offloader:
        """The same offloader for a pipeline with these adapters: parts, mode and statistics are shared."""


def reason_against(choice: str, device: torch.device) -> str:
    """The reason why a mode cannot run on ``device``; empty if possible, or where a host's manager stands in."""
    return "on a CPU" if device.type == HOST.type and choice not in (AUTO, "none", HOSTED) else ""


def placement(offloader: Offloader) -> str:
    """Mode, device, and parts that the user has put elsewhere, such as ``group on cuda:0, vae on cpu``."""
    parts = {part: offloader.device_of(part) for part in offloader.options.devices}
    apart = "".join(f", {part} on {device}" for part, device in parts.items() if device != offloader.device)
    return f"{offloader.mode} on {offloader.device}{apart}"
