"""The SiLU of one half times the other, as gated feed-forwards have it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .library import AUTO, launches, operation
from .terms import wide


def swiglu(x: Tensor, out_dtype: torch.dtype | None = None, form: str = AUTO) -> Tensor:
    """``value * silu(gate)`` of ``x`` (..., 2 D), value then gate as in diffusers, in fp32 and rounded once."""
    return _SWIGLU(x, out_dtype) if launches(x, form) else swiglu_reference(x, out_dtype)


def swiglu_reference(x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """:func:`swiglu` in plain torch, in fp32, or in fp64 for fp64."""
    value, gate = wide(x).chunk(2, dim=-1)
    return (value * functional.silu(gate)).to(out_dtype or x.dtype).contiguous()


def _fake(x: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=out_dtype or x.dtype)


_SWIGLU = operation("swiglu(Tensor x, ScalarType? out_dtype) -> Tensor", _fake, swiglu_reference)
