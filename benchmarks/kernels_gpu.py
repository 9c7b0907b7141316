"""The operations of kernels/ on a GPU: against eager, torch.compile, comfy-kitchen and Liger, side by side in one run.

`kernels_gpu`: first the machine's own limits: copy bandwidth and the rate of a large matrix product. Then each case at
the size of a full clip, timed by events, all forms in a new random order each round, the cache emptied before each.
Error is against the reference in fp64. What the machine lacks is skipped with its reason. Targets: norm, rotation and
residual at 0.85 of the copy bandwidth; error not above eager's. ``--dry``: few rows on the CPU.

`kernels_exactness`: errors alone, on the CPU.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from anygpu.compat.device.facts import facts_for
from anygpu.kernels import activation, group_norm, norm, residual, rope
from anygpu.kernels.library import AUTO, REFERENCE
from anygpu.kernels.terms import LAYER, RMS, Gate, GroupNorm, Modulation, Norm, Pair, Tables
from runner import Case, Row, in_turn, machine, no_gpu, spent
from torch import Tensor
from torch.nn import functional

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUNDS, WARM_UP, FLUSH_BYTES = 25, 5, 512 * 2**20
BAR_BANDWIDTH = 0.85
Form = Callable[[], Any]


@dataclass
class Operation:
    """One operation at one size.

    Args:
        moved: bytes that cannot be avoided. forms: by name what is timed; ``eager`` is what diffusers runs.
        exact: the reference in fp64, on as many rows as fit. bound_by_memory: whether the bandwidth bar holds.
    """

    name: str
    moved: int
    forms: dict[str, Form]
    exact: Callable[[], Any]
    skipped: dict[str, str] = field(default_factory=dict)
    bound_by_memory: bool = True


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


FULL = {"ltx": (2, 6144, 2048), "hunyuan": (1, 32640, 3072), "mochi": (2, 22260, 3072), "head": 128,
        "wide": (2, 6144, 8192), "halves": (2, 22260, 16384), "clip": (1, 256, 17, 240, 416)}  # fmt: skip
FEW = {"ltx": (1, 128, 2048), "hunyuan": (1, 128, 3072), "mochi": (1, 128, 3072), "head": 128,
       "wide": (1, 128, 8192), "halves": (1, 128, 16384), "clip": (1, 128, 2, 16, 16)}  # fmt: skip


def operations(device: torch.device, dtype: torch.dtype, sizes: dict[str, Any]) -> list[Callable[[], Operation]]:
    """Makers of the cases, so that one case's tensors are gone before the next one's are made."""
    ltx, hunyuan, mochi = sizes["ltx"], sizes["hunyuan"], sizes["mochi"]

    def some(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, dtype=torch.float32, device=device).to(of)

    def rows(shape: tuple[int, ...], count: int) -> tuple[Tensor, ...]:
        return some(shape[0], 1, count, shape[2]).unbind(2)

    def rms() -> Operation:
        x, (scale, shift) = some(*ltx), rows(ltx, 2)
        how, modulation = Norm(RMS, 1e-6), Modulation(scale, shift)
        forms = ours(norm.normalized, x, how, modulation)
        forms["eager"] = lambda: eager_rms(x, 1e-6) * (1 + scale) + shift
        skipped = kitchen(forms, lambda k: lambda: k.rms_adaln(x, scale, shift, 1e-6))
        liger(forms, skipped, "modulated_rms_norm", "modulated_rms_norm_forward",
              lambda f: lambda: f(x, None, scale.contiguous(), shift.contiguous(), 1e-6, 0.0, "gemma")[0])  # fmt: skip
        return Operation(
            "rms norm, modulation (LTX)",
            2 * size(x),
            forms,
            exactly(norm.normalized_reference, x, how, modulation),
            skipped,
        )

    def layer() -> Operation:
        x, (scale, shift) = some(*hunyuan), rows(hunyuan, 2)
        how, modulation = Norm(LAYER, 1e-6), Modulation(scale, shift)
        forms = ours(norm.normalized, x, how, modulation)
        forms["eager"] = lambda: functional.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift
        skipped = kitchen(forms, lambda k: lambda: k.adaln(x, scale, shift, 1e-6))
        return Operation(
            "layer norm, modulation (HunyuanVideo)",
            2 * size(x),
            forms,
            exactly(norm.normalized_reference, x, how, modulation),
            skipped,
        )

    def gated() -> Operation:
        x, branch, (values,) = some(*ltx), some(*ltx), rows(ltx, 1)
        forms = ours(residual.gated_residual, x, branch, Gate(values))
        forms["eager"] = lambda: x + branch * values
        return Operation(
            "gated residual (LTX)",
            3 * size(x),
            forms,
            exactly(residual.gated_residual_reference, x, branch, Gate(values)),
        )

    def both() -> Operation:
        x, branch, (values, scale, shift) = some(*ltx), some(*ltx), rows(ltx, 3)
        terms = (x, branch, Gate(values), Norm(RMS, 1e-6), Modulation(scale, shift))

        def eager() -> tuple[Tensor, Tensor]:
            new = x + branch * values
            return new, eager_rms(new, 1e-6) * (1 + scale) + shift

        forms = ours(residual.residual_norm, *terms) | {"eager": eager}
        return Operation(
            "residual, norm, modulation (LTX)", 4 * size(x), forms, exactly(residual.residual_norm_reference, *terms)
        )

    def tanh() -> Operation:
        x, branch, (values, scale) = some(*mochi), some(*mochi), rows(mochi, 2)
        terms = (x, branch, Gate(values, True, 1e-6), Norm(RMS, 1e-6), Modulation(scale))

        def eager() -> tuple[Tensor, Tensor]:
            new = x + (eager_rms(branch.float(), 1e-6) * torch.tanh(values)).to(dtype)
            return new, (eager_rms(new.float(), 1e-6) * (1 + scale.float())).to(dtype)

        forms = ours(residual.residual_norm, *terms) | {"eager": eager}
        return Operation(
            "normed branch, tanh gate, norm (Mochi)",
            4 * size(x),
            forms,
            exactly(residual.residual_norm_reference, *terms),
        )

    def across() -> Operation:
        q, k, weight = some(*ltx), some(*ltx), some(ltx[2])
        angle = some(ltx[1], ltx[2] // 2, of=torch.float32)
        tables, pair = Tables(angle.cos(), angle.sin()), Pair(q, k, weight, weight)
        wide = [table.repeat_interleave(2, -1).expand(ltx) for table in (tables.cos, tables.sin)]
        forms = ours(rope.qk_norm_rope, pair, tables, 1e-5)
        forms["eager"] = lambda: tuple(
            eager_rotated(functional.rms_norm(x, x.shape[-1:], weight, 1e-5), *wide) for x in (q, k)
        )
        moved = 4 * size(q) + 2 * size(tables.cos)
        exact = exactly(rope.qk_norm_rope_reference, pair, tables, 1e-5)
        skipped = {"comfy-kitchen": "its rms_rope norms each head"}
        return Operation("q, k norm and rotation across heads (LTX)", moved, forms, exact, skipped)

    def per_head() -> Operation:
        shape = (*hunyuan[:2], hunyuan[2] // sizes["head"], sizes["head"])
        q, k, weight = some(*shape), some(*shape), some(shape[3])
        angle = some(shape[1], 1, shape[3] // 2, of=torch.float32)
        tables, pair = Tables(angle.cos(), angle.sin()), Pair(q, k, weight, weight)
        wide = [table.repeat_interleave(2, -1) for table in (tables.cos, tables.sin)]
        forms = ours(rope.qk_norm_rope, pair, tables, 1e-6)
        forms["eager"] = lambda: tuple(eager_rotated(eager_rms(x, 1e-6, weight), *wide) for x in (q, k))
        matrix = torch.stack([tables.cos, -tables.sin, tables.sin, tables.cos], -1).unflatten(-1, (2, 2))[None]
        skipped = kitchen(forms, lambda k_: lambda: k_.rms_rope(q, k, matrix, weight, weight, 1e-6))
        moved = 4 * size(q) + 2 * size(tables.cos)
        return Operation(
            "q, k norm and rotation per head (HunyuanVideo)",
            moved,
            forms,
            exactly(rope.qk_norm_rope_reference, pair, tables, 1e-6),
            skipped,
        )

    def feed(name: str, shape: tuple[int, ...], eager: Callable[[Tensor], Tensor]) -> Callable[[], Operation]:
        def make() -> Operation:
            x = some(*shape)
            forms = ours(getattr(activation, name), x) | {"eager": lambda: eager(x)}
            skipped: dict[str, str] = {}
            if name == "swiglu":
                value, gate = x.chunk(2, -1)
                copies = value.contiguous(), gate.contiguous()
                liger(forms, skipped, "swiglu", "swiglu_forward", lambda f: lambda: f(copies[1], copies[0])[-1])
            moved = size(x) * 2 if name == "gelu_tanh" else size(x) * 3 // 2
            return Operation(name, moved, forms, exactly(getattr(activation, f"{name}_reference"), x), skipped)

        return make

    def clip(per_frame: bool, last: bool) -> Callable[[], Operation]:
        def make() -> Operation:
            x = some(*sizes["clip"])
            x = x.contiguous(memory_format=torch.channels_last_3d if last else torch.contiguous_format)
            weight, pad = some(x.shape[1]), (1, 1, 1, 1, 2, 0)
            layout = "channels_last" if last else "contiguous"
            how = GroupNorm(32, 1e-6, weight, weight, per_frame)

            def eager() -> Tensor:
                if per_frame:
                    normed = functional.group_norm(x.transpose(1, 2).flatten(0, 1), 32, weight, weight, 1e-6)
                    normed = normed.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)
                else:
                    normed = functional.group_norm(x, 32, weight, weight, 1e-6)
                return functional.pad(functional.silu(normed), pad, mode="replicate")

            forms = ours(group_norm.group_norm_silu_pad, x, how, pad, True, layout) | {"eager": eager}
            name = f"group norm{' of frames' if per_frame else ''}, SiLU, border, {layout.replace('_', ' ')}"
            return Operation(name, 3 * size(x), forms, exactly(group_norm.group_norm_silu_pad_reference, x, how, pad),
                        {"comfy-kitchen": "its group_norm_silu_pad3d reflects or zeroes, and these VAEs replicate"},
                        bound_by_memory=False)  # fmt: skip

        return make

    wide, halves = sizes["wide"], sizes["halves"]
    return [
        rms, layer, gated, both, tanh, across, per_head,
        feed("gelu_tanh", wide, lambda x: functional.gelu(x, approximate="tanh")),
        feed("geglu", wide, lambda x: x.chunk(2, -1)[0] * functional.gelu(x.chunk(2, -1)[1])),
        feed("swiglu", halves, lambda x: x.chunk(2, -1)[0] * functional.silu(x.chunk(2, -1)[1])),
        clip(False, False), clip(True, False), clip(True, True),
    ]  # fmt: skip


def ours(function: Callable[..., Any], *terms: Any) -> dict[str, Form]:
    """Our operation and its reference under torch.compile; ``compile`` is of what diffusers runs, added later."""
    return {"anygpu": lambda: function(*terms, form=AUTO), "reference": lambda: function(*terms, form=REFERENCE)}


def kitchen(forms: dict[str, Form], make: Callable[[Any], Form]) -> dict[str, str]:
    """Add comfy-kitchen's form; what keeps it out, if anything."""
    if importlib.util.find_spec("comfy_kitchen") is None:
        return {"comfy-kitchen": "comfy-kitchen is not installed"}
    import comfy_kitchen

    forms["comfy-kitchen"] = make(comfy_kitchen)
    return {}


