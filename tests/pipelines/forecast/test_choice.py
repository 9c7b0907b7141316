"""Which mode is taken by its time, what more memory would save, and where people read it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from anygpu import cli
from anygpu.compat.device.work import Pace
from anygpu.compat.memory.statistics import StageNeed, time_left
from anygpu.pipelines.forecast import counts, times
from anygpu.pipelines.forecast import seconds as forecast
from anygpu.pipelines.forecast.memory import Forecast
from anygpu.pipelines.forecast.page import memory_plan
from anygpu.pipelines.forecast.times import StageTime, TimeForecast
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sizes import Size
from tiny import build

GB = 10**9


def taking(mode: str, seconds: float) -> TimeForecast:
    return TimeForecast(mode, (StageTime("sampling", seconds, seconds / 2, seconds * 2, seconds),))


def test_clips_of_a_batch_come_one_after_the_other():
    text = StageTime("text", 10, 5, 20, 10)
    several = TimeForecast("none", (text, *taking("none", 60).stages)).of_clips(3)
    assert several.stages == (text, StageTime("sampling", 180, 90, 360, 180)) and several.seconds == 190


def needing(mode: str, gigabytes: float) -> Forecast:
    return Forecast(mode, (StageNeed("sampling", 0, 0, int(gigabytes * GB)),))


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"none": 60, "model": 50, "group": 100}, "model"),
        ({"none": 60, "model": 58, "group": 100}, "none"),  # not worth leaving the order for
        ({"none": 60, "group": 10}, "none"),  # that of model is unknown
        ({}, "none"),
    ],
)
def test_auto_takes_the_quickest_that_fits_or_their_order(seconds, chosen):
    known = {mode: taking(mode, each) for mode, each in seconds.items()}
    assert forecast.quickest(("none", "model", "group"), known) == chosen
    assert forecast.quickest((), known) == ""


def test_advice_says_what_more_memory_saves():
    needs = (needing("none", 14), needing("model", 10), needing("group", 4))
    times = {"none": taking("none", 360), "model": taking("model", 360), "group": taking("group", 840)}
    assert forecast.advice(needs, times, 8 * GB) == "with offload model 6 min, needs 2.5 GB more", (
        "the least that is as quick"
    )
    assert forecast.advice(needs, times, 16 * GB) == "", "everything fits"
    assert forecast.advice(needs, {**times, "group": taking("group", 370)}, 8 * GB) == "", "little is gained"
    assert forecast.advice(needs, times, None) == forecast.advice(needs, {}, 8 * GB) == ""


def test_comfyui_moves_the_weights_on_a_cpu_too_and_the_minutes_are_known(monkeypatch):
    monkeypatch.setattr(times, "time_forecast", lambda _, run, mode, *rooms: taking(mode, run))
    pipeline = SimpleNamespace(offloader=SimpleNamespace(device=torch.device("cpu")))
    assert list(times.times_of(pipeline, 60, ["none", "model", "comfyui"])) == ["none", "comfyui"]


def test_time_left_from_the_second_step_on():
    assert time_left(0.0, 1, 20) == ""
    assert time_left(4.0, 2, 20) == ", 4.0 s each, about 72 s left"
    assert time_left(12.0, 4, 34) == ", 4.0 s each, about 2 min left"
    assert time_left(8.0, 3, 3) == ", 4.0 s each"
    assert time_left(0.1, 3, 20) == "", "too quick to read"


def test_steps_of_an_earlier_run_took_no_time_of_this_one():
    assert time_left(0.0, 31, 50, first=31) == ""
    assert time_left(8.0, 33, 50, first=31) == ", 4.0 s each, about 68 s left"


def test_a_plan_says_minutes_and_runs_nothing(tiny_folder, tmp_path, capsys):
    model = str(build("ltx", tiny_folder))
    words = ("render", "--model", model, "--plan", "--width", "64", "--height", "64", "--device", "cpu")
    output = tmp_path / "a.mp4"
    assert cli.main([*words, "--state", str(tmp_path), "--output", str(output)]) == 0
    told = capsys.readouterr().out
    assert "none: about " in told and "sampling " in told and "Each run corrects" in told
    assert not output.exists()


def test_a_count_that_fails_is_said_and_stops_nothing(tiny_folder, monkeypatch, failed_forecasts):
    monkeypatch.setattr("anygpu.pipelines.forecast.times.pace_of", lambda *_: Pace(1e9, 1e9, 1e9, 1e9, 0.0))
    monkeypatch.setattr(counts, "built", lambda *_: 1 / 0)
    text, _ = memory_plan(load(LoadRequest(build("ltx", tiny_folder), device="cpu")), Size(64, 96, 9))
    said = "time unknown: the forecast failed (ZeroDivisionError: division by zero)"
    assert text.splitlines().count(said) == 1
    assert len(failed_forecasts) == 1 and "ZeroDivisionError" in failed_forecasts[0]
    failed_forecasts.clear()


def test_a_device_that_nobody_timed_is_named(tiny_folder):
    pipeline = load(LoadRequest(build("ltx", tiny_folder), device="cpu"))
    pipeline = replace(pipeline, device=replace(pipeline.device, facts=replace(pipeline.facts, name="Someone's card")))
    text, _ = memory_plan(pipeline, Size(64, 64, 9))
    assert "time unknown: Someone's card was not timed yet, and no data sheet of it is known" in text.splitlines()
