"""Groups of weights that come while another computes: copies on a stream of their own, in the order of use.
From locked memory a group arrives in one copy per slab, from other memory by way of two locked buffers. Copies wait
until the computation has left the memory that they fill, and it waits for what it needs, both by events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..device.facts import locks_host_memory, value_or
from .offloader import ALIGNED_BYTES, SLICE_BYTES

BUFFER_BYTES = 64 * 1024**2  # of each staging buffer; torch rounds locked memory up to a power of two
QUEUED_GROUPS = 2  # that the host may be ahead of the device, which computes them to the end after a cancel


@dataclass(frozen=True, slots=True)
class Place:
    """A host weight, and where its first byte lies in the memory of its group."""

    first: int
    host_weight: torch.Tensor

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """The weight on the device, in the bytes of its group."""
        own = memory[self.first : self.first + self.host_weight.nbytes].view(self.host_weight.dtype)
        return own.as_strided(self.host_weight.shape, self.host_weight.stride())


class GroupLayout:
    """Places of a group's dense weights in one block of device memory. Neighbours in locked memory share one copy."""

    def __init__(self, host_weights: Sequence[torch.Tensor]) -> None:
        self.places: list[Place] = []
        self.runs: list[tuple[int, torch.Tensor]] = []  # first byte on the device, and the bytes in host memory
        self.locked = all(weight.is_pinned() for weight in host_weights)
        end = 0
        for weight in host_weights:
            source = weight.as_strided((weight.numel(),), (1,)).view(torch.uint8)
            first = -(-end // ALIGNED_BYTES) * ALIGNED_BYTES
            if self.locked and self.runs and _follows(self.runs[-1][1], source):
                begin, run = self.runs[-1]
                first = begin + int(source.storage_offset() - run.storage_offset())
                self.runs[-1] = begin, run.as_strided((first - begin + source.numel(),), (1,))
            else:
                self.runs.append((first, source))
            self.places.append(Place(first, weight))
            end = first + weight.nbytes
        self.total_bytes = end


def _follows(run: torch.Tensor, source: torch.Tensor) -> bool:
    """True if ``source`` begins where ``run`` ends in one storage, but for padding, so that one copy moves both."""
    same = run.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    distance = source.storage_offset() - run.storage_offset()
    return same and 0 <= distance - run.numel() < ALIGNED_BYTES and distance % ALIGNED_BYTES == 0


def is_dense(weight: torch.Tensor) -> bool:
    """True if a weight is a plain, not empty host tensor in one run of bytes: contiguous or channels last."""
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(weight.ndim, torch.contiguous_format)
    ordered = weight.is_contiguous() or weight.is_contiguous(memory_format=order)
    return bool(type(weight) is torch.Tensor and weight.nbytes and weight.device.type == "cpu" and ordered)


@dataclass(slots=True)
class _Buffer:
    """Locked memory through which other memory travels, and the end of the last copy out of it."""

    memory: torch.Tensor
    ended: torch.Event | None = None

    def wait(self) -> None:
        """Wait until the memory may be written again, or given up."""
        if self.ended is not None:
            self.ended.synchronize()


class CopyStream:
    """The copies to one device beside its computation."""

    def __init__(self, device: torch.device, stream: torch.Stream) -> None:
        self.device, self.stream = device, stream
        self._buffers: list[_Buffer] = []
        self._left: deque[torch.Event] = deque()  # where the computation left a group, the newest last

    def bytes_on_device(self, layout: GroupLayout, check: Callable[[], None]) -> tuple[torch.Tensor, torch.Event]:
        """Start copying a group; returns its device memory and the event of its arrival. ``check`` may cancel."""
        with self.stream:
            memory = torch.empty(layout.total_bytes, dtype=torch.uint8, device=self.device)
            for first, source in layout.runs if layout.locked else ():
                for start in range(0, source.numel(), SLICE_BYTES):
                    check()
                    part = source[start : start + SLICE_BYTES]
                    memory[first + start : first + start + part.numel()].copy_(part, non_blocking=True)
            if not layout.locked:
                self._stage(layout, memory, check)
        return memory, self._mark(self.stream)

    def wait_for(self, arrived: torch.Event) -> None:
        """Make the computation on the device, but not the host, wait for the copy that ``arrived`` ends."""
        torch.accelerator.current_stream(self.device).wait_event(arrived)

    def leave(self) -> None:
        """Make the stream wait for the computation queued so far, which still reads memory that later copies may get,
        or torch unmap: it waits for this stream alone. The host waits if more than :data:`QUEUED_GROUPS` ahead."""
        self._left.append(self._mark(torch.accelerator.current_stream(self.device)))
        self.stream.wait_event(self._left[-1])
        if len(self._left) > QUEUED_GROUPS:
            self._left.popleft().synchronize()

    def _stage(self, layout: GroupLayout, memory: torch.Tensor, check: Callable[[], None]) -> None:
        """Copy a group by way of two buffers, one of which is filled while the other travels."""
        size = min(BUFFER_BYTES, layout.total_bytes)
        if not self._buffers or self._buffers[0].memory.numel() < size:
            for buffer in self._buffers:
                buffer.wait()
            self._buffers = [_Buffer(_locked(size)) for _ in range(2)]
        for start in range(0, layout.total_bytes, size):
            check()
            buffer = self._buffers.pop(0)
            self._buffers.append(buffer)
            buffer.wait()
            end = min(start + size, layout.total_bytes)
            for first, source in layout.runs:
                begin, stop = max(first, start), min(first + source.numel(), end)
                if begin < stop:
                    buffer.memory[begin - start : stop - start].copy_(source[begin - first : stop - first])
            memory[start:end].copy_(buffer.memory[: end - start], non_blocking=True)
            buffer.ended = self._mark(self.stream)

    def _mark(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(self.device)
        event.record(stream)
        return event


def _locked(size: int) -> torch.Tensor:
    """Locked host memory; ordinary memory where the system locks no more, from which copies are waited for."""
    locked = value_or(lambda: torch.empty(size, dtype=torch.uint8, pin_memory=True), None)
    return torch.empty(size, dtype=torch.uint8) if locked is None else locked


def copy_stream(device: torch.device) -> CopyStream | None:
    """A stream for copies to ``device``; None without streams and events, or if no host memory can be locked."""

    def tested() -> CopyStream:
        copies = CopyStream(device, torch.Stream(device))
        with copies.stream:  # a plug-in may have streams and no events
            copies.wait_for(copies._mark(copies.stream))
        return copies

    return value_or(tested, None) if locks_host_memory(device) else None
