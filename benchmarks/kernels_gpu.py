"""The operations of kernels/ on a GPU: against eager, torch.compile, comfy-kitchen and Liger, side by side in one run.

    python benchmarks/kernels_gpu.py            # appends to benchmarks/results/kernels_gpu.csv
    python benchmarks/kernels_gpu.py --exactness     # errors alone, on the CPU; rewrites results/kernels_exactness.csv
    python benchmarks/kernels_gpu.py --dry      # few rows on the CPU: only whether the script works; writes nothing

First the machine's own limits: copy bandwidth and the rate of a large matrix product. Then each case at the size of a
full clip: every form is timed by events at least 20 times, all forms in a new random order each round, with the cache
emptied before each. Error is against the reference in fp64. What the machine lacks is skipped with its reason. Bars:
norm, rotation and residual at 0.85 of the copy bandwidth; error not above eager's.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.util
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from anygpu.compat.device.facts import facts_for
from anygpu.kernels import activation, group_norm, norm, residual, rope
from anygpu.kernels.library import AUTO, HAS_TRITON, REFERENCE
from anygpu.kernels.terms import LAYER, RMS, Gate, GroupNorm, Modulation, Norm, Pair, Tables
from torch import Tensor
from torch.nn import functional

RESULTS = Path(__file__).parent / "results" / "kernels_gpu.csv"
EXACTNESS = RESULTS.with_name("kernels_exactness.csv")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUNDS, WARM_UP, FLUSH_BYTES = 25, 5, 512 * 2**20
BAR_BANDWIDTH = 0.85
COLUMNS = (
    "date", "gpu", "driver", "torch", "triton", "case", "dtype", "form", "ms", "ms_fastest", "gb_per_s", "of_copy",
    "to_eager", "error", "error_to_eager", "verdict",
)  # fmt: skip
Form = Callable[[], Any]


@dataclass
class Case:
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


# ---- what diffusers runs ------------------------------------------------------------------------------------


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


def cases(device: torch.device, dtype: torch.dtype, sizes: dict[str, Any]) -> list[Callable[[], Case]]:
    """Makers of the cases, so that one case's tensors are gone before the next one's are made."""
    ltx, hunyuan, mochi = sizes["ltx"], sizes["hunyuan"], sizes["mochi"]

    def some(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, dtype=torch.float32, device=device).to(of)

    def rows(shape: tuple[int, ...], count: int) -> tuple[Tensor, ...]:
        return some(shape[0], 1, count, shape[2]).unbind(2)

    def rms() -> Case:
        x, (scale, shift) = some(*ltx), rows(ltx, 2)
        how, modulation = Norm(RMS, 1e-6), Modulation(scale, shift)
        forms = ours(norm.normalized, x, how, modulation)
        forms["eager"] = lambda: eager_rms(x, 1e-6) * (1 + scale) + shift
        skipped = kitchen(forms, lambda k: lambda: k.rms_adaln(x, scale, shift, 1e-6))
        liger(forms, skipped, "modulated_rms_norm", "modulated_rms_norm_forward",
              lambda f: lambda: f(x, None, scale.contiguous(), shift.contiguous(), 1e-6, 0.0, "gemma")[0])  # fmt: skip
        return Case(
            "rms norm, modulation (LTX)",
            2 * size(x),
            forms,
            exactly(norm.normalized_reference, x, how, modulation),
            skipped,
        )

    def layer() -> Case:
        x, (scale, shift) = some(*hunyuan), rows(hunyuan, 2)
        how, modulation = Norm(LAYER, 1e-6), Modulation(scale, shift)
        forms = ours(norm.normalized, x, how, modulation)
        forms["eager"] = lambda: functional.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift
        skipped = kitchen(forms, lambda k: lambda: k.adaln(x, scale, shift, 1e-6))
        return Case(
            "layer norm, modulation (HunyuanVideo)",
            2 * size(x),
            forms,
            exactly(norm.normalized_reference, x, how, modulation),
            skipped,
        )

    def gated() -> Case:
        x, branch, (values,) = some(*ltx), some(*ltx), rows(ltx, 1)
        forms = ours(residual.gated_residual, x, branch, Gate(values))
        forms["eager"] = lambda: x + branch * values
        return Case(
            "gated residual (LTX)",
            3 * size(x),
            forms,
            exactly(residual.gated_residual_reference, x, branch, Gate(values)),
        )

    def both() -> Case:
        x, branch, (values, scale, shift) = some(*ltx), some(*ltx), rows(ltx, 3)
        terms = (x, branch, Gate(values), Norm(RMS, 1e-6), Modulation(scale, shift))

        def eager() -> tuple[Tensor, Tensor]:
            new = x + branch * values
            return new, eager_rms(new, 1e-6) * (1 + scale) + shift

        forms = ours(residual.residual_norm, *terms) | {"eager": eager}
        return Case(
            "residual, norm, modulation (LTX)", 4 * size(x), forms, exactly(residual.residual_norm_reference, *terms)
        )

    def tanh() -> Case:
        x, branch, (values, scale) = some(*mochi), some(*mochi), rows(mochi, 2)
        terms = (x, branch, Gate(values, True, 1e-6), Norm(RMS, 1e-6), Modulation(scale))

        def eager() -> tuple[Tensor, Tensor]:
            new = x + (eager_rms(branch.float(), 1e-6) * torch.tanh(values)).to(dtype)
            return new, (eager_rms(new.float(), 1e-6) * (1 + scale.float())).to(dtype)

        forms = ours(residual.residual_norm, *terms) | {"eager": eager}
        return Case(
            "normed branch, tanh gate, norm (Mochi)",
            4 * size(x),
            forms,
            exactly(residual.residual_norm_reference, *terms),
        )

    def across() -> Case:
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
        return Case("q, k norm and rotation across heads (LTX)", moved, forms, exact, skipped)

    def per_head() -> Case:
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
        return Case(
            "q, k norm and rotation per head (HunyuanVideo)",
            moved,
            forms,
            exactly(rope.qk_norm_rope_reference, pair, tables, 1e-6),
            skipped,
        )

    def feed(name: str, shape: tuple[int, ...], eager: Callable[[Tensor], Tensor]) -> Callable[[], Case]:
        def make() -> Case:
            x = some(*shape)
            forms = ours(getattr(activation, name), x) | {"eager": lambda: eager(x)}
            skipped: dict[str, str] = {}
            if name == "swiglu":
                value, gate = x.chunk(2, -1)
                copies = value.contiguous(), gate.contiguous()
                liger(forms, skipped, "swiglu", "swiglu_forward", lambda f: lambda: f(copies[1], copies[0])[-1])
            moved = size(x) * 2 if name == "gelu_tanh" else size(x) * 3 // 2
            return Case(name, moved, forms, exactly(getattr(activation, f"{name}_reference"), x), skipped)

        return make

    def clip(per_frame: bool, last: bool) -> Callable[[], Case]:
        def make() -> Case:
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
            return Case(name, 3 * size(x), forms, exactly(group_norm.group_norm_silu_pad_reference, x, how, pad),
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


# ---- timing -------------------------------------------------------------------------------------------------


class Clock:
    """Milliseconds of a call, by events on a GPU, by the wall on a CPU; the cache is emptied before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flush = torch.empty(FLUSH_BYTES if device.type == "cuda" else 2**16, dtype=torch.uint8, device=device)

    def __call__(self, form: Form) -> float:
        self.flush.zero_()
        if self.device.type != "cuda":
            started = time.perf_counter()
            form()
            return 1e3 * (time.perf_counter() - started)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        form()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))


