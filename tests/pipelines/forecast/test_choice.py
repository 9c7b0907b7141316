"""Which mode is taken by its time, what more memory would save, and where people read it."""

from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from anygpu import cli
from anygpu.compat.device.work import Pace
from anygpu.compat.memory.statistics import StageNeed, TimeLeft
from anygpu.pipelines.base import SampleSettings
from anygpu.pipelines.forecast import counts, times
from anygpu.pipelines.forecast import seconds as forecast
from anygpu.pipelines.forecast.memory import Forecast
from anygpu.pipelines.forecast.page import memory_plan
from anygpu.pipelines.forecast.times import StageTime, TimeForecast
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sizes import Size
from tiny import build

GB = 2**30


def taking(mode: str, seconds: float) -> TimeForecast:
    return TimeForecast(mode, (StageTime("sampling", seconds, seconds / 2, seconds * 2, seconds),))


def test_clips_of_a_batch_come_one_after_the_other():
    once = StageTime("text", 10, 5, 20, 10), StageTime("image", 10, 5, 20, 10)
    several = TimeForecast("none", (*once, *taking("none", 60).stages)).of_clips(3)
    assert several.stages == (*once, StageTime("sampling", 180, 90, 360, 180)) and several.seconds == 200


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


def test_advice_says_what_is_lacking_where_it_is_lacking():
    """Neither a part on another device, which has room, nor weights that come ahead are lacking."""
    there = StageNeed("text", 0, 0, 20 * GB, device="cpu", room=64 * GB)
    full = StageNeed("decoding", 0, 0, 5 * GB, ahead=3 * GB)
    alone = needing("model", 8), needing("group", 4)
    needs = tuple(replace(each, stages=(there, full, *each.stages)) for each in alone)
    times = {"model": taking("model", 360), "group": taking("group", 840)}
    assert forecast.advice(needs, times, 8 * GB) == "with offload model 6 min, needs 0.4 GB more"
    assert needs[0].lacks(8 * GB) == pytest.approx(0.4 * GB)


def test_comfyui_moves_the_weights_on_a_cpu_too_and_the_minutes_are_known(monkeypatch):
    monkeypatch.setattr(times, "time_forecast", lambda _, run, mode, *rooms: taking(mode, run))
    pipeline = SimpleNamespace(offloader=SimpleNamespace(device=torch.device("cpu")))
    assert list(times.times_of(pipeline, 60, ["none", "model", "comfyui"])) == ["none", "comfyui"]


def told(*ends: tuple[float, int], total: int) -> str:
    left = TimeLeft()
    return [left.after(*end, total) for end in ends][-1]


def test_time_left_from_the_second_step_on():
    assert told((9.0, 1), total=20) == told((9.0, 31), total=50) == "", "of an earlier run's steps nothing is known"
    assert told((9.0, 1), (13.0, 2), total=20) == ", 4.0 s each, about 72 s left"
    assert told((9.0, 1), (13.0, 2), (21.0, 4), total=34) == ", 4.0 s each, about 2 min left"
    assert told((9.0, 31), (13.0, 32), (17.0, 33), total=50) == ", 4.0 s each, about 68 s left"
    assert told((9.0, 2), (13.0, 3), total=3) == ", 4.0 s each"
    assert told((9.0, 1), (9.1, 3), total=20) == "", "too quick to read"


def cached(row: str) -> Any:
    """Seconds of a step whose blocks a cache computes where ``row``, again and again, has a 1."""
    return lambda step, _: 4.0 if step < 2 or row[step % len(row)] == "1" else 0.4


def lasting(*changes: tuple[float, float]) -> Any:
    """Seconds of a step as another load has them from a share of the steps on."""
    return lambda step, count: next(seconds for share, seconds in reversed(changes) if step >= int(share * count))


SKIPPED = {"every third": "100", "every fourth": "1000", "irregular": "1001010000100100"}
LOADS = {  # seconds of a step, the shares of the steps after which they change for long, and steps that do not count
    "even, after loading": (lambda step, _: 90.0 if step == 0 else 4.0, (), 1),
    "even, after two that compile": (lambda step, _: 90.0 if step < 2 else 4.0, (), 2),
    "doubles": (lasting((0, 4.0), (0.5, 8.0)), (0.5,), 0),
    "halves": (lasting((0, 8.0), (0.5, 4.0)), (0.5,), 0),
    "comes and goes": (lasting((0, 4.0), (1 / 3, 12.0), (2 / 3, 4.0)), (1 / 3, 2 / 3), 0),
    "comes and goes each fifth": (lasting(*((n / 5, 4.0 + n % 2 * 4) for n in range(5))), (0.2, 0.4, 0.6, 0.8), 0),
    "every other step": (lambda step, _: 4.0 + 8.0 * (step % 2), None, 0),
    "two steps of five": (lambda step, _: 4.0 + 4.0 * (step % 5 < 2), None, 0),
    **{f"a cache computes {name}": (cached(row), None, 10) for name, row in SKIPPED.items()},
}


