"""Whole models on a GPU; memory on smaller cards is measured by `anygpu prove`.

`models_gpu`: upstream's forwards, fused kernels, torch.compile, and both, of whole transformers and decoders. Published
shapes with random weights; a step is one call of the transformer, timed by events, medians. Targets: LTX-Video at 6,144
tokens with kernels at least 1.30 of neither and 1.03 of compile; both at least 1.04 of compile on LTX-Video and Mochi,
nowhere below 1.00; HunyuanVideo's attention without its mask 1.8; LTX-Video's decode 1.5 at 55 dB.

`demos_gpu`: each demo model draws its scene under every mode, precision and switch; the bar is what the CPU draws in
fp32. ``--dry``: tiny sizes and demo models on the CPU.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.work import measured_pace
from anygpu.compat.transforms.compile import Compilation, CompileSettings
from anygpu.compat.transforms.fused import fuse
from anygpu.compat.transforms.fused_vae import fuse_vae
from anygpu.compat.transforms.order import replace_attention
from anygpu.paint.choices import demo_paint_models
from anygpu.paint.demo import PAIRS, painted_ring
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.pipelines.demo import MODELS as DEMOS
from anygpu.pipelines.demo.drawing import ASKED, SEED, drawn
from anygpu.pipelines.demo.scenes import Scene
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.speed import SpeedRequest
from runner import Row, data, in_turn, known_rows, machine, psnr, spent, write_table
from torch import Tensor, nn
from torch.nn import functional

ROUNDS, LEAST_ROUNDS, SECONDS = 20, 3, 20.0  # of a model: as many rounds as its seconds allow
FLUSH_BYTES = 512 * 2**20
FORMS = {"neither": (False, False), "kernels": (True, False), "compile": (False, True), "both": (True, True)}
BARS = data("bars")  # case, form, the other form, and how many times its speed is demanded
LEAST_PSNR = 55.0


MADE: dict[str, Callable[[Callable[..., Tensor], Any], Any]] = {  # kind of an input to what it is, of its shape
    "random": lambda some, shape: some(*shape),
    "hundreds": lambda some, shape: some(*shape).abs() * 100,
    "thousands": lambda some, shape: some(*shape).abs() * 1000,
    "middle": lambda some, shape: torch.full(shape, 500, device=some(1).device),
    "tokens": lambda some, shape: torch.ones(shape, dtype=torch.long, device=some(1).device),
    "mask": lambda some, shape: torch.ones(shape, dtype=torch.bool, device=some(1).device),
    "value": lambda _, value: tuple(value) if isinstance(value, list) else value,
}


@dataclass(frozen=True)
class Model:
    """A published transformer or VAE of diffusers: LTX-Video 121 frames 512 x 768, HunyuanVideo 61 frames 544 x 960,
    Mochi 84 frames 480 x 848.

    Args:
        small: the function of ``tiny.parts`` that makes a tiny one. given: what it is called with, as kind in ``MADE``,
            shape of the published and of the tiny model.
    """

    name: str
    cls: str
    small: str
    given: Mapping[str, tuple[str, Any, Any]]
    decodes: bool = False

    def make(self, tiny: bool) -> nn.Module:
        """The module, with the weights that its class begins with."""
        import diffusers
        from tiny import parts

        module: nn.Module = getattr(parts, self.small)() if tiny else getattr(diffusers, self.cls)()
        return module

    def inputs(self, tiny: bool, some: Callable[..., Tensor]) -> dict[str, Any]:
        """What it is called with; ``some`` makes random tensors."""
        return {name: MADE[kind](some, small if tiny else full) for name, (kind, full, small) in self.given.items()}


class Clock:
    """Milliseconds of a call, by events on a GPU, by the wall on a CPU; the cache is emptied before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flush = torch.empty(FLUSH_BYTES if device.type == "cuda" else 2**16, dtype=torch.uint8, device=device)

    def __call__(self, form: Callable[[], Any]) -> float:
        self.flush.zero_()
        if self.device.type != "cuda":
            return 1e3 * spent(form)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        form()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))


