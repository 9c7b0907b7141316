"""A family that is one folder and one ``register`` call goes through the whole house, with two transformers and two
tensors of latents: nothing outside its folder knows of it."""

import gc
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.precision import FP32, precision_for
from anygpu.compat.errors import InputError, UnsupportedError
from anygpu.compat.transforms.step_cache import FIRST_BLOCK, StepCacheSettings
from anygpu.pipelines import stages
from anygpu.pipelines.base import Call, Latents, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.decisions import card_of
from anygpu.pipelines.forecast.memory import forecasts
from anygpu.pipelines.forecast.page import memory_plan
from anygpu.pipelines.latents import recovery
from anygpu.pipelines.latents.convert import from_core
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.load.lora import with_lora
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.registry import FAMILIES, family_named, register
from anygpu.pipelines.report import precisions
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sampling.core_sampler import velocity
from anygpu.pipelines.settings import with_step_cache
from anygpu.pipelines.sizes import Size
from anygpu.pipelines.speed import SpeedRequest
from safetensors.torch import load_file, save_file
from simulated import accelerator

from .duet.spec import SPEC, WHY

SETTINGS = SampleSettings(32, 32, 7, steps=4, seed=3, cfg=2.0)
MODES = ("none", "model", "group", "sequential")
ROUNDING = 1e-5  # kernels see other alignments; the same sums in another order


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of the registered family: tiny Mochi's parts, and another transformer of its class."""
    target = tmp_path_factory.mktemp("duet") / "duet"
    shutil.copytree(tiny.build("mochi", tiny_folder), target)
    shutil.copytree(target / "transformer", target / "transformer_2")
    for file in (target / "transformer_2").glob("*.safetensors"):
        save_file({name: tensor * 0.5 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    index = json.loads((target / "model_index.json").read_text())
    index |= {"_class_name": "DuetPipeline", "transformer_2": index["transformer"]}
    (target / "model_index.json").write_text(json.dumps(index))
    register(SPEC)
    yield target
    FAMILIES.pop(SPEC.id)


def opened(folder: Path, device: Any = "cpu", **choices: Any) -> Pipeline:
    return load(LoadRequest(folder, device=device, **{"precision": "fp32", **choices}))


def sampled(pipeline: Pipeline, progress: Any = None) -> Latents:
    progress = progress or Silent()
    prompt = stages.encode_prompt(pipeline, PromptRequest("two voices", "noise"), progress)
    return stages.sample(pipeline, prompt, None, SETTINGS, progress)


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[Latents, torch.Tensor]:
    """Latents and frames on the CPU."""
    pipeline = opened(folder)
    latents = sampled(pipeline)
    return latents, stages.decode(pipeline, latents, Silent())


def test_it_is_known_by_its_registration_alone(folder):
    assert list(FAMILIES)[-1] == SPEC.id and family_named(SPEC.id) is SPEC
    assert SPEC.transformers == ("transformer", "transformer_2")
    pipeline = opened(folder)
    assert (pipeline.spec, pipeline.family, pipeline.model.task) == (SPEC, "duet", "text")
    assert card_of(pipeline)["title"] == "Duet" and "Duet" in memory_plan(pipeline, Size(32, 32, 7))[0]


def test_both_transformers_and_both_tensors_count(folder, expected, recorded):
    progress = recorded()
    pipeline = opened(folder)
    latents = sampled(pipeline, progress)
    assert torch.equal(latents.samples, expected[0].samples) and torch.equal(
        latents.more["voice"], expected[0].more["voice"]
    )
    assert latents.more["voice"].shape == (1, 3, 2) and expected[1].shape == (7, 32, 32, 3)
    assert all(preview.shape == latents.samples.shape for preview in progress.previews) and progress.previews
    for part in SPEC.transformers:
        other = opened(folder)
        other.parts[part].proj_out.weight.data.mul_(2.0)
        assert not torch.equal(sampled(other).samples, latents.samples), f"{part} does nothing"


@pytest.mark.parametrize(
    "offload", [m if m in ("group", "sequential") else pytest.param(m, marks=pytest.mark.full) for m in MODES]
)
def test_every_offload_mode_gives_the_video_of_the_cpu(folder, expected, offload):
    if reason := accelerator.reason():
        pytest.skip(reason)
    with accelerator.fresh() as device, torch.no_grad():
        pipeline = opened(folder, device, offload=offload)
        latents = sampled(pipeline)
        frames = stages.decode(pipeline, latents, Silent())
        wanted = (expected[0].samples, expected[0].more["voice"], expected[1])
        for found, right in zip((latents.samples, latents.more["voice"], frames), wanted, strict=True):
            assert (found - right).abs().max() <= ROUNDING * right.abs().max()
        on_device = [name for name, part in pipeline.parts.items() if next(part.parameters()).device.type != "cpu"]
        assert set(on_device) <= set(pipeline.parts) if offload == "none" else len(on_device) <= 1
        for part in pipeline.parts:
            pipeline.offloader.release(part)
        del pipeline
        gc.collect()


def test_the_forecast_counts_both(folder):
    pipeline = opened(folder)
    both = sum(pipeline.weights[part].total for part in SPEC.transformers)
    by_mode = {
        each.mode: {stage.name: stage for stage in each.stages} for each in forecasts(pipeline, Size(32, 32, 7, True))
    }
    assert by_mode["none"]["sampling"].weights == by_mode["none"]["decoding"].kept == both
    assert by_mode["model"]["sampling"].weights == pipeline.weights["transformer"].total
    assert by_mode["group"]["sampling"].total < by_mode["model"]["sampling"].total


def test_its_precision_row_is_used_and_reported(folder):
    facts = facts_for("cpu")
    chosen = precision_for(SPEC.rewrites.precision, replace(facts, arch_class="cuda-sm80+"))
    assert chosen.vae is FP32 and chosen.why == WHY
    assert precisions()["Duet"] is SPEC.rewrites.precision


def test_weights_are_kept_smaller_on_both(folder):
    plain, packed = opened(folder), opened(folder, weights="int8")
    for part in SPEC.transformers:
        assert packed.weights[part].total < plain.weights[part].total
    assert packed.weights["vae"].total == plain.weights["vae"].total


@pytest.mark.parametrize("mode", ["separate", "merged"])
def test_a_lora_in_its_own_names_is_on_both_and_leaves_none(folder, expected, tmp_path, recorded, monkeypatch, mode):
    pipeline, progress = opened(folder), recorded()
    width = pipeline.parts["transformer"].transformer_blocks[0].attn1.to_q.weight.shape
    generator = torch.Generator().manual_seed(1)
    file = tmp_path / "style.safetensors"
    save_file(
        {
            "voice.0.query.lora_A.weight": torch.randn(2, width[1], generator=generator),
            "voice.0.query.lora_B.weight": torch.randn(width[0], 2, generator=generator),
        },
        file,
    )
    changed = with_lora(pipeline, file, 1.0, "", mode, progress)
    assert "style: 1 layer, 2 of 2 keys match" in progress.said
    assert not torch.equal(sampled(changed).samples, expected[0].samples)
    assert set(pipeline.parts.active_adapters) == set(SPEC.transformers)
    if mode == "separate":  # layers that are switched on, and off where that fails
        with monkeypatch.context() as broken, pytest.raises(UnsupportedError, match="no scale"):
            broken.setattr("peft.tuners.lora.LoraLayer.set_scale", lambda *_: {}["no scale"])
            sampled(changed)
        assert torch.equal(sampled(pipeline).samples, expected[0].samples)
    del changed
    gc.collect()
    assert torch.equal(sampled(pipeline).samples, expected[0].samples)


def test_step_caches_act_on_both(folder, recorded):
    pipeline, progress = opened(folder), recorded()
    cached = with_step_cache(pipeline, "custom", StepCacheSettings(kind=FIRST_BLOCK, threshold=1.0))
    sampled(cached, progress)
    said = [line for line in progress.said if line.startswith("step cache")]
    assert len(said) == 2 and ", transformer_2: " in said[1]
    assert all("1 of 2 passes of the transformer shortened" in line for line in said)


def test_kernels_are_put_into_both(folder, expected):
    pipeline = opened(folder, speed=SpeedRequest(kernels="reference"))
    latents = sampled(pipeline)
    assert {part: fused.points.total() for part, fused in pipeline.plan.speed.fused.items()} == dict.fromkeys(
        SPEC.transformers, pipeline.plan.speed.fused["transformer"].points.total()
    )
    assert (latents.samples - expected[0].samples).abs().max() <= 1e-4 * expected[0].samples.abs().max()


def test_a_sampler_of_core_s_calls_it_by_its_own_function(folder):
    pipeline = opened(folder)
    prompt = stages.encode_prompt(pipeline, PromptRequest("two voices"), Silent())
    call = Call(torch.randn(1, 12, 2, 4, 4), torch.tensor([500.0]), prompt.embeds["prompt_embeds"])
    with torch.no_grad():
        found = velocity(pipeline, pipeline.parts["transformer"], call)
    assert found.shape == call.latents.shape and found.dtype is torch.float32
    with pytest.raises(InputError, match="CONDITIONING of width 5"):
        velocity(pipeline, pipeline.parts["transformer"], Call(call.latents, call.time, torch.zeros(1, 3, 5)))


def test_latents_are_kept_and_recovered_with_both_tensors(folder, expected, tmp_path):
    pipeline, (latents, frames) = opened(folder), expected
    name = recovery.save(tmp_path, latents, lambda text: pytest.fail(text))
    latent = recovery.load(tmp_path, name, lambda _text: None)
    again = from_core(pipeline, latent, lambda _text: None)
    assert torch.equal(again.samples, latents.samples) and torch.equal(again.more["voice"], latents.more["voice"])
    assert torch.equal(stages.decode(pipeline, again, Silent()), frames)
