"""What is counted without data is what a run computes."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from anygpu.compat.device import work
from anygpu.compat.device.work import counting
from anygpu.compat.memory import transfer
from anygpu.pipelines import stages
from anygpu.pipelines.base import FramePackSettings, ImageRequest, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.families.framepack.sections import INVERTED, VANILLA, Plan
from anygpu.pipelines.families.hunyuan_video.spec import BLOCKS
from anygpu.pipelines.forecast import counts
from anygpu.pipelines.forecast.seconds import planned_run
from anygpu.pipelines.sampling import loop
from anygpu.pipelines.sizes import Size, beside_transformer, latent_shape, sampling_bytes
from simulated import test_families as families
from simulated.test_families import CASES, PICTURE

OFF = 0.02
QUICK = ("ltx",)
loaded_for = cache(families.loaded_for)  # nothing here changes a pipeline
CELLS = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full]) for name in CASES if name != "ltx image"]

PICTURED = [
    pytest.param(name, marks=[] if name == "framepack" else [pytest.mark.full])
    for name, case in CASES.items()
    if case.pictured and name != "ltx image"
]


def close(counted: float, ran: float) -> bool:
    return abs(counted / ran - 1) <= OFF


@pytest.mark.parametrize("name", CELLS)
def test_sampling_and_decode_are_counted_within_two_percent(tiny_folder, name):
    case = CASES[name]
    pipeline, progress = loaded_for(case, tiny_folder, "cpu"), Silent()
    image = stages.encode_image(pipeline, ImageRequest(PICTURE, 64, 64), "stretch", progress) if case.pictured else None
    looks = PICTURE if case.pictured and "image" in pipeline.spec.recipes.effective else None
    prompt = stages.encode_prompt(pipeline, PromptRequest("a red fox", "blurry", image=looks), progress)
    settings = SampleSettings(64, 64, case.frames, steps=2, seed=3, cfg=2.0)
    with counting() as sampled:
        if pipeline.spec.recipes.sections:
            framepack = FramePackSettings(case.frames / 30, window=2)
            latents = stages.sample_framepack(pipeline, prompt, image, settings, framepack, progress)
        else:
            latents = stages.sample(pipeline, prompt, image, settings, progress)
    with counting() as decoded:
        stages.decode(pipeline, latents, progress)
    run = planned_run(pipeline, stages.size_of(settings, prompt, 2), settings)
    assert close(counts.sampling_work(pipeline, run.size, run.settings).flops, sampled.flops)
    assert close(counts.decoding_work(pipeline, run.size).flops, decoded.flops)


@pytest.mark.parametrize("name", PICTURED)
def test_a_picture_is_counted_within_two_percent(tiny_folder, name):
    pipeline = loaded_for(CASES[name], tiny_folder, "cpu")
    with counting() as ran:
        condition = stages.encode_image(pipeline, ImageRequest(PICTURE, 64, 64), "stretch", Silent())
    size = Size(condition.width, condition.height, pipeline.spec.sizes.stride + 1)
    work = counts.image_work(pipeline, size)
    assert close(work.flops, ran.flops)
    if "image_encoder" in pipeline.configs:
        precision = replace(pipeline.precision, text=torch.bfloat16)
        half = counts.image_work(replace(pipeline, device=replace(pipeline.device, precision=precision)), size)
        assert half.flops == work.flops and half.bytes < work.bytes


@pytest.mark.parametrize("variant", ["framepack", "framepack_f1"])
def test_a_clip_and_prompts_by_time_are_counted_within_two_percent(tiny_folder, monkeypatch, variant):
    """Of three sections, which see more of a clip than of a picture; and what a step holds of them in memory."""
    room = []
    monkeypatch.setattr(loop, "beside_transformer", lambda *all, **more: room.append((all, more)) or 0)
    pipeline = loaded_for(CASES["framepack"], tiny_folder, "cpu")
    pipeline = replace(pipeline, model=replace(pipeline.model, variant=variant))
    clip, silent, asked = PICTURE.expand(108, -1, -1, -1), Silent(), FramePackSettings(3 * 16 / 30, window=4)
    request = PromptRequest("a red fox [0.5s: a dog] [1s: a cat]", "blurry", max_tokens=256)
    with counting() as pictured:
        image = stages.encode_image(pipeline, ImageRequest(clip, 64, 64), "stretch", silent)
    with counting() as written:
        prompt = stages.encode_prompt(pipeline, request, silent)
    settings = SampleSettings(64, 64, 49, steps=2, seed=3)
    with counting() as sampled:
        stages.sample_framepack(pipeline, prompt, image, settings, asked, silent)
    size = replace(stages.size_of(settings, prompt, 4), sections=3, clip=image.beside > 0)
    run = planned_run(pipeline, size, settings)
    assert close(counts.sampling_work(pipeline, run.size, run.settings).flops, sampled.flops)
    assert close(counts.image_work(pipeline, run.size).flops, pictured.flops)
    assert close(counts.text_work(pipeline, request).flops, written.flops)
    plans = (Plan(INVERTED if variant == "framepack" else VANILLA, 3, 4, clip=count) for count in (27, 0))
    with_clip, alone = (sum(plan.context(0)) for plan in plans)
    assert pipeline.spec.memory.clip.seen[variant] == with_clip - alone
    assert sampling_bytes(pipeline, size) > sampling_bytes(pipeline, replace(size, clip=False))
    ((given, more),) = room
    assert more == {"clip": True} and beside_transformer(*given, **more) > beside_transformer(*given)


@pytest.mark.full
@pytest.mark.parametrize("frames", [1, 108])
def test_what_encoding_took_is_kept_beside_what_a_picture_or_a_clip_takes(tiny_folder, monkeypatch, frames):
    """Else a clip's seconds would count as those of a picture, and correct the forecasts of both."""
    runs, running = [], stages.running

    def noted(*given, **more):
        runs.append(more["run"]())
        return running(*given, **more)

    monkeypatch.setattr(stages, "running", noted)
    pipeline = loaded_for(CASES["framepack"], tiny_folder, "cpu")
    with counting() as ran:
        stages.encode_image(pipeline, ImageRequest(PICTURE.expand(frames, -1, -1, -1), 64, 64), "stretch", Silent())
    assert close(counts.image_work(pipeline, runs[0].size).flops, ran.flops)


