"""The SiLU of one half times the other, as gated feed-forwards have it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .library import AUTO, launches, operation
from .terms import power_of_two, upcast


def swiglu(x: Tensor, form: str = AUTO) -> Tensor:
    """``value * silu(gate)`` of ``x`` (..., 2 D), value then gate as in diffusers, in fp32 and rounded once."""
    return _SWIGLU(x, None)[0] if launches(x, form) else swiglu_reference(x)


def scaled_swiglu(x: Tensor, room: float, form: str = AUTO) -> tuple[Tensor, Tensor]:
    """:func:`swiglu` with each row divided by a power of two, at least 1, that brings its L2 norm below ``room``,
    because a gated product may leave fp16's range; and these powers of two (..., 1), fp32."""
    return _SWIGLU(x, room) if launches(x, form) else scaled_swiglu_reference(x, room)


def swiglu_reference(x: Tensor) -> Tensor:
    """:func:`swiglu` in plain torch, in fp32, or in fp64 for fp64."""
    value, gate = upcast(x).chunk(2, dim=-1)
    return (value * functional.silu(gate)).to(x.dtype).contiguous()


def scaled_swiglu_reference(x: Tensor, room: float) -> tuple[Tensor, Tensor]:
    """:func:`scaled_swiglu` in plain torch, in fp32, or in fp64 for fp64."""
    y = swiglu_reference(upcast(x))
    powers = power_of_two(torch.linalg.vector_norm(y, dim=-1, keepdim=True).float() * (2 / room)).clamp_(min=1.0)
    return (y / powers).to(x.dtype), powers


def _fake(x: Tensor, room: float | None) -> tuple[Tensor, Tensor]:
    powers = (*x.shape[:-1], 1) if room is not None else (0,)
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2)), x.new_empty(powers, dtype=torch.float32)


def _reference(x: Tensor, room: float | None) -> tuple[Tensor, Tensor]:
    """The products and the powers of two that divided them; no powers where ``room`` is None."""
    if room is not None:
        return scaled_swiglu_reference(x, room)
    return swiglu_reference(x), x.new_empty(0, dtype=torch.float32)


_SWIGLU = operation("swiglu(Tensor x, float? room) -> (Tensor, Tensor)", _fake, _reference)
