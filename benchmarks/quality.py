"""What each lossy switch costs on a model that means something: the checker's score, PSNR and SSIM against fp32.

    pip install --target ggml pywhispercpp        # for GGUF's K types, which the package gguf reads but cannot write
    python benchmarks/quality.py --ggml ggml/libggml-base.so

For each demo model: the same prompts and seeds under each switch. Appends rows to ``results/quality.csv`` and writes
``docs/quality.md`` of the newest row of each. What needs hardware that is not here is emulated, and says so. Prompts
are in the words the model knows, so the checker can tell whether a switch still shows what was asked. ``--only GGUF 8``
measures the switches with one of these in their names, and ``--models LTX`` the models with one of these in theirs; the
strips are drawn of all.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from anygpu.compat.device import precision
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.transforms.order import replace_attention
from anygpu.compat.transforms.step_cache import KINDS, PRESETS, StepCacheSettings
from anygpu.pipelines.demo import demo_models, drawing
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.settings import with_step_cache
from lossy import int8_attention, products
from scene_scores import chosen_scenes, scores
from steps import psnr, ssim
from table import RESULTS, append, machine
from torch import nn

DOCS = Path(__file__).resolve().parents[1] / "docs"
GGUF_TYPES = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")  # those that the package gguf can write
K_TYPES = {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0", "Q3_K": "IQ4_NL"}  # and what takes their place in short rows
K_BLOCK = 256  # values that share their scales; llama.cpp's tools fall back where a row is not a multiple of it
STRIP = 2  # clips in a strip
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


PLAIN = Switch("fp32")


@contextmanager
def attention_in_int8(transformer: nn.Module) -> Iterator[None]:
    back = replace_attention(transformer, int8_attention)
    try:
        yield
    finally:
        back()


@contextmanager
def rounded_to(kind: str, across: bool, ggml: Path | None, transformer: nn.Module) -> Iterator[None]:
    """The Linears of the blocks in a GGUF type and back, as a GGUF file's weights are when they compute.

    Args:
        across: blocks of values go on in the next row, so that every Linear has the type, however short its rows are;
            else short rows have the type that llama.cpp's tools write in its place. ggml: what writes K types.
    """
    with torch.no_grad():
        for leaf in rounded_linears(transformer):
            weight = leaf.weight.float().numpy()
            rows = weight.reshape(-1, K_BLOCK) if across else weight
            own = K_TYPES[kind] if kind in K_TYPES and rows.shape[1] % K_BLOCK else kind
            leaf.weight.copy_(torch.from_numpy(rounded(rows, own, ggml).reshape(weight.shape)))
    yield


def rounded_linears(transformer: nn.Module) -> list[nn.Linear]:
    """The Linears of the blocks whose rows are whole blocks of 32 values, which is what GGUF's types need."""
    linears = [(name, leaf) for name, leaf in transformer.named_modules() if isinstance(leaf, nn.Linear)]
    return [leaf for name, leaf in linears if "blocks" in name and leaf.in_features % 32 == 0]


