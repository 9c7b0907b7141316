"""The launch of :mod:`..activation`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rounding import INTERPRETED, rounded, wide
from .rows import empty, warps_for

GELU_TANH, GEGLU, SWIGLU = 0, 1, 2
BLOCK = 32768 if INTERPRETED else 1024  # columns of one program


@triton.jit
def activation_kernel(x, out, width, blocks, x_row, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    within = column < width
    y = wide(tl.load(x + row * x_row + column, mask=within, other=0.0))
    if KIND == 0:
        # The sigmoid form of the tanh form: it does not cancel where x is far below 0.
        y = y / (1.0 + tl.exp(-1.5957691216057308 * (y + 0.044715 * y * y * y)))
    else:
        gate = wide(tl.load(x + row * x_row + width + column, mask=within, other=0.0))
        if KIND == 1:
            y = y * (0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)))
        else:
            y = y * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + row * width + column, rounded(y, out.dtype.element_ty), mask=within)


def _launched(x: Tensor, kind: int, out_dtype: torch.dtype | None) -> Tensor:
    if kind == GELU_TANH:  # no halves: one row of everything
        out, x = empty(x, x.shape, out_dtype), x.contiguous().view(1, -1)
        width = x.shape[1]
    else:
        out = empty(x, (*x.shape[:-1], x.shape[-1] // 2), out_dtype)
        x = x.reshape(-1, x.shape[-1]) if x.numel() else x
        x = x if x.stride(-1) == 1 else x.contiguous()
        width = x.shape[-1] // 2
    if out.numel():
        blocks = triton.cdiv(width, BLOCK)
        activation_kernel[(x.shape[0] * blocks,)](
            x, out, width, blocks, x.stride(0), KIND=kind, BLOCK=BLOCK, num_warps=warps_for(x, BLOCK)
        )  # fmt: skip
    return out


def gelu_tanh(x: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """The operation ``gelu_tanh`` on a device, or interpreted."""
    return _launched(x, GELU_TANH, out_dtype)


def geglu(x: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """The operation ``geglu`` on a device, or interpreted."""
    return _launched(x, GEGLU, out_dtype)


def swiglu(x: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """The operation ``swiglu`` on a device, or interpreted."""
    return _launched(x, SWIGLU, out_dtype)
