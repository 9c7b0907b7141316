"""The stages that nodes and the command call: each checks what the user entered, says what it changed, and runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..compat.device.vae_policy import Form
from ..compat.errors import InputError, UnsupportedError
from ..compat.output_check import fault_in_latents
from .base import (
    FramePackSettings,
    ImageCondition,
    ImageRequest,
    Latents,
    Loaded,
    Progress,
    Prompt,
    PromptRequest,
    SampleSettings,
)
from .families.framepack.sections import Keeper, Remembered
from .family import Family
from .grid import check_steps, snap
from .memory.estimates import Size
from .memory.fit import accounted, fitted_for, roomier
from .memory.shortage import shortage_explained
from .pictures import checked_frames, fitted, fitted_size
from .profiling import profiled
from .registry import family_named
from .sampling.loop import require_finite
from .sampling.safe_fp16 import with_fallback
from .speed import sped_up
from .text.prompt_files import require_text_encoder
from .text.t5 import described

MOST_TOKENS = 1024
ENCODING, PICTURING = "encoding the prompt", "encoding the image"
TEXT_HINT = "choose text_device cpu on the load node, which takes none of this memory"
NEUTRAL: dict[str, Any] = {  # settings that mean "nothing asked"
    "guidance": (0.0,),
    "cfg": (0.0, 1.0),
    "cfg_start": (0.0,),
    "cfg_end": (1.0,),
    "shift": (0.0,),
    "guidance_rescale": (0.0,),
    "sigmas": (None,),
    "latents": (None,),
    "noise_mask": (None,),
    "template": ("",),
    "sections": ((),),
    "image": (None,),
    "frame": (0,),
    "strength": (1.0,),
    "vision": (None,),
    "previous": (None,),
}


@profiled("encode prompt")
@accounted("text")
def encode_prompt(loaded: Loaded, request: PromptRequest, progress: Progress) -> Prompt:
    """The prompt and its negative as embeddings; afterwards no text encoder is on the device.

    Raises:
        InputError: an empty or over-long prompt, or a template without its place for the prompt.
    """
    family = family_named(loaded.family)
    require_text_encoder(loaded)
    if not request.text.strip():
        raise InputError("an empty prompt", expected="a text that describes the video", fix="Type a prompt.")
    limit = request.max_tokens or of_checkpoint(loaded).defaults.max_tokens
    if not 1 <= limit <= MOST_TOKENS:
        nearest = min(max(limit, 1), MOST_TOKENS)
        raise InputError(
            f"max_tokens {limit}", expected=f"1 to {MOST_TOKENS} tokens", fix=f"The nearest valid value is {nearest}."
        )
    if request.template and request.template.count("{}") != 1:
        raise InputError(
            f"a template with {request.template.count('{}')} places for the prompt",
            expected="exactly one {}",
            fix="Write {} where the prompt belongs, or leave the template empty.",
        )
    if request.template_crop >= 0 and not request.template:
        progress.say("template_crop has no effect without a template")
    image = None if request.image is None else checked_frames(request.image, "the prompt's image")
    report_unused(family.FAMILY, request, ("template", "sections", "image"), progress)
    fitted_for(loaded, "text", None, progress)
    try:
        completed = replace(request, max_tokens=limit, image=image)
        with shortage_explained(loaded, family.FAMILY, ENCODING, None, TEXT_HINT):
            found = roomier(
                loaded,
                progress,
                family.FAMILY.text_parts,
                ENCODING,
                lambda: family.encode_prompt(loaded, completed, progress),
            )
        texts = {"text": request.text, "negative_text": request.negative}
        return replace(found, opposed=bool(request.negative.strip()), extra=texts)
    finally:
        release_text(loaded, family.FAMILY)


def prompt_from_core(loaded: Loaded, positive: Any, negative: Any = None) -> Prompt:
    """Core CONDITIONING as a prompt of the loaded family.

    Args:
        positive, negative: lists of [tensor (1, N, D), dict], as CLIPTextEncode makes them.
    """
    family = family_named(loaded.family)

    def one(conditioning: Any) -> Mapping[str, torch.Tensor]:
        if not conditioning:
            raise InputError("an empty CONDITIONING", expected="encoded text", fix="Connect CLIP Text Encode.")
        embeds, extra = conditioning[0][0], conditioning[0][1]
        width = loaded.configs["transformer"].get(family.FAMILY.text_width)
        if embeds is None or (width is not None and embeds.shape[-1] != width):
            raise InputError(
                f"CONDITIONING of width {None if embeds is None else embeds.shape[-1]}",
                expected=f"width {width}, as {family.FAMILY.title} takes it",
                fix="Use the text encoder files of this model in the CLIP loader.",
            )
        return family.prompt_from_core(embeds, extra)

    return Prompt(
        loaded.family, one(positive), None if negative is None else one(negative), opposed=negative is not None
    )


@profiled("encode image")
@accounted("image")
def encode_image(loaded: Loaded, request: ImageRequest, fit: str, progress: Progress) -> ImageCondition:
    """The pictures fitted to a size of the family and encoded; ``width`` and ``height`` say which size.

    Raises:
        InputError: pictures of a wrong kind or size. UnsupportedError: a family that takes none.
    """
    family = family_named(loaded.family)
    if not hasattr(family, "encode_image"):
        raise UnsupportedError(
            f"an image for {family.FAMILY.title}", expected="a text prompt only", fix="Load an image-to-video model."
        )
    frames = checked_frames(request.frames, "the image")
    if not 0.0 <= request.strength <= 1.0:
        raise InputError(f"strength {request.strength}", expected="0 to 1", fix="Choose a share between 0 and 1.")
    previous = request.previous
    if previous is not None:
        require_family(previous.family, family.FAMILY, "the previous image condition")
        width, height = previous.width, previous.height
    else:
        width, height = _picture_size(loaded, frames, request, fit)
    report_unused(family.FAMILY, request, ("frame", "strength", "vision", "previous"), progress)
    pictures = fitted(frames, width, height, fit)
    if tuple(frames.shape[1:3]) != (height, width):
        progress.say(f"image {frames.shape[2]}x{frames.shape[1]} -> {width}x{height} ({fit})")
    completed = replace(request, frames=pictures, width=width, height=height)
    with shortage_explained(loaded, family.FAMILY, PICTURING, SampleSettings(width, height, len(pictures))):
        return roomier(
            loaded,
            progress,
            ("image_encoder", "vae"),
            PICTURING,
            lambda: family.encode_image(loaded, completed, progress),
        )


@profiled("encode video")
def encode_video(
    loaded: Loaded, frames: torch.Tensor, width: int, height: int, fit: str, seed: int, progress: Progress
) -> Latents:
    """Frames (F, H, W, 3) as latents in core's space, fitted to a size of the family, to start a sampling from.

    A frame count off the grid is cut to the largest that fits, and said.
    """
    family = family_named(loaded.family)
    if not hasattr(family, "encode_video"):
        raise UnsupportedError(
            f"a video for {family.FAMILY.title}",
            expected="a start image",
            fix=f"Use AnyGPU Encode Image: {family.FAMILY.title} starts from a picture and noise only.",
        )
    pictures = checked_frames(frames, "the video")
    width, height = fitted_size(family.FAMILY, pictures, width or pictures.shape[2], height or pictures.shape[1], fit)
    stride = family.FAMILY.stride
    count = (pictures.shape[0] - 1) // stride * stride + 1
    if count != pictures.shape[0]:
        progress.say(f"frames {pictures.shape[0]} -> {count} ({family.FAMILY.title} needs {stride}n+1 frames)")
    pictures = fitted(pictures[:count], width, height, fit)
    samples = family.encode_video(loaded, pictures, seed, progress)
    return Latents(samples, loaded.family, "video", count, height, width, family.FAMILY.defaults.fps, seed)


@profiled("sample")
@accounted("sampling")
def sample(
    loaded: Loaded, prompt: Prompt, image: ImageCondition | None, settings: SampleSettings, progress: Progress
) -> Latents:
    """Sampled latents in core's space.

    Raises:
        InputError: a prompt, image or latents of another family or size, or a setting out of range.
    """
    family = family_named(loaded.family)
    if loaded.family == "framepack":
        raise UnsupportedError(
            "a FramePack pipeline in the Sample node",
            expected="the Sample FramePack node",
            fix="FramePack samples section by section: use AnyGPU Sample FramePack.",
        )
    settings = _completed(of_checkpoint(loaded), prompt, image, settings, progress)
    _require_image(loaded, family.FAMILY, image)
    release_text(loaded, family.FAMILY)
    fitted_for(loaded, "sampling", size_of(settings, prompt), progress)
    with shortage_explained(loaded, family.FAMILY, "sampling", settings):
        found = _sampled(loaded, settings, progress, lambda: family.sample(loaded, prompt, image, settings, progress))
    return described(found, prompt)


@profiled("sample")
@accounted("sampling")
def sample_framepack(
    loaded: Loaded,
    prompt: Prompt,
    image: ImageCondition,
    settings: SampleSettings,
    framepack: FramePackSettings,
    progress: Progress,
    keeper: Keeper | None = None,
) -> Latents:
    """FramePack's sampled latents; ``keeper`` is told of each finished section, and may know of some already."""
    family = family_named(loaded.family)
    if loaded.family != "framepack":
        raise UnsupportedError(
            f"a {family.FAMILY.title} pipeline in the Sample FramePack node",
            expected="a FramePack pipeline",
            fix="Use AnyGPU Sample for this model.",
        )
    settings = replace(settings, frames=family.frames_for(framepack, settings.fps or family.FAMILY.defaults.fps))
    settings = _completed(family.FAMILY, prompt, image, settings, progress)
    release_text(loaded, family.FAMILY)
    fitted_for(loaded, "sampling", size_of(settings, prompt, framepack.window), progress)
    remembered = Remembered(keeper)
    with shortage_explained(loaded, family.FAMILY, "sampling", settings):
        return _sampled(
            loaded,
            settings,
            progress,
            lambda: family.sample(loaded, prompt, image, settings, framepack, progress, remembered),
        )


