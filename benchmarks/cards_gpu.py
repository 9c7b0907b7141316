"""Whole runs on a GPU: the demo models in every mode beside the CPU, and models of published shapes on smaller cards.

`demos_gpu`: each demo model draws its scene under every mode, precision and switch; the bar is what the CPU draws in
fp32. `limited_gpu`: another process takes the card's memory but for as much as a card of 6 to 24 GB has free, then
models of the published shapes with random weights encode, sample and decode; peaks and seconds beside the forecast.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import published
import torch
from anygpu.compat.device.facts import free_bytes
from anygpu.compat.transforms.compile import CompileSettings
from anygpu.paint.choices import demo_paint_models
from anygpu.paint.demo import PAIRS, painted_ring
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.pipelines import stages
from anygpu.pipelines.base import FramePackSettings, ImageRequest, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.demo import MODELS as DEMOS
from anygpu.pipelines.demo.drawing import ASKED, SEED, drawn
from anygpu.pipelines.demo.scenes import Scene
from anygpu.pipelines.forecast.memory import forecast
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sizes import Size
from anygpu.pipelines.speed import SpeedRequest
from runner import Case, Row, known_rows, machine, no_gpu, write_table

MODES: dict[str, dict[str, Any]] = {  # name of a row to terms of the load request
    "fp32": {"precision": "fp32", "offload": "none"},
    "fp32, model": {"precision": "fp32", "offload": "model"},
    "fp32, group": {"precision": "fp32", "offload": "group"},
    "fp32, sequential": {"precision": "fp32", "offload": "sequential"},
    "bf16": {"precision": "bf16"},
    "bf16, group": {"precision": "bf16", "offload": "group"},
    "fp16-safe": {"precision": "fp16-safe"},
    "fp16-safe, no kernels": {"precision": "fp16-safe", "speed": SpeedRequest("off")},
    "fp16-safe, sequential": {"precision": "fp16-safe", "offload": "sequential"},
    "bf16, compile, group": {
        "precision": "bf16", "offload": "group", "speed": SpeedRequest(compile=CompileSettings()),
    },
}  # fmt: skip
RUNS = {  # model to its size in a shipped workflow, and cards in GB; the first ones matter most
    "ltx 2B": (Size(704, 480, 97, True), (6, 8)),
    "hunyuan_video": (Size(848, 480, 73), (8, 12)),
    "ltx 13B": (Size(704, 480, 97, True), (8,)),
    "mochi": (Size(848, 480, 85, True), (8,)),
    "hunyuan_video_15": (Size(848, 480, 121, True), (8,)),
    "framepack": (Size(640, 608, 37), (6,)),
}
STEPS, DEVIATION, BLOCK = 3, 0.02, 2**24  # of random weights: their scale, and how many before they repeat
PROMPT = "a red fox in the snow, seen from the side, slow camera, morning light"
GIB, PAINT, NEAR = 2**30, "paint", 6 / 255  # mean difference of a picture that shows the same
COSTS = ("size", "peak_gib", "forecast_gib", "ahead_gib", "seconds", "forecast_seconds", "reading_seconds", "moved_gb")
CELLS = ("largest_of_255", "mean_of_255", "again_of_255", "seconds_first", "seconds", "peak_mb")


def demo_rows(dry: bool, models: tuple[str, ...]) -> Iterator[Row]:
    """A row per demo model and mode: the largest and the mean difference to the CPU in fp32, of 255."""
    for number, model in enumerate(models):
        make, draw = _demo(model, ASKED[number % len(ASKED)])
        exact = draw(make(precision="fp32", device="cpu"))
        for name, terms in MODES.items():
            if "compile" in name and model != "ltx":
                continue  # minutes
            row: Row = {"model": model, "mode": name} | dict.fromkeys(CELLS, "")
            try:
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


def limited_rows(dry: bool, models: tuple[str, ...], seconds: int) -> Iterator[Row]:
    """A row per model, card and stage; no run is begun after so many seconds."""
    began = time.monotonic()
    for model in models:
        size, cards = RUNS[model]
        with tempfile.TemporaryDirectory() as folder:
            for card in cards:
                if time.monotonic() - began > seconds:
                    print(f"{model} on {card} GB: skipped: {seconds} s are over")
                    continue
                asked = Size(128, 128, 9, size.guided) if dry else size
                try:
                    with small_card(None if dry else published.room_of(card)):
                        yield from _limited(model, asked, card, Path(folder), "cpu" if dry else "cuda")
                except Exception as error:  # a run that fails is a row
                    known = {"model": model, "card_gb": card, "stage": "", "offload": ""}
                    fault = f"{type(error).__name__}: {error}".splitlines()[0]
                    yield known | dict.fromkeys(COSTS, "") | {"verdict": fault}


def _limited(model: str, size: Size, card: int, folder: Path, device: str) -> Iterator[Row]:
    """Rows of one run, its second sampling's among them: the first also builds kernels."""
    family, _ = published.MODELS[model]
    demo = DEMOS / ("hunyuan_video" if family == "framepack" else family)
    tokenizers = {kind: demo / tool for tool, kind in FAMILIES[family].files.tokenizers.items()}
    pipeline = published.composed(
        model, folder, write=random_weights, tokenizers=tokenizers, device=torch.device(device), state=folder / "state"
    )
    room, progress = free_bytes(pipeline.facts.device), Silent()
    predicted = forecast(pipeline, size, room=room)
    needs = {need.name: need for need in predicted.stages}
    settings = SampleSettings(size.width, size.height, size.frames, steps=STEPS)
    with torch.no_grad():
        image = None
        prompt = stages.encode_prompt(pipeline, PromptRequest(PROMPT, "blurry" if size.guided else ""), progress)
        if pipeline.spec.recipes.sections:
            picture = torch.rand(1, size.height, size.width, 3)
            image = stages.encode_image(pipeline, ImageRequest(picture, size.width, size.height), "stretch", progress)
            framepack = FramePackSettings(size.frames / 30)
            sample: Callable[[], Any] = partial(
                stages.sample_framepack, pipeline, prompt, image, settings, framepack, progress
            )
        else:
            sample = partial(stages.sample, pipeline, prompt, image, settings, progress)
        sample()
        frames = stages.decode(pipeline, sample(), progress)
    if not torch.isfinite(frames).all():
        raise ValueError("frames are not finite")
    for cost in pipeline.offloader.memory_stats.stages:
        need = needs.get(cost.stage)
        yield {
            "model": model, "card_gb": card, "stage": cost.stage, "offload": cost.mode,
            "size": f"{size.width}x{size.height}x{size.frames}", "peak_gib": round(cost.peak_bytes / GIB, 2),
            "forecast_gib": "" if need is None else round(need.total / GIB, 2),
            "ahead_gib": "" if need is None else round(need.ahead / GIB, 2),
            "seconds": round(cost.own_seconds, 2), "forecast_seconds": round(cost.modelled_seconds, 2),
            "reading_seconds": round(cost.reading_seconds, 2), "moved_gb": round(cost.moved_bytes / 1e9, 2),
            "verdict": "ok",
        }  # fmt: skip


