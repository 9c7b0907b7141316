"""Time of painting and delighting before a run: what is counted is what runs, and runs correct it."""

import json
from dataclasses import fields, replace

import pytest
import torch
from anygpu.compat.device import precision as precisions
from anygpu.compat.device.work import Pace, counting
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.memory.offloader import MODES
from anygpu.compat.memory.statistics import FILE, saved_stages, stage_cost
from anygpu.compat.transforms.compile import CompileSettings
from anygpu.paint.forecast import PaintRun, planned_run, stage_work
from anygpu.paint.loading import Blocks, PaintPipeline, PaintRequest, load_paint
from anygpu.paint.networks.encoders import TOKENS
from anygpu.paint.sampling.delight import DelightSettings, delight_image
from anygpu.paint.sampling.painting import PaintSettings, paint_views
from anygpu.pipelines.forecast import times

from paint import stored
from paint.test_offloader import INPUTS

PAINTING, DELIGHTING = ("encoding", "reference", "painting", "decoding"), ("encoding", "delighting", "decoding")
PACE = Pace(1e9, 1e9, 1e9, 1e9, 0.0)

FULL = (("paint", 1.0), ("paint_pbr", 1.0), ("paint_pbr", 2.0))
STATES = torch.zeros(1, 257, 1536)  # of DINOv2-giant


def counted(pipeline, run, stages) -> int:
    return sum(stage_work(pipeline, stage, run).flops for stage in stages)


@pytest.mark.parametrize(
    ("kind", "guidance"), [("paint", 2.0), *(pytest.param(*cell, marks=pytest.mark.full) for cell in FULL)]
)
def test_painting_is_counted_within_two_percent(paint_folder, pbr_folder, kind, guidance):
    folder = paint_folder if kind == "paint" else pbr_folder
    pipeline = load_paint(PaintRequest(folder, precision="fp32", device="cpu"))
    with counting() as ran:
        paint_views(pipeline, replace(INPUTS, dino=STATES), PaintSettings(64, steps=2, guidance=guidance))
    run = planned_run(pipeline, 64, len(INPUTS.normals), 2, int(guidance != 1))
    assert counted(pipeline, run, PAINTING) == pytest.approx(ran.flops, rel=1e-4)


@stored.any_text(TOKENS)
def test_delighting_is_counted_within_two_percent(delight_folder):
    pipeline = load_paint(PaintRequest(delight_folder, precision="fp32", device="cpu"))
    settings = DelightSettings(64, steps=2, image_guidance=1.5)
    with counting() as ran:
        delight_image(pipeline, INPUTS.references, settings)
    run = planned_run(pipeline, 64, steps=2, guided=1)
    assert sum(stage_work(pipeline, stage, run).flops for stage in DELIGHTING) == pytest.approx(ran.flops, rel=0.02)
    small = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    reading = replace(pipeline, configs={**pipeline.configs, "text_encoder": small})
    half = replace(reading, precision=replace(pipeline.precision, text=torch.float16))
    assert stage_work(reading, "text", run) != stage_work(half, "text", run), "bytes of its own dtype"


