"""Whole transformers and decoders of full size with random weights on a GPU: neither, kernels, compile and both.

    python benchmarks/models_gpu.py            # appends to benchmarks/results/models_gpu.csv, draws models_gpu.png
    python benchmarks/models_gpu.py --dry      # tiny sizes on the CPU: only whether the script works; writes nothing

A step is one call of the transformer. Every form is timed at least 20 times by events, in a new random order each
round; medians. Bars: LTX-Video at 6,144 tokens with kernels at least 1.30 of neither and 1.03 of compile; both at least
1.04 of compile on LTX-Video and Mochi, nowhere below 1.00; HunyuanVideo's attention without its mask 1.8; LTX-Video's
decode 1.5 at 55 dB. `benchmarks/kernels_gpu.py` times single operations, `benchmarks/clips.py` whole clips.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from kernels_gpu import Clock, limits, reason_against, timed
from table import RESULTS, append, machine
from torch import Tensor, nn
from torch.nn import functional

ROUNDS = 20
FORMS = {"neither": (False, False), "kernels": (True, False), "compile": (False, True), "both": (True, True)}
BARS = {
    ("LTX-Video step", "kernels", "neither"): 1.30,
    ("LTX-Video step", "kernels", "compile"): 1.03,
    ("LTX-Video step", "both", "compile"): 1.04,
    ("Mochi step", "both", "compile"): 1.04,
    ("HunyuanVideo step", "both", "compile"): 1.00,
    ("LTX-Video decode", "kernels", "neither"): 1.50,
    ("HunyuanVideo attention", "no mask", "masked"): 1.80,
}
LEAST_PSNR = 55.0


@dataclass(frozen=True)
class Model:
    """A published transformer or VAE.

    Args:
        make: the module, from whether it is to be tiny. inputs: what it is called with, from the same and a maker of
            random tensors.
    """

    name: str
    make: Callable[[bool], nn.Module]
    inputs: Callable[[bool, Callable[..., Tensor]], dict[str, Any]]
    decodes: bool = False


def models() -> Iterator[Model]:
    """LTX-Video 121 frames 512 x 768, HunyuanVideo 61 frames 544 x 960, Mochi 84 frames 480 x 848."""
    import diffusers
    from tiny import parts

    def ltx(tiny: bool, some: Callable[..., Tensor]) -> dict[str, Any]:
        frames, rows, columns = (2, 2, 3) if tiny else (16, 16, 24)
        tokens, text = frames * rows * columns, 8 if tiny else 128
        return {
            "hidden_states": some(2, tokens, 128), "encoder_hidden_states": some(2, text, 32 if tiny else 4096),
            "timestep": some(2).abs() * 100, "encoder_attention_mask": None, "num_frames": frames, "height": rows,
            "width": columns, "rope_interpolation_scale": (8 / 25, 32, 32),
        }  # fmt: skip

    def hunyuan(tiny: bool, some: Callable[..., Tensor]) -> dict[str, Any]:
        size, text = ((2, 4, 4), 8) if tiny else ((16, 68, 120), 256)
        return {
            "hidden_states": some(1, 16, *size), "timestep": torch.full((1,), 500, device=some(1).device),
            "encoder_hidden_states": some(1, text, 32 if tiny else 4096),
            "encoder_attention_mask": torch.ones(1, text, dtype=torch.long, device=some(1).device),
            "pooled_projections": some(1, 32 if tiny else 768), "guidance": some(1).abs() * 1000,
        }  # fmt: skip

    def mochi(tiny: bool, some: Callable[..., Tensor]) -> dict[str, Any]:
        size, text = ((2, 4, 4), 8) if tiny else ((14, 60, 106), 256)
        return {
            "hidden_states": some(2, 12, *size), "encoder_hidden_states": some(2, text, 32 if tiny else 4096),
            "timestep": some(2).abs() * 100,
            "encoder_attention_mask": torch.ones(2, text, dtype=torch.bool, device=some(1).device),
        }  # fmt: skip

    def latents(tiny: bool, some: Callable[..., Tensor]) -> dict[str, Any]:
        return {"latents": some(1, 128, *((2, 2, 2) if tiny else (16, 16, 24)))}

    def either(full: Any, small: Callable[[], nn.Module]) -> Callable[[bool], nn.Module]:
        return lambda tiny: small() if tiny else full()

    yield Model("LTX-Video step", either(diffusers.LTXVideoTransformer3DModel, parts.ltx_transformer), ltx)
    yield Model("Mochi step", either(diffusers.MochiTransformer3DModel, parts.mochi_transformer), mochi)
    yield Model(
        "HunyuanVideo step", either(diffusers.HunyuanVideoTransformer3DModel, parts.hunyuan_transformer), hunyuan
    )
    yield Model("LTX-Video decode", either(diffusers.AutoencoderKLLTXVideo, parts.ltx_vae), latents, decodes=True)


def prepared(model: Model, tiny: bool, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The module with small random weights, made on the device."""
    with device:
        module = model.make(tiny)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 1.0 / math.sqrt(max(2, parameter.shape[-1]))) if parameter.ndim > 1 else None
    return nn.Module.to(module.eval().requires_grad_(False), dtype)


