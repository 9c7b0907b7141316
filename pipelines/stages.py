"""The stages that nodes and the command line call. Each checks the user's input, says what it changed, and runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from ..compat.device.facts import device_fault, gone
from ..compat.device.failures import is_shortage
from ..compat.errors import CheckpointError, InputError, PackError, UnsupportedError, first_line, require_range
from ..compat.memory.parts import tell_once
from ..compat.memory.statistics import TimeLeft, stage_cost
from ..compat.output_check import NotFinite, require_finite
from .base import (
    FINAL,
    FramePackSettings,
    ImageCondition,
    ImageRequest,
    Latents,
    Progress,
    Prompt,
    PromptRequest,
    SampleSettings,
)
from .forecast.counts import batches_of
from .forecast.fit import fit_offload, release_text
from .forecast.seconds import Run, planned_run, work_key
from .forecast.shortage import EXPLAINED, explain_shortage
from .forecast.times import expected, known_or_why
from .pictures import checked_frames, fitted, picture_size, prepared, resized, video_size
from .pipeline import Pipeline, make_room_and_retry
from .records.receipts import sources_of
from .sampling.loop import fall_back_to_fp32, retries, sampling_speed
from .sampling.resume import InMemorySections, SectionStore, StepStore, with_steps
from .settings import (
    clip_frames,
    complete,
    final_size,
    guidance_steps,
    of_checkpoint,
    recipe_of,
    refines,
    report_unused,
    require_family,
    resolved,
)
from .sizes import TRANSFORMER, VAE, Size, default_size, size_of
from .text.t5 import described, texts_of
from .vae.plan import DRAFT, DecodeRequest

P = ParamSpec("P")
R = TypeVar("R")
StageCall = Callable[Concatenate[Pipeline, P], R]
MOST_TOKENS = 1024
MOST_STG = 20
# Not OSError: of a disk or a driver, whose own words say more.
UNEXPECTED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError)
MISFITS = ("shape", "size of tensor", "size mismatch", "channels", "config")  # in an error: not of its configuration
TEXT_HINT = "choose text_device cpu on the load node, which needs none of this memory"


@dataclass(frozen=True, slots=True)
class Stage:
    range: str
    cost: str
    title: str
    part: str  # whose device it computes on

    @property
    def again(self) -> str:
        """Message before a retry, with a placeholder for the change made."""
        return f"{self.title} ran out of memory: again {{}}"


TEXT = Stage("encode prompt", "text", "encoding the prompt", "text_encoder")
IMAGE = Stage("encode image", "image", "encoding the image", VAE)
VIDEO = Stage("encode video", "video", "encoding the video", VAE)
UPSCALING = Stage("upscale latents", "upscaling", "upscaling the latents", "upscaler")
SAMPLING = Stage("sample", "sampling", "sampling", TRANSFORMER)
DECODING = Stage("decode", "decoding", "decoding", VAE)


def explaining(stage: Stage) -> Callable[[StageCall[P, R]], StageCall[P, R]]:
    """Decorator of a stage, whose failures before and after :func:`running` are explained too."""

    def around(function: StageCall[P, R]) -> StageCall[P, R]:
        @wraps(function)
        def call(pipeline: Pipeline, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(pipeline, *args, **kwargs)
            except Exception as error:
                if (explained := _explained(error, stage, pipeline)) is not None:
                    raise explained from error
                raise

        return call

    return around


@explaining(TEXT)
def encode_prompt(pipeline: Pipeline, request: PromptRequest, progress: Progress) -> Prompt:
    """The prompt and its negative as embeddings; afterwards no text encoder is on the transformer's device. Raises
    CheckpointError for an absent encoder, InputError for a wrong template, image or ``max_tokens``."""
    family = pipeline.spec
    missing = [part for part in family.files.text_parts if part not in pipeline.parts.readers]
    if missing:
        found = f"no {missing[0]} for {str(pipeline.model.source)!r}"
        fix = "Download it, or connect AnyGPU Load Prompt or core CONDITIONING instead."
        raise CheckpointError(found, expected=f"the text encoders of {family.title}", fix=fix)
    limit = request.max_tokens or of_checkpoint(pipeline).sizes.defaults.max_tokens
    require_range("max_tokens", limit, 1, MOST_TOKENS, "tokens")
    if request.template and request.template.count("{}") != 1:
        found = f"a template with {request.template.count('{}')} places for the prompt"
        fix = "Write {} where the prompt goes, or leave the template empty."
        raise InputError(found, expected="exactly one {}", fix=fix)
    if request.template_crop >= 0 and not request.template:
        progress.notify("template_crop has no effect without a template")
    image = None if request.image is None else checked_frames(request.image, "the prompt's image")
    report_unused(family, request, ("template", "sections", "image"), progress)
    completed = replace(request, max_tokens=limit, image=image)

    run = partial(planned_run, pipeline, default_size(family), texts=completed)  # a text takes as long for any size
    on_host = pipeline.offloader.device_of(TEXT.part).type == "cpu"
    with running(TEXT, pipeline, progress, hint="" if on_host else TEXT_HINT, run=run):
        fit_offload(pipeline, "text", None, progress)
        try:
            for attempt in retries(make_room_and_retry(pipeline, progress, family.files.text_parts, TEXT.again)):
                with attempt:
                    prompt: Prompt = family.code.encode_prompt(pipeline, completed, progress)
        finally:
            release_text(pipeline, TRANSFORMER)
    seen = request if "image" in family.recipes.effective else replace(request, image=None)
    return replace(prompt, has_negative=bool(request.negative.strip()), extra=texts_of(seen))


def prompt_from_core(pipeline: Pipeline, positive: Any, negative: Any = None) -> Prompt:
    """Core CONDITIONING, lists of one [tensor (1, N, D), dict] as CLIPTextEncode makes them, as a prompt of the family.
    Raises InputError for one that is empty, combined of several, or another model's."""
    family = pipeline.spec
    width = pipeline.configs["transformer"].get(family.files.text_width)

    def encoded(conditioning: Any) -> Mapping[str, torch.Tensor]:
        texts = [entry for entry in conditioning if entry[0] is not None]
        if len(texts) != 1:
            raise InputError(f"CONDITIONING of {len(texts)} texts", expected="one", fix="Connect CLIP Text Encode.")
        embeds, extra = texts[0][:2]
        if width is not None and embeds.shape[-1] != width:
            found, expected = f"CONDITIONING of width {embeds.shape[-1]}", f"width {width}, as {family.title} takes it"
            fix = "Use the text encoder files of this model in the CLIP loader."
            raise InputError(found, expected=expected, fix=fix)
        return family.code.prompt_from_core(embeds, extra)

    other = None if negative is None else encoded(negative)
    return Prompt(pipeline.family, encoded(positive), other, has_negative=negative is not None)


