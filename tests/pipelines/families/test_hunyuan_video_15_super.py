"""HunyuanVideo 1.5's super-resolution: its sizes, its upscalers, and what its transformer is given at which time.

``tests/pipelines/test_whole_loops.py`` holds its whole loops against its publisher's code.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.errors import CheckpointError, InputError
from anygpu.pipelines import stages
from anygpu.pipelines.base import EMBEDS, FINAL, ImageRequest, Latents, Prompt, SampleSettings, Silent
from anygpu.pipelines.families.hunyuan_video_15 import pipeline as hunyuan_video_15
from anygpu.pipelines.latents.convert import from_core, to_core
from anygpu.pipelines.latents.store import load_latent, save_latent
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.settings import final_size, of_checkpoint, recipe_of
from published import loops
from safetensors.torch import load_file, save_file

ENDS = ("720p", "1080p")
LOW, HIGH = {"720p": (848, 480), "1080p": (1280, 720)}, {"720p": (1280, 720), "1080p": (1904, 1072)}
IMAGE = "hunyuan_video_15_i2v"


@pytest.fixture(scope="module")
def models(tiny_folder: Path) -> dict[str, Pipeline]:
    """A small base model, and its super-resolutions by the height at their end."""
    made = {end: loops.hunyuan_15_super(IMAGE, tiny_folder, end) for end in ENDS}
    made["base"] = tiny.build(IMAGE, tiny_folder)
    return {name: load(LoadRequest(folder, device="cpu", precision="fp32")) for name, folder in made.items()}


def latents(width: int, height: int, frames: int = 1) -> Latents:
    samples = torch.randn(1, 32, (frames - 1) // 4 + 1, height // 16, width // 16, generator=torch.Generator())
    return Latents(samples, "hunyuan_video_15", "text", frames, height, width, 24.0, 0)


def prompt() -> Prompt:
    draws = torch.Generator().manual_seed(1)
    return Prompt("hunyuan_video_15", {EMBEDS: torch.randn(1, 6, 32, generator=draws)}, None)


@pytest.mark.parametrize("end", ENDS)
def test_it_has_its_publishers_recipe_and_size(models: dict[str, Pipeline], tmp_path: Path, end: str) -> None:
    pipeline = models[end]
    high = stages.upscale(models["base"], latents(*LOW[end]), loops.hunyuan_15_upscaler(tmp_path, end), Silent())
    assert (high.width, high.height) == HIGH[end] and high.samples.shape[3:] == (HIGH[end][1] // 16, HIGH[end][0] // 16)
    assert "latent_upsampler" not in models["base"].parts.readers
    recipe = recipe_of(pipeline, SampleSettings(0, 0, 0, latents=high))
    assert recipe is not None and (recipe.steps, recipe.shift) == ({"720p": 6, "1080p": 8}[end], 2.0)
    assert final_size(SampleSettings(*LOW[end], 0, latents=high)) == {}, "it is the first pass's, and asks for nothing"
    assert list(final_size(SampleSettings(1920, 1080, 0, latents=high)).values()) == [1920, 1080]
    defaults = of_checkpoint(pipeline).sizes.defaults
    assert (defaults.width, defaults.height, defaults.cfg) == (*HIGH[end], 1.0)


@pytest.mark.parametrize(("names", "words"), [("ltx", "no latent upscaler of"), ("cut", "no tensors 'conv_out")])
def test_another_upscaler_is_named(models: dict[str, Pipeline], tmp_path: Path, names: str, words: str) -> None:
    tensors = load_file(loops.hunyuan_15_upscaler(tmp_path, "720p"))
    if names == "ltx":
        tensors = {"initial_conv.weight": torch.zeros(8, 128, 3, 3, 3)}
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("out_conv")}
    save_file(kept, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=words):
        stages.upscale(models["base"], latents(64, 48), tmp_path / "x.safetensors", Silent())


def upscaled(folder: Path, models: dict[str, Pipeline], frames: int = 5) -> Latents:
    """Latents of 64x48 that bear the upscaler's marks, as they are read again from a file."""
    made = stages.upscale(models["base"], latents(64, 48, frames), loops.hunyuan_15_upscaler(folder, "720p"), Silent())
    small = replace(made, samples=made.samples[..., :3, :4].contiguous(), width=64, height=48)
    path = save_latent(folder / "kept.safetensors", to_core(small), print)
    return from_core(models["base"], load_latent(path, print), print)