def forms_of(model: Model, module: nn.Module, tiny: bool) -> dict[str, Callable[[], Callable[[], Any]]]:
    """By name, what puts a form on ``module`` and returns what takes it off."""
    from anygpu.compat.transforms.compile import Compilation, CompileSettings
    from anygpu.compat.transforms.fused import fuse
    from anygpu.compat.transforms.fused_vae import fuse_vae
    from anygpu.compat.transforms.order import replace_attention

    def form(kernels: bool, graphs: Compilation | None) -> Callable[[], Callable[[], Any]]:
        def put_on() -> Callable[[], Any]:
            undo: list[Callable[[], Any]] = []
            if kernels:
                done = (fuse_vae if model.decodes else fuse)(module, "reference" if tiny else "auto")
                if not done.points or done.left:
                    raise RuntimeError(f"{model.name}: {done}")
                undo.append(done.restore)
            if not model.decodes:
                undo.append(replace_attention(module, functional.scaled_dot_product_attention))
            if graphs is not None:
                undo.append(graphs.attach(module) or (lambda: None))

            def take_off() -> None:
                while undo:
                    undo.pop()()

            return take_off

        return put_on

    settings = CompileSettings(vae=model.decodes, backend="eager" if tiny else "inductor")
    return {name: form(kernels, Compilation(settings) if graphs else None) for name, (kernels, graphs) in FORMS.items()}


def shuffled(forms: dict[str, Callable[[], Callable[[], Any]]], call: Callable[[], Any], clock: Clock, rounds: int):
    """Times of ``call`` under each form, in a new order each round, and its first result; compiling is not timed."""
    times, results, names = {name: list[float]() for name in forms}, dict[str, Any](), list(forms)
    for _ in range(rounds + 1):
        for name in names:
            take_off = forms[name]()
            if name not in results:
                results[name] = call()
            else:
                call()  # the form's own kernels are warm again
                times[name].append(clock(call))
            take_off()
        random.shuffle(names)
    return times, results


def psnr(found: Tensor, expected: Tensor) -> float:
    """Of ``found`` against ``expected``, whose own span is the peak, in dB."""
    error = float((found.float() - expected.float()).square().mean())
    span = float(expected.float().max() - expected.float().min())
    return math.inf if error == 0 else 10 * math.log10(span**2 / error)