@explaining(IMAGE)
def encode_image(
    pipeline: Pipeline, request: ImageRequest, fit: str, progress: Progress, latents: Latents | None = None,
    exact: bool = False,
) -> ImageCondition:  # fmt: skip
    """The request's pictures, encoded at the size of its previous condition, else of ``latents``, else a size of the
    family's near the request's; ``exact`` keeps to that where the fit ``nearest bucket`` would take the picture's
    shape. InputError for pictures of a wrong kind or size, UnsupportedError for a family that takes none."""
    family = pipeline.spec
    if family.code.encode_image is None:
        found, fix = f"an image for {family.title}", "Load an image-to-video model."
        raise UnsupportedError(found, expected="a text prompt only", fix=fix)
    frames = checked_frames(request.frames, "the image")
    require_range("strength", request.strength, 0, 1)
    previous = request.previous
    if previous is not None:
        require_family(previous.family, family, "the previous image condition")
        width, height = previous.width, previous.height
    elif latents is not None:
        require_family(latents.family, family, "these latents")
        width, height = latents.width, latents.height
    else:
        sized = "crop" if exact and fit == "nearest bucket" else fit
        width, height = picture_size(pipeline, frames, request.width, request.height, sized)
    report_unused(family, request, ("frame", "strength", "vision", "previous", "control", "prepare"), progress)
    request = replace(request, frames=frames, width=width, height=height)
    completed = prepared(pipeline, request, fit, progress, own_shape=latents is None)
    run = partial(planned_run, pipeline, Size(width, height, family.sizes.defaults.frames, clip=len(frames) > 1))
    with running(IMAGE, pipeline, progress, SampleSettings(width, height, len(completed.frames)), run=run):
        for attempt in retries(make_room_and_retry(pipeline, progress, ("image_encoder", "vae"), IMAGE.again)):
            with attempt:
                condition: ImageCondition = family.code.encode_image(pipeline, completed, progress)
    return replace(condition, sources=sources_of(frames, request, fit))


