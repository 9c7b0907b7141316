"""The operations before a VAE's convolution in one pass: a norm over channels, SiLU and replicated padding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .library import AUTO, launches, operation
from .norm import modulated, standardized
from .terms import (
    CHANNELS_LAST,
    CONTIGUOUS,
    FRAMES_FIRST,
    NO_MODULATION,
    NO_PAD,
    RMS,
    GroupNorm,
    Modulation,
    Norm,
    Pad,
    empty_padded,
    upcast,
)


def group_norm_silu_pad(
    x: Tensor, norm: GroupNorm, pad: Pad = NO_PAD, silu: bool = True, layout: str = CONTIGUOUS, form: str = AUTO
) -> Tensor:
    """GroupNorm of ``x`` (B, C, T, H, W), SiLU, and its border replicated by ``pad``; in fp32, rounded once.
    ``layout`` is one of :data:`LAYOUTS`; that which the convolution reads without a copy."""
    if not launches(x, form):
        return group_norm_silu_pad_reference(x, norm, pad, silu, layout)
    return _GROUP_NORM_SILU_PAD(x, norm.weight, norm.bias, norm.groups, norm.eps, norm.per_frame, pad, silu, layout)


def rms_silu_pad(
    x: Tensor,
    norm: Norm,
    modulation: Modulation = NO_MODULATION,
    pad: Pad = NO_PAD,
    silu: bool = True,
    layout: str = CONTIGUOUS,
    form: str = AUTO,
) -> Tensor:
    """RMS norm over the channels of ``x`` (B, C, T, H, W), modulation, SiLU, and the border; in fp32, rounded once.
    The weight of ``norm`` is (C,), scale and shift are (B, C); no split."""
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
    return _finished(y, x.dtype, pad, silu, layout)


def rms_silu_pad_reference(
    x: Tensor,
    norm: Norm,
    modulation: Modulation = NO_MODULATION,
    pad: Pad = NO_PAD,
    silu: bool = True,
    layout: str = CONTIGUOUS,
) -> Tensor:
    """:func:`rms_silu_pad` in plain torch, in fp32, or in fp64 for fp64."""
    rows = (None if t is None else t[:, None, None, None] for t in (modulation.scale, modulation.shift))
    y = modulated(standardized(upcast(x).movedim(1, -1), norm), Modulation(*rows))
    return _finished(y.movedim(-1, 1), x.dtype, pad, silu, layout)


def _finished(x: Tensor, dtype: torch.dtype, pad: Pad, silu: bool, layout: str) -> Tensor:
    y = (functional.silu(x) if silu else x).to(dtype)
    if any(pad):
        y = functional.pad(y, pad, mode="replicate")
    if layout == FRAMES_FIRST:
        return y.transpose(1, 2).contiguous().transpose(1, 2)
    return y.contiguous(memory_format=torch.channels_last_3d if layout == CHANNELS_LAST else torch.contiguous_format)


_GROUP_NORM_SILU_PAD = operation(
    "group_norm_silu_pad(Tensor x, Tensor? weight, Tensor? bias, int groups, float eps, bool per_frame, int[] pad, "
    "bool silu, str layout) -> Tensor",
    lambda x, *rest: empty_padded(x, rest[5], rest[7]),
    group_norm_silu_pad_reference,
    lambda x, weight, bias, *rest: (x, GroupNorm(*rest[:2], weight, bias, per_frame=rest[2]), *rest[3:]),
)
_RMS_SILU_PAD = operation(
    "rms_silu_pad(Tensor x, Tensor? weight, Tensor? scale, Tensor? shift, float eps, int[] pad, bool silu, "
    "str layout) -> Tensor",
    lambda x, *rest: empty_padded(x, rest[4], rest[6]),
    rms_silu_pad_reference,
    lambda x, weight, scale, shift, eps, *how: (x, Norm(RMS, eps, weight), Modulation(scale, shift), *how),
)
