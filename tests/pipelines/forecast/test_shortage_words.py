"""A stage whose memory runs out steps down, in whatever words the back end says so: that is not a fault of a kernel."""

from typing import Any

import pytest
import tiny
import torch
from anygpu.pipelines import stages
from anygpu.pipelines.base import ImageRequest, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest

ERRORS = (
    RuntimeError("Invalid buffer size: 24.00 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError("no room"),
)
SIZE = SampleSettings(64, 64, 9, steps=2, seed=1)
PROMPT = PromptRequest("a fox", "")


@pytest.fixture(scope="module")
def pipeline(tiny_folder) -> Pipeline:
    return load(LoadRequest(tiny.build("ltx", tiny_folder), device="cpu"), Silent())


@pytest.fixture(scope="module")
def made(pipeline: Pipeline) -> dict[str, Any]:
    """What each stage gives where nothing fails, and its inputs."""
    with torch.no_grad():
        prompt = stages.encode_prompt(pipeline, PROMPT, Silent())
        latents = stages.sample(pipeline, prompt, None, SIZE, Silent())
        results = {stage: run(stage, pipeline, {"prompt": prompt, "latents": latents}, Silent()) for stage in STAGES}
    return {**results, "prompt": prompt, "latents": latents}


def run(stage: str, pipeline: Pipeline, made: dict[str, Any], progress: Any) -> torch.Tensor:
    if stage == "image":
        picture = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0))
        return stages.encode_image(pipeline, ImageRequest(picture, 64, 64), "crop", progress).tensors["moments_0"]
    if stage == "text":
        return stages.encode_prompt(pipeline, PROMPT, progress).embeds["prompt_embeds"]
    if stage == "sampling":
        return stages.sample(pipeline, made["prompt"], None, SIZE, progress).samples
    return stages.decode(pipeline, made["latents"], progress)


STAGES = {"text": "text_encoder", "image": "vae.encoder", "sampling": "transformer", "decoding": "vae.decoder"}
CELLS = [
    pytest.param(
        stage, error, id=f"{stage}-{words}", marks=[] if words == "host" or stage == "text" else pytest.mark.full
    )
    for stage in STAGES
    for words, error in zip(("MPS", "cuBLAS", "host"), ERRORS, strict=True)
]


@pytest.mark.full
@pytest.mark.parametrize(("stage", "error"), CELLS)
def test_the_stage_steps_down(pipeline, made, recorded, stage, error):
    name, _, coder = STAGES[stage].partition(".")
    with torch.no_grad():
        progress, failed = recorded(), []

        def fail(module: Any, inputs: Any) -> None:
            if not failed:
                failed.append(error)
                raise error

        owner = pipeline.parts.read(name, Silent())
        handle = (getattr(owner, coder) if coder else owner).register_forward_pre_hook(fail)
        try:
            result = run(stage, pipeline, made, progress)
        finally:
            handle.remove()
    assert failed and any("ran out of memory" in line for line in progress.said), progress.said
    torch.testing.assert_close(result, made[stage], rtol=1e-4, atol=1e-4)