def timed(forms: dict[str, Form], clock: Clock, rounds: int) -> dict[str, list[float]]:
    """Times of each form, all forms in a new order each round."""
    names, times = list(forms), {name: list[float]() for name in forms}
    for number in range(rounds + WARM_UP):
        random.shuffle(names)
        for name in names:
            spent = clock(forms[name])
            if number >= WARM_UP:
                times[name].append(spent)
    return times


def limits(clock: Clock, device: torch.device, dry: bool) -> tuple[float, float]:
    """Copy bandwidth in GB/s, and the rate of a matrix product in TFLOP/s."""
    count, side = (2**29, 8192) if not dry else (2**16, 64)
    source = torch.empty(count, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    a = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    times = timed({"copy": lambda: target.copy_(source), "product": lambda: a @ a}, clock, ROUNDS if not dry else 2)
    return 2 * size(source) / statistics.median(times["copy"]) / 1e6, 2 * side**3 / statistics.median(
        times["product"]
    ) / 1e9


def measured(case: Case, clock: Clock, copy: float, dry: bool) -> list[dict[str, Any]]:
    """Rows of one case, eager first."""
    forms = dict(case.forms)
    if not dry:
        forms["compile"] = torch.compile(case.forms["eager"])
    exact, errors = case.exact(), dict[str, float]()
    for name in list(forms):
        try:
            errors[name] = error(forms[name](), exact)
        except Exception as raised:  # another project's kernel, or the compiler: its fault is its row
            case.skipped[name] = f"{type(raised).__name__}: {raised}".splitlines()[0]
            del forms[name]
    del exact
    times = timed(forms, clock, ROUNDS if not dry else 2)
    eager, rows = statistics.median(times["eager"]), []
    for name in sorted(forms, key=lambda name: name != "eager"):
        ms = statistics.median(times[name])
        share = case.moved / ms / 1e6 / copy
        faults = []
        if name == "anygpu" and case.bound_by_memory and share < BAR_BANDWIDTH:
            faults.append(f"{share:.2f} of copy bandwidth, {BAR_BANDWIDTH} demanded")
        if name == "anygpu" and errors[name] > 1.001 * errors["eager"]:
            faults.append("error above eager's")
        rows.append(
            {"case": case.name, "form": name, "ms": round(ms, 4), "ms_fastest": round(min(times[name]), 4),
             "gb_per_s": round(case.moved / ms / 1e6, 1), "of_copy": round(share, 3), "to_eager": round(eager / ms, 3),
             "error": f"{errors[name]:.3e}", "error_to_eager": round(errors[name] / max(errors["eager"], 1e-30), 3),
             "verdict": "; ".join(faults) or "ok"}
        )  # fmt: skip
    return rows


def main() -> int:
    """0 also where there is nothing to measure with; the reason is printed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--exactness", action="store_true", help="errors alone, on the CPU")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp16"], choices=list(DTYPES))
    asked = parser.parse_args()
    if asked.exactness:
        return exactness(asked.dtypes)
    reason = "" if asked.dry else reason_against()
    if reason:
        print(f"skipped: {reason}")
        return 0
    device = torch.device("cpu" if asked.dry else "cuda")
    facts, clock = facts_for(device), Clock(device)
    copy, product = limits(clock, device, asked.dry)
    print(f"{facts}: copy {copy:.0f} GB/s, product {product:.1f} TFLOP/s in bf16")
    known = {"date": datetime.date.today().isoformat(), "gpu": facts.name, "driver": facts.driver,
             "torch": torch.__version__, "triton": facts.versions.get("triton", "")}  # fmt: skip
    written: list[dict[str, Any]] = [
        known | {"case": "copy", "dtype": "bf16", "form": "torch", "gb_per_s": round(copy, 1), "of_copy": 1.0},
        known | {"case": f"product, {product:.1f} TFLOP/s", "dtype": "bf16", "form": "torch"},
    ]
    for name in asked.dtypes:
        for make in cases(device, DTYPES[name], FEW if asked.dry else FULL):
            case = make()
            for row in measured(case, clock, copy, asked.dry):
                written.append(known | row | {"dtype": name})
                print(
                    f"{row['case']}, {name}, {row['form']}: {row['ms']} ms, {row['of_copy']} of copy, "
                    f"{row['to_eager']}x eager, error {row['error']}, {row['verdict']}"
                )
            for form, why in case.skipped.items():
                print(f"{case.name}, {name}, {form}: skipped: {why}")
    if not asked.dry:
        appended(written)
    return 0


def exactness(dtypes: list[str]) -> int:
    """Errors against fp64 on the CPU of eager, of ours and of comfy-kitchen's eager backend; rewrites their CSV."""
    rows = []
    for name in dtypes:
        for make in cases(torch.device("cpu"), DTYPES[name], FEW):
            case = make()
            exact = case.exact()
            for form in ("eager", "reference", "comfy-kitchen"):
                if form in case.forms:
                    rows.append([case.name, name, form, f"{error(case.forms[form](), exact):.4e}"])
                    print(", ".join(rows[-1]))
    with EXACTNESS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["case", "dtype", "form", "error", "gpu", "torch", "comfy_kitchen", "date"])
        known = ("none (CPU)", torch.__version__, _version("comfy-kitchen"), datetime.date.today().isoformat())
        writer.writerows([*row, *known] for row in rows)
    return 0


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def reason_against() -> str:
    """What keeps this machine from measuring; empty where nothing does."""
    if not torch.cuda.is_available():
        return f"no NVIDIA or AMD GPU that torch {torch.__version__} sees"
    return "" if HAS_TRITON else "Triton is not installed"


def appended(rows: list[dict[str, Any]]) -> None:
    """Add rows to the CSV, with a header if it is new."""
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        if new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
