"""FramePack: an image becomes a video of any length, sampled section by section."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ....compat.device.execution import generator_for, placed, state_of, to_host
from ....compat.errors import InputError
from ... import base
from ...base import Call, FramePackSettings, ImageCondition, Latents, Progress, Prompt, PromptRequest, SampleSettings
from ...files.evidence import Evidence
from ...pipeline import Pipeline
from ...sampling.core_sampler import guidance_of, required
from ...sampling.loop import denoise, held_transformer, noise_for, safeguards_of, sampled_latents
from ...sampling.resume import SectionState, SectionStore, resume_key
from ...sampling.schedules import UNIPC_BH1, Guidance, Levels, Predict, even_levels, schedule_for
from ...settings import MOST_FRAMES
from ...text.llama import llama_embeds, llama_forwards, llama_from_core
from ...text.t5 import described
from ...vae.fallback import decoding
from ...vae.plan import DecodeRequest
from .keyframes import END, START, VISION, drawn, end_strength
from .keyframes import encode_image as encode_image
from .sections import History, Plan, joined, plan_for, spans
from .spec import F1, I2V, SPEC, TEMPORAL_RATIO
from .training import training_plan as training_plan
from .training import training_sections as training_sections

LARGEST_SHIFT = 7.0  # of the models' own schedule, which grows with the size of a section
SHIFT_NAMES = {  # upstream's function names the scheduler's settings in its own way
    "base_image_seq_len": "base_seq_len",
    "max_image_seq_len": "max_seq_len",
    "base_shift": "base_shift",
    "max_shift": "max_shift",
}

F1_NAME = r"f1(?!\d)"
IMAGE_FIX = "Connect AnyGPU Image Conditioning with the start image of AnyGPU Encode Image."


def guess_variant(evidence: Evidence) -> tuple[str, str]:
    """The variant by the names around it, and why: files and configuration of both look the same."""
    name = evidence.name_with(F1_NAME)
    if name:
        return F1, f"the name {name!r} says so"
    message = f"the name {evidence.names[0]!r} does not say F1" if evidence.names else "no name says F1"
    return I2V, f"assumed, because the files look the same and {message}; choose another variant if that is wrong"


def encode_prompt(pipeline: Pipeline, request: PromptRequest, progress: Progress) -> Prompt:
    """Llama states and pooled CLIP vectors of the prompt, the negative, and each section's prompt, else the first's."""
    from diffusers import HunyuanVideoFramepackPipeline

    texts = tuple(text for text in request.sections if text.strip())
    asked = replace(request, sections=texts)
    positive, negative, later = llama_embeds(pipeline, HunyuanVideoFramepackPipeline, asked, progress)
    encoded = iter(later)
    sections = tuple(next(encoded) if text.strip() else positive for text in request.sections)
    return Prompt(SPEC.id, positive, negative, sections)


text_forwards = llama_forwards
prompt_from_core = llama_from_core


def frames_for(framepack: FramePackSettings, fps: float) -> int:
    """Pixel frames of the whole sections nearest to ``clip_seconds``, and the start image; 1 in single-frame mode."""
    if framepack.single_frame:
        return 1
    if not 0 < fps <= 240:
        raise InputError(f"fps {fps:g}", expected="more than 0, at most 240", fix="FramePack was made for 30.")
    asked, most = framepack.clip_seconds * fps, MOST_FRAMES / fps
    if not 0 < asked <= MOST_FRAMES:
        nearest = 1.0 if asked <= 0 else math.floor(most)
        raise InputError(
            f"a clip of {framepack.clip_seconds} s at {fps:g} fps",
            expected=f"more than 0, at most {most:.1f} s",
            fix=f"The nearest valid value is {nearest:g} s.",
        )
    section = max(framepack.window, 1) * TEMPORAL_RATIO  # whose range is checked with the plan
    return min(max(1, round(asked / section)), MOST_FRAMES // section) * section + 1


def sections_for(framepack: FramePackSettings, frames: int) -> int:
    """Sections of a clip of ``frames`` pixel frames."""
    return plan_for(I2V, framepack, frames, ended=False).count


def sample(
    pipeline: Pipeline,
    prompt: Prompt,
    image: ImageCondition,
    settings: SampleSettings,
    framepack: FramePackSettings,
    progress: Progress,
    keeper: SectionStore | None = None,
) -> Latents:
    """Latents (1, 16, T, H / 8, W / 8) in core's space, of all sections; ``frames`` says how many frames count.

    The prompt of a section is the one of its place in the film, else the first. ``end_strength`` times the end image's
    own scales its latents, the only thing the last section sees of it: 1 is upstream's video, 0 the one without an end
    image. Single-frame mode samples one latent frame, in the place of the last one of the first window, and returns it
    alone; it was found on the FramePack I2V checkpoint.

    Args:
        keeper: given each finished section, in sampling order, with all latents so far, which :func:`decode` takes.
            Where it knows of the same video, sampling goes on after the last section that was finished.

    Raises:
        InputError: no start image, or a setting of ``framepack`` out of range.

    Source: diffusers ``HunyuanVideoFramepackPipeline.__call__``, equal to it in fp32; single-frame mode:
    kohya-ss/musubi-tuner#267 with ``target_index`` at the window.
    """
    device, generator = pipeline.offloader.device_of("transformer"), generator_for(settings.seed)
    strength = end_strength(image, framepack, progress)
    plan = plan_for(pipeline.variant, framepack, settings.frames, strength > 0)
    if plan.single and not plan.inverted:
        progress.notify("single-frame mode was made for FramePack I2V: F1 may not follow the prompt")
    elif not plan.single:
        length = f"{plan.frames} frames in {plan.count} sections"
        progress.notify(f"{framepack.clip_seconds:g} s: {length}, as the publisher's application rounds")
    settings = replace(settings, frames=min(settings.frames, plan.frames))
    if settings.scheduler == "auto":
        settings = replace(settings, scheduler="euler" if pipeline.is_demo else UNIPC_BH1)  # the demo draws better so
    start = drawn(pipeline, image, START, generator)
    end = strength * drawn(pipeline, image, END, generator) if strength > 0 else None
    history, texts = History(plan, start, end), _texts(pipeline, prompt, plan, progress)
    key = resume_key(pipeline, prompt, image, settings, framepack) if keeper is not None else str
    shape, vision = (*start.shape[:2], plan.sampled, *start.shape[3:]), image.tensors[VISION].to(device)
    levels, config = _levels_for(pipeline, shape, settings, progress)
    with held_transformer(pipeline, settings, progress, plan.sampled) as transformer:
        _resume(history, generator, None if keeper is None else keeper.found(key()), progress)
        for index in range(len(history.lengths), plan.count):
            noise, part = noise_for(shape, generator, device), base.SubProgress(progress, index, plan.count, "section")
            text = texts[plan.place(index)]
            schedule = schedule_for(config, settings, settings.steps, levels, device)
            predict = _predictor(pipeline, transformer, history, text, vision, settings, len(schedule))
            safeguards = safeguards_of(pipeline, part, generator, index)
            history.add(to_host(denoise(noise, schedule, predict, progress=part, safeguards=safeguards)))
            latents = described(_so_far(pipeline, history, settings, generator), prompt)
            if keeper is not None:
                standing = SectionState(history.latents, tuple(history.lengths), state_of(generator))
                keeper.save(key(), index, plan.count, latents, standing)
    return latents


def call_transformer(pipeline: Pipeline, transformer: Any, call: Call) -> torch.Tensor:
    """The velocity, noise minus data, of a section that sees the start image alone."""
    frames = call.latents.shape[2]
    plan = plan_for(pipeline.variant, FramePackSettings(0.0, window=frames), 1, ended=False)
    start, like = required(call.picture, "start image", IMAGE_FIX), call.latents
    seen = {name: value.to(like) for name, value in History(plan, start).seen().items()}
    return _velocity(pipeline, transformer, call, {**seen, **plan.indices(0)})


def _velocity(pipeline: Pipeline, transformer: Any, call: Call, context: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The velocity of a section; ``context`` is what it sees of the others and where in time they are."""
    return transformer(
        hidden_states=call.latents,
        timestep=call.time,
        encoder_hidden_states=call.embeds,
        encoder_attention_mask=call.valid,
        pooled_projections=required(call.pooled, "pooled_output", "Use AnyGPU Encode Prompt or core's DualCLIPLoader."),
        image_embeds=required(call.vision, "image states", IMAGE_FIX),
        guidance=guidance_of(pipeline, call),
        return_dict=False,
        **context,
    )[0]


