"""Runs each operation on a device against its fp64 reference, at two sizes, for reports and Triton's probe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import activation, group_norm, norm, residual, rope
from .library import AUTO, DTYPES, REFERENCE, failures_raise, launches
from .terms import LAYER, RMS, Gate, GroupNorm, Modulation, Norm, Pair, Tables

VAE_OPERATIONS = ("group_norm_silu_pad", "rms_silu_pad")
BLOCK_OPERATIONS = ("normalized", "gated_residual", "residual_norm", "qk_norm_rope", "swiglu")
OPERATIONS = (*BLOCK_OPERATIONS, *VAE_OPERATIONS)
Forms = dict[str, Callable[[], Any]]
Run = tuple[Callable[..., Any], Callable[[], Any]]  # the call on a device, and its reference

# In eps of the dtype. fp32: sums in another order and the device's own exp and rsqrt; 16 bits: half for rounding to the
# nearest, and a little for the sums before it.
ALLOWED = {torch.float32: 4, torch.float16: 0.55, torch.bfloat16: 0.55}
ROUNDED_TWICE = {"residual_norm": 0.5}  # more of it in 16 bits: its norm reads a sum that was rounded before


@dataclass(frozen=True, slots=True)
class CaseShapes:
    """The shapes of one run of every operation: a batch of two with three heads, and a clip (B, C, T, H, W)."""

    tokens: int
    width: int
    head: int
    clip: tuple[int, ...]
    groups: int


# Less than a tile of any kernel; then several of a tile's own width, of which the last is cut off, and a sample ends
# inside another. Small ones alone let 15 of 16 damaged instructions through.
SHAPES = (
    CaseShapes(tokens=5, width=48, head=16, clip=(1, 12, 2, 3, 5), groups=4),
    CaseShapes(tokens=133, width=256, head=128, clip=(2, 64, 3, 9, 33), groups=8),
)
# Of a transformer and a VAE.
FULL = CaseShapes(tokens=4096, width=3072, head=128, clip=(1, 128, 9, 120, 208), groups=32)


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The result of one operation on a device."""

    name: str
    dtype: torch.dtype
    launched: bool  # a kernel ran, not the reference
    error: float  # largest difference to fp64, relative to the largest value
    bound: float
    milliseconds: float  # with compiling, if it was the first time
    fault: str = ""  # what was raised

    @property
    def right(self) -> bool:
        return not self.fault and self.error <= self.bound

    def __str__(self) -> str:
        how = "kernel" if self.launched else "reference"
        result = self.fault or f"error {self.error:.1e}, allowed {self.bound:.1e}"
        verdict = "ok" if self.right else "WRONG"
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}: {verdict} ({how}, {result})"


def self_tests(
    device: torch.device,
    form: str = AUTO,
    operations: Sequence[str] = OPERATIONS,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> Iterator[SelfTest]:
    """One :class:`SelfTest` for each of ``operations`` and dtypes."""
    for dtype in dtypes:
        runs = [_calls(device, dtype, shapes) for shapes in SHAPES]
        for name in operations:
            yield _self_test(name, dtype, [run[name] for run in runs], device, form)


def timed_calls(device: torch.device, dtype: torch.dtype, full: bool = True) -> Iterator[tuple[str, Forms]]:
    """The calls of each operation by form, ``auto`` and ``reference``; ``full`` is at a transformer's size."""
    for name, (call, _) in _calls(device, dtype, FULL if full else SHAPES[0]).items():
        yield name, {form: partial(call, form=form) for form in (AUTO, REFERENCE)}


def _self_test(name: str, dtype: torch.dtype, runs: Sequence[Run], device: torch.device, form: str) -> SelfTest:
    allowed = ALLOWED[dtype] + (ROUNDED_TWICE.get(name, 0.0) if dtype.itemsize == 2 else 0.0)
    bound = allowed * torch.finfo(dtype).eps
    started = time.perf_counter()
    try:
        with failures_raise():
            launched = launches(torch.empty(0, dtype=dtype, device=device), form)
            results = [_carried(tensor, torch.device("cpu")) for call, _ in runs for tensor in _all(call(form=form))]
    except Exception as error:  # a toolchain breaks in any way; TritonError and PTXASError are plain Exceptions
        fault = f"{type(error).__name__}: {error}".splitlines()[0]
        return SelfTest(name, dtype, launched=False, error=math.inf, bound=bound, milliseconds=0.0, fault=fault)
    spent = 1e3 * (time.perf_counter() - started)
    pairs = zip(results, (tensor for _, reference in runs for tensor in _all(reference())), strict=True)
    errors = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs]
    error = math.inf if any(map(math.isnan, errors)) else max(errors)  # max alone passes over a NaN that comes later
    return SelfTest(name, dtype, launched=launched, error=error, bound=bound, milliseconds=round(spent, 3))


