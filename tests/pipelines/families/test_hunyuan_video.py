"""HunyuanVideo by separate stages gives the one-shot pipeline's video, for text and for both kinds of image."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from anygpu.compat.errors import CheckpointError, InputError
from anygpu.pipelines import stages
from anygpu.pipelines.base import ImageRequest, Latents, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.families.hunyuan_video import pipeline as hunyuan_video
from anygpu.pipelines.load import folder as loading
from anygpu.pipelines.pipeline import Tools
from anygpu.pipelines.settings import of_checkpoint
from anygpu.pipelines.text import llama
from PIL import Image

TEXT, REPLACE, CONCAT = "hunyuan_video", "hunyuan_video_i2v", "hunyuan_video_i2v_33ch"
NAMES = (TEXT, REPLACE, CONCAT)
WIDTH, HEIGHT, FRAMES, STEPS, SEED = 48, 32, 9, 2, 7
PROMPT, NEGATIVE = "a red cat jumps over the wall", "blurry and ugly"
PIXELS = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
PICTURE, FRAME = Image.fromarray(PIXELS), torch.from_numpy(PIXELS).float()[None] / 255
SETTINGS = SampleSettings(WIDTH, HEIGHT, FRAMES, steps=STEPS, seed=SEED)
TRIMMED = 1e-5  # upstream attends over masked padding, which moves the last bits; measured 6e-6 at a spread of 3


@pytest.fixture(scope="module")
def run(tiny_folder: Path) -> Callable[[str], SimpleNamespace]:
    """From a tiny checkpoint's name to what all its tests share: the one-shot result, and the same by stages."""
    return cache(partial(_run, folder=tiny_folder))


def _run(name: str, folder: Path) -> SimpleNamespace:
    pipe = tiny.one_shot(name, folder)
    pipeline = _loaded(folder / name)
    shown = None if name == TEXT else FRAME
    image = None
    if shown is not None:
        image = stages.encode_image(pipeline, ImageRequest(shown, WIDTH, HEIGHT), "stretch", Silent())
    request = PromptRequest(PROMPT, NEGATIVE, image=shown)
    prompt = stages.encode_prompt(pipeline, request, Silent())
    made = SimpleNamespace(name=name, pipe=pipe, pipeline=pipeline, image=image, prompt=prompt, scale=0.476986)
    made.latents = _sampled(made)
    return made


def _loaded(folder: Path, **choices: Any) -> Any:
    return loading.load(loading.LoadRequest(folder, device="cpu", **{"precision": "fp32", **choices}))


def _sampled(made: SimpleNamespace, progress: Any = None, **changes: Any) -> Latents:
    prompt, image = changes.pop("prompt", made.prompt), changes.pop("image", made.image)
    return stages.sample(made.pipeline, prompt, image, replace(SETTINGS, **changes), progress or Silent())