@explaining(VIDEO)
def encode_video(
    pipeline: Pipeline, frames: torch.Tensor, width: int, height: int, fit: str, seed: int, progress: Progress
) -> Latents:
    """Frames (F, H, W, 3) in 0..1, fitted to a size of the family, as latents in core's space to start a sampling from.
    The user is told of frames cut off to fit the family's grid. UnsupportedError for a family that takes no video."""
    family = pipeline.spec
    if family.code.encode_video is None:
        found = f"a video for {family.title}"
        fix = f"Use AnyGPU Encode Image: {family.title} starts from a picture and noise only."
        raise UnsupportedError(found, expected="a start image", fix=fix)
    pictures = checked_frames(frames, "the video")
    width, height, count = video_size(pipeline, pictures, width, height, fit)
    if count != pictures.shape[0]:
        progress.notify(f"frames {pictures.shape[0]} -> {count} ({family.title} needs {family.sizes.stride}n+1 frames)")
    pictures = fitted(pictures[:count], width, height, fit)
    with running(VIDEO, pipeline, progress, SampleSettings(width, height, count)):
        samples = family.code.encode_video(pipeline, pictures, seed, progress)
    size: dict[str, Any] = {"frames": count, "height": height, "width": width}
    return Latents(samples, pipeline.family, "video", **size, fps=of_checkpoint(pipeline).sizes.defaults.fps, seed=seed)


@explaining(SAMPLING)
def sample(
    pipeline: Pipeline, prompt: Prompt, image: ImageCondition | None, settings: SampleSettings, progress: Progress,
    steps: StepStore | None = None,
) -> Latents:  # fmt: skip
    """Sampled latents in core's space; ``steps`` saves unfinished steps, and may resume those of an interrupted run.
    InputError for a prompt, image or latents of another family or size, or a setting out of range; UnsupportedError for
    a family that samples in sections."""
    family = pipeline.spec
    if family.recipes.sections:
        found = f"a {family.title} pipeline in the Sample node"
        fix = f"{family.title} samples section by section: use AnyGPU Sample FramePack."
        raise UnsupportedError(found, expected="the Sample FramePack node", fix=fix)
    recipe, final = recipe_of(pipeline, settings), final_size(settings)
    if recipe is not None and recipe.second is not None and settings.denoise == 1.0 and not pipeline.is_demo:
        progress.notify(f"one of two published passes; the second: {recipe.second.nodes}")
    if final and settings.latents is not None:
        progress.notify(f"decoded frames are resized to {settings.width}x{settings.height}")
        settings = replace(settings, width=settings.latents.width, height=settings.latents.height)  # a picture's too
    completed = complete(of_checkpoint(pipeline, recipe), prompt, image, settings, progress)
    _require_channels(pipeline, completed.latents)
    require_range("stg", max(settings.stg, 0), 0, MOST_STG, "or -1 for the model's own", advice=", the usual one is 1")
    steps_of = settings.guidance_steps or guidance_steps(recipe, settings, completed.cfg)
    if settings.stg > 0 and "stg" in family.recipes.effective and not any(step.stg for step in steps_of):
        progress.notify("stg has no effect: no recipe names blocks that this model could leave out")
    settings = replace(completed, guidance_steps=steps_of)
    _require_image(pipeline, image, refines(settings))
    if settings.denoise < 1 and settings.sigmas is None and recipe is not None and recipe.timesteps:
        least = recipe.timesteps[-2]
        tell_once(progress, f"a share of the distilled schedule goes down to 0; earlier versions began above {least:g}")
    size = size_of(settings, prompt)
    size = replace(size, frames=size.frames + (image.beside if image else 0))  # a condition's clips are tokens too
    if steps is not None:
        pipeline = with_steps(pipeline, steps, progress, SAMPLING.title, settings.seed, prompt, image, settings)
    run = partial(family.code.sample, pipeline, prompt, image, settings, progress)
    latents = _sample(pipeline, settings, size, progress, run)
    return described(replace(latents, extra={**latents.extra, **final, **resolved(settings)}), prompt)


