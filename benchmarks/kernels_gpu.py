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
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from anygpu.compat.device.facts import facts_for
from anygpu.kernels import activation, group_norm, norm, residual, rope
from anygpu.kernels.library import AUTO, REFERENCE
from anygpu.kernels.terms import LAYER, RMS, Gate, GroupNorm, Modulation, Norm, Pair, Tables
from runner import Case, Row, in_turn, known_rows, machine, no_gpu, spent, write_table
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
        "halves": (2, 22260, 16384), "clip": (1, 256, 17, 240, 416)}  # fmt: skip
FEW = {"ltx": (1, 128, 2048), "hunyuan": (1, 128, 3072), "mochi": (1, 128, 3072), "head": 128,
       "halves": (1, 128, 16384), "clip": (1, 128, 2, 16, 16)}  # fmt: skip


def made(
    name: str, passes: float, module: Any, function: str, terms: tuple[Any, ...], eager: Form, exact: int | None = None
) -> Operation:
    """An operation of ``module`` with the form that diffusers runs; ``compile`` is of that one, added later.

    Args:
        passes: bytes that cannot be avoided, in sizes of the first tensor.
        exact: of ``terms``, as many as the reference takes.
    """
    from anygpu.kernels.self_tests import _moved

    fused, reference = getattr(module, function), getattr(module, f"{function}_reference")
    first = terms[0].q if isinstance(terms[0], Pair) else terms[0]
    tables = sum(2 * size(term.cos) for term in terms if isinstance(term, Tables))
    forms = {form: partial(fused, *terms, form=kind) for form, kind in (("anygpu", AUTO), ("reference", REFERENCE))}
    return Operation(
        name, int(passes * size(first)) + tables, forms | {"eager": eager},
        lambda: reference(*_moved(terms[:exact], lambda t: t.double())), bound_by_memory=module is not group_norm,
    )  # fmt: skip