def _all(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _calls(device: torch.device, dtype: torch.dtype, shapes: CaseShapes) -> dict[str, Run]:
    tokens, width, head, channels = shapes.tokens, shapes.width, shapes.head, shapes.clip[1]
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def both(function: Callable[..., Any], reference: Callable[..., Any], *terms: Any) -> Run:
        there = _moved(terms, lambda t: _carried(t, device))
        return lambda form: function(*there, form=form), lambda: reference(*_moved(terms, lambda t: t.double()))

    x, branch, rows = some(2, tokens, width), some(2, tokens, width), some(2, 1, 6, width).unbind(2)
    q, k, text, weight = some(2, tokens + 1, 3, head), some(2, tokens + 1, 3, head), some(2, 2, 3, head), some(head)
    turn = torch.randn(tokens, 1, head // 2, generator=generator)
    pair, other = Pair(q, k, weight, weight), Pair(text, text, weight, None)
    clip, channel = some(*shapes.clip), some(channels)
    mochi = Gate(rows[2], tanh=True, norm_eps=1e-6)
    modulation, layer = Modulation(rows[0], rows[1]), Norm(LAYER, 1e-6)
    return {
        "normalized": both(norm.normalized, norm.normalized_reference, x, Norm(RMS, 1e-6, rows[5][0, 0]), modulation),
        "gated_residual": both(residual.gated_residual, residual.gated_residual_reference, x, branch, Gate(rows[2])),
        "residual_norm": both(
            residual.residual_norm, residual.residual_norm_reference, x, branch, mochi, layer, modulation
        ),
        "qk_norm_rope": both(
            rope.qk_norm_rope, rope.qk_norm_rope_reference, pair, Tables(turn.cos(), turn.sin()), 1e-6, other
        ),
        "swiglu": both(activation.swiglu, activation.swiglu_reference, x),
        "group_norm_silu_pad": both(
            group_norm.group_norm_silu_pad, group_norm.group_norm_silu_pad_reference,
            clip, GroupNorm(shapes.groups, 1e-6, channel, channel), (1, 1, 1, 1, 2, 0),
        ),
        "rms_silu_pad": both(
            group_norm.rms_silu_pad, group_norm.rms_silu_pad_reference,
            clip, Norm(RMS, 1e-6, channel), Modulation(), (0, 0, 0, 0, 1, 1),
        ),
    }  # fmt: skip


def _carried(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``, bit for bit: some drivers damage floats of 16 bits on the way, and no integers."""
    return tensor.view(torch.int16).to(device).view(tensor.dtype) if tensor.itemsize == 2 else tensor.to(device)


def _moved(terms: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """``terms`` with each tensor in them moved: tensors, dataclasses of tensors, and tuples of those."""
    if isinstance(terms, Tensor):
        return move(terms)
    if isinstance(terms, tuple):
        return tuple(_moved(term, move) for term in terms)
    if hasattr(terms, "__dataclass_fields__"):
        return type(terms)(*(_moved(getattr(terms, name), move) for name in terms.__dataclass_fields__))
    return terms
