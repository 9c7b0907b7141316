"""Whole loops, from words and a picture to the last frame: an untouched graph beside its publisher's own code.

``published/loop_reference.py`` ran that code; here the stages run with every input at its default, but for seed, size
and words.
"""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from anygpu.pipelines import stages
from anygpu.pipelines.base import (
    FramePackSettings,
    ImageCondition,
    ImageRequest,
    Latents,
    PromptRequest,
    SampleSettings,
    Silent,
)
from anygpu.pipelines.family import FITS
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from diffusers.pipelines.hunyuan_video1_5 import image_processor as buckets
from published import compared, loops
from safetensors.torch import load_file


def framepack(name: str) -> Callable[[Path], torch.Tensor]:
    """A clip of the application's own length, from a picture of another shape."""

    def run(folder: Path) -> torch.Tensor:
        tiny.build("siglip", folder)
        base = tiny.build("hunyuan_video", folder)
        pipeline = load(LoadRequest(tiny.build(name, folder), device="cpu", precision="fp32", base=base))
        height, width = loops.FRAMEPACK_SIZE
        prompt = stages.encode_prompt(pipeline, PromptRequest(loops.PROMPT, ""), Silent())
        asked = ImageRequest(loops.picture(*loops.FRAMEPACK_PICTURE), width, height)
        image = stages.encode_image(pipeline, asked, FITS[0], Silent())
        assert (image.width, image.height) == (width, height)
        settings = SampleSettings(width, height, 0, seed=loops.SEED)
        latents = stages.sample_framepack(
            pipeline, prompt, image, settings, FramePackSettings(loops.FRAMEPACK_SECONDS), Silent()
        )
        return stages.decode(pipeline, latents, Silent())

    return run


def from_words(
    name: str,
    size: tuple[int, int] = loops.SIZE,
    negative: str = "",
    build: Any = tiny.build,
    text: str = loops.PROMPT,
    **request: Any,
) -> Callable[[Path], torch.Tensor]:
    """A clip from words alone."""

    def run(folder: Path) -> torch.Tensor:
        pipeline = load(LoadRequest(build(name, folder), device="cpu", precision="fp32", **request))
        prompt = stages.encode_prompt(pipeline, PromptRequest(text, negative), Silent())
        latents = stages.sample(pipeline, prompt, None, SampleSettings(*size, 0, seed=loops.SEED), Silent())
        return stages.decode(pipeline, latents, Silent())

    return run


def ltx_picture(folder: Path) -> torch.Tensor:
    """A clip that begins with a picture of another size."""
    pipeline = load(LoadRequest(loops.ltx("ltx_condition", folder), device="cpu", precision="fp32"))
    prompt = stages.encode_prompt(pipeline, PromptRequest(loops.PROMPT, loops.NEGATIVE), Silent())
    asked = ImageRequest(loops.picture(*loops.LTX_PICTURE), *loops.LTX_SIZE)
    image = stages.encode_image(pipeline, asked, "crop", Silent())
    latents = stages.sample(pipeline, prompt, image, SampleSettings(*loops.LTX_SIZE, 0, seed=loops.SEED), Silent())
    return stages.decode(pipeline, latents, Silent())


def from_picture(
    name: str,
    size: tuple[int, int],
    words: tuple[str, str] = (loops.PROMPT, ""),
    build: Any = tiny.build,
    **request: Any,
) -> Callable[[Path], torch.Tensor]:
    """A clip from words and a picture of another shape, which goes to a size of the model's."""

    def run(folder: Path) -> torch.Tensor:
        pipeline = load(LoadRequest(build(name, folder), device="cpu", precision="fp32", **request))
        picture = loops.picture(*loops.BUCKETED)
        prompt = stages.encode_prompt(pipeline, PromptRequest(*words, image=picture), Silent())
        image = stages.encode_image(pipeline, ImageRequest(picture, *size), FITS[0], Silent())
        settings = SampleSettings(image.width, image.height, 0, seed=loops.SEED)
        return stages.decode(pipeline, stages.sample(pipeline, prompt, image, settings, Silent()), Silent())

    return run


def hunyuan_15(task: str, kind: str, side: int = 64) -> Callable[[Path], torch.Tensor]:
    """A clip of a tenth of 480p, or of 720p with a ``side`` of 96, at the checkpoint's own size."""
    build, words = partial(loops.hunyuan_15, kind=kind, side=side), (loops.QUOTED, loops.QUOTED_NEGATIVE)
    if task == "i2v":
        return from_picture("hunyuan_video_15_i2v", (0, 0), words, build)
    return from_words("hunyuan_video_15", (0, 0), words[1], build, words[0])


def hunyuan_15_twice(task: str, kind: str, end: str) -> Callable[[Path], torch.Tensor]:
    """Both passes, as the template has them: sample, upscale the latents, sample with the super-resolution, decode."""

    def run(folder: Path) -> torch.Tensor:
        name = "hunyuan_video_15_i2v" if task == "i2v" else "hunyuan_video_15"
        first = loops.hunyuan_15(name, folder, kind, 64 if end == "720p" else 96)
        pipeline, after = (
            load(LoadRequest(made, device="cpu", precision="fp32"))
            for made in (first, loops.hunyuan_15_super(name, folder, end))
        )
        picture = loops.picture(*loops.BUCKETED)
        prompt = stages.encode_prompt(pipeline, PromptRequest(loops.QUOTED, loops.QUOTED_NEGATIVE), Silent())

        def sampled(own: Pipeline, low: Latents | None) -> Latents:
            image, asked = None, ImageRequest(picture, 0, 0)
            if task == "i2v":
                image = stages.encode_image(own, asked, FITS[0], Silent(), low)
            return stages.sample(own, prompt, image, SampleSettings(0, 0, 0, seed=loops.SEED, latents=low), Silent())

        with mock.patch.object(buckets, "generate_crop_size_list", loops.tenth(buckets.generate_crop_size_list)):
            high = stages.upscale(after, sampled(pipeline, None), loops.hunyuan_15_upscaler(folder, end), Silent())
            return stages.decode(after, sampled(after, high), Silent())

    return run