def liger(forms: dict[str, Form], skipped: dict[str, str], module: str, name: str, make: Callable[[Any], Form]) -> None:
    """Add Liger's form, or say why not."""
    if importlib.util.find_spec("liger_kernel") is None:
        skipped["liger"] = "liger-kernel is not installed"
        return
    try:
        forms["liger"] = make(getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name))
    except (ImportError, AttributeError, RuntimeError) as error:
        skipped["liger"] = f"this Liger cannot be imported here: {error}".splitlines()[0]


def exactly(reference: Callable[..., Any], *terms: Any) -> Callable[[], Any]:
    """The reference on fp64 copies of ``terms``."""
    from anygpu.kernels.self_tests import _moved

    return lambda: reference(*_moved(terms, lambda t: t.double()))


def size(x: Tensor) -> int:
    return x.numel() * x.element_size()


def error(found: Any, exact: Any) -> float:
    """Root mean square of the difference over that of the truth, the worst of all results."""
    pairs = zip(
        found if isinstance(found, tuple) else (found,), exact if isinstance(exact, tuple) else (exact,), strict=True
    )
    return max(float((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt()) for a, b in pairs)


class Clock:
    """Milliseconds of a call, by events on a GPU, by the wall on a CPU; the cache is emptied before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flush = torch.empty(FLUSH_BYTES if device.type == "cuda" else 2**16, dtype=torch.uint8, device=device)

    def __call__(self, form: Form) -> float:
        self.flush.zero_()
        if self.device.type != "cuda":
            return 1e3 * spent(form)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        form()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))


def timed(forms: dict[str, Form], clock: Clock, dry: bool) -> dict[str, float]:
    """Median milliseconds and, under ``fastest NAME``, the least of each form."""
    times = in_turn(forms, 2 if dry else ROUNDS, clock, WARM_UP)
    medians = {name: statistics.median(each) for name, each in times.items()}
    return medians | {f"fastest {name}": min(each) for name, each in times.items()}


def limits(clock: Clock, device: torch.device, dry: bool) -> tuple[float, float]:
    """Copy bandwidth in GB/s, and the rate of a matrix product in TFLOP/s."""
    count, side = (2**16, 64) if dry else (2**29, 8192)
    source = torch.empty(count, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    a = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    ms = timed({"copy": lambda: target.copy_(source), "product": lambda: a @ a}, clock, dry)
    return 2 * size(source) / ms["copy"] / 1e6, 2 * side**3 / ms["product"] / 1e9


def measured(case: Operation, clock: Clock, copy: float, dry: bool) -> Iterator[Row]:
    """Rows of one operation, eager first."""
    forms, exact, errors = dict(case.forms), case.exact(), dict[str, float]()
    if not dry:
        forms["compile"] = torch.compile(case.forms["eager"])
    for name in list(forms):
        try:
            errors[name] = error(forms[name](), exact)
        except Exception as raised:  # another project's kernel, or the compiler: its fault is its row
            case.skipped[name] = f"{type(raised).__name__}: {raised}".splitlines()[0]
            del forms[name]
    del exact
    times = timed(forms, clock, dry)
    for name in sorted(forms, key=lambda name: name != "eager"):
        ms, faults = times[name], []
        share = case.moved / ms / 1e6 / copy
        if name == "anygpu" and case.bound_by_memory and share < BAR_BANDWIDTH:
            faults.append(f"{share:.2f} of copy bandwidth, {BAR_BANDWIDTH} demanded")
        if name == "anygpu" and errors[name] > 1.001 * errors["eager"]:
            faults.append("error above eager's")
        yield {
            "form": name, "ms": round(ms, 4), "ms_fastest": round(times[f"fastest {name}"], 4),
            "gb_per_s": round(case.moved / ms / 1e6, 1), "of_copy": round(share, 3),
            "to_eager": round(times["eager"] / ms, 3), "error": f"{errors[name]:.3e}",
            "error_to_eager": round(errors[name] / max(errors["eager"], 1e-30), 3),
            "verdict": "; ".join(faults) or "ok",
        }  # fmt: skip
    for form, why in case.skipped.items():
        print(f"{case.name}, {form}: skipped: {why}")


BLANK = dict.fromkeys(("ms", "ms_fastest", "gb_per_s", "of_copy", "to_eager", "error", "error_to_eager", "verdict"), "")


def rows(dry: bool, dtypes: tuple[str, ...]) -> Iterator[Row]:
    """The limits of the machine, then a row per operation, dtype and form."""
    device = torch.device("cpu" if dry else "cuda")
    facts, clock = facts_for(device), Clock(device)
    copy, product = limits(clock, device, dry)
    known = {"date": machine()["date"], "gpu": facts.name, "driver": facts.driver, "torch": torch.__version__,
             "triton": facts.versions.get("triton", "")}  # fmt: skip
    limit = known | {"case": "copy", "dtype": "bf16", "form": "torch"} | BLANK
    yield limit | {"gb_per_s": round(copy, 1), "of_copy": 1.0}
    yield limit | {"case": f"product, {product:.1f} TFLOP/s"}
    for name in dtypes:
        for make in operations(device, DTYPES[name], FEW if dry else FULL):
            case = make()
            yield from (known | {"case": case.name, "dtype": name} | row for row in measured(case, clock, copy, dry))


def exactness(dtypes: tuple[str, ...]) -> Iterator[Row]:
    """Errors against fp64 on the CPU of eager, of ours and of comfy-kitchen's eager backend."""
    try:
        kitchen_version = version("comfy-kitchen")
    except PackageNotFoundError:
        kitchen_version = "not installed"
    about = {"gpu": "none (CPU)", "torch": torch.__version__, "comfy_kitchen": kitchen_version}
    for name in dtypes:
        for make in operations(torch.device("cpu"), DTYPES[name], FEW):
            case = make()
            exact = case.exact()
            for form in ("eager", "reference", "comfy-kitchen"):
                if form in case.forms:
                    row = {"case": case.name, "dtype": name, "form": form}
                    row["error"] = f"{error(case.forms[form](), exact):.4e}"
                    yield row | about | {"date": machine()["date"]}


DEFAULT = ("bf16", "fp16")
CASES = [
    Case("kernels_gpu", rows, {"dry": False, "dtypes": DEFAULT}, "kernels_gpu", about=dict, lacks=no_gpu, gpu=True,
         threads=0),
    Case("kernels_exactness", exactness, {"dtypes": DEFAULT}, "kernels_exactness", replaces=True, about=dict,
         threads=0),
]  # fmt: skip
