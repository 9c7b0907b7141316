"""RMS and layer norms over the last dimension with an optional weight, bias, scale and shift, in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .library import AUTO, launches, operation
from .terms import LAYER, NO_MODULATION, SCALED, Modulation, Norm, upcast


def normalized(
    x: Tensor, norm: Norm, modulation: Modulation = NO_MODULATION, out_dtype: torch.dtype | None = None,
    form: str = AUTO,  # one of library.FORMS; ``out_dtype`` None: the dtype of ``x``
) -> Tensor:  # fmt: skip
    """``norm(x) * (1 + scale) + shift``, in fp32, rounded once; ``x`` (..., N, D), with a modulation (B, N, D)."""
    if not launches(x, form):
        return normalized_reference(x, norm, modulation, out_dtype)
    return _NORMALIZED(x, *flat_terms(norm, modulation), out_dtype)


def normalized_reference(
    x: Tensor, norm: Norm, modulation: Modulation = NO_MODULATION, out_dtype: torch.dtype | None = None
) -> Tensor:
    """:func:`normalized` in plain torch, in fp32, or in fp64 for fp64."""
    return modulated(standardized(upcast(x), norm), modulation).to(out_dtype or x.dtype).contiguous()


def standardized(x: Tensor, norm: Norm) -> Tensor:
    """``x`` after ``norm``, computed in the dtype of ``x``; ``scaled`` multiplies by ``eps`` and norms nothing."""
    weight = None if norm.weight is None else norm.weight.to(x.dtype)
    if norm.kind == LAYER:
        bias = None if norm.bias is None else norm.bias.to(x.dtype)
        return functional.layer_norm(x, x.shape[-1:], weight, bias, norm.eps)
    y = x * (norm.eps if norm.kind == SCALED else torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps))
    return y if weight is None else y * weight


def modulated(x: Tensor, modulation: Modulation) -> Tensor:
    """``x * (1 + scale) + shift`` in the dtype of ``x``."""
    if modulation.scale is not None:
        x = x * (1 + per_token(modulation.scale, x, modulation.split).to(x.dtype))
    if modulation.shift is not None:
        x = x + per_token(modulation.shift, x, modulation.split).to(x.dtype)
    return x


def per_token(rows: Tensor, x: Tensor, split: int) -> Tensor:
    """``rows`` that broadcast to ``x`` (B, N, D); with ``split``, row 0 for that many tokens, row 1 for the rest."""
    if not split:
        return rows
    first, rest = rows[:, :1].expand(-1, split, -1), rows[:, 1:].expand(-1, x.shape[1] - split, -1)
    return torch.cat([first, rest], dim=1)


def flat_terms(norm: Norm, modulation: Modulation) -> tuple[Any, ...]:
    """The fields of both in the order of the schemas: weight, bias, scale, shift, split, kind, eps."""
    return norm.weight, norm.bias, modulation.scale, modulation.shift, modulation.split, norm.kind, norm.eps


def terms_of(weight: Any, bias: Any, scale: Any, shift: Any, split: int, kind: str, eps: float) -> tuple[Any, ...]:
    """The inverse of :func:`flat_terms`: a Norm and a Modulation."""
    return Norm(kind, eps, weight, bias), Modulation(scale, shift, split)


_NORMALIZED = operation(
    "normalized(Tensor x, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, SymInt split, str kind, "
    "float eps, ScalarType? out_dtype) -> Tensor",
    lambda x, *rest: x.new_empty(x.shape, dtype=rest[-1] or x.dtype),
    normalized_reference,
    lambda x, *rest: (x, *terms_of(*rest[:-1]), rest[-1]),
)
