"""The launch of :mod:`..norm`, and the arithmetic of a norm that others share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..terms import LAYER, Modulation, Norm
from .rounding import rounded, wide
from .rows import as_rows, block_for, empty, grid_for, modulation_row, modulation_rows, steps


@triton.jit
def standardized(x, inside, width, eps, LAYER: tl.constexpr):
    """fp32 rows ``x``, 0 outside, divided by their root mean square, or for LAYER by their standard deviation."""
    if LAYER:
        x = tl.where(inside, x - (tl.sum(x, axis=1) / width)[:, None], 0.0)
    return x * tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None]


@triton.jit
def learned(x, weight, bias, column, within):
    """``x * weight + bias`` where they are given."""
    if weight is not None:
        x = x * wide(tl.load(weight + column, mask=within, other=0.0))[None, :]
    if bias is not None:
        x = x + wide(tl.load(bias + column, mask=within, other=0.0))[None, :]
    return x


@triton.jit
def modulated(x, scale, shift, sample, token, column, inside, split, scale_b, scale_n, shift_b, shift_n):
    """``x * (1 + scale) + shift`` where they are given."""
    row = modulation_row(token, split)
    if scale is not None:
        at = (sample * scale_b + row * scale_n)[:, None] + column[None, :]
        x = x * (1.0 + wide(tl.load(scale + at, mask=inside, other=0.0)))
    if shift is not None:
        at = (sample * shift_b + row * shift_n)[:, None] + column[None, :]
        x = x + wide(tl.load(shift + at, mask=inside, other=0.0))
    return x


@triton.jit
def norm_kernel(
    x, out, weight, bias, scale, shift,
    rows, tokens, width, eps, split, x_b, x_n, scale_b, scale_n, shift_b, shift_n,
    LAYER: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    within = column < width
    inside = (row < rows)[:, None] & within[None, :]
    sample, token = row // tokens, row % tokens
    y = wide(tl.load(x + (sample * x_b + token * x_n)[:, None] + column[None, :], mask=inside, other=0.0))
    y = learned(standardized(y, inside, width, eps, LAYER), weight, bias, column, within)
    y = modulated(y, scale, shift, sample, token, column, inside, split, scale_b, scale_n, shift_b, shift_n)
    tl.store(out + (row * width)[:, None] + column[None, :], rounded(y, out.dtype.element_ty), mask=inside)


def normalized(x: Tensor, norm: Norm, modulation: Modulation, out_dtype: torch.dtype | None) -> Tensor:
    """The operation ``normalized`` on a device, or interpreted."""
    out, x = empty(x, x.shape, out_dtype), as_rows(x)
    if not out.numel():
        return out
    tokens, width = x.shape[1:]
    rows = x.shape[0] * tokens
    columns, block, warps = block_for(x, width)
    scale, *scale_steps = modulation_rows(modulation.scale)
    shift, *shift_steps = modulation_rows(modulation.shift)
    norm_kernel[grid_for(rows, block)](
        x, out, norm.weight, norm.bias, scale, shift,
        rows, tokens, width, norm.eps, modulation.split, *steps(x), *scale_steps, *shift_steps,
        LAYER=norm.kind == LAYER, COLUMNS=columns, ROWS=block, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return out
