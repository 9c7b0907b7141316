"""LTX-Video: our stages give what the bare diffusers pipelines give, and every input acts or is refused."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.device.execution import generator_for
from anygpu.compat.errors import InputError, UnsupportedError
from anygpu.compat.memory import parts
from anygpu.compat.memory.standalone import StandaloneOffloader
from anygpu.pipelines import stages
from anygpu.pipelines.base import (
    EMBEDS,
    MASK,
    ImageCondition,
    ImageRequest,
    Latents,
    Prompt,
    PromptRequest,
    SampleSettings,
    Silent,
)
from anygpu.pipelines.families.ltx.conditions import InitialTokens, TokenStepper
from anygpu.pipelines.families.ltx.pipeline import _schedule
from anygpu.pipelines.families.ltx.spec import SPEC
from anygpu.pipelines.family import Recipe
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.load.lora import with_lora
from anygpu.pipelines.pictures import fitted, prepared
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sampling import loop
from anygpu.pipelines.sizes import beside_transformer
from anygpu.pipelines.text.t5 import batched
from diffusers import LTXConditionPipeline
from safetensors.torch import save_file

SIZE, FRAMES, STEPS, SEED = 64, 25, 3, 7
GRID = (4, 2, 2)
TEXTS = ("a red fox runs over the snow", "blurry, worst quality")
TRIMMED = 1e-5  # the bar where padding is trimmed: attention sums fewer zeros, in another order
TASK = {"ltx": "LTXPipeline", "ltx_image": "LTXImageToVideoPipeline", "ltx_condition": "LTXConditionPipeline"}
DISTILLED = SPEC.published.recipes["distilled"]
SETTINGS = SampleSettings(width=SIZE, height=SIZE, frames=FRAMES, steps=STEPS, seed=SEED)

Anchors = Sequence[tuple[torch.Tensor, int, float]]


def pictures(count: int, seed: int) -> torch.Tensor:
    return torch.rand(count, SIZE, SIZE, 3, generator=torch.Generator().manual_seed(seed))


PICTURE, OTHER, CLIP = pictures(1, 1), pictures(1, 2), pictures(17, 3)
PLACES: dict[str, Anchors] = {
    "first frame": [(PICTURE, 0, 1.0)],
    "first and last frame": [(PICTURE, 0, 1.0), (OTHER, 24, 0.8)],
    "any frame": [(PICTURE, 13, 1.0)],
    "extend": [(CLIP, 0, 1.0)],
    "clip inside, weak": [(CLIP, 8, 0.6)],
    "weak start": [(CLIP[:9], 0, 0.4), (PICTURE, 16, 0.9)],
}


class Model:
    """One tiny checkpoint: our pipeline with its prompt, and the bare pipelines of its folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.pipeline = load(LoadRequest(tiny.build(name, folder), device="cpu"))
        self.prompt = stages.encode_prompt(self.pipeline, PromptRequest(*TEXTS), Silent())
        self.pipes: dict[str, Any] = {}

    def bare(self, task: str) -> Any:
        """The bare pipeline; LTXConditionPipeline refuses a dynamic shift, so it gets a plain scheduler.

        It has our modules: those of a second reading lie at other addresses, which alone moves results by 2e-6.
        """
        if task not in self.pipes:
            pipe = self.pipes[task] = tiny.one_shot(self.name, self.folder, pipeline=TASK[task])
            pipe.transformer, pipe.vae = self.pipeline.parts["transformer"], self.pipeline.parts["vae"]
            if task == "ltx_condition":
                pipe.scheduler = type(pipe.scheduler)()
        return self.pipes[task]


@pytest.fixture(scope="module")
def plain(tiny_folder: Path) -> Model:
    return Model("ltx", tiny_folder)


@pytest.fixture(scope="module")
def condition(tiny_folder: Path) -> Model:
    return Model("ltx_condition", tiny_folder)


def encoded(pipeline: Pipeline, anchors: Anchors) -> ImageCondition | None:
    found = None
    for frames, frame, strength in anchors:
        request = ImageRequest(frames, SIZE, SIZE, frame, strength, previous=found, prepare=False)
        found = stages.encode_image(pipeline, request, "stretch", Silent())
    return found


def ours(model: Model, settings: SampleSettings = SETTINGS, anchors: Anchors = (), **changes: Any) -> Latents:
    pipeline = replace(model.pipeline, model=replace(model.pipeline.model, **changes))
    return stages.sample(pipeline, model.prompt, encoded(pipeline, anchors), settings, Silent())


