"""The cost of each lossy switch on a model that means something: the checker's score, PSNR and SSIM against fp32.

    pip install --target ggml pywhispercpp        # for GGUF's K types, which the package gguf reads but cannot write
    python benchmarks/runner.py quality --write --ggml ggml/libggml-base.so

For each demo model: the same prompts and seeds under each switch; ``docs/quality.md`` has the newest row of each. What
needs hardware that is not here is emulated, and says so. Prompts are in the words the model knows, so the checker can
tell whether a switch still shows what was asked. ``--only GGUF 8`` measures the switches with one of these in their
names, and ``--models LTX`` the models with one of these in theirs; the strips are drawn of all.

int8 attention (``attention: sage``): keys without their mean over tokens, queries and keys in int8 with one scale for
each 128 and 64 tokens, softmax in fp32, probabilities and values in fp16, as SageAttention's paper has it. fp16
accumulation: operands in fp16, sums rounded to fp16 after each 16 products, as a tensor core hands them on. A GPU's own
kernels differ in the order of sums.

`stored_products`: torch's own 8-bit products, which it has on CPUs too, at 128 x 128 pixels, against the same weights
unpacked; tiny models with random weights, since the demo models' clips have too few tokens.

`xla`: tiny models on torch_xla's own CPU device against the CPU: the same latents and frames behind a lazy backend. It
needs PJRT_DEVICE=CPU and torch_xla of torch's version, such as 2.9.0, which is not a dependency of this pack. The
device refuses ``parameter.data = ...``, so that weights get there another way. A minute or more each: XLA compiles
every shape.
"""

from __future__ import annotations

import ctypes
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import numpy as np
import torch
from anygpu.compat.checkpoints.weights import described, read_tensors, weight_files
from anygpu.compat.device import precision
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.transforms.order import replace_attention
from anygpu.compat.transforms.products import multiply_as_stored
from anygpu.compat.transforms.step_cache import KINDS, PRESETS, StepCacheSettings
from anygpu.pipelines import stages
from anygpu.pipelines.base import FramePackSettings, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.demo import demo_models, drawing
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.settings import with_step_cache
from quantised import file_as
from runner import DOCS, SCRATCH, Row, known_rows, psnr, write_table
from scene_scores import chosen_scenes, scores
from times import opened, sampled_latents
from torch import Tensor, nn
from torch.nn import functional

