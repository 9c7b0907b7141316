"""The launch of :mod:`..activation`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rounding import INTERPRETED, rounded, wide
from .rows import empty, warps_for

BLOCK = 32768 if INTERPRETED else 1024  # columns of one program


@triton.jit
def activation_kernel(x, out, width, blocks, x_row, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    within = column < width
    value = wide(tl.load(x + row * x_row + column, mask=within, other=0.0))
    gate = wide(tl.load(x + row * x_row + width + column, mask=within, other=0.0))
    y = value * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + row * width + column, rounded(y, out.dtype.element_ty), mask=within)


def swiglu(x: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """The operation ``swiglu`` on a device, or interpreted."""
    out = empty(x, (*x.shape[:-1], x.shape[-1] // 2), out_dtype)
    x = x.reshape(-1, x.shape[-1]) if x.numel() else x
    x = x if x.stride(-1) == 1 else x.contiguous()
    width = x.shape[-1] // 2
    if out.numel():
        blocks = triton.cdiv(width, BLOCK)
        activation_kernel[(x.shape[0] * blocks,)](
            x, out, width, blocks, x.stride(0), BLOCK=BLOCK, num_warps=warps_for(x, BLOCK)
        )
    return out