@profiled("decode")
@accounted("decoding")
def decode(
    loaded: Loaded, latents: Latents, progress: Progress, method: str = "auto", form: Form | None = None
) -> torch.Tensor:
    """Frames (F, H, W, 3) in 0..1, as many as were asked for.

    Args:
        method: ``auto`` decodes whole and in smaller parts where that fails; the others do as they say.
        form: the method with its tile, overlap and frames per chunk, in place of ``method``.

    Raises:
        InputError: latents of another family, or not finite. UnsupportedError: what came out cannot be right.
        torch.OutOfMemoryError: not even the smallest way fits.
    """
    family = family_named(loaded.family)
    require_family(latents.family, family.FAMILY, "these latents")
    expected = int(loaded.configs["vae"].get("latent_channels", latents.samples.shape[1]))
    if latents.samples.ndim != 5 or latents.samples.shape[1] != expected:
        raise InputError(
            f"latents of shape {tuple(latents.samples.shape)}",
            expected=f"(1, {expected}, T, H, W) for {family.FAMILY.title}",
            fix="Decode them with the model that made them.",
        )
    release_text(loaded, family.FAMILY)
    chosen = form or Form(method)
    hint = "" if chosen.method in ("auto", "streaming", "cpu") else "set method to auto, which goes on in smaller parts"
    with shortage_explained(loaded, family.FAMILY, "decoding", latents, hint):
        frames = family.decode(loaded, latents, progress, chosen)[: latents.frames]
    if loaded.speed is not None:
        loaded.speed.say_decoded(progress)
    return frames


