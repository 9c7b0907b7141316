"""HunyuanVideo 1.5: text or image to video."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ....compat.device.execution import HOST, generator_for, inputs_placed, picture_of, placed, to_host
from ....compat.errors import InputError
from ... import base
from ...base import Call, ImageCondition, ImageRequest, Latents, Progress, Prompt, PromptRequest, SampleSettings
from ...family import Defaults, Recipe
from ...pictures import checked_vision
from ...pipeline import Pipeline
from ...sampling import loop
from ...sampling.core_sampler import velocity
from ...sampling.schedules import Guidance, even_levels, schedule_for
from ...settings import refines
from ...text.qwen import qwen_embeds, qwen_forwards, qwen_from_core
from ...vae.fallback import decode as decode
from ...vae.fallback import encoded, watched
from .spec import CHANNELS, FEW_STEPS, LARGE, SMALL, SPATIAL_RATIO, SPEC, SUPER_CHANNELS, TEMPORAL_RATIO
from .upscaler import enlarged as enlarged
from .upscaler import upscale as upscale

BRANCHES = ("pred_cond", "pred_uncond")
VISION_TOKENS = 729  # what SigLIP makes of 384 x 384 pixels
STATES, PICTURE = "image_embeds", "image_latents"
SMALL_NOISE = 0.7  # share of noise on the small video of the super-resolution, which is shown at no smaller level


def defaults_for(pipeline: Pipeline) -> Defaults:
    """The family's defaults with the size and the guidance of this checkpoint: 480p or 720p, distilled or not."""
    width, height = nearest_size(pipeline, 16, 9)
    guider = pipeline.tools["guider"]
    scale = float(guider.get("guidance_scale", SPEC.sizes.defaults.cfg))
    if guider.get("use_original_formulation"):  # cond + scale * (cond - uncond): our formula with a scale one higher
        scale += 1.0
    return replace(SPEC.sizes.defaults, width=width, height=height, cfg=scale if guider.get("enabled", True) else 1.0)


def recipe_for(pipeline: Pipeline) -> Recipe:
    """The published recipe: few steps for a transformer with MeanFlow, which was trained for them and also takes the
    next time; that of the super-resolution for one that takes a small video."""
    config = pipeline.configs["transformer"]
    if _enlarges(pipeline):
        side = LARGE if int(config.get("target_size", SMALL)) > (SMALL + LARGE) / 2 else SMALL
        return SPEC.published.recipes[f"super-resolution {side}"]
    return SPEC.published.recipes[FEW_STEPS if config.get("use_meanflow") else ""]


def nearest_size(pipeline: Pipeline, width: int, height: int) -> tuple[int, int]:
    """Width and height in pixels that Tencent chooses for a picture of this shape; diffusers never takes a wider shape.
    Source: Tencent-Hunyuan/HunyuanVideo-1.5 60783e7 hyvideo/utils/data_utils.py."""
    from diffusers.pipelines.hunyuan_video1_5.image_processor import generate_crop_size_list

    sizes = generate_crop_size_list(int(pipeline.configs["transformer"].get("target_size", 640)), SPATIAL_RATIO)
    tall, wide = min(sizes, key=lambda size: abs(round(size[0] / size[1], 5) - height / width))
    return wide, tall


def task_of(config: Mapping[str, Any]) -> str:
    """``text`` or ``image``, from a transformer's ``config.json``."""
    return "image" if config.get("task_type") == "i2v" else "text"


def encode_prompt(pipeline: Pipeline, request: PromptRequest, progress: Progress) -> Prompt:
    positive, negative = qwen_embeds(pipeline, request, progress)
    return Prompt(SPEC.id, positive, negative)


prompt_from_core = qwen_from_core
text_forwards = qwen_forwards


def encode_image(pipeline: Pipeline, request: ImageRequest, progress: Progress) -> ImageCondition:
    """``image_embeds`` (1, 729, 1152) and ``image_latents`` (1, 32, 1, H / 16, W / 16) of the first frame.

    InputError: no image encoder and no states in its place, or states of another encoder."""
    if request.frames.shape[0] > 1:
        progress.notify(f"the first of {request.frames.shape[0]} images is used: {SPEC.title} starts from one")
    frames = request.frames[:1]
    if request.vision is None:
        states = _states(pipeline, frames if request.seen is None else request.seen, progress)
    else:
        states = checked_vision(request.vision, VISION_TOKENS, int(pipeline.configs["transformer"]["image_embed_dim"]))
    picture = encode_video(pipeline, frames, request.seed, progress, mode=True)
    return ImageCondition(SPEC.id, {STATES: states, PICTURE: picture}, request.width, request.height)


