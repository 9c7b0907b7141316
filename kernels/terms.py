"""The arguments of the operations as plain frozen values. Shapes: B batch, N tokens, H heads, D features of a token, W
features that are normalised together (a head's, or all D)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RMS, LAYER, SCALED = "rms", "layer", "scaled"
Pad = tuple[int, int, int, int, int, int]  # left, right, top, bottom, front, back: as functional.pad takes them
NO_PAD: Pad = (0, 0, 0, 0, 0, 0)
CONTIGUOUS, CHANNELS_LAST, FRAMES_FIRST = "contiguous", "channels_last", "frames_first"
LAYOUTS = (CONTIGUOUS, CHANNELS_LAST, FRAMES_FIRST)  # how a result (B, C, T, H, W) lies in memory; BTCHW is the last


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last dimension, here usually without weight and bias."""

    kind: str  # ``rms``, ``layer``, or ``scaled`` for a product with ``eps`` and no norm
    eps: float  # added to the mean square or variance
    weight: Tensor | None = None  # (D,), any float dtype
    bias: Tensor | None = None  # (D,), for ``layer`` only


@dataclass(frozen=True, slots=True)
class Modulation:
    """``normed * (1 + scale) + shift``; chunks of a larger tensor are read where they lie."""

    scale: Tensor | None = None  # (B, 1, D) per sample, (B, N, D) per token, or (B, 2, D) with ``split``
    shift: Tensor | None = None
    split: int = 0  # the first tokens take row 0, the rest row 1 (HunyuanVideo's replaced tokens)


@dataclass(frozen=True, slots=True)
class Gate:
    """The factor of a branch before it is added to the residual; nothing where ``values`` is None."""

    values: Tensor | None = None  # (B, 1, D), (B, N, D), or (B, 2, D) with ``split``
    tanh: bool = False  # the factor is tanh(values) (Mochi)
    norm_eps: float | None = None  # eps of an RMS norm without weight that the branch passes first, if any (Mochi)
    split: int = 0  # as in Modulation
    factor: Tensor | None = None  # (B | 1, N | 1, 1), fp32: multiplies the branch before its norm


@dataclass(frozen=True, slots=True)
class Pair:
    """Queries and keys of one stream with the weights of their RMS norms."""

    q: Tensor  # (B, N, H, W) normalised per head, or (B, N, W) across heads; k may have another N
    k: Tensor
    q_weight: Tensor | None = None  # (W,), or None for a norm without a weight
    k_weight: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Tables:
    """Cosines and sines of the rotation of pairs, (B, N, H, W / 2) or (B, N, W / 2); later tokens are not rotated."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class GroupNorm:
    """A norm over groups of channels."""

    groups: int
    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None
    per_frame: bool = False  # each frame has its own mean and variance (Mochi), not the clip (HunyuanVideo)


NO_MODULATION, NO_GATE = Modulation(), Gate()


def upcast(x: Tensor) -> Tensor:
    """``x`` in the dtype that references compute in: fp32, or fp64 for fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def power_of_two(x: Tensor) -> Tensor:
    """The next lower power of two of fp32 ``x``, by exponent bits alone: exact on every device, unlike exp2(log2())."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def empty_padded(x: Tensor, pad: Pad, layout: str) -> Tensor:
    """An uninitialised (B, C, T, H, W) as large as ``x`` with a border of ``pad``, in memory as ``layout`` says."""
    left, right, top, bottom, front, back = pad
    frames, rows, columns = x.shape[2] + front + back, x.shape[3] + top + bottom, x.shape[4] + left + right
    if layout == FRAMES_FIRST:
        return x.new_empty((x.shape[0], frames, x.shape[1], rows, columns)).transpose(1, 2)
    order = torch.channels_last_3d if layout == CHANNELS_LAST else torch.contiguous_format
    return torch.empty((*x.shape[:2], frames, rows, columns), dtype=x.dtype, device=x.device, memory_format=order)