def test_sections_that_nobody_counted_are_those_that_a_run_takes(tiny_folder):
    pipeline = loaded_for(CASES["framepack"], tiny_folder, "cpu")
    for frames, window, count in ((145, 9, 4), (37, 9, 1), (9, 2, 1), (109, 9, 3)):
        size = Size(64, 64, frames, window=window)
        assert counts.sections_of(pipeline, size) == count
        assert pipeline.spec.code.sections_for(FramePackSettings(0.0, window), frames) == count


SIGN = 'a red fox beside a sign that says "Beware of the fox"'  # of which HunyuanVideo 1.5 draws the letters


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("ltx", "a red fox"), ("hunyuan_video", "a red fox"), ("hunyuan_video_15", SIGN)),
        *(pytest.param(name, SIGN, marks=pytest.mark.full) for name in ("ltx", "hunyuan_video", "mochi")),
        *(pytest.param(name, "a red fox", marks=pytest.mark.full) for name in ("mochi", "hunyuan_video_15")),
    ],
)
def test_a_prompt_is_counted_within_two_percent(tiny_folder, name, text):
    pipeline, request = loaded_for(CASES[name], tiny_folder, "cpu"), PromptRequest(text, "blurry")
    with counting() as ran:
        stages.encode_prompt(pipeline, request, Silent())
    assert close(counts.text_work(pipeline, request).flops, ran.flops)


def test_a_deep_transformer_is_counted_by_two_blocks_of_a_kind(tiny_folder):
    pipeline = loaded_for(CASES["hunyuan_video"], tiny_folder, "cpu")
    config = {**pipeline.configs["transformer"], "num_layers": 5, "num_single_layers": 7}
    pipeline = replace(pipeline, model=replace(pipeline.model, configs={**pipeline.configs, "transformer": config}))
    size = Size(64, 64, 5, text=6)
    call = counts.empty_call(pipeline, size, 1)
    module = counts.built(pipeline, "transformer", config, torch.float32).to_empty(device="cpu")
    given = {key: getattr(call, key) for key in call.__slots__ if isinstance(getattr(call, key), torch.Tensor)}
    with counting() as ran:
        ones = replace(call, **{key: torch.ones(value.shape) for key, value in given.items()})
        pipeline.spec.code.call_transformer(pipeline, module, ones)
    counted = counts.transformer_work(pipeline, size)
    assert counted.flops == ran.flops and close(counted.bytes, ran.bytes)
    speed = replace(pipeline.plan.speed, forms={"transformer": "reference"})
    fused = counts.transformer_work(replace(pipeline, plan=replace(pipeline.plan, speed=speed)), size)
    assert fused.flops == counted.flops and fused.bytes < counted.bytes
    published = json.loads((pipeline.spec.folder / "transformer.json").read_text())[0]["config"]
    assert [published[key] for key in counts.BLOCKS] == [count for _, count, _ in BLOCKS]


def test_tiles_of_a_decode_count_what_they_overlap(tiny_folder):
    pipeline = loaded_for(CASES["ltx"], tiny_folder, "cpu")
    size = Size(512, 512, 9)
    whole = counts.decoding_work(pipeline, size).flops
    tiled = counts.decoding_work(pipeline, size, counts.DecodeMethod(torch.float32, tile=256)).flops
    rows, area = 3 * 256, 512  # three tiles of 256 pixels cover 512 with a quarter of overlap
    assert latent_shape(pipeline, size)[1:] == (16, 16)
    assert close(tiled / whole, (rows / area) ** 2)
    walk = counts._Walk(transfer.Transfer(torch.device("cpu"), torch.float32), 8, 1)
    alike = walk.parted((0, 40, 0, 40), 8)  # corners, edges and what lies between, each counted once
    assert len(alike) == 9 and [walk.times[part] for part in alike] == [1, 3, 1, 3, 9, 3, 1, 3, 1]


def test_a_size_is_counted_once(tiny_folder, monkeypatch):
    pipeline = loaded_for(CASES["ltx"], tiny_folder, "cpu")
    first = counts.transformer_work(pipeline, Size(96, 64, 9))
    monkeypatch.setattr(counts, "built", None)
    assert counts.transformer_work(pipeline, Size(96, 64, 9)) == first


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["ltx", "hunyuan_video_15", pytest.param("mochi", marks=pytest.mark.full), "framepack"]
)
def test_a_node_counts_what_the_tab_counts(tiny_folder, name):
    """ComfyUI runs nodes in inference mode, in which torch hands products over whole."""
    pipeline, told = loaded_for(CASES[name], tiny_folder, "cpu"), []
    size = Size(64, 64, 2 * pipeline.spec.sizes.stride + 1)
    for inside in (False, True):
        work._counts.clear()
        with torch.inference_mode(inside):
            told.append((counts.transformer_work(pipeline, size), counts.decoding_work(pipeline, size)))
    assert told[0] == told[1] and told[0][0].flops > 0
