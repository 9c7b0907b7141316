"""Errors of the operations of kernels/ against fp64 on the CPU, beside those of eager and of comfy-kitchen."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from anygpu.compat.device.facts import version_of
from anygpu.kernels import activation, group_norm, norm, residual, rope
from anygpu.kernels.library import REFERENCE
from anygpu.kernels.terms import LAYER, RMS, Gate, GroupNorm, Modulation, Norm, Pair, Tables
from runner import Case, Row, machine
from torch import Tensor
from torch.nn import functional

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Form = Callable[[], Any]


@dataclass
class Operation:
    """One operation at one size.

    Args:
        forms: by name; ``eager`` is what diffusers runs.
        exact: the reference in fp64.
    """

    name: str
    forms: dict[str, Form]
    exact: Callable[[], Any]


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


def made(
    name: str, module: Any, function: str, terms: tuple[Any, ...], eager: Form, exact: int | None = None
) -> Operation:
    """An operation of ``module`` with the form that diffusers runs; ``exact`` of ``terms`` the reference takes."""
    from anygpu.kernels.self_tests import _moved

    fused, reference = getattr(module, function), getattr(module, f"{function}_reference")
    forms = {"reference": partial(fused, *terms, form=REFERENCE), "eager": eager}
    return Operation(name, forms, lambda: reference(*_moved(terms[:exact], lambda t: t.double())))


def operations(dtype: torch.dtype) -> list[Callable[[], Operation]]:
    """Makers of the operations, so that one's tensors are gone before the next one's are made."""
    ltx, hunyuan, mochi = (1, 128, 2048), (1, 128, 3072), (1, 128, 3072)

    def some(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape).to(of)

    def rows(shape: tuple[int, ...], count: int) -> tuple[Tensor, ...]:
        return some(shape[0], 1, count, shape[2]).unbind(2)

    def rms() -> Operation:
        x, (scale, shift) = some(*ltx), rows(ltx, 2)
        terms = (x, Norm(RMS, 1e-6), Modulation(scale, shift))
        case = made("rms norm, modulation (LTX)", norm, "normalized", terms,
                    lambda: eager_rms(x, 1e-6) * (1 + scale) + shift)  # fmt: skip
        kitchen(case, lambda k: lambda: k.rms_adaln(x, scale, shift, 1e-6))
        return case

    def layer() -> Operation:
        x, (scale, shift) = some(*hunyuan), rows(hunyuan, 2)
        terms = (x, Norm(LAYER, 1e-6), Modulation(scale, shift))
        case = made("layer norm, modulation (HunyuanVideo)", norm, "normalized", terms,
                    lambda: functional.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift)  # fmt: skip
        kitchen(case, lambda k: lambda: k.adaln(x, scale, shift, 1e-6))
        return case

    def gated() -> Operation:
        x, branch, (values,) = some(*ltx), some(*ltx), rows(ltx, 1)
        terms = (x, branch, Gate(values))
        return made("gated residual (LTX)", residual, "gated_residual", terms, lambda: x + branch * values)

    def both() -> Operation:
        x, branch, (values, scale, shift) = some(*ltx), some(*ltx), rows(ltx, 3)
        terms = (x, branch, Gate(values), Norm(RMS, 1e-6), Modulation(scale, shift))

        def eager() -> tuple[Tensor, Tensor]:
            new = x + branch * values
            return new, eager_rms(new, 1e-6) * (1 + scale) + shift

        return made("residual, norm, modulation (LTX)", residual, "residual_norm", terms, eager)

    def tanh() -> Operation:
        x, branch, (values, scale) = some(*mochi), some(*mochi), rows(mochi, 2)
        terms = (x, branch, Gate(values, True, 1e-6), Norm(RMS, 1e-6), Modulation(scale))

        def eager() -> tuple[Tensor, Tensor]:
            new = x + (eager_rms(branch.float(), 1e-6) * torch.tanh(values)).to(dtype)
            return new, (eager_rms(new.float(), 1e-6) * (1 + scale.float())).to(dtype)

        return made("normed branch, tanh gate, norm (Mochi)", residual, "residual_norm", terms, eager)

    def across() -> Operation:
        q, k, weight = some(*ltx), some(*ltx), some(ltx[2])
        angle = some(ltx[1], ltx[2] // 2, of=torch.float32)
        terms = (Pair(q, k, weight, weight), Tables(angle.cos(), angle.sin()), 1e-5)
        wide = [table.repeat_interleave(2, -1).expand(ltx) for table in (angle.cos(), angle.sin())]

        def eager() -> tuple[Tensor, ...]:
            normed = (functional.rms_norm(x, x.shape[-1:], weight, 1e-5) for x in (q, k))
            return tuple(eager_rotated(x, *wide) for x in normed)

        return made("q, k norm and rotation across heads (LTX)", rope, "qk_norm_rope", terms, eager)

    def per_head() -> Operation:
        shape = (*hunyuan[:2], hunyuan[2] // 128, 128)
        q, k, weight = some(*shape), some(*shape), some(shape[3])
        angle = some(shape[1], 1, shape[3] // 2, of=torch.float32)
        cos, sin = angle.cos(), angle.sin()
        terms = (Pair(q, k, weight, weight), Tables(cos, sin), 1e-6)
        wide = [table.repeat_interleave(2, -1) for table in (cos, sin)]
        case = made("q, k norm and rotation per head (HunyuanVideo)", rope, "qk_norm_rope", terms,
                    lambda: tuple(eager_rotated(eager_rms(x, 1e-6, weight), *wide) for x in (q, k)))  # fmt: skip
        matrix = torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2))[None]
        kitchen(case, lambda k_: lambda: k_.rms_rope(q, k, matrix, weight, weight, 1e-6))
        return case

    def feed() -> Operation:
        x = some(1, 128, 16384)

        def eager() -> Tensor:
            value, gate = x.chunk(2, -1)
            return value * functional.silu(gate)

        return made("swiglu", activation, "swiglu", (x,), eager)

    def clip(per_frame: bool, last: bool) -> Operation:
        x = some(1, 128, 2, 16, 16)
        x = x.contiguous(memory_format=torch.channels_last_3d if last else torch.contiguous_format)
        weight, pad, layout = some(x.shape[1]), (1, 1, 1, 1, 2, 0), "channels_last" if last else "contiguous"

        def eager() -> Tensor:
            frames = x.transpose(1, 2).flatten(0, 1) if per_frame else x
            normed = functional.group_norm(frames, 32, weight, weight, 1e-6)
            if per_frame:
                normed = normed.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)
            return functional.pad(functional.silu(normed), pad, mode="replicate")

        terms = (x, GroupNorm(32, 1e-6, weight, weight, per_frame), pad, True, layout)
        name = f"group norm{' of frames' if per_frame else ''}, SiLU, border, {layout.replace('_', ' ')}"
        return made(name, group_norm, "group_norm_silu_pad", terms, eager, exact=3)

    return [
        rms, layer, gated, both, tanh, across, per_head,
        feed, lambda: clip(False, False), lambda: clip(True, False), lambda: clip(True, True),
    ]  # fmt: skip


def kitchen(case: Operation, make: Callable[[Any], Form]) -> None:
    """Add comfy-kitchen's form, where it is installed."""
    if importlib.util.find_spec("comfy_kitchen") is not None:
        import comfy_kitchen

        case.forms["comfy-kitchen"] = make(comfy_kitchen)


def error(found: Any, exact: Any) -> float:
    """Root mean square of the difference over that of the truth, the worst of all results."""
    pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (found, exact)), strict=True)
    return max(float((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt()) for a, b in pairs)


def exactness(dtypes: tuple[str, ...]) -> Iterator[Row]:
    """Errors against fp64 on the CPU of eager, of ours and of comfy-kitchen's eager backend."""
    kitchen_version = version_of("comfy-kitchen") or "not installed"
    about = {"gpu": "none (CPU)", "torch": torch.__version__, "comfy_kitchen": kitchen_version}
    for name in dtypes:
        for make in operations(DTYPES[name]):
            case = make()
            exact = case.exact()
            for form in ("eager", "reference", "comfy-kitchen"):
                if form in case.forms:
                    row = {"case": case.name, "dtype": name, "form": form}
                    row["error"] = f"{error(case.forms[form](), exact):.4e}"
                    yield row | about | {"date": machine()["date"]}


CASES = [
    Case("kernels_exactness", exactness, {"dtypes": ("bf16", "fp16")}, "kernels_exactness", replaces=True, about=dict,
         threads=0),
]  # fmt: skip
