"""HunyuanVideo: text to video, and image to video in all three published ways; SkyReels V1, which was trained from it.

The picture is the first latent frame (``token_replace``), or beside the noise: with a mask (``latent_concat``, whose
first 4 pixel frames are dropped, as upstream, from ``frames``) or alone (``picture_concat``, SkyReels)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ....compat.device.execution import generator_for, picture_of, placed, to_host
from ....compat.errors import CheckpointError, InputError
from ... import base
from ...base import Call, ImageCondition, ImageRequest, Latents, Progress, Prompt, PromptRequest, SampleSettings
from ...family import Defaults, Recipe
from ...files.evidence import Evidence
from ...pipeline import Pipeline
from ...sampling import loop
from ...sampling.core_sampler import guidance_of, required
from ...sampling.schedules import Guidance, Predict, even_levels, schedule_for
from ...text.llama import LlavaInput, llama_embeds, llama_forwards, llama_from_core
from ...vae import fallback
from ...vae.plan import DecodeRequest
from .spec import CHANNELS, DYNAMIC, LATENT_CONCAT, PICTURE_CONCAT, SKYREELS, SPEC, TOKEN_REPLACE, image_condition

SKYREELS_RATE = "FPS-24, "  # what each of its training texts begins with
SKYREELS_SIZE = 960, 544
DROPPED_FRAMES = 4  # what the 33-channel variant's first latent frames decode to beside the video
INTERLEAVE = {LATENT_CONCAT: 2, TOKEN_REPLACE: 4}  # every so many of the picture's 576 states go to the transformer
NOISE_SHARE = 0.999  # of noise at the start of image to video, else picture; 1 where it is SkyReels' or dynamic
IMAGE, BUCKET_SIDE = "image_latents", 960


def defaults_for(pipeline: Pipeline) -> Defaults:
    """The family's defaults, with guidance 0 where the checkpoint takes none; SkyReels' own guidance and length. Image
    to video has the family's guidance of 6 as in upstream's example for it; upstream's bare call would use 1."""
    defaults = SPEC.sizes.defaults
    if pipeline.variant == SKYREELS:
        defaults = replace(defaults, guidance=1.0, frames=97)
    return defaults if pipeline.configs["transformer"].get("guidance_embeds") else replace(defaults, guidance=0.0)


def recipe_for(pipeline: Pipeline) -> Recipe:
    return SPEC.published.recipes[pipeline.variant]


def guess_variant(evidence: Evidence) -> tuple[str, str]:
    """The variant by configuration and names, and the reason for it; Tencent's, without a reason, if nothing tells."""
    if image_condition(evidence.config) == PICTURE_CONCAT:
        return SKYREELS, "its transformer takes the picture beside the noise, without a mask"
    name = evidence.name_with(r"sky.?reel|cfg.?distil")  # Tencent's own is called so
    return (SKYREELS, f"the name {name!r} says so") if "reel" in name.lower() else (SPEC.id, "")


def task_of(config: Mapping[str, Any]) -> str:
    """``text`` or ``image``, from a transformer's ``config.json``."""
    return "text" if image_condition(config) is None else "image"


def encoder_task(config: Mapping[str, Any]) -> str:
    """The task of the pipelines whose text encoder goes with a transformer: SkyReels' does not look at the picture."""
    return "text" if image_condition(config) in (None, PICTURE_CONCAT) else "image"


def nearest_size(pipeline: Pipeline, width: int, height: int) -> tuple[int, int]:
    """Width and height in pixels that Tencent chooses for a picture of this shape; SkyReels has one for all. Source:
    Tencent-Hunyuan/HunyuanVideo-I2V 1481c1d hyvideo/utils/data_utils.py, at 720p."""
    from diffusers.pipelines.hunyuan_video1_5.image_processor import generate_crop_size_list

    if image_condition(pipeline.configs["transformer"]) == PICTURE_CONCAT:
        return SKYREELS_SIZE
    asked = height / width
    shapes = {round(tall / wide, 5): (wide, tall) for tall, wide in reversed(generate_crop_size_list(BUCKET_SIDE, 32))}
    # Never one that would need a border: only the longer side is cut.
    fits = (shape for shape in shapes if (shape <= asked if asked >= 1 else shape > asked))
    return shapes[min(fits, key=lambda shape: abs(shape - asked))]


