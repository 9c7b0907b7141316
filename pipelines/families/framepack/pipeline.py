"""FramePack: an image becomes a video of any length, sampled section by section."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....compat.device import execution
from ....compat.device.execution import checked_layers, generator_for, inputs_placed, placed, state_of, to_host
from ....compat.errors import InputError, require_range
from ....compat.memory.parts import tell_once
from ....compat.output_check import NotFinite
from ... import base
from ...base import Call, FramePackSettings, ImageCondition, Latents, Progress, Prompt, PromptRequest, SampleSettings
from ...files.evidence import Evidence, says
from ...pictures import checked_vision
from ...pipeline import Pipeline
from ...sampling.core_sampler import guidance_of, required
from ...sampling.loop import denoise, held_transformer, noise_for, safeguards_of, sampled_latents, start_from
from ...sampling.resume import SectionState, SectionStore, resume_key
from ...sampling.schedules import UNIPC_BH1, Guidance, Levels, Predict, even_levels, schedule_for
from ...settings import MOST_FRAMES
from ...text.llama import llama_embeds, llama_forwards, llama_from_core
from ...text.t5 import described
from ...vae.fallback import decoding, encoded_moments
from ...vae.plan import DecodeRequest
from .sections import LARGEST_WINDOW, History, Plan, blended, by_span, joined, plan_for, shown, spans
from .sections import training_plan as training_plan
from .sections import training_sections as training_sections
from .spec import F1, I2V, SPEC, TEMPORAL_RATIO

START, END = "start", "end"
PLACES = {0: START, -1: END}
CLIP, FEWEST = SPEC.memory.clip, 36  # frames of a clip: less is shorter than a section
VISIONS = "vision_last", "vision_end"  # what the image encoder says of a clip's last frame, and of an end image with it
LARGEST_SHIFT = 7.0  # of the models' own schedule, which grows with the size of a section
SHIFTS = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")  # without image_ in its function

F1_NAME = r"(?:\b|_|pack|hy)f1(?=$|[\W_]|i2v|hy|fp8|bf16|nf4|q\d)"  # a word of its own: hashes have these letters too
IMAGE_FIX = "Connect AnyGPU Image Conditioning with the start image of AnyGPU Encode Image."


def guess_variant(evidence: Evidence) -> tuple[str, str]:
    """F1 if a name around the file says so, else I2V, and the reason: files and configuration of both look the same."""
    name = evidence.name_with(rf"{F1_NAME}|pack.?i2v")  # the nearest that tells them apart
    if says(name, F1_NAME):
        return F1, f"the name {name!r} says so"
    message = f"the name {evidence.names[0]!r} does not say F1" if evidence.names else "no name says F1"
    return I2V, f"assumed, because the files look the same and {message}; choose another variant if that is wrong"


def encode_prompt(pipeline: Pipeline, request: PromptRequest, progress: Progress) -> Prompt:
    """Llama states and pooled CLIP vectors of prompt, negative and section prompts; a blank section gets the prompt's.

    Prompts by time or by number in the text become section prompts, with the seconds or places that they are for."""
    from diffusers import HunyuanVideoFramepackPipeline

    request, places = by_span(request)
    asked = replace(request, sections=tuple(text for text in request.sections if text.strip()))
    positive, negative, later = llama_embeds(pipeline, HunyuanVideoFramepackPipeline, asked, progress)
    encoded = iter(later)
    sections = tuple(next(encoded) if text.strip() else positive for text in request.sections)
    if places:
        sections = tuple({**each, **at} for each, at in zip(sections, places, strict=True))
    return Prompt(SPEC.id, positive, negative, sections)


def text_forwards(pipeline: Pipeline, request: PromptRequest | None) -> base.Forwards:
    """Tokens of each text, prompts by time or number one by one."""
    return llama_forwards(pipeline, None if request is None else by_span(request)[0])


prompt_from_core = llama_from_core


def encode_image(pipeline: Pipeline, request: base.ImageRequest, progress: Progress) -> ImageCondition:
    """A start image (``frame`` 0) or end image (``frame`` -1), and ``previous``; see :func:`_checked_place` for errors.

    ``start`` and ``end`` are mean and log variance (1, 32, 1, H / 8, W / 8): latents are drawn when the video is
    sampled, by its seed, as upstream does. ``vision`` are the SigLIP states of the start image (1, 729, 1152); upstream
    also computes those of the end image, but does not use them.

    Of a clip at frame 0, ``start`` has the moments of its last 108 frames, cut to a multiple of 4, encoded by 16;
    ``vision`` the states of the first of them, or those given; and ``vision_last`` the states of the last, which are
    mixed with the end image's ``vision_end``. Source: colinurbs/FramePack-Studio f4369da ``video_base_generator.py``;
    the mix, which is computed and left unused there: pftq/FramePack_with_Video_Input 65d3d91
    ``demo_gradio_video+endframe.py``."""
    before = request.previous or ImageCondition(SPEC.id, {}, request.width, request.height)
    known, (last, end), count = dict(before.tensors), VISIONS, len(request.frames)
    place = _checked_place(request, known)
    if place == START and request.strength != 1.0:
        progress.notify("strength has no effect on the start image of FramePack")
    if place == END and request.vision is not None and last not in known:
        progress.notify("vision has no effect on the end image of FramePack")
    if count > 1:
        used = min(count, CLIP.frames) // TEMPORAL_RATIO * TEMPORAL_RATIO
        request = replace(request, frames=request.frames[-used:])
        known[last] = _vision(pipeline, replace(request, frames=request.frames[-1:], vision=None), progress)
        progress.notify(f"goes on with the last {used} of {count} frames of the clip")
    stage, batches = base.ProgressStage("encoding", "image"), request.frames.split(CLIP.batch)
    known[place] = torch.cat([encoded_moments(pipeline, batch, progress, stage) for batch in batches], 2)
    if place == START or last in known:
        known[base.VISION if place == START else end] = _vision(pipeline, request, progress)
    anchors = (*before.anchors, (place, request.frame, request.strength))
    beside = count if count > 1 else before.beside
    return ImageCondition(SPEC.id, known, request.width, request.height, anchors=anchors, beside=beside)


def _checked_place(request: base.ImageRequest, known: Mapping[str, Tensor]) -> str:
    """``start`` or ``end``; raises InputError for another frame, a wrong number of images, a place ``known`` already,
    or a clip that comes after its end image."""
    place, count = PLACES.get(request.frame), len(request.frames)
    if place is None:
        found = f"an image at frame {request.frame} of FramePack"
        fix = "Set frame to 0, or to -1 with the start image's condition as previous."
        raise InputError(found, expected="frame 0 (start image) or -1 (end image)", fix=fix)
    if count != 1 and (place == END or count < FEWEST):
        fix = "Pick one frame, for example with Image From Batch."
        expected = "one image" + (f", or a clip of at least {FEWEST} frames to go on with" if place == START else "")
        raise InputError(f"{count} frames as the {place} image", expected=expected, fix=fix)
    if place in known:
        fix = "Set frame of the end image to -1."
        raise InputError(f"a second {place} image", expected="one start and one end image", fix=fix)
    if count > 1 and END in known:
        fix = "Join the end image to the clip: the clip's condition as its previous."
        raise InputError("a clip after its end image", expected="the clip first", fix=fix)
    return place


def frames_for(framepack: FramePackSettings, fps: float) -> int:
    """Pixel frames of the whole sections nearest to ``clip_seconds``, and the start image; 1 in single-frame mode.
    Raises InputError for a rate, a length or a window out of range."""
    if framepack.single_frame:
        return 1
    if not 0 < fps <= 240:
        raise InputError(f"fps {fps:g}", expected="more than 0, at most 240", fix="FramePack was made for 30.")
    asked, most = framepack.clip_seconds * fps, MOST_FRAMES / fps
    if not 0 < asked <= MOST_FRAMES:
        nearest = 1.0 if asked <= 0 else math.floor(most)
        found, expected = f"a clip of {framepack.clip_seconds} s at {fps:g} fps", f"more than 0, at most {most:.1f} s"
        raise InputError(found, expected=expected, fix=f"The nearest valid value is {nearest:g} s.")
    section = plan_for(I2V, framepack, 1, ended=False).window * TEMPORAL_RATIO  # plan_for checks its range
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
    alone; it was found on the FramePack I2V checkpoint. Raises InputError for no start image, or a setting of
    ``framepack`` out of range.

    ``keeper`` is given each finished section, in sampling order, with all latents so far, which :func:`decode` takes.
    Where it knows of the same video, sampling goes on after the last section that was finished. Source: diffusers
    ``HunyuanVideoFramepackPipeline.__call__``, equal to it in fp32; single-frame mode: kohya-ss/musubi-tuner#267 with
    ``target_index`` at the window."""
    device, generator = pipeline.offloader.device_of("transformer"), generator_for(settings.seed)
    strength = _end_strength(image, framepack, progress)
    frames = image.tensors[START].shape[2]
    plan = plan_for(pipeline.variant, framepack, settings.frames, strength > 0, frames)
    if plan.single and not plan.inverted:
        progress.notify("single-frame mode was made for FramePack I2V: F1 may not follow the prompt")
    elif not plan.single:
        _tell_length(pipeline, plan, framepack, settings.fps, progress)
    settings = replace(settings, frames=min(settings.frames, plan.frames) + (frames - 1) * TEMPORAL_RATIO)
    if settings.scheduler == "auto":
        settings = replace(settings, scheduler="euler" if pipeline.is_demo else UNIPC_BH1)  # the demo draws better so
        if not pipeline.is_demo:
            tell_once(progress, "solver UniPC (bh1), as the publisher's application; earlier versions took Euler's")
    start = _sampled_image(pipeline, image, START, generator)
    end = None if strength <= 0 else _sampled_image(pipeline, image, END, generator) * (1 if plan.clip else strength)
    history, texts = History(plan, start, end), _texts(pipeline, prompt, plan, framepack, settings.fps, progress)
    key = resume_key(pipeline, prompt, image, settings, framepack) if keeper is not None else str  # str() is no key
    shape, vision = (*start.shape[:2], plan.sampled, *start.shape[3:]), _vision_for(image, plan, strength).to(device)
    levels, config = _levels_for(pipeline, shape, settings, progress)
    with held_transformer(pipeline, settings, progress, plan.sampled, clip=plan.clip > 0) as transformer:
        _resume(history, generator, None if keeper is None else keeper.found(key()), progress)
        for index in range(len(history.lengths), plan.count):
            noise, part = noise_for(shape, generator, device), base.SubProgress(progress, index, plan.count, "section")
            text = texts[plan.place(index)]
            schedule = schedule_for(config, settings, settings.steps, levels, device)
            predict = _predictor(pipeline, transformer, history, text, vision, settings, len(schedule))
            safeguards = safeguards_of(pipeline, part, generator, index)
            first = start_from(None, noise, schedule)
            try:
                history.add(to_host(denoise(first, schedule, predict, progress=part, safeguards=safeguards)))
            except NotFinite:
                if keeper is not None:
                    keeper.drop(key())  # sections before may be wrong, too
                raise
            latents = described(_so_far(pipeline, history, settings, generator), prompt)
            if keeper is not None:
                state = SectionState(history.latents, tuple(history.lengths), state_of(generator))
                keeper.save(key(), index, plan.count, latents, state)
    return latents


