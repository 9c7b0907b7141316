"""Priced advice, beside runs with the change by the simulated accelerator's clock."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from anygpu.compat.device.facts import DeviceFacts
from anygpu.compat.device.rates import EIGHT_BIT
from anygpu.compat.device.work import PUBLISHED, _attention_flops
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.transforms import attention_kernels
from anygpu.compat.transforms.attention import Attention
from anygpu.compat.transforms.step_cache import FIRST_BLOCK, StepCacheSettings
from anygpu.pipelines.base import FramePackSettings
from anygpu.pipelines.forecast import savings as pricing
from anygpu.pipelines.forecast import times
from anygpu.pipelines.forecast.page import memory_plan
from anygpu.pipelines.forecast.seconds import planned_run
from anygpu.pipelines.forecast.times import time_forecast
from anygpu.pipelines.settings import clip_frames, with_step_cache
from anygpu.pipelines.sizes import Size

from simulated.clock import Clock, clocked
from simulated.test_families import CASES, Case, loaded_for, rendered
from simulated.test_lossy_times import PACE, SLOW

FEW, STEPS = 2, 8
FUSED = "_scaled_dot_product"
GEFORCE, A100, RADEON = "NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-80GB", "AMD Radeon RX 7900 XTX"
SAGE, SUMS, STORED, CACHE = (
    "attention sage on the load node",
    "fp16_accumulation on the load node",
    "stored_products on the load node",
    "AnyGPU Step Cache, preset balanced",
)


def quick(factors: dict[str, float]) -> type[Clock]:
    """A clock at which operations whose name begins so are so many times as quick."""

    class Quick(Clock):
        name, attention = "", 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.name = function.__name__
            self.attention = _attention_flops(*args[:3]) if self.name.startswith(FUSED) else 0
            return super().__torch_dispatch__(function, types, args, kwargs)

        def spend_work(self, flops: float, count: int, dtype: torch.dtype) -> None:
            flops = flops or self.attention  # torch counts that of CUDA alone
            factor = next((each for name, each in factors.items() if self.name.startswith(name)), 1.0)
            super().spend_work(flops / factor, count, dtype)

    return Quick


def sampled(pipeline: Any, factors: dict[str, float], case: Case = CASES["mochi"]) -> float:
    """Seconds of sampling by the clock, without the other stages."""

    def computed(steps: int) -> float:
        with clocked(SLOW, kind=quick(factors)) as clock:
            rendered(pipeline, case, steps=steps)
            return clock.times().computing

    return (computed(STEPS) - computed(FEW)) / (STEPS - FEW) * STEPS


def sums_required(facts: DeviceFacts, dtype: torch.dtype) -> None:
    """As where torch has the switch, which a build for processors lacks."""
    if facts.backend != "cuda" or dtype is not torch.float16:
        raise UnsupportedError("fp16_accumulation", expected="another card", fix="Switch it off.")


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of the clock's rates, on which a short run is worth a line, with the package of 8-bit attention."""
    monkeypatch.setattr(times, "pace_of", lambda *_: PACE)
    monkeypatch.setattr(pricing, "pace_of", lambda *_: PACE)
    monkeypatch.setattr(pricing, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(pricing, "SHARE", 0.0)
    monkeypatch.setattr(attention_kernels, "version_of", lambda name: "2.2.0")
    monkeypatch.setattr(attention_kernels, "imported", lambda name: None)
    monkeypatch.setattr(pricing, "require_fp16_sums", sums_required)


def on(pipeline: Any, name: str, dtype: torch.dtype = torch.float16, arch: str = "sm89") -> Any:
    """``pipeline`` as the forecast sees it on another card and in another dtype."""
    backend = "rocm" if name == RADEON else "cuda"
    facts = DeviceFacts(torch.device("cuda"), backend, arch, "cuda-sm80+", name, 0, "2.13")
    residual = dtype if dtype is torch.bfloat16 else torch.float32
    precision = replace(pipeline.precision, compute=dtype, transformer=dtype, residual=residual)
    return replace(pipeline, device=replace(pipeline.device, facts=facts, precision=precision))


def run_of(pipeline: Any, frames: int = 7) -> Any:
    size = Size(64, 64, frames, True, text=6)
    asked = replace(planned_run(pipeline, size).settings, steps=STEPS, cfg=2.0, frames=frames, guidance_steps=())
    return planned_run(pipeline, size, asked)


def told(pipeline: Any, *wanted: str) -> dict[str, float]:
    found = pricing.savings(pipeline, run_of(pipeline), "none")
    return {one.change: one.seconds for one in found if not wanted or one.change in wanted}


def test_what_a_change_saves_is_what_the_clock_sees(acc, tiny_folder, priced, monkeypatch):
    pipeline = loaded_for(CASES["mochi"], tiny_folder, "acc:0", "none")
    changes = pricing._changes
    only = {SAGE: {FUSED: EIGHT_BIT}, SUMS: {"mm": 2.0, "addmm": 2.0}}
    exact = sampled(pipeline, {})
    for change, factors in only.items():
        one = lambda p, r, change=change: [each for each in changes(p, r) if each[0] == change]  # noqa: E731
        monkeypatch.setattr(pricing, "_changes", one)
        monkeypatch.setattr(pricing, "SHARE", 0.0)
        saved = told(on(pipeline, GEFORCE), change)[change]
        assert saved == pytest.approx(exact - sampled(pipeline, factors), rel=0.15), change


def test_a_step_cache_saves_the_share_that_a_run_skips(acc, tiny_folder, priced, monkeypatch):
    pipeline = loaded_for(CASES["mochi"], tiny_folder, "acc:0", "none")
    exact, cached = (sampled(each, {}) for each in (pipeline, caching(pipeline)))
    skipped = 1 - cached / exact
    monkeypatch.setattr(StepCacheSettings, "skipped", lambda *_: skipped)
    assert told(on(pipeline, RADEON), CACHE)[CACHE] == pytest.approx(exact - cached, rel=0.15)


def caching(pipeline: Any) -> Any:
    return with_step_cache(pipeline, "custom", StepCacheSettings(FIRST_BLOCK, 0.4))


def test_a_shorter_video_saves_what_the_clock_sees_and_comes_where_nothing_else_is_left(
    acc, tiny_folder, priced, monkeypatch
):
    pipeline, long = loaded_for(CASES["mochi"], tiny_folder, "acc:0", "none"), replace(CASES["mochi"], frames=25)
    settled = on(caching(pipeline), RADEON)
    (one,) = pricing.savings(settled, run_of(settled, 25), "none")
    assert one.change == "13 frames" and "another video" in one.note
    exact, shorter = (sampled(pipeline, {}, replace(long, frames=frames)) for frames in (25, 13))
    plain = on(pipeline, RADEON)
    monkeypatch.setattr(pricing, "_changes", lambda *_: [])
    (alone,) = pricing.savings(plain, run_of(plain, 25), "none")
    now, after = (time_forecast(plain, run_of(plain, frames), "none") for frames in (25, 13))
    decoded = now.stages[-1].seconds - after.stages[-1].seconds
    assert alone.seconds - decoded == pytest.approx(exact - shorter, rel=0.15)


@pytest.mark.parametrize(("frames", "shorter"), [(181, 109), (109, 73), (73, 37), (37, 0)])
def test_a_video_in_sections_is_shortened_by_whole_ones(tiny_folder, priced, monkeypatch, frames, shorter):
    """The seconds of the click give the video that the line names."""
    pipeline, size = on(loaded_for(CASES["framepack"], tiny_folder, "cpu"), RADEON), Size(64, 64, frames)
    monkeypatch.setattr(pricing, "_changes", lambda *_: [])
    found = pricing.savings(pipeline, planned_run(pipeline, size), "none")
    assert [one.change for one in found] == [f"{shorter} frames"] * (shorter > 0)
    for one in found:
        clicked = clip_frames(pipeline, FramePackSettings(one.inputs["clip_seconds"]), 0.0)
        after = time_forecast(pipeline, planned_run(pipeline, replace(size, frames=clicked)), "none").seconds
        now = time_forecast(pipeline, planned_run(pipeline, size), "none").seconds
        assert clicked == one.inputs["frames"] == shorter and now - after == pytest.approx(one.seconds)


@pytest.mark.full
def test_three_lines_at_most_save_together_what_they_say(tiny_folder, priced):
    pipeline = on(loaded_for(CASES["mochi"], tiny_folder, "cpu", weights="int8"), GEFORCE)
    found = pricing.savings(pipeline, run_of(pipeline), "none")
    assert len(found) == pricing.MOST and found[0].seconds >= found[1].seconds >= found[2].seconds
    state, changes = (pipeline, run_of(pipeline)), dict(pricing._changes(pipeline, run_of(pipeline)))
    for one in found:
        state = changes[one.change][1](*state)
    together = time_forecast(pipeline, run_of(pipeline), "none").seconds - time_forecast(*state, "none").seconds
    assert sum(one.seconds for one in found) == pytest.approx(together, rel=1e-6)


def test_a_change_vanishes_where_it_cannot_act(tiny_folder, priced, monkeypatch):
    pipeline, half = loaded_for(CASES["mochi"], tiny_folder, "cpu"), torch.float16
    assert {SAGE, SUMS} <= set(told(on(pipeline, GEFORCE)))
    with monkeypatch.context() as patch:
        patch.setattr(attention_kernels, "version_of", lambda name: "0.2.0" if name == "comfy-kitchen" else "")
        assert SAGE in told(on(pipeline, GEFORCE)), "comfy-kitchen's 8-bit attention serves it too"
        patch.setattr(attention_kernels, "version_of", lambda name: "3.4.0" if "kitchen" not in name else "")
        assert SAGE not in told(on(pipeline, GEFORCE, arch="sm75")), "a Triton that dropped it"
        config = {**pipeline.configs["transformer"], "attention_head_dim": 40}
        narrow = replace(pipeline, model=replace(pipeline.model, configs={**pipeline.configs, "transformer": config}))
        assert SAGE not in told(on(narrow, GEFORCE)), "heads of another width"
    assert SAGE not in told(on(pipeline, GEFORCE, torch.float32))
    assert not {SAGE, SUMS} & set(told(on(pipeline, A100))), "fp32 sums run at the full rate there"
    assert not {SAGE, SUMS} & set(told(on(pipeline, RADEON)))
    assert SUMS not in told(on(pipeline, GEFORCE, torch.bfloat16))
    for weights in ("int8", "fp8", "w4a8"):
        packed = loaded_for(CASES["mochi"], tiny_folder, "cpu", weights=weights)
        assert STORED in told(on(packed, GEFORCE, torch.bfloat16))
    assert STORED not in told(on(pipeline, GEFORCE, half)), "no packed weights"
    assert CACHE in told(on(pipeline, A100)) and CACHE not in told(on(caching(pipeline), A100))
    own = pipeline.plan.speed
    used = replace(
        pipeline, plan=replace(pipeline.plan, speed=type(own)(own.request, {}, own.kernels, Attention("sage")))
    )
    assert SAGE not in told(on(used, GEFORCE))
    monkeypatch.setattr(pricing, "LEAST_SECONDS", 1e9)
    assert told(on(pipeline, GEFORCE)) == {}, "too little"


@pytest.mark.full
def test_a_price_says_where_it_comes_from_and_what_is_assumed(tiny_folder, priced, monkeypatch):
    pipeline = on(loaded_for(CASES["mochi"], tiny_folder, "cpu"), A100)
    text, _ = memory_plan(pipeline, Size(64, 64, 7, True))
    (line,) = (line for line in text.splitlines() if line.startswith(CACHE))
    assert line.endswith("less (lossy; how many steps are alike is assumed)")
    monkeypatch.setattr(pricing, "pace_of", lambda *_: replace(PACE, source=PUBLISHED))
    text, _ = memory_plan(pipeline, Size(64, 64, 7, True))
    assert "is assumed; by the card's data sheet)" in text