def with_decode_noise(loaded: Loaded, latents: Latents, timestep: float, scale: float, progress: Progress) -> Latents:
    """``latents`` that are decoded at ``timestep`` after noise of ``scale`` was put on them; below 0 the model's own.

    Raises:
        InputError: above 1.
    """
    asked = {"decode_timestep": timestep, "decode_noise_scale": scale}
    asked = {name: value for name, value in asked.items() if value >= 0}
    for name, value in asked.items():
        if value > 1.0:
            raise InputError(f"{name} {value}", expected="0 to 1, or -1", fix="The nearest valid value is 1.")
    if asked and not loaded.configs["vae"].get("timestep_conditioning"):
        progress.say(f"no effect of {' and '.join(asked)}: this VAE removes no noise")
    return replace(latents, extra={**latents.extra, **asked}) if asked else latents


def of_checkpoint(loaded: Loaded) -> Family:
    """The loaded family, with this checkpoint's own defaults where the family's module knows of some."""
    module = family_named(loaded.family)
    family: Family = module.FAMILY
    return replace(family, defaults=module.defaults_for(loaded)) if hasattr(module, "defaults_for") else family


def release_text(loaded: Loaded, family: Family) -> None:
    """Take the text encoders off the device; where that is the host, free their memory."""
    for part in family.text_parts:
        loaded.residency.release(part)


