"""Exact copies between host and device: bits travel as they are, and every cast is made on the host.

Some Radeons turn bf16 into zeros when they cast it to fp32, and one stack damaged bf16 on its way to the host. So a
tensor is narrowed before it is sent, fetched in the dtype it has, and widened after it has arrived; where the plain
copy is not exact, its bits travel as 16-bit integers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ..device.execution import HOST
from ..errors import UnsupportedError
from .statistics import MemoryStats

BITS = torch.int16
HALVES = (torch.bfloat16, torch.float16)
SLICE_BYTES = 256 * 1024**2  # of a large tensor: half a second on a link of 0.5 GB/s, so that a cancel is obeyed


@dataclass(frozen=True, slots=True)
class Transfer:
    """The way to a device and back.

    Args:
        device: the far end. dtype: what floating tensors have there. as_bits: whether 16-bit floats travel as integers.
        memory_stats: what counts the bytes and the time of activations on their way; None for nobody. Who moves weights
            counts them himself.
    """

    device: torch.device
    dtype: torch.dtype
    as_bits: bool = False
    memory_stats: MemoryStats | None = None

    def sent(self, tensor: torch.Tensor, check: Callable[[], None] | None = None, staged: bool = False) -> torch.Tensor:
        """A host tensor on the device; a floating one is cast to ``dtype`` before it leaves.

        Args:
            check, staged: as :func:`arrived` takes them.
        """
        here = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
        with self._counted(here.nbytes):
            if here.dtype not in HALVES or not self.as_bits:
                return arrived(here, self.device, check, staged)
            return arrived(here.view(BITS), self.device, check, staged).view(self.dtype)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the device on the host, in its own dtype, bit for bit."""
        if tensor.device.type == HOST.type:
            return tensor
        with self._counted(tensor.nbytes):
            if not self.as_bits or tensor.dtype not in HALVES:
                return tensor.to(HOST)
            return tensor.view(BITS).to(HOST).view(tensor.dtype)

    def fetched(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the device on the host; a floating one is widened to fp32 there, after it has arrived."""
        here = self.copied(tensor)
        return here.float() if here.is_floating_point() else here

    def _counted(self, count: int) -> AbstractContextManager[None]:
        return nullcontext() if self.memory_stats is None else self.memory_stats.moving(count)


def arrived(
    source: torch.Tensor, device: torch.device, check: Callable[[], None] | None = None, staged: bool = False
) -> torch.Tensor:
    """A host tensor on ``device``, bit for bit; the host waits only where its memory is not locked.

    Args:
        check: raises on a cancel; asked before each slice of a large tensor. staged: whether each slice is copied into
            ordinary memory first, for drivers that stall at the pages of a mapped file.
    """
    behind = HOST.type == source.device.type != device.type and source.is_pinned()
    if not source.is_contiguous() or (source.nbytes <= SLICE_BYTES and not staged):
        if check is not None:
            check()
        return (source.clone() if staged else source).to(device, non_blocking=behind)
    there, count = torch.empty_like(source, device=device), max(1, SLICE_BYTES // source.itemsize)
    for first in range(0, source.numel(), count):
        if check is not None:
            check()
        part = source.view(-1)[first : first + count]
        there.view(-1)[first : first + count].copy_(part.clone() if staged else part, non_blocking=behind)
    return there


def transfer_for(device: torch.device, dtype: torch.dtype) -> Transfer:
    """The exact way to ``device`` for tensors of ``dtype``.

    For a 16-bit float the device is asked, with all 65 536 patterns there and back: 128 KB, under a millisecond.

    Raises:
        UnsupportedError: the device returns other bits than it was given, as integers too.
    """
    if device.type == HOST.type or dtype not in HALVES:
        return Transfer(device, dtype)
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(BITS)
    exact = ~patterns.view(dtype).isnan()  # a copy may write another NaN; no number depends on which
    try:
        there = patterns.to(device).view(dtype)
        plain = there.to(HOST).view(BITS)
        if torch.equal(plain[exact], patterns[exact]):
            return Transfer(device, dtype)
        bits = there.view(BITS).to(HOST)
    except torch.OutOfMemoryError:  # which says nothing of how the device copies
        raise
    except (RuntimeError, NotImplementedError):  # a backend that cannot relabel bits has only the plain copy
        return Transfer(device, dtype)
    if not torch.equal(bits[exact], patterns[exact]):
        raise UnsupportedError(
            f"{device} returns other bits of {str(dtype).removeprefix('torch.')} than it was given",
            expected="exact copies between host and device",
            fix="Choose precision fp32 on the load node, or update this device's driver.",
        )
    return Transfer(device, dtype, as_bits=True)


def casts_wrongly(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``device`` casts a 16-bit float to fp32 or back otherwise than the host: zeros on some Radeons.

    Every normal number is asked, up and down; a device may flush the tiniest ones, and may write any NaN.
    """
    if device.type == HOST.type or dtype not in HALVES:
        return False
    way, values = transfer_for(device, dtype), torch.arange(-(2**15), 2**15, dtype=torch.int32).to(BITS).view(dtype)
    values = values[values.isfinite() & (values.abs() >= torch.finfo(dtype).tiny)]
    wide = values.float()
    up, down = way.sent(values).float().to(HOST), way.copied(wide.to(device).to(dtype))
    return not (torch.equal(up, wide) and torch.equal(down, values))


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A bf16 tensor as fp32 where it is, by integers alone: exact on a device whose own cast is broken.

    Returns:
        The same values; a NaN keeps its payload. Peak extra memory: the result.
    """
    return tensor.view(BITS).to(torch.int32).bitwise_left_shift_(16).view(torch.float32)
