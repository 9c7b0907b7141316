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
from .terms import LAYER, RMS, SCALED, Gate, GroupNorm, Modulation, Norm, Pair, Tables, power_of_two

VAE_OPERATIONS = ("group_norm_silu_pad", "rms_silu_pad")
BLOCK_OPERATIONS = ("normalized", "gated_residual", "residual_norm", "qk_norm_rope", "swiglu")
OPERATIONS = (*BLOCK_OPERATIONS, *VAE_OPERATIONS)
Forms = dict[str, Callable[[], Any]]
Results = tuple[Tensor, ...]
Run = tuple[Callable[..., Any], Callable[[Results], Any]]  # the call on a device, and the reference of its results
CPU = torch.device("cpu")

# In eps of the dtype. fp32, of the largest value: sums in another order and the device's own exp and rsqrt; 16 bits, of
# each value's own power of two: rounding to the nearest, where cutting off would take a whole one.
ALLOWED = {torch.float32: 4, torch.float16: 0.5, torch.bfloat16: 0.5}


@dataclass(frozen=True, slots=True)
class CaseShapes:
    """The shapes of one run of every operation: tokens with three heads, and a clip (B, C, T, H, W)."""

    tokens: int
    width: int
    head: int
    gated: int  # width of both halves of swiglu
    clip: tuple[int, ...]
    groups: int
    batch: int = 2
    text: int = 2


# Less than a tile of any kernel; then whole ones and ends cut off, along rows, columns, channels, strips of pixels and
# text. A sample ends inside a tile, and the fourth shows a division whose first guess is wrong: corrections reach two.
SHAPES = (
    CaseShapes(tokens=5, width=48, head=16, gated=48, clip=(1, 12, 2, 3, 5), groups=4),
    CaseShapes(tokens=44, width=240, head=112, gated=2112, clip=(2, 30, 3, 3, 230), groups=5, batch=5, text=6),
)
# The sizes of a real transformer and VAE, for timing.
FULL = CaseShapes(tokens=4096, width=3072, head=128, gated=3072, clip=(1, 128, 9, 120, 208), groups=32)


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The result of one operation on a device."""

    name: str
    dtype: torch.dtype
    launched: bool  # a kernel ran, not the reference
    error: float  # largest difference to fp64, as :func:`_error` says; of a result in another dtype scaled to ``bound``
    bound: float  # the error that rounding to ``dtype`` explains
    milliseconds: float  # with compiling, if it was the first time
    cause: Exception | None = None  # the exception where the operation raised one

    @property
    def right(self) -> bool:
        return not self.fault and self.error <= self.bound

    @property
    def fault(self) -> str:
        return f"{type(self.cause).__name__}: {self.cause}".splitlines()[0] if self.cause else ""

    def __str__(self) -> str:  # a line for reports
        how = "kernel" if self.launched else "reference"
        result = self.fault or f"error {self.error:.1e}, allowed {self.bound:.1e}"
        verdict = "ok" if self.right else "WRONG"
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}: {verdict} ({how}, {result})"


def self_tests(
    device: torch.device, form: str = AUTO, operations: Sequence[str] = OPERATIONS,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> Iterator[SelfTest]:  # fmt: skip
    """One :class:`SelfTest`, over all :data:`SHAPES`, for each of ``dtypes`` and ``operations``."""
    for dtype in dtypes:
        runs = [_calls(device, dtype, shapes) for shapes in SHAPES]
        if dtype is torch.float16:  # between an fp32 residual and fp16 operands, as under safe fp16
            for shapes, kind in zip(SHAPES, (LAYER, SCALED), strict=False):
                calls = _calls(device, torch.float32, shapes, dtype, kind)
                runs.append({name: calls[name] for name in BLOCK_OPERATIONS})
        for name in operations:
            yield _self_test(name, dtype, [run[name] for run in runs if name in run], device, form)


def timed_calls(device: torch.device, dtype: torch.dtype, full: bool = True) -> Iterator[tuple[str, Forms]]:
    """The calls of each operation by form, ``auto`` and ``reference``; ``full`` is at a transformer's size."""
    for name, (call, _) in _calls(device, dtype, FULL if full else SHAPES[0]).items():
        yield name, {form: partial(call, form=form) for form in (AUTO, REFERENCE)}


def _self_test(name: str, dtype: torch.dtype, runs: Sequence[Run], device: torch.device, form: str) -> SelfTest:
    """The largest error of an operation's ``runs``, and the time of all; infinite if one raises, with the cause."""
    bound = _allowed(dtype)
    started = time.perf_counter()
    try:
        with failures_raise():
            launched = launches(torch.empty(0, dtype=dtype, device=device), form)
            results = [_map_tensors(_as_tuple(call(form=form)), partial(_copy_bits, device=CPU)) for call, _ in runs]
    except Exception as cause:  # a toolchain breaks in any way; TritonError and PTXASError are plain Exceptions
        return SelfTest(name, dtype, launched=False, error=math.inf, bound=bound, milliseconds=0.0, cause=cause)
    spent = 1e3 * (time.perf_counter() - started)
    errors = []
    for result, (_, reference) in zip(results, runs, strict=True):
        for found, exact in zip(result, _as_tuple(reference(result)), strict=True):
            errors.append(_error(found, exact) * (bound / _allowed(found.dtype)))
    error = math.inf if any(map(math.isnan, errors)) else max(errors)  # max alone passes over a NaN that comes later
    return SelfTest(name, dtype, launched=launched, error=error, bound=bound, milliseconds=round(spent, 3))