def test_the_small_video_is_shown_while_its_noise_is_the_smaller(
    models: dict[str, Pipeline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, torch.Tensor, Any]] = []
    velocity = hunyuan_video_15.velocity

    def watched(pipeline: Pipeline, transformer: Any, call: Any) -> torch.Tensor:
        seen.append((float(call.time), call.latents.clone(), call.next_time))
        return velocity(pipeline, transformer, call)

    monkeypatch.setattr(hunyuan_video_15, "velocity", watched)
    low = upscaled(tmp_path, models)
    settings = SampleSettings(96, 80, 0, seed=3, latents=low)
    found = stages.sample(models["720p"], prompt(), None, settings, Silent())
    assert found.samples.shape == low.samples.shape and [found.extra[name] for name in FINAL] == [96, 80]
    assert len(seen) == 6
    draws = torch.Generator().manual_seed(3)
    noise, more = (torch.randn(low.samples.shape, generator=draws) for _ in range(2))
    scale = float(models["720p"].configs["vae"]["scaling_factor"])
    torch.testing.assert_close(seen[0][1][:, :32], noise)
    for time, given, _ in seen:
        shown = torch.cat([0.3 * scale * low.samples + 0.7 * more, torch.ones_like(noise[:, :1])], dim=1)
        torch.testing.assert_close(given[:, 65:], shown if time >= 700 else torch.zeros_like(shown))
        assert not given[:, 32:65].any()
    assert [round(time) for time, _, _ in seen] == [1000, 909, 800, 667, 500, 286]
    other = replace(low, samples=-low.samples)
    assert not torch.equal(
        found.samples, stages.sample(models["720p"], prompt(), None, replace(settings, latents=other), Silent()).samples
    )


def test_it_is_refused_without_what_it_enlarges_and_the_base_with_it(
    models: dict[str, Pipeline], tmp_path: Path
) -> None:
    asked = SampleSettings(64, 48, 5, seed=3)
    image = stages.encode_image(models["720p"], ImageRequest(torch.rand(1, 48, 64, 3), 64, 48), "crop", Silent())
    with pytest.raises(InputError, match="no latents for the super-resolution"):
        stages.sample(models["720p"], prompt(), image, asked, Silent())
    with pytest.raises(InputError, match="upscaled latents for"):
        small = replace(asked, cfg=1.0, latents=upscaled(tmp_path, models))
        stages.sample(models["base"], prompt(), None, small, Silent())


def test_a_picture_takes_the_size_of_the_latents_and_its_encoder_sees_its_own(
    models: dict[str, Pipeline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    states = hunyuan_video_15._states
    monkeypatch.setattr(
        hunyuan_video_15,
        "_states",
        lambda own, frames, *rest: (seen.append(tuple(frames.shape)), states(own, frames, *rest))[1],
    )
    low, asked = upscaled(tmp_path, models), ImageRequest(torch.rand(1, 90, 100, 3), 0, 0)
    image = stages.encode_image(models["720p"], asked, "nearest bucket", Silent(), low)
    assert (image.width, image.height) == (low.width, low.height)
    assert image.tensors["image_latents"].shape[3:] == low.samples.shape[3:]
    wide, tall = hunyuan_video_15.nearest_size(models["720p"], 100, 90)
    assert seen == [(1, tall, wide, 3)] and wide > 900
