"""A tensor's rows, found without copying it: strides, row counts, block sizes."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rounding import INTERPRETED

ELEMENTS = 32768 if INTERPRETED else 2048  # of one program, at least
PER_THREAD = 8  # one 128-bit load of a 16-bit dtype


def block_for(x: Tensor, width: int, per_thread: int = PER_THREAD) -> tuple[int, int, int]:
    """The columns, rows and warps of a program that takes whole rows of ``width``."""
    columns = max(triton.next_power_of_2(width), 16)
    rows = max(ELEMENTS // columns, 1)
    return columns, rows, warps_for(x, columns * rows, per_thread)


def warps_for(x: Tensor, elements: int, per_thread: int = PER_THREAD) -> int:
    """The number of warps that share a tile of ``elements`` on the device of ``x``."""
    lanes = 32 if INTERPRETED else _lanes(triton.runtime.driver.active, x.device)
    return min(max(elements // (lanes * per_thread), 1), 512 // lanes)


@functools.lru_cache(maxsize=64)
def _lanes(driver: Any, _device: torch.device) -> int:
    """The threads of a warp on the current device, 64 on AMD's CDNA; ``_device`` is its key in the cache."""
    return int(driver.get_current_target().warp_size)


def as_rows(x: Tensor) -> Tensor:
    """``x`` as (B, N, D) with adjacent features; a view where its strides allow that."""
    if x.ndim != 3:
        x = x.reshape(-1, *x.shape[-2:]) if x.ndim > 3 else x.reshape(1, -1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def steps(x: Tensor) -> tuple[int, ...]:
    """The strides of (B, N, ..., D), without that of the last axis; 0 for an axis of length 1, which broadcasts."""
    return tuple(x.stride(axis) if x.shape[axis] > 1 else 0 for axis in range(x.ndim - 1))


def modulation_rows(rows: Tensor | None) -> tuple[Tensor | None, int, int]:
    """``rows`` (B, 1 | 2 | N, D) and their :func:`steps`."""
    if rows is None:
        return None, 0, 0
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    return rows, *steps(rows)


@triton.jit
def modulation_row(token, split):
    """The row of a modulation that a token takes: its own; with ``split`` 0 for the first so many tokens, then 1."""
    return tl.where(split > 0, (token >= split).to(tl.int64), token)


def empty(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
    """An uninitialised contiguous tensor on the device of ``x``, in its dtype where ``dtype`` is None."""
    return torch.empty(shape, dtype=dtype or x.dtype, device=x.device)
