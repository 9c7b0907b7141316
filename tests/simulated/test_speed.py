"""Kernels, compile and offload together, on the simulated accelerator: what fails without our order works with it."""

import types
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.transforms import compile as compiling
from anygpu.compat.transforms.compile import CompileSettings
from anygpu.kernels.norm import normalized
from anygpu.kernels.terms import RMS, Norm
from anygpu.pipelines.speed import SpeedRequest

from simulated.test_families import MODES, ROUNDING, SMALL, loaded_for, rendered

EAGER = CompileSettings(backend="eager")


@pytest.fixture(autouse=True)
def forgotten():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


QUICK = {("ltx", "group", True), ("ltx", "sequential", True), ("ltx", "sequential", False), ("mochi", "model", False)}
CELLS = [
    pytest.param(name, offload, compile, marks=[] if (name, offload, compile) in QUICK else [pytest.mark.full])
    for name in ("ltx", "hunyuan_video", "hunyuan_video image", "hunyuan_video_15", "framepack", "mochi")
    for offload in MODES
    for compile in (False, True)
]


@pytest.mark.parametrize(("name", "offload", "compile"), CELLS)
def test_kernels_compile_and_offload_twice_in_a_row(acc, tiny_folder, on_host, name, offload, compile):
    """The table of ``compiling.WITH_OFFLOAD``: each pair is equal, or refused with its reason."""
    speed = SpeedRequest("reference", EAGER if compile else None)
    if compile and compiling.WITH_OFFLOAD[offload]:
        with pytest.raises(UnsupportedError, match=f"compile with offload '{offload}': it moves weights"):
            loaded_for(SMALL[name], tiny_folder, "acc:0", offload, speed=speed)
        return
    pipeline = loaded_for(SMALL[name], tiny_folder, "acc:0", offload, speed=speed)
    for _ in range(2):
        for ours, expected in zip(rendered(pipeline, SMALL[name]), on_host(name), strict=True):
            torch.testing.assert_close(ours, expected, atol=ROUNDING, rtol=ROUNDING)
    for part in ("transformer", "vae"):
        assert pipeline.plan.speed.fused[part].points and not pipeline.plan.speed.fused[part].left
    if compile:
        compiled = pipeline.plan.speed.compiled["transformer"]
        kinds = {"ltx": 1, "hunyuan_video_15": 1}.get(name, 2)
        assert not compiled.failure and compiled.graphs == kinds


# ---- LTX-Video with kernels, compile and offload, the way it is usually put together -----------------------


def _naive(module: Any, calls: list[str]) -> None:
    """A kernel patched in the usual way: the forward that stands there is wrapped, whatever put it there."""
    inner = module.forward

    def forward(*args: Any, **named: Any) -> Any:
        calls.append("kernel")
        return inner(*args, **named)

    module.forward = forward


def _run(pipeline: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    given = {"prompt": "a red fox", "negative_prompt": "blurry", "width": 64, "height": 64, "num_frames": 9}
    with torch.no_grad():
        return pipeline(**given, num_inference_steps=2, generator=generator, output_type="latent").frames


def test_without_our_order_a_kernel_is_gone_after_the_first_call(acc, tiny_folder):
    pipeline = tiny.one_shot("ltx", tiny_folder)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.enable_model_cpu_offload(device="acc:0")
    calls: list[str] = []
    _naive(pipeline.transformer, calls)
    _run(pipeline)
    first = len(calls)
    _run(pipeline)
    assert first == 2 and len(calls) == first, "upstream keeps patched forwards now: this test has lost its point"


def test_without_our_order_a_leaf_patched_under_group_offload_meets_another_device(acc, tiny_folder):
    from diffusers.hooks import apply_group_offloading

    pipeline = tiny.one_shot("ltx", tiny_folder)
    transformer = pipeline.transformer
    apply_group_offloading(transformer, torch.device("acc:0"), torch.device("cpu"), offload_type="leaf_level")
    norm = transformer.transformer_blocks[0].attn1.norm_q

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:  # what the hooks had put here is lost
        return normalized(x, Norm(RMS, self.eps, self.weight))

    norm.forward = types.MethodType(forward, norm)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.vae.to("acc:0"), pipeline.text_encoder.to("acc:0")
    with pytest.raises(RuntimeError, match="device"):
        _run(pipeline)


def test_without_our_registration_a_raw_kernel_breaks_the_graph():
    def launched(x: torch.Tensor) -> torch.Tensor:
        assert x.untyped_storage().data_ptr()  # what every launch of a raw kernel begins with
        return x * 2

    compiled = torch.compile(lambda x: launched(x) + 1, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"data_ptr|Unsupported"):
        compiled(torch.ones(4))


@pytest.mark.parametrize("offload", [pytest.param("model", marks=pytest.mark.full), "group"])
def test_with_our_order_kernels_and_compile_act_in_every_call(acc, tiny_folder, on_host, monkeypatch, offload):
    from anygpu.compat.transforms import blocks

    calls: list[str] = []
    summed = blocks.gated_residual

    def counted(*args: Any, **named: Any) -> torch.Tensor:
        calls.append("kernel")
        return summed(*args, **named)

    pipeline = loaded_for(SMALL["ltx"], tiny_folder, "acc:0", offload, speed=SpeedRequest("reference"))
    monkeypatch.setattr(blocks, "gated_residual", counted)
    counts = []
    for _ in range(2):
        calls.clear()
        latents, _ = rendered(pipeline, SMALL["ltx"])
        torch.testing.assert_close(latents, on_host("ltx")[0], atol=ROUNDING, rtol=ROUNDING)
        counts.append(len(calls))
    assert counts == [2 * 2 * 2] * 2  # steps, blocks, gated sums
