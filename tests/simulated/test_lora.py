"""A LoRA under every offloader on the simulated accelerator: the CPU's result twice in a row, and no trace after it."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from anygpu.pipelines import stages
from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
from anygpu.pipelines.load import lora
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LORA_MODES, LoadRequest
from safetensors.torch import save_file

from simulated import accelerator, profiles
from simulated.test_families import MODES

RANK = 4
SETTINGS = SampleSettings(32, 32, 5, steps=1, seed=3)
ROUNDING = 2e-5  # fp32 sums in another order
HALF = 2.0**-8  # share of the latents' length: half a dozen roundings of fp16 per step, as in test_matrix


@pytest.fixture(scope="module")
def file(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA over every layer of the tiny transformer."""
    layers = tiny.matrices_of(loaded_on(tiny_folder, "cpu"))
    generator, tensors = torch.Generator().manual_seed(5), {}
    for name, (rows, *inside) in layers.items():
        ones = [1] * (len(inside) - 1)
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, *inside, generator=generator) * 0.1
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, RANK, *ones, generator=generator) * 0.1
    path = tmp_path_factory.mktemp("lora") / "hunyuan_video.safetensors"
    save_file(tensors, path)
    return path


def loaded_on(folder: Path, device: Any, **choices: Any) -> Pipeline:
    return load(LoadRequest(tiny.build("hunyuan_video", folder), device=device, **{"precision": "fp32", **choices}))


def sampled(pipeline: Pipeline, prompt: Any) -> torch.Tensor:
    return stages.sample(pipeline, prompt, None, SETTINGS, Silent()).samples


@pytest.fixture(scope="module")
def expected(tiny_folder: Path, file: Path) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Prompt, latents without and with the LoRA, on the CPU in fp32."""
    pipeline = loaded_on(tiny_folder, "cpu")
    prompt = stages.encode_prompt(pipeline, PromptRequest("a cat"), Silent())
    pipe = lora.with_lora(pipeline, file, 0.8, "", "separate", Silent())
    return prompt, sampled(pipeline, prompt), sampled(pipe, prompt)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "offload"),
    [
        # Each mode and each offloader once in `make test`, all pairs in `make test-full`.
        pytest.param(
            mode,
            offload,
            marks=[] if (mode, offload) in (("separate", "group"), ("merged", "none")) else pytest.mark.full,
        )
        for mode in LORA_MODES
        for offload in MODES
    ],
)
def test_every_offloader(tiny_folder: Path, file: Path, expected: Any, offload: str, mode: str) -> None:
    """Put on after the offloader was in force, changed by strength and structure, and taken off again."""
    if reason := accelerator.reason():
        pytest.skip(reason)
    prompt, plain, adapted = expected
    with accelerator.fresh() as device:
        pipeline = loaded_on(tiny_folder, device, offload=offload)
        before = sampled(pipeline, prompt)
        pipe = lora.with_lora(pipeline, file, 0.8, "", mode, Silent())
        for _ in range(2):
            assert torch.allclose(sampled(pipe, prompt), adapted, atol=ROUNDING, rtol=0)
        assert torch.equal(sampled(pipeline, prompt), before)
        stronger = lora.with_lora(pipeline, file, 0.4, "", mode, Silent())
        doubled = lora.with_lora(stronger, file, 0.4, "", mode, Silent())
        assert torch.allclose(sampled(doubled, prompt), adapted, atol=ROUNDING, rtol=0)
        assert torch.equal(sampled(pipeline, prompt), before)
        assert torch.allclose(before, plain, atol=ROUNDING, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("machine", "mode", "offload"),
    [
        ("turing", "separate", "group"),
        pytest.param("turing", "separate", "sequential", marks=pytest.mark.full),
        pytest.param("turing", "merged", "none", marks=pytest.mark.full),
        pytest.param("no-conv3d", "separate", "model", marks=pytest.mark.full),
        pytest.param("gfx1151", "separate", "model", marks=pytest.mark.full),
        ("gfx1151", "merged", "none"),
    ],
)
def test_beside_the_rewrites_of_a_machine(
    tiny_folder: Path, file: Path, expected: Any, tmp_path: Path, machine: str, mode: str, offload: str
) -> None:
    """fp16-safe blocks, replaced convolutions, and a device that damages bf16: near the CPU's fp32."""
    if reason := accelerator.reason():
        pytest.skip(reason)
    prompt, plain, adapted = expected
    with profiles.on(machine) as profile:
        pipeline = loaded_on(tiny_folder, profile.facts, precision="auto", offload=offload, state=tmp_path)
        before = sampled(pipeline, prompt)
        pipe = lora.with_lora(pipeline, file, 0.8, "", mode, Silent())
        found = [sampled(pipe, prompt) for _ in range(2)]
        after = sampled(pipeline, prompt)
    allowed = HALF if pipeline.precision.safe else 1e-4
    for latents in found:
        assert float((latents - adapted).norm() / adapted.norm()) <= allowed, str(pipeline.precision)
    assert float((adapted - plain).norm() / plain.norm()) > 10 * allowed, "the LoRA does too little to be seen"
    assert torch.equal(after, before)