@explaining(SAMPLING)
def sample_framepack(
    pipeline: Pipeline, prompt: Prompt, image: ImageCondition, settings: SampleSettings, framepack: FramePackSettings,
    progress: Progress, keeper: SectionStore | None = None, steps: StepStore | None = None,
) -> Latents:  # fmt: skip
    """FramePack's latents; ``keeper`` saves finished sections, ``steps`` unfinished steps, to resume a stopped run.
    Raises InputError as :func:`sample`, and UnsupportedError for other families."""
    family = pipeline.spec
    if not family.recipes.sections:
        found = f"a {family.title} pipeline in the Sample FramePack node"
        raise UnsupportedError(found, expected="a FramePack pipeline", fix="Use AnyGPU Sample for this model.")
    settings = replace(settings, frames=clip_frames(pipeline, framepack, settings.fps))
    settings = complete(of_checkpoint(pipeline), prompt, image, settings, progress)
    size = replace(size_of(settings, prompt, framepack.window), clip=bool(image and image.beside))
    remembered = InMemorySections(keeper)
    if steps is not None:
        pipeline = with_steps(
            pipeline, steps, progress, "the section", settings.seed, prompt, image, settings, framepack
        )
    run = partial(family.code.sample, pipeline, prompt, image, settings, framepack, progress, remembered)
    latents = _sample(pipeline, settings, size, progress, run)
    return replace(latents, extra={**latents.extra, **resolved(settings)})


def _require_channels(pipeline: Pipeline, latents: Latents | None) -> None:
    """Raise InputError for latents that the pipeline's VAE could not have made."""
    expected = int(pipeline.configs.get("vae", {}).get("latent_channels", 0))
    if latents is not None and (latents.samples.ndim != 5 or expected not in (0, latents.samples.shape[1])):
        found, fix = f"latents of shape {tuple(latents.samples.shape)}", "Use them with the model that made them."
        raise InputError(found, expected=f"(1, {expected}, T, H, W) for {pipeline.spec.title}", fix=fix)


@explaining(DECODING)
def decode(
    pipeline: Pipeline, latents: Latents, progress: Progress, method: str = "auto", form: DecodeRequest | None = None,
    tiny_decoders: Sequence[Path] = (),
) -> torch.Tensor:  # fmt: skip
    """Frames (F, H, W, 3) in 0..1, as many as were asked for. ``form``, the method with its tile, overlap and frames
    per chunk, replaces ``method``; ``tiny_decoders`` are folders in which ``draft`` finds one. InputError for latents
    of another family, or not finite; UnsupportedError for wrong values, or no draft here; CheckpointError for no tiny
    decoder; torch.OutOfMemoryError where not even the smallest way fits."""
    family = pipeline.spec
    require_family(latents.family, family, "these latents")
    _require_channels(pipeline, latents)
    form = form or DecodeRequest(method)
    smallest = form.method in ("auto", "streaming", "cpu", DRAFT)
    hint = "" if smallest else "set method to auto, which continues in smaller parts"
    count, lengths = latents.samples.shape[2], latents.extra.get("section_lengths", ())
    window, sections = latents.extra.get("window", 9), len(lengths)
    if count not in lengths[-1:]:  # these latents are not joined of sections: one decode takes them all
        window, sections = count - 1, 1
    size = Size(latents.width, latents.height, latents.frames, window=window, sections=sections)

    def run() -> Run:
        return replace(planned_run(pipeline, size), form=form)

    drafts = form.method == DRAFT
    with running(DECODING, pipeline, progress, latents, hint, None if drafts else run):
        release_text(pipeline, VAE)
        if drafts:
            from .vae.draft import draft

            for attempt in retries(make_room_and_retry(pipeline, progress, _near(pipeline), DECODING.again)):
                with attempt:
                    frames = draft(pipeline, latents, tiny_decoders, progress)
        else:
            frames = family.code.decode(pipeline, latents, progress, form)
        frames = frames[: latents.frames]
        if all(name in latents.extra for name in FINAL):
            frames = resized(frames, *(latents.extra[name] for name in FINAL))
    if VAE in pipeline.plan.speed.fused and not drafts:
        progress.notify(f"VAE kernels: {pipeline.plan.speed.fused[VAE]}")
    return frames