def decode(pipeline: Pipeline, latents: Latents, progress: Progress, form: DecodeRequest | None = None) -> torch.Tensor:
    """Frames (F, H, W, 3) in 0..1: each section is decoded with its neighbour and blended into it, as upstream does.

    Latents that say nothing of sections, or were cut since, are decoded all at once.
    """
    lengths, window = list(latents.extra.get("section_lengths", ())), int(latents.extra.get("window", 0))
    inverted = latents.extra.get("order") != "vanilla"
    if lengths and lengths[-1] != latents.samples.shape[2]:
        progress.notify(
            f"{latents.samples.shape[2]} latent frames where sampling left {lengths[-1]}: decoded all at once"
        )
        lengths = []
    cuts = spans(lengths, window, inverted) if lengths else [slice(None)]
    largest = max((latents.samples[:, :, cut].shape for cut in cuts), key=math.prod)
    with decoding(pipeline, largest, progress, form) as passes:
        videos = (
            passes.decode(latents.samples[:, :, cut], base.SubProgress(progress, index, len(cuts), "section"))
            for index, cut in enumerate(cuts)
        )
        return joined(videos, window, inverted)


def _resume(history: History, generator: torch.Generator, standing: SectionState | None, progress: Progress) -> None:
    """Restore ``history`` and ``generator`` from an earlier sampling of the same video."""
    count, wanted = history.plan.count, list(history.start.shape)
    if standing is None or not 0 < len(standing.lengths) < count:
        return
    wanted[2] = standing.lengths[-1]
    if list(standing.latents.shape) != wanted:
        return
    history.latents, history.lengths = standing.latents, list(standing.lengths)
    generator.set_state(generator_for(0, standing.generator_state).get_state())
    progress.notify(f"continues after section {len(standing.lengths)} of {count}, saved by an interrupted run")