def size_of(settings: SampleSettings, prompt: Prompt, window: int = 9) -> Size:
    """The size of a run, for forecasts."""
    guided = settings.cfg > 1.0
    return Size(settings.width, settings.height, settings.frames, guided, window, tokens_in(prompt))


def tokens_in(prompt: Prompt) -> int:
    """The tokens of a prompt, or of its negative where that is longer."""
    both = (prompt.embeds, prompt.negative or {})
    return max(sum(states.shape[1] for states in text.values() if states.ndim == 3) for text in both)


def report_unused(family: Family, request: Any, names: tuple[str, ...], progress: Progress) -> None:
    """Say which of the inputs ``names`` were set although this family does nothing with them."""
    for name in names:
        value = getattr(request, name)
        neutral = any(
            value is item or (not isinstance(value, torch.Tensor) and value == item) for item in NEUTRAL[name]
        )
        if name not in family.effective and not neutral:
            progress.say(f"{name} has no effect on {family.title}")


def require_family(found: str, family: Family, subject: str) -> None:
    """Raise when ``found`` is another family than the one that is loaded."""
    if found != family.id:
        raise InputError(
            f"{subject} made for {found!r}",
            expected=f"made for {family.id!r}",
            fix=f"Connect the {family.title} pipeline's own nodes all the way, or load the {found} model.",
        )


def _sampled(loaded: Loaded, settings: SampleSettings, progress: Progress, run: Callable[[], Latents]) -> Latents:
    """What ``run`` samples; begun again with more room, or in fp32, where it could not begin or its values broke."""
    return roomier(
        loaded,
        progress,
        ("transformer",),
        "sampling",
        lambda: with_fallback(loaded, progress, lambda: sped_up(loaded, settings, progress, run)),
    )


def _picture_size(loaded: Loaded, frames: torch.Tensor, request: ImageRequest, fit: str) -> tuple[int, int]:
    """Width and height in pixels for an image: what is asked, or what the family's module chooses for its shape."""
    module = family_named(loaded.family)
    if fit == "nearest bucket" and not (request.width and request.height) and hasattr(module, "nearest_size"):
        width, height = module.nearest_size(loaded, frames.shape[2], frames.shape[1])
        return int(width), int(height)
    return fitted_size(of_checkpoint(loaded), frames, request.width, request.height, fit)


