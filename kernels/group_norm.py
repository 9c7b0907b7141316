"""The operations before a VAE's convolution in one pass: a norm over channels, SiLU and replicated padding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .library import AUTO, launches, operation
from .norm import modulated, standardized
from .terms import LAYOUTS, NO_MODULATION, NO_PAD, RMS, GroupNorm, Modulation, Norm, Pad, empty_padded, upcast

CONTIGUOUS, CHANNELS_LAST, FRAMES_FIRST = LAYOUTS


def group_norm_silu_pad(
    x: Tensor, norm: GroupNorm, pad: Pad = NO_PAD, silu: bool = True, layout: str = CONTIGUOUS, form: str = AUTO
) -> Tensor:
    """GroupNorm and SiLU of ``x`` (B, C, T, H, W), padded by ``pad`` with its edges; in fp32, rounded once.
    ``layout``, one of :data:`LAYOUTS`, is the result's: the one that the next convolution reads without a copy."""
    if not launches(x, form):
        return group_norm_silu_pad_reference(x, norm, pad, silu, layout)
    return _GROUP_NORM_SILU_PAD(x, norm.weight, norm.bias, norm.groups, norm.eps, norm.per_frame, pad, silu, layout)


def rms_silu_pad(
    x: Tensor, norm: Norm, modulation: Modulation = NO_MODULATION, pad: Pad = NO_PAD, silu: bool = True,
    layout: str = CONTIGUOUS, form: str = AUTO,
) -> Tensor:  # fmt: skip
    """RMS norm over the channels of ``x`` (B, C, T, H, W), modulation and SiLU, padded as :func:`group_norm_silu_pad`
    does; in fp32, rounded once. The weight of ``norm`` is (C,), scale and shift are (B, C), without ``split``."""
    if not launches(x, form):
        return rms_silu_pad_reference(x, norm, modulation, pad, silu, layout)
    return _RMS_SILU_PAD(x, norm.weight, modulation.scale, modulation.shift, norm.eps, pad, silu, layout)


def group_norm_silu_pad_reference(
    x: Tensor, norm: GroupNorm, pad: Pad = NO_PAD, silu: bool = True, layout: str = CONTIGUOUS
) -> Tensor:
    """:func:`group_norm_silu_pad` in plain torch, in fp32, or in fp64 for fp64."""
    exact = upcast(x)
    weight, bias = (None if t is None else t.to(exact.dtype) for t in (norm.weight, norm.bias))
    if norm.per_frame:
        y = functional.group_norm(exact.transpose(1, 2).flatten(0, 1), norm.groups, weight, bias, norm.eps)
        y = y.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)
    else:
        y = functional.group_norm(exact, norm.groups, weight, bias, norm.eps)
    return _silu_pad(y, x.dtype, pad, silu, layout)


def rms_silu_pad_reference(
    x: Tensor, norm: Norm, modulation: Modulation = NO_MODULATION, pad: Pad = NO_PAD, silu: bool = True,
    layout: str = CONTIGUOUS,
) -> Tensor:  # fmt: skip
    """:func:`rms_silu_pad` in plain torch, in fp32, or in fp64 for fp64."""
    rows = (None if t is None else t[:, None, None, None] for t in (modulation.scale, modulation.shift))
    y = modulated(standardized(upcast(x).movedim(1, -1), norm), Modulation(*rows))
    return _silu_pad(y.movedim(-1, 1), x.dtype, pad, silu, layout)


def _silu_pad(x: Tensor, dtype: torch.dtype, pad: Pad, silu: bool, layout: str) -> Tensor:
    """The end of both operations: SiLU of the normed ``x``, rounded to ``dtype``, padded, in memory as ``layout``."""
    y = (functional.silu(x) if silu else x).to(dtype)
    if any(pad):
        y = functional.pad(y, pad, mode="replicate")
    if layout == FRAMES_FIRST:
        return y.transpose(1, 2).contiguous().transpose(1, 2)
    return y.contiguous(memory_format=torch.channels_last_3d if layout == CHANNELS_LAST else torch.contiguous_format)


_GROUP_NORM_SILU_PAD = operation(
    "group_norm_silu_pad(Tensor x, Tensor? weight, Tensor? bias, int groups, float eps, bool per_frame, int[] pad, "
    "bool silu, str layout) -> Tensor",
    lambda x, weight, bias, groups, eps, per_frame, pad, silu, layout: empty_padded(x, pad, layout),
    group_norm_silu_pad_reference,
    lambda x, weight, bias, groups, eps, per_frame, *how: (
        x, GroupNorm(groups, eps, weight, bias, per_frame=per_frame), *how,
    ),
)  # fmt: skip
_RMS_SILU_PAD = operation(
    "rms_silu_pad(Tensor x, Tensor? weight, Tensor? scale, Tensor? shift, float eps, int[] pad, bool silu, "
    "str layout) -> Tensor",
    lambda x, weight, scale, shift, eps, pad, silu, layout: empty_padded(x, pad, layout),
    rms_silu_pad_reference,
    lambda x, weight, scale, shift, eps, *how: (x, Norm(RMS, eps, weight), Modulation(scale, shift), *how),
)
