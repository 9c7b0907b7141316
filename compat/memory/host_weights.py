"""The host copies of weights that are offloaded: pinned, as they were read, or left in their file.

They are never written to while a copy is on the device, so those that are views of their file stay views: they cost
page cache, which the system takes back when others need it, and a device gets them from disk where it did.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ..decision import Decision
from ..errors import first_line
from .parts import denoises
from .statistics import amount_of

log = logging.getLogger(__name__)

PINNED, PLAIN, DISK = "pinned", "unpinned", "disk-backed"
VIEWS = "_anygpu_views"  # on a module: which of its tensors are views of a file
PINNED_SHARE = 0.5  # of the free host memory: Windows locks no more, and others need some
SLAB_BYTES = 2**28  # torch rounds each request for locked memory up to a power of two
ALIGNED_BYTES = 256  # where a tensor may begin on a device: what its allocators give, and more than vector loads need


@dataclass(frozen=True, slots=True)
class HostWeights:
    """Storage of each part's host weights, and the reason.

    Args:
        kinds: part name to :data:`PINNED`, :data:`PLAIN` or :data:`DISK`.
        why: in words.
        shared: whether host and device have one memory: weights on the device have no second copy beside them then.
    """

    kinds: Mapping[str, str] = field(default_factory=dict)
    why: str = ""
    shared: bool = False

    def of(self, kind: str) -> tuple[str, ...]:
        """The parts that are kept so."""
        return tuple(part for part, own in self.kinds.items() if own == kind)

    @property
    def decision(self) -> Decision:
        """Describe the storage, with the reason."""
        told = {PINNED: "pinned while it comes by block or layer", DISK: DISK}
        named = [f"{', '.join(self.of(kind))} {text}" for kind, text in told.items() if self.of(kind)]
        return Decision("host weights", "; ".join(named) or PLAIN, self.why)


@dataclass(frozen=True, slots=True)
class Views:
    """Tensors of a module that are views of its file.

    Args:
        pointers: addresses of their data.
        staged: whether they go to the device by way of ordinary memory, on drivers that stall at a mapped page.
    """

    pointers: frozenset[int]
    staged: bool = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if the data of ``tensor`` are such a view."""
        return tensor.data_ptr() in self.pointers and tensor.device.type == "cpu"


NONE = Views(frozenset())


def choose_host_weights(
    part_bytes: Mapping[str, int], view_bytes: Mapping[str, int], free: int, pins: bool, unified: bool
) -> HostWeights:
    """Decide how the host weights of each part are kept, from the free host memory.

    Args:
        part_bytes: bytes of each part in host memory.
        view_bytes: those of its file that need no cast and may stay there.
        free: host memory that this process may take.
        pins: whether the device's kind has locked host memory.
        unified: whether host and device share one memory.
    """
    kinds, over = dict.fromkeys(part_bytes, PLAIN), sum(part_bytes.values()) - free
    for part in sorted(part_bytes, key=lambda name: -view_bytes[name]):
        if over <= 0 or not view_bytes[part]:
            break
        kinds[part], over = DISK, over - view_bytes[part]
    have = f"{amount_of(free)} of host memory free for {amount_of(sum(part_bytes.values()))} of weights"
    if DISK in kinds.values():
        why = f"{have}; layers are read from disk if they are not in the page cache"
        return HostWeights(kinds, why, unified)
    # Only what is copied at each step is pinned; pinning the others takes as long as it saves.
    repeated = [part for part in part_bytes if denoises(part)]
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
    """Find the tensors of ``module`` that are views of its file."""
    views: Views = module.__dict__.get(VIEWS, NONE)
    return views


def pin(tensors: Iterable[torch.Tensor]) -> int:
    """Move the data of ``tensors`` into locked host memory, slab by slab; returns the bytes that are there now.

    What cannot be locked stays as it is, and the log says why. Peak extra memory: one slab.
    """
    count = total = 0
    try:
        with torch.inference_mode(False), torch.no_grad():
            for group in _slabs([t for t in tensors if t.data.nbytes and t.is_contiguous() and not t.is_pinned()]):
                total = sum(_padded(tensor) for tensor in group)
                slab, first = torch.empty(total, dtype=torch.uint8, pin_memory=True), 0
                for tensor in group:
                    place = slab[first : first + tensor.data.nbytes].view(tensor.dtype)
                    tensor.data = place.view(tensor.shape).copy_(tensor.data)
                    first += _padded(tensor)
                    count += tensor.data.nbytes
    except (RuntimeError, MemoryError, OSError) as error:  # the system locks no more: everything works without
        log.warning("%s of weights stay unpinned: %s", amount_of(total), first_line(error))
    return count


def _padded(tensor: torch.Tensor) -> int:
    """Bytes of a tensor up to where the next one begins, so that neighbours may travel in one copy."""
    return -(-tensor.data.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _slabs(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """``tensors`` in their order, as many together as a slab holds; a larger one by itself."""
    group: list[torch.Tensor] = []
    held = 0
    for tensor in tensors:
        size = _padded(tensor)
        if group and held + size > SLAB_BYTES:
            yield group
            group, held = [], 0
        group, held = [*group, tensor], held + size
    if group:
        yield group
