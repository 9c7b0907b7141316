"""FramePack section by section gives the one-shot pipeline's video, in both orders, with and without an end image."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.decision import Decision
from anygpu.compat.errors import InputError, UnsupportedError
from anygpu.compat.memory.standalone import StandaloneOffloader
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
from anygpu.pipelines.families.framepack import pipeline as framepack
from anygpu.pipelines.families.framepack import sections
from anygpu.pipelines.families.framepack.pipeline import guess_variant, resume_key
from anygpu.pipelines.family import FITS
from anygpu.pipelines.files.evidence import Evidence, names_around
from anygpu.pipelines.forecast import counts
from anygpu.pipelines.load import folder as loading
from anygpu.pipelines.sampling import resume
from anygpu.pipelines.sampling.schedules import FlowUniPC
from published import loops
from safetensors.torch import load_file

I2V, F1 = "framepack", "framepack_f1"
ORDER = {I2V: sections.INVERTED, F1: sections.VANILLA}
WIDTH, HEIGHT, WINDOW, STEPS, SEED, GUIDANCE = 48, 32, 2, 2, 7, 6.0
PER_SECTION, OURS = 5, WINDOW * 4  # pixel frames a section: those that upstream counts, and those that it adds
PROMPT, NEGATIVE = "a red cat jumps over the wall", "blurry and ugly"
START, END = torch.rand(2, 1, HEIGHT, WIDTH, 3, generator=torch.Generator().manual_seed(0))
SETTINGS = SampleSettings(WIDTH, HEIGHT, 0, steps=STEPS, seed=SEED, guidance=GUIDANCE, scheduler="euler")  # upstream's
TRIMMED = 1e-5  # upstream attends over masked padding, which moves the last bits


@pytest.fixture(scope="module")
def run(tiny_folder: Path) -> Callable[[str], SimpleNamespace]:
    """From a tiny checkpoint's name to what all its tests share: pipeline, prompt, images, and the bare pipeline."""
    return cache(partial(_run, folder=tiny_folder))


def _run(name: str, folder: Path) -> SimpleNamespace:
    pipe = tiny.one_shot(name, folder)
    pipeline = _loaded(folder / name, base=folder / "hunyuan_video")
    request = PromptRequest(PROMPT, NEGATIVE, sections=(" ", "a blue dog sleeps"))
    prompt = stages.encode_prompt(pipeline, request, Silent())
    start = stages.encode_image(pipeline, ImageRequest(START, WIDTH, HEIGHT), "stretch", Silent())
    end = stages.encode_image(pipeline, ImageRequest(END, WIDTH, HEIGHT, frame=-1, previous=start), "stretch", Silent())
    # The same weights in memory: other addresses move the last bits of a matrix product.
    pipe.register_modules(transformer=pipeline.parts["transformer"], vae=pipeline.parts["vae"])
    pipe.scheduler.register_to_config(use_dynamic_shifting=True)  # as the publisher's own levels are
    # Of a picture in 8 bits, as the publisher's; diffusers gives the processor floats.
    pipe.encode_image = lambda *_, **__: start.tensors["vision"]
    return SimpleNamespace(
        name=name,
        pipe=pipe,
        pipeline=pipeline,
        prompt=replace(prompt, sections=()),
        told=prompt,
        start=start,
        end=end,
        scale=pipeline.configs["vae"]["scaling_factor"],
    )


def _loaded(folder: Path, **choices: Any) -> Any:
    return loading.load(loading.LoadRequest(folder, device="cpu", **{"precision": "fp32", **choices}))


def _frames(count: int) -> int:
    """The most pixel frames, on the grid, that upstream samples ``count`` sections for."""
    return (count * PER_SECTION - 1) // 4 * 4 + 1


class SavedLatents:
    """A keeper that remembers each section; ``standing`` is what an earlier sampling left."""

    def __init__(self, standing: resume.SectionState | None = None, cut_after: int = 0) -> None:
        self.standing, self.cut_after = standing, cut_after
        self.parts: list[tuple[int, int, Latents]] = []
        self.keys: list[str] = []

    def found(self, key: str) -> resume.SectionState | None:
        self.keys.append(key)
        return self.standing

    def save(self, key: str, index: int, count: int, latents: Latents, standing: resume.SectionState) -> None:
        self.parts.append((index, count, latents))
        self.standing = standing
        if self.cut_after == index + 1:
            raise KeyboardInterrupt


class Asked(SavedLatents):
    """A keeper that ends a sampling as soon as it has been asked for what is kept of it."""

    def found(self, key: str) -> resume.SectionState | None:
        super().found(key)
        raise KeyboardInterrupt