def _near(pipeline: Pipeline) -> tuple[str]:  # the part that stays for a network outside the pipeline, on its device
    return (VAE if pipeline.offloader.device_of(VAE) == pipeline.offloader.device else TRANSFORMER,)


@explaining(UPSCALING)
def upscale(pipeline: Pipeline, latents: Latents, path: Path, progress: Progress) -> Latents:
    """``latents`` enlarged by the upscaler in the file ``path``, for a second pass. InputError for latents of another
    family, UnsupportedError for a family that has no upscaler."""
    family = pipeline.spec
    require_family(latents.family, family, "these latents")
    if family.code.upscale is None:
        found = f"upscaled latents for {family.title}"
        fix = "Sample at the final size."
        raise UnsupportedError(found, expected="a model with a latent upscaler: LTX-Video, HunyuanVideo 1.5", fix=fix)
    require_finite(latents.samples, "latents")
    with running(UPSCALING, pipeline, progress, latents):
        release_text(pipeline, TRANSFORMER)
        for attempt in retries(make_room_and_retry(pipeline, progress, _near(pipeline), UPSCALING.again)):
            with attempt:
                upscaled: Latents = family.code.upscale(pipeline, latents, path, progress)
    if upscaled.width != latents.width:  # the frames are no longer resized to the size before
        extra = {name: value for name, value in upscaled.extra.items() if name not in FINAL}
        upscaled = replace(upscaled, extra=extra)
    return upscaled


def with_decode_noise(
    pipeline: Pipeline, latents: Latents, timestep: float, scale: float, progress: Progress
) -> Latents:
    """``latents`` that say to decode them at ``timestep`` with noise of ``scale`` added; below 0 is the model's own.
    InputError above 1; the user is told where this VAE takes neither."""
    given = {"decode_timestep": timestep, "decode_noise_scale": scale}
    asked = {name: value for name, value in given.items() if not value < 0}
    for name, value in asked.items():
        require_range(name, value, 0, 1, "or below 0")
    if asked and not pipeline.configs["vae"].get("timestep_conditioning"):
        progress.notify(f"no effect of {' and '.join(asked)}: this VAE does not remove noise")
    return replace(latents, extra={**latents.extra, **asked}) if asked else latents


def _sample(pipeline: Pipeline, settings: Any, size: Size, progress: Progress, draw: Callable[[], Latents]) -> Latents:
    """Return the result of ``draw``; retries in fp32 after broken values, and with more room after a shortage."""
    more_room = make_room_and_retry(pipeline, progress, message=SAMPLING.again)

    def again(error: BaseException) -> bool:
        return fall_back_to_fp32(pipeline, progress, error) or more_room(error)

    asked = Run(size, settings)
    with running(SAMPLING, pipeline, progress, settings, run=lambda: asked):
        release_text(pipeline, TRANSFORMER)
        fit_offload(pipeline, "sampling", size, progress, asked)
        if hasattr(progress, "time_left"):  # a node's, the terminal's
            forwards, _ = known_or_why(lambda: [*map(sum, batches_of(pipeline, settings))])
            progress.time_left[SAMPLING.cost] = TimeLeft(forwards or (1,))
        for attempt in retries(again, catches=(RuntimeError, MemoryError, NotFinite)):
            with attempt, sampling_speed(pipeline, settings, progress):
                latents = draw()
    return latents