QUERIES, KEYS, PRODUCTS = 128, 64, 16  # tokens that share a scale, and products between two roundings
FRAMES = {"ltx": 9, "hunyuan_video": 5, "hunyuan_video_15": 5, "framepack": 5, "mochi": 7}
GGUF_TYPES = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")  # those that the package gguf can write
K_TYPES = {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0", "Q3_K": "IQ4_NL"}  # and what takes their place in short rows
K_BLOCK = 256  # values that share their scales; llama.cpp's tools fall back where a row is not a multiple of it
STRIP = 2  # clips in a strip
STEPS = 20  # of a clip of a tiny model
PACKED = ("fp16", "fp8", "int8", "int8_convrot", "w4a8")  # choices of ``weights``; the first unpacks
FROM_FILES = ("w4a4", "nvfp4")  # what is read from files only: transformers that comfy-kitchen packs anew
EQUAL = 99.0  # dB, of clips without a difference


def ssim(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean structural similarity of frames (F, H, W, 3) in 0..1, over windows of 7 x 7 pixels."""
    a, b = (t.permute(0, 3, 1, 2).double() for t in (found, expected))

    def mean(t: torch.Tensor) -> torch.Tensor:
        return functional.avg_pool2d(t, 7, stride=1)

    first, second = mean(a), mean(b)
    spread, other, shared = mean(a * a) - first**2, mean(b * b) - second**2, mean(a * b) - first * second
    c, d = 0.01**2, 0.03**2
    alike = (2 * first * second + c) * (2 * shared + d) / ((first**2 + second**2 + c) * (spread + other + d))
    return float(alike.mean())


def in_int8(x: Tensor, tokens: int) -> Tensor:
    """``x`` (B, H, N, D) rounded to int8 with one scale per ``tokens``, as fp32."""
    blocks = x.float().split(tokens, dim=2)
    scales = [block.abs().amax(dim=(2, 3), keepdim=True).clamp(min=1e-12) / 127 for block in blocks]
    return torch.cat([(block / scale).round() * scale for block, scale in zip(blocks, scales, strict=True)], dim=2)


def int8_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention (B, H, N, D) as SageAttention computes it; a mask is left to exact attention, as in our kernels."""
    if mask is not None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    key = key - key.mean(dim=2, keepdim=True)
    scores = in_int8(query, QUERIES) @ in_int8(key, KEYS).transpose(2, 3) * query.shape[-1] ** -0.5
    result = scores.softmax(dim=-1).half().float() @ value.half().float()
    return result.to(query.dtype)


def linear(sums_in_fp16: bool) -> Callable[[nn.Linear, Tensor], Tensor]:
    """A Linear's forward on fp16 operands."""

    def forward(layer: nn.Linear, x: Tensor) -> Tensor:
        narrow, weight = x.half().float(), layer.weight.half().float()
        if not sums_in_fp16:
            result = narrow @ weight.t()
        else:
            result = torch.zeros(*x.shape[:-1], weight.shape[0])
            for part, other in zip(narrow.split(PRODUCTS, -1), weight.split(PRODUCTS, -1), strict=True):
                result = (result + part @ other.t()).half().float()
        result = result if layer.bias is None else result + layer.bias.half().float()
        return result.half().to(x.dtype)

    return forward


@contextmanager
def products(transformer: nn.Module, sums_in_fp16: bool) -> Iterator[None]:
    """Every Linear of the blocks of ``transformer`` on fp16 operands."""
    names = ("transformer_blocks", "single_transformer_blocks")
    blocks = [block for name in names for block in getattr(transformer, name, ())]
    layers = [layer for block in blocks for layer in block.modules() if type(layer) is nn.Linear]
    try:
        for layer in layers:
            layer.forward = MethodType(linear(sums_in_fp16), layer)
        yield
    finally:
        for layer in layers:
            del layer.forward


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
        for layer in rounded_linears(transformer):
            weight = layer.weight.float().numpy()
            rows = weight.reshape(-1, K_BLOCK) if across else weight
            own = K_TYPES[kind] if kind in K_TYPES and rows.shape[1] % K_BLOCK else kind
            layer.weight.copy_(torch.from_numpy(rounded(rows, own, ggml).reshape(weight.shape)))
    yield


def rounded_linears(transformer: nn.Module) -> list[nn.Linear]:
    """The Linears of the blocks whose rows are whole blocks of 32 values, which is what GGUF's types need."""
    linears = [(name, layer) for name, layer in transformer.named_modules() if isinstance(layer, nn.Linear)]
    return [layer for name, layer in linears if "blocks" in name and layer.in_features % 32 == 0]


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
    widths = {layer.in_features for layer in rounded_linears(transformer)}
    taking = [str(width) for width in sorted(widths) if width % K_BLOCK == 0]
    others = " and ".join(str(width) for width in sorted(widths) if width % K_BLOCK)
    every = [
        Switch(f"GGUF {kind}", "rounded and back", around=partial(rounded_to, kind, False, ggml)) for kind in GGUF_TYPES
    ]
    if ggml is not None:
        every.append(Switch("GGUF IQ4_NL", "rounded and back", around=partial(rounded_to, "IQ4_NL", False, ggml)))
        for kind, other in K_TYPES.items():
            if taking:
                mixed = f"rows of {' and '.join(taking)}; {other} in rows of {others}"
                every.append(Switch(f"GGUF {kind} file", mixed, around=partial(rounded_to, kind, False, ggml)))
            across = "in all rows, across their ends"
            every.append(Switch(f"GGUF {kind}", across, around=partial(rounded_to, kind, True, ggml)))
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


def compared(model: str, switch: Switch, shown: list[Tensor], plain: list[Tensor], asked: list[Any]) -> Row:
    """A row of the table: how these clips compare with the plain ones."""
    how = switch.how
    if all(torch.equal(a, b) for a, b in zip(shown, plain, strict=True)):
        if switch is not PLAIN and "step cache" not in switch.name:
            raise RuntimeError(f"{switch.name} changed nothing")
        how = "" if switch is PLAIN else "no step was alike enough"
    score, pairs = scores(shown, asked), list(zip(shown, plain, strict=True))
    noise = sum(min(psnr(*pair), EQUAL) for pair in pairs) / len(pairs)
    alike = sum(ssim(*pair) for pair in pairs) / len(pairs)
    row = {"model": model, "switch": switch.name, "how": how, "prompts": len(asked)}
    row |= {name: round(score[key], 3) for name, key in (("right", "all"), ("shape", "shape"), ("motion", "motion"))}
    return row | {"psnr_db": round(noise, 2), "ssim": round(alike, 4)}


def rows(prompts: int, only: tuple[str, ...], models: tuple[str, ...], ggml: str) -> Iterator[Row]:
    """A row per model and switch; the strips of each model are kept for the page."""
    asked, library = chosen_scenes(prompts), Path(ggml) if ggml else None
    for choice, folder in demo_models().items():
        chosen = any(text in choice for text in models)
        plain = clips(folder, PLAIN, asked if chosen else asked[:STRIP])
        strips = STRIPS[choice] = {PLAIN.name: strip(plain)}
        if chosen:
            yield compared(choice, PLAIN, plain, plain, asked)
        for switch in switches(load(LoadRequest(folder, precision="fp32", device="cpu")), library):
            whole = chosen and any(text in switch.name for text in only)
            try:
                shown = clips(folder, switch, asked if whole else asked[:STRIP])
            except UnsupportedError as error:
                print(f"{choice}, {switch.name}: {error}", flush=True)
                continue
            strips[switch.name] = strip(shown)
            if whole:
                yield compared(choice, switch, shown, plain, asked)


STRIPS: dict[str, dict[str, Tensor]] = {}  # by model and switch, of the last run


def write_page(_rows: list[Row]) -> None:
    """Write the tables of ``docs/quality.md``, of the newest row of each switch, and the strips."""
    known = {(row["model"], row["switch"]): row for row in known_rows("quality")}
    for model, folder in demo_models().items():
        switched = list(STRIPS[model])
        drawing.save_sheet(list(STRIPS[model].values()), switched, DOCS / f"images/quality_{folder.name}.webp")
        lines = [line(known[model, name]) for name in switched if (model, name) in known]
        write_table("quality.md", model, ("switch", "how", "right", "shape", "motion", "PSNR dB", "SSIM"), lines)


def line(row: dict[str, str]) -> list[str]:
    """The cells of a row of the page."""
    shares = [f"{float(row[key]):.0%}" for key in ("right", "shape", "motion")]
    noise = "equal" if float(row["psnr_db"]) == EQUAL else f"{float(row['psnr_db']):.1f}"
    return [row["switch"], row["how"], *shares, noise, f"{float(row['ssim']):.3f}"]


def stored_rows(families: tuple[str, ...]) -> Iterator[Row]:
    """A row per family and format of stored products."""
    for family in families:
        for choice in ("int8", "fp8"):
            pipeline = opened(family, precision="fp32", weights=choice)
            plain = clip(pipeline, FRAMES[family])
            count, restore = multiply_as_stored(pipeline.parts.read("transformer"), (choice,))
            quick = clip(pipeline, FRAMES[family])
            restore()
            if not count or torch.equal(quick, plain):
                raise RuntimeError(f"{family}: stored products of {choice} changed nothing")
            row = {"model": f"tiny {family}", "choice": f"stored products {choice}", "how": "torch's product on CPU"}
            yield row | {"steps": STEPS, "psnr_db": round(psnr(quick, plain), 2), "ssim": round(ssim(quick, plain), 4)}


def packed_rows(prompts: int, models: tuple[str, ...], stored: tuple[str, ...]) -> Iterator[Row]:
    """A row per model that ships and way to store its transformer, unpacked first."""
    asked = chosen_scenes(prompts)
    for choice, folder in demo_models().items():
        for weights in stored if any(text in choice for text in models) else ():
            drawn, switch = folder, Switch(weights, load={"weights": weights} if weights in PACKED else {})
            if weights in FROM_FILES:
                drawn = packed_anew(folder, weights)
            with mock.patch("anygpu.pipelines.pipeline.DEMOS", drawn.parent):
                score = scores(clips(drawn, switch, asked), asked)
            right = {name: round(score[key], 3) for name, key in (("right", "all"), ("shape", "shape"))}
            yield {"model": choice.removeprefix("demo: "), "weights": weights, "prompts": prompts, **right}


def packed_anew(folder: Path, weights: str) -> Path:
    """A copy of the demo models' ``folder`` whose transformer is stored as ``weights``."""
    copy = shutil.copytree(folder.parent, SCRATCH / weights, dirs_exist_ok=True) / folder.name
    [file] = weight_files(copy / "transformer", "transformer")
    whole = described(weight_files(folder / "transformer", "transformer"))
    file_as(file, read_tensors(whole, torch.float32, lambda _: None), weights)
    return copy


def write_packed(_rows: list[Row]) -> None:
    """Write the table of what the shipped models draw from packed weights."""
    known = {(row["model"], row["weights"]): f"{float(row['right']) * 100:.0f}" for row in known_rows("packed_draws")}
    lines = [
        [model, *(known.get((model, weights), "") for weights in (*PACKED, *FROM_FILES))]
        for model in dict.fromkeys(model for model, _ in known)
    ]
    head = ("right of 100", "unpacked, fp16", *PACKED[1:], *FROM_FILES)
    write_table("quality.md", "packed", head, lines)


def clip(pipeline: Any, frames: int, side: int = 128) -> Tensor:
    """Frames (F, H, W, 3) of a tiny model."""
    settings = SampleSettings(side, side, frames, STEPS, 7, cfg=1.0)
    request = PromptRequest("a red fox walks through fresh snow")
    with torch.no_grad():
        _, latents = sampled_latents(pipeline, request, settings, FramePackSettings(13 / 30, 2))
        return stages.decode(pipeline, latents, Silent())


def strip(shown: list[Tensor]) -> Tensor:
    """Some clips side by side, for the sheet."""
    return torch.cat(shown[:STRIP], dim=2)


def lazy_rows(models: tuple[str, ...], offload: str) -> Iterator[Row]:
    """A row per model."""
    import torch_xla
    from simulated.test_families import CASES as CASES_OF_RUNS
    from simulated.test_families import rendered

    for name in models:
        case = CASES_OF_RUNS[name]
        here = rendered(opened(name, precision="fp32"), case)
        started = time.perf_counter()
        there = rendered(opened(name, precision="fp32", offload=offload, device=str(torch_xla.device())), case)
        seconds = time.perf_counter() - started
        apart = [float((one - other).abs().max()) for one, other in zip(here, there, strict=True)]
        yield {
            "torch_xla": torch_xla.__version__, "model": name, "offload": offload, "latents apart": f"{apart[0]:.1e}",
            "frames apart": f"{apart[1]:.1e}", "seconds": round(seconds, 1),
        }  # fmt: skip


def no_xla() -> str:
    """The reason why nothing can be compared here, or nothing."""
    return "" if find_spec("torch_xla") else "torch_xla is not installed"