def _allowed(dtype: torch.dtype) -> float:
    return ALLOWED[dtype] * torch.finfo(dtype).eps


def _error(found: Tensor, exact: Tensor) -> float:
    """The largest difference of ``found`` to the fp64 ``exact``: in fp32 relative to the largest value; in 16 bits to
    each value's own power of two, with slack for fp32's errors before the rounding and for flushed denormals."""
    off, largest, info = found.double().sub_(exact).abs_(), float(exact.abs().max()), torch.finfo(found.dtype)
    if found.dtype == torch.float32:
        return float(off.max()) / largest
    slack = _allowed(torch.float32) * largest + info.tiny
    return float(off.div_(power_of_two(exact.float()).add_(slack / _allowed(found.dtype))).max())


def _as_tuple(result: Any) -> Results:
    return result if isinstance(result, tuple) else (result,)


def _calls(
    device: torch.device, dtype: torch.dtype, shapes: CaseShapes, out: torch.dtype | None = None, kind: str = LAYER
) -> dict[str, Run]:
    """Each operation's call, on random operands in ``dtype``, and the fp64 reference of its results.
    ``out``, where not None, is the dtype that norms write and gated products read, as in safe fp16: branches then have
    a factor, and gated products are scaled. ``kind`` is of the norm that follows a sum."""
    batch, tokens, width, head, channels = shapes.batch, shapes.tokens, shapes.width, shapes.head, shapes.clip[1]
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def run_of(function: Callable[..., Any], reference: Callable[..., Any], *terms: Any) -> Run:
        on_device = _map_tensors(terms, partial(_copy_bits, device=device))
        return lambda form: function(*on_device, form=form), lambda _: reference(*_map_tensors(terms, Tensor.double))

    x, branch, rows = noise(batch, tokens, width), noise(batch, tokens, width), noise(batch, 1, 6, width).unbind(2)
    q, k, text = (noise(2, count, 3, head) for count in (tokens + 1, tokens + 1, shapes.text))  # 1 past tables
    angles, weight, weights = torch.randn(tokens, 1, head // 2, generator=generator), noise(width), noise(2, head)
    pair, text_pair = Pair(q, k, *weights), Pair(text, text, weights[0], None)
    clip, channel = noise(*shapes.clip), noise(2, channels)
    factor = None if out is None else 2.0 ** torch.randint(0, 9, (batch, tokens, 1), generator=generator)
    gate, mochi = Gate(rows[2], factor=factor), Gate(rows[2], tanh=True, norm_eps=1e-6, factor=factor)
    modulation, layer = Modulation(rows[0], rows[1]), Norm(kind, 2.0**-8 if kind == SCALED else 1e-6)
    summed, of_sums = run_of(
        partial(residual.residual_norm, out_dtype=out), residual.residual_norm_reference,
        x, branch, mochi, layer, modulation,
    )  # fmt: skip

    def of_rounded(found: Results) -> Results:
        """The exact sum, and the exact norm of the sum as the operation rounded it."""
        wide = _map_tensors(modulation, Tensor.double)
        return of_sums(found)[0], norm.normalized_reference(found[0].double(), layer, wide)

    return {
        "normalized": run_of(
            partial(norm.normalized, out_dtype=out), norm.normalized_reference, x, Norm(RMS, 1e-6, weight), modulation
        ),
        "gated_residual": run_of(residual.gated_residual, residual.gated_residual_reference, x, branch, gate),
        "residual_norm": (summed, of_rounded),
        "qk_norm_rope": run_of(
            partial(rope.qk_norm_rope, out_dtype=out), rope.qk_norm_rope_reference,
            pair, Tables(angles.cos(), angles.sin()), 1e-6, text_pair,
        ),
        "swiglu": run_of(activation.swiglu, activation.swiglu_reference, x.view(-1, shapes.gated)) if out is None
        else run_of(
            activation.scaled_swiglu, activation.scaled_swiglu_reference, (30 * x).view(-1, shapes.gated).to(out), 128.0
        ),
        "group_norm_silu_pad": run_of(
            group_norm.group_norm_silu_pad, group_norm.group_norm_silu_pad_reference,
            clip, GroupNorm(shapes.groups, 1e-6, *channel), (1, 1, 1, 1, 2, 0),
        ),
        "rms_silu_pad": run_of(
            group_norm.rms_silu_pad, group_norm.rms_silu_pad_reference,
            clip, Norm(RMS, 1e-6, channel[0]), Modulation(), (0, 0, 0, 0, 1, 1),
        ),
    }  # fmt: skip


def _copy_bits(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``, bit for bit: some drivers damage 16-bit floats on the way, but not integers."""
    return tensor.view(torch.int16).to(device).view(tensor.dtype) if tensor.itemsize == 2 else tensor.to(device)


def _map_tensors(terms: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``terms`` with ``change`` made to each tensor, also inside dataclasses and tuples; other values stay."""
    if isinstance(terms, Tensor):
        return change(terms)
    if isinstance(terms, tuple):
        return tuple(_map_tensors(term, change) for term in terms)
    if hasattr(terms, "__dataclass_fields__"):
        return type(terms)(*(_map_tensors(getattr(terms, name), change) for name in terms.__dataclass_fields__))
    return terms
