"""The demo models on a GPU: each draws its scene under every mode, precision and switch; the bar is what the CPU draws
in fp32. Memory on smaller cards is measured by `anygpu prove`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from anygpu.compat.transforms.compile import CompileSettings
from anygpu.paint.choices import demo_paint_models
from anygpu.paint.demo import PAIRS, painted_ring
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.pipelines.demo import MODELS as DEMOS
from anygpu.pipelines.demo.drawing import ASKED, SEED, drawn
from anygpu.pipelines.demo.scenes import Scene
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
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
PAINT, NEAR = "paint", 6 / 255  # mean difference of a picture that shows the same
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


DEMO_MODELS = (*sorted(path.name for path in DEMOS.iterdir()), PAINT)
CASES = [
    Case("demos_gpu", demo_rows, {"dry": False, "models": DEMO_MODELS}, "demos_gpu", page=demo_page, about=about,
         lacks=no_gpu, threads=0),
]  # fmt: skip