def operations(device: torch.device, dtype: torch.dtype, sizes: dict[str, Any]) -> list[Callable[[], Operation]]:
    """Makers of the operations, so that one's tensors are gone before the next one's are made."""
    ltx, hunyuan, mochi = sizes["ltx"], sizes["hunyuan"], sizes["mochi"]

    def some(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, dtype=torch.float32, device=device).to(of)

    def rows(shape: tuple[int, ...], count: int) -> tuple[Tensor, ...]:
        return some(shape[0], 1, count, shape[2]).unbind(2)

    def rms() -> Operation:
        x, (scale, shift) = some(*ltx), rows(ltx, 2)
        terms = (x, Norm(RMS, 1e-6), Modulation(scale, shift))
        case = made("rms norm, modulation (LTX)", 2, norm, "normalized", terms,
                    lambda: eager_rms(x, 1e-6) * (1 + scale) + shift)  # fmt: skip
        kitchen(case, lambda k: lambda: k.rms_adaln(x, scale, shift, 1e-6))
        liger(case, "modulated_rms_norm", "modulated_rms_norm_forward",
              lambda f: lambda: f(x, None, scale.contiguous(), shift.contiguous(), 1e-6, 0.0, "gemma")[0])  # fmt: skip
        return case

    def layer() -> Operation:
        x, (scale, shift) = some(*hunyuan), rows(hunyuan, 2)
        terms = (x, Norm(LAYER, 1e-6), Modulation(scale, shift))
        case = made("layer norm, modulation (HunyuanVideo)", 2, norm, "normalized", terms,
                    lambda: functional.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift)  # fmt: skip
        kitchen(case, lambda k: lambda: k.adaln(x, scale, shift, 1e-6))
        return case

    def gated() -> Operation:
        x, branch, (values,) = some(*ltx), some(*ltx), rows(ltx, 1)
        terms = (x, branch, Gate(values))
        return made("gated residual (LTX)", 3, residual, "gated_residual", terms, lambda: x + branch * values)

    def both() -> Operation:
        x, branch, (values, scale, shift) = some(*ltx), some(*ltx), rows(ltx, 3)
        terms = (x, branch, Gate(values), Norm(RMS, 1e-6), Modulation(scale, shift))

        def eager() -> tuple[Tensor, Tensor]:
            new = x + branch * values
            return new, eager_rms(new, 1e-6) * (1 + scale) + shift

        return made("residual, norm, modulation (LTX)", 4, residual, "residual_norm", terms, eager)

    def tanh() -> Operation:
        x, branch, (values, scale) = some(*mochi), some(*mochi), rows(mochi, 2)
        terms = (x, branch, Gate(values, True, 1e-6), Norm(RMS, 1e-6), Modulation(scale))

        def eager() -> tuple[Tensor, Tensor]:
            new = x + (eager_rms(branch.float(), 1e-6) * torch.tanh(values)).to(dtype)
            return new, (eager_rms(new.float(), 1e-6) * (1 + scale.float())).to(dtype)

        return made("normed branch, tanh gate, norm (Mochi)", 4, residual, "residual_norm", terms, eager)

    def across() -> Operation:
        q, k, weight = some(*ltx), some(*ltx), some(ltx[2])
        angle = some(ltx[1], ltx[2] // 2, of=torch.float32)
        terms = (Pair(q, k, weight, weight), Tables(angle.cos(), angle.sin()), 1e-5)
        wide = [table.repeat_interleave(2, -1).expand(ltx) for table in (angle.cos(), angle.sin())]

        def eager() -> tuple[Tensor, ...]:
            normed = (functional.rms_norm(x, x.shape[-1:], weight, 1e-5) for x in (q, k))
            return tuple(eager_rotated(x, *wide) for x in normed)

        case = made("q, k norm and rotation across heads (LTX)", 4, rope, "qk_norm_rope", terms, eager)
        case.skipped["comfy-kitchen"] = "its rms_rope norms each head"
        return case

    def per_head() -> Operation:
        shape = (*hunyuan[:2], hunyuan[2] // sizes["head"], sizes["head"])
        q, k, weight = some(*shape), some(*shape), some(shape[3])
        angle = some(shape[1], 1, shape[3] // 2, of=torch.float32)
        cos, sin = angle.cos(), angle.sin()
        terms = (Pair(q, k, weight, weight), Tables(cos, sin), 1e-6)
        wide = [table.repeat_interleave(2, -1) for table in (cos, sin)]
        case = made("q, k norm and rotation per head (HunyuanVideo)", 4, rope, "qk_norm_rope", terms,
                    lambda: tuple(eager_rotated(eager_rms(x, 1e-6, weight), *wide) for x in (q, k)))  # fmt: skip
        matrix = torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2))[None]
        kitchen(case, lambda k_: lambda: k_.rms_rope(q, k, matrix, weight, weight, 1e-6))
        return case

    def feed() -> Operation:
        x = some(*sizes["halves"])

        def eager() -> Tensor:
            value, gate = x.chunk(2, -1)
            return value * functional.silu(gate)

        case = made("swiglu", 1.5, activation, "swiglu", (x,), eager)
        value, gate = (half.contiguous() for half in x.chunk(2, -1))
        liger(case, "swiglu", "swiglu_forward", lambda f: lambda: f(gate, value)[-1])
        return case

    def clip(per_frame: bool, last: bool) -> Operation:
        x = some(*sizes["clip"])
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
        case = made(name, 3, group_norm, "group_norm_silu_pad", terms, eager, exact=3)
        case.skipped["comfy-kitchen"] = "its group_norm_silu_pad3d reflects or zeroes, and these VAEs replicate"
        return case

    return [
        rms, layer, gated, both, tanh, across, per_head,
        feed, lambda: clip(False, False), lambda: clip(True, False), lambda: clip(True, True),
    ]  # fmt: skip


def kitchen(case: Operation, make: Callable[[Any], Form]) -> None:
    """Add comfy-kitchen's form, or say why not."""
    if importlib.util.find_spec("comfy_kitchen") is None:
        case.skipped["comfy-kitchen"] = "comfy-kitchen is not installed"
        return
    import comfy_kitchen

    case.forms["comfy-kitchen"] = make(comfy_kitchen)


def liger(case: Operation, module: str, name: str, make: Callable[[Any], Form]) -> None:
    """Add Liger's form, or say why not."""
    if importlib.util.find_spec("liger_kernel") is None:
        case.skipped["liger"] = "liger-kernel is not installed"
        return
    try:
        case.forms["liger"] = make(getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name))
    except (ImportError, AttributeError, RuntimeError) as error:
        case.skipped["liger"] = f"this Liger cannot be imported here: {error}".splitlines()[0]


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


def page(_: list[Row]) -> None:
    """Write the table of all rows: milliseconds by form, and the share of the copy bandwidth that ours reaches."""
    cases: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for row in known_rows("kernels_gpu"):
        if row["form"] != "torch":
            cases.setdefault((row["case"], row["dtype"]), {})[row["form"]] = row
    head = ["Operation", "dtype", "Eager ms", "Ours ms", "compile ms", "Ours to eager", "Of copy bandwidth"]
    cells = [
        [case, dtype, *(forms[form]["ms"] for form in ("eager", "anygpu", "compile")),
         f"{float(forms['anygpu']['to_eager']):.2f}×", forms["anygpu"]["of_copy"]]
        for (case, dtype), forms in cases.items() if {"eager", "anygpu", "compile"} <= set(forms)
    ]  # fmt: skip
    write_table("performance.md", "kernels_gpu", head, cells)


DEFAULT = ("bf16", "fp16")
CASES = [
    Case("kernels_gpu", rows, {"dry": False, "dtypes": DEFAULT}, "kernels_gpu", about=dict, page=page,
         lacks=no_gpu, gpu=True, threads=0),
    Case("kernels_exactness", exactness, {"dtypes": DEFAULT}, "kernels_exactness", replaces=True, about=dict,
         threads=0),
]  # fmt: skip