@pytest.mark.parametrize("count", [8, 20, 30, 50, 64])
@pytest.mark.parametrize("load", LOADS)
def test_what_is_left_is_the_run_s_own_after_a_tenth_of_its_steps(load, count):
    """Within 25 %, or the longest step where steps are few or unlike; a change is known a tenth of the steps later."""
    (seconds_of, changes, first), pace, now = LOADS[load], TimeLeft(), 0.0
    tenth, longest = max(2, count // 10), max(seconds_of(step, count) for step in range(2, count))
    assert not pace.after(-400.0, 7, count) + pace.after(-300.0, 1, count), "a run that then began anew"
    for done in range(1, count + 1):
        now += seconds_of(done - 1, count)
        text = pace.after(now, done, count)
        known = [0 <= done - int(share * count) < tenth for share in changes or ()]
        if done <= first + tenth or done == count or any(known):
            continue
        rest = [seconds_of(done - 1 if changes is not None else step, count) for step in range(done, count)]
        number, unit = text.split("about ")[1].split()[:2]
        said, left = float(number) * {"s": 1, "min": 60}[unit], sum(rest)
        assert abs(said - left) <= 0.25 * left + longest * (changes is None or count <= 20) + 0.5, (
            f"{said} s of {left} s after {done}"
        )


FORWARDS = {"LTX 13B dev": [1] * 3 + [3] * 11 + [2] * 13, "cfg until half": [2] * 15 + [1] * 15, "alike": [1] * 40}


@pytest.mark.parametrize("stall", [0, 1, 2, 5])
@pytest.mark.parametrize("sections", [1, 3])
@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("copies", [0.0, 3.0])
def test_what_is_left_is_known_of_unlike_steps_and_after_one_that_waited(name, sections, stall, copies):
    """Also where all steps wait for the same ``copies``, once two were seen that are unlike."""
    forwards = FORWARDS[name]
    seconds = [4.0 * (copies or each) for each in forwards] * sections
    pace, took = TimeLeft(forwards), (each + 60.0 * (step == stall > 0) for step, each in enumerate(seconds))
    ends, unlike = [*accumulate(took)], next((step for step, each in enumerate(forwards) if each != forwards[0]), 0)
    for done in range(1, len(seconds)):
        text = pace.after(ends[done - 1], done, len(seconds))
        if done >= max(2 + (stall > 0), len(seconds) / 10, copies and unlike + 2):
            number, unit = text.split("about ")[1].split()[:2]
            said, left = float(number) * {"s": 1, "min": 60}[unit], sum(seconds[done:])
            assert abs(said - left) <= 0.25 * left, f"{said} s of {left} s after {done}"


def test_a_plan_says_minutes_and_runs_nothing(tiny_folder, tmp_path, capsys):
    model = str(build("ltx", tiny_folder))
    words = ("render", "--model", model, "--plan", "--width", "64", "--height", "64", "--device", "cpu")
    output = tmp_path / "a.mp4"
    assert cli.main([*words, "--state", str(tmp_path), "--output", str(output)]) == 0
    told = capsys.readouterr().out
    assert "none: about " in told and "sampling " in told and "Each run corrects" in told
    assert not output.exists()
    assert "in tiles of" not in told
    assert cli.main([*words, "--state", str(tmp_path), "--output", str(output), "--decode", "tiled"]) == 0
    assert "in tiles of 256 pixels" in capsys.readouterr().out


def test_a_count_that_fails_is_said_and_stops_nothing(tiny_folder, monkeypatch, failed_forecasts):
    monkeypatch.setattr("anygpu.pipelines.forecast.times.pace_of", lambda *_: Pace(1e9, 1e9, 1e9, 1e9, 0.0))
    monkeypatch.setattr(counts, "built", lambda *_: 1 / 0)
    text, _ = memory_plan(load(LoadRequest(build("ltx", tiny_folder), device="cpu")), Size(64, 96, 9))
    said = "time unknown: the forecast failed (ZeroDivisionError: division by zero)"
    assert text.splitlines().count(said) == 1
    assert len(failed_forecasts) == 1 and "ZeroDivisionError" in failed_forecasts[0]
    failed_forecasts.clear()


def test_settings_that_a_run_refuses_are_said_with_what_it_takes(tiny_folder, monkeypatch):
    monkeypatch.setattr("anygpu.pipelines.forecast.times.pace_of", lambda *_: Pace(1e9, 1e9, 1e9, 1e9, 0.0))
    pipeline = load(LoadRequest(build("ltx", tiny_folder), device="cpu"))
    run = forecast.planned_run(pipeline, Size(64, 64, 9), SampleSettings(64, 64, 9, steps=1))
    said = "time unknown: steps 1; expected at least 2 steps for this model's schedule"
    assert times.times_of(pipeline, run, ["none"]).unknown == said


def test_a_device_that_nobody_timed_is_named(tiny_folder):
    pipeline = load(LoadRequest(build("ltx", tiny_folder), device="cpu"))
    pipeline = replace(pipeline, device=replace(pipeline.device, facts=replace(pipeline.facts, name="Someone's card")))
    text, _ = memory_plan(pipeline, Size(64, 64, 9))
    assert "time unknown: Someone's card was not timed yet, and no data sheet of it is known" in text.splitlines()