def _sampled(made: SimpleNamespace, count: int, progress: Any = None, keep: Any = None, **changes: Any) -> Latents:
    """``count`` sections; ``changes`` are fields of either settings, or ``prompt`` or ``image``."""
    prompt, image = changes.pop("prompt", made.prompt), changes.pop("image", made.start)
    asked = FramePackSettings(count * OURS / 30, WINDOW)
    known = FramePackSettings.__dataclass_fields__
    asked = replace(asked, **{key: changes.pop(key) for key in list(changes) if key in known})
    settings = replace(SETTINGS, **changes)
    return stages.sample_framepack(made.pipeline, prompt, image, settings, asked, progress or Silent(), keep)


def _one_shot(made: SimpleNamespace, count: int, output: str, steps: int = STEPS, **arguments: Any) -> torch.Tensor:
    """What the bare pipeline returns for as many sections: all latents in core's space, or frames (F, H, W, 3)."""
    words = {} if "prompt_embeds" in arguments else {"prompt": PROMPT}
    found = made.pipe(
        **words,
        **arguments,
        image=START.permute(0, 3, 1, 2),
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=steps,
        num_frames=_frames(count),
        latent_window_size=WINDOW,
        guidance_scale=GUIDANCE,
        output_type=output,
        generator=torch.Generator().manual_seed(SEED),
        sampling_type=ORDER[made.name],
    ).frames
    return found[-1] / made.scale if output == "latent" else found[0].permute(0, 2, 3, 1)


def _given(made: SimpleNamespace) -> dict[str, torch.Tensor]:
    return {**made.prompt.embeds, **{f"negative_{key}": value for key, value in made.prompt.negative.items()}}


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


# The bare pipeline ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ended", "cfg"), [(I2V, False, 1.0), (I2V, True, 3.0), (F1, False, 3.0)])
def test_stages_give_the_one_shot_video(run: Any, name: str, ended: bool, cfg: float) -> None:
    """Identical from the same embeddings, blended sections and all."""
    made, last = run(name), {"last_image": END.permute(0, 3, 1, 2)} if ended else {}
    latents = _sampled(made, 3, cfg=cfg, image=made.end if ended else made.start)
    expected = _one_shot(made, 3, "latent", true_cfg_scale=cfg, **last, **_given(made))
    assert torch.equal(latents.samples, expected)
    frames = _one_shot(made, 3, "pt", true_cfg_scale=cfg, **last, **_given(made))
    video = stages.decode(made.pipeline, latents, Silent())
    assert frames.shape == (3 * WINDOW * 4 + 1, HEIGHT, WIDTH, 3)
    assert torch.equal(video, frames)


@pytest.mark.full
@pytest.mark.parametrize("name", [F1, pytest.param(I2V, marks=pytest.mark.full)])
def test_the_pipelines_own_encoding_gives_the_same_within_rounding(run: Any, name: str) -> None:
    made = run(name)
    assert _distance(_sampled(made, 2).samples * made.scale, _one_shot(made, 2, "latent") * made.scale) < TRIMMED


def test_six_sections_stand_where_upstream_puts_them(run: Any) -> None:
    """Past four sections the gaps to the start image are no longer counted one by one."""
    made = run(I2V)
    assert torch.equal(_sampled(made, 6, steps=1).samples, _one_shot(made, 6, "latent", 1, **_given(made)))


# What the inputs do -----------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("name", [I2V, F1])
def test_a_section_follows_the_prompt_of_its_place_in_the_film(run: Any, name: str) -> None:
    """The last of three sections has words of its own, whether it is sampled first or last; a blank has the first."""
    made = run(name)
    first, last = made.told.sections
    assert first is made.told.embeds and not torch.equal(last["prompt_embeds"], first["prompt_embeds"])
    plain, told, other = (
        _sampled(made, 3, prompt=prompt, steps=1).samples
        for prompt in (made.prompt, made.told, replace(made.prompt, embeds=last))
    )
    assert _distance(told[:, :, -WINDOW:], plain[:, :, -WINDOW:]) > 1e-3
    if name == I2V:
        assert torch.equal(told[:, :, -WINDOW:], other[:, :, -WINDOW:])
        assert _distance(told[:, :, 1:-WINDOW], other[:, :, 1:-WINDOW]) > 1e-3
    else:
        assert torch.equal(told[:, :, :-WINDOW], plain[:, :, :-WINDOW])


TIMED = {  # by variant and whether it goes on with a clip: what parse_timestamped_prompt and its worker choose in 8 s
    "[0s-2s: a] fox [3.3s: b] [5s: c]": ("fox fox fox b c c c", "a a fox b b c c"),
    "[1s: a] [3s-4s: b] [7s: c]": ("c a a c c c c", "a a a b a a c"),
}