def ltx(name: str, release: str = "", **request: Any) -> Callable[[Path], torch.Tensor]:
    return from_words(name, loops.LTX_SIZE, loops.NEGATIVE, partial(ltx_released, release=release), **request)


def ltx_released(name: str, folder: Path, blocks: int = loops.LTX_BLOCKS, release: str = "") -> Path:
    """The tiny checkpoint under the name of a release."""
    made = loops.ltx(name, folder, blocks)
    return Path(shutil.copytree(made, folder / release, dirs_exist_ok=True)) if release else made


def ltx_twice(variant: str, blocks: int, release: str = "", pictured: bool = False) -> Callable[[Path], torch.Tensor]:
    """Both passes, as the template has them: sample, upscale the latents, sample, decode; a picture at both sizes."""

    def run(folder: Path) -> torch.Tensor:
        made = ltx_released("ltx_condition", folder, blocks, release)
        pipeline = load(LoadRequest(made, device="cpu", precision="fp32", variant=variant))
        prompt = stages.encode_prompt(pipeline, PromptRequest(loops.PROMPT, loops.NEGATIVE), Silent())
        asked = SampleSettings(*loops.LTX_FIRST, 0, seed=loops.SEED)

        def image(size: tuple[int, int], latents: Latents | None = None) -> ImageCondition | None:
            shown = ImageRequest(loops.picture(*loops.LTX_PICTURE), *size, final_size=loops.LTX_FINAL)
            return stages.encode_image(pipeline, shown, "crop", Silent(), latents) if pictured else None

        low = stages.sample(pipeline, prompt, image(loops.LTX_FIRST), asked, Silent())
        high = stages.upscale(pipeline, low, loops.ltx_upscaler(folder), Silent())
        asked = SampleSettings(*loops.LTX_FINAL, 0, seed=loops.SEED, latents=high)
        return stages.decode(pipeline, stages.sample(pipeline, prompt, image((0, 0), high), asked, Silent()), Silent())

    return run


OURS: dict[str, Callable[[Path], torch.Tensor]] = {
    "framepack": framepack("framepack"),
    "framepack f1": framepack("framepack_f1"),
    "hunyuan video": from_words("hunyuan_video"),
    "hunyuan video i2v": from_picture("hunyuan_video_i2v", (96, 64)),
    "hunyuan video i2v dynamic": from_picture("hunyuan_video_i2v", (96, 64), variant="i2v_dynamic"),
    "hunyuan video i2v 33 channels": from_picture("hunyuan_video_i2v_33ch", (96, 64)),
    **{loops.named(task, kind): hunyuan_15(task, kind) for task, kind in loops.HUNYUAN_15},
    **{f"{loops.named(task, '')} 720p": hunyuan_15(task, "", 96) for task in ("t2v", "i2v")},
    **{loops.named(*case): hunyuan_15_twice(*case) for case in loops.HUNYUAN_15_TWICE},
    "ltx 0.9.0": ltx("ltx"),
    "ltx 0.9.1": ltx("ltx_091"),
    "ltx 0.9.5": ltx("ltx_condition"),
    "ltx 0.9.5 picture": ltx_picture,
    "ltx 0.9.6 dev": ltx("ltx_condition", "ltxv-2b-0.9.6-dev"),
    "ltx 0.9.6 distilled": ltx("ltx_condition", variant="distilled_0.9.6"),
    "ltx 2B 0.9.8 distilled": ltx_twice("distilled", loops.LTX_BLOCKS),
    "ltx 2B 0.9.8 distilled picture": ltx_twice("distilled", loops.LTX_BLOCKS, pictured=True),
    "ltx 13B 0.9.8 distilled": ltx_twice("distilled", 29),
    "ltx 13B 0.9.8 dev": ltx_twice("dev", 40),
    "ltx 13B 0.9.7 distilled": ltx_twice("distilled", 29, "ltxv-13b-0.9.7-distilled"),
    "ltx 13B 0.9.7 dev": ltx_twice("dev", 40, "ltxv-13b-0.9.7-dev"),
    "fast hunyuan": from_words("hunyuan_video", build=loops.fast_hunyuan),
    "acc video": from_words("hunyuan_video", build=loops.acc_video),
    "fast mochi": from_words("mochi", build=loops.fast_mochi),
    "mochi": from_words("mochi"),
    "skyreels v1 t2v": from_words(
        loops.SKYREELS_T2V, negative=loops.NEGATIVE, build=loops.skyreels, text=loops.SKYREELS
    ),
    "skyreels v1 i2v": from_picture(
        loops.SKYREELS_I2V, loops.SKYREELS_SIZE, (loops.SKYREELS, loops.NEGATIVE), loops.skyreels
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", OURS)
def test_an_untouched_graph_makes_the_publishers_frames(tiny_folder: Path, name: str) -> None:
    stored = load_file(loops.fixture(name))
    error = loops.error(OURS[name](tiny_folder), stored)
    print(f"{name}: {error:.1e}")
    assert error <= loops.BAR
    assert error <= 2 * (compared.LOOPS | compared.NEARLY)[name], "the page says less"


def test_each_loop_of_the_page_is_run() -> None:
    assert OURS.keys() == (compared.LOOPS | compared.NEARLY).keys()