def call_transformer(pipeline: Pipeline, transformer: Any, call: Call) -> Tensor:
    """The velocity, noise minus data, of a section that sees the start image or clip alone.

    Raises InputError for too many latent frames, or a call without start image, image states or pooled text."""
    frames = call.latents.shape[2]
    require_range("latent frames of one section", frames, 1, LARGEST_WINDOW, advice=", 129 frames in an empty latent")
    start, like = required(call.picture, "start image", IMAGE_FIX), call.latents
    whole = call.sections * frames * TEMPORAL_RATIO
    plan = plan_for(pipeline.variant, FramePackSettings(0.0, window=frames), whole, False, start.shape[2])
    seen = {name: value.to(like) for name, value in History(plan, start).seen().items()}
    return _velocity(pipeline, transformer, call, {**seen, **plan.indices(0)})


def _velocity(pipeline: Pipeline, transformer: Any, call: Call, context: Mapping[str, Tensor]) -> Tensor:
    """The velocity of a section whose history and indices are in ``context``, by the transformer's argument names."""
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


def decode(pipeline: Pipeline, latents: Latents, progress: Progress, form: DecodeRequest | None = None) -> Tensor:
    """Frames (F, H, W, 3) in 0..1: each section is decoded with its neighbour and blended into it, as upstream does.

    Latents that say nothing of sections, or were cut since, are decoded all at once."""
    lengths, window = list(latents.extra.get("section_lengths", ())), int(latents.extra.get("window", 0))
    inverted = latents.extra.get("order") != "vanilla"
    count = latents.samples.shape[2]
    if lengths and lengths[-1] != count:
        progress.notify(f"{count} latent frames where sampling left {lengths[-1]}: decoded all at once")
        lengths = []
    cuts = spans(lengths, window, inverted) if lengths else [slice(None)]
    largest = max((latents.samples[:, :, cut].shape for cut in cuts), key=math.prod)
    with decoding(pipeline, largest, progress, form) as passes:
        videos = (
            passes.decode(latents.samples[:, :, cut], base.SubProgress(progress, index, len(cuts), "section"))
            for index, cut in enumerate(cuts)
        )
        return joined(videos, window, inverted)