@pytest.mark.parametrize("text", TIMED)
@pytest.mark.parametrize("clip", [0, 11])
def test_prompts_by_time_are_the_forks(text: str, clip: int) -> None:
    """Source: colinurbs/FramePack-Studio f4369da; 12,000 other texts, lengths and windows gave the same."""
    spans = sections.timed(text, ())
    for order, expected in zip((sections.INVERTED, sections.VANILLA), TIMED[text], strict=True):
        plan = sections.Plan(order, 7, 9, clip=clip)
        assert [spans[index][2] for index in sections.shown_at([s[:2] for s in spans], plan, 8.0)] == expected.split()
        later = [[1.25 * each if each > 0 else each for each in s[:2]] for s in spans]  # as many frames at 24 a second
        assert [spans[index][2] for index in sections.shown_at(later, plan, 10.0, 24.0)] == expected.split()


@pytest.mark.full
def test_a_prompt_by_time_reaches_its_sections(run: Any) -> None:
    """Its words are seen alone, like those of a section prompt; times stay out of the transformer's arguments."""
    made = run(F1)
    request = PromptRequest(f"{PROMPT} [0.4s: a blue dog sleeps]", sections=("[30s: a green bird]",))
    by_time = stages.encode_prompt(made.pipeline, request, Silent())
    by_line = stages.encode_prompt(made.pipeline, PromptRequest(PROMPT, sections=("", "a blue dog sleeps")), Silent())
    ours, theirs, plain = (
        _sampled(made, 3, prompt=prompt, steps=1).samples
        for prompt in (by_time, by_line, replace(by_line, sections=()))
    )
    assert _distance(ours, theirs) < 1e-5 and _distance(ours, plain) > 1e-3
    with pytest.raises(InputError, match="with and without a time"):
        stages.encode_prompt(made.pipeline, PromptRequest("[1s: a]", sections=("b",)), Silent())


NUMBERED = {  # what parse_section_strings and its loop choose of four sections, in the order of the film
    "a;;;1:b;;;-1:c": "a b a c",
    "1-2: b;;;-2: c;;;3:d": "b b c d",
    "-3:a;;;-1:b": "a a a b",
}


@pytest.mark.parametrize("text", NUMBERED)
def test_prompts_by_number_are_the_trainers(text: str) -> None:
    """Source: kohya-ss/musubi-tuner 30c658c ``fpack_generate_video.py``; also with each on a line of its own."""
    first, *rest = text.split(";;;")
    for given in ((text, ()), (f"{first};;;", tuple(rest))):
        found = sections.numbered(*given)
        shown = sections.shown_in([each[:2] for each in found], sections.Plan(sections.VANILLA, 4, 9))
        assert [found[index][2] for index in shown] == NUMBERED[text].split()


def test_a_prompt_goes_over_into_the_next(run: Any) -> None:
    """In quarters as the sections are sampled, with as many tokens as the old one has; a number reaches its place."""
    short, long = ({"prompt_embeds": torch.full((1, n, 2), value)} for n, value in ((1, 1.0), (2, 4.0)))
    texts = [short, short, long, long, long]
    for order, expected in ((sections.VANILLA, (1, 1, 1.75, 2.5, 3.25)), (sections.INVERTED, (2.5, 3.25, 4, 4, 4))):
        plan = sections.Plan(order, 5, 9)
        found = sections.blended(texts, plan, 4)
        assert [float(each["prompt_embeds"][0, 0, 0]) for each in found] == list(expected)
    assert found[1]["prompt_embeds"].tolist() == [[[3.25, 3.25], [3, 3]]] and sections.blended(texts, plan, 0) == texts
    made = run(F1)
    prompt = stages.encode_prompt(made.pipeline, PromptRequest(f"{PROMPT};;;-1: a blue dog sleeps"), Silent())
    at_once, mixed, plain = (
        _sampled(made, 2, prompt=each, steps=1, blend_sections=over).samples
        for each, over in ((prompt, 0), (prompt, 3), (made.prompt, 3))
    )
    assert torch.equal(at_once[:, :, :-WINDOW], plain[:, :, :-WINDOW])
    assert _distance(at_once, mixed) > 1e-3 and _distance(mixed, plain) > 1e-3
    with pytest.raises(InputError, match="with and without a time"):
        stages.encode_prompt(made.pipeline, PromptRequest("[1s: a];;;1:b"), Silent())


def test_more_section_prompts_than_sections_are_said(run: Any, recorded: Any) -> None:
    made, watched = run(I2V), recorded()
    _sampled(made, 2, watched, prompt=made.told)
    assert "1 of 2 section prompts have no effect: 2 sections in all" in watched.said


