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


def run(stage: str, pipeline: Pipeline, progress: Any) -> torch.Tensor:
    if stage == "image":
        picture = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0))
        return stages.encode_image(pipeline, ImageRequest(picture, 64, 64), "crop", progress).tensors["moments_0"]
    prompt = stages.encode_prompt(pipeline, PROMPT, progress if stage == "text" else Silent())
    if stage == "text":
        return prompt.embeds["prompt_embeds"]
    latents = stages.sample(pipeline, prompt, None, SIZE, progress if stage == "sampling" else Silent())
    return latents.samples if stage == "sampling" else stages.decode(pipeline, latents, progress)


@pytest.mark.parametrize("error", ERRORS, ids=("MPS", "cuBLAS", "host"))
@pytest.mark.parametrize(
    ("stage", "part"),
    [("text", "text_encoder"), ("image", "vae.encoder"), ("sampling", "transformer"), ("decoding", "vae.decoder")],
)
def test_the_stage_steps_down(pipeline, recorded, stage, part, error):
    name, _, coder = part.partition(".")
    with torch.no_grad():
        expected, progress, failed = run(stage, pipeline, Silent()), recorded(), []

        def fail(module: Any, inputs: Any) -> None:
            if not failed:
                failed.append(error)
                raise error

        owner = pipeline.parts.read(name, Silent())
        handle = (getattr(owner, coder) if coder else owner).register_forward_pre_hook(fail)
        try:
            result = run(stage, pipeline, progress)
        finally:
            handle.remove()
    assert failed and any("ran out of memory" in line for line in progress.said), progress.said
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
