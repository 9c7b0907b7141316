"""Forecasts beside published times of other people's runs: `field.csv`, of which half of the sources are sealed.

A row is forecast as its run was: the published configuration on the card as its driver names it, in the dtype and by
the kernel of attention that the row states or assumes; eager, or with fused norms where its program is of FUSES. Packed
weights are made dense at each use. Weights that do not fit are copied again for each forward, which waits for them:
what a forward needs stays free, or PRESERVED by FramePack's own program on cards below 60 GiB. `class` 1 states all, 2
leaves one field open, 3 more or only says "about"; `excluded` rows are kept with their reason and not forecast. Shares
and bounds may be fitted to the rows `fit`; those `sealed` are looked at once per release.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from statistics import median, quantiles

import torch
from anygpu.compat.decision import Decision
from anygpu.compat.device.facts import GIBIBYTE, DeviceFacts
from anygpu.compat.device.rates import published_rates
from anygpu.compat.memory.parts import PackedForm, PartBytes
from anygpu.compat.transforms.attention import Attention
from anygpu.compat.transforms.step_cache import StepCacheSettings
from anygpu.kernels.library import TRITON
from anygpu.pipelines.base import SampleSettings
from anygpu.pipelines.forecast import counts
from anygpu.pipelines.forecast.seconds import SAMPLING, planned_run
from anygpu.pipelines.forecast.times import PUBLISHED_OFF, link_of, stage_time, time_forecast
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.settings import snap
from anygpu.pipelines.sizes import TRANSFORMER, Size, sampling_bytes
from anygpu.pipelines.speed import Speed, SpeedRequest
from runner import Row, known_rows, write_table
from times import opened, published

FIELD = "../field"  # a table beside the results: its rows are published times
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}  # else bf16
OLD = ("pascal", "gtx16", "p100", "volta", "turing", "t4")  # whose SDPA is the memory-efficient kernel
EXCLUDED, SEALED = "excluded", "sealed"
ITEMSIZES = {"fp32": 4}
PACKED = {  # codec, values of a block, bytes of it, and the dtype that holds it
    "fp8": ("", 1, 1, torch.float8_e4m3fn),
    "Q3_K_S": ("Q3_K", 256, 110, torch.uint8),
    "Q3_K_M": ("Q3_K", 256, 110, torch.uint8),
    "Q4_0": ("Q4_0", 32, 18, torch.uint8),
}
DEMO, DEMO_BELOW, PRESERVED = "lllyasviel/FramePack", 60 * GIBIBYTE, 6 * GIBIBYTE  # its demo_gradio.py
CONTEXT = GIBIBYTE // 2  # of the driver
FUSES = ("SGLang",)  # norms, modulation and rotary: sgl-project/sglang#14717, #21440


@cache
def model(family: str, variant: str) -> Pipeline:
    """A family at its published configuration, on no device."""
    pipeline = published(opened(family), whole=True)
    if variant == "13B":
        layouts = json.loads((pipeline.spec.folder / "transformer.json").read_text(encoding="utf-8"))
        large = max((each["config"] for each in layouts), key=lambda config: int(config["num_layers"]))
        pipeline = replace(pipeline, model=replace(pipeline.model, configs={**pipeline.configs, "transformer": large}))
    return pipeline


@cache
def transformer_bytes(family: str, variant: str, weights: str) -> PartBytes:
    """The bytes of a transformer whose linear layers are stored as a row says, and the forms of these."""
    module = counts.built(
        pipeline := model(family, variant), TRANSFORMER, pipeline.configs[TRANSFORMER], torch.bfloat16
    )
    total, forms = 0, Counter[PackedForm]()
    for layer in module.modules():
        own = sum(parameter.numel() for parameter in layer.parameters(recurse=False)) * ITEMSIZES.get(weights, 2)
        if isinstance(layer, torch.nn.Linear) and weights in PACKED:
            codec, values, held, dtype = PACKED[weights]
            rows, columns = layer.weight.shape
            own = rows * columns // values * held
            stored = ((rows, columns // values * held // dtype.itemsize), dtype)
            forms[codec, stored, (), 0, ((rows, columns), torch.bfloat16)] += 1
        total += own
    return PartBytes(total=total, block=0, layer=0, forms=tuple(forms.items()))


def copied_again(row: dict[str, str], pipeline: Pipeline, size: Size) -> int:
    """Bytes of the transformer that a row's card has no room for, so that each forward copies them."""
    memory, total = float(row["memory_gb"]) * GIBIBYTE, pipeline.weights[TRANSFORMER].total
    demo = row["source"].startswith(DEMO) and memory < DEMO_BELOW
    room = memory - (PRESERVED if demo else CONTEXT + sampling_bytes(pipeline, size))
    return int(max(0, total - max(0, room)))


def recipe_known(row: dict[str, str]) -> bool:
    """Whether a row's source says all that a forecast needs of an exact run, but for what its "whole" time holds."""
    assumed = {each.partition("=")[0] for each in filter(None, row["assumed"].split(";"))}
    exact = row["step_cache"] == "none" and row["attention"] != "sage"
    return exact and assumed <= {"timed"} and not row["note"].startswith(("about", "around", "nearly"))