def random_weights(path: Path, tensors: Any) -> Path:
    """A safetensors file of these shapes in bf16 whose weights are random; one that is there stays."""
    if path.exists():
        return path
    published.sparse(path, tensors)
    block = memoryview((DEVIATION * torch.randn(BLOCK)).bfloat16().view(torch.uint8).numpy())
    with path.open("r+b") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        left = path.stat().st_size - file.tell()
        while left:
            left -= file.write(block[: min(left, len(block))])
    return path


@contextmanager
def small_card(room: int | None) -> Iterator[None]:
    """The card with ``room`` bytes free, None for all: another process has the rest."""
    if room is None:
        yield
        return
    torch.zeros(1, device="cuda") @ torch.zeros(1, device="cuda")  # the context and libraries of this process are there
    torch.cuda.empty_cache()
    context = get_context("spawn")
    taken, done = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(room, taken, done), daemon=True)
    holder.start()
    try:
        if not taken.wait(60):
            raise TimeoutError("the card's memory was not taken within a minute")
        yield
    finally:
        done.set()
        holder.join(30)
        holder.kill()


def _hold(room: int, taken: Any, done: Any) -> None:
    """Take all but ``room`` bytes of the card until ``done``."""
    torch.zeros(1, device="cuda")
    kept = torch.empty(max(0, torch.cuda.mem_get_info()[0] - room), dtype=torch.uint8, device="cuda")
    taken.set()
    done.wait()
    del kept


def about() -> Row:
    """Date, GPU, driver and torch."""
    from anygpu.compat.device.facts import facts_for

    facts = facts_for()
    return {"date": machine()["date"], "gpu": facts.name, "driver": facts.driver, "torch": torch.__version__}


def demo_page(_: list[Row]) -> None:
    """Write the table of all rows: differences to the CPU by mode."""
    cells: dict[str, dict[str, str]] = {}
    for row in known_rows("demos_gpu"):
        told = row["largest_of_255"] if row["verdict"] == "ok" else row["verdict"]
        cells.setdefault(row["mode"], {})[row["model"]] = told
    models = list(dict.fromkeys(model for mode in cells.values() for model in mode))
    rows = [[mode, *(by_model.get(model, "") for model in models)] for mode, by_model in cells.items()]
    write_table("performance.md", "demos_gpu", ["Mode", *(f"`{model}`" for model in models)], rows)


def limited_page(_: list[Row]) -> None:
    """Write the table of all rows."""
    head = ["Model", "Card", "Stage", "Offload", "Peak GiB", "Forecast GiB", "Seconds", "Forecast"]
    rows = [
        [row["model"], f"{row['card_gb']} GB", row["stage"], row["offload"], row["peak_gib"],
         " + ".join(filter(None, (row["forecast_gib"], row["ahead_gib"]))), row["seconds"], row["forecast_seconds"]]
        for row in known_rows("limited_gpu")
    ]  # fmt: skip
    write_table("performance.md", "limited_gpu", head, rows)


DEMO_MODELS = (*sorted(path.name for path in DEMOS.iterdir()), PAINT)
KIND: dict[str, Any] = {"about": about, "lacks": no_gpu, "gpu": True, "threads": 0}
CASES = [
    Case("demos_gpu", demo_rows, {"dry": False, "models": DEMO_MODELS}, "demos_gpu", page=demo_page, **KIND),
    Case(
        "limited_gpu", limited_rows, {"dry": False, "models": tuple(RUNS), "seconds": 240}, "limited_gpu",
        page=limited_page, **KIND,
    ),
]  # fmt: skip
