"""The launches of :mod:`..norm` and :mod:`..residual`: one kernel, compiled without the terms that are None."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..terms import NO_GATE, NO_MODULATION, RMS, Gate, Modulation, Norm
from .norm import affine, modulated, standardized
from .rounding import rounded, upcast
from .rows import as_rows, block_for, empty, modulation_row, modulation_rows, steps


@triton.jit
def tanh(x):
    """The hyperbolic tangent of fp32, to about 3 eps where exp is exact: a series where the quotient would cancel."""
    y = x * x
    series = 1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835 + y * (-1382 / 155925)))))
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(y < 0.0625, x * series, tl.where(x < 0, -far, far))


@triton.jit
def added(
    y, branch, gate, factor, sample, token, exists, column, inside, width, branch_eps, split,
    branch_b, branch_n, gate_b, gate_n, factor_b, factor_n, TANH: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """``y + branch * factor * gate`` of rows, fp32. NORM: the branch, scaled by factor, is RMS-normed; TANH: the gate
    is its tanh. ``exists`` masks rows, ``inside`` their elements."""
    at = (sample * branch_b + token * branch_n)[:, None] + column[None, :]
    term = upcast(tl.load(branch + at, mask=inside, other=0.0))
    if factor is not None:
        term = term * tl.load(factor + sample * factor_b + token * factor_n, mask=exists, other=0.0)[:, None]
    if NORM:
        term = standardized(term, inside, width, branch_eps, "rms")
    if gate is not None:
        row = modulation_row(token, split)
        at = (sample * gate_b + row * gate_n)[:, None] + column[None, :]
        values = upcast(tl.load(gate + at, mask=inside, other=0.0))
        term = term * (tanh(values) if TANH else values)
    return y + term


@triton.jit
def residual_norm_kernel(
    x, branch, gate, factor, residual, out, weight, bias, scale, shift,
    rows, tokens, width, branch_eps, gate_split, eps, split,
    x_b, x_n, branch_b, branch_n, gate_b, gate_n, factor_b, factor_n, scale_b, scale_n, shift_b, shift_n,
    TANH: tl.constexpr, NORM: tl.constexpr, KIND: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows: their sum with the gated ``branch``, unless that is None, into ``residual``; the modulated norm
    of the sum, or of ``x``, into ``out``, unless that is None."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    within = column < width
    inside = (row < rows)[:, None] & within[None, :]
    sample, token = row // tokens, row % tokens
    at = (row * width)[:, None] + column[None, :]
    y = upcast(tl.load(x + (sample * x_b + token * x_n)[:, None] + column[None, :], mask=inside, other=0.0))
    if branch is not None:
        y = added(
            y, branch, gate, factor, sample, token, row < rows, column, inside, width, branch_eps, gate_split,
            branch_b, branch_n, gate_b, gate_n, factor_b, factor_n, TANH, NORM,
        )  # fmt: skip
        stored = rounded(y, residual.dtype.element_ty)
        tl.store(residual + at, stored, mask=inside)
        y = upcast(stored)  # the norm reads what later blocks will read, so it may not see more digits than were stored
    if out is not None:
        y = affine(standardized(y, inside, width, eps, KIND), weight, bias, column, within)
        y = modulated(y, scale, shift, sample, token, column, inside, split, scale_b, scale_n, shift_b, shift_n)
        tl.store(out + at, rounded(y, out.dtype.element_ty), mask=inside)


def gated_residual(x: Tensor, branch: Tensor, gate: Gate) -> Tensor:
    """The operation ``gated_residual`` on a device, or interpreted."""
    return _launch(x, branch, gate, None)[0]


def residual_norm(
    x: Tensor, branch: Tensor, gate: Gate, norm: Norm, modulation: Modulation, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """The operation ``residual_norm`` on a device, or interpreted."""
    return _launch(x, branch, gate, norm, modulation, out_dtype)


def normalized(x: Tensor, norm: Norm, modulation: Modulation, out_dtype: torch.dtype | None) -> Tensor:
    """The operation ``normalized`` on a device, or interpreted."""
    return _launch(x, None, NO_GATE, norm, modulation, out_dtype)[1]


def _launch(
    x: Tensor, branch: Tensor | None, gate: Gate, norm: Norm | None,
    modulation: Modulation = NO_MODULATION, out_dtype: torch.dtype | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """The sum, None without ``branch``, and its modulated norm, None without ``norm``."""
    residual = None if branch is None else empty(x, x.shape, None)
    out = None if norm is None else empty(x, x.shape, out_dtype)
    if not x.numel():
        return residual, out
    x = as_rows(x)
    branch, *branch_steps = modulation_rows(None if branch is None else as_rows(branch))
    tokens, width = x.shape[1:]
    columns, block, warps = block_for(x, width)
    values, *gate_steps = modulation_rows(gate.values)
    factor, *factor_steps = modulation_rows(gate.factor)
    scale, *scale_steps = modulation_rows(modulation.scale)
    shift, *shift_steps = modulation_rows(modulation.shift)
    norm = norm or Norm(RMS, 0.0)
    residual_norm_kernel[(triton.cdiv(x.shape[0] * tokens, block),)](
        x, branch, values, factor, residual, out, norm.weight, norm.bias, scale, shift,
        x.shape[0] * tokens, tokens, width, gate.norm_eps or 0.0, gate.split, norm.eps, modulation.split,
        *steps(x), *branch_steps, *gate_steps, *factor_steps, *scale_steps, *shift_steps, TANH=gate.tanh,
        NORM=gate.norm_eps is not None, KIND=norm.kind, COLUMNS=columns, ROWS=block, num_warps=warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    return residual, out