def _end_strength(image: ImageCondition | None, framepack: FramePackSettings, progress: Progress) -> float:
    """Weight of the end image, 0 without one; raises InputError without a start image."""
    if image is None or START not in image.tensors:
        found, expected = "no start image for FramePack", "an image condition with an image at frame 0"
        raise InputError(found, expected=expected, fix="Connect AnyGPU Encode Image with the start image.")
    if END not in image.tensors:
        if framepack.end_strength != 1.0:
            progress.notify("end_strength has no effect without an end image")
        return 0.0
    return framepack.end_strength * next(strength for name, _, strength in image.anchors if name == END)


def _sampled_image(pipeline: Pipeline, image: ImageCondition, place: str, generator: torch.Generator) -> Tensor:
    """Latents (1, 16, T, H / 8, W / 8) of the ``start`` or ``end`` image, drawn, on the CPU, in the model's space."""
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    batches = image.tensors[place].split(CLIP.batch // TEMPORAL_RATIO, 2)
    latents = torch.cat([DiagonalGaussianDistribution(batch).sample(generator) for batch in batches], 2)
    return latents * float(pipeline.configs["vae"]["scaling_factor"])


def _vision_for(image: ImageCondition, plan: Plan, strength: float) -> Tensor:
    """Image encoder states (1, N, D); with a clip and an end image, those of its last frame and the end image mixed."""
    if not plan.clip or strength == 0:
        return image.tensors[base.VISION]
    last, end = (image.tensors[name] for name in VISIONS)
    return (1 - strength) * last + strength * end


def _vision(pipeline: Pipeline, request: base.ImageRequest, progress: Progress) -> Tensor:
    """States (1, N, D) of the image encoder, or the given ones; raises InputError if these have another shape."""
    config = pipeline.configs["image_encoder"]
    config = config.get("vision_config", config)
    side = int(config.get("image_size", 384)) // int(config.get("patch_size", 14))
    if request.vision is not None:
        width = int(pipeline.configs["transformer"].get("image_proj_dim", 1152))
        return checked_vision(request.vision, side * side, width)
    # In 8 bits, as in the publisher's application: the floats that diffusers passes are truncated to other values.
    inputs = pipeline.tools["feature_extractor"](images=execution.picture_of(request.frames[0]), return_tensors="pt")
    hold, device = pipeline.offloader.hold("image_encoder", 0, progress), pipeline.offloader.device_of("image_encoder")
    with hold as encoder, checked_layers(encoder, progress.check), inputs_placed(encoder, device):
        states = encoder(inputs["pixel_values"].to(encoder.dtype)).last_hidden_state
        progress.step(1, 1, base.ProgressStage("encoding", "image for SigLIP"))
    return to_host(states).float()


def _resume(history: History, generator: torch.Generator, state: SectionState | None, progress: Progress) -> None:
    """Restore ``history`` and ``generator`` from ``state`` if it has some, not all, of this video's sections."""
    count, (batch, channels, _, *sides) = history.plan.count, history.start.shape
    if state is None or not 0 < len(state.lengths) < count:
        return
    if state.latents.shape != (batch, channels, state.lengths[-1], *sides):
        return
    history.latents, history.lengths = state.latents, list(state.lengths)
    generator.set_state(generator_for(0, state.generator_state).get_state())
    progress.notify(f"continues after section {len(state.lengths)} of {count}, saved by an interrupted run")


def _counted(plan: Plan) -> str:
    return f"{plan.count} section{'s' * (plan.count > 1)}"


def _tell_length(pipeline: Pipeline, plan: Plan, asked: FramePackSettings, fps: float, progress: Progress) -> None:
    """Tell the user how long the film becomes, and once that an earlier version made more sections of it."""
    progress.notify(f"{asked.clip_seconds:g} s: {plan.frames} frames in {_counted(plan)}, as published")
    older = math.ceil((asked.clip_seconds * fps - 1 - 1e-6) / TEMPORAL_RATIO) * TEMPORAL_RATIO + 1  # 1e-6: float error
    older = math.ceil(older / ((asked.window - 1) * TEMPORAL_RATIO + 1))  # each without its first latent's frames
    if plan.count != older and not pipeline.is_demo:
        tell_once(progress, f"{_counted(plan)}, the nearest; earlier versions rounded up, here to {older}")


def _texts(
    pipeline: Pipeline, prompt: Prompt, plan: Plan, framepack: FramePackSettings, fps: float, progress: Progress
) -> list[dict[str, Any]]:
    """The embeddings of each section by its place, on the device: ``cond``, the first prompt's where it has none, and
    with a negative prompt ``uncond``. The user is told of prompts without a section."""
    texts = shown(prompt.sections, plan, framepack.clip_seconds, fps)
    if not texts:
        texts = [prompt.embeds, *prompt.sections]
        if len(texts) > plan.count:
            no_effect = f"{len(texts) - plan.count} of {len(prompt.sections)} section prompts have no effect"
            progress.notify(f"{no_effect}: {_counted(plan)} in all")
        texts = [*texts, *[prompt.embeds] * plan.count][: plan.count]

    def ready(embeds: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return dict(placed(embeds, pipeline.offloader.device_of("transformer"), pipeline.precision.residual))

    common = {} if prompt.negative is None else {"uncond": ready(prompt.negative)}
    return [{**common, "cond": ready(text)} for text in blended(texts, plan, framepack.blend_sections)]


def _levels_for(
    pipeline: Pipeline, shape: Sequence[int], settings: SampleSettings, progress: Progress
) -> tuple[Callable[[int], Levels], dict[str, Any]]:
    """A function from a number of steps to evenly falling levels, with the shift for latents of this ``shape``, 7 at
    most; and the scheduler's configuration, which makes that shift act, but is the folder's own for the demo."""
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_framepack import calculate_shift

    tokens = math.prod(shape[2:]) / int(pipeline.configs["transformer"].get("patch_size", 2)) ** 2
    config = pipeline.tools["scheduler"]
    given = {name.replace("image_", ""): config[name] for name in SHIFTS if name in config}
    mu = min(float(calculate_shift(tokens, **given)), math.log(LARGEST_SHIFT))
    if not pipeline.is_demo:  # which was trained at the shift of its folder
        config = {**config, "use_dynamic_shifting": True}
        if math.exp(mu) < LARGEST_SHIFT and not settings.shift and settings.sigmas is None:
            tell_once(progress, f"shift {math.exp(mu):.2f} for so small a section, as published; it was 7 before")
    return partial(even_levels, mu=mu), config


def _predictor(
    pipeline: Pipeline,
    transformer: Any,
    history: History,
    texts: Mapping[str, Mapping[str, Tensor]],
    vision: Tensor,
    settings: SampleSettings,
    steps: int,
) -> Predict:
    """The guided velocity of the next section, with all that it sees beside its own latents and texts."""
    dtype, device = pipeline.precision.residual, vision.device
    indices = history.plan.indices(len(history.lengths), history.end is not None)
    context = {**placed(history.seen(), device, dtype), **indices}
    vision, guidance = vision.to(dtype), torch.full((1,), settings.guidance, device=device)

    def branch(name: str, latents: Tensor, time: Tensor, _: int) -> Tensor:
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
    """The latents sampled so far, in core's space; of an unfinished video that began at its end all frames count."""
    plan = history.plan
    frames = (history.lengths[-1] - 1) * TEMPORAL_RATIO + 1
    if not plan.inverted or len(history.lengths) == plan.count:
        frames = min(frames, settings.frames)
    extra = {"section_lengths": list(history.lengths), "window": plan.window, "order": plan.order}
    samples = history.latents / float(pipeline.configs["vae"]["scaling_factor"])
    return sampled_latents(pipeline, samples, replace(settings, frames=frames), generator, **extra)