def test_end_strength_goes_from_no_end_image_to_upstreams(run: Any) -> None:
    made = run(I2V)
    ends = {share: _sampled(made, 1, image=made.end, end_strength=share).samples for share in (0.0, 0.5, 1.0)}
    assert torch.equal(ends[0.0], _sampled(made, 1).samples)
    assert _distance(ends[0.0], ends[0.5]) > 1e-3 and _distance(ends[0.5], ends[1.0]) > 1e-3
    weak = replace(made.end, anchors=(("start", 0, 1.0), ("end", -1, 0.5)))
    assert torch.equal(_sampled(made, 1, image=weak).samples, ends[0.5])


def test_whole_sections_are_made_said_and_forecast(run: Any, recorded: Any) -> None:
    made, watched = run(I2V), recorded()
    latents = _sampled(made, 2, watched)
    assert latents.frames == 17 and any("17 frames in 2 sections" in line for line in watched.said)
    settings, code = FramePackSettings(2 * OURS / 30, WINDOW), made.pipeline.spec.code
    assert code.frames_for(settings, 30.0) == latents.frames
    assert code.sections_for(settings, latents.frames) == len(latents.extra["section_lengths"])


def test_what_an_older_graph_had_otherwise_is_said_once(run: Any, recorded: Any) -> None:
    """For 16 frames earlier versions made 17 in sections of 5; solver, shift or length as before say nothing."""
    made, watched, as_before = run(I2V), recorded(), recorded()
    for _ in range(2):
        _sampled(made, 2, watched, scheduler="auto")
    lines = [line for line in watched.said if "earlier" in line or "before" in line]
    ends = ("earlier versions rounded up, here to 4", "earlier versions took Euler's", "as published; it was 7 before")
    assert len(lines) == 3 and all(line.endswith(end) for line, end in zip(lines, ends, strict=True))
    _sampled(made, 1, as_before, shift=7.0, clip_seconds=5 / 30)
    assert not any("earlier" in line or "before" in line for line in as_before.said)


def test_images_join_in_either_order(run: Any) -> None:
    made = run(I2V)
    request = ImageRequest(END, WIDTH, HEIGHT, frame=-1)
    end = stages.encode_image(made.pipeline, request, "stretch", Silent())
    both = stages.encode_image(made.pipeline, ImageRequest(START, WIDTH, HEIGHT, previous=end), "stretch", Silent())
    assert both.tensors.keys() == made.end.tensors.keys()
    assert all(torch.equal(both.tensors[name], made.end.tensors[name]) for name in both.tensors)


def test_given_vision_replaces_siglip(run: Any, recorded: Any) -> None:
    made, watched = run(I2V), recorded()
    pipeline = replace(made.pipeline, parts=type(made.pipeline.parts)({"vae": lambda _: made.pipeline.parts["vae"]}))
    pipeline = replace(pipeline, plan=replace(pipeline.plan, offloader=_Held(pipeline.parts)))
    vision = torch.randn(1, 729, 32)
    request = ImageRequest(START, WIDTH, HEIGHT, vision=vision, strength=0.5)
    condition = stages.encode_image(pipeline, request, "stretch", watched)
    assert torch.equal(condition.tensors["vision"], vision)
    assert "strength has no effect on the start image of FramePack" in watched.said
    clip = replace(request, frames=START.repeat(36, 1, 1, 1), strength=1.0)
    states = stages.encode_image(made.pipeline, clip, "stretch", Silent()).tensors
    assert torch.equal(states["vision"], vision)
    assert torch.equal(states["vision_last"], made.start.tensors["vision"]), "what was given is of another frame"


# Sampling as it goes ----------------------------------------------------------------------------------------------


class _Held(StandaloneOffloader):
    """An offloader that remembers what was held."""

    def __init__(self, parts: Any) -> None:
        super().__init__(parts, torch.device("cpu"), "none")
        self.names: list[str] = []

    def hold(self, part: str, *args: Any) -> Any:
        self.names.append(part)
        return super().hold(part, *args)

    def release(self, part: str) -> None:
        """Nothing: the tests go on with every part."""


@pytest.mark.parametrize("name", [I2V, F1])
def test_each_finished_section_is_kept_and_decodes(run: Any, recorded: Any, name: str) -> None:
    made, watched, keeper = run(name), recorded(), SavedLatents()
    latents, kept = _sampled(made, 3, watched, keeper), keeper.parts
    assert [(index, count) for index, count, _ in kept] == [(0, 3), (1, 3), (2, 3)]
    assert torch.equal(kept[-1][2].samples, latents.samples)
    lengths = [2, 4, 7] if name == I2V else [3, 5, 7]
    assert [list(part.extra["section_lengths"]) for _, _, part in kept] == [lengths[:end] for end in (1, 2, 3)]
    partial, video = kept[1][2], stages.decode(made.pipeline, latents, Silent())
    frames = stages.decode(made.pipeline, partial, Silent())
    assert len(frames) == partial.frames == (13 if name == I2V else 17)
    if name == F1:  # what comes later is blended into the last five frames only
        assert torch.equal(frames[: 17 - PER_SECTION], video[: 17 - PER_SECTION])
    sampling = [(done, total) for done, total, stage in watched.steps if stage.startswith("sampling")]
    assert sampling == [(done, 3 * STEPS) for done in range(1, 3 * STEPS + 1)]
    assert watched.steps[-1][2] == "sampling section 3 of 3"
    assert torch.allclose(
        watched.previews[-1] / made.scale,
        latents.samples[:, :, 1:3] if name == I2V else latents.samples[:, :, -2:],
        atol=1e-5,
    )


