"""Weights that stay on the device between forwards of offload group: bytes, time by the clock, results, shortages."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.device.precision import SAFE
from anygpu.compat.device.rates import RATES
from anygpu.compat.memory import standalone
from anygpu.compat.memory.hooks import GroupHooks, hooks_on
from anygpu.compat.memory.offloader import PINNED, PLAIN, HostWeights, OffloadOptions
from anygpu.compat.memory.parts import Parts
from anygpu.compat.memory.standalone import StandaloneOffloader
from anygpu.compat.memory.statistics import StageCost
from anygpu.compat.transforms.compile import CompileSettings
from anygpu.paint.forecast import paint_needs
from anygpu.paint.forecast import planned_run as planned_painting
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.sampling.delight import DelightSettings, delight_image
from anygpu.pipelines.base import SampleSettings
from anygpu.pipelines.forecast.memory import forecast
from anygpu.pipelines.forecast.seconds import planned_run
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sizes import MARGIN, Size
from anygpu.pipelines.speed import SpeedRequest
from heavy import build_heavy
from paint.conftest import delight_folder  # noqa: F401
from torch import nn

from paint import stored
from simulated import accelerator, fitting
from simulated.clock import Times, clocked
from simulated.test_families import CASES, PICTURE, rendered

BLOCKS, WIDTH, TOKENS, FORWARDS = 40, 64, 96, 4
BLOCK = 2 * 4 * WIDTH * (WIDTH + 1)
# Copying a block takes as long as computing two, so that a block that is copied for nothing shows.
SLOW = replace(RATES["RTX 4090"], fp32=0.9e12, link=10e9, memory=1e15, launch=1e-9)
ROUNDING = 0.05


class Blocks(nn.Module):
    """Blocks of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def run(
    acc: torch.device, blocks: float, kept: str = PINNED, part: str = "transformer"
) -> tuple[Times, list[int], int]:
    """Some forwards with room for ``blocks`` beside a forward: time of the last, bytes copied in each, the peak.

    They give what the resident model gives, bit for bit.
    """
    torch.manual_seed(0)
    model, x, moved = Blocks(), torch.randn(TOKENS, WIDTH).to(acc), []
    beside, free = 4 * x.nbytes, standalone.free_bytes(acc)
    options = OffloadOptions(
        keep_free_bytes=free - beside - int(blocks * BLOCK), host_weights=HostWeights({part: kept})
    )
    with torch.no_grad():
        wanted = model.to(acc)(x).cpu()
        offloader = StandaloneOffloader(Parts({part: lambda _: model.to("cpu")}), acc, "group", options)
        model.to("cpu")
        accelerator.reset_peak()
        with offloader.hold(part, beside) as module, clocked(SLOW) as clock:
            for _ in range(FORWARDS):
                before, start = offloader.memory_stats.moved_bytes, clock.times()
                result = module(x)
                moved.append(offloader.memory_stats.moved_bytes - before)
            times = clock.times() - start
        assert torch.equal(result.cpu(), wanted)
        peak = accelerator.memory().peak_bytes - x.nbytes
        offloader.release(part)
    del x, result
    assert accelerator.memory().allocated_bytes == 0
    return times, moved, peak


@pytest.mark.full
@pytest.mark.parametrize("kept", [PINNED, PLAIN])
@pytest.mark.parametrize("blocks", [2, 12, 22, 32, 42])
def test_what_fits_stays_and_the_rest_is_copied_in_each_forward(acc, blocks, kept):
    """Of 40 blocks, what is left beside two; never slower than with nothing that stays."""
    weights, stays = BLOCKS * BLOCK, (blocks - 2) * BLOCK
    times, moved, peak = run(acc, blocks, kept)
    copying = times.computing * 2 * (weights - stays) / weights
    assert sum(moved) == pytest.approx(weights + (FORWARDS - 1) * (weights - stays), abs=2 * BLOCK)
    for count in moved[1:]:
        assert abs(count - (weights - stays)) <= ROUNDING * weights
    assert peak <= min(weights, blocks * BLOCK) + 4 * TOKENS * WIDTH * 4
    assert peak >= (1 - ROUNDING) * min(weights, (blocks - 1) * BLOCK)
    assert times.elapsed <= 1.05 * max(times.computing, copying)