def _completed(
    family: Family, prompt: Prompt, image: ImageCondition | None, settings: SampleSettings, progress: Progress
) -> SampleSettings:
    """``settings`` with defaults filled in, on the family's grid, and checked against what it is used with."""
    require_family(prompt.family, family, "a prompt")
    report_unused(
        family,
        settings,
        ("guidance", "cfg", "cfg_start", "cfg_end", "shift", "guidance_rescale", "sigmas", "latents", "noise_mask"),
        progress,
    )
    if settings.sigmas is not None and (settings.steps or settings.shift):
        progress.say("steps and shift have no effect beside sigmas")
    if image is not None:
        settings = replace(settings, width=settings.width or image.width, height=settings.height or image.height)
    size = snap(family, settings.width, settings.height, settings.frames)
    if size.said:
        progress.say(size.said)
    defaults = family.defaults
    settings = replace(
        settings,
        width=size.width,
        height=size.height,
        frames=size.frames,
        fps=settings.fps or defaults.fps,
        steps=check_steps(family, settings.steps if settings.sigmas is None else len(settings.sigmas) - 1),
        guidance=settings.guidance or defaults.guidance,
        cfg=settings.cfg or defaults.cfg,
    )
    _in_share(settings)
    if settings.cfg <= 1.0 and prompt.opposed:
        progress.say(f"the negative prompt has no effect at cfg {settings.cfg:g}: it needs more than 1")
    if settings.cfg > 1.0 and prompt.negative is None:
        raise InputError(
            f"cfg {settings.cfg} without a negative prompt",
            expected="a negative prompt, which may be an empty text",
            fix="Connect the negative conditioning, or set cfg to 1.",
        )
    if settings.scheduler not in family.schedulers:
        raise InputError(
            f"scheduler {settings.scheduler!r} for {family.title}",
            expected=f"one of {', '.join(family.schedulers)}",
            fix="Choose auto.",
        )
    if image is not None:
        require_family(image.family, family, "an image condition")
        for name, tensor in image.tensors.items():
            require_finite(tensor, f"image condition ({name})")
        if (image.width, image.height) != (settings.width, settings.height):
            raise InputError(
                f"an image condition of {image.width}x{image.height} for a video of {settings.width}x{settings.height}",
                expected="one size",
                fix="Connect width and height of Encode Image to the sample node.",
            )
    return _with_latents(family, settings, progress)


def _in_share(settings: SampleSettings) -> None:
    for name in ("cfg_start", "cfg_end", "denoise"):
        value = getattr(settings, name)
        if not 0.0 <= value <= 1.0:
            raise InputError(
                f"{name} {value}", expected="0 to 1", fix=f"The nearest valid value is {min(max(value, 0.0), 1.0)}."
            )
    if settings.cfg_start > settings.cfg_end:
        raise InputError(
            f"cfg_start {settings.cfg_start} after cfg_end {settings.cfg_end}",
            expected="start before end",
            fix="Swap them.",
        )
    if settings.fps <= 0 or settings.fps > 240:
        raise InputError(f"fps {settings.fps}", expected="more than 0, at most 240", fix="The usual value is 24.")


def _with_latents(family: Family, settings: SampleSettings, progress: Progress) -> SampleSettings:
    latents = settings.latents
    if latents is None or "latents" not in family.effective:
        if settings.denoise < 1.0:
            progress.say("denoise has no effect without latents")
        return replace(settings, latents=None, denoise=1.0)
    require_family(latents.family, family, "the latents to start from")
    require_finite(latents.samples, "latents to start from")
    empty = fault_in_latents(latents.samples)
    if empty and settings.denoise < 1.0:
        progress.say(f"the latents to start from are {empty}: was the video encoded by a VAE of this model?")
    if settings.denoise == 0.0:
        raise InputError(
            "denoise 0", expected="more than 0, at most 1", fix="0 would return the input: use 0.3 to 0.8."
        )
    found, asked = (latents.width, latents.height, latents.frames), (settings.width, settings.height, settings.frames)
    if found != asked:
        progress.say("size {}x{}, {} frames taken from the latents".format(*found))
    return replace(settings, width=found[0], height=found[1], frames=found[2])


def _require_image(loaded: Loaded, family: Family, image: ImageCondition | None) -> None:
    if loaded.task == "image" and image is None and family.image_required:
        raise InputError(
            f"no image for {family.title} {loaded.variant}",
            expected="an image condition",
            fix="Connect AnyGPU Encode Image: this checkpoint is image to video.",
        )
    if loaded.task == "text" and image is not None and family.image_required:
        raise InputError(
            f"an image for the text-to-video checkpoint {loaded.source.name!r}",
            expected="no image",
            fix="Load the image-to-video checkpoint of this family, or remove the image.",
        )