def encode_prompt(pipeline: Pipeline, request: PromptRequest, progress: Progress) -> Prompt:
    """Llama states and pooled CLIP vectors of both texts; with image to video the encoder also looks at the picture.

    InputError: image to video without one. CheckpointError: the text encoder of the other task."""
    sees_images = "vision_config" in pipeline.configs["text_encoder"]
    if sees_images != (encoder_task(pipeline.configs["transformer"]) == "image"):
        reads = "for pictures too" if sees_images else "for text only"
        found = f"a text encoder {reads} beside a transformer for {pipeline.model.task}"
        fix = "Choose the pipeline folder of the same task as base."
        raise CheckpointError(found, expected="Llama for text to video, Llava for image to video", fix=fix)
    from diffusers import HunyuanVideoImageToVideoPipeline, HunyuanVideoPipeline

    if request.image is not None and not sees_images:
        progress.notify("the prompt's image has no effect: the text encoder of this checkpoint reads text alone")
    if pipeline.variant == SKYREELS and not request.text.startswith(SKYREELS_RATE.strip()):
        progress.notify(f"SkyReels was trained on texts that begin with {SKYREELS_RATE!r}")
    pipe = HunyuanVideoImageToVideoPipeline if sees_images else HunyuanVideoPipeline
    pictures = _llava_input(pipeline, request) if sees_images else None
    positive, negative, _ = llama_embeds(pipeline, pipe, replace(request, sections=()), progress, pictures)
    return Prompt(SPEC.id, positive, negative)


text_forwards = llama_forwards
prompt_from_core = llama_from_core
encode_video = fallback.encoded  # (1, 16, T, H / 8, W / 8): core's space is the VAE's own


def encode_image(pipeline: Pipeline, request: ImageRequest, progress: Progress) -> ImageCondition:
    """``image_latents`` (1, 16, 1, H / 8, W / 8): the first picture, in the VAE's space, drawn only for SkyReels."""
    if request.frames.shape[0] > 1:
        progress.notify(f"{SPEC.title} starts from one picture; the first of {request.frames.shape[0]} is used")
    mode = image_condition(pipeline.configs["transformer"]) != PICTURE_CONCAT
    latents = fallback.encoded(pipeline, request.frames[:1], request.seed, progress, mode=mode)
    return ImageCondition(SPEC.id, {IMAGE: latents}, request.width, request.height)


def sample(
    pipeline: Pipeline, prompt: Prompt, image: ImageCondition | None, settings: SampleSettings, progress: Progress
) -> Latents:
    """Latents (1, 16, T, H / 8, W / 8) in core's space. Raises InputError for too few frames for image to video.

    Source: ``__call__`` of diffusers' ``HunyuanVideoPipeline``, ``HunyuanVideoImageToVideoPipeline`` and
    ``HunyuanSkyreelsImageToVideoPipeline``; equal to them in fp32."""
    kind = None if image is None else image_condition(pipeline.configs["transformer"])
    _check_settings(pipeline, kind, settings, progress)
    device, generator = pipeline.offloader.device_of("transformer"), generator_for(settings.seed)
    scale = float(pipeline.configs["vae"]["scaling_factor"])
    schedule = schedule_for(pipeline.tools["scheduler"], settings, settings.steps, even_levels, device)
    noise = loop.noise_for(loop.latent_shape(SPEC, CHANNELS, settings), generator, device)
    picture = None
    if image is not None:
        picture = image.tensors[IMAGE].to(device) * scale
        plain = kind == PICTURE_CONCAT or pipeline.variant == DYNAMIC
        share = torch.tensor([1.0 if plain else NOISE_SHARE], device=device)
        noise = noise * share + picture.repeat(1, 1, noise.shape[2], 1, 1) * (1 - share)
    clean = None if settings.latents is None else settings.latents.samples.to(device) * scale
    start, mask = loop.start_from(clean, noise, schedule), loop.noise_mask_for(settings, clean, noise)
    whole = _with_first_frame(kind, picture)
    if kind == TOKEN_REPLACE:  # the first latent frame is the picture itself: it is seen, never sampled
        start = start[:, :, 1:]
        mask = None if mask is None else loop.NoiseMask(*(t[:, :, 1:] for t in (mask.clean, mask.noise, mask.mask)))
    with loop.held_transformer(pipeline, settings, progress) as transformer:
        predict = _predictor(pipeline, transformer, prompt, settings, _with_picture(kind, picture), len(schedule))
        latents = loop.denoise(
            start,
            schedule,
            predict,
            progress=progress,
            noise_mask=mask,
            preview=whole,
            safeguards=loop.safeguards_of(pipeline, progress, generator),
        )
    extra = {"drop_frames": DROPPED_FRAMES} if kind == LATENT_CONCAT else {}
    return loop.sampled_latents(pipeline, whole(to_host(latents)) / scale, settings, generator, **extra)


def call_transformer(pipeline: Pipeline, transformer: Any, call: Call) -> torch.Tensor:
    """The velocity, noise minus data; raises InputError without pooled text."""
    return transformer(
        hidden_states=call.latents,
        timestep=call.time.float(),
        encoder_hidden_states=call.embeds,
        encoder_attention_mask=call.valid,
        pooled_projections=required(call.pooled, "pooled_output", "Use AnyGPU Encode Prompt or core's DualCLIPLoader."),
        guidance=guidance_of(pipeline, call),
        return_dict=False,
    )[0]