def _one_shot(made: SimpleNamespace, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents of the whole video, in the transformer's space, and frames, of the bare pipeline."""
    found = {}

    def keep(_pipe: Any, _index: int, _time: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found["latents"] = given["latents"]
        return {}

    shown = {} if made.image is None else {"image": PICTURE}
    words = {} if "prompt_embeds" in arguments else {"prompt": PROMPT}
    frames = made.pipe(
        **shown,
        **words,
        **arguments,
        height=HEIGHT,
        width=WIDTH,
        num_frames=FRAMES,
        num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(SEED),
        output_type="np",
        callback_on_step_end=keep,
        guidance_scale=6.0,
    ).frames[0]
    return found["latents"], torch.from_numpy(frames)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_stages_give_the_one_shot_video(run: Any, name: str) -> None:
    made = run(name)
    latents, frames = _one_shot(made)
    video = stages.decode(made.pipeline, made.latents, Silent())
    assert video.shape == frames.shape == (FRAMES - (4 if name == CONCAT else 0), HEIGHT, WIDTH, 3)
    assert _distance(made.latents.samples * made.scale, latents) < TRIMMED
    assert _distance(video, frames) < TRIMMED


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_latents_are_identical_from_the_same_embeddings(run: Any, name: str) -> None:
    """With the padding trimmed in both, and one copy of the weights (another may lie at another alignment, which moves
    the last bits too), nothing is left to differ."""
    made = run(name)
    ours = {part: made.pipeline.parts[part] for part in ("transformer", "vae")}
    made = SimpleNamespace(**{**vars(made), "pipe": type(made.pipe)(**{**made.pipe.components, **ours})})
    made.pipe.set_progress_bar_config(disable=True)
    given = {**made.prompt.embeds, **{f"negative_{key}": value for key, value in made.prompt.negative.items()}}
    latents, frames = _one_shot(made, **given, true_cfg_scale=3.0)
    found = _sampled(made, cfg=3.0)
    assert torch.equal(found.samples, latents / made.scale)
    assert torch.equal(stages.decode(made.pipeline, found, Silent()), frames)


@pytest.mark.full
@pytest.mark.parametrize(("name", "interleave"), [(REPLACE, 4), (CONCAT, 2)])
def test_negative_sees_a_black_picture_as_the_prompt_sees_its_own(run: Any, name: str, interleave: int) -> None:
    """Upstream's own call shows the negative of a token-replace model every second state: not the prompt's way."""
    made, black = run(name), Image.new("RGB", (WIDTH, HEIGHT))
    with torch.no_grad():
        embeds, pooled, mask = made.pipe.encode_prompt(image=black, prompt=NEGATIVE, image_embed_interleave=interleave)
    count = int(mask.sum())
    assert torch.equal(made.prompt.negative["prompt_embeds"], embeds[:, :count])
    assert torch.equal(made.prompt.negative["pooled_prompt_embeds"], pooled)
    assert count > 576 // interleave


def test_cancel_is_obeyed_while_text_is_encoded_and_video_decoded(run: Any, recorded: Any) -> None:
    made = run(TEXT)
    for stage, part, call in (
        ("encoding prompt", "text_encoder", lambda on: stages.encode_prompt(made.pipeline, PromptRequest(PROMPT), on)),
        ("decoding", "vae", lambda on: stages.decode(made.pipeline, made.latents, on)),
    ):
        made.pipeline.parts.read(part)  # reading checks too
        watched = recorded(lambda done, found, stage=stage: found == stage)
        with pytest.raises(recorded.Cancelled):
            call(watched)
        assert watched.checks > 5
    again = stages.encode_prompt(made.pipeline, PromptRequest(PROMPT, NEGATIVE), Silent())
    assert torch.equal(again.embeds["prompt_embeds"], made.prompt.embeds["prompt_embeds"])


def test_text_encoders_come_one_after_the_other_and_go(run: Any, recorded: Any) -> None:
    made, beside = run(TEXT), []
    watched = recorded(lambda done, stage: beside.append((stage.split()[1], sorted(made.pipeline.parts))))
    stages.encode_prompt(made.pipeline, PromptRequest(PROMPT), watched)
    read = {part: parts for part, parts in beside if part.startswith("text_encoder")}
    assert list(read) == ["text_encoder", "text_encoder_2"]
    assert "text_encoder" not in read["text_encoder_2"]
    assert not {"text_encoder", "text_encoder_2"} & set(made.pipeline.parts)


def test_guidance_is_the_checkpoints_own(run: Any, recorded: Any) -> None:
    """6 as in upstream's examples; the 33-channel transformer takes none, and it is said."""
    guidances = {name: of_checkpoint(run(name).pipeline).sizes.defaults.guidance for name in NAMES}
    assert guidances == {TEXT: 6.0, REPLACE: 6.0, CONCAT: 0.0}
    watched = recorded()
    found = _sampled(run(CONCAT), watched, guidance=4.0)
    assert any("guidance has no effect" in text for text in watched.said)
    assert any("5 of 9 frames" in text for text in watched.said)
    assert torch.equal(found.samples, run(CONCAT).latents.samples)


def test_own_template(run: Any) -> None:
    """Upstream's own template given by hand, its crop found or named, is upstream's; another one changes the states."""
    made = run(TEXT)
    template = "<|start_header_id|>user<|end_header_id|>\n\nPaint {}<|eot_id|>"
    encoder = made.pipe.text_encoder
    tokens = made.pipe.tokenizer(template.format(PROMPT), return_tensors="pt").input_ids
    both = (made.pipe.tokenizer(template.format(text))["input_ids"] for text in (PROMPT, "zebras"))
    crop = next(index for index, (ours, other) in enumerate(zip(*both, strict=False)) if ours != other)
    with torch.no_grad():
        states = encoder(tokens, output_hidden_states=True).hidden_states[-3]
    for asked in (-1, crop, 0):
        request = PromptRequest(PROMPT, template=template, template_crop=asked)
        found = stages.encode_prompt(made.pipeline, request, Silent()).embeds["prompt_embeds"]
        assert _distance(found, states[:, (crop if asked < 0 else asked) :]) < TRIMMED
    for wrong, crop in (("no place", -1), ("{} and {x}", -1), ("{} alone", 40)):
        with pytest.raises(InputError):
            stages.encode_prompt(made.pipeline, PromptRequest(PROMPT, template=wrong, template_crop=crop), Silent())


def test_own_template_of_image_to_video(run: Any) -> None:
    made = run(CONCAT)
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_image2video import DEFAULT_PROMPT_TEMPLATE

    text = DEFAULT_PROMPT_TEMPLATE["template"]
    crop = len(made.pipe.tokenizer(text.partition("{}")[0])["input_ids"])
    assert crop == DEFAULT_PROMPT_TEMPLATE["crop_start"]
    request = PromptRequest(PROMPT, NEGATIVE, template=text, image=FRAME)
    found = stages.encode_prompt(made.pipeline, request, Silent())
    assert torch.equal(found.embeds["prompt_embeds"], made.prompt.embeds["prompt_embeds"])
    with pytest.raises(InputError, match="<image>"):
        stages.encode_prompt(made.pipeline, replace(request, template="Paint {}"), Silent())
    # Nothing cropped, upstream would leave the picture's 576 states in, and its mask would cut the words off.
    with pytest.raises(InputError, match=f"template_crop 0; expected 1 to {crop}, the tokens before the prompt"):
        stages.encode_prompt(made.pipeline, replace(request, template_crop=0), Silent())


@pytest.mark.full
@pytest.mark.parametrize(("name", "after"), [(TEXT, 1), (REPLACE, 5)])  # <|eot_id|>, and the header of an answer
def test_long_prompts(run: Any, name: str, after: int, recorded: Any) -> None:
    """The limit is counted as the encoder counts: what just fits is the same under any larger limit."""
    made = run(name)
    tokens = len(made.pipe.tokenizer(PROMPT, add_special_tokens=False)["input_ids"])
    request = PromptRequest(PROMPT, max_tokens=tokens + after, image=None if name == TEXT else FRAME)
    tight = stages.encode_prompt(made.pipeline, request, Silent())
    assert _distance(tight.embeds["prompt_embeds"], made.prompt.embeds["prompt_embeds"]) < TRIMMED
    told = recorded()
    stages.encode_prompt(made.pipeline, replace(request, max_tokens=request.max_tokens - 1), told)
    assert "the prompt is shortened from" in told.said[0]


def test_what_clip_does_not_read_is_said(run: Any, recorded: Any) -> None:
    made, watched = run(TEXT), recorded()
    stages.encode_prompt(made.pipeline, PromptRequest(" ".join(["cat"] * 100)), watched)
    assert any("CLIP reads 77 tokens of the prompt" in text for text in watched.said)
    stages.encode_prompt(made.pipeline, PromptRequest(" ".join(["cat"] * 75)), again := recorded())
    assert not again.said


def test_image_to_video_needs_its_picture_and_a_place_for_it(run: Any, recorded: Any) -> None:
    made, watched = run(REPLACE), recorded()
    with pytest.raises(InputError, match="Encode Prompt too"):
        stages.encode_prompt(made.pipeline, PromptRequest(PROMPT), Silent())
    few = {name: reader for name, reader in made.pipeline.tools.readers.items() if name != "image_processor"}
    with pytest.raises(CheckpointError, match="no image_processor"):
        stages.encode_prompt(replace(made.pipeline, tools=Tools(few)), PromptRequest(PROMPT, image=FRAME), Silent())
    with pytest.raises(InputError, match="<image> in the prompt"):
        stages.encode_prompt(made.pipeline, PromptRequest("an <image> of a cat", image=FRAME), Silent())
    with pytest.raises(InputError, match="at least 5 frames"):
        _sampled(made, frames=1)
    with pytest.raises(InputError, match="no image"):
        _sampled(made, image=None)
    stages.encode_prompt(run(TEXT).pipeline, PromptRequest(PROMPT, image=FRAME), watched)
    assert any("no effect" in text for text in watched.said)


@pytest.mark.parametrize(
    ("width", "height", "size"),
    [(1280, 720, (1248, 704)), (848, 480, (1248, 736)), (720, 1280, (704, 1248)), (64, 64, (960, 960))],
)
def test_a_picture_gets_the_size_that_tencent_chooses(width: int, height: int, size: tuple[int, int]) -> None:
    """The sizes are what ``get_closest_ratio`` of Tencent-Hunyuan/HunyuanVideo-I2V at 1481c1d returned."""
    pipeline: Any = SimpleNamespace(configs={"transformer": {"image_condition_type": "token_replace"}})
    assert hunyuan_video.nearest_size(pipeline, width, height) == size
    pipeline.configs["transformer"] = {"in_channels": 32, "out_channels": 16}
    assert hunyuan_video.nearest_size(pipeline, width, height) == (960, 544), "SkyReels has one size"


def test_core_conditioning(run: Any) -> None:
    """Core's CONDITIONING, with or without a mask, is the same prompt."""
    made = run(TEXT)
    embeds, mask, pooled = (made.prompt.embeds[key] for key in ("prompt_embeds", "prompt_attention_mask", llama.POOLED))
    padded = torch.nn.functional.pad(embeds, (0, 0, 0, 3))
    for states, extra in ((embeds, {}), (padded, {"attention_mask": torch.nn.functional.pad(mask, (95, 3))})):
        found = stages.prompt_from_core(made.pipeline, [[states, {"pooled_output": pooled, **extra}]])
        assert torch.equal(_sampled(made, prompt=found).samples, made.latents.samples)
    with pytest.raises(InputError, match="pooled"):
        stages.prompt_from_core(made.pipeline, [[embeds, {}]])


def test_a_lone_transformer_finds_a_pipeline_of_its_own_task(run: Any, recorded: Any, tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).symlink_to(run(name).pipeline.model.source)
    for name in NAMES:
        shutil.copytree(run(name).pipeline.model.source / "transformer", tmp_path / f"lone_{name}")
        pipeline = _loaded(tmp_path / f"lone_{name}")
        assert pipeline.model.task == ("text" if name == TEXT else "image")
        assert (
            hunyuan_video.image_condition(pipeline.configs["transformer"])
            == {TEXT: None, REPLACE: "token_replace", CONCAT: "latent_concat"}[name]
        )
        assert ("vision_config" in pipeline.configs["text_encoder"]) == (name != TEXT)
    assert hunyuan_video.image_condition({"in_channels": 33, "out_channels": 16}) == "latent_concat"
    wrong = _loaded(tmp_path / f"lone_{REPLACE}", base=run(TEXT).pipeline.model.source)
    with pytest.raises(CheckpointError, match="text encoder for text only"):
        stages.encode_prompt(wrong, PromptRequest(PROMPT, image=FRAME), Silent())