@pytest.mark.parametrize("name", [I2V, pytest.param(F1, marks=pytest.mark.full)])
@pytest.mark.parametrize("finished", [2, pytest.param(1, marks=pytest.mark.full)])
def test_sampling_goes_on_after_the_last_finished_section(run: Any, recorded: Any, name: str, finished: int) -> None:
    """Bit for bit the video of an uncut sampling, and no section is sampled twice."""
    made, keeper, watched = run(name), SavedLatents(cut_after=finished), recorded()
    expected = _sampled(made, 3)
    with pytest.raises(KeyboardInterrupt):
        _sampled(made, 3, keep=keeper)
    again = SavedLatents(keeper.standing)
    latents = _sampled(made, 3, watched, again)
    assert torch.equal(latents.samples, expected.samples)
    assert latents == replace(expected, samples=latents.samples)
    assert [index for index, _, _ in again.parts] == list(range(finished, 3))
    assert any(f"continues after section {finished} of 3" in line for line in watched.said)
    assert len({*keeper.keys, *again.keys}) == 1


def test_another_seed_prompt_picture_or_model_is_another_sampling(run: Any) -> None:
    made, keeper = run(I2V), Asked()
    other = replace(made.prompt, embeds={name: t + 1 for name, t in made.prompt.embeds.items()})
    variants: list[dict[str, Any]] = [{}, {"seed": 8}, {"steps": 3}, {"prompt": other}, {"image": made.end}]
    for each, changes in (*((made, changes) for changes in variants), (run(F1), {})):
        with pytest.raises(KeyboardInterrupt):
            _sampled(each, 1, keep=keeper, **changes)
    pipeline = made.pipeline
    others = [
        {"model": replace(pipeline.model, storage={"transformer": "int8"})},
        {"plan": replace(pipeline.plan, step_cache="half the steps")},
    ]
    keeper.keys += [key_of(made, **changes) for changes in others]
    assert len(set(keeper.keys)) == len(variants) + 1 + len(others)
    moved = replace(pipeline.plan, decisions=(Decision("offload", "another"),))
    assert key_of(made) == key_of(made, plan=moved), "how parts are moved is not another video"


def key_of(made: SimpleNamespace, **changes: Any) -> str:
    """The key of one video, from a pipeline with other fields."""
    other = replace(made.pipeline, **changes)
    return resume_key(other, made.prompt, made.start, SETTINGS, FramePackSettings(1.0))()


def test_a_standing_of_another_size_is_not_gone_on_with(run: Any) -> None:
    made, keeper = run(I2V), SavedLatents()
    expected = _sampled(made, 2, keep=keeper)
    wrong = resume.SectionState(torch.zeros(1, 4, 2, 8, 8), (2,), expected.extra["generator_state"])
    assert torch.equal(_sampled(made, 2, keep=SavedLatents(wrong)).samples, expected.samples)


def test_only_the_transformer_is_held_while_sampling(run: Any) -> None:
    made = run(I2V)
    held = _Held(made.pipeline.parts)
    spied = SimpleNamespace(
        **{**vars(made), "pipeline": replace(made.pipeline, plan=replace(made.pipeline.plan, offloader=held))}
    )
    _sampled(spied, 2)
    assert held.names == ["transformer"]


