"""The arithmetic of a norm and its modulation, of rows that a kernel has read."""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import upcast
from .rows import modulation_row


@triton.jit
def standardized(x, inside, width, eps, KIND: tl.constexpr):
    """fp32 rows ``x``, 0 outside, normed by KIND: "rms", "layer", which is centred too, or "scaled": times ``eps``."""
    if KIND == "scaled":
        y = x * eps
    else:
        if KIND == "layer":
            x = tl.where(inside, x - (tl.sum(x, axis=1) / width)[:, None], 0.0)
        y = x * tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None]
    return y


@triton.jit
def affine(x, weight, bias, column, within):
    """``x * weight + bias`` where they are given."""
    if weight is not None:
        x = x * upcast(tl.load(weight + column, mask=within, other=0.0))[None, :]
    if bias is not None:
        x = x + upcast(tl.load(bias + column, mask=within, other=0.0))[None, :]
    return x


@triton.jit
def modulated(x, scale, shift, sample, token, column, inside, split, scale_b, scale_n, shift_b, shift_n):
    """``x * (1 + scale) + shift`` by the rows of :func:`modulation_row`; a table that is None is left out."""
    row = modulation_row(token, split)
    if scale is not None:
        at = (sample * scale_b + row * scale_n)[:, None] + column[None, :]
        x = x * (1.0 + upcast(tl.load(scale + at, mask=inside, other=0.0)))
    if shift is not None:
        at = (sample * shift_b + row * shift_n)[:, None] + column[None, :]
        x = x + upcast(tl.load(shift + at, mask=inside, other=0.0))
    return x
