"""GELU with tanh, and the gated GELU and SiLU; GELU is not GEGLU: only the gated ones halve the width."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .library import AUTO, launches, operation
from .terms import wide


def gelu_tanh(x: Tensor, out_dtype: torch.dtype | None = None, form: str = AUTO) -> Tensor:
    """``gelu(x, approximate="tanh")``, computed in fp32 and rounded once.

    Args:
        x: any shape and strides.
        out_dtype: that of ``x`` where None.
    """
    return _GELU_TANH(x, out_dtype) if launches(x, form) else gelu_tanh_reference(x, out_dtype)


def geglu(x: Tensor, out_dtype: torch.dtype | None = None, form: str = AUTO) -> Tensor:
    """``value * gelu(gate)`` with the exact GELU; ``x`` (..., 2 D) is value, then gate, as in diffusers."""
    return _GEGLU(x, out_dtype) if launches(x, form) else geglu_reference(x, out_dtype)


def swiglu(x: Tensor, out_dtype: torch.dtype | None = None, form: str = AUTO) -> Tensor:
    """``value * silu(gate)``; ``x`` (..., 2 D) is value, then gate, as in diffusers."""
    return _SWIGLU(x, out_dtype) if launches(x, form) else swiglu_reference(x, out_dtype)


def gelu_tanh_reference(x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """:func:`gelu_tanh` in plain torch, in fp32, or in fp64 for fp64."""
    return functional.gelu(wide(x), approximate="tanh").to(out_dtype or x.dtype).contiguous()


def geglu_reference(x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """:func:`geglu` in plain torch."""
    value, gate = wide(x).chunk(2, dim=-1)
    return (value * functional.gelu(gate)).to(out_dtype or x.dtype).contiguous()


def swiglu_reference(x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """:func:`swiglu` in plain torch."""
    value, gate = wide(x).chunk(2, dim=-1)
    return (value * functional.silu(gate)).to(out_dtype or x.dtype).contiguous()


def _fake(x: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype)


def _fake_half(x: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=out_dtype or x.dtype)


_GELU_TANH = operation("gelu_tanh(Tensor x, ScalarType? out_dtype) -> Tensor", _fake, gelu_tanh_reference)
_GEGLU = operation("geglu(Tensor x, ScalarType? out_dtype) -> Tensor", _fake_half, geglu_reference)
_SWIGLU = operation("swiglu(Tensor x, ScalarType? out_dtype) -> Tensor", _fake_half, swiglu_reference)