def rounded(rows: np.ndarray, kind: str, ggml: Path | None) -> np.ndarray:
    """``rows`` in a GGUF type and back, fp32."""
    import gguf

    to = gguf.GGMLQuantizationType[kind]
    if kind in GGUF_TYPES:
        packed = gguf.quants.quantize(rows, to)
    else:
        rows = np.ascontiguousarray(rows, dtype=np.float32)
        block, size = gguf.GGML_QUANT_SIZES[to]
        packed = np.zeros((rows.shape[0], rows.shape[1] // block * size), dtype=np.uint8)
        write = ctypes.CDLL(str(ggml)).ggml_quantize_chunk
        write.restype = ctypes.c_size_t
        places = (ctypes.c_void_p(array.ctypes.data) for array in (rows, packed))
        written = write(ctypes.c_int(to), *places, *map(ctypes.c_int64, (0, *rows.shape)), None)
        if written != packed.nbytes:
            raise RuntimeError(f"{ggml} wrote {written} bytes of {kind}; expected {packed.nbytes}")
    return gguf.quants.dequantize(packed, to)


def gguf_switches(transformer: nn.Module, ggml: Path | None) -> list[Switch]:
    """A row for each type that can be written; two for a K type: everywhere, and as files of this model have it.

    Where no row of the model takes a K type, such a file has the other type alone, which has its own row.
    """
    widths = {leaf.in_features for leaf in rounded_linears(transformer)}
    taking = [str(width) for width in sorted(widths) if width % K_BLOCK == 0]
    others = " and ".join(str(width) for width in sorted(widths) if width % K_BLOCK)
    every = [
        Switch(f"GGUF {kind}", "rounded and back", around=partial(rounded_to, kind, False, ggml)) for kind in GGUF_TYPES
    ]
    if ggml is not None:
        every.append(Switch("GGUF IQ4_NL", "rounded and back", around=partial(rounded_to, "IQ4_NL", False, ggml)))
        for kind, other in K_TYPES.items():
            mixed, whole = (
                f"rows of {' and '.join(taking)}; {other} in rows of {others}",
                "in all rows, across their ends",
            )
            if taking:
                every.append(Switch(f"GGUF {kind} file", mixed, around=partial(rounded_to, kind, False, ggml)))
            every.append(Switch(f"GGUF {kind}", whole, around=partial(rounded_to, kind, True, ggml)))
    return every


def switches(pipeline: Any, ggml: Path | None) -> list[Switch]:
    """Every row but the first, which is fp32."""
    emulated = "emulated on a CPU"
    every = [Switch(f"precision {name}", load={"precision": name}) for name in ("bf16", "fp16")]
    every.append(Switch("precision fp16-safe", "as GPUs have it; on a CPU refused", load={"precision": "fp16-safe"}))
    every += [Switch(f"weights {name}", load={"weights": name}) for name in ("fp8", "int8")]
    every += [Switch(f"text_weights {name}", load={"text_weights": name}) for name in ("fp8", "int8")]
    every += gguf_switches(pipeline.parts.read("transformer"), ggml)
    for kind in list(KINDS)[1:]:  # but auto
        for preset in PRESETS:
            cached = partial(with_step_cache, preset=preset, asked=StepCacheSettings(kind))
            every.append(Switch(f"step cache {kind}, {preset}", change=lambda p, cached=cached: cached(p)))
    every += [
        Switch("int8 attention", emulated, around=attention_in_int8),
        Switch("fp16 products", emulated, around=lambda t: products(t, False)),
        Switch("fp16 accumulation", emulated, around=lambda t: products(t, True)),
    ]
    every += [Switch(f"{steps} steps", sample={"steps": steps}) for steps in (12, 8, 4, 2)]
    return every


def clips(folder: Path, switch: Switch, asked: list[Any]) -> list[torch.Tensor]:
    """The clips of these scenes under a switch."""
    request = {"precision": "fp32", "device": "cpu", **switch.load}
    with mock.patch.object(precision, "_contradicts", lambda *_: False):  # or a CPU would refuse fp16-safe
        pipeline = switch.change(load(LoadRequest(folder, **request)))
    with switch.around(pipeline.parts.read("transformer")):
        return [drawing.drawn(pipeline, scene.caption, seed=seed, **switch.sample) for seed, scene in enumerate(asked)]


def measured(model: str, switch: Switch, shown: list[torch.Tensor], plain: list[torch.Tensor], asked: list[Any]) -> Any:
    """A row of the table: how these clips compare with the plain ones."""
    how = switch.how
    if all(torch.equal(a, b) for a, b in zip(shown, plain, strict=True)):
        if switch is not PLAIN and "step cache" not in switch.name:
            raise RuntimeError(f"{switch.name} changed nothing")
        how = "" if switch is PLAIN else "no step was alike enough"
    score = scores(shown, asked)
    pairs = list(zip(shown, plain, strict=True))
    noise = sum(min(psnr(*pair), EQUAL) for pair in pairs) / len(pairs)
    alike = sum(ssim(*pair) for pair in pairs) / len(pairs)
    row = {"model": model, "switch": switch.name, "how": how, "prompts": len(asked)}
    row |= {name: round(score[key], 3) for name, key in (("right", "all"), ("shape", "shape"), ("motion", "motion"))}
    return machine() | row | {"psnr_db": round(noise, 2), "ssim": round(alike, 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--only", nargs="+", default=[""], help="measure the switches with one of these in their names")
    parser.add_argument("--models", nargs="+", default=[""], help="measure the models with one of these in their names")
    parser.add_argument("--ggml", type=Path, help="ggml's library, which writes GGUF's K types")
    parser.add_argument("--dry", action="store_true", help="print the rows, write nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    asked, names, pictures = chosen_scenes(given.prompts), {}, {}
    for choice, folder in demo_models().items():
        chosen = any(text in choice for text in given.models)
        plain = clips(folder, PLAIN, asked if chosen else asked[:STRIP])
        strips = {PLAIN.name: strip(plain)}
        if chosen:
            keep([measured(choice, PLAIN, plain, plain, asked)], given.dry)
        for switch in switches(load(LoadRequest(folder, precision="fp32", device="cpu")), given.ggml):
            whole = chosen and any(text in switch.name for text in given.only)
            try:
                shown = clips(folder, switch, asked if whole else asked[:STRIP])
            except UnsupportedError as error:
                print(f"{choice}, {switch.name}: {error}", flush=True)
                continue
            strips[switch.name] = strip(shown)
            if whole:
                keep([measured(choice, switch, shown, plain, asked)], given.dry)
        names[choice], picture = list(strips), f"images/quality_{folder.name}.webp"
        pictures[choice] = picture
        if not given.dry:
            drawing.save_sheet(list(strips.values()), list(strips), DOCS / picture)
    if not given.dry:
        write_page(names, pictures)
    return 0


def keep(rows: list[Any], dry: bool) -> None:
    """Append rows to the table, or only print them."""
    print(*rows, sep="\n", flush=True) if dry else append("quality", rows)


def write_page(names: dict[str, list[str]], pictures: dict[str, str]) -> None:
    """``docs/quality.md`` of the newest row of each switch.

    Args:
        names: switches by model, in their order. pictures: of the strips, by model.
    """
    with (RESULTS / "quality.csv").open(newline="", encoding="utf-8") as file:
        rows = {(row["model"], row["switch"]): row for row in csv.DictReader(file)}
    page = [HEAD]
    for model, switched in names.items():
        lines = [line(rows[model, name]) for name in switched if (model, name) in rows]
        page += [f"## {model.removeprefix('demo: ')}\n", f"<!-- {model} -->", *TABLE, *lines, "<!-- end -->"]
        page += [f"\n![Strips]({pictures[model]})\n"]
    (DOCS / "quality.md").write_text("\n".join(page) + FOOT, encoding="utf-8", newline="\n")


HEAD = """# What each quality switch costs

Measured on the demo models with 64 x 64 pixels and 9 frames. A checker, which is not a network, reads shape, colour,
motion and background back from the frames. *Right* is the share of clips in which all four match the prompt. PSNR and
SSIM compare each clip with the fp32 clip of the same seed; they also drop when a clip is different but just as good.
The order of the switches carries over to large models; the figures may not.

- **GGUF's K types** share scales among 256 values, which the demo models' short rows do not fill. Rows marked *file*
  measure what llama.cpp's tools write, with another type for such rows; in the others a block continues into the next
  row. Published models need neither.
- **fp16-safe** ran on a CPU, where AnyGPU normally refuses it.
- **Tiled decode** has no row: a tile is a whole clip here. [Memory](memory.md#decode) compares the ways to decode.

What follows for the defaults:

- `precision` `auto` is bf16 where a GPU computes it fast, otherwise fp16-safe, never plain fp16. The fp16 forms are
  closer to fp32 here, but bf16 cannot overflow with the large activations of published models.
- `weights` `auto` keeps the file's. If memory is short, int8 has a tenth of the squared error of fp8. Each bit less in
  a GGUF doubles the error.
- The step cache is off. At each preset `first_block` costs least.
- `steps` 0 is the model's own 20; all but Mochi draw what was asked with 8.
"""
TABLE = (
    "| switch | how | right | shape | motion | PSNR dB | SSIM |",
    "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
)
FOOT = "\nRepeat it with `python benchmarks/quality.py`; the rows are in `benchmarks/results/quality.csv`.\n"


def line(row: dict[str, str]) -> str:
    """A row of the page."""
    cells = [f"{float(row[key]):.0%}" for key in ("right", "shape", "motion")]
    cells += [
        "equal" if float(row["psnr_db"]) == EQUAL else f"{float(row['psnr_db']):.1f}",
        f"{float(row['ssim']):.3f}",
    ]
    return f"| {row['switch']} | {row['how']} | {' | '.join(cells)} |"


def strip(shown: list[torch.Tensor]) -> torch.Tensor:
    """Some clips side by side, for the sheet."""
    return torch.cat(shown[:STRIP], dim=2)


if __name__ == "__main__":
    sys.exit(main())
