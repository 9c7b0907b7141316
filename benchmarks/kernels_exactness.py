"""Errors of the operations of kernels/ against fp64 on the CPU, beside those of eager and of comfy-kitchen."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from anygpu.compat.device.facts import version_of
from anygpu.kernels import activation, group_norm, norm, residual, rope
from anygpu.kernels.library import REFERENCE
from anygpu.kernels.self_tests import _map_tensors
from anygpu.kernels.terms import LAYER, RMS, Gate, GroupNorm, Modulation, Norm, Pair, Tables
from runner import Row, machine
from torch import Tensor
from torch.nn import functional

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Form = Callable[[], Any]


class Operation(NamedTuple):
    """One operation at one size: its function of ``module``, what it is called with, and how others compute it.

    Args:
        eager: what diffusers runs. kitchen: comfy-kitchen's, from the package.
    """

    name: str
    module: ModuleType
    function: str
    terms: tuple[Any, ...]
    eager: Form
    kitchen: Callable[[Any], Any] | None = None


def eager_rms(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """diffusers' RMSNorm."""
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    normed = (x * torch.rsqrt(variance + eps)).to(x.dtype)
    return normed if weight is None else normed * weight


def eager_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """diffusers' rotary embedding; tables of full width that broadcast to ``x``."""
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([-imaginary, real], dim=-1).flatten(-2)
    return (x.float() * cos + rotated.float() * sin).to(x.dtype)


def eager_clip(x: Tensor, weight: Tensor, pad: tuple[int, ...], per_frame: bool) -> Tensor:
    """diffusers' group norm, SiLU and border of a VAE."""
    frames = x.transpose(1, 2).flatten(0, 1) if per_frame else x
    normed = functional.group_norm(frames, 32, weight, weight, 1e-6)
    if per_frame:
        normed = normed.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)
    return functional.pad(functional.silu(normed), pad, mode="replicate")


def operations(dtype: torch.dtype) -> Iterator[Operation]:
    """The operations at the widths of LTX-Video, HunyuanVideo and Mochi."""
    yield from token_operations(2048, dtype)
    yield from wide_operations(3072, dtype)
    x = torch.randn(1, 128, 16384).to(dtype)
    yield Operation("swiglu", activation, "swiglu", (x,), lambda: x[..., :8192] * functional.silu(x[..., 8192:]))
    for per_frame, last in ((False, False), (True, False), (True, True)):
        layout = torch.channels_last_3d if last else torch.contiguous_format
        clip, weight = torch.randn(1, 128, 2, 16, 16).to(dtype).contiguous(memory_format=layout), torch.randn(128)
        weight, pad = weight.to(dtype), (1, 1, 1, 1, 2, 0)
        how = (GroupNorm(32, 1e-6, weight, weight, per_frame), pad, True, "channels_last" if last else "contiguous")
        name = f"group norm{' of frames' if per_frame else ''}, SiLU, border, {how[3].replace('_', ' ')}"
        eager = partial(eager_clip, clip, weight, pad, per_frame)
        yield Operation(name, group_norm, "group_norm_silu_pad", (clip, *how), eager)


