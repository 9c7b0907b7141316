"""Minutes before a run: from rates, and corrected by what runs showed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from anygpu.compat.device.facts import DeviceFacts
from anygpu.compat.device.rates import CONVOLUTION, PCIE_3, RATES
from anygpu.compat.device.work import (
    CONVOLVED,
    FEW,
    FILTERS,
    PROBED,
    PUBLISHED,
    WIDE,
    Pace,
    Work,
    counting,
    pace_of,
)
from anygpu.compat.memory.offloader import PINNED, HostWeights
from anygpu.compat.memory.statistics import StageCost, duration, saved_stages
from anygpu.pipelines import stages
from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
from anygpu.pipelines.forecast import seconds as forecast
from anygpu.pipelines.forecast import times
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sizes import Size
from tiny import build

PACE = Pace(1e9, 1e9, 1e9, 1e9, 0.0)


def row(own: float, modelled: float, **more: object) -> StageCost:
    return StageCost("sampling", "ltx", "none", "cpu", seconds=own, modelled_seconds=modelled, **more)


def test_an_operation_takes_the_larger_of_computing_and_moving():
    work = Work({("product", 2_000_000_000, 8): 3, ("other", 0, 500_000_000): 2})
    assert PACE.seconds(work) == 3 * 2.0 + 2 * 0.5


def test_launches_run_ahead_of_the_device_but_on_a_processor():
    work = Work({("product", 2_000_000_000, 8): 3, ("other", 0, 500_000_000): 2, ("filters", 0, 8): 1})
    assert replace(PACE, launch=1.0).seconds(work) == 7.0, "hidden"
    assert replace(PACE, launch=2.0).seconds(work) == 10.0, "the host is the slower"
    assert replace(PACE, launch=1.0, ahead=False).seconds(work) == 7.0 + 5


def test_the_weights_of_a_convolution_cost_beside_its_flops():
    x, weight = torch.zeros(1, 4, 2, 8, 8), torch.zeros(6, 4, 1, 3, 3)
    with counting() as work:
        torch.nn.functional.conv3d(x, weight)
    (moved,) = (moved for (kind, _, moved) in work if kind == CONVOLUTION)
    assert work[FILTERS, 0, weight.nbytes] == 1
    assert work.bytes == moved, "they are counted once"
    assert replace(PACE, filters=1.0).seconds(work) == pytest.approx(PACE.seconds(work) + weight.nbytes)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")
@pytest.mark.parametrize(("voxels", "weights"), [((*CONVOLVED, 4), (128, 128, 3, 3, 3)), (FEW, WIDE)])
def test_convolutions_are_probed_on_the_path_that_models_take(voxels, weights):
    """On a CPU torch has another one for small inputs, which takes three times as long."""
    x, weight = torch.empty(voxels), torch.empty(weights)
    path = torch._C._select_conv_backend(x, weight, None, (1, 1, 1), (0, 1, 1), (1, 1, 1), False, (0, 0, 0), 1)
    assert path == torch._C._ConvBackend.Mkldnn


def test_without_runs_the_range_is_what_rates_may_be_off_by():
    probed = times.corrected("sampling", 100.0, PROBED, [])
    assert probed.low < probed.seconds < probed.high and probed.seconds == pytest.approx(100.0)
    paper = times.corrected("sampling", 100.0, PUBLISHED, [])
    assert paper.seconds == 100.0 and paper.low < 100.0 < paper.high <= 1.8 * paper.low


def test_runs_of_the_size_correct_it_more_closely_than_others():
    rows = [row(300.0, 100.0), row(40.0, 20.0), row(44.0, 20.0), row(42.0, 20.0)]
    same = times.corrected("sampling", 20.0, PROBED, rows)
    assert same.seconds == pytest.approx(42.0), "the middle of the last three"
    assert (same.low, same.high) == pytest.approx((42.0 / 1.1, 42.0 * 1.1))
    other = times.corrected("sampling", 80.0, PROBED, rows)
    assert other.seconds == 240.0 and other.high == 240.0 * 1.25


def test_the_range_holds_for_each_run_that_it_comes_from():
    three = [row(7341.0, 7341.0), row(9543.0, 7341.0), row(9543.0, 7341.0)]
    same = times.corrected("sampling", 7341.0, PROBED, three)
    assert (same.seconds, same.low, same.high) == pytest.approx((9543.0, 7341.0, 9543.0 * 1.1))
    far = times.corrected("sampling", 100.0, PROBED, [row(30.0, 20.0), row(10.0, 20.0), row(5.0, 1.0)])
    assert (far.seconds, far.low, far.high) == pytest.approx((100.0, 50.0, 150.0)), "both of the nearest size"


@pytest.mark.parametrize(
    ("mode", "room", "unified", "seconds"),
    [
        ("none", None, False, 5 + 10),
        (times.HOSTED, None, False, 5 + 10),
        (times.HOSTED, 80, False, 3 * 4 + 6),  # 40 of 100 bytes find no room beside 20, and come anew for each call
        ("sequential", None, False, 3 * 10),
        ("group", None, False, 10 + 2 * 7),
        ("group", None, True, 5 + 3 * 10),
    ],
)
def test_copies_that_nothing_hides_are_added(mode, room, unified, seconds):
    """100 bytes over a link of 10 a second, beside three calls of 5 seconds together; 30 bytes stay under ``group``."""
    stage = SimpleNamespace(weights=100, beside=20, calls=3, stays=30, facts=SimpleNamespace(unified=unified))
    assert times._with_copies(stage, 5.0, 10.0, mode, room) == seconds


def test_what_imported_corrects_no_further_than_the_rates_may_be_off():
    cold, warm = row(17.0, 0.01, first=True), row(0.5, 0.01)
    assert times.corrected("text", 0.01, PROBED, [cold]).seconds == 0.01 * times.PROBED_OFF
    assert times.corrected("text", 0.01, PUBLISHED, [cold]).seconds == 0.01 * times.PUBLISHED_OFF
    assert times.corrected("text", 0.01, PROBED, [cold, warm]).seconds == pytest.approx(0.5), "the others count"


@pytest.mark.parametrize(("seconds", "words"), [(0.2, "1 s"), (59.6, "60 s"), (840, "14 min"), (9000, "2.5 h")])
def test_durations_in_words(seconds, words):
    assert duration(seconds) == words


def test_spans_name_a_unit_once():
    assert times.span(660, 1080) == "11 to 18 min"
    assert times.span(60, 600) == "60 s to 10 min"
    assert times.span(61, 61.2) == "61 s"


def test_a_device_that_nobody_timed_goes_by_its_data_sheet(tiny_folder):
    facts = load(LoadRequest(build("ltx", tiny_folder), device="cpu")).facts
    card = replace(facts, device=torch.device("cuda"), name="NVIDIA GeForce RTX 4090", total_bytes=0)
    pace = pace_of(card, None, torch.float16)
    assert pace is not None and pace.source == PUBLISHED and pace.product == RATES["RTX 4090"].fp16
    assert pace_of(replace(card, name="NVIDIA H100 PCIe"), None, torch.float16, "in chunks").attention < 0.2 * 756e12
    assert pace_of(replace(card, name="Someone's card"), None, torch.float16) is None


@pytest.mark.full
def test_a_run_is_kept_beside_its_forecast_and_corrects_the_next(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("anygpu.pipelines.forecast.times.pace_of", lambda *_: PACE)
    pipeline = load(LoadRequest(build("ltx", tiny_folder), precision="fp32", device="cpu", state=tmp_path))
    prompt = stages.encode_prompt(pipeline, PromptRequest("a red fox"), Silent())
    settings = SampleSettings(64, 64, 9, steps=2, seed=3, cfg=1.0)
    run = forecast.planned_run(pipeline, stages.size_of(settings, prompt), settings)
    before = times.expected(pipeline, "sampling", run)
    stages.sample(pipeline, prompt, None, settings, Silent())
    cost = saved_stages(tmp_path)[-1]
    assert cost.modelled_seconds == pytest.approx(before["modelled_seconds"])
    assert cost.forecast_seconds == pytest.approx(before["forecast_seconds"])
    assert [row.first for row in saved_stages(tmp_path)] == [True, False], "the text imported the libraries"
    assert 0 < cost.reading_seconds < cost.seconds and cost.precision == str(pipeline.precision)
    after = times.expected(pipeline, "sampling", run)
    assert after["forecast_seconds"] == pytest.approx(cost.own_seconds)
    assert after["modelled_seconds"] == before["modelled_seconds"] and after["work"] == cost.work
    assert cost.against_forecast == f"sampling took {cost.own_seconds:.1f} s, {cost.forecast_seconds:.1f} s forecast"


def test_a_mode_that_copies_more_takes_longer(tiny_folder, monkeypatch):
    monkeypatch.setattr("anygpu.pipelines.forecast.times.pace_of", lambda *_: PACE)
    monkeypatch.setattr("anygpu.pipelines.forecast.times.link_of", lambda *_, **__: 1e6)
    pipeline = load(LoadRequest(build("hunyuan_video", tiny_folder), device="cpu"))
    run = forecast.planned_run(pipeline, Size(64, 64, 5))
    none, model, group, sequential = (
        times.time_forecast(pipeline, run, mode).seconds for mode in ("none", "model", "group", "sequential")
    )
    assert none <= model < group <= sequential


def test_noise_levels_of_a_job_count_in_place_of_its_steps(tiny_folder):
    pipeline = load(LoadRequest(build("ltx", tiny_folder), device="cpu"))
    asked = SampleSettings(64, 64, 9, steps=40, sigmas=(1.0, 0.5, 0.0))
    assert forecast.planned_run(pipeline, Size(64, 64, 9), asked).settings.steps == 2


def test_a_picture_is_copied_by_the_weights_of_the_model_s_own_parts(tiny_folder):
    """LTX-Video has no image encoder, which is not asked for."""
    pipeline = load(LoadRequest(build("ltx", tiny_folder), device="cpu"))
    options = replace(pipeline.offloader.options, host_weights=HostWeights({"vae": PINNED}))
    pipeline.offloader.options = options
    planned = forecast.planned_run(pipeline, Size(64, 64, 9)).planned(pipeline, forecast.IMAGE, None)
    assert planned.pinned and planned.weights == pipeline.weights["vae"].total


def test_copies_to_a_card_of_its_own_memory_always_cost_time():
    strange = DeviceFacts(torch.device("cuda:0"), "cuda", "sm99", "other", "A card without a row", 8 * 2**30, "2.13")
    slowest = times.link_of(strange, [])
    assert 0 < slowest < times.link_of(strange, [], None, True) < PCIE_3, "at least the narrowest full slot"
    assert times.link_of(replace(strange, link=PCIE_3 / 2), []) == slowest / 2, "eight lanes"
    eight = times.link_of(replace(strange, name="NVIDIA GeForce RTX 4060"), [])
    assert eight == pytest.approx(slowest, rel=1e-3), "eight lanes of twice the rate"
    probed = replace(PACE, link=3e9, plain_link=1e9, staged_link=2e9)
    assert [times.link_of(strange, [], probed, *how) for how in ((), (True,), (False, True))] == [1e9, 3e9, 2e9]
    copied = [row(1.0, 1.0, moved_bytes=10**9, moving_seconds=1.0)]
    assert times.link_of(strange, [replace(copied[0], device="cuda:0", card="Another card, 8 GB")]) == slowest
    copied = [replace(copied[0], device="cuda:0", card="A card without a row, 8 GB")]
    assert times.link_of(strange, copied) == 1e9 and times.link_of(strange, copied, None, True) > slowest
    assert times.link_of(replace(strange, unified=True), []) == 0.0
    assert times.link_of(replace(strange, device=torch.device("cpu")), []) == 0.0