def test_single_frame_mode_samples_the_last_frame_of_the_first_window(run: Any, recorded: Any) -> None:
    made, seen = run(I2V), []
    hook = made.pipeline.parts["transformer"].register_forward_pre_hook(
        lambda _module, _inputs, given: seen.append(given), with_kwargs=True
    )
    try:
        latents = _sampled(made, 1, single_frame=True, window=9)
    finally:
        hook.remove()
    assert latents.samples.shape == (1, 16, 1, HEIGHT // 8, WIDTH // 8)
    assert stages.decode(made.pipeline, latents, Silent()).shape == (1, HEIGHT, WIDTH, 3)
    given = {key: value.tolist() for key, value in seen[0].items() if key.startswith("indices")}
    assert given["indices_latents"] == [9] and given["indices_latents_clean"] == [0, 10]
    assert given["indices_latents_history_2x"] == [11, 12]
    watched = recorded()
    assert _sampled(run(F1), 1, watched, single_frame=True).samples.shape[2] == 1
    assert any("made for FramePack I2V" in said for said in watched.said)


# A clip to go on with ---------------------------------------------------------------------------------------------


def _goes_on(made: SimpleNamespace, ended: bool = False, **changes: Any) -> Latents:
    """What follows a clip, as ``loop_reference.py`` has FramePack-Studio make it; with an end picture if ``ended``."""
    height, width = loops.FRAMEPACK_SIZE
    image = stages.encode_image(made.pipeline, ImageRequest(loops.clip(), width, height), FITS[0], Silent())
    if ended:
        request = ImageRequest(loops.framepack_end(), width, height, frame=-1, previous=image)
        image = stages.encode_image(made.pipeline, request, FITS[0], Silent())
    settings = SampleSettings(width, height, 0, steps=loops.FRAMEPACK_CLIP_STEPS, seed=loops.SEED)
    asked = FramePackSettings(loops.FRAMEPACK_CLIP_SECONDS, end_strength=loops.FRAMEPACK_END if ended else 1.0)
    words = loops.FRAMEPACK_TIMED if "blend_sections" in changes else loops.PROMPT
    prompt = stages.encode_prompt(made.pipeline, PromptRequest(words), Silent())
    return stages.sample_framepack(made.pipeline, prompt, image, settings, replace(asked, **changes), Silent())


@pytest.mark.full
@pytest.mark.parametrize(("name", "how"), [(F1, ""), (I2V, ""), (I2V, "end"), (F1, "blend"), (I2V, "blend")])
def test_a_clip_goes_on_as_the_fork_has_it(run: Any, name: str, how: str) -> None:
    """Latent by latent; the clip's own come first, and its frames before the new ones."""
    made = run(name)
    latents = _goes_on(made, how == "end", **({"blend_sections": 2} if how == "blend" else {}))
    loop = f"framepack{' f1' if name == F1 else ''} clip {how}".strip()
    error = loops.error(latents.samples * made.scale, load_file(loops.fixture(loop)))
    print(f"{loop}: {error:.1e}")
    assert error <= loops.BAR
    frames = stages.decode(made.pipeline, latents, Silent())
    assert len(frames) == latents.frames == 4 * (11 + 27) - 3


@pytest.mark.parametrize("name", [I2V, F1])
def test_a_section_after_a_clip_sees_its_last_latents(name: str) -> None:
    """The last latents of the clip are the clean context at all three scales, and come before what is sampled."""
    clip = torch.arange(1.0, 12).reshape(1, 1, 11, 1, 1)
    plan = sections.plan_for(name, FramePackSettings(0.0), 72, False, 11)
    history = sections.History(plan, clip)
    seen = [{key: value.flatten().tolist() for key, value in history.seen().items()}]
    history.add(torch.arange(101.0, 110).reshape(1, 1, 9, 1, 1))
    seen.append({key: value.flatten().tolist() for key, value in history.seen().items()})
    history.add(torch.zeros(1, 1, 9, 1, 1))
    near, half, quarter = (f"latents_{kind}" for kind in ("clean", "history_2x", "history_4x"))
    if name == F1:
        assert seen[0] == {near: [11, 8, 9, 10, 11], half: [6, 7], quarter: [1, 2, 3, 4, 5]}
        assert seen[1] == {near: [11, 106, 107, 108, 109], half: [104, 105], quarter: [*range(1, 12), 101, 102, 103]}
    else:
        assert seen[0] == {near: [8, 9, 10, 11, 0, 0, 0, 0], half: [6, 7], quarter: [1, 2, 3, 4, 5]}
        assert seen[1] == {near: [11, 101], half: [9, 10], quarter: [1, 2, 3, 4, 5, 6, 7, 8]}
    assert history.lengths[-1] == 11 + 18 and history.latents.shape[2] == 29


UNIPC_BH1 = {  # what the publisher's sample_unipc makes of five numbers (below), by steps; shift exp(1.3)
    1: (-0.883662, -0.583662, -0.283662, 0.016338, 0.316338),
    2: (-0.379468, 0.2116, 0.557625, 0.791996, 1.456799),
    3: (-0.277697, 0.598949, 0.627079, 1.186562, 1.809246),
    4: (-0.513885, 0.505706, 0.491958, 1.010264, 1.804535),
    10: (-0.913317, -0.133524, -0.023892, 0.322247, 1.401025),
    25: (-0.90129, -0.171005, -0.049436, 0.306285, 1.450707),
    50: (-0.909075, -0.182963, -0.052806, 0.319695, 1.441515),
}


@pytest.mark.parametrize("steps", UNIPC_BH1)
def test_the_solver_is_the_publishers(steps: int) -> None:
    """Source: lllyasviel/FramePack 97fe5db, ``k_diffusion/uni_pc_fm.py``, run on the velocity below."""
    even = [1 - index / steps for index in range(steps)]
    levels = (*(1 / (1 + (1 / t - 1) * math.exp(-1.3)) for t in even), 0.0)
    latents, solver = torch.linspace(-2, 2, 5), FlowUniPC(levels, torch.device("cpu"))
    for level in levels[:-1]:
        velocity = torch.sin(3 * latents) * (1 - level) + 0.7 * latents + math.cos(5 * level)
        latents = solver.step(velocity, solver.timesteps[0], latents)[0]
    assert torch.allclose(latents, torch.tensor(UNIPC_BH1[steps]), rtol=0, atol=1e-5)


def test_auto_is_the_publishers_solver(run: Any) -> None:
    made = run(I2V)
    auto, named = (_sampled(made, 1, steps=4, scheduler=name).samples for name in ("auto", "unipc_bh1"))
    assert torch.equal(auto, named) and _distance(auto, _sampled(made, 1, steps=4).samples) > 1e-3


def test_latents_without_sections_decode_in_one_go(run: Any, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, watched, running, cells = run(I2V), recorded(), stages.running, []
    latents = _sampled(made, 1)
    cuts = lambda size: [frames for frames, *_ in counts._cuts(made.pipeline, size)]  # noqa: E731
    monkeypatch.setattr(stages, "running", lambda *of: cells.append(cuts(of[-1]().size)) or running(*of))
    whole = stages.decode(made.pipeline, replace(latents, extra={}), Silent())
    assert torch.equal(whole, stages.decode(made.pipeline, latents, Silent()))
    cut = replace(latents, samples=latents.samples[:, :, :2])
    assert len(stages.decode(made.pipeline, cut, watched)) == 5
    assert watched.said == ["2 latent frames where sampling left 3: decoded all at once"]
    assert cells == [[3], [3], [2]], "the forecast counts them so, too"


# What is refused, and how it is loaded ----------------------------------------------------------------------------


def test_images_out_of_place_are_refused(run: Any) -> None:
    made = run(I2V)
    only_end = ImageCondition(I2V, {"end": made.end.tensors["end"]}, WIDTH, HEIGHT)
    refused = [
        (ImageRequest(START, WIDTH, HEIGHT, frame=3), "frame 3 of FramePack"),
        (ImageRequest(START.repeat(35, 1, 1, 1), WIDTH, HEIGHT), "35 frames as the start image.*at least 36 frames"),
        (ImageRequest(torch.cat([START, END]), WIDTH, HEIGHT, frame=-1), "2 frames as the end image"),
        (ImageRequest(START.repeat(36, 1, 1, 1), WIDTH, HEIGHT, previous=only_end), "a clip after its end image"),
        (ImageRequest(START, WIDTH, HEIGHT, previous=made.start), "a second start image"),
        (ImageRequest(START, WIDTH, HEIGHT, vision=torch.zeros(1, 257, 32)), r"shape \(1, 257, 32\)"),
    ]
    for request, message in refused:
        with pytest.raises(InputError, match=message):
            stages.encode_image(made.pipeline, request, "stretch", Silent())
    with pytest.raises(UnsupportedError, match="video"):
        stages.encode_video(made.pipeline, START, WIDTH, HEIGHT, "stretch", 0, Silent())


def test_settings_out_of_range_are_refused(run: Any) -> None:
    made = run(I2V)
    only_end = ImageCondition(I2V, {"end": made.end.tensors["end"]}, WIDTH, HEIGHT, (("end", -1, 1.0),))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"window": 0}, "window 0; expected 1 to 33"),
        ({"order": "backwards"}, "order 'backwards'"),
        ({"end_strength": 1.5}, "end_strength 1.5"),
        ({"blend_sections": 11}, "blend_sections 11"),
        ({"clip_seconds": 0.0}, "a clip of 0.0 s"),
        ({"clip_seconds": 200.0}, "at most 136.6 s"),
        ({"order": sections.VANILLA, "image": made.end}, "the order vanilla; .* Choose order auto, or remove"),
        ({"image": only_end}, "no start image"),
        ({"image": None}, "no start image"),
    ]
    for changes, message in refused:
        with pytest.raises(InputError, match=message):
            _sampled(made, 1, **changes)


