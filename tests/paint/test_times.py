"""Time of painting and delighting before a run: what is counted is what runs, and runs correct it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from anygpu.compat.device.work import Pace, counting
from anygpu.compat.memory.offloader import MODES
from anygpu.compat.memory.statistics import kept_stages
from anygpu.paint import times
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.networks.encoders import TOKENS
from anygpu.paint.sampling.delight import DelightSettings, delight_image
from anygpu.paint.sampling.painting import PaintSettings, paint_views

from paint.test_offloader import INPUTS

PAINTING, DELIGHTING = ("encoding", "reference", "painting", "decoding"), ("encoding", "delighting", "decoding")
PACE = Pace(1e9, 1e9, 1e9, 1e9, 0.0)

FULL = (("paint", 1.0), ("paint_pbr", 1.0), ("paint_pbr", 2.0))
STATES = torch.zeros(1, 257, 1536)  # of DINOv2-giant


def counted(pipeline, run, stages) -> int:
    return sum(times.stage_work(pipeline, stage, run).flops for stage in stages)


@pytest.mark.parametrize(
    ("kind", "guidance"),
    [("paint", 2.0), *(pytest.param(*cell, marks=pytest.mark.full) for cell in FULL)],
)
def test_painting_is_counted_within_two_percent(paint_folder, pbr_folder, kind, guidance):
    folder = paint_folder if kind == "paint" else pbr_folder
    pipeline = load_paint(PaintRequest(folder, precision="fp32", device="cpu"))
    with counting() as ran:
        paint_views(pipeline, replace(INPUTS, dino=STATES), PaintSettings(64, steps=2, guidance=guidance))
    run = times.planned_run(pipeline, 64, len(INPUTS.normals), 2, int(guidance != 1))
    assert counted(pipeline, run, PAINTING) == pytest.approx(ran.flops, rel=0.02)


def test_delighting_is_counted_within_two_percent(delight_folder):
    pipeline = load_paint(PaintRequest(delight_folder, precision="fp32", device="cpu"))
    settings = DelightSettings(64, steps=2, image_guidance=1.5, text=torch.ones(1, TOKENS, 64))
    with counting() as ran:
        delight_image(pipeline, INPUTS.references, settings)
    run = times.planned_run(pipeline, 64, steps=2, guided=1)
    assert sum(times.stage_work(pipeline, stage, run).flops for stage in DELIGHTING) == pytest.approx(
        ran.flops, rel=0.02
    )


def test_a_run_is_kept_beside_its_forecast_and_corrects_the_next(paint_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(times, "pace_of", lambda *_: PACE)
    pipeline = load_paint(PaintRequest(paint_folder, precision="fp32", device="cpu", state=tmp_path))
    run = times.planned_run(pipeline, 64, len(INPUTS.normals), 2)
    before = times.paint_times(pipeline, run)
    paint_views(pipeline, INPUTS, PaintSettings(64, steps=2))
    rows = kept_stages(tmp_path)
    assert [(row.stage, row.modelled_seconds) for row in rows] == [(each.name, each.modelled) for each in before.stages]
    after = times.paint_times(pipeline, run).stages[2]
    assert after.name == "painting" and after.seconds == pytest.approx(rows[2].own_seconds)
    assert after.modelled == before.stages[2].modelled


def test_what_a_model_was_taught_is_forecast_where_nothing_is_asked(paint_folder, pbr_folder, delight_folder):
    def planned(folder):
        return times.planned_run(load_paint(PaintRequest(folder, precision="fp32", device="cpu")))

    assert planned(paint_folder) == times.PaintRun(steps=30, rows=2, size=512, views=6)
    assert planned(pbr_folder) == times.PaintRun(steps=15, rows=2, size=512, views=6)
    assert planned(delight_folder) == times.PaintRun(steps=50, rows=1, size=512, views=1)


def test_where_rates_are_unknown_that_is_said(paint_folder, monkeypatch):
    pipeline = load_paint(PaintRequest(paint_folder, precision="fp32", device="cpu"))
    run = times.planned_run(pipeline, 64, 2, 2)
    monkeypatch.setattr(times, "pace_of", lambda *_: None)
    found = times.times_of(pipeline, run, MODES)
    assert found == {} and found.unknown == "time unknown: CPU was not timed yet, and no data sheet of it is known"
    assert times.expected(pipeline, "painting", run) == {}
