"""The operands of one attention call in fp16, where that is near to fp32 whichever kernel computes with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..device.execution import to_host
from .fp16_layers import EXPONENT, FULL, HALF

MOST_SCORE = 256.0
"""Largest scaled score in fp16. Rounded operands move it by at most 1/4; kernels that form scores in fp16, some of them
before the scale, are far from overflow; and no operand leaves fp16's range, since |q| |k| bounds each product."""
MOST_VALUE = 512.0  # kernels that add 64 products with values in fp16 (SageAttention's Triton) overflow at 1024
SPREAD = 2.0**20  # between the largest and the smallest row of values: fp16 holds both to about a thousandth
HIDDEN = -1e4  # a mask's value from which a key counts for nothing beside one that is seen
MASK_ERROR = 2.0**-7  # what rounding may change a mask by
FLOOR = 1e-15  # of a norm, so that the power of two that balances two norms is finite


@dataclass(frozen=True, slots=True)
class Fp16Operands:
    """Operands (B, H, N, D) in fp16.

    Args:
        query, key, value: what was given, divided or multiplied by powers of two.
        mask: in fp16 where it was floating; None for none.
        scale: (B, H, 1, 1), fp32, by which the result is multiplied.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: Tensor


def fp16_operands(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, gain: float = 1.0
) -> Fp16Operands | None:
    """The operands narrowed, by powers of two per head that change no product; None where fp16 would change the result.

    Reads one small tensor from the device.

    Args:
        query, key, value: (B, H, N, D) and (B, H, M, D), of any size.
        mask: broadcast to (B, H, N, M).
        gain: what scores are multiplied by, beyond the usual 1 / sqrt(D).
    """
    high, low = (torch.linalg.vector_norm(each, dim=-1, dtype=FULL).amax(-1) for each in (query, key))
    rows = value.abs().amax(-1).float()
    largest = rows.amax(-1)
    smallest = torch.where(rows > 0, rows, torch.inf).amin(-1)
    numbers = [(high * low).amax() * (abs(gain) * query.shape[-1] ** -0.5), (largest / smallest).amax()]
    limits = [MOST_SCORE, SPREAD]
    narrow = mask
    if mask is not None and mask.is_floating_point() and mask.dtype is not HALF:
        narrow = mask.clamp(torch.finfo(HALF).min, torch.finfo(HALF).max).to(HALF)
        error = torch.where(mask > HIDDEN, (mask - narrow).abs(), 0.0)
        numbers += [error.amax().float(), -mask.amax(-1).amin().float()]  # a row that sees no key has no fp16 form
        limits += [MASK_ERROR, -HIDDEN]
    if not all(number <= limit for number, limit in zip(to_host(torch.stack(numbers)).tolist(), limits, strict=True)):
        return None
    balance = _power_of_two(high.clamp_(min=FLOOR).sqrt_() / low.clamp_(min=FLOOR).sqrt_())[..., None, None]
    scale = _power_of_two((largest * (2 / MOST_VALUE)).clamp_(min=torch.finfo(FULL).tiny))[..., None, None]
    return Fp16Operands(
        query=(query / balance).to(HALF),
        key=(key * balance).to(HALF),
        value=(value / scale).to(HALF),
        mask=narrow,
        scale=scale,
    )


def _power_of_two(x: Tensor) -> Tensor:
    """The next lower power of two, by the exponent bits alone: exact on every device."""
    return (x.view(torch.int32) & EXPONENT).view(FULL)