def one_shot(pipe: Any, prompt: Prompt | None = None, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and frames of the bare pipeline; given a prompt, with our embeddings, so that equality is exact."""
    seen = {}

    def keep(_pipe: Any, _index: int, _time: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen.update(tensors)
        return {}

    given: dict[str, Any] = dict(zip(("prompt", "negative_prompt"), TEXTS, strict=True))
    if prompt is not None:
        rows = batched(prompt, True)
        given = {name: rows[name][1:] for name in (EMBEDS, MASK)}
        given |= {f"negative_{name}": rows[name][:1] for name in (EMBEDS, MASK)}
    video = pipe(
        **given,
        height=SIZE,
        width=SIZE,
        num_frames=FRAMES,
        generator=torch.Generator().manual_seed(SEED),
        output_type="pt",
        callback_on_step_end=keep,
        **{"num_inference_steps": STEPS, **arguments},
    ).frames[0]
    own = seen["latents"][:, -GRID[0] * GRID[1] * GRID[2] :]
    return pipe._unpack_latents(own, *GRID), video.permute(0, 2, 3, 1)


def without_noise(pipeline: Pipeline, latents: Latents) -> Latents:
    """Latents that are decoded as upstream's pipelines do where nobody asks for noise; our recipes ask for some."""
    return stages.with_decode_noise(pipeline, latents, 0.0, 0.0, Silent())


def conditions(anchors: Anchors) -> list[Any]:
    from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition

    kinds = [{"image" if len(frames) == 1 else "video": frames.permute(0, 3, 1, 2)} for frames, _, _ in anchors]
    return [
        LTXVideoCondition(**kind, frame_index=frame, strength=strength)
        for kind, (_, frame, strength) in zip(kinds, anchors, strict=True)
    ]


def require_same(model: Model, latents: Latents, expected: tuple[torch.Tensor, torch.Tensor], **changes: Any) -> None:
    assert torch.equal(latents.samples, expected[0])
    pipeline = replace(model.pipeline, model=replace(model.pipeline.model, **changes))
    frames = stages.decode(pipeline, without_noise(pipeline, latents), Silent())
    assert torch.equal(frames, expected[1]) and frames.shape == (FRAMES, SIZE, SIZE, 3)


def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the recipe without noise on pictures, as diffusers' LTXImageToVideoPipeline has it."""
    recipe = replace(SPEC.published.recipes["dev"], image_noise=0.0)
    monkeypatch.setattr("anygpu.pipelines.families.ltx.pipeline.recipe_of", lambda *_: recipe)


# Parity -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rescale", [0.0, 0.5])
def test_text_equals_ltx_pipeline(plain: Model, rescale: float) -> None:
    latents = ours(plain, replace(SETTINGS, guidance_rescale=rescale))
    require_same(plain, latents, one_shot(plain.bare("ltx"), plain.prompt, guidance_rescale=rescale))
    assert latents.task == "text"


def test_first_frame_equals_ltx_image_to_video_pipeline(plain: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the noise on the picture, which diffusers leaves out."""
    quiet(monkeypatch)
    latents = ours(plain, anchors=PLACES["first frame"])
    image = PICTURE.permute(0, 3, 1, 2)
    require_same(plain, latents, one_shot(plain.bare("ltx_image"), plain.prompt, image=image))
    assert latents.task == "image"


@pytest.mark.parametrize(
    "place", [place if place != "first frame" else pytest.param(place, marks=pytest.mark.full) for place in PLACES]
)
def test_conditions_equal_ltx_condition_pipeline(condition: Model, place: str) -> None:
    latents = ours(condition, anchors=PLACES[place])
    expected = one_shot(condition.bare("ltx_condition"), condition.prompt, conditions=conditions(PLACES[place]))
    require_same(condition, latents, expected)


def test_conditions_on_an_older_model_equal_ltx_condition_pipeline(plain: Model) -> None:
    anchors = PLACES["first and last frame"]
    expected = one_shot(plain.bare("ltx_condition"), plain.prompt, conditions=conditions(anchors))
    require_same(plain, ours(plain, anchors=anchors), expected)


@pytest.mark.parametrize("task", ["ltx", "ltx_condition"])
def test_frame_rate_counts_as_upstream_counts_it(plain: Model, condition: Model, task: str) -> None:
    model = condition if task == "ltx_condition" else plain
    expected = one_shot(model.bare(task), model.prompt, frame_rate=12)
    require_same(model, ours(model, replace(SETTINGS, fps=12.0)), expected)


@pytest.mark.parametrize("task", ["ltx", "ltx_condition", pytest.param("ltx_image", marks=pytest.mark.full)])
def test_own_text_encoding_equals_within_what_trimming_costs(
    plain: Model, condition: Model, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if task == "ltx_image":
        quiet(monkeypatch)
    model = condition if task == "ltx_condition" else plain
    anchors = PLACES["first frame"] if task == "ltx_image" else ()
    image = {"image": PICTURE.permute(0, 3, 1, 2)} if anchors else {}
    latents = ours(model, anchors=anchors)
    pipe = tiny.one_shot(model.name, model.folder, pipeline=TASK[task])
    pipe._get_t5_prompt_embeds = MethodType(LTXConditionPipeline._get_t5_prompt_embeds, pipe)  # with its mask
    expected, video = one_shot(pipe, **image)
    torch.testing.assert_close(latents.samples, expected, rtol=0, atol=TRIMMED)
    frames = stages.decode(model.pipeline, without_noise(model.pipeline, latents), Silent())
    torch.testing.assert_close(frames, video, rtol=0, atol=TRIMMED)


def test_an_encoded_video_is_normalised_as_upstream_does(plain: Model) -> None:
    found = stages.encode_video(plain.pipeline, CLIP, SIZE, SIZE, "crop", 3, Silent()).samples
    pipe = plain.bare("ltx")
    posterior = pipe.vae.encode(CLIP.permute(3, 0, 1, 2)[None] * 2 - 1).latent_dist
    drawn = posterior.sample(torch.Generator().manual_seed(3))
    assert torch.equal(found, pipe._normalize_latents(drawn, pipe.vae.latents_mean, pipe.vae.latents_std))


def test_video_to_video_equals_ltx_condition_pipeline(condition: Model) -> None:
    video = stages.encode_video(condition.pipeline, CLIP.repeat(2, 1, 1, 1)[:FRAMES], SIZE, SIZE, "crop", 3, Silent())
    anchors = PLACES["first and last frame"]
    latents = ours(condition, replace(SETTINGS, steps=2, latents=video, denoise=0.5), anchors)
    expected = one_shot(
        condition.bare("ltx_condition"),
        condition.prompt,
        conditions=conditions(anchors),
        latents=video.samples,
        num_inference_steps=4,
        denoise_strength=0.5,
    )
    require_same(condition, latents, expected)


def test_distilled_runs_its_own_schedule_without_guidance(condition: Model) -> None:
    anchors = PLACES["first frame"]
    latents = ours(condition, replace(SETTINGS, steps=0), anchors, variant="distilled")
    expected = one_shot(
        condition.bare("ltx_condition"),
        condition.prompt,
        conditions=conditions(anchors),
        guidance_scale=1.0,
        timesteps=[1000 * level for level in DISTILLED.timesteps],
        num_inference_steps=7,
        frame_rate=DISTILLED.size[2],
    )
    require_same(condition, latents, expected, variant="distilled")


# What acts --------------------------------------------------------------------------------------------------------


def test_what_the_vae_says_of_an_image_does_not_depend_on_the_seed(plain: Model) -> None:
    requests = [ImageRequest(PICTURE, SIZE, SIZE, seed=seed, prepare=False) for seed in (0, 1)]
    first, second = (stages.encode_image(plain.pipeline, request, "stretch", Silent()) for request in requests)
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)


def test_last_frame_is_minus_one_for_images_and_clips(condition: Model) -> None:
    for frames, explicit in ((PICTURE, 24), (CLIP[:9], 16)):
        counted, last = (ours(condition, anchors=[(frames, frame, 1.0)]).samples for frame in (explicit, -1))
        assert torch.equal(counted, last)


@pytest.mark.full
@pytest.mark.parametrize("scheduler", ["unipc", "dpm++_2m"])
@pytest.mark.parametrize("place", ["first and last frame", "weak start"])
def test_other_schedulers_keep_the_pictures(condition: Model, scheduler: str, place: str) -> None:
    base = ours(condition, replace(SETTINGS, steps=4), PLACES[place]).samples
    found = ours(condition, replace(SETTINGS, steps=4, scheduler=scheduler), PLACES[place]).samples
    assert found.isfinite().all() and not torch.equal(found, base)
    if place == "first and last frame":
        assert torch.equal(found[:, :, 0], base[:, :, 0])
    assert found.std() < 2 * base.std()


@pytest.mark.parametrize("variant", ["dev", "distilled"])
def test_own_noise_levels_and_shift_run(condition: Model, variant: str) -> None:
    levels = replace(SETTINGS, steps=0, sigmas=(1.0, 0.7, 0.2, 0.0))
    shifted = replace(SETTINGS, steps=2, shift=5.0)
    for settings in (levels, shifted):
        assert ours(condition, settings, PLACES["extend"], variant=variant).samples.isfinite().all()


def test_less_denoising_stays_closer_and_a_mask_keeps_its_part(plain: Model) -> None:
    video = stages.encode_video(plain.pipeline, pictures(FRAMES, 9), SIZE, SIZE, "crop", 3, Silent())
    mask = torch.ones(1, 1, 1, 2, 2)
    mask[..., 0] = 0.0
    half, whole = (ours(plain, replace(SETTINGS, latents=video, denoise=share)).samples for share in (0.5, 1.0))
    assert (half - video.samples).norm() < 0.9 * (whole - video.samples).norm()
    for anchors in ((), [(PICTURE, 24, 1.0)]):
        kept = ours(plain, replace(SETTINGS, latents=video, noise_mask=mask), anchors).samples
        assert torch.equal(kept[..., 0], video.samples[..., 0])
        assert (kept - video.samples)[..., 1].abs().min() > 0


def test_a_picture_wins_over_the_video_and_its_mask(plain: Model) -> None:
    video = stages.encode_video(plain.pipeline, pictures(FRAMES, 9), SIZE, SIZE, "crop", 3, Silent())
    settings = replace(SETTINGS, latents=video, denoise=0.5, noise_mask=torch.zeros(1, 1, 1, 2, 2))
    both = ours(plain, settings, PLACES["first frame"]).samples
    assert torch.equal(both[:, :, 0], ours(plain, anchors=PLACES["first frame"]).samples[:, :, 0])
    assert torch.equal(both[:, :, 1:], video.samples[:, :, 1:])


def test_a_clip_longer_than_the_video_is_cut_as_upstream_cuts_its_frames(condition: Model, recorded: Any) -> None:
    progress, anchors = recorded(), [(CLIP, 16, 1.0)]
    image = encoded(condition.pipeline, anchors)
    found = stages.sample(condition.pipeline, condition.prompt, image, SETTINGS, progress)
    expected, _ = one_shot(condition.bare("ltx_condition"), condition.prompt, conditions=conditions(anchors))
    # Encoded whole and cut, or cut and encoded: the same sums by convolutions of two sizes.
    torch.testing.assert_close(found.samples, expected, rtol=0, atol=1e-5)
    assert [text for text in progress.said if "clip" in text] == ["clip at frame 16: 17 -> 9 frames (the video has 25)"]


def test_previews_are_videos_with_the_picture_in_its_place(
    plain: Model, condition: Model, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet(monkeypatch)
    for model, place in ((condition, "first and last frame"), (plain, "first frame")):
        progress, image = recorded(), encoded(model.pipeline, PLACES[place])
        latents = stages.sample(model.pipeline, model.prompt, image, SETTINGS, progress)
        assert [tuple(preview.shape) for preview in progress.previews] == [(1, 128, *GRID)] * STEPS
        assert [step[:2] for step in progress.steps if step[2] == "sampling"] == [(1, 3), (2, 3), (3, 3)]
    assert all(torch.equal(preview[:, :, 0], latents.samples[:, :, 0]) for preview in progress.previews)


def test_the_last_noise_is_the_decoders_to_remove(condition: Model, plain: Model, recorded: Any) -> None:
    latents, progress = ours(condition), recorded()
    tuned = stages.with_decode_noise(condition.pipeline, latents, 0.05, 0.025, progress)
    assert stages.with_decode_noise(condition.pipeline, latents, -1.0, -1.0, progress) is latents
    assert not progress.said
    stages.with_decode_noise(plain.pipeline, latents, 0.05, -1.0, progress)
    assert progress.said == ["no effect of decode_timestep: this VAE does not remove noise"]
    with pytest.raises(InputError, match=r"decode_noise_scale 2\.0"):
        stages.with_decode_noise(condition.pipeline, latents, -1.0, 2.0, progress)
    with pytest.raises(InputError, match="decode_timestep nan; expected 0 to 1 or below 0"):
        stages.with_decode_noise(condition.pipeline, latents, float("nan"), -0.5, progress)
    vae, generator = condition.pipeline.parts["vae"], generator_for(0, latents.extra["generator_state"])
    noisy = 0.975 * latents.samples + 0.025 * torch.randn(latents.samples.shape, generator=generator)
    noisy = noisy * vae.latents_std.view(1, -1, 1, 1, 1) + vae.latents_mean.view(1, -1, 1, 1, 1)
    expected = vae.decode(noisy, torch.tensor([0.05]), return_dict=False)[0][0].permute(1, 2, 3, 0) / 2 + 0.5
    frames = stages.decode(condition.pipeline, tuned, Silent())
    torch.testing.assert_close(frames, expected.clamp(0, 1), rtol=0, atol=1e-6)
    assert torch.equal(frames, stages.decode(condition.pipeline, latents, Silent())), "the recipe's own"
    assert not torch.equal(
        frames, stages.decode(condition.pipeline, without_noise(condition.pipeline, latents), Silent())
    )
    assert stages.decode(condition.pipeline, replace(tuned, extra={}), Silent()).isfinite().all()
    toned = replace(latents, extra={**latents.extra, "tone_map": 0.6})
    assert not torch.equal(frames, stages.decode(condition.pipeline, toned, Silent()))


# Robustness -------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("text", [torch.float32, torch.bfloat16])
def test_bf16_runs_with_text_of_either_dtype(plain: Model, tiny_folder: Path, text: torch.dtype) -> None:
    pipeline = load(LoadRequest(tiny.build("ltx", tiny_folder), device="cpu", precision="bf16"))
    pipeline = replace(pipeline, device=replace(pipeline.device, precision=replace(pipeline.precision, text=text)))
    prompt = plain.prompt if text is torch.float32 else stages.encode_prompt(pipeline, PromptRequest(*TEXTS), Silent())
    image = encoded(pipeline, PLACES["first and last frame"])
    latents = stages.sample(pipeline, prompt, image, SETTINGS, Silent())
    assert latents.samples.dtype is torch.float32 and latents.samples.isfinite().all()
    assert stages.decode(pipeline, latents, Silent()).isfinite().all()


def test_sequential_offload_reads_the_vaes_statistics(plain: Model, tiny_folder: Path) -> None:
    fresh = load(LoadRequest(tiny.build("ltx", tiny_folder), device="cpu"))
    moved = replace(
        fresh, plan=replace(fresh.plan, offloader=StandaloneOffloader(fresh.parts, torch.device("cpu"), "sequential"))
    )
    expected = ours(plain, anchors=PLACES["first frame"])
    frames = stages.decode(plain.pipeline, expected, Silent())
    for _ in range(2):
        image = encoded(moved, PLACES["first frame"])
        assert torch.equal(stages.sample(moved, plain.prompt, image, SETTINGS, Silent()).samples, expected.samples)
        assert torch.equal(stages.decode(moved, expected, Silent()), frames)


@pytest.mark.parametrize(
    ("anchors", "nearest"), [([(PICTURE, 25, 1.0)], 24), ([(CLIP, 13, 1.0)], 16), ([(PICTURE, -2, 1.0)], -1)]
)
def test_a_picture_off_the_video_is_refused_with_the_nearest_place(
    condition: Model, anchors: Anchors, nearest: int
) -> None:
    with pytest.raises(InputError, match=rf"nearest valid value is {nearest}\."):
        ours(condition, anchors=anchors)


def test_pictures_of_two_vaes_are_refused(plain: Model, condition: Model) -> None:
    other = encoded(condition.pipeline, PLACES["first frame"])
    with pytest.raises(InputError, match="another LTX-Video VAE"):
        stages.encode_image(
            plain.pipeline, ImageRequest(OTHER, SIZE, SIZE, 24, previous=other, prepare=False), "stretch", Silent()
        )


def test_a_clip_off_the_grid_is_cut_and_said(condition: Model, recorded: Any) -> None:
    progress = recorded()
    image = stages.encode_image(
        condition.pipeline, ImageRequest(CLIP[:12], SIZE, SIZE, prepare=False), "stretch", progress
    )
    assert image.tensors["moments_0"].shape == (1, 256, 2, 2, 2)
    assert progress.said == ["clip 12 -> 9 frames (LTX-Video needs 8n+1 frames)"]


# What files do not tell -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "variant", "said"),
    [
        ("LTX-Video-0.9.8-13B-Distilled", "distilled", "'LTX-Video-0.9.8-13B-Distilled' says so"),
        ("models--Lightricks--LTX-Video-0.9.8-13B-distilled/snapshots/" + "0a" * 20, "distilled", "distilled' says so"),
        ("ltxv-2b-0.9.6-distilled", "distilled_0.9.6", "'ltxv-2b-0.9.6-distilled' says so"),
        ("ltxv-13b-dist", "distilled", "'ltxv-13b-dist' says so"),
        ("LTX-Video-0.9.5", "dev", "assumed, since its file says nothing and the name 'LTX-Video-0.9.5'"),
        ("ltxv", "dev", "no name around it says 'distilled'"),
    ],
)
def test_the_variant_is_guessed_from_the_names_and_said(
    tiny_folder: Path, tmp_path: Path, recorded: Any, name: str, variant: str, said: str
) -> None:
    folder = tmp_path / "models" / name
    folder.parent.mkdir(parents=True)
    folder.symlink_to(tiny.build("ltx_condition", tiny_folder))
    progress = recorded()
    pipeline = load(LoadRequest(folder, device="cpu"), progress)
    decision = next(decision for decision in pipeline.plan.decisions if decision.subject == "variant")
    assert (pipeline.variant, decision.verdict, decision.source) == (variant, variant, "auto")
    assert said in decision.why and decision.brief == f"variant {variant}: {decision.why}"
    assert not progress.said  # it is among the decisions, which every user of a pipeline shows


def test_a_second_pass_is_of_the_configuration_of_its_first() -> None:
    passes = [(each.source, each.second.source) for each in SPEC.published.recipes.values() if each.second is not None]
    assert len(passes) == 5 and all(second == f"{first}, second_pass" for first, second in passes)


def test_the_text_is_masked_for_every_version(plain: Model, condition: Model, recorded: Any) -> None:
    """Source: Lightricks/LTX-Video 5260738 ``encode_prompt``; diffusers' LTXPipeline has no mask."""
    for model, times in ((condition, 0), (plain, 1)):  # what an older graph had otherwise is said once
        said = recorded()
        for _ in range(2):
            stages.encode_prompt(model.pipeline, PromptRequest("a red cat", ""), said)
        assert sum("earlier versions had none" in line for line in said.said) == times
    for model in (plain, condition):
        tokens = model.bare("ltx").tokenizer("a red cat", padding="max_length", max_length=256, return_tensors="pt")
        encoder, valid = model.pipeline.parts["text_encoder"], tokens.attention_mask.bool()
        with torch.no_grad():
            expected = encoder(tokens.input_ids, attention_mask=tokens.attention_mask)[0][valid]
        found = stages.encode_prompt(model.pipeline, PromptRequest("a red cat", ""), Silent()).embeds["prompt_embeds"]
        torch.testing.assert_close(found[0], expected, rtol=0, atol=TRIMMED)


@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("steps", [4, 7, 11])
def test_a_distilled_schedule_of_another_length_keeps_its_ends(plain: Model, conditioned: bool, steps: int) -> None:
    settings, config = replace(SETTINGS, steps=steps), plain.pipeline.tools["scheduler"]
    schedule = _schedule(config, settings, conditioned, DISTILLED, torch.device("cpu"))
    times, trained = schedule.timesteps.tolist(), [1000 * level for level in DISTILLED.timesteps]
    assert len(times) == steps and (times[0], times[-1]) == (trained[0], pytest.approx(trained[-1]))
    assert schedule.levels[-1] == 0.0
    if steps == 7:
        assert times == pytest.approx(trained)


@pytest.mark.parametrize("recipe", [SPEC.published.recipes["dev"], DISTILLED], ids=lambda recipe: recipe.name)
def test_the_transformer_sees_a_shift_too(condition: Model, recipe: Recipe) -> None:
    settings, config = replace(SETTINGS, steps=8, shift=5.0), condition.pipeline.tools["scheduler"]
    schedule = _schedule(config, settings, True, recipe, torch.device("cpu"))
    assert schedule.timesteps.tolist() == pytest.approx([1000 * level for level in schedule.levels[:-1]])
    usual = _schedule(config, replace(settings, shift=0.0), True, recipe, torch.device("cpu"))
    assert all(level > plain for level, plain in zip(schedule.levels[1:-1], usual.levels[1:-1], strict=True))


def by_hand(
    model: Model, control: torch.Tensor, strength: float, picture: torch.Tensor | None, factor: int
) -> torch.Tensor:
    """Latents of plain Euler steps over the video's tokens with a control clip's behind them, encoded at 1/``factor``.

    Source: Lightricks/ComfyUI-LTXVideo ``iclora.py``, ComfyUI 0.33 ``comfy_extras/nodes_lt.py``: places, timesteps;
    Lightricks/LTX-2 400fd31 ``reference_video_cond.py``, whose class gives these places and tokens for 1, 2 and 3.
    """
    side, own = SIZE * factor, 4 * (2 * factor) ** 2  # and tokens of the video
    pipe, generator = model.bare("ltx_condition"), generator_for(SEED)
    transformer, vae = model.pipeline.parts["transformer"], model.pipeline.parts["vae"]
    settings = replace(SETTINGS, cfg=1.0, stg=0.0, fps=25.0, width=side, height=side)
    levels = _schedule(
        model.pipeline.tools["scheduler"], settings, True, SPEC.published.recipes["dev"], torch.device("cpu")
    ).levels

    def clean(frames: torch.Tensor, draw: bool) -> torch.Tensor:
        found = vae.encode((frames.permute(3, 0, 1, 2) * 2 - 1)[None]).latent_dist
        latents = found.sample(generator) if draw else found.mean
        mean, std = (value.view(1, -1, 1, 1, 1) for value in (vae.latents_mean, vae.latents_std))
        return pipe._pack_latents((latents - mean) / std)

    def places(frames: int, step: int) -> torch.Tensor:
        sides = range(0, side, step)
        cells = [(max(0, 8 * t - 7) / 25, y, x) for t in range(frames) for y in sides for x in sides]
        return torch.tensor(cells).T[None]

    video = pipe._pack_latents(torch.randn(1, 128, 4, side // 32, side // 32, generator=generator))
    first, held = 0 if picture is None else 4, torch.zeros(1, own)
    if picture is not None:
        shown = clean(fitted(picture, side, side, "stretch"), draw=True)
        video[:, : own // 4], held[:, : own // 4] = shown, 1.0
    beside = clean(control, draw=False)
    noise = torch.randn(beside.shape, generator=generator) if strength < 1 else beside
    beside = (strength * beside + (1 - strength) * noise)[:, first:]
    coords = torch.cat((places(4, 32), places(1 + (len(control) - 1) // 8, 32 * factor)[:, :, first:]), 2)
    tokens, start = torch.cat((video, beside), 1), video.clone()
    share = torch.cat((1 - held, torch.full((1, beside.shape[1]), 1 - strength)), 1)
    for index, level in enumerate(levels[:-1]):
        output = transformer(
            hidden_states=tokens,
            encoder_hidden_states=model.prompt.embeds[EMBEDS],
            encoder_attention_mask=model.prompt.embeds[MASK],
            timestep=1000 * level * share,
            video_coords=coords,
            return_dict=False,
        )[0]
        tokens = tokens + (levels[index + 1] - level) * share[..., None] * output
        tokens[:, :own] = torch.where(held[..., None] > 0, start, tokens[:, :own])
    return pipe._unpack_latents(tokens[:, :own], 4, side // 32, side // 32)


def with_ic_lora(pipeline: Any, path: Path, **factors: str) -> Any:
    """``pipeline`` with a LoRA that changes nothing and whose file notes ``factors``."""
    name, side = "transformer_blocks.0.attn1.to_q", pipeline.configs["transformer"]["num_attention_heads"]
    side *= pipeline.configs["transformer"]["attention_head_dim"]
    shapes = {"A": (1, side), "B": (side, 1)}
    layers = {f"transformer.{name}.lora_{each}.weight": torch.zeros(shape) for each, shape in shapes.items()}
    save_file(layers, path, {f"reference_{name}_factor": value for name, value in factors.items()})
    return with_lora(pipeline, path, 1.0, "", "separate", Silent())


@pytest.mark.parametrize(
    ("picture", "strength", "factor"),
    [
        pytest.param(
            picture,
            strength,
            factor,
            marks=[] if (picture is None) == (strength * factor in (1.0, 1.4)) else [pytest.mark.full],
            id=f"{'alone' if picture is None else 'after a picture'}-{strength}-{factor}",
        )
        for picture in (None, PICTURE)
        for strength in (1.0, 0.7)
        for factor in (1, 2)
    ],
)
def test_a_control_clip_stands_beside_the_video(
    condition: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, picture: Any, strength: float, factor: int
) -> None:
    quiet(monkeypatch)
    pipeline = condition.pipeline if factor == 1 else with_ic_lora(
        condition.pipeline, tmp_path / "ic.safetensors", downscale=f"{factor}"
    )  # fmt: skip
    image, side = None, SIZE * factor
    if picture is not None:
        image = stages.encode_image(pipeline, ImageRequest(picture, side, side, prepare=False), "stretch", Silent())
    request = ImageRequest(CLIP, side, side, 0, strength, previous=image, control=True, prepare=False)
    image = stages.encode_image(pipeline, request, "stretch", Silent())
    assert image.beside == {1: 17, 2: 5}[factor] and image.sources[-1].control
    counts: list[int] = []
    room = lambda *given, **more: counts.append(more["beside"]) or beside_transformer(*given, **more)  # noqa: E731
    monkeypatch.setattr(loop, "beside_transformer", room)
    with condition.pipeline.offloader.hold("transformer") as module:
        hook = module.register_forward_pre_hook(
            lambda _, __, given: counts.append(given["hidden_states"].shape[1]), with_kwargs=True
        )
        settings = replace(SETTINGS, cfg=1.0, stg=0.0, fps=25.0, width=side, height=side)
        made = stages.sample(pipeline, condition.prompt, image, settings, Silent())
        hook.remove()
    with torch.no_grad():
        expected = by_hand(condition, CLIP, strength, picture, factor)
    assert counts.pop(0) == image.beside, "the transformer is held with room for it"
    assert set(counts) == {16 * factor**2 + 12 - (0 if picture is None else 4)}
    torch.testing.assert_close(made.samples, expected, atol=2e-5, rtol=1e-4)


def test_a_control_clip_is_neither_blurred_nor_compressed(
    condition: Model, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lightricks/ComfyUI-LTXVideo ``iclora.py`` has it: thin edges would lose half of their contrast."""
    monkeypatch.setattr(parts, "_told", set())
    edges, watched = torch.zeros(9, SIZE, SIZE, 3), recorded()
    edges[:, ::8] = 1.0
    request = ImageRequest(edges, SIZE, SIZE, control=True)
    made = [
        stages.encode_image(condition.pipeline, each, "crop", watched).tensors["control_0"]
        for each in (request, replace(request, prepare=False))
    ]
    assert torch.equal(*made) and not any("blurred and compressed as" in line for line in watched.said)
    assert sum("earlier versions blurred and compressed it" in line for line in watched.said) == 1
    picture = replace(request, control=False)
    assert not torch.equal(prepared(condition.pipeline, picture, "crop", watched).frames, edges)


def test_new_noise_in_a_control_clip_is_its_share_of_the_level() -> None:
    """Of a stochastic recipe, whose prediction is exact: noise minus data, in each token by its share."""
    data, noise, shares = torch.randn(1, 3, 128), torch.randn(1, 3, 128), torch.tensor([[1.0, 0.5, 0.0]])
    schedule: Any = SimpleNamespace(levels=(1.0, 0.5), clean=lambda output, _index, tokens: tokens - output)
    share = shares.unsqueeze(-1)
    start = InitialTokens(data + share * (noise - data), noise, {}, shares=shares)
    stepper = TokenStepper(schedule, start, 0.0, torch.Generator().manual_seed(3), renews=True)
    drawn = torch.randn(1, 3, 128, generator=torch.Generator().manual_seed(3))
    expected = data + 0.5 * share * (drawn - data)
    torch.testing.assert_close(stepper.step(share * (noise - data), 0, start.tokens), expected)


def test_a_control_clip_of_another_size_than_its_lora_is_refused_or_said(
    condition: Model, tmp_path: Path, recorded: Any
) -> None:
    path, other = tmp_path / "half.safetensors", tmp_path / "other.safetensors"
    pipeline = with_ic_lora(condition.pipeline, path, downscale="2.0")
    for name, value, expected in (("downscale", "3", "2"), ("temporal_scale", "4", "1")):
        with pytest.raises(UnsupportedError, match=f"{name}_factor {value}; expected {expected}, or none"):
            with_ic_lora(pipeline, other, **{name: value})
    request = ImageRequest(CLIP, SIZE + 32, SIZE, control=True, prepare=False)
    with pytest.raises(InputError, match="a control clip at 1/2 of 96 pixels"):
        stages.encode_image(pipeline, request, "stretch", Silent())
    image = stages.encode_image(condition.pipeline, replace(request, width=SIZE), "stretch", Silent())
    stages.sample(pipeline, condition.prompt, image, replace(SETTINGS, steps=1), progress := recorded())
    assert any("another size than its IC-LoRA" in said for said in progress.said)


def test_an_older_model_takes_a_control_clip_too_and_other_families_say_that_they_do_not(
    plain: Model, tiny_folder: Path, recorded: Any
) -> None:
    request = ImageRequest(CLIP, SIZE, SIZE, control=True, prepare=False)
    image = stages.encode_image(plain.pipeline, request, "stretch", Silent())
    settings = replace(SETTINGS, cfg=1.0, stg=0.0)
    without = stages.sample(plain.pipeline, plain.prompt, None, settings, Silent())
    made = stages.sample(plain.pipeline, plain.prompt, image, settings, Silent())
    assert made.samples.shape == without.samples.shape and not torch.equal(made.samples, without.samples)
    folders = [tiny.build(name, tiny_folder) for name in ("hunyuan_video", "siglip", "framepack")]
    other, progress = load(LoadRequest(folders[-1], device="cpu", base=folders[0])), recorded()
    wide = ImageRequest(torch.rand(1, 64, 96, 3), 64, 64, control=True)
    stages.encode_image(other, wide, "nearest bucket", progress)
    assert "control has no effect on FramePack" in progress.said
    assert any("lanczos as its publisher" in line for line in progress.said), "it is prepared all the same"


@pytest.mark.parametrize("name", ["plain", "condition"])
def test_pictures_of_every_version_get_the_published_noise(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each step clean + 0.15 t^2 noise, anew each time. Source: every config of Lightricks/LTX-Video."""
    model, seen = request.getfixturevalue(name), []

    def look(_module: Any, _given: Any, named: dict[str, Any]) -> None:
        seen.append((named["hidden_states"][-1, :4], float(named["timestep"][-1].max()) / 1000))

    image, settings = encoded(model.pipeline, PLACES["first frame"]), replace(SETTINGS, cfg=1.0, stg=0.0)
    with model.pipeline.offloader.hold("transformer") as module:
        hook = module.register_forward_pre_hook(look, with_kwargs=True)
        stages.sample(model.pipeline, model.prompt, image, settings, Silent())
        hook.remove()
    quiet(monkeypatch)
    clean = stages.sample(model.pipeline, model.prompt, image, settings, Silent()).samples[0, :, 0].flatten(1).T
    noises = [(tokens - clean) / (0.15 * level**2) for tokens, level in seen]
    assert len(noises) == STEPS
    for index, noise in enumerate(noises):
        assert 0.85 < float(noise.std()) < 1.15 and abs(float(noise.mean())) < 0.15
        assert index == 0 or not torch.allclose(noise, noises[index - 1], atol=0.1)