PUBLISHED = zip(
    (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 60, 120), (1, 2, 2, 3, 4, 5, 7, 8, 12, 17, 25, 50, 100), strict=True
)


@pytest.mark.parametrize(("seconds", "count"), [*PUBLISHED, (1 / 30, 1), (136.5, 113)])
def test_sections_are_the_publishers(seconds: float, count: int) -> None:
    """Source: lllyasviel/FramePack 97fe5db demo_gradio.py, by its formula; the last row is the most that we take."""
    asked = FramePackSettings(seconds)
    assert framepack.frames_for(asked, 30.0) == 36 * count + 1
    assert framepack.sections_for(asked, 36 * count + 1) == count


@pytest.mark.parametrize(
    ("path", "variant"),
    [
        ("FramePackI2V_HY", "framepack"),
        ("FramePack_F1_I2V_HY_20250503", "framepack_f1"),
        ("models--lllyasviel--FramePack_F1_I2V_HY_20250503/snapshots/0fa1", "framepack_f1"),
        ("models--lllyasviel--FramePackI2V_HY/snapshots/f1ab", "framepack"),
        ("FramePackI2V_HY_f16/transformer", "framepack"),
        ("f1_race/FramePackI2V_HY_fp8", "framepack"),
        ("FramePackI2V/framepackF1nf4", "framepack_f1"),
    ],
)
def test_variant_is_assumed_from_the_name(path: str, variant: str) -> None:
    found, why = framepack.guess_variant(Evidence(names=names_around(Path("f1/models") / path)))
    assert found == variant and repr(next(part for part in names_around(Path("models") / path))) in why


