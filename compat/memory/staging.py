"""Small tensors on their way to a device: many in one transfer, since each transfer has a price of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ..device.execution import HOST

SMALL_BYTES = 1024**2  # larger ones travel alone
STAGING_BYTES = 16 * 1024**2  # of one transfer
ALIGNED_BYTES = 256  # where a tensor may begin on a device: what its allocators give, and more than vector loads need


def sent_together(
    tensors: Sequence[torch.Tensor], send: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor]]:
    """The index of each tensor and its copy on the device; those that travelled together share one storage there.

    Args:
        tensors: in host memory; one that is elsewhere travels alone. send: brings one to the device, in its dtype.

    Returns:
        Each index once. Peak extra host memory: one staging buffer per dtype.
    """
    waiting: dict[torch.dtype, list[int]] = {}
    held: dict[torch.dtype, int] = {}
    for index, tensor in enumerate(tensors):
        alone = not 0 < tensor.nbytes <= SMALL_BYTES or not tensor.is_contiguous()
        if alone or tensor.device.type != HOST.type:
            yield index, send(tensor)
            continue
        kind, size = tensor.dtype, _room(tensor) * tensor.itemsize
        if held.get(kind, 0) + size > STAGING_BYTES:
            yield from _flushed(tensors, waiting.pop(kind), send)
            held[kind] = 0
        waiting.setdefault(kind, []).append(index)
        held[kind] = held.get(kind, 0) + size
    for indices in waiting.values():
        yield from _flushed(tensors, indices, send)


def _flushed(
    tensors: Sequence[torch.Tensor], indices: list[int], send: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor]]:
    if len(indices) == 1:
        yield indices[0], send(tensors[indices[0]])
        return
    staging = torch.zeros(sum(_room(tensors[index]) for index in indices), dtype=tensors[indices[0]].dtype)
    places, first = [], 0
    for index in indices:
        places.append((index, first, first + tensors[index].numel()))
        staging[first : places[-1][2]].copy_(tensors[index].reshape(-1))
        first += _room(tensors[index])
    there = send(staging)
    for index, begin, end in places:
        yield index, there[begin:end].view(tensors[index].shape)


def _room(tensor: torch.Tensor) -> int:
    """Elements from the beginning of a tensor to where the next one may begin."""
    unit = max(1, ALIGNED_BYTES // tensor.itemsize)
    return -(-tensor.numel() // unit) * unit