def _require_image(pipeline: Pipeline, image: ImageCondition | None, refined: bool) -> None:
    """Raise InputError for an image that is missing (a ``refined`` pass needs none), or that the checkpoint refuses."""
    family = pipeline.spec
    if pipeline.model.task == "image" and image is None and family.files.image_required and not refined:
        found = f"no image for {family.title} {pipeline.variant}"
        fix = "This is an image-to-video checkpoint: connect AnyGPU Encode Image."
        raise InputError(found, expected="an image condition", fix=fix)
    if pipeline.model.task == "text" and image is not None and family.files.image_required:
        found = f"an image for the text-to-video checkpoint {pipeline.model.source.name!r}"
        fix = "Load the image-to-video checkpoint of this family, or remove the image."
        raise InputError(found, expected="no image", fix=fix)


@contextmanager
def running(
    stage: Stage, pipeline: Pipeline, progress: Progress, size: Latents | SampleSettings | None = None, hint: str = "",
    run: Callable[[], Run] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Run a stage inside the block: record its profile range, peak memory, traffic and time, and explain its errors.
    ``size`` is for the advice where memory runs out, None where no video size matters; ``hint`` is a way out of a
    shortage that only this stage has; ``run`` makes the run whose time is forecast, None for no forecast."""
    asked = run() if run is not None and pipeline.offloader.options.state is not None else None
    forecast = {} if asked is None else expected(pipeline, stage.cost, asked)
    device = pipeline.offloader.device_of(stage.part)
    profile = pipeline.plan.speed.request.profile
    with (
        nullcontext() if profile is None else profile.stage(stage.range),
        stage_cost(pipeline, stage.cost, progress, device, **forecast) as cost,
    ):
        try:
            yield
            if forecast and asked is not None:  # named at the end: the stage may have fallen back
                cost.work = work_key(pipeline, stage.cost, asked)
            resuming = pipeline.run.resuming
            if resuming is not None and resuming.skipped:  # resumed: its time measures only a part of the steps
                cost.modelled_seconds = cost.forecast_seconds = 0.0
        except Exception as error:
            if (explained := _explained(error, stage, pipeline, size, hint)) is not None:
                raise explained from error
            raise


def _explained(
    error: Exception, stage: Stage, pipeline: Pipeline, size: Latents | SampleSettings | None = None, hint: str = ""
) -> BaseException | None:
    """An error that tells the user why a stage raised ``error``, and what to do; None where ``error`` says enough."""
    device = pipeline.offloader.device_of(stage.part)
    if isinstance(error, NotFinite) and (silent := device_fault(device)):
        return gone(device, silent)
    if isinstance(error, PackError) or hasattr(error, EXPLAINED):
        return None
    for cause in (error, error.__cause__):  # transformers raises a ValueError from a shortage
        if cause is not None and is_shortage(cause):
            return explain_shortage(cause, pipeline, stage.title, size, hint, device)
    if isinstance(error, (*UNEXPECTED, ImportError)):
        return _unexpected(error, stage, pipeline.model.source, device)
    return None


def _unexpected(error: Exception, stage: Stage, source: Path, device: torch.device) -> UnsupportedError:
    """The error for a lost device, a configuration that does not go with its weights, or a bug."""
    if silent := device_fault(device):
        return gone(device, silent)
    text, report = str(error).lower(), "please report this with the log"
    expected = "no error that AnyGPU does not know"
    fix = f"This is a bug of AnyGPU, or of this device's driver: {report}."
    if isinstance(error, LookupError) or any(word in text for word in MISFITS):
        expected = "a model whose settings belong together"
        fix = f"Compare its JSON files with the published ones; if they are the same, {report}."
    where = f"{stage.title} with {source.name!r}, {stage.part} on {device}"
    return UnsupportedError(f"{type(error).__name__} while {where}: {first_line(error)}", expected=expected, fix=fix)
