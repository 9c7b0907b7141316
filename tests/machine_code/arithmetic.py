"""What PTX computes from arrays with one element per lane; floats rounded once, approximations moved by up to 2 ulp."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray
TYPES = {
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    "f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"), "bf16": np.dtype("u2"),
    "f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4"), "pred": np.dtype("?"),
}  # fmt: skip
MOST_ULP = 2  # how far an approximation may be from the rounded result


def flushed(x: Array) -> Array:
    """fp32 ``x`` with subnormal numbers as zeros of their sign."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def fma(a: Array, b: Array, c: Array) -> Array:
    """``a * b + c`` of fp32, rounded once: the sum in fp64 is rounded to odd, so that rounding again does no harm."""
    product = a.astype(np.float64) * b
    wide = c.astype(np.float64)
    total = product + wide
    back = total - product
    lost = (product - (total - back)) + (wide - back)
    even = (total.view(np.uint64) & 1) == 0
    inexact = np.isfinite(total) & (lost != 0) & even
    return np.where(inexact, np.nextafter(total, np.copysign(np.inf, lost)), total).astype(np.float32)


def approximated(exact: Array, *operands: Array) -> Array:
    """fp64 ``exact`` as fp32, moved by -2 to 2 ulp: the same for the same operands, as on a device."""
    x = exact.astype(np.float32)
    mixed = np.zeros(x.shape, np.uint32)
    for operand in operands:
        mixed = (mixed ^ operand.view(np.uint32)) * np.uint32(2654435761)
        mixed ^= mixed >> np.uint32(15)
    steps = (mixed % np.uint32(2 * MOST_ULP + 1)).astype(np.int32) - MOST_ULP
    normal = np.isfinite(x) & (np.abs(x) > 2 * np.finfo(np.float32).tiny)
    return np.where(normal, (x.view(np.int32) + steps).view(np.float32), x)


def bf16_from(x: Array, to_nearest: bool = True) -> Array:
    """fp32 ``x`` as the bits of bf16, to nearest and ties to even, or towards zero; NaN as 0x7FFF."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    added = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)) if to_nearest else bits
    return np.where(np.isnan(x), np.uint32(0x7FFF), added >> np.uint32(16)).astype(np.uint16)


def bf16_to(bits: Array) -> Array:
    """The bits of bf16 as fp32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def converted(x: Array, to: str, source: str, rounding: str) -> Array:
    """``x`` of the PTX type ``source`` as the type ``to``."""
    if source == "bf16":
        return bf16_to(x)
    if to == "bf16":
        return bf16_from(x, rounding == "rn")
    if to == "f16" and rounding != "rn":
        raise NotImplementedError(f"cvt.{rounding}.f16")
    return x.astype(TYPES[to])


def packed(upper: Array, lower: Array, to: str, rounding: str) -> Array:
    """Two fp32 as one register of two 16-bit floats."""
    half = to.removesuffix("x2")
    halves = [converted(x, half, "f32", rounding).view(np.uint16).astype(np.uint32) for x in (upper, lower)]
    return (halves[0] << np.uint32(16)) | halves[1]


def halves(x: Array, kind: str) -> tuple[Array, Array]:
    """Lower and upper 16-bit float of a register, as fp32."""
    parts = (x & np.uint32(0xFFFF)).astype(np.uint16), (x >> np.uint32(16)).astype(np.uint16)
    lower, upper = (bf16_to(part) if kind == "bf16x2" else part.view(np.float16).astype(np.float32) for part in parts)
    return lower, upper


def compared(relation: str, a: Array, b: Array) -> Array:
    """A relation of PTX: ordered ones are false with a NaN, those that end in u are true."""
    unordered = np.isnan(a) | np.isnan(b) if a.dtype.kind == "f" else np.zeros(np.broadcast(a, b).shape, bool)
    if relation in ("nan", "num"):
        return unordered if relation == "nan" else ~unordered
    names = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
             "ge": np.greater_equal}  # fmt: skip
    plain = names[relation[:2]](a, b)
    return plain | unordered if relation.endswith("u") else plain & ~unordered


def shifted(x: Array, by: Array, left: bool) -> Array:
    """``x`` shifted; by its width or more gives zeros, or the sign where ``x`` is signed."""
    width = 8 * x.itemsize
    within = np.minimum(by, width - 1).astype(x.dtype)
    if left:
        return np.where(by < width, x << within, x.dtype.type(0))
    beyond = x >> x.dtype.type(width - 1) if x.dtype.kind == "i" else x.dtype.type(0)
    return np.where(by < width, x >> within, beyond)


def divided(a: Array, b: Array) -> tuple[Array, Array]:
    """Quotient towards zero, and remainder.

    Raises:
        ZeroDivisionError: a lane divides by zero.
    """
    if np.any(b == 0):
        raise ZeroDivisionError("an integer is divided by zero")
    floor = a // b
    down = (floor * b != a) & ((a < 0) != (b < 0))
    quotient = floor + down.astype(a.dtype)
    return quotient, a - quotient * b


def field_of(x: Array, position: Array, length: Array) -> Array:
    """``bfe``: the bits of ``x`` from ``position`` on, signed where ``x`` is."""
    wide = np.int64 if x.dtype.kind == "i" else np.uint64
    at, count = (position & np.uint32(255)).astype(wide), (length & np.uint32(255)).astype(wide)
    moved = x.astype(wide) >> np.minimum(at, 63)
    spare = wide(64) - np.clip(count, 1, 64)
    return np.where(count == 0, wide(0), (moved << spare) >> spare).astype(x.dtype)


def permuted(a: Array, b: Array, selector: Array) -> Array:
    """``prmt``: four bytes of {b, a}; bit 3 of a nibble repeats the sign of its byte."""
    both = (b.astype(np.uint64) << np.uint64(32)) | a
    result = np.zeros(np.broadcast(a, b, selector).shape, np.uint32)
    for place in range(4):
        nibble = (selector >> np.uint32(4 * place)) & np.uint32(15)
        byte = ((both >> ((nibble & 7).astype(np.uint64) * np.uint64(8))) & np.uint64(255)).astype(np.uint32)
        byte = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte).astype(np.uint32)
        result |= byte << np.uint32(8 * place)
    return result
