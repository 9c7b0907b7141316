"""What lossy choices change in a forecast, beside the simulated accelerator's clock."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from anygpu.compat.device import work
from anygpu.compat.device.facts import DeviceFacts
from anygpu.compat.device.rates import ATTENTION, EIGHT_BIT, GENERATIONS, PRODUCT, RATES, quicker_by
from anygpu.compat.device.work import Pace
from anygpu.compat.transforms.attention import Attention
from anygpu.compat.transforms.step_cache import FIRST_BLOCK, TAYLOR, StepCacheSettings
from anygpu.pipelines.forecast import times
from anygpu.pipelines.forecast.seconds import planned_run, sampling_speed
from anygpu.pipelines.settings import with_step_cache
from anygpu.pipelines.sizes import Size
from anygpu.pipelines.speed import Speed

from simulated.clock import clocked
from simulated.test_families import CASES, loaded_for, rendered

SLOW = replace(RATES["RTX 4090"], fp16=1e9, bf16=1e9, fp32=1e9, memory=1e15, link=1e15, launch=1e-12)
PACE = Pace(1e9, 1e9, 1e9, 1e15, 0.0)
FEW, STEPS = 4, 12
CARDS = {
    "NVIDIA GeForce RTX 2060": (2, 4, 0, EIGHT_BIT),
    "NVIDIA GeForce RTX 4090": (2, 4, 2, EIGHT_BIT),
    "NVIDIA A100-SXM4-80GB": (1, 2, 0, 1),
    "NVIDIA H100 80GB HBM3": (1, 2, 2, 1),
    "AMD Radeon RX 7900 XTX": (1, 1, 0, 1),
    "NVIDIA GeForce GTX 1080": (1 / 64, 0, 0, 1),
}


def card(name: str) -> DeviceFacts:
    return DeviceFacts(torch.device("cuda"), "cuda", "", "cuda-sm80+", name, 0, "2.13")


@pytest.mark.parametrize("name", CARDS)
def test_each_choice_is_as_quick_as_the_card_s_own_rates_say(name):
    sums, int8, fp8, eight = CARDS[name]
    asked = {
        "sums": quicker_by(card(name), True, "", "flash").get(PRODUCT, 1),
        "int8": quicker_by(card(name), False, "int8", "flash").get(PRODUCT, 1),
        "fp8": quicker_by(card(name), False, "fp8", "flash").get(PRODUCT, 1),
        "sage": quicker_by(card(name), False, "", "sage").get(ATTENTION, 1),
    }
    assert asked == pytest.approx({"sums": sums, "int8": int8 or 1, "fp8": fp8 or 1, "sage": eight}, rel=1e-3)
    both = quicker_by(card(name), True, "int8", "flash").get(PRODUCT, 1)
    assert both == pytest.approx(int8 or sums, rel=1e-3), "8-bit products never sum in fp16"
    assert quicker_by(card("Somebody's card"), True, "int8", "sage") == quicker_by(card(name), False, "", "flash") == {}


def test_the_forecast_s_kernel_is_the_one_that_runs(tiny_folder):
    pipeline = loaded_for(CASES["mochi"], tiny_folder, "cpu")
    speed = pipeline.plan.speed
    assert sampling_speed(pipeline, STEPS)["kernel"] == speed.attention.label
    for attention, kernel in ((Attention("native", kernel="cuDNN"), "cuDNN"), (Attention("sage"), "sage")):
        own = Speed(speed.request, speed.forms, speed.kernels, attention)
        changed = replace(pipeline, plan=replace(pipeline.plan, speed=own))
        assert sampling_speed(changed, STEPS)["kernel"] == kernel
    assert set(GENERATIONS["hopper"].attention) <= {"flash", "memory-efficient", "cuDNN"}


def computed(pipeline: Any, steps: int) -> float:
    """Seconds that a run computes by the clock."""
    with clocked(SLOW) as clock:
        rendered(pipeline, CASES["mochi"], steps=steps)
        return clock.times().computing


def forecast(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr("anygpu.pipelines.forecast.times.pace_of", lambda *_: PACE)
    asked = replace(planned_run(pipeline, Size(64, 64, 7, True)).settings, steps=STEPS, cfg=2.0)
    run = planned_run(pipeline, Size(64, 64, 7, True, text=6), replace(asked, guidance_steps=()))
    return times.stage_time(pipeline, "sampling", run, "none").seconds


@pytest.mark.parametrize("kind", [TAYLOR, FIRST_BLOCK])
def test_a_step_cache_saves_what_the_clock_sees(acc, tiny_folder, monkeypatch, kind):
    exact = loaded_for(CASES["mochi"], tiny_folder, "acc:0", "none")
    settings = StepCacheSettings(kind, threshold=0.15, interval=3)
    quick = with_step_cache(exact, "custom", settings)
    if kind == FIRST_BLOCK:
        assert forecast(quick, monkeypatch) == pytest.approx(forecast(exact, monkeypatch) * 0.4, rel=0.01)
        return
    whole = computed(exact, STEPS)
    sampling = (whole - computed(exact, FEW)) / (STEPS - FEW) * STEPS
    seen = 1 - (whole - computed(quick, STEPS)) / sampling
    assert forecast(quick, monkeypatch) / forecast(exact, monkeypatch) == pytest.approx(seen, rel=0.1)


def test_links_are_timed_from_pinned_and_from_other_memory(acc, monkeypatch):
    monkeypatch.setattr(work, "LINK_BYTES", 1 << 20)
    monkeypatch.setattr(work, "locks_host_memory", lambda device: False)
    links = work._links(torch.device("acc:0"))
    assert links["link"] == links["staged_link"] == 0.0 < links["plain_link"], "what cannot be pinned has no rate"
    monkeypatch.setattr(work, "locks_host_memory", lambda device: True)
    assert min(work._links(torch.device("acc:0")).values()) > 0
