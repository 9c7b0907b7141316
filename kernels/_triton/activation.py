"""The launch of :mod:`..activation`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rounding import INTERPRETED, rounded, upcast
from .rows import empty, warps_for

BLOCK = 32768 if INTERPRETED else 1024  # columns of one program
PER_THREAD = 16  # columns of a whole row for each thread: a block of 512 threads takes rows of up to 8192


@triton.jit
def activation_kernel(x, out, powers, width, blocks, x_row, room, BLOCK: tl.constexpr):
    """BLOCK columns of a row of SwiGLU, values first, then gates; with ``powers``, the whole row, divided by the power
    of two, at least 1, that brings its norm below ``room``, which fp16 holds; the power is stored there."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    within = column < width
    value = upcast(tl.load(x + row * x_row + column, mask=within, other=0.0))
    gate = upcast(tl.load(x + row * x_row + width + column, mask=within, other=0.0))
    y = value * (gate / (1.0 + tl.exp(-gate)))
    if powers is not None:  # fp32's exponent starts at bit 23, with bias 127; half that of the squares is the norm's
        relative = y * (2.0 / room)
        exponent = tl.maximum((tl.sum(relative * relative).to(tl.int32, bitcast=True) >> 23) - 127, 0) >> 1
        tl.store(powers + row, ((127 + exponent) << 23).to(tl.float32, bitcast=True))
        y = y * ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(out + row * width + column, rounded(y, out.dtype.element_ty), mask=within)


def swiglu(x: Tensor, room: float | None) -> tuple[Tensor, Tensor]:
    """The operation ``swiglu`` on a device, or interpreted; with ``room`` a program takes a whole row."""
    scaled, width = room is not None, x.shape[-1] // 2
    out = empty(x, (*x.shape[:-1], width), None)
    powers = empty(x, (*x.shape[:-1], 1) if scaled else (0,), torch.float32)
    x = x.reshape(-1, x.shape[-1]) if x.numel() else x
    x = x if x.stride(-1) == 1 else x.contiguous()
    if out.numel():
        block = triton.next_power_of_2(width) if scaled else BLOCK
        blocks = triton.cdiv(width, block)
        activation_kernel[(x.shape[0] * blocks,)](
            x, out, powers if scaled else None, width, blocks, x.stride(0), room or 0.0, BLOCK=block,
            num_warps=warps_for(x, block, PER_THREAD) if scaled else warps_for(x, block),
        )  # fmt: skip
    return out, powers
