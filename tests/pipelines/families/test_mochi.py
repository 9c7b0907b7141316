"""Mochi through our stages against the bare pipeline."""

from dataclasses import replace

import pytest
import tiny
import torch
from anygpu.compat.errors import InputError
from anygpu.pipelines import stages
from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
from anygpu.pipelines.families.mochi.layouts import LAYOUTS
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.vae.tiled import decode_as_published

PADDING = 1e-5  # text padding is trimmed, so attention sums run over fewer zeros
ASKED = SampleSettings(64, 48, 7, steps=3, seed=7, cfg=4.5, fps=30.0)


@pytest.fixture(scope="module")
def pipeline(tiny_folder) -> Pipeline:
    return load(LoadRequest(tiny.build("mochi", tiny_folder), precision="fp32", device="cpu"))


@pytest.fixture(scope="module")
def prompt(pipeline):
    return stages.encode_prompt(pipeline, PromptRequest("a red fox in snow", "blurry"), Silent())


@pytest.fixture(scope="module")
def latents(pipeline, prompt):
    with torch.no_grad():
        return stages.sample(pipeline, prompt, None, ASKED, Silent())


def sampled(pipeline, prompt, **changes):
    with torch.no_grad():
        return stages.sample(pipeline, prompt, None, replace(ASKED, **changes), Silent()).samples


def test_equals_the_bare_pipeline(pipeline, latents, tiny_folder):
    pipe = tiny.one_shot("mochi", tiny_folder)
    decode_as_published(pipe.vae)  # as Genmo's; tests/pipelines/vae/test_published.py holds it beside theirs
    arguments = dict(
        prompt="a red fox in snow", negative_prompt="blurry", height=48, width=64, num_frames=7,
        num_inference_steps=3, guidance_scale=4.5,
    )  # fmt: skip
    with torch.no_grad():
        video = pipe(**arguments, generator=torch.Generator().manual_seed(7), output_type="np").frames[0]
        raw = pipe(**arguments, generator=torch.Generator().manual_seed(7), output_type="latent").frames
        frames = stages.decode(pipeline, latents, Silent())
    config = pipe.vae.config
    mean, std = (torch.tensor(getattr(config, name)).view(1, 12, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    expected = raw * std / config.scaling_factor + mean
    assert (latents.samples - expected).abs().max() <= PADDING * expected.abs().max()
    assert frames.shape == (7, 48, 64, 3)
    assert (frames - torch.from_numpy(video)).abs().max() <= PADDING


def test_an_empty_negative_prompt_is_finite(pipeline):
    empty = stages.encode_prompt(pipeline, PromptRequest("a red fox in snow", ""), Silent())
    assert torch.isfinite(sampled(pipeline, empty)).all()


def test_sigmas_equal_to_the_schedule_give_the_same_latents(pipeline, prompt, latents):
    from anygpu.pipelines.families.mochi.pipeline import _levels

    sigmas = (*map(float, _levels(None, 3).sigmas), 0.0)
    found = sampled(pipeline, prompt, sigmas=sigmas)
    assert (found - latents.samples).abs().max() < 1e-4 * latents.samples.abs().max()


def test_guidance_outside_its_range_equals_no_guidance(pipeline, prompt):
    assert torch.equal(sampled(pipeline, prompt, cfg_start=0.0, cfg_end=0.0), sampled(pipeline, prompt, cfg=1.0))


def test_no_text_encoder_stays_in_memory(pipeline, prompt):
    assert "text_encoder" not in pipeline.parts


def test_conditioning_of_another_encoder_is_refused_in_one_line(pipeline):
    """Otherwise it is a mat1/mat2 error in the middle of sampling; of two texts combined, one would be lost."""
    width = pipeline.configs["transformer"]["text_embed_dim"]
    with pytest.raises(InputError, match=f"width {width + 8}; expected width {width}"):
        stages.prompt_from_core(pipeline, [[torch.zeros(1, 5, width + 8), {}]])
    with pytest.raises(InputError, match="CONDITIONING of 2 texts; expected one"):
        stages.prompt_from_core(pipeline, [[torch.zeros(1, 5, width), {}]] * 2)


def test_fast_mochi_takes_its_own_levels(pipeline, prompt, recorded):
    """Those of FastVideo's script: of 1000 levels, 750 of them linear to 0.1; 8 steps, cfg 1.5, 163 frames."""
    from anygpu.pipelines.settings import of_checkpoint, recipe_of
    from diffusers.pipelines.mochi.pipeline_mochi import linear_quadratic_schedule

    fast = replace(pipeline, model=replace(pipeline.model, recipe="FastMochi"))
    usual, levels = of_checkpoint(fast).sizes.defaults, linear_quadratic_schedule(1000, 0.1, 750)
    sigmas = (*(float(levels[step * 100 // 8 * 10]) for step in range(8)), 0.0)
    assert (usual.steps, usual.cfg, usual.frames, usual.width, usual.height) == (8, 1.5, 163, 848, 480)
    assert recipe_of(fast).timesteps == pytest.approx(sigmas[:-1], abs=1e-9)
    said, chosen, line = recorded(), recorded(), "noise levels of FastVideo's own script; they were Genmo's before"
    own = stages.sample(fast, prompt, None, replace(ASKED, steps=0, cfg=0.0), said)
    given = stages.sample(fast, prompt, None, replace(ASKED, steps=8, cfg=1.5, sigmas=sigmas), chosen)
    assert line not in chosen.said
    stages.sample(fast, prompt, None, replace(ASKED, steps=2, cfg=0.0), said)
    assert said.said.count(line) == 1, "what an older graph had otherwise is said once"
    less = replace(ASKED, steps=8, cfg=1.0, seed=1, latents=own, denoise=0.02)
    near, far = (stages.sample(fast, prompt, None, each, said).samples for each in (less, replace(less, denoise=1.0)))
    assert (near - own.samples).norm() < 0.2 * (far - own.samples).norm(), "it begins near the latents"
    torch.testing.assert_close(own.samples, given.samples, atol=1e-4, rtol=1e-4)
    assert not torch.equal(
        own.samples, stages.sample(pipeline, prompt, None, replace(ASKED, steps=8), Silent()).samples
    )
    empty = [stages.encode_prompt(made, PromptRequest("a cat", ""), Silent()).negative for made in (fast, pipeline)]
    assert not torch.equal(*(text["prompt_embeds"] for text in empty)), "there an empty negative prompt is encoded"


@pytest.mark.parametrize("coder", ["encoder", "decoder"])
def test_a_half_of_the_vae_has_blocks_of_any_depth(coder):
    rows = {layout.kind: layout.rows for layout in LAYOUTS if callable(layout.rows)}
    names = [f"{coder}.layers.{index}.layers.{index + 20}.weight" for index in (4, 6)]
    whole = [row for row in rows["mochi/vae"](names) if row.source.startswith(coder)]
    half = rows[f"mochi/vae_{coder}"](name.removeprefix(f"{coder}.") for name in names)
    assert [f"{coder}.{row.source}" for row in half] == [row.source for row in whole]