@pytest.mark.full
@pytest.mark.parametrize("share", [0.1, 0.4, 0.7, 0.97, 1.2])
@pytest.mark.parametrize("widths", [[600] * 20 + [250] * 40, [300] * 48, [50 + 37 * n % 850 for n in range(40)]])
def test_blocks_of_unlike_sizes_fill_what_fits(acc, widths, share):
    """As HunyuanVideo's two kinds of blocks: what is left beside activations and two groups, less 5 %."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) for width in widths)
    model, beside = nn.ModuleDict({"blocks": blocks}), 4096
    sizes = [sum(weight.nbytes for weight in block.parameters()) for block in blocks]
    options = OffloadOptions(host_weights=HostWeights({"transformer": PINNED}))
    room = int(2 * max(sizes) + beside + share * sum(sizes))
    options = replace(options, keep_free_bytes=standalone.free_bytes(acc) - room)
    offloader = StandaloneOffloader(Parts({"transformer": lambda _: model}), acc, "group", options)
    with offloader.hold("transformer", beside) as module:
        stays = sum(group.total_bytes for group in hooks_on(module)._stays)
    wanted = min(1.0, share) * sum(sizes)
    assert wanted - ROUNDING * sum(sizes) <= stays <= wanted
    offloader.release("transformer")


@pytest.mark.full
def test_a_run_of_blocks_that_stay_would_leave_the_link_idle(acc, monkeypatch):
    """The same bytes as a prefix: half of the forward copies nothing."""
    spread, _, _ = run(acc, 22)

    def prefix(hooks, count):
        kept, hooks._stays = 0, set()
        for group in hooks.groups:
            if kept + group.total_bytes <= count:
                hooks._stays.add(group)
                kept += group.total_bytes

    monkeypatch.setattr(standalone.GroupHooks, "keep", prefix)
    together, _, _ = run(acc, 22)
    assert spread.elapsed <= 1.05 * spread.computing
    assert together.elapsed > 1.4 * spread.elapsed


@pytest.mark.full
def test_nothing_stays_of_a_part_that_runs_once(acc):
    assert sum(run(acc, 42, part="text_encoder")[1]) == (BLOCKS * FORWARDS + 1) * BLOCK, "and one that came ahead"


@pytest.mark.full
def test_without_a_stream_for_copies_blocks_stay_too(acc, monkeypatch):
    monkeypatch.setattr(standalone, "copy_stream", lambda device: None)
    weights = BLOCKS * BLOCK
    assert run(acc, 22)[1] == [weights, *[weights // 2] * (FORWARDS - 1)]


def test_memory_that_shrinks_takes_blocks_and_not_the_run(acc, monkeypatch):
    """Each shortage halves what stays; then copies come one by one, then layers do. A group of 0 bytes is no room."""
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(TOKENS, WIDTH).to(acc)
    model.nothing = nn.Parameter(torch.empty(0))
    with torch.no_grad():
        wanted = model.to(acc)(x)
        offloader = StandaloneOffloader(
            Parts({"transformer": lambda _: model}), acc, "group", OffloadOptions(host_weights=HostWeights())
        )
        model.to("cpu")
        with offloader.hold("transformer") as module:
            assert torch.equal(module(x), wanted)
            held, said = accelerator.memory().allocated_bytes, []

            def fail(_: torch.Tensor) -> None:
                watched.setattr(GroupHooks, "_prefetch", lambda *_: said.append("copied ahead"))
                raise torch.OutOfMemoryError

            with monkeypatch.context() as watched, pytest.raises(torch.OutOfMemoryError):
                watched.setattr(module.blocks[9], "forward", fail)
                module(x)
            assert not said, "of a forward that failed"
            assert held > BLOCKS * BLOCK
            for _ in range(9):
                said.append(offloader.reduce_memory("transformer"))
                assert torch.equal(module(x), wanted)
                assert accelerator.memory().allocated_bytes <= held
                held = accelerator.memory().allocated_bytes
                if any(group.total_bytes for group in hooks_on(module)._stays):
                    assert said[-1] == "with fewer blocks kept on the device"
        assert said[5:8] == ["with fewer blocks kept on the device", "without copying ahead", "with offload sequential"]
        assert said[8] == ""
    offloader.release("transformer")


def test_another_program_that_takes_memory_leaves_what_fits(acc):
    """In a copy ahead, in one that is waited for, or in an operator, which is tried again as a stage does."""
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(TOKENS, WIDTH).to(acc)
    with torch.no_grad():
        wanted = model.to(acc)(x)
        options = OffloadOptions(host_weights=HostWeights({"transformer": PINNED}))
        offloader = StandaloneOffloader(Parts({"transformer": lambda _: model}), acc, "group", options)
        model.to("cpu")
        room = accelerator.memory().allocated_bytes + 4 * x.nbytes + 12 * BLOCK
        with offloader.hold("transformer") as module:
            module(x)
            with accelerator.limit(room):
                while True:
                    try:
                        found = module(x)
                        break
                    except torch.OutOfMemoryError:
                        assert offloader.reduce_memory("transformer")
            assert accelerator.memory().refusals > 0 and torch.equal(found, wanted)
            assert 4 <= len(hooks_on(module)._stays) <= 12 and hooks_on(module).ahead_bytes
    offloader.release("transformer")


@pytest.mark.parametrize("mode", ["none", "model", "group", "sequential"])
def test_the_part_in_use_makes_room_for_two_of_one_stage(acc, mode):
    parts = Parts({name: lambda _: nn.Linear(4, 4).requires_grad_(False) for name in ("transformer", "transformer_2")})
    offloader, said = StandaloneOffloader(parts, acc, mode), []
    with torch.no_grad(), offloader.hold("transformer_2") as module:
        while not said or said[-1]:
            said.append(offloader.reduce_memory("transformer", "transformer_2"))
            module(torch.ones(1, 4, device=acc))
    assert mode == "sequential" or said[-2] == "with offload sequential"


def test_a_vae_that_lacks_room_in_group_leaves_the_transformer_its_mode(acc):
    """It comes by layer in both."""
    offloader = StandaloneOffloader(Parts({"vae": lambda _: nn.Linear(4, 4).requires_grad_(False)}), acc, "group")
    assert not offloader.reduce_memory("vae", "image_encoder") and offloader.mode == "group"


def test_the_smallest_mode_gives_up_what_comes_ahead(acc):
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))).requires_grad_(False)
    offloader, x = StandaloneOffloader(Parts({"transformer": lambda _: model}), acc, "sequential"), torch.ones(2, 512)
    with torch.no_grad(), offloader.hold("transformer") as module:
        module(x.to(acc))
        assert hooks_on(module).ahead_bytes
        assert offloader.reduce_memory("transformer") == "without copying ahead" and not hooks_on(module).ahead_bytes
        module(x.to(acc))
        assert offloader.reduce_memory("transformer") == ""


# ---- every family --------------------------------------------------------------------------------------------------

FULL, STEPS = pytest.mark.full, 3
QUICK = {("ltx", "fp32")}
CHANGES = {
    "fp32": {},
    "fp16-safe": {"precision": SAFE},
    "fp8": {"weights": "fp8"},
    "int8": {"weights": "int8"},
    "compiled": {"speed": SpeedRequest(compile=CompileSettings(backend="eager"))},
}
CELLS = [
    pytest.param(family, change, marks=[] if (family, change) in QUICK else [FULL])
    for family in fitting.FAMILIES
    for change in CHANGES
]


def opened(family: str, folder: Path, device: torch.device, terms: dict[str, Any]) -> Pipeline:
    """The heavy pipeline of a family under offload group."""
    model, base, encoder = build_heavy(family, folder), None, None
    if family == "framepack":
        base, encoder = build_heavy("hunyuan_video", folder), tiny.build("siglip", folder)
    return load(
        LoadRequest(model, base, encoder, **{"precision": "fp32", "offload": "group", "device": device, **terms})
    )


def sampled(pipeline: Pipeline) -> tuple[torch.Tensor, StageCost, Times | None]:
    """Latents of one run, what its sampling cost, and its time by the clock."""
    compiled = pipeline.plan.speed.request.compile is not None  # which refuses to be watched by a clock
    with nullcontext() if compiled else clocked(SLOW) as clock:
        latents = rendered(pipeline, CASES[pipeline.family], steps=STEPS)[0]
        times = None if compiled else clock.times()
    stage = [cost for cost in pipeline.offloader.memory_stats.stages if cost.stage == "sampling"][-1]
    return latents, stage, times


@pytest.mark.parametrize(("family", "change"), CELLS)
def test_a_family_keeps_what_fits_as_its_forecast_says(acc, tiny_folder, monkeypatch, family, change):
    """Half of the transformer stays: bytes, peak and forecast agree, and time and bits beside nothing that stays."""
    pipeline, calls = opened(family, tiny_folder, acc, CHANGES[change]), []
    weights = pipeline.weights["transformer"]
    frames = CASES[family].frames
    size, settings = Size(64, 64, frames, True, 2), SampleSettings(64, 64, frames, steps=STEPS, cfg=2.0)
    need = next(s for s in forecast(pipeline, size).stages if s.name == "sampling")
    room = int(MARGIN * need.activations) + weights.passing + weights.total // 2
    pipeline.offloader.options = replace(pipeline.offloader.options, keep_free_bytes=standalone.free_bytes(acc) - room)
    said = next(s for s in forecast(pipeline, size, room=room).stages if s.name == "sampling")
    planned = planned_run(pipeline, size, settings).planned(pipeline, "sampling", room)
    transformer = pipeline.parts.read("transformer")
    transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    latents, cost, times = sampled(pipeline)
    monkeypatch.setattr(standalone, "keeps", lambda *_: False)
    without, streamed, slower = sampled(pipeline)
    assert torch.equal(latents, without) and (times is None or times.elapsed <= slower.elapsed)
    assert said.stays == planned.stays == weights.total // 2 and planned.calls == len(calls) // 2
    copied = planned.calls * weights.total - (planned.calls - 1) * said.stays
    last = weights.single or weights.block  # up to which whole blocks can fill what there is
    order = weights.block + weights.outer  # copied for nothing before the order of use is known, and after the last
    assert 0 <= cost.moved_bytes - copied <= ROUNDING * copied + (planned.calls - 1) * last + order
    off = last + (MARGIN - 1) * said.activations + ROUNDING * cost.peak_bytes
    assert abs(said.total + said.ahead - cost.peak_bytes) <= off and cost.peak_bytes <= room
    assert streamed.moved_bytes > cost.moved_bytes


@pytest.mark.parametrize("runs_out", [False, True])
@stored.any_text()
def test_painting_keeps_what_fits_and_goes_on_with_less(acc, delight_folder, recorded, monkeypatch, runs_out):  # noqa: F811
    """The UNet under half of its room, and a step in which memory runs out twice."""
    settings, progress = DelightSettings(size=64, steps=3), recorded()
    pipeline = load_paint(PaintRequest(delight_folder, precision="fp32", offload="group", device=acc))
    unet, run = pipeline.weights["unet"], planned_painting(pipeline, 64, steps=3)
    need = next(need for need in paint_needs(pipeline, run) if need.name == "delighting")
    room = int(MARGIN * need.activations) + unet.passing + unet.total // 2
    pipeline.offloader.options = replace(pipeline.offloader.options, keep_free_bytes=standalone.free_bytes(acc) - room)
    said = next(need for need in paint_needs(pipeline, run, room=room) if need.name == "delighting")
    forwards: list[int] = []

    def refuse(*_: object) -> None:
        forwards.append(1)
        if runs_out and len(forwards) in (2, 3):
            raise torch.OutOfMemoryError("CUDA out of memory")

    pipeline.parts.read("unet").register_forward_pre_hook(refuse)
    found = delight_image(pipeline, PICTURE, settings, progress)
    moved = [cost.moved_bytes for cost in pipeline.offloader.memory_stats.stages if cost.stage == "delighting"][-1]
    monkeypatch.setattr(standalone, "keeps", lambda *_: False)
    assert torch.equal(found, delight_image(pipeline, PICTURE, settings))
    streamed = [cost.moved_bytes for cost in pipeline.offloader.memory_stats.stages if cost.stage == "delighting"][-1]
    assert said.stays == unet.total // 2 and run.planned(pipeline, "delighting", room).stays == said.stays
    lines = [text for text in progress.said if "continuing" in text]
    assert len(lines) == 2 * runs_out and all("with fewer blocks kept on the device" in line for line in lines)
    if not runs_out:
        largest = max(group.total_bytes for group in hooks_on(pipeline.parts["unet"]).groups)
        assert 0 < streamed - moved <= 2 * said.stays + largest
