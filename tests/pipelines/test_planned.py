"""What a plan says that a run samples is what it samples: every family, way to fit, and shape of picture."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from anygpu.pipelines import jobs, stages
from anygpu.pipelines.base import FramePackSettings, ImageCondition, Prompt, PromptRequest, SampleSettings
from anygpu.pipelines.base import Silent as Quiet
from anygpu.pipelines.demo import MODELS
from anygpu.pipelines.family import FITS
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pictures import picture_size
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.records.job import Content, Picture, VideoJob
from anygpu.pipelines.records.places import Machine, Places
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sizes import Size
from PIL import Image

SHAPES = ((64, 64), (200, 90), (90, 300))
LATER = (
    pytest.param(name, marks=pytest.mark.full) for name in ("ltx", "hunyuan_video_i2v", "hunyuan_video_15_i2v", "mochi")
)
TINY = ("framepack", *LATER)
DEMOS = ("ltx", "hunyuan_video", "hunyuan_video_15", "framepack", "mochi")


class Reached(Exception):
    """The size that a sampling was about to begin at."""


@pytest.fixture
def pictures(tmp_path: Path) -> dict[tuple[int, int], tuple[Content, Path]]:
    made = {}
    for shape in SHAPES:
        path = tmp_path / f"{shape[0]}.png"
        Image.new("RGB", shape, "green").save(path)
        made[shape] = Content(path.name), path
    return made


def sampled_size(pipeline: Pipeline, job: VideoJob, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Size:
    """The size that a run of ``job`` reaches its sampling with; what lies before encodes nothing."""
    text = {"embeds": torch.zeros(1, 4, 8)}

    def encode_image(_pipeline: Any, request: Any, _progress: Any) -> ImageCondition:
        assert tuple(request.frames.shape[1:3]) == (request.height, request.width)
        anchors = (("", request.frame, request.strength),)
        beside = len(request.frames) if len(request.frames) > 1 else 0
        return ImageCondition(pipeline.family, {}, request.width, request.height, anchors, beside=beside)

    def reached(_pipeline: Any, _settings: Any, size: Size, *_: Any) -> None:
        raise Reached(size)

    with monkeypatch.context() as patch:
        patch.setattr(stages, "encode_prompt", lambda *_: Prompt(pipeline.family, text, text))
        patch.setattr(pipeline.spec.code, "encode_image", encode_image)
        patch.setattr(stages, "_sample", reached)
        with pytest.raises(Reached) as end:
            jobs.sample(job, machine, Quiet(), pipeline)
    return end.value.args[0]


def cases(pipeline: Pipeline, pictures: dict[Any, Any]) -> Iterator[tuple[VideoJob, Places]]:
    """Jobs without and with a picture of each shape, in each fit, at the sizes of the model's own and at asked ones."""
    framepack = FramePackSettings(1.13, 5) if pipeline.spec.recipes.sections else None
    for width, height in ((0, 0), (96, 160)):
        settings = SampleSettings(width, height, 0 if framepack else 17, 3)
        job = VideoJob(Content("m"), PromptRequest("a cat"), settings, framepack=framepack)
        takes = pipeline.spec.code.encode_image is not None and (
            pipeline.model.task == "image" or pipeline.family == "ltx"
        )
        if not (takes and pipeline.spec.files.image_required):
            yield job, Places()
        for fit in FITS if takes else ():
            for content, path in pictures.values():
                yield replace(job, fit=fit, pictures=(Picture(content),)), Places(known={content: path})
                if framepack:
                    ended = (Picture(content), Picture(content, frame=-1))
                    yield replace(job, fit=fit, pictures=ended), Places(known={content: path})


@pytest.mark.parametrize("model", [*TINY, *(f"demo {name}" for name in DEMOS)])
def test_planned_and_sampled_sizes_are_equal(model, pictures, tiny_folder, tmp_path, monkeypatch):
    if model == "framepack":
        for provider in ("hunyuan_video", "siglip"):
            tiny.build(provider, tiny_folder)
    demo = model.removeprefix("demo ")
    folder = MODELS / demo if demo != model else tiny.build(model, tiny_folder)
    pipeline = load(LoadRequest(folder, device="cpu", precision="fp32", search=(tiny_folder,)))
    seen = set()
    for job, places in cases(pipeline, pictures):
        machine = Machine(places, tmp_path, "cpu")
        planned, _ = jobs.planned_size(job, machine, pipeline)
        ran = sampled_size(pipeline, job, machine, monkeypatch)
        assert planned == replace(ran, text=planned.text), (job.fit, job.settings, job.pictures)
        seen.add((ran.width, ran.height, ran.frames))
    assert seen == {(64, 64, 7 if demo == "mochi" else 9)} if demo != model else len(seen) > 1


def test_a_checkpoint_with_sizes_of_its_own_takes_none_of_its_family_s(tiny_folder, monkeypatch):
    """Also one that is no demo model, whose sizes are kept in the picture's shape."""
    for name in ("framepack", "hunyuan_video", "siglip", "hunyuan_video_15_i2v"):
        tiny.build(name, tiny_folder)
    for name in ("framepack", "hunyuan_video_15_i2v"):
        pipeline = load(LoadRequest(tiny_folder / name, device="cpu", precision="fp32", search=(tiny_folder,)))
        published = picture_size(pipeline, torch.empty(1, 50, 50, 3), 0, 0, FITS[0])
        monkeypatch.setitem(pipeline.tools["index"], "_anygpu_defaults", {"width": 128, "height": 128})
        square, wide = (picture_size(pipeline, torch.empty(1, 50, w, 3), 0, 0, FITS[0]) for w in (50, 200))
        assert published != square and square == (128, 128) and wide == (256, 64)


def test_a_clip_to_go_on_with_is_planned(pictures, tiny_folder, tmp_path, monkeypatch):
    for provider in ("hunyuan_video", "siglip"):
        tiny.build(provider, tiny_folder)
    request = LoadRequest(tiny.build("framepack", tiny_folder), device="cpu", precision="fp32", search=(tiny_folder,))
    content, framepack = next(iter(pictures.values()))[0], FramePackSettings(2.4)
    job = VideoJob(Content("m"), PromptRequest("a cat"), SampleSettings(0, 0, 0, 3), framepack=framepack)
    job, pipeline = replace(job, pictures=(Picture(content),)), load(request)
    monkeypatch.setattr(Places, "frames", lambda *_: (torch.zeros(40, 64, 64, 3), 24.0))
    machine = Machine(Places(), tmp_path, "cpu")
    planned, _ = jobs.planned_size(job, machine, pipeline)
    assert planned.clip and planned == replace(sampled_size(pipeline, job, machine, monkeypatch), text=planned.text)


def test_a_video_is_planned_at_its_own_size_and_length(tiny_folder, tmp_path, monkeypatch):
    job = VideoJob(Content("m"), PromptRequest("a cat"), SampleSettings(0, 0, 0, 3), video=Content("v"))
    monkeypatch.setattr(Places, "frames", lambda *_: (torch.zeros(12, 70, 130, 3), 24.0))
    for folder, size in ((tiny.build("ltx", tiny_folder), (128, 64, 9)), (MODELS / "ltx", (64, 64, 9))):
        pipeline = load(LoadRequest(folder, device="cpu", precision="fp32"))
        machine = Machine(Places(), tmp_path, "cpu")
        planned, _ = jobs.planned_size(job, machine, pipeline)
        video = jobs._video(jobs.as_run(job, pipeline, print), machine, Quiet(), pipeline)
        assert (planned.width, planned.height, planned.frames) == size == (video.width, video.height, video.frames)
