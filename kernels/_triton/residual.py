"""The launches of :mod:`..residual`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..terms import LAYER, Gate, Modulation, Norm
from .norm import learned, modulated, standardized
from .rounding import rounded, wide
from .rows import as_rows, block_for, empty, grid_for, modulation_row, modulation_rows, steps


@triton.jit
def tanh(x):
    """The hyperbolic tangent of fp32, to about 2 ulp: a series where the quotient would cancel."""
    y = x * x
    series = 1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835 + y * (-1382 / 155925)))))
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(y < 0.0625, x * series, tl.where(x < 0, -far, far))


@triton.jit
def added(
    x, branch, gate, sample, token, column, inside, width, branch_eps, split,
    x_b, x_n, branch_b, branch_n, gate_b, gate_n, TANH: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """``x + branch * gate`` of some rows, fp32."""
    at = (sample * branch_b + token * branch_n)[:, None] + column[None, :]
    term = wide(tl.load(branch + at, mask=inside, other=0.0))
    if NORM:
        term = standardized(term, inside, width, branch_eps, False)
    if gate is not None:
        row = modulation_row(token, split)
        at = (sample * gate_b + row * gate_n)[:, None] + column[None, :]
        values = wide(tl.load(gate + at, mask=inside, other=0.0))
        term = term * (tanh(values) if TANH else values)
    own = wide(tl.load(x + (sample * x_b + token * x_n)[:, None] + column[None, :], mask=inside, other=0.0))
    return own + term


@triton.jit
def gated_residual_kernel(
    x, branch, gate, out,
    rows, tokens, width, branch_eps, split, x_b, x_n, branch_b, branch_n, gate_b, gate_n,
    TANH: tl.constexpr, NORM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    y = added(
        x, branch, gate, row // tokens, row % tokens, column, inside, width, branch_eps, split,
        x_b, x_n, branch_b, branch_n, gate_b, gate_n, TANH, NORM,
    )  # fmt: skip
    tl.store(out + (row * width)[:, None] + column[None, :], rounded(y, out.dtype.element_ty), mask=inside)


@triton.jit
def residual_norm_kernel(
    x, branch, gate, residual, out, weight, bias, scale, shift,
    rows, tokens, width, branch_eps, gate_split, eps, split,
    x_b, x_n, branch_b, branch_n, gate_b, gate_n, scale_b, scale_n, shift_b, shift_n,
    TANH: tl.constexpr, NORM: tl.constexpr, LAYER: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    within = column < width
    inside = (row < rows)[:, None] & within[None, :]
    sample, token = row // tokens, row % tokens
    y = added(
        x, branch, gate, sample, token, column, inside, width, branch_eps, gate_split,
        x_b, x_n, branch_b, branch_n, gate_b, gate_n, TANH, NORM,
    )  # fmt: skip
    at = (row * width)[:, None] + column[None, :]
    stored = rounded(y, residual.dtype.element_ty)
    tl.store(residual + at, stored, mask=inside)
    # The norm reads what later blocks will read, so it may not see more digits than were stored.
    y = learned(standardized(wide(stored), inside, width, eps, LAYER), weight, bias, column, within)
    y = modulated(y, scale, shift, sample, token, column, inside, split, scale_b, scale_n, shift_b, shift_n)
    tl.store(out + at, rounded(y, out.dtype.element_ty), mask=inside)


def gated_residual(x: Tensor, branch: Tensor, gate: Gate) -> Tensor:
    """The operation ``gated_residual`` on a device, or interpreted."""
    out, x, branch = empty(x, x.shape, None), as_rows(x), as_rows(branch)
    if not out.numel():
        return out
    tokens, width = x.shape[1:]
    columns, block, warps = block_for(x, width)
    values, *gate_steps = modulation_rows(gate.values)
    gated_residual_kernel[grid_for(x.shape[0] * tokens, block)](
        x, branch, values, out,
        x.shape[0] * tokens, tokens, width, gate.norm_eps or 0.0, gate.split, *steps(x), *steps(branch), *gate_steps,
        TANH=gate.tanh, NORM=gate.norm_eps is not None, COLUMNS=columns, ROWS=block,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def residual_norm(
    x: Tensor, branch: Tensor, gate: Gate, norm: Norm, modulation: Modulation, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """The operation ``residual_norm`` on a device, or interpreted."""
    residual, out = empty(x, x.shape, None), empty(x, x.shape, out_dtype)
    if not out.numel():
        return residual, out
    x, branch = as_rows(x), as_rows(branch)
    tokens, width = x.shape[1:]
    columns, block, warps = block_for(x, width)
    values, *gate_steps = modulation_rows(gate.values)
    scale, *scale_steps = modulation_rows(modulation.scale)
    shift, *shift_steps = modulation_rows(modulation.shift)
    residual_norm_kernel[grid_for(x.shape[0] * tokens, block)](
        x, branch, values, residual, out, norm.weight, norm.bias, scale, shift,
        x.shape[0] * tokens, tokens, width, gate.norm_eps or 0.0, gate.split, norm.eps, modulation.split,
        *steps(x), *steps(branch), *gate_steps, *scale_steps, *shift_steps,
        TANH=gate.tanh, NORM=gate.norm_eps is not None, LAYER=norm.kind == LAYER, COLUMNS=columns, ROWS=block,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return residual, out