def test_three_folders_are_found_and_composed(run: Any, recorded: Any, tiny_folder: Path, tmp_path: Path) -> None:
    """A transformer as lllyasviel publishes it, beside an image-to-video and a text checkpoint and SigLIP."""
    run(I2V)
    lone = tmp_path / "FramePack_F1_I2V_HY"
    lone.mkdir()
    for file in (tiny_folder / I2V).iterdir():
        (lone / file.name).symlink_to(file)
    config = json.loads((lone / "config.json").read_text())
    (lone / "config.json").unlink()
    (lone / "config.json").write_text(json.dumps({**config, "_class_name": "HunyuanVideoTransformer3DModelPacked"}))
    for name in ("hunyuan_video", "hunyuan_video_i2v", "siglip"):
        source = tiny.build(name, tiny_folder)
        (tmp_path / f"{'a' if 'i2v' in name else 'b'}-{name}").symlink_to(source)
    other = tmp_path / "a-pipeline"
    other.mkdir()
    (other / "model_index.json").write_text("{}")
    (other / "image_encoder").symlink_to(tiny_folder / "siglip" / "image_encoder")
    damaged = tmp_path / "a-cut-off" / "image_encoder"
    damaged.mkdir(parents=True)
    for file in (damaged / "config.json", damaged.parent / "model_index.json"):
        file.write_text('{"_class_name": "HunyuanVideoPip')
    watched = recorded()
    pipeline = loading.load(loading.LoadRequest(lone, device="cpu"), watched)
    assert (pipeline.family, pipeline.model.task, pipeline.variant) == ("framepack", "image", F1)
    assert "base from b-hunyuan_video (auto)" in watched.said
    assert "image_encoder from b-siglip (auto)" in watched.said
    assert pipeline.parts["transformer"].config.has_image_proj


def test_a_whole_pipeline_folder_loads(run: Any, tiny_folder: Path, tmp_path: Path) -> None:
    run(I2V)
    index = json.loads((tiny_folder / "hunyuan_video" / "model_index.json").read_text())
    index |= {"image_encoder": ["transformers", "SiglipVisionModel"], "_class_name": "HunyuanVideoFramepackPipeline"}
    index |= {"feature_extractor": ["transformers", "SiglipImageProcessor"]}
    for name in (key for key, entry in index.items() if isinstance(entry, list)):
        source = {"transformer": tiny_folder / I2V}.get(name, tiny_folder / "hunyuan_video" / name)
        (tmp_path / name).symlink_to(source if source.is_dir() else tiny_folder / "siglip" / name)
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    pipeline = _loaded(tmp_path)
    assert (pipeline.family, pipeline.model.task) == ("framepack", "image")
    assert pipeline.configs["transformer"]["has_image_proj"]


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("FramePack_F1_I2V_HY_20250503", F1), ("FramePackF1_HY_fp8_e4m3fn", F1), ("framepackI2VHYF1", F1),
        ("framepack_hy_F1fp8", F1), ("framepack-f1", F1), ("F1", F1),
        ("FramePackI2V_HY", I2V), ("framepack-151c80f1a819", I2V), ("stuff1", I2V), ("framepack_f16", I2V),
    ],
)  # fmt: skip
def test_f1_is_a_word_of_the_name_and_no_part_of_another(name, variant):
    assert guess_variant(Evidence(names=(name,)))[0] == variant