@pytest.mark.full
def test_a_run_is_kept_beside_its_forecast_and_corrects_the_next(paint_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("anygpu.pipelines.forecast.times.pace_of", lambda *_: PACE)
    pipeline = load_paint(PaintRequest(paint_folder, precision="fp32", device="cpu", state=tmp_path))
    run = planned_run(pipeline, 64, len(INPUTS.normals), 2)
    before = times.time_forecast(pipeline, run)
    paint_views(pipeline, INPUTS, PaintSettings(64, steps=2))
    rows = saved_stages(tmp_path)
    assert [(row.stage, row.modelled_seconds) for row in rows] == [(each.name, each.modelled) for each in before.stages]
    after = times.time_forecast(pipeline, run).stages[2]
    assert after.name == "painting" and after.seconds == pytest.approx(rows[2].own_seconds)
    assert after.modelled == before.stages[2].modelled


def test_what_a_model_was_taught_is_forecast_where_nothing_is_asked(paint_folder, pbr_folder, delight_folder):
    def planned(folder):
        return planned_run(load_paint(PaintRequest(folder, precision="fp32", device="cpu")))

    assert planned(paint_folder) == PaintRun(steps=30, rows=2, size=512, views=6)
    assert planned(pbr_folder) == PaintRun(steps=15, rows=2, size=512, views=6)
    assert planned(delight_folder) == PaintRun(steps=50, rows=1, size=512, views=1)


def test_a_count_says_nothing_on_the_terminal(paint_folder, capfd):
    """Where the VAE is in fp16, diffusers' own ``to`` warns of layers to be kept in fp32, and names none."""
    pipeline = load_paint(PaintRequest(paint_folder, precision="fp32", device="cpu"))
    half = replace(pipeline, precision=replace(pipeline.precision, vae=torch.float16))
    for stage in ("encoding", "decoding"):
        assert counted(half, PaintRun(steps=2, rows=2, size=72, views=2), [stage]) > 0
    assert not capfd.readouterr().err


def test_where_rates_are_unknown_that_is_said(paint_folder, monkeypatch):
    pipeline = load_paint(PaintRequest(paint_folder, precision="fp32", device="cpu"))
    run = planned_run(pipeline, 64, 2, 2)
    monkeypatch.setattr("anygpu.pipelines.forecast.times.pace_of", lambda *_: None)
    found = times.times_of(pipeline, run, MODES)
    assert found == {} and found.unknown == "time unknown: CPU was not timed yet, and no data sheet of it is known"
    assert times.expected(pipeline, "painting", run) == {}
    monkeypatch.setattr("anygpu.pipelines.forecast.times.TIMED", ())
    with pytest.raises(UnsupportedError, match=r"of a kind that is not timed.* Add its data sheet"):
        times.stage_time(pipeline, "painting", run)


CHOICES = {
    "attention": lambda p: replace(p, attention="sage"),
    "precision": lambda p: replace(p, precision=precisions._EXPLICIT["bf16"]),
    "compiled": lambda p: replace(p, compiled={"unet": Blocks(CompileSettings())}),
    "demo": lambda p: replace(p, stands_in_for="Hunyuan3D-Paint"),
    "torch": lambda p: replace(p, facts=replace(p.facts, torch_version="1.0")),
}
IN_KEY = {  # field -> the choice above that shows it
    PaintPipeline: {
        "attention": "attention", "precision": "precision", "compiled": "compiled", "stands_in_for": "demo",
        "facts": "torch",
    },
    PaintRequest: {
        "attention": "attention", "precision": "precision", "compiled": "compiled", "stands_in_for": "demo",
    },
}  # fmt: skip
NOT_IN_KEY = {  # fields that change no time, and those that a row has or that are counted
    PaintPipeline: {
        "family", "variant", "parts", "offloader", "shape", "configs", "source", "decisions", "weights", "probes",
        "tokenizers", "request",
    },
    PaintRequest: {
        "model", "variant", "weights", "vae", "image_encoder", "offload", "device", "state", "quiet",
    },
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_changes_no_plain_forecast_and_plain_runs_none_of_its(paint_folder, tmp_path, monkeypatch, name):
    monkeypatch.setattr("anygpu.pipelines.forecast.times.pace_of", lambda *_: PACE)
    plain = load_paint(PaintRequest(paint_folder, precision="fp32", device="cpu", state=tmp_path))
    changed, run = CHOICES[name](plain), planned_run(plain, 64, 2, 2)

    def kept(pipeline, ratio):
        with stage_cost(pipeline, "decoding", None, **times.expected(pipeline, "decoding", run)):
            pass
        rows = json.loads((tmp_path / FILE).read_text(encoding="utf-8"))
        rows[-1].update(seconds=ratio * rows[-1]["modelled_seconds"], reading_seconds=0.0, first=False)
        (tmp_path / FILE).write_text(json.dumps(rows), encoding="utf-8")

    def told(pipeline):
        return times.stage_time(pipeline, "decoding", run, "none", None).seconds

    alone = told(changed)
    kept(plain, 1.2)
    before = told(plain)
    assert told(changed) == pytest.approx(alone, rel=0.01), "a plain run corrected it"
    kept(changed, 0.4)
    assert told(plain) == pytest.approx(before, rel=0.01), "it corrected a plain forecast"
    assert told(changed) == pytest.approx(0.4 * alone)


@pytest.mark.parametrize("cls", IN_KEY)
def test_a_new_field_is_in_the_key_or_is_said_to_change_no_time(cls):
    assert {*IN_KEY[cls], *NOT_IN_KEY[cls]} == {field.name for field in fields(cls)}
    assert set(IN_KEY[cls].values()) <= set(CHOICES) and not NOT_IN_KEY[cls] & set(IN_KEY[cls])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["delight", "paint", "pbr"])
def test_every_precision_has_a_time(request, monkeypatch, kind):
    monkeypatch.setattr("anygpu.pipelines.forecast.times.pace_of", lambda *_: PACE)
    pipeline = load_paint(PaintRequest(request.getfixturevalue(f"{kind}_folder"), precision="fp32", device="cpu"))
    rows = (*precisions.PRECISION.values(), *precisions.PAINT.rows.values(), *precisions._EXPLICIT.values())
    for row in {str(row): row for row in rows}.values():
        changed = replace(pipeline, precision=row)
        assert times.time_forecast(changed, planned_run(changed, 64, 2, 2)).seconds > 0, row
