"""SkyReels V1 image to video: HunyuanVideo with the picture beside the noise, equal to diffusers' pipeline for it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.device.execution import generator_for
from anygpu.pipelines import stages
from anygpu.pipelines.base import ImageRequest, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.settings import of_checkpoint
from PIL import Image
from tiny import parts
from tiny.weights import randomise

WIDTH, HEIGHT, FRAMES, STEPS, SEED, SCALE = 48, 32, 9, 2, 7, 0.476986
PROMPT, NEGATIVE = "FPS-24, a red cat jumps over the wall", "overexposed"


@pytest.fixture(scope="module")
def skyreels(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The lone transformer as Skywork publishes it, beside HunyuanVideo, which lends it the rest."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "HunyuanVideo").symlink_to(tiny.build("hunyuan_video", tiny_folder), target_is_directory=True)
    transformer = parts.hunyuan_transformer(in_channels=32, out_channels=16, guidance_embeds=True)
    randomise(transformer, 3)
    transformer.save_pretrained(folder / "SkyReels-V1-Hunyuan-I2V")
    pipeline = load(LoadRequest(folder / "SkyReels-V1-Hunyuan-I2V", device="cpu", precision="fp32"))
    shown = torch.rand(1, HEIGHT, WIDTH, 3, generator=torch.Generator().manual_seed(0))
    shown = (shown * 255).round() / 255
    return SimpleNamespace(pipeline=pipeline, shown=shown, one_shot=tiny.one_shot("hunyuan_video", tiny_folder))


def test_the_latents_are_those_of_diffusers(skyreels: SimpleNamespace) -> None:
    """From the same embeddings and one copy of the weights; the picture is drawn by the seed of Encode Image."""
    from diffusers import HunyuanSkyreelsImageToVideoPipeline

    pipeline = skyreels.pipeline
    prompt = stages.encode_prompt(pipeline, PromptRequest(PROMPT, NEGATIVE), Silent())
    image = stages.encode_image(pipeline, ImageRequest(skyreels.shown, WIDTH, HEIGHT, seed=SEED), "stretch", Silent())
    found = stages.sample(
        pipeline, prompt, image, SampleSettings(WIDTH, HEIGHT, FRAMES, steps=STEPS, seed=SEED), Silent()
    )
    ours = {part: pipeline.parts[part] for part in ("transformer", "vae")}
    pipe = HunyuanSkyreelsImageToVideoPipeline(**{**skyreels.one_shot.components, **ours})
    pipe.set_progress_bar_config(disable=True)
    given: dict[str, Any] = {**prompt.embeds, **{f"negative_{key}": value for key, value in prompt.negative.items()}}
    with torch.no_grad():
        theirs = pipe(
            image=Image.fromarray((skyreels.shown[0] * 255).round().to(torch.uint8).numpy()),
            **given,
            height=HEIGHT,
            width=WIDTH,
            num_frames=FRAMES,
            num_inference_steps=STEPS,
            generator=torch.Generator().manual_seed(SEED),
            latents=torch.randn(found.samples.shape, generator=generator_for(SEED)),
            output_type="latent",
        ).frames
    assert torch.equal(found.samples, theirs / SCALE)


def test_its_recipe_is_its_publishers(skyreels: SimpleNamespace, recorded: Any) -> None:
    defaults, pipeline, watched = of_checkpoint(skyreels.pipeline).sizes.defaults, skyreels.pipeline, recorded()
    assert (pipeline.variant, pipeline.model.task) == ("skyreels", "image")
    size = (defaults.width, defaults.height, defaults.frames, defaults.fps)
    assert (*size, defaults.steps, defaults.cfg, defaults.guidance) == (960, 544, 97, 24.0, 30, 6.0, 1.0)
    stages.encode_prompt(pipeline, PromptRequest("a cat"), watched)
    assert any("begin with 'FPS-24, '" in line for line in watched.said)


@pytest.mark.parametrize(
    ("name", "variant"),
    [("SkyReels-V1-Hunyuan-T2V", "skyreels"), ("skyreels_hunyuan_t2v_bf16", "skyreels"), ("hunyuan", "hunyuan_video")],
)
def test_text_to_video_is_told_by_its_name(tiny_folder: Path, tmp_path: Path, name: str, variant: str) -> None:
    (tmp_path / "models").mkdir()
    folder = tmp_path / "models" / name
    folder.symlink_to(tiny.build("hunyuan_video", tiny_folder), target_is_directory=True)
    pipeline = load(LoadRequest(folder, device="cpu"))
    assert pipeline.variant == variant
    assert [d.why for d in pipeline.plan.decisions if d.subject == "variant"] == [f"the name {name!r} says so"] * (
        variant == "skyreels"
    )
