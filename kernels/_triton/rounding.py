"""Numbers upcast when read and rounded when written, on a device and in Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
# The interpreter's casts of bfloat16 are wrong: to it they cut off instead of rounding, from it they lose denormals.
BITWISE = tl.constexpr(INTERPRETED)


@triton.jit
def upcast(x):
    """``x`` as fp32."""
    if BITWISE and x.dtype == tl.bfloat16:
        y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 ``x`` as ``dtype``, to the nearest, ties to even."""
    if BITWISE and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        y = tl.where(x == x, nearest, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y
