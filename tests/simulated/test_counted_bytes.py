"""Bytes that a run on the simulated accelerator moves are those of the forecast, within five percent."""

import pytest
import tiny
import torch
from anygpu.compat.device.rates import COPY
from anygpu.compat.device.work import counting
from anygpu.pipelines import base, stages
from anygpu.pipelines.forecast import counts
from anygpu.pipelines.forecast.seconds import planned_run
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sizes import Size, latent_shape
from anygpu.pipelines.text.t5 import held_encoder, without_unpacking
from anygpu.pipelines.vae.plan import DecodeRequest, ladder_for

from simulated.test_families import CASES, loaded_for

OFF = 0.05


@pytest.mark.parametrize(
    ("family", "pixels", "form"),
    [
        pytest.param("hunyuan_video", 128, DecodeRequest("streaming", tile=32), marks=pytest.mark.full),
        pytest.param("mochi", 64, DecodeRequest("streaming", tile=16, frames=1), marks=pytest.mark.full),
        pytest.param("hunyuan_video_15", 128, DecodeRequest("streaming", tile=64, frames=2), marks=pytest.mark.full),
        ("ltx", 128, DecodeRequest("streaming", tile=32)),
        pytest.param("mochi", 64, DecodeRequest("chunked", frames=1), marks=pytest.mark.full),
        pytest.param("hunyuan_video_15", 64, DecodeRequest("tiled", tile=32), marks=pytest.mark.full),
    ],
)
def test_planes_of_a_decode(acc, tiny_folder, family, pixels, form):
    pipeline = loaded_for(CASES[family], tiny_folder, acc, "none")
    size = Size(pixels, pixels, 4 * pipeline.spec.sizes.stride + 1)
    shape = (1, pipeline.configs["vae"]["latent_channels"], *latent_shape(pipeline, size))
    latents = base.Latents(torch.ones(shape), pipeline.family, "text", size.frames, pixels, pixels, 24.0, 0)
    before = pipeline.offloader.memory_stats.moved_bytes
    with counting() as ran:
        stages.decode(pipeline, latents, base.Silent(), form=form)
    moved = pipeline.offloader.memory_stats.moved_bytes - before - pipeline.weights["vae"].total
    work = counts.decoding_work(pipeline, size, ladder_for(pipeline, latent_shape(pipeline, size), form).method)
    copied = sum(count * times for (kind, _, count), times in work.items() if kind == COPY)
    assert copied == pytest.approx(moved, rel=OFF) and copied > 0
    assert work.flops == pytest.approx(ran.flops, rel=OFF)


@pytest.mark.full
def test_packed_weights_are_made_dense_at_each_use(acc, tiny_folder):
    """Those of a text encoder and of a transformer: what a run moves more than with plain weights."""
    settings, silent = base.SampleSettings(32, 32, 7, steps=2, cfg=2.0, seed=3), base.Silent()
    ran, told = {}, {}
    for choice in ("auto", "int8", "fp8", "int8_convrot", "bf16"):
        kept = {"weights": choice, "text_weights": choice, "precision": "fp32", "offload": "none"}
        pipeline = load(LoadRequest(tiny.build("mochi", tiny_folder), device=acc, **kept))
        prompt = stages.encode_prompt(pipeline, base.PromptRequest("a red fox", "blurry"), silent)
        with held_encoder(pipeline, "text_encoder", 2, silent) as encoder, without_unpacking(encoder), torch.no_grad():
            tokens = torch.ones(2, 16, dtype=torch.int64).to(acc)
            with counting() as encoded:
                encoder(tokens)
        stages.sample(pipeline, prompt, None, settings, silent)  # which reads, packs and moves the weights
        with counting() as sampled:
            stages.sample(pipeline, prompt, None, settings, silent)
        run = planned_run(pipeline, stages.size_of(settings, prompt), settings)
        ran[choice] = encoded.bytes, sampled.bytes
        told[choice] = counts.text_work(pipeline).bytes, counts.sampling_work(pipeline, run.size, run.settings).bytes
    for choice in ran.keys() - {"auto"}:
        more = [[own - plain for own, plain in zip(each[choice], each["auto"], strict=True)] for each in (ran, told)]
        assert more[1] == pytest.approx(more[0], rel=OFF) and min(more[0]) > 0, choice