def _texts(
    pipeline: Pipeline, prompt: Prompt, plan: Plan, progress: Progress
) -> list[dict[str, Mapping[str, torch.Tensor]]]:
    """For each place in the film its prompt and negative, as ``cond`` and ``uncond``, on the device."""
    unused = len(prompt.sections) - (plan.count - 1)
    if unused > 0:
        progress.notify(
            f"{unused} of {len(prompt.sections)} section prompts have no effect: {plan.count} sections in all"
        )

    def ready(embeds: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return dict(placed(embeds, pipeline.offloader.device_of("transformer"), pipeline.precision.residual))

    common = {} if prompt.negative is None else {"uncond": ready(prompt.negative)}
    first, further = ready(prompt.embeds), [ready(section) for section in prompt.sections[: plan.count - 1]]
    return [{**common, "cond": text} for text in [first, *further, *[first] * (plan.count - 1 - len(further))]]


def _levels_for(
    pipeline: Pipeline, shape: Sequence[int], settings: SampleSettings, progress: Progress
) -> tuple[Callable[[int], Levels], dict[str, Any]]:
    """From a number of steps to evenly falling levels with the shift that latents of this ``shape`` ask for, and the
    scheduler's settings, in which that shift acts whatever the folder beside the transformer says."""
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_framepack import calculate_shift

    tokens = math.prod(shape[2:]) / int(pipeline.configs["transformer"].get("patch_size", 2)) ** 2
    config = pipeline.tools["scheduler"]
    given = {argument: config[name] for name, argument in SHIFT_NAMES.items() if name in config}
    mu = min(float(calculate_shift(tokens, **given)), math.log(LARGEST_SHIFT))
    if not pipeline.is_demo:  # which was trained at the shift of its folder
        config = {**config, "use_dynamic_shifting": True}
        if math.exp(mu) < LARGEST_SHIFT and not settings.shift and settings.sigmas is None:
            progress.notify(
                f"shift {math.exp(mu):.2f} for so small a section, as the publisher's application; it was 7"
            )
    return partial(even_levels, mu=mu), config


def _predictor(
    pipeline: Pipeline,
    transformer: Any,
    history: History,
    texts: Mapping[str, Mapping[str, torch.Tensor]],
    vision: torch.Tensor,
    settings: SampleSettings,
    steps: int,
) -> Predict:
    """The guided velocity of the next section, with all that it sees beside its own latents and texts."""
    dtype, device = pipeline.precision.residual, vision.device
    context = {**placed(history.seen(), device, dtype), **history.plan.indices(len(history.lengths))}
    vision, guidance = vision.to(dtype), torch.full((1,), settings.guidance, device=device)

    def branch(name: str, latents: torch.Tensor, time: torch.Tensor, _: int) -> torch.Tensor:
        text = texts[name]
        call = Call(
            latents=latents.to(dtype),
            time=time.to(dtype).expand(latents.shape[0]),
            embeds=text[base.EMBEDS],
            mask=text[base.MASK],
            pooled=text[base.POOLED],
            vision=vision,
            guidance=guidance,
        )
        with transformer.cache_context(name):
            return _velocity(pipeline, transformer, call, context).float()

    return Guidance(settings, steps).over(pipeline.run.group, branch, ("cond", "uncond"))


def _so_far(pipeline: Pipeline, history: History, settings: SampleSettings, generator: torch.Generator) -> Latents:
    """Frames sampled so far; of an unfinished video that began at its end all frames count."""
    plan = history.plan
    frames = (history.lengths[-1] - 1) * TEMPORAL_RATIO + 1
    if not plan.inverted or len(history.lengths) == plan.count:
        frames = min(frames, settings.frames)
    extra = {"section_lengths": list(history.lengths), "window": plan.window, "order": plan.order}
    samples = history.latents / float(pipeline.configs["vae"]["scaling_factor"])
    return sampled_latents(pipeline, samples, replace(settings, frames=frames), generator, **extra)
