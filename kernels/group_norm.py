"""What stands before a VAE's convolution: a norm over channels, SiLU, and the replicated border, in one result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from .library import AUTO, launches, operation
from .norm import standardized
from .terms import NO_MODULATION, RMS, GroupNorm, Modulation, Norm

Pad = tuple[int, int, int, int, int, int]  # left, right, top, bottom, front, back: as functional.pad takes them
NO_PAD: Pad = (0, 0, 0, 0, 0, 0)


def group_norm_silu_pad(
    x: Tensor,
    norm: GroupNorm,
    pad: Pad = NO_PAD,
    silu: bool = True,
    channels_last: bool = False,
    form: str = AUTO,
) -> Tensor:
    """GroupNorm of ``x`` (B, C, T, H, W), SiLU, and its border replicated by ``pad``; in fp32, rounded once.

    Args:
        channels_last: give ``torch.channels_last_3d``, which the convolution that follows then keeps.
    """
    if not launches(x, form):
        return group_norm_silu_pad_reference(x, norm, pad, silu, channels_last)
    found: Tensor = _GROUP_NORM_SILU_PAD(
        x, norm.weight, norm.bias, norm.groups, norm.eps, norm.per_frame, pad, silu, channels_last
    )
    return found


def rms_silu_pad(
    x: Tensor,
    norm: Norm,
    modulation: Modulation = NO_MODULATION,
    pad: Pad = NO_PAD,
    silu: bool = True,
    channels_last: bool = False,
    form: str = AUTO,
) -> Tensor:
    """RMS norm over the channels of ``x`` (B, C, T, H, W), modulation, SiLU, and the border; in fp32, rounded once.

    Args:
        norm: of kind ``rms``; its weight is (C,). modulation: scale and shift (B, C); no split.
    """
    if not launches(x, form):
        return rms_silu_pad_reference(x, norm, modulation, pad, silu, channels_last)
    found: Tensor = _RMS_SILU_PAD(
        x, norm.weight, modulation.scale, modulation.shift, norm.eps, pad, silu, channels_last
    )
    return found


def group_norm_silu_pad_reference(
    x: Tensor, norm: GroupNorm, pad: Pad = NO_PAD, silu: bool = True, channels_last: bool = False
) -> Tensor:
    """:func:`group_norm_silu_pad` in plain torch, in fp32, or in fp64 for fp64."""
    wide = _wide(x)
    weight, bias = (None if t is None else t.to(wide.dtype) for t in (norm.weight, norm.bias))
    if norm.per_frame:
        frames = wide.transpose(1, 2).flatten(0, 1)
        found = functional.group_norm(frames, norm.groups, weight, bias, norm.eps)
        found = found.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)
    else:
        found = functional.group_norm(wide, norm.groups, weight, bias, norm.eps)
    return _finished(found, x.dtype, pad, silu, channels_last)


def rms_silu_pad_reference(
    x: Tensor,
    norm: Norm,
    modulation: Modulation = NO_MODULATION,
    pad: Pad = NO_PAD,
    silu: bool = True,
    channels_last: bool = False,
) -> Tensor:
    """:func:`rms_silu_pad` in plain torch, in fp32, or in fp64 for fp64."""
    found = standardized(_wide(x).movedim(1, -1), norm)
    if modulation.scale is not None:
        found = found * (1 + modulation.scale.to(found.dtype)[:, None, None, None])
    if modulation.shift is not None:
        found = found + modulation.shift.to(found.dtype)[:, None, None, None]
    return _finished(found.movedim(-1, 1), x.dtype, pad, silu, channels_last)


def _finished(x: Tensor, dtype: torch.dtype, pad: Pad, silu: bool, channels_last: bool) -> Tensor:
    found = (functional.silu(x) if silu else x).to(dtype)
    if any(pad):
        found = functional.pad(found, pad, mode="replicate")
    return found.contiguous(memory_format=torch.channels_last_3d if channels_last else torch.contiguous_format)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _fake_group(x: Tensor, *rest: object) -> Tensor:
    return _empty(x, rest[5], rest[7])


def _fake_rms(x: Tensor, *rest: object) -> Tensor:
    return _empty(x, rest[4], rest[6])


def _empty(x: Tensor, pad: object, channels_last: object) -> Tensor:
    assert isinstance(pad, (list, tuple))
    left, right, top, bottom, front, back = pad
    shape = (*x.shape[:2], x.shape[2] + front + back, x.shape[3] + top + bottom, x.shape[4] + left + right)
    layout = torch.channels_last_3d if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)


def _plain_group(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    per_frame: bool,
    pad: Pad,
    silu: bool,
    channels_last: bool,
) -> Tensor:
    return group_norm_silu_pad_reference(x, GroupNorm(groups, eps, weight, bias, per_frame), pad, silu, channels_last)


def _plain_rms(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    pad: Pad,
    silu: bool,
    channels_last: bool,
) -> Tensor:
    return rms_silu_pad_reference(x, Norm(RMS, eps, weight), Modulation(scale, shift), pad, silu, channels_last)


def _launch_group() -> Callable[..., Tensor]:
    from ._triton.group_norm import group_norm_silu_pad as launch

    return launch


def _launch_rms() -> Callable[..., Tensor]:
    from ._triton.group_norm import rms_silu_pad as launch

    return launch


_GROUP_NORM_SILU_PAD = operation(
    "group_norm_silu_pad(Tensor x, Tensor? weight, Tensor? bias, int groups, float eps, bool per_frame, int[] pad, "
    "bool silu, bool channels_last) -> Tensor",
    _fake_group,
    _plain_group,
    _launch_group,
)
_RMS_SILU_PAD = operation(
    "rms_silu_pad(Tensor x, Tensor? weight, Tensor? scale, Tensor? shift, float eps, int[] pad, bool silu, "
    "bool channels_last) -> Tensor",
    _fake_rms,
    _plain_rms,
    _launch_rms,
)