def token_operations(width: int, dtype: torch.dtype) -> Iterator[Operation]:
    """Those of LTX-Video's blocks."""
    x, branch, q, k = torch.randn(4, 1, 128, width).to(dtype)
    gate, scale, shift = torch.randn(1, 1, 3, width).to(dtype).unbind(2)
    weight, angle = torch.randn(width).to(dtype), torch.randn(128, width // 2)
    adaln, tables = (Norm(RMS, 1e-6), Modulation(scale, shift)), Tables(angle.cos(), angle.sin())

    def both() -> tuple[Tensor, Tensor]:
        new = x + branch * gate
        return new, eager_rms(new, 1e-6) * (1 + scale) + shift

    def turned() -> tuple[Tensor, ...]:
        wide = [table.repeat_interleave(2, -1).expand(q.shape) for table in (angle.cos(), angle.sin())]
        return tuple(eager_rotated(functional.rms_norm(t, (width,), weight, 1e-5), *wide) for t in (q, k))

    def modulated() -> Tensor:
        return eager_rms(x, 1e-6) * (1 + scale) + shift

    def theirs(package: Any) -> Tensor:
        return package.rms_adaln(x, scale, shift, 1e-6)

    yield Operation("rms norm, modulation (LTX)", norm, "normalized", (x, *adaln), modulated, theirs)
    plain = x, branch, Gate(gate)
    yield Operation("gated residual (LTX)", residual, "gated_residual", plain, lambda: x + branch * gate)
    terms = (x, branch, Gate(gate), *adaln)
    yield Operation("residual, norm, modulation (LTX)", residual, "residual_norm", terms, both)
    pair = (Pair(q, k, weight, weight), tables, 1e-5)
    yield Operation("q, k norm and rotation across heads (LTX)", rope, "qk_norm_rope", pair, turned)


def wide_operations(width: int, dtype: torch.dtype) -> Iterator[Operation]:
    """Those of HunyuanVideo's and Mochi's blocks."""
    x, branch = torch.randn(2, 1, 128, width).to(dtype)
    scale, shift, gate = torch.randn(1, 1, 3, width).to(dtype).unbind(2)
    (q, k), weight = torch.randn(2, 1, 128, width // 128, 128).to(dtype), torch.randn(128).to(dtype)
    angle = torch.randn(128, 1, 64)
    cos, sin = angle.cos(), angle.sin()

    def tanh() -> tuple[Tensor, Tensor]:
        new = x + (eager_rms(branch.float(), 1e-6) * torch.tanh(gate)).to(dtype)
        return new, (eager_rms(new.float(), 1e-6) * (1 + scale.float())).to(dtype)

    def turned() -> tuple[Tensor, ...]:
        wide = [table.repeat_interleave(2, -1) for table in (cos, sin)]
        return tuple(eager_rotated(eager_rms(t, 1e-6, weight), *wide) for t in (q, k))

    yield Operation(
        "layer norm, modulation (HunyuanVideo)",
        norm,
        "normalized",
        (x, Norm(LAYER, 1e-6), Modulation(scale, shift)),
        lambda: functional.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift,
        lambda package: package.adaln(x, scale, shift, 1e-6),
    )
    terms = (x, branch, Gate(gate, True, 1e-6), Norm(RMS, 1e-6), Modulation(scale))
    yield Operation("normed branch, tanh gate, norm (Mochi)", residual, "residual_norm", terms, tanh)
    matrix = torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2))[None]
    yield Operation(
        "q, k norm and rotation per head (HunyuanVideo)",
        rope,
        "qk_norm_rope",
        (Pair(q, k, weight, weight), Tables(cos, sin), 1e-6),
        turned,
        lambda package: package.rms_rope(q, k, matrix, weight, weight, 1e-6),
    )


def error(found: Any, exact: Any) -> float:
    """Root mean square of the difference over that of the truth, the worst of all results."""
    pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (found, exact)), strict=True)
    return max(float((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt()) for a, b in pairs)


def exactness(dtypes: tuple[str, ...]) -> Iterator[Row]:
    """Errors against fp64 on the CPU of eager, of ours and of comfy-kitchen's eager backend."""
    package = importlib.import_module("comfy_kitchen") if importlib.util.find_spec("comfy_kitchen") else None
    about = {"gpu": "none (CPU)", "torch": torch.__version__}
    about |= {"comfy_kitchen": version_of("comfy-kitchen") or "not installed", "date": machine()["date"]}
    for name in dtypes:
        for case in operations(DTYPES[name]):
            fused, reference = getattr(case.module, case.function), getattr(case.module, f"{case.function}_reference")
            exact = reference(*_map_tensors(case.terms, lambda t: t.double()))
            found = {"eager": case.eager(), "reference": fused(*case.terms, form=REFERENCE)}
            if case.kitchen is not None and package is not None:
                found["comfy-kitchen"] = case.kitchen(package)
            for form, result in found.items():
                yield {"case": case.name, "dtype": name, "form": form, "error": f"{error(result, exact):.4e}"} | about