def prepared(model: Model, tiny: bool, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The module with small random weights, made on the device."""
    with device:
        module = model.make(tiny)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 1.0 / math.sqrt(max(2, parameter.shape[-1]))) if parameter.ndim > 1 else None
    return nn.Module.to(module.eval().requires_grad_(False), dtype)


def put_on(module: nn.Module, kernels: bool, graphs: Compilation | None, form: str, vae: bool = False) -> list[Any]:
    """The ways back from a form that ``module`` now has.

    Args:
        form: of the kernels, such as ``reference`` where nothing is launched.
    """
    undo: list[Callable[[], Any]] = []
    if kernels:
        done = (fuse_vae if vae else fuse)(module, form)
        if not done.points or done.left:
            raise RuntimeError(f"{type(module).__name__}: {done}")
        undo.append(done.restore)
    if not vae:
        undo.append(replace_attention(module, functional.scaled_dot_product_attention))
    if graphs is not None:
        undo.append(graphs.attach(module) or (lambda: None))
    return undo


def measured(model: Model, clock: Clock, tiny: bool, dtype: torch.dtype) -> Iterator[Row]:
    """A row per form; forms come in a new order each round, and compiling is not timed."""
    device = clock.device
    some = partial(_random, device=device, dtype=dtype)
    module, given = prepared(model, tiny, device, dtype), model.inputs(tiny, some)

    def call() -> Any:
        with torch.no_grad():
            if model.decodes:
                return module.decode(given["latents"], return_dict=False)[0]
            return module(**given, return_dict=False)[0]

    settings = CompileSettings(vae=model.decodes, backend="eager" if tiny else "inductor")
    graphs = {name: Compilation(settings) if compiled else None for name, (_, compiled) in FORMS.items()}
    times, results, names = {name: list[float]() for name in FORMS}, dict[str, Any](), list(FORMS)
    began = time.monotonic()
    for number in range((ROUNDS if not tiny else 2) + 1):
        if number == 1:
            began = time.monotonic()  # the first round compiles
        elif number > LEAST_ROUNDS and time.monotonic() - began > SECONDS:
            break
        for name in names:
            undo = put_on(module, FORMS[name][0], graphs[name], "reference" if tiny else "auto", model.decodes)
            result = call()  # the form's own kernels are warm again
            if name in results:
                times[name].append(clock(call))
            results.setdefault(name, result)
            while undo:
                undo.pop()()
        random.shuffle(names)
    expected = results["neither"]
    span = float(expected.float().max() - expected.float().min())  # has no peak of its own
    for name, row in rows_of(model.name, times).items():
        near = psnr(results[name], expected, span)
        short = [row["verdict"]] if row["verdict"] != "ok" else []
        if model.decodes and near < LEAST_PSNR:
            short.append(f"{near:.1f} dB, {LEAST_PSNR:.0f} demanded")
        if (compiled := graphs[name]) is not None and compiled.failure:
            short.append(str(compiled))
        yield row | {"psnr_db": round(near, 1), "verdict": "; ".join(short) or "ok"}


def rows_of(case: str, times: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """A row per form of ``case``, with the bars that it misses."""
    middle, found = {name: statistics.median(spent) for name, spent in times.items()}, {}
    for name, ms in middle.items():
        missed = [
            f"{middle[other] / ms:.2f} of {other}, {bar:.2f} demanded"
            for which, form, other, bar in BARS
            if which == case and form == name and middle[other] / ms < bar
        ]
        share = next(iter(middle.values())) / ms
        found[name] = {"case": case, "form": name, "ms": round(ms, 3), "over_first": round(share, 3)}
        found[name] |= {"psnr_db": "", "verdict": "; ".join(missed) or "ok"}
    return found


def attention(clock: Clock, tiny: bool, dtype: torch.dtype) -> Iterator[Row]:
    """HunyuanVideo's attention at 32,640 + 256 tokens, with upstream's mask of all tokens and without."""
    tokens = 64 if tiny else 32640 + 256
    q, k, v = (_random(1, 24, tokens, 128, device=clock.device, dtype=dtype) for _ in range(3))
    mask = torch.ones(1, 1, 1, tokens, dtype=torch.bool, device=clock.device)
    forms = {
        "masked": lambda: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        "no mask": lambda: functional.scaled_dot_product_attention(q, k, v),
    }
    yield from rows_of("HunyuanVideo attention", in_turn(forms, ROUNDS if not tiny else 2, clock)).values()


def _random(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def model_rows(dry: bool, dtype: str, only: str) -> Iterator[Row]:
    """A row per model and form, of the models with ``only`` in their names."""
    device, kind = torch.device("cpu" if dry else "cuda"), torch.bfloat16 if dry else getattr(torch, dtype)
    clock, facts, pace = Clock(device), facts_for(device), measured_pace(device, kind)
    known = {"device": facts.name, "driver": facts.driver, "dtype": str(kind).removeprefix("torch.")}
    known |= {"copy_gb_per_s": round(pace.memory / 1e9, 1), "product_tflop_per_s": round(pace.product / 1e12, 1)}
    yield from (known | row for row in attention(clock, dry, kind))
    for model in (Model(name, **given) for name, given in data("gpu_models").items() if only in name):
        try:
            yield from (known | row for row in measured(model, clock, dry, kind))
        except torch.OutOfMemoryError as error:
            print(f"{model.name}: skipped: {str(error).splitlines()[0]}")


def about() -> Row:
    """Date, GPU, driver and torch."""
    facts = facts_for()
    return {"date": machine()["date"], "gpu": facts.name, "driver": facts.driver, "torch": torch.__version__}


def page(_: list[Row]) -> None:
    """Write the table of all rows."""
    cells = [
        [row["case"], row["form"], row["ms"], f"{float(row['over_first']):.2f}×", row["psnr_db"], row["verdict"]]
        for row in known_rows("models_gpu")
    ]
    write_table("performance.md", "models_gpu", ["Case", "Form", "ms", "To the first", "dB", "Target"], cells)


SPEEDS = {"": SpeedRequest(), "off": SpeedRequest("off"), "compile": SpeedRequest(compile=CompileSettings())}
PAINT, NEAR = "paint", 6 / 255  # mean difference of a picture that shows the same
CELLS = ("largest_of_255", "mean_of_255", "again_of_255", "seconds_first", "seconds", "peak_mb")


def demo_rows(dry: bool, models: tuple[str, ...]) -> Iterator[Row]:
    """A row per demo model and mode: the largest and the mean difference to the CPU in fp32, of 255.

    Args:
        models: their folders; none for all, and paint.
    """
    every = models or (*sorted(path.name for path in DEMOS.iterdir()), PAINT)
    for number, model in enumerate(every):
        make, draw = _demo(model, ASKED[number % len(ASKED)])
        exact = draw(make(precision="fp32", device="cpu"))
        for name, given in data("modes").items():
            if "compile" in name and model != "ltx":
                continue  # minutes
            row: Row = {"model": model, "mode": name} | dict.fromkeys(CELLS, "")
            try:
                terms = {**given, "speed": SPEEDS[given.get("speed", "")]}
                pipeline = make(device="cpu" if dry else "cuda", **terms)
                seconds = [time.perf_counter()]
                clip, again = (_timed(seconds, draw, pipeline) for _ in range(2))
            except Exception as error:  # each cell is a finding
                yield row | {"verdict": f"{type(error).__name__}: {error}".splitlines()[0]}
                continue
            apart, moved = (clip - exact).abs(), (again - clip).abs()
            near = float(apart.mean()) < NEAR
            yield row | {
                "largest_of_255": round(255 * float(apart.max()), 3),
                "mean_of_255": round(255 * float(apart.mean()), 4),
                "again_of_255": round(255 * float(moved.max()), 4),
                "seconds_first": round(seconds[1] - seconds[0], 2),
                "seconds": round(seconds[2] - seconds[1], 2),
                "peak_mb": round(max(cost.peak_bytes for cost in pipeline.offloader.memory_stats.stages) / 1e6, 1),
                "verdict": "ok" if near else "another picture",
            }


def _demo(model: str, scene: Scene) -> tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]:
    """What loads a demo model, from terms of the request, and what draws with it."""
    if model != PAINT:
        return (
            lambda **terms: load(LoadRequest(DEMOS / model, **terms)),
            lambda pipeline: drawn(pipeline, scene.caption, SEED).float(),
        )
    folder = next(iter(demo_paint_models().values()))
    return (
        lambda **terms: load_paint(PaintRequest(folder, **{name: terms[name] for name in terms if name != "speed"})),
        lambda pipeline: painted_ring(pipeline, PAIRS[0]).views.float(),
    )


def _timed(seconds: list[float], draw: Callable[[Any], torch.Tensor], pipeline: Any) -> torch.Tensor:
    result = draw(pipeline)
    seconds.append(time.perf_counter())
    return result


def demo_page(_: list[Row]) -> None:
    """Write the table of all rows: differences to the CPU by mode."""
    cells: dict[str, dict[str, str]] = {}
    for row in known_rows("demos_gpu"):
        told = row["largest_of_255"] if row["verdict"] == "ok" else row["verdict"]
        cells.setdefault(row["mode"], {})[row["model"]] = told
    models = list(dict.fromkeys(model for mode in cells.values() for model in mode))
    rows = [[mode, *(by_model.get(model, "") for model in models)] for mode, by_model in cells.items()]
    write_table("performance.md", "demos_gpu", ["Mode", *(f"`{model}`" for model in models)], rows)
