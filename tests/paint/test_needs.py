"""What painting needs at full size, counted on the meta device, and forecast by formulas that must agree with it."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import published
import pytest
import torch
from anygpu.compat.memory.offloader import MODES
from anygpu.compat.memory.parts import PartBytes
from anygpu.compat.memory.statistics import saved_stages
from anygpu.compat.transforms.attention import Attention, budget_for
from anygpu.paint.forecast import MARGIN, paint_needs, planned_run
from anygpu.paint.loading import PaintRequest, load_paint, paint_bytes
from anygpu.paint.networks.published import shape_for
from anygpu.paint.networks.unet import STABLE_DIFFUSION_2
from anygpu.paint.sampling.delight import DelightSettings, delight_image
from anygpu.paint.sampling.painting import PaintSettings, paint_views

from paint import stored
from paint.counting import GIBIBYTE, HALF, SAFE, stages
from paint.test_offloader import INPUTS

COUNTED = {  # stage of a forecast to what was counted
    "encoding": "encode a picture",
    "reference": "look at the reference",
    "painting": "a step",
    "delighting": "a step",
    "decoding": "decode a view",
}
PARTS = {"unet": "a step", "reference": "look at the reference", "vae": "decode a view"}
CASES = [
    pytest.param("paint", 512, 6, 2, HALF, 3.0, id="v2-0"),
    pytest.param("paint", 512, 6, 1, HALF, 3.0, id="turbo"),
    pytest.param("paint", 512, 6, 2, SAFE, 3.0, id="v2-0 fp16-safe"),
    pytest.param("paint", 1024, 6, 2, HALF, 4.0, id="v2-0 second pass"),
    pytest.param("paint", 768, 12, 2, HALF, 4.5, id="v2-0, 12 views of 768"),
    pytest.param("paint_pbr", 512, 6, 2, HALF, 4.0, id="PBR"),
    pytest.param("paint_pbr", 768, 12, 2, HALF, 6.5, id="PBR, 12 views of 768"),
    pytest.param("delight", 512, 1, 1, HALF, 3.0, id="delight"),
    pytest.param("delight", 1024, 1, 2, HALF, 3.5, id="delight, guided, 1024"),
]


def pipeline(kind, dtypes, weights, mode="model", attention="", facts=published.CARD):
    """What a forecast reads of a loaded pipeline."""
    precision = SimpleNamespace(compute=dtypes.compute, residual=dtypes.residual, vae=dtypes.compute)
    variant = {"paint": "v2-0", "paint_pbr": "v2-1", "delight": "v2-0"}[kind]
    options = SimpleNamespace(host_weights=SimpleNamespace(shared=False))
    offloader = SimpleNamespace(mode=mode, options=options, device_of=lambda part: torch.device("cpu"))
    return SimpleNamespace(
        family=kind,
        variant=variant,
        is_demo=False,
        precision=precision,
        attention=attention,
        facts=facts,
        shape=shape_for(kind, STABLE_DIFFUSION_2),
        offloader=offloader,
        weights=weights,
    )


@pytest.fixture(scope="module")
def counter() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: where torch has compiled, a sum of residuals is alive for one operation longer."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def needs_of(pipeline, size=0, views=0, mode="", guided=None):
    return paint_needs(pipeline, planned_run(pipeline, size, views, guided=guided), mode)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "pixels", "views", "rows", "dtypes", "limit"), CASES)
def test_every_stage_at_full_size_is_forecast_and_fits_with_its_weights(
    counter, kind, pixels, views, rows, dtypes, limit
):
    """One part at a time, as offload ``model`` has it: on 8 GB v2-0 fits, and 3 GB of it are enough."""
    counted = counter.submit(stages, kind, pixels, views, dtypes, rows).result()
    forecast_fits(counted, kind, pixels, views, rows, dtypes, limit)


def test_turbo_at_full_size_is_forecast():
    forecast_fits(stages("paint", 512, 6, HALF, 1), "paint", 512, 6, 1, HALF, 3.0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "pixels", "views", "rows", "dtypes", "gigabytes"),
    [
        pytest.param("paint", 512, 6, 1, HALF, 8, id="turbo, 8 GB"),
        *(
            pytest.param("paint", 512, 6, 1, HALF, gigabytes, id=f"turbo, {gigabytes} GB", marks=pytest.mark.full)
            for gigabytes in (4, 16)
        ),
        pytest.param("paint", 512, 6, 2, SAFE, 8, id="v2-0 fp16-safe", marks=pytest.mark.full),
        pytest.param("paint_pbr", 512, 6, 2, HALF, 8, id="PBR", marks=pytest.mark.full),
        pytest.param("delight", 512, 1, 1, HALF, 8, id="delight", marks=pytest.mark.full),
    ],
)
def test_scores_of_attention_in_chunks_are_forecast(kind, pixels, views, rows, dtypes, gigabytes):
    facts = replace(published.CARD, total_bytes=gigabytes * GIBIBYTE)
    attention = Attention("native_math", budget_for(facts))
    counted = stages(kind, pixels, views, dtypes, rows, attention)
    forecast_fits(counted, kind, pixels, views, rows, dtypes, 8.0, attention=attention.label, facts=facts)


def forecast_fits(counted, kind, pixels, views, rows, dtypes, limit, **more):
    weights = {part: PartBytes(counted[stage][1], 0, 0) for part, stage in PARTS.items() if stage in counted}
    needs = needs_of(pipeline(kind, dtypes, weights, **more), pixels, views, guided=rows - 1)
    assert {COUNTED[need.name] for need in needs} == set(counted)
    for need in needs:
        peak, held = counted[COUNTED[need.name]]
        assert (peak + held) / GIBIBYTE <= limit, need.name
        assert abs(need.total / (peak + held) - 1) < 0.15, f"{need.name} forecast {need.total}, is {peak + held}"
        asked = int(MARGIN * need.activations)
        assert peak <= asked <= 1.5 * peak, f"{need.name} asks for {asked}, takes {peak}"


def test_a_unet_moves_by_block_or_by_layer_and_other_parts_by_layer():
    named = {"body.down.0.a.weight": 3, "body.down.0.a.bias": 1, "body.down.0.b.weight": 5, "body.down.1.c.weight": 7}
    size = paint_bytes({**named, "text": 2})
    assert size == PartBytes(total=18, block=9, layer=7)
    assert [size.resident(mode, "unet") for mode in MODES] == [18, 18, 9, 7]
    assert [size.resident(mode, "vae") for mode in MODES] == [18, 18, 7, 7]
    assert [size.resident(mode, "image_encoder") for mode in MODES] == [18] * 4


@pytest.mark.full
def test_more_stays_where_offload_is_faster(paint_folder, delight_folder):
    pipeline = load_paint(PaintRequest(paint_folder, precision="fp32", device="cpu"))
    plans = {mode: needs_of(pipeline, 64, 2, mode=mode) for mode in MODES}
    names = ["encoding", "reference", "painting", "decoding"]
    assert all([need.name for need in plan] == names for plan in plans.values())
    painting = [plan[2].total for plan in plans.values()]
    assert painting[0] > painting[1] > painting[2] >= painting[3], "the learned text is the largest layer and block"
    sizes = {part: sum(t.nbytes for t in pipeline.parts.read(part).state_dict().values()) for part in pipeline.weights}
    assert sizes == {part: size.total for part, size in pipeline.weights.items()}
    assert [need.kept for need in plans["none"]] == [
        0,
        sizes["vae"],
        sizes["vae"] + sizes["reference"],
        sizes["reference"] + sizes["unet"],
    ]
    assert needs_of(pipeline, 64, 2, guided=1) == needs_of(pipeline, 64, 2), "v2-0 is guided unless told"
    assert needs_of(pipeline, 64, 2, guided=0)[2].activations < needs_of(pipeline, 64, 2)[2].activations
    delight = load_paint(PaintRequest(delight_folder, precision="fp32", device="cpu"))
    assert [need.name for need in needs_of(delight)] == ["encoding", "delighting", "decoding"]


@pytest.mark.full
@stored.any_text()
def test_a_run_is_accounted_under_the_names_of_its_forecast(acc, paint_folder, delight_folder, tmp_path):
    pipeline = load_paint(PaintRequest(paint_folder, precision="fp32", device=acc, offload="model", state=tmp_path))
    paint_views(pipeline, INPUTS, PaintSettings(size=64, steps=1))
    needs = needs_of(pipeline, 64, 2)
    costs = pipeline.offloader.memory_stats.stages
    assert [cost.stage for cost in costs] == [need.name for need in needs]
    for cost, need in zip(costs, needs, strict=True):
        assert need.weights < cost.peak_bytes <= MARGIN * need.total, cost.stage
    assert [cost.stage for cost in saved_stages(tmp_path)] == [need.name for need in needs]
    delight = load_paint(PaintRequest(delight_folder, precision="fp32", device=acc, offload="model"))
    delight_image(delight, INPUTS.references, DelightSettings(size=64, steps=1))
    assert [cost.stage for cost in delight.offloader.memory_stats.stages] == [need.name for need in needs_of(delight)]
