"""GGUF blocks that diffusers has no function for, made dense by torch where they are; equal to gguf's own in fp32.
Source: ``dequantize_blocks`` of the package gguf, from which grids and tables of scales are read."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..packages import imported

CODECS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4")
OF_DIFFUSERS = ("Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "IQ4_XS")
NIBBLES, PAIRS, THREES, SEVENS = (0, 4), (0, 2, 4, 6), (0, 3, 6, 9), (0, 7, 14, 21)


def decoded(blocks: Tensor, codec: str) -> Tensor:
    """Dense fp32 values (blocks, values in one) of ``blocks`` (blocks, bytes in one) uint8; codecs: :data:`CODECS`."""
    b = blocks.int()
    if codec == "MXFP4":
        return _e2m1(b, _table(codec, b.device, "e8m0_to_fp32_half")[b[:, :1]])
    if codec == "NVFP4":
        return _e2m1(b, _table(codec, b.device, "ue4m3_to_fp32")[b[:, :4]])
    if codec == "TQ1_0":  # five ternary digits to a byte, four in the last bytes
        powers = torch.tensor([1, 3, 9, 27, 81], device=b.device)[:, None]
        runs = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
        digits = [(b[:, None, first:last] * powers[:count] & 255).flatten(1) for first, last, count in runs]
        return _half(b[:, 52:]) * ((torch.cat(digits, 1) * 3 >> 8) - 1).float()
    if codec == "TQ2_0":
        pairs = b[:, :64].unflatten(1, (2, 1, 32))
        return _half(b[:, 64:]) * (torch.cat([pairs >> shift & 3 for shift in PAIRS], 2).flatten(1) - 1).float()
    scales, index, signs, delta = _fields(b, codec)
    values = _table(codec, b.device)[index].flatten(1)
    if signs is not None:
        values = values * (1.0 - 2.0 * _bits(signs, range(8), 1))
    if delta is not None:
        values = (values.unflatten(1, (delta.shape[1], -1)) + delta.unsqueeze(-1)).flatten(1)
    return (values.unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(-1)).flatten(1)


def _fields(b: Tensor, codec: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The scale of each run of values (blocks, runs), indices of the grid's rows (blocks, m), bytes with a sign bit for
    each of 8 values, and the number added to each run (blocks, runs); the last two are None in codecs without them."""
    d, sign_bytes = _half(b[:, :2]), _table("IQ2_XXS", b.device, "ksigns")  # 7 bits -> 8 signs
    if codec == "IQ2_XXS":
        pairs = b[:, 2:].unflatten(1, (8, 8))
        words = _words(pairs[..., 4:].flatten(1), 4)
        return d * (0.5 + (words >> 28)) * 0.25, pairs[..., :4].flatten(1), sign_bytes[_bits(words, SEVENS, 127)], None
    if codec == "IQ2_XS":
        words = _words(b[:, 2:66], 2)
        return d * (0.5 + _bits(b[:, 66:], NIBBLES, 15)) * 0.25, words & 511, sign_bytes[words >> 9], None
    if codec == "IQ2_S":
        index = b[:, 2:34] | _bits(b[:, 66:74], PAIRS, 3) << 8
        return d * (0.5 + _bits(b[:, 74:], NIBBLES, 15)) * 0.25, index, b[:, 34:66], None
    if codec == "IQ3_XXS":
        words = _words(b[:, 66:], 4)
        return d * (0.5 + (words >> 28)) * 0.5, b[:, 2:66], sign_bytes[_bits(words, SEVENS, 127)], None
    if codec == "IQ3_S":
        index = b[:, 2:66] | _bits(b[:, 66:74], range(8), 1) << 8
        return d * (1 + 2 * _bits(b[:, 106:], NIBBLES, 15)), index, b[:, 74:106], None
    if codec == "IQ1_S":
        words = _words(b[:, 34:], 2)
        index, delta = b[:, 2:34] | _bits(words, THREES, 7) << 8, 0.125 - 0.25 * (words >> 15)
        return d * (2 * (words >> 12 & 7) + 1), index, None, delta
    words, high = _words(b[:, 48:], 2), _bits(b[:, 32:48], NIBBLES, 15)  # IQ1_M
    parts = (words >> 12) << torch.tensor((*NIBBLES, 8, 12), device=b.device)  # of an fp16 scale, 4 bits a word
    d = _half(torch.cat([parts.sum(1, keepdim=True) & 255, parts.sum(1, keepdim=True) >> 8], 1))
    return d * (2 * _bits(words, THREES, 7) + 1), b[:, :32] | (high & 7) << 8, None, 0.125 - 0.25 * (high >> 3)


def _bits(x: Tensor, shifts: Iterable[int], mask: int) -> Tensor:
    """Bit fields of the integers ``x`` (blocks, m): each ``x >> shift & mask``, side by side (blocks, m * shifts)."""
    return torch.stack([x >> shift & mask for shift in shifts], -1).flatten(1)


def _words(x: Tensor, size: int) -> Tensor:
    """Bytes (blocks, m) as little-endian integers of ``size`` bytes, int64."""
    weights = torch.tensor([256**place for place in range(size)], device=x.device)
    return (x.unflatten(1, (-1, size)).long() * weights).sum(-1)


def _half(x: Tensor) -> Tensor:
    """Bytes (blocks, 2 m) as the fp16 numbers that they are, in fp32."""
    return x.to(torch.uint8).contiguous().view(torch.float16).float()


def _e2m1(b: Tensor, scales: Tensor) -> Tensor:
    """Scaled values of the 4-bit codes behind a scale byte per run; a run has the low halves of its bytes first."""
    runs = b[:, scales.shape[1] :].unflatten(1, (scales.shape[1], -1))
    values = _table("MXFP4", b.device, "kvalues")[torch.cat([runs & 15, runs >> 4], 2)]
    return (values * scales.unsqueeze(-1)).flatten(1)


@lru_cache(maxsize=64)
def _table(codec: str, device: torch.device, name: str = "") -> Tensor:
    """The grid of a codec in the package gguf, or its table ``name``, or its function ``name`` of all 256 bytes."""
    import numpy

    kind: Any = getattr(imported("gguf").quants, codec)
    if name in ("ksigns", "kvalues"):
        return torch.tensor(list(getattr(kind, name)), device=device)
    if name:
        return torch.from_numpy(getattr(kind, name)(numpy.arange(256, dtype=numpy.uint8))).float().to(device)
    kind.init_grid()
    return torch.from_numpy(kind.grid.reshape(kind.grid_shape)).float().to(device)
