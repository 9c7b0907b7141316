"""Gated additions to the residual stream, alone or together with the norm that follows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .library import AUTO, launches, operation
from .norm import flat_terms, normalized_reference, per_token, standardized, terms_of
from .terms import NO_GATE, NO_MODULATION, RMS, Gate, Modulation, Norm, upcast


def gated_residual(x: Tensor, branch: Tensor, gate: Gate = NO_GATE, form: str = AUTO) -> Tensor:
    """``x + branch * gate`` in fp32 math, rounded once to the dtype of ``x``; for fp32 equal to eager bit for bit.
    ``x`` and ``branch`` (B, N, D) may differ in dtype, as fp32 and fp16. A Gate may norm the branch first."""
    if not launches(x, form):
        return gated_residual_reference(x, branch, gate)
    return _GATED_RESIDUAL(x, branch, *_flat(gate))


def residual_norm(
    x: Tensor, branch: Tensor, gate: Gate, norm: Norm, modulation: Modulation = NO_MODULATION,
    out_dtype: torch.dtype | None = None, form: str = AUTO,  # None: the dtype of ``x``; form: one of library.FORMS
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The new residual, in the dtype of ``x``, and the same after ``norm`` and ``modulation``, in ``out_dtype``.
    The norm reads the residual as rounded, so both equal :func:`gated_residual` followed by ``normalized``."""
    if not launches(x, form):
        return residual_norm_reference(x, branch, gate, norm, modulation, out_dtype)
    return _RESIDUAL_NORM(x, branch, *_flat(gate), *flat_terms(norm, modulation), out_dtype)


def _flat(gate: Gate) -> tuple[Any, ...]:
    return gate.values, gate.tanh, gate.norm_eps, gate.split, gate.factor


def gated_residual_reference(x: Tensor, branch: Tensor, gate: Gate = NO_GATE) -> Tensor:
    """:func:`gated_residual` in plain torch, in fp32, or in fp64 for fp64."""
    total = upcast(x)
    added = branch.to(total.dtype)
    if gate.factor is not None:
        added = added * gate.factor.to(total.dtype)
    if gate.norm_eps is not None:
        added = standardized(added, Norm(RMS, gate.norm_eps))
    if gate.values is not None:
        values = per_token(gate.values, x, gate.split).to(total.dtype)
        added = added * (values.tanh() if gate.tanh else values)
    return (total + added).to(x.dtype).contiguous()


def residual_norm_reference(
    x: Tensor, branch: Tensor, gate: Gate, norm: Norm, modulation: Modulation = NO_MODULATION,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`residual_norm` in plain torch."""
    residual = gated_residual_reference(x, branch, gate)
    return residual, normalized_reference(residual, norm, modulation, out_dtype)


_GATED_RESIDUAL = operation(
    "gated_residual(Tensor x, Tensor branch, Tensor? gate, bool tanh, float? norm_eps, SymInt split, "
    "Tensor? factor) -> Tensor",
    lambda x, *_: x.new_empty(x.shape),
    gated_residual_reference,
    lambda x, branch, *gate: (x, branch, Gate(*gate)),
)
_RESIDUAL_NORM = operation(
    "residual_norm(Tensor x, Tensor branch, Tensor? gate, bool tanh, float? norm_eps, SymInt gate_split, "
    "Tensor? factor, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, SymInt split, str kind, float eps, "
    "ScalarType? out_dtype) -> (Tensor, Tensor)",
    lambda x, *rest: (x.new_empty(x.shape), x.new_empty(x.shape, dtype=rest[-1] or x.dtype)),
    residual_norm_reference,
    lambda x, branch, *rest: (x, branch, Gate(*rest[:5]), *terms_of(*rest[5:-1]), rest[-1]),
)
