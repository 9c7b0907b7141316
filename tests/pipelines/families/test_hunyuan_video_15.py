"""HunyuanVideo 1.5 by separate stages gives the one-shot pipeline's video, for text and for image."""

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
from anygpu.compat.errors import InputError
from anygpu.pipelines import stages
from anygpu.pipelines.base import ImageRequest, Latents, Prompt, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.families.hunyuan_video_15 import pipeline as hunyuan_video_15
from anygpu.pipelines.load import folder as loading
from anygpu.pipelines.pipeline import Tools
from anygpu.pipelines.settings import of_checkpoint
from anygpu.pipelines.text import qwen
from PIL import Image

TEXT, IMAGE = "hunyuan_video_15", "hunyuan_video_15_i2v"
NAMES = (TEXT, IMAGE)
WIDTH, HEIGHT, FRAMES, STEPS, SEED = 128, 96, 5, 2, 7  # the size upstream chooses for a picture of this shape
PROMPT, NEGATIVE = 'a red cat jumps over the "WELCOME" mat', "blurry and ugly"
PIXELS = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
PICTURE, FRAME = Image.fromarray(PIXELS), torch.from_numpy(PIXELS).float()[None] / 255
SETTINGS = SampleSettings(WIDTH, HEIGHT, FRAMES, steps=STEPS, seed=SEED)
TRIMMED = 1e-5  # of the largest value; upstream attends over 1985 masked tokens, which moves the last bits by as much


@pytest.fixture(scope="module")
def run(tiny_folder: Path) -> Callable[[str], SimpleNamespace]:
    """From a tiny checkpoint's name to what all its tests share: the one-shot pipeline, and the same by stages."""
    return cache(partial(_run, folder=tiny_folder))


def _run(name: str, folder: Path) -> SimpleNamespace:
    pipe, pipeline = tiny.one_shot(name, folder), _loaded(folder / name)
    prompt = stages.encode_prompt(pipeline, PromptRequest(PROMPT, NEGATIVE), Silent())
    image = None if name == TEXT else _image(pipeline, FRAME)
    made = SimpleNamespace(name=name, pipe=pipe, pipeline=pipeline, prompt=prompt, image=image)
    made.latents = _sampled(made)
    return made


def _loaded(folder: Path, **choices: Any) -> Any:
    return loading.load(loading.LoadRequest(folder, device="cpu", **{"precision": "fp32", **choices}))


def _image(pipeline: Any, frames: torch.Tensor, **choices: Any) -> Any:
    return stages.encode_image(pipeline, ImageRequest(frames, 0, 0, **choices), "nearest bucket", Silent())


def _sampled(made: SimpleNamespace, progress: Any = None, **changes: Any) -> Latents:
    prompt, image = changes.pop("prompt", made.prompt), changes.pop("image", made.image)
    return stages.sample(made.pipeline, prompt, image, replace(SETTINGS, **changes), progress or Silent())


