"""What each lossy switch costs on a model that means something: the checker's score, PSNR and SSIM against fp32.

    python benchmarks/quality.py                 # appends rows to results/quality.csv, writes docs/quality.md

For each demo model: the same prompts and seeds under each switch. What needs hardware that is not here is emulated, and
says so. Prompts are in the words the model knows, so the checker can tell whether a switch still shows what was asked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from anygpu.compat.errors import PackError
from anygpu.compat.transforms.attention_processors import replace_attention_processors
from anygpu.compat.transforms.step_cache import PRESETS, StepCacheSettings
from anygpu.pipelines.demo import demo_models, drawing
from anygpu.pipelines.loading.folder import LoadRequest, load
from anygpu.pipelines.speed import with_step_cache
from anygpu.pipelines.vae.plan import Form
from lossy import int8_attention, products
from steps import psnr, ssim
from table import append, machine
from torch import nn

DOCS = Path(__file__).resolve().parents[1] / "docs"
GGUF_TYPES = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")  # those that the package gguf can write
STRIP = 6  # clips in a strip
EQUAL = 99.0  # dB, of clips without a difference


@dataclass(frozen=True)
class Switch:
    """One row: how the model is loaded, what is done to it, how it is sampled."""

    name: str
    how: str = ""
    load: dict[str, Any] = field(default_factory=dict)
    sample: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any], Any] = lambda pipeline: pipeline
    around: Callable[[nn.Module], AbstractContextManager[Any]] = lambda transformer: nullcontext()


@contextmanager
def attention_in_int8(transformer: nn.Module) -> Iterator[None]:
    back = replace_attention_processors(transformer, int8_attention)
    try:
        yield
    finally:
        back()


@contextmanager
def rounded_to(kind: str, transformer: nn.Module) -> Iterator[None]:
    """The Linears of the blocks in a GGUF type and back, as a GGUF file's weights are when they compute."""
    import gguf

    to = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for name, leaf in transformer.named_modules():
            if isinstance(leaf, nn.Linear) and "blocks" in name and leaf.in_features % 32 == 0:
                packed = gguf.quants.quantize(leaf.weight.float().numpy(), to)
                leaf.weight.copy_(torch.from_numpy(gguf.quants.dequantize(packed, to)))
    yield


def switches(pipeline: Any) -> list[Switch]:
    """Every row but the first, which is fp32."""
    emulated = "emulated on a CPU"
    every = [Switch(f"precision {name}", load={"precision": name}) for name in ("bf16", "fp16", "fp16-safe")]
    every += [Switch(f"weights {name}", load={"weights": name}) for name in ("fp8", "int8")]
    every += [Switch(f"text_weights {name}", load={"text_weights": name}) for name in ("fp8", "int8")]
    every += [Switch(f"GGUF {kind}", "rounded and back", around=partial(rounded_to, kind)) for kind in GGUF_TYPES]
    for kind in pipeline.spec.step_caches:
        for preset in PRESETS:
            cached = partial(with_step_cache, preset=preset, asked=StepCacheSettings(kind))
            every.append(Switch(f"step cache {kind}, {preset}", change=lambda p, cached=cached: cached(p)))
    every += [
        Switch("int8 attention", emulated, around=attention_in_int8),
        Switch("fp16 products", emulated, around=lambda t: products(t, False)),
        Switch("fp16 accumulation", emulated, around=lambda t: products(t, True)),
        Switch("tiled decode", "tiles of 32 pixels", sample={"form": Form("tiled", 32)}),
    ]
    every += [Switch(f"{steps} steps", sample={"steps": steps}) for steps in (12, 8, 4, 2)]
    return every


def clips(folder: Path, switch: Switch, asked: list[Any]) -> list[torch.Tensor]:
    """The clips of these scenes under a switch."""
    request = {"precision": "fp32", "device": "cpu", **switch.load}
    pipeline = switch.change(load(LoadRequest(folder, **request)))
    with switch.around(pipeline.parts.read("transformer")):
        return [drawing.drawn(pipeline, scene.caption, seed=seed, **switch.sample) for seed, scene in enumerate(asked)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--dry", action="store_true", help="print the rows, write nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    asked, page = drawing.chosen_scenes(given.prompts), [HEAD]
    for choice, folder in demo_models().items():
        plain = clips(folder, Switch("fp32"), asked)
        strips, lines = {"fp32": plain}, [line("fp32", "", drawing.scores(plain, asked), None, None)]
        for switch in switches(load(LoadRequest(folder, precision="fp32", device="cpu"))):
            try:
                shown = clips(folder, switch, asked)
            except PackError as error:
                print(f"{switch.name}: {error}", flush=True)
                lines.append(f"| {switch.name} | refused: {error.found}; expected {error.expected} | | | | | |")
                continue
            how = switch.how
            if all(torch.equal(a, b) for a, b in zip(shown, plain, strict=True)):
                if "step cache" not in switch.name:
                    raise RuntimeError(f"{switch.name} changed nothing")
                how = "no step was alike enough"
            score, strips[switch.name] = drawing.scores(shown, asked), shown
            noise = sum(min(psnr(a, b), EQUAL) for a, b in zip(shown, plain, strict=True)) / len(asked)
            alike = sum(ssim(a, b) for a, b in zip(shown, plain, strict=True)) / len(asked)
            row = {"model": choice, "switch": switch.name, "how": how, "prompts": len(asked)}
            row |= {"right": round(score["all"], 3), "psnr_db": round(noise, 2), "ssim": round(alike, 4)}
            print(row) if given.dry else append("quality", [machine() | row])
            lines.append(line(switch.name, how, score, noise, alike))
        if not given.dry:
            picture = DOCS / "images" / f"quality_{folder.name}.png"
            drawing.save_sheet([strip(shown) for shown in strips.values()], list(strips), picture)
            page += [f"## {choice.removeprefix('demo: ')}\n", *TABLE, *lines, f"\n![Strips](images/{picture.name})\n"]
    if not given.dry:
        (DOCS / "quality.md").write_text("\n".join(page) + FOOT, encoding="utf-8", newline="\n")
    return 0


HEAD = """# What each quality switch costs

Measured on the demo models, which draw what they are asked: a checker without a network reads shape, colour, motion and
ground back from the frames. *Right* is the share of clips in which it sees all four as the prompt has them. PSNR and
SSIM compare each clip with that of fp32 from the same seed; they fall where a clip differs, also where it is as good.

The models are small and draw 64 x 64 pixels in 9 frames. The order of the switches carries over to large models, the
figures may not: rounding errors grow with depth and shrink with width.
"""
TABLE = (
    "| switch | how | right | shape | motion | PSNR dB | SSIM |",
    "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
)
FOOT = "\nRepeat it with `python benchmarks/quality.py`; the rows are in `benchmarks/results/quality.csv`.\n"


def line(name: str, how: str, score: dict[str, float], noise: float | None, alike: float | None) -> str:
    """A row of the page."""
    figures = (
        ["", ""] if noise is None or alike is None else ["equal" if noise == EQUAL else f"{noise:.1f}", f"{alike:.3f}"]
    )
    shares = [f"{score[key]:.0%}" for key in ("all", "shape", "motion")]
    return f"| {name} | {how} | {' | '.join([*shares, *figures])} |"


def strip(shown: list[torch.Tensor]) -> torch.Tensor:
    """The middle frame of some clips, as one clip for the sheet."""
    return torch.stack([clip[len(clip) // 2] for clip in shown[:STRIP]])


if __name__ == "__main__":
    sys.exit(main())
