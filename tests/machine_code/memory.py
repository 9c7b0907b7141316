"""Memory of the interpreted GPU: every access is checked, and shared memory knows who touched each byte."""

from __future__ import annotations

import numpy as np

from .arithmetic import Array

NOBODY, SEVERAL = -1, -2


class MemoryFault(RuntimeError):
    """An access outside memory, or at an address that is no multiple of its size."""


class Race(RuntimeError):
    """Two warps touched a byte of shared memory between two barriers, and one of them wrote it."""


def _aligned(addresses: Array, size: int) -> None:
    if np.any(addresses % size):
        raise MemoryFault(f"an address is no multiple of {size} bytes")


class GlobalMemory:
    """The tensors that a kernel was given: (first address, bytes), which may overlap."""

    def __init__(self, regions: list[tuple[int, Array]]) -> None:
        self.regions = regions

    def _places(self, addresses: Array, size: int) -> list[tuple[Array, Array, Array]]:
        """(lanes, bytes of a region, offsets in it); each lane once."""
        _aligned(addresses, size)
        left, found = np.ones(len(addresses), bool), []
        for base, data in self.regions:
            offsets = addresses.astype(np.int64) - base
            here = left & (offsets >= 0) & (offsets <= len(data) - size)
            if here.any():
                found.append((here, data, offsets[here, None] + np.arange(size)))
                left &= ~here
        if left.any():
            raise MemoryFault(f"{left.sum()} lanes access {size} bytes outside of every tensor")
        return found

    def read(self, addresses: Array, size: int) -> Array:
        """(lanes, size) bytes."""
        result = np.empty((len(addresses), size), np.uint8)
        for lanes, data, at in self._places(addresses, size):
            result[lanes] = data[at]
        return result

    def write(self, addresses: Array, values: Array) -> None:
        for lanes, data, at in self._places(addresses, values.shape[1]):
            data[at] = values[lanes]


class SharedMemory:
    """(blocks, bytes), NaN in every float format until it is written."""

    def __init__(self, blocks: int, size: int) -> None:
        self.data = np.full((blocks, size), 0xFF, np.uint8)
        self.writer = np.full((blocks, size), NOBODY, np.int16)
        self.reader = np.full((blocks, size), NOBODY, np.int16)

    def _places(self, block: Array, addresses: Array, size: int) -> tuple[Array, Array]:
        _aligned(addresses, size)
        if np.any(addresses.astype(np.int64) > self.data.shape[1] - size):
            raise MemoryFault(f"{size} bytes outside of {self.data.shape[1]} bytes of shared memory")
        return block[:, None], addresses.astype(np.int64)[:, None] + np.arange(size)

    def read(self, block: Array, warp: Array, addresses: Array, size: int) -> Array:
        """(lanes, size) bytes.

        Raises:
            Race: another warp wrote one of them since the last barrier.
        """
        at, own = self._places(block, addresses, size), warp[:, None].astype(np.int16)
        writer, reader = self.writer[at], self.reader[at]
        if np.any((writer != NOBODY) & (writer != own)):
            raise Race("a warp reads what another wrote since the last barrier")
        self.reader[at] = np.where((reader == NOBODY) | (reader == own), own, SEVERAL)
        self.reader[at] = np.where(self.reader[at] == own, own, SEVERAL)
        return self.data[at]

    def write(self, block: Array, warp: Array, addresses: Array, values: Array) -> None:
        """Stores (lanes, size) bytes.

        Raises:
            Race: another warp read or wrote one of them since the last barrier.
        """
        at, own = self._places(block, addresses, values.shape[1]), warp[:, None].astype(np.int16)
        writer, reader = self.writer[at], self.reader[at]
        self.writer[at] = own
        if np.any((writer != NOBODY) & (writer != own)) or np.any(self.writer[at] != own):
            raise Race("two warps write the same byte between two barriers")
        if np.any((reader != NOBODY) & (reader != own)):
            raise Race("a warp writes what another read since the last barrier")
        self.data[at] = values

    def barrier(self, blocks: Array) -> None:
        """Begin a new interval in ``blocks`` (a mask)."""
        self.writer[blocks] = self.reader[blocks] = NOBODY