def _one_shot(
    made: SimpleNamespace, parts: Any = None, decodes: bool = True, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents in the VAE's space, and frames, of the bare pipeline, which has no callback to ask.

    Args:
        parts: transformer and VAE in place of the pipeline's own.
        decodes: False for black frames.
    """
    usual = {"transformer": made.pipe.transformer, "vae": made.pipe.vae}
    used = {name: (parts or usual)[name] for name in usual}
    found, decode = {}, used["vae"].decode

    def keep(latents: torch.Tensor, **choices: Any) -> Any:
        found["latents"] = latents
        return decode(latents, **choices) if decodes else [torch.zeros(1, 3, FRAMES, HEIGHT, WIDTH)]

    used["vae"].decode = keep
    made.pipe.transformer, made.pipe.vae = used["transformer"], used["vae"]
    shown = {"height": HEIGHT, "width": WIDTH} if made.image is None else {"image": PICTURE}
    words = {} if "prompt_embeds" in arguments else {"prompt": PROMPT, "negative_prompt": NEGATIVE}
    try:
        frames = made.pipe(
            **shown,
            **words,
            **arguments,
            num_frames=FRAMES,
            num_inference_steps=STEPS,
            generator=torch.Generator().manual_seed(SEED),
        ).frames[0]
    finally:
        del used["vae"].decode
        made.pipe.transformer, made.pipe.vae = usual["transformer"], usual["vae"]
    return found["latents"], torch.from_numpy(frames)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_stages_give_the_one_shot_video(run: Any, name: str) -> None:
    made = run(name)
    latents, frames = _one_shot(made)
    video = stages.decode(made.pipeline, made.latents, Silent())
    assert video.shape == frames.shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert _distance(made.latents.samples, latents) < TRIMMED * latents.abs().max()
    assert _distance(video, frames) < TRIMMED
    assert frames.std() > 0.05


def test_latents_are_identical_from_the_same_tokens(run: Any) -> None:
    """With the same tokens, attention and weights nothing is left to differ; an image leaves no padding of its own.

    The same weights: where a file's reader puts a tensor in memory moves last bits too.
    """
    made = run(IMAGE)
    # Two texts that quote something: upstream cannot be handed the embeddings of nothing.
    prompt = stages.encode_prompt(made.pipeline, PromptRequest(PROMPT, NEGATIVE), Silent())
    prompt = replace(prompt, negative=prompt.negative | {"prompt_embeds_2": prompt.embeds["prompt_embeds_2"]})
    given = {}
    for prefix, embeds in (("", prompt.embeds), ("negative_", prompt.negative)):
        for name, mask in (("prompt_embeds", "prompt_embeds_mask"), ("prompt_embeds_2", "prompt_embeds_mask_2")):
            given[prefix + name], given[prefix + mask] = embeds[name], torch.ones(embeds[name].shape[:2])
    latents, _ = _one_shot(made, made.pipeline.parts, decodes=False, **given)
    assert torch.equal(_sampled(made, prompt=prompt).samples, latents)


@pytest.mark.full
def test_guidance_is_the_guiders(run: Any) -> None:
    """Rescaling and a stop, from the settings and from the checkpoint's own guider."""
    made = run(TEXT)
    saved = {"guidance_scale": 2.0, "guidance_rescale": 0.7, "stop": 0.75}  # 0.75 of 2 steps are one step upstream
    usual, made.pipe.guider = made.pipe.guider, made.pipe.guider.new(**saved)
    try:
        latents, _ = _one_shot(made, decodes=False)
    finally:
        made.pipe.guider = usual
    asked = _sampled(made, cfg=2.0, guidance_rescale=0.7, cfg_end=0.5)
    assert _distance(asked.samples, latents) < TRIMMED
    guider = {**made.pipeline.tools["guider"], **saved}
    own = SimpleNamespace(**{**vars(made), "pipeline": _with_guider(made.pipeline, guider)})
    assert torch.equal(_sampled(own).samples, asked.samples)
    assert _distance(made.latents.samples, latents) > 0.1


def _with_guider(pipeline: Any, guider: dict[str, Any]) -> Any:
    return replace(pipeline, tools=Tools({**pipeline.tools.readers, "guider": lambda: guider}))


def test_a_guider_of_another_kind_is_said(run: Any, recorded: Any) -> None:
    made, progress = run(TEXT), recorded()
    other = {"_class_name": "AdaptiveProjectedGuidance", "guidance_scale": 3.0}
    _sampled(SimpleNamespace(**{**vars(made), "pipeline": _with_guider(made.pipeline, other)}), progress, steps=1)
    assert any("AdaptiveProjectedGuidance" in line for line in progress.said)


@pytest.mark.full
def test_cancel_is_obeyed_inside_every_forward(run: Any, recorded: Any) -> None:
    made = run(IMAGE)

    class Inside(recorded):  # type: ignore[misc]
        """Cancels at the fifth layer that runs after so many steps were reported."""

        def __init__(self, steps: int) -> None:
            super().__init__()
            self.left, self.layers = steps, 5

        def check(self) -> None:
            self.checks += 1
            self.layers -= len(self.steps) >= self.left
            if self.layers == 0:
                raise self.Cancelled

    def prompt(progress: Any) -> Any:
        return stages.encode_prompt(made.pipeline, PromptRequest(PROMPT, NEGATIVE), progress)

    def image(progress: Any) -> Any:
        return stages.encode_image(made.pipeline, ImageRequest(FRAME, WIDTH, HEIGHT), "crop", progress)

    calls = {
        "qwen": (prompt, 0),
        "byt5": (prompt, 1),
        "siglip": (image, 0),
        "transformer": (lambda p: _sampled(made, p), 1),
        "decoder": (lambda p: stages.decode(made.pipeline, made.latents, p), 0),
    }
    for stage, (call, steps) in calls.items():
        for part in made.pipeline.configs:
            made.pipeline.parts.read(part)  # reading from disk obeys a cancel too, and is not what is asked here
        if stage == "siglip":
            made.pipeline.parts.drop("vae")  # so that a cancel only in the VAE, which is next, is told by its steps
        progress = Inside(steps)
        with pytest.raises(recorded.Cancelled):
            call(progress)
        assert len(progress.steps) == steps, stage
    again = prompt(Silent())
    assert all(torch.equal(again.embeds[key], tensor) for key, tensor in made.prompt.embeds.items())
    assert torch.equal(image(Silent()).tensors["image_embeds"], made.image.tensors["image_embeds"])
    assert torch.equal(_sampled(made).samples, made.latents.samples)


def test_nothing_that_acts_is_called_without_effect(run: Any, recorded: Any) -> None:
    made, progress = run(IMAGE), recorded()
    mask = torch.ones(1, 1, 1, HEIGHT // 16, WIDTH // 16)
    guided = {"cfg": 2.0, "cfg_start": 0.1, "cfg_end": 0.9, "guidance_rescale": 0.1}
    _sampled(made, progress, **guided, shift=3.0, latents=made.latents, denoise=0.5, noise_mask=mask)
    _sampled(made, progress, sigmas=(1.0, 0.5, 0.0), steps=0)
    request = PromptRequest(PROMPT, NEGATIVE, template="{}")
    stages.encode_prompt(made.pipeline, request, progress)
    assert not progress.said
    _sampled(made, progress, guidance=3.0)
    assert progress.said == ["guidance has no effect on HunyuanVideo 1.5"]


def test_encoders_leave_as_soon_as_they_are_done(run: Any, recorded: Any) -> None:
    made, seen = run(IMAGE), []
    progress = recorded(lambda done, stage: seen.append((done, stage, "text_encoder" in made.pipeline.parts)))
    stages.encode_prompt(made.pipeline, PromptRequest(PROMPT, NEGATIVE), progress)
    assert seen[-1] == (3, "encoding prompt", False)
    _image(made.pipeline, FRAME)
    assert not {"text_encoder", "text_encoder_2", "image_encoder"} & set(made.pipeline.parts)


@pytest.mark.parametrize(
    ("target", "guider", "expected"),
    [
        (640, {"guidance_scale": 6.0}, (848, 480, 6.0)),
        (960, {"guidance_scale": 1.0}, (1280, 720, 1.0)),
        (640, {"guidance_scale": 6.0, "enabled": False}, (848, 480, 1.0)),
        (640, {"guidance_scale": 5.0, "use_original_formulation": True}, (848, 480, 6.0)),
    ],
)
def test_defaults_are_the_checkpoints(
    run: Any, target: int, guider: dict[str, Any], expected: tuple[float, ...]
) -> None:
    pipeline = run(TEXT).pipeline
    configs = {**pipeline.configs, "transformer": {**pipeline.configs["transformer"], "target_size": target}}
    defaults = of_checkpoint(
        _with_guider(replace(pipeline, model=replace(pipeline.model, configs=configs)), guider)
    ).sizes.defaults
    assert (defaults.width, defaults.height, defaults.cfg) == expected
    assert (defaults.frames, defaults.steps, defaults.fps) == (121, 50, 24.0)


@pytest.mark.parametrize(
    ("width", "height", "side", "size"),
    [
        (16, 9, 640, (848, 480)),
        (16, 9, 960, (1280, 720)),
        (720, 1280, 640, (480, 848)),
        (151, 96, 640, (800, 512)),
        (1000, 700, 640, (752, 528)),
    ],
)
def test_an_image_gets_the_size_that_tencent_chooses(
    run: Any, width: int, height: int, side: int, size: tuple[int, int]
) -> None:
    """The sizes are what ``get_closest_ratio`` of Tencent-Hunyuan/HunyuanVideo-1.5 at 60783e7 returned."""
    made: Any = SimpleNamespace(configs={"transformer": {"target_size": side}})
    assert hunyuan_video_15.nearest_size(made, width, height) == size
    made = run(IMAGE)
    assert (made.image.width, made.image.height) == (WIDTH, HEIGHT)


def test_vision_states_of_core_replace_our_own(run: Any, recorded: Any) -> None:
    made, progress = run(IMAGE), recorded()
    states = made.image.tensors["image_embeds"]
    request = ImageRequest(FRAME.expand(2, -1, -1, -1), WIDTH, HEIGHT, vision=states)
    image = stages.encode_image(made.pipeline, request, "stretch", progress)
    assert torch.equal(_sampled(made, image=image).samples, made.latents.samples)
    assert any("first of 2 images" in line for line in progress.said)
    with pytest.raises(InputError, match=r"\(1, 700, 32\).*\(1, 729, 32\)"):
        _image(made.pipeline, FRAME, vision=states[:, :700])
    bare = replace(
        made.pipeline,
        model=replace(
            made.pipeline.model, configs={k: v for k, v in made.pipeline.configs.items() if k != "image_encoder"}
        ),
    )
    with pytest.raises(InputError, match="no image_encoder"):
        _image(bare, FRAME)


def test_core_conditioning_is_our_prompt(run: Any) -> None:
    made = run(TEXT)

    def core(embeds: dict[str, torch.Tensor], padding: int) -> list[Any]:
        states = torch.nn.functional.pad(embeds["prompt_embeds"], (0, 0, 0, padding))
        extra = {"attention_mask": torch.arange(states.shape[1])[None] < states.shape[1] - padding}
        if embeds["prompt_embeds_2"].shape[1]:
            extra["conditioning_byt5small"] = embeds["prompt_embeds_2"]
        return [[states, extra]]

    prompt = stages.prompt_from_core(made.pipeline, core(made.prompt.embeds, 3), core(made.prompt.negative, 0))
    assert torch.equal(_sampled(made, prompt=prompt).samples, made.latents.samples)


def test_template_and_its_crop(run: Any) -> None:
    made = run(TEXT)
    own = qwen.Chat(made.pipeline.tools["tokenizer"], "", -1)
    written = f"<|im_start|>system\n{own.system}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n"

    def encoded(**changes: Any) -> torch.Tensor:
        request = PromptRequest(PROMPT, NEGATIVE, **changes)
        return stages.encode_prompt(made.pipeline, request, Silent()).embeds["prompt_embeds"]

    assert torch.equal(encoded(template=written, template_crop=own.crop), made.prompt.embeds["prompt_embeds"])
    head = made.pipeline.tools["tokenizer"](written.partition("{}")[0])["input_ids"]
    assert torch.equal(encoded(template=written), encoded(template=written, template_crop=len(head)))
    assert torch.equal(encoded(template_crop=3), encoded()), "upstream's own template has its own crop"
    assert encoded(template="{}").shape[1] == len(made.pipeline.tools["tokenizer"](PROMPT)["input_ids"])
    with pytest.raises(InputError, match="template_crop 900 of"):
        encoded(template=written, template_crop=900)


def test_a_template_in_the_model_s_files_is_not_run(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run(TEXT)
    monkeypatch.setattr(made.pipeline.tools["tokenizer"], "chat_template", "{{ raise_exception('it ran') }}")
    embeds = stages.encode_prompt(made.pipeline, PromptRequest(PROMPT, NEGATIVE), Silent()).embeds
    assert torch.equal(embeds["prompt_embeds"], made.prompt.embeds["prompt_embeds"])


def test_long_texts_are_shortened_and_said(run: Any, recorded: Any) -> None:
    made, progress = run(TEXT), recorded()
    request = PromptRequest("cat " * 60, "x" * 260, max_tokens=20)
    encoded = stages.encode_prompt(made.pipeline, request, progress)
    assert encoded.embeds["prompt_embeds"].shape[1] <= 20
    assert [note.split(" is shortened")[0] for note in progress.said] == ["the prompt", "the negative prompt"]
    stages.encode_prompt(made.pipeline, PromptRequest(f'"{"x" * 260}"', NEGATIVE), progress)
    assert "quotation marks in the prompt is shortened" in progress.said[-1]


def test_quotes_in_the_negative_prompt_reach_no_glyphs(run: Any, recorded: Any) -> None:
    made, progress = run(TEXT), recorded()
    for _ in range(2):
        prompt = stages.encode_prompt(made.pipeline, PromptRequest(PROMPT, '"BLUR"'), progress)
    assert prompt.embeds["prompt_embeds_2"].shape[1] > 0
    assert prompt.negative["prompt_embeds_2"].shape[1] == 0
    assert ["no longer reach ByT5" in note for note in progress.said] == [True], "said once"


def test_the_longest_text_that_fits_is_whole(run: Any, recorded: Any) -> None:
    """The limit counts what upstream counts: at the limit nothing is cut, and no padding is added."""
    made = run(TEXT)
    ids = made.pipeline.tools["tokenizer"](PROMPT)["input_ids"]
    count = made.prompt.embeds["prompt_embeds"].shape[1]
    exact = stages.encode_prompt(made.pipeline, PromptRequest(PROMPT, max_tokens=count), Silent())
    assert torch.equal(exact.embeds["prompt_embeds"], made.prompt.embeds["prompt_embeds"])
    progress = recorded()
    stages.encode_prompt(made.pipeline, PromptRequest(PROMPT, max_tokens=count - 1), progress)
    assert f"the prompt is shortened from {len(ids)} to {len(ids) - 1} tokens" in progress.said[0]


def test_no_negative_is_fine_without_guidance(run: Any) -> None:
    made = run(TEXT)
    alone = Prompt(made.prompt.family, made.prompt.embeds)
    assert torch.equal(_sampled(made, prompt=alone, cfg=1.0).samples, _sampled(made, cfg=1.0).samples)
    with pytest.raises(InputError, match="without a negative prompt"):
        _sampled(made, prompt=alone)


@pytest.mark.full
def test_large_videos_go_through_the_vae_in_tiles(run: Any, recorded: Any) -> None:
    made, generator = run(TEXT), torch.Generator().manual_seed(1)
    samples = torch.randn(1, 32, 1, 4, 18, generator=generator)
    latents, progress = replace(made.latents, samples=samples, frames=1), recorded()
    whole = stages.decode(made.pipeline, latents, progress)
    assert not progress.said
    sizes = made.pipeline.spec.sizes
    spec = replace(made.pipeline.spec, sizes=replace(sizes, most_whole_cells=64))
    tiling = replace(made.pipeline, spec=spec)
    tiled = stages.decode(tiling, latents, progress)
    assert "tiles" in progress.said[0]
    made.pipe.vae.enable_tiling()
    try:
        with torch.no_grad():
            expected = made.pipe.vae.decode(samples).sample
    finally:
        made.pipe.vae.disable_tiling()
    theirs = (expected[0] / 2 + 0.5).clamp(0, 1).permute(1, 2, 3, 0)
    assert 1e-3 < _distance(tiled, whole) < _distance(theirs, whole), "nearer to the whole than upstream's tiles"


def test_a_lone_transformer_borrows_the_rest(run: Any, tiny_folder: Path, tmp_path: Path, recorded: Any) -> None:
    made = run(IMAGE)
    (tmp_path / "lone").symlink_to(tiny_folder / IMAGE / "transformer", target_is_directory=True)
    request = loading.LoadRequest(tmp_path / "lone", base=tiny_folder / IMAGE, device="cpu", precision="fp32")
    pipeline = loading.load(request, recorded())
    assert (pipeline.model.task, "image_encoder" in pipeline.configs) == ("image", True)
    assert torch.equal(_image(pipeline, FRAME).tensors["image_embeds"], made.image.tensors["image_embeds"])


@pytest.mark.parametrize(
    ("name", "image", "message"), [(TEXT, IMAGE, "text-to-video checkpoint"), (IMAGE, TEXT, "no image for")]
)
def test_task_and_image_must_fit(run: Any, name: str, image: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _sampled(run(name), image=run(image).image)


@pytest.mark.full
def test_meanflow_checkpoints_are_told_the_next_time(run: Any) -> None:
    """A step-distilled image-to-video transformer takes the time after the step as well, as upstream gives it."""
    from diffusers import HunyuanVideo15Transformer3DModel

    made = run(IMAGE)
    config = {**made.pipeline.configs["transformer"], "use_meanflow": True}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = HunyuanVideo15Transformer3DModel.from_config(config).eval().requires_grad_(False)
    own = SimpleNamespace(**{**vars(made), "pipeline": _loaded(made.pipeline.model.source)})
    own.pipeline = replace(
        own.pipeline, model=replace(own.pipeline.model, configs={**own.pipeline.configs, "transformer": config})
    )
    own.pipeline.parts["transformer"] = transformer
    latents, _ = _one_shot(made, {"transformer": transformer, "vae": made.pipeline.parts["vae"]}, decodes=False)
    assert _distance(_sampled(own).samples, latents) < TRIMMED