def encode_video(pipeline: Pipeline, frames: Tensor, seed: int, progress: Progress, mode: bool = False) -> Tensor:
    """Latents (1, 32, T, H / 16, W / 16) in core's space, which for this family is the VAE's own; ``mode``: no draw."""
    count, rows, columns = frames.shape[:3]
    cells = ((count - 1) // TEMPORAL_RATIO + 1, rows // SPATIAL_RATIO, columns // SPATIAL_RATIO)
    return encoded(pipeline, frames, seed, progress, mode, pipeline.spec.sizes.tile_for(cells))


def sample(
    pipeline: Pipeline, prompt: Prompt, image: ImageCondition | None, settings: SampleSettings, progress: Progress
) -> Latents:
    """Latents (1, 32, T, H / 16, W / 16) in core's space; raises InputError for latents of no use to the transformer.

    Source: diffusers ``HunyuanVideo15Pipeline.__call__`` and its image-to-video twin; equal to them in fp32, but for
    rounding: padding and the attention mask that hides it are left out."""
    device, scale = pipeline.offloader.device_of("transformer"), float(pipeline.configs["vae"]["scaling_factor"])
    dtype, generator = pipeline.precision.residual, generator_for(settings.seed)
    settings = _with_guider(pipeline, settings, progress)
    schedule = schedule_for(pipeline.tools["scheduler"], settings, settings.steps, even_levels, device)
    _require_transformer(pipeline, settings)
    noise = loop.noise_for(loop.latent_shape(SPEC, CHANNELS, settings), generator, device)
    clean = None if settings.latents is None else settings.latents.samples.to(device) * scale
    texts = placed(dict(zip(BRANCHES, (prompt.embeds, prompt.negative or {}), strict=True)), device, dtype)
    beside = torch.zeros(1, CHANNELS + 1, *noise.shape[2:], device=device, dtype=dtype)  # picture and mask
    vision = None
    if image is not None:
        beside[:, :CHANNELS, :1] = placed(image.tensors[PICTURE], device, dtype) * scale
        beside[:, CHANNELS:, :1] = 1.0
        vision = placed(image.tensors[STATES], device, dtype)
    small = _small_video(clean, generator, dtype) if _enlarges(pipeline) and clean is not None else None
    next_times = functional.pad(schedule.timesteps[1:], (0, 1))
    with loop.held_transformer(pipeline, settings, progress) as transformer:

        def branch(name: str, latents: Tensor, time: Tensor, index: int) -> Tensor:
            call = Call(
                latents=torch.cat([latents.to(dtype), beside, *([] if small is None else [small(time)])], dim=1),
                time=time.expand(1),
                embeds=texts[name][base.EMBEDS],
                glyph_embeds=texts[name].get(base.EMBEDS_2),
                vision=vision,
                next_time=next_times[index].expand(1),
                branch=name,
            )
            return velocity(pipeline, transformer, call)

        latents = loop.denoise(
            loop.start_from(clean, noise, schedule),
            schedule,
            Guidance(settings, len(schedule)).over(pipeline.run.group, branch, BRANCHES),
            progress=progress,
            safeguards=loop.safeguards_of(pipeline, progress, generator),
            noise_mask=loop.noise_mask_for(settings, clean, noise),
        )
    return loop.sampled_latents(pipeline, to_host(latents) / scale, settings, generator)


def call_transformer(pipeline: Pipeline, transformer: Any, call: Call) -> Tensor:
    """The velocity, noise minus data.

    Without a picture there are no states, where upstream masks 729 of zeros: both tell the transformer it has none."""
    config, latents = pipeline.configs["transformer"], call.latents
    rows = latents.shape[0]
    glyph_embeds, vision = call.glyph_embeds, call.vision
    if glyph_embeds is None:
        glyph_embeds = latents.new_zeros(rows, 0, int(config["text_embed_2_dim"]))
    if vision is None:
        vision = latents.new_zeros(rows, 0, int(config["image_embed_dim"]))
    next_time = call.next_time if config.get("use_meanflow") else None
    return transformer(
        hidden_states=latents,
        timestep=call.time.to(latents.dtype),
        timestep_r=None if next_time is None else next_time.to(latents.dtype),
        encoder_hidden_states=call.embeds,
        encoder_attention_mask=call.valid,
        encoder_hidden_states_2=glyph_embeds,
        encoder_attention_mask_2=glyph_embeds.new_ones(glyph_embeds.shape[:2], dtype=torch.bool),
        image_embeds=vision,
        return_dict=False,
    )[0]


def _enlarges(pipeline: Pipeline) -> bool:
    """True if the transformer is the super-resolution's, which takes a small video beside the noise."""
    return int(pipeline.configs["transformer"].get("in_channels", 0)) == SUPER_CHANNELS


def _require_transformer(pipeline: Pipeline, settings: SampleSettings) -> None:
    """Raise InputError for the super-resolution without a small video, or another transformer with one."""
    if _enlarges(pipeline) and settings.latents is None:
        found = f"no latents for the super-resolution of {SPEC.title}"
        fix = "Connect them as latent; their video is sampled by another pipeline."
        raise InputError(found, expected="those of AnyGPU Upscale Latents", fix=fix)
    if not _enlarges(pipeline) and refines(settings):
        found = f"upscaled latents for {str(pipeline.model.source)!r}"
        fix = "Load it with a second AnyGPU Compose Pipeline, or set denoise below 1 to redraw the latents."
        raise InputError(found, expected="a transformer of the super-resolution, such as 720p_sr_distilled", fix=fix)


def _small_video(clean: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A function from a time of 0..1000 to the channels (1, 33, T, H, W) of the small video with noise, and its mask;
    zeros once the video sampled has less noise."""
    noise = loop.noise_for(tuple(clean.shape), generator, clean.device)
    noisy = torch.cat([(1 - SMALL_NOISE) * clean + SMALL_NOISE * noise, torch.ones_like(clean[:, :1])], dim=1).to(dtype)
    return lambda time: noisy * (time >= 1000 * SMALL_NOISE)


def _with_guider(pipeline: Pipeline, settings: SampleSettings, progress: Progress) -> SampleSettings:
    """``settings`` with cfg only in the range of steps of the checkpoint's guider, and its rescale if none was set; as
    they are, with a note, for a guider that is not plain classifier-free guidance."""
    guider: Mapping[str, Any] = pipeline.tools["guider"]
    name = guider.get("_class_name", "ClassifierFreeGuidance")
    if name != "ClassifierFreeGuidance":
        progress.notify(f"the checkpoint's {name} is not supported; plain classifier-free guidance is used")
        return settings
    steps = settings.steps
    return replace(
        settings,  # from and to whole steps, as upstream counts them
        cfg_start=max(settings.cfg_start, int(guider.get("start", 0.0) * steps) / steps),
        cfg_end=min(settings.cfg_end, int(guider.get("stop", 1.0) * steps) / steps),
        guidance_rescale=settings.guidance_rescale or float(guider.get("guidance_rescale", 0.0)),
    )


def _states(pipeline: Pipeline, frames: Tensor, progress: Progress) -> Tensor:
    """SigLIP's last hidden states (1, 729, 1152) of one frame, resized in 8 bits; raises InputError without SigLIP."""
    from diffusers import HunyuanVideo15ImageToVideoPipeline as Upstream

    if "image_encoder" not in pipeline.configs:
        found = f"no image_encoder for {str(pipeline.model.source)!r}"
        fix = "Choose a folder that has it as image_encoder when loading, or connect CLIP Vision Encode."
        raise InputError(found, expected="SigLIP beside an image-to-video checkpoint", fix=fix)
    picture = picture_of(frames[0])
    device = pipeline.offloader.device_of("image_encoder")
    with (
        pipeline.offloader.hold("image_encoder", 0, progress) as encoder,
        watched(encoder, progress, base.ProgressStage("encoding", "image")),
        inputs_placed(encoder, device),
    ):
        states = Upstream._get_image_embeds(encoder, pipeline.tools["feature_extractor"], picture, HOST)
    pipeline.offloader.release("image_encoder")
    return to_host(states).float()