def decode(pipeline: Pipeline, latents: Latents, progress: Progress, form: DecodeRequest | None = None) -> torch.Tensor:
    """Frames (F, H, W, 3) in 0..1, without those that the 33-channel variant throws away."""
    return fallback.decode(pipeline, latents, progress, form)[int(latents.extra.get("drop_frames", 0)) :]


def _llava_input(pipeline: Pipeline, request: PromptRequest) -> LlavaInput:
    """The picture for the prompt, and a black one for the negative prompt; raises without picture or image_processor.

    Both prompts keep as many picture states: upstream's own call keeps every second of the negative's for a
    token-replace model, which was trained with every fourth."""
    from PIL import Image

    if request.image is None:
        fix = "Connect the image to AnyGPU Encode Prompt too: "
        fix += f"the text encoder of {SPEC.title} image to video looks at it."
        raise InputError("no image beside the prompt", expected="the picture that the video starts from", fix=fix)
    if "image_processor" not in pipeline.tools.readers:
        found = f"no image_processor for {str(pipeline.model.source)!r}"
        fix = "Download it beside text_encoder, or choose an image-to-video pipeline as base."
        raise CheckpointError(found, expected="the folder image_processor of image to video", fix=fix)
    # 8 bits here, because the image processor is given what upstream gives it: a picture, not floats.
    picture = picture_of(request.image[0])
    kind = image_condition(pipeline.configs["transformer"])
    black = Image.new("RGB", picture.size)
    return LlavaInput(picture, black, pipeline.tools["image_processor"], INTERLEAVE.get(str(kind), 1))


def _check_settings(pipeline: Pipeline, kind: str | None, settings: SampleSettings, progress: Progress) -> None:
    """Raise InputError for too few frames; tell the user of frames that are dropped, and guidance without effect."""
    least = SPEC.sizes.stride + 1
    if kind is not None and settings.frames < least:
        found = f"frames {settings.frames} for {SPEC.title} image to video"
        raise InputError(found, expected=f"at least {least} frames", fix=f"The nearest valid value is {least}.")
    if kind == LATENT_CONCAT:
        count, why = settings.frames - DROPPED_FRAMES, f"the first {DROPPED_FRAMES} of a 33-channel video are dropped"
        progress.notify(f"{count} of {settings.frames} frames come back: {why}")
    if settings.guidance and not pipeline.configs["transformer"].get("guidance_embeds"):
        progress.notify("guidance has no effect on this checkpoint, whose transformer does not take it")


def _predictor(
    pipeline: Pipeline,
    transformer: Any,
    prompt: Prompt,
    settings: SampleSettings,
    model_input: Callable[[torch.Tensor], torch.Tensor],
    steps: int,
) -> Predict:
    """The guided velocity of the sampled frames; ``model_input`` adds the picture to their latents."""
    device, dtype = pipeline.offloader.device_of("transformer"), pipeline.precision.residual
    guidance = torch.full((1,), settings.guidance, device=device)
    texts = {"cond": placed(prompt.embeds, device, dtype)}
    if settings.cfg > 1.0:
        texts["uncond"] = placed(prompt.negative, device, dtype)

    def branch(name: str, latents: torch.Tensor, time: torch.Tensor, _: int) -> torch.Tensor:
        text = texts[name]
        call = Call(
            latents=model_input(latents).to(dtype),
            time=time.expand(1),
            embeds=text[base.EMBEDS],
            mask=text[base.MASK],
            pooled=text[base.POOLED],
            guidance=guidance,
        )
        with transformer.cache_context(name):
            return call_transformer(pipeline, transformer, call)[:, :, -latents.shape[2] :]  # without a first frame

    return Guidance(settings, steps).over(pipeline.run.group, branch, ("cond", "uncond"))


def _with_picture(kind: str | None, picture: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from latents (1, 16, T, H, W) to the transformer's input: any picture as channels or frame."""
    if kind not in (LATENT_CONCAT, PICTURE_CONCAT) or picture is None:
        return _with_first_frame(kind, picture)

    def concatenated(latents: torch.Tensor) -> torch.Tensor:
        pictured = torch.zeros_like(latents)
        pictured[:, :, :1] = picture
        if kind == PICTURE_CONCAT:
            return torch.cat([latents, pictured], dim=1)
        mask = torch.zeros_like(latents[:, :1])
        mask[:, :, 0] = 1
        return torch.cat([latents, pictured, mask], dim=1)

    return concatenated


def _with_first_frame(kind: str | None, picture: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that puts the picture before sampled latents where it is the first frame; else the identity."""
    if kind == TOKEN_REPLACE and picture is not None:
        return lambda latents: torch.cat([picture.to(latents.device), latents], dim=2)
    return lambda latents: latents
