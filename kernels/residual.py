"""Gated additions to the residual stream, alone or together with the norm that follows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .library import AUTO, launches, operation
from .norm import normalized_reference, per_token, standardized
from .terms import LAYER, NO_GATE, NO_MODULATION, RMS, Gate, Modulation, Norm


def gated_residual(x: Tensor, branch: Tensor, gate: Gate = NO_GATE, form: str = AUTO) -> Tensor:
    """``x + branch * gate`` in the dtype of ``x``, in fp32 math, rounded once; in fp32 equal to eager bit for bit.

    Args:
        x, branch: (B, N, D), each in any float dtype: an fp32 residual takes an fp16 branch.
    """
    if not launches(x, form):
        return gated_residual_reference(x, branch, gate)
    y: Tensor = _GATED_RESIDUAL(x, branch, gate.values, gate.tanh, gate.norm_eps, gate.split)
    return y


def residual_norm(
    x: Tensor,
    branch: Tensor,
    gate: Gate,
    norm: Norm,
    modulation: Modulation = NO_MODULATION,
    out_dtype: torch.dtype | None = None,
    form: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """The new residual, in the dtype of ``x``, and what its norm and modulation make of it, in ``out_dtype``.

    The norm reads the new residual after it was rounded, so both equal :func:`gated_residual` followed by
    ``normalized``.

    Args:
        out_dtype: that of ``x`` where None; fp16 for safe fp16's fp32 residual.
    """
    if not launches(x, form):
        return residual_norm_reference(x, branch, gate, norm, modulation, out_dtype)
    both: tuple[Tensor, Tensor] = _RESIDUAL_NORM(
        x,
        branch,
        gate.values,
        gate.tanh,
        gate.norm_eps,
        gate.split,
        norm.weight,
        norm.bias,
        modulation.scale,
        modulation.shift,
        modulation.split,
        norm.kind == LAYER,
        norm.eps,
        out_dtype,
    )
    return both


def gated_residual_reference(x: Tensor, branch: Tensor, gate: Gate = NO_GATE) -> Tensor:
    """:func:`gated_residual` in plain torch, in fp32, or in fp64 for fp64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    added = branch.to(wide)
    if gate.norm_eps is not None:
        added = standardized(added, Norm(RMS, gate.norm_eps))
    if gate.values is not None:
        values = per_token(gate.values, x, gate.split).to(wide)
        added = added * (values.tanh() if gate.tanh else values)
    return (x.to(wide) + added).to(x.dtype).contiguous()


def residual_norm_reference(
    x: Tensor,
    branch: Tensor,
    gate: Gate,
    norm: Norm,
    modulation: Modulation = NO_MODULATION,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`residual_norm` in plain torch."""
    residual = gated_residual_reference(x, branch, gate)
    return residual, normalized_reference(residual, norm, modulation, out_dtype)


def _fake_gated(x: Tensor, *_rest: object) -> Tensor:
    return x.new_empty(x.shape)


def _plain_gated(
    x: Tensor, branch: Tensor, gate: Tensor | None, tanh: bool, norm_eps: float | None, split: int
) -> Tensor:
    return gated_residual_reference(x, branch, Gate(gate, tanh, norm_eps, split))


def _launch_gated() -> Callable[..., Tensor]:
    from ._triton.residual import gated_residual as launch

    return launch


def _fake_both(x: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=rest[-1] or x.dtype)  # type: ignore[call-overload]


def _plain_both(
    x: Tensor,
    branch: Tensor,
    gate: Tensor | None,
    tanh: bool,
    norm_eps: float | None,
    gate_split: int,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    split: int,
    layer: bool,
    eps: float,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    norm = Norm(LAYER if layer else RMS, eps, weight, bias)
    terms = (Gate(gate, tanh, norm_eps, gate_split), norm, Modulation(scale, shift, split))
    return residual_norm_reference(x, branch, *terms, out_dtype)


def _launch_both() -> Callable[..., tuple[Tensor, Tensor]]:
    from ._triton.residual import residual_norm as launch

    return launch


_GATED_RESIDUAL = operation(
    "gated_residual(Tensor x, Tensor branch, Tensor? gate, bool tanh, float? norm_eps, SymInt split) -> Tensor",
    _fake_gated,
    _plain_gated,
    _launch_gated,
)
_RESIDUAL_NORM = operation(
    "residual_norm(Tensor x, Tensor branch, Tensor? gate, bool tanh, float? norm_eps, SymInt gate_split, "
    "Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, SymInt split, bool layer, float eps, "
    "ScalarType? out_dtype) -> (Tensor, Tensor)",
    _fake_both,
    _plain_both,
    _launch_both,
)