def measured(model: Model, clock: Clock, tiny: bool, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Rows of one model."""
    device = clock.device
    some = partial(_random, device=device, dtype=dtype)
    module, given = prepared(model, tiny, device, dtype), model.inputs(tiny, some)

    def call() -> Any:
        with torch.no_grad():
            if model.decodes:
                return module.decode(given["latents"], return_dict=False)[0]
            return module(**given, return_dict=False)[0]

    times, results = shuffled(forms_of(model, module, tiny), call, clock, ROUNDS if not tiny else 2)
    for name, row in rows_of(model.name, times).items():
        near = psnr(results[name], results["neither"])
        short = [row["verdict"]] if row["verdict"] != "ok" else []
        if model.decodes and near < LEAST_PSNR:
            short.append(f"{near:.1f} dB, {LEAST_PSNR:.0f} demanded")
        yield row | {"psnr_db": round(near, 1), "verdict": "; ".join(short) or "ok"}


def rows_of(case: str, times: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """A row per form of ``case``, with the bars that it misses."""
    middle, found = {name: statistics.median(spent) for name, spent in times.items()}, {}
    for name, ms in middle.items():
        missed = [
            f"{middle[other] / ms:.2f} of {other}, {bar:.2f} demanded"
            for (which, form, other), bar in BARS.items()
            if which == case and form == name and middle[other] / ms < bar
        ]
        share = next(iter(middle.values())) / ms
        found[name] = {"case": case, "form": name, "ms": round(ms, 3), "over_first": round(share, 3)}
        found[name] |= {"psnr_db": "", "verdict": "; ".join(missed) or "ok"}
    return found


def attention(clock: Clock, tiny: bool, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """HunyuanVideo's attention at 32,640 + 256 tokens, with upstream's mask of all tokens and without."""
    tokens = 64 if tiny else 32640 + 256
    q, k, v = (_random(1, 24, tokens, 128, device=clock.device, dtype=dtype) for _ in range(3))
    mask = torch.ones(1, 1, 1, tokens, dtype=torch.bool, device=clock.device)
    forms = {
        "masked": lambda: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        "no mask": lambda: functional.scaled_dot_product_attention(q, k, v),
    }
    yield from rows_of("HunyuanVideo attention", timed(forms, clock, ROUNDS if not tiny else 2)).values()


def _random(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def drawn(rows: list[dict[str, Any]]) -> None:
    """Bars of how many times faster than the first form each one is, as a picture beside the table."""
    from PIL import Image, ImageDraw

    shown = [row for row in rows if row["form"] not in ("neither", "masked")]
    picture = Image.new("RGB", (900, 40 + 26 * len(shown)), "white")
    pen, scale = ImageDraw.Draw(picture), 250
    for index, row in enumerate(shown):
        top = 20 + 26 * index
        pen.text((10, top + 4), f"{row['case']}, {row['form']}", fill="black")
        pen.rectangle((260, top, 260 + int(scale * row["over_first"]), top + 18), fill="#3b7dd8")
        pen.text((270 + int(scale * row["over_first"]), top + 4), f"{row['over_first']:.2f}x", fill="black")
    pen.line((260 + scale, 10, 260 + scale, 30 + 26 * len(shown)), fill="black")
    picture.save(RESULTS / "models_gpu.png")


def main() -> int:
    """0 also where there is nothing to measure with; the reason is printed."""
    from anygpu.compat.device.facts import facts_for

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    asked = parser.parse_args()
    reason = "" if asked.dry else reason_against()
    if reason:
        print(f"skipped: {reason}")
        return 0
    device, dtype = (
        torch.device("cpu" if asked.dry else "cuda"),
        getattr(torch, "bfloat16" if asked.dry else asked.dtype),
    )
    clock, facts = Clock(device), facts_for(device)
    copy, product = limits(clock, device, asked.dry)
    print(f"{facts}: copy {copy:.0f} GB/s, product {product:.1f} TFLOP/s in bf16")
    known = machine() | {"device": facts.name, "driver": facts.driver, "dtype": str(dtype).removeprefix("torch."),
                         "copy_gb_per_s": round(copy, 1), "product_tflop_per_s": round(product, 1)}  # fmt: skip
    found = [known | row for row in attention(clock, asked.dry, dtype)]
    for model in models():
        try:
            found += [known | row for row in measured(model, clock, asked.dry, dtype)]
        except torch.OutOfMemoryError as error:
            print(f"{model.name}: skipped: {str(error).splitlines()[0]}")
    if asked.dry:
        for row in found:
            print(f"{row['case']}, {row['form']}: {row['ms']} ms, {row['over_first']}x, {row['psnr_db']} dB")
        return 0
    append("models_gpu", found)
    drawn(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