def forecast(row: dict[str, str]) -> float:
    """Seconds of the part of a run that a row times."""
    said = {**dict(each.split("=") for each in filter(None, row["assumed"].split(";")) if "=" in each)}
    said = {**said, **{name: value for name, value in row.items() if value}}
    pipeline, dtype = model(row["family"], row["variant"]), DTYPES.get(said.get("weights", ""), torch.bfloat16)
    size = int(float(said["memory_gb"]) * GIBIBYTE)
    rates = published_rates(row["card"], size) or published_rates(row["card"])  # cards with more memory soldered on
    if rates is None:
        return math.nan
    facts = DeviceFacts(torch.device("cuda"), "cuda", "", "cuda-sm80+", rates.name, 0, "", link=rates.link)
    sdpa = "native_efficient" if rates.generation in OLD else "native_flash"
    attention = Attention({"sdpa": sdpa}.get(said["attention"], said["attention"]))
    cached = StepCacheSettings() if said.get("step_cache", "none") != "none" else None
    forms = {TRANSFORMER: TRITON} if row["software"] in FUSES else {}
    speed = Speed(SpeedRequest(), forms, Decision("kernels", "off"), attention)
    fields = ("residual", "compute", "transformer", "vae", "text")
    precision = replace(pipeline.precision, **dict.fromkeys(fields, dtype))
    pipeline = replace(
        pipeline,
        device=replace(pipeline.device, facts=facts, precision=precision, probes=None),
        plan=replace(pipeline.plan, speed=speed, step_cache=cached),
    )
    steps, cfg = int(said["steps"]), float(said.get("cfg", 6.0))
    grid = snap(pipeline.spec, int(said["width"]), int(said["height"]), int(said["frames"]))
    stg = -1.0 if said.get("calls", "3") == "3" else 0.0  # a third forward of each step
    settings = SampleSettings(grid.width, grid.height, grid.frames, steps=steps, cfg=cfg, stg=stg)
    weights = transformer_bytes(row["family"], row["variant"], said.get("weights", "bf16"))
    pipeline = replace(pipeline, model=replace(pipeline.model, weights={**pipeline.weights, TRANSFORMER: weights}))
    run = planned_run(pipeline, Size(grid.width, grid.height, grid.frames, cfg > 1.0), settings)
    batches = counts.batches_of(pipeline, run.settings)
    if said.get("calls", "") not in ("", str(max(map(sum, batches)))):
        raise ValueError(f"row {row['id']} runs {said['calls']} forwards of a step, not {max(map(sum, batches))}")
    calls = sum(map(len, batches)) * counts.sections_of(pipeline, run.size)
    calls *= 1 if cached is None else 1 - cached.skipped(steps)  # a step that is skipped needs no weights
    again = calls * copied_again(row, pipeline, run.size) / link_of(facts, [])
    if row["timed"] == "whole":
        return time_forecast(pipeline, run, "none").seconds + again
    sampling = stage_time(pipeline, SAMPLING, run, "none", stays=True).seconds + again
    return sampling / (steps if row["timed"] == "step" else 1)


def rows(sealed: bool) -> Iterator[Row]:
    """The rows with their forecast and its ratio to the published seconds.

    Args:
        sealed: also those of the sealed sources.
    """
    for row in known_rows(FIELD):
        if row["class"] == EXCLUDED or (row["split"] == SEALED and not sealed):
            yield dict(row)
            continue
        told = float(row["step_seconds"] if row["timed"] == "step" else row["seconds"])
        seconds = forecast(row)
        yield {**row, "forecast": f"{seconds:.4g}", "ratio": f"{seconds / told:.2f}"}


def page(done: list[Row]) -> None:
    """Write the table of ratios by maker and generation."""
    groups = defaultdict(list)
    for row in done:
        if row["ratio"] not in ("", "nan"):
            rates = published_rates(row["card"])
            recipe = f"{row['split']}, exact run of known recipe" if recipe_known(row) else ""
            of = (rates.generation if rates else "", f"class {row['class']}", row["split"], recipe, "all")
            for group in filter(None, of):
                groups[group].append(float(row["ratio"]))
    order = sorted(groups, key=lambda name: (name == "all", name[:3] in ("fit", "sea"), name.startswith("class"), name))
    write_table("performance.md", "field", HEAD, ([name, *spread(groups[name])] for name in order), end="/field")


HEAD = ["Cards", "Rows", "Forecast / published: median", "Middle half", "Range", "Inside the forecast's bounds"]


def spread(ratios: Iterable[float]) -> list[str]:
    """Number, median, quartiles, ends, and the share inside the bounds."""
    ratios = sorted(ratios)
    first, _, third = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    inside = sum(1 / PUBLISHED_OFF <= ratio <= PUBLISHED_OFF for ratio in ratios) / len(ratios)
    ends = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    return [str(len(ratios)), f"{median(ratios):.2f}", f"{first:.2f} to {third:.2f}", ends, f"{inside:.0%}"]
