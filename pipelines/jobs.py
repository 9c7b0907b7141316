"""Runs jobs through the stages, and makes the video of a receipt again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..compat.errors import InputError
from . import stages
from .base import FramePackSettings, ImageRequest, Latents, Progress, SampleSettings, Silent
from .demo.stand_in import own_inputs
from .files.single_file import Files
from .forecast import page
from .latents import recovery
from .latents.steps import FOLDER, SavedSteps
from .latents.store import load_latent
from .load import lora
from .load.folder import load_placed
from .movie import Check, write_mp4
from .pictures import picture_size, video_size
from .pipeline import DEMOS, Pipeline
from .records import receipts
from .records.job import Content, Result, VideoJob, encoding_of
from .records.places import Machine
from .requests import LoadRequest, load_request
from .sampling.resume import LeaderStore, StepStore
from .settings import clip_frames, of_checkpoint, with_step_cache
from .sizes import Size
from .vae.draft import tiny_decoder
from .vae.fallback import decoding
from .vae.plan import DRAFT, DecodeRequest, ladder_for
from .vae.tiled import serve

VIDEO_FIT = "crop"


@dataclass(frozen=True, slots=True)
class Rendered:
    """The video of a job, decoded as ``form`` says: ``frames`` (F, H, W, 3) in 0..1."""

    frames: torch.Tensor
    latents: Latents
    form: DecodeRequest

    @property
    def receipt(self) -> dict[str, Any] | None:
        return receipts.decoded_receipt(self.latents, self.form)

    def write(self, path: Path) -> Path:
        return write_mp4(self.frames, self.latents.fps, path, receipts.tags_for(self.receipt))


def request_of(job: VideoJob, machine: Machine, check: Check | None = None) -> LoadRequest:
    """The request with which this machine loads the job's model; CheckpointError where a file of the job is missing."""
    find = partial(machine.places.model, check=check)
    parts = {part: find(content) for part, content in job.files.items()}
    single = replace(machine.single or Files({}), parts=parts, task=job.task, known=job.resolved_model)
    return load_request(
        job.load,
        machine.trace,
        model=parts.get("transformer") or find(job.model),
        base=None if job.base is None else find(job.base),
        image_encoder=None if job.image_encoder is None else find(job.image_encoder),
        files=single if parts else None,
        device=machine.device,
        cards=machine.cards,
        search=tuple(root for root in machine.places.models if root != DEMOS),  # no part of a published model is there
        state=machine.state,
        earlier=(job.resolved_variant, job.resolved_recipe),
    )


def load_pipeline(job: VideoJob, machine: Machine, progress: Progress, request: LoadRequest | None = None) -> Pipeline:
    """The pipeline of a job, with its LoRAs and step cache; ``request`` is by default from :func:`request_of`."""
    pipeline = load_placed(request or request_of(job, machine, progress.check), progress, **machine.host)
    for adapter in job.loras:
        path = machine.places.model(adapter.file, progress.check)
        pipeline = lora.with_lora(pipeline, path, adapter.strength, adapter.blocks, adapter.mode, progress)
    return with_step_cache(pipeline, job.step_cache.preset, job.step_cache.settings)


def run(job: VideoJob, machine: Machine, progress: Progress, pipeline: Pipeline) -> Rendered:
    """Render a job with its pipeline, or that of another job of the same ``model_key``; raises what a stage raises.
    In a group every process calls this, and only the leader gets the frames."""
    ladder_for(pipeline, (1, 1, 1), job.decode, room=0)  # refuses before the sampling, not after
    if job.decode.method == DRAFT:
        tiny_decoder(pipeline.spec, machine.places.models)
    with torch.no_grad():
        latents = sample(job, machine, progress, pipeline)
        latents = stages.with_decode_noise(pipeline, latents, job.decode_timestep, job.decode_noise_scale, progress)
        return Rendered(decoded(pipeline, latents, progress, job.decode, machine.places.models), latents, job.decode)


def render(job: VideoJob, machine: Machine, progress: Progress, loaded: Sequence[Pipeline]) -> Result:
    """The video of a job as an MP4 with its receipt; the first of ``loaded`` is the pipeline for :func:`run`."""
    made = run(job, machine, progress, loaded[0])
    return Result(made.frames, ".mp4", made.write)


def decoded(
    pipeline: Pipeline, latents: Latents, progress: Progress, form: DecodeRequest, folders: Sequence[Path] = ()
) -> torch.Tensor:
    """Frames (F, H, W, 3) in 0..1. In a group every rank decodes regions, and all but the leader return no frames."""
    group = pipeline.run.group
    if group is not None and not group.leads:
        with decoding(pipeline, latents.samples.shape, progress) as passes:
            serve(group, passes.region)
        return latents.samples.new_empty(0)
    try:
        return stages.decode(pipeline, latents, progress, form=form, tiny_decoders=folders)
    finally:
        if group is not None:
            group.world.shared(None)  # tells the other ranks' ``serve`` to return


def sample(job: VideoJob, machine: Machine, progress: Progress, pipeline: Pipeline) -> Latents:
    """Sample a job's latents (going on from saved steps or sections), save them before a later step can fail, tell the
    user under which name, and return them, upscaled if the job says so. InputError for FramePack without an image."""
    group, job = pipeline.run.group, as_run(job, pipeline, progress.notify)
    before = _sampled_before(job, machine, progress, pipeline)
    image, start = pipeline.on_leader(lambda: _images(job, machine, progress, pipeline, before))
    asked = replace(job.prompt, image=start if "image" in pipeline.spec.recipes.effective else None)
    prompt = pipeline.on_leader(lambda: stages.encode_prompt(pipeline, asked, progress))
    sampled = job.sampled
    size = job.settings if before is not None else image or sampled  # of a second pass, that of the decoded frames
    source = before or pipeline.on_leader(lambda: _video(job, machine, progress, pipeline))
    given: dict[str, Any] = {"width": size.width, "height": size.height, "latents": source}
    settings, wanted = replace(sampled, **given), replace(job.settings, **given)  # to sample with; for the receipt
    store, saved = machine.state / "kept", ""
    unfinished = machine.unfinished or store
    steps: StepStore = SavedSteps(unfinished / FOLDER, progress.notify, keeps=machine.unfinished is not None)
    steps = steps if group is None else LeaderStore(group, steps)
    if not pipeline.spec.recipes.sections:
        latents = stages.sample(pipeline, prompt, image, settings, progress, steps)
        latents = receipts.with_receipt(latents, pipeline, prompt, image, wanted, video=job.video)
    elif image is None:
        raise InputError("no image for FramePack", expected="a start image", fix="Add --image FILE.")
    else:
        framepack = job.framepack
        assert framepack is not None  # as_run gives one to a family that samples in sections
        with_receipt = partial(
            receipts.with_receipt, pipeline=pipeline, prompt=prompt, image=image, settings=wanted, framepack=framepack
        )
        keeper = recovery.SavedSections(unfinished, progress.notify, describe=with_receipt)
        sections = keeper if group is None else LeaderStore(group, keeper)
        latents = stages.sample_framepack(pipeline, prompt, image, settings, framepack, progress, sections, steps)
        latents = with_receipt(latents)
        saved = next((name for name in keeper.names.values() if (store / f"{name}.safetensors").is_file()), "")
    if not saved and (group is None or group.leads):
        saved = recovery.save(store, latents, progress.notify)
    if saved and not machine.host:  # ComfyUI lists them, and has no flags
        progress.notify(f"the latents are kept: --recover {saved} decodes them again")
    for content in job.upscalers:
        path = machine.places.model(content, progress.check)
        larger = pipeline.on_leader(partial(stages.upscale, pipeline, latents, path, progress))
        latents = receipts.with_upscaler(latents, larger, path, machine.state)
    return latents


def as_run(job: VideoJob, pipeline: Pipeline, notify: Callable[[str], None]) -> VideoJob:
    """``job`` with FramePack settings or none, by its family, and a demo model's own sizes and prompt; says so."""
    sections = (job.framepack or FramePackSettings(clip_seconds=5.0)) if pipeline.spec.recipes.sections else None
    if job.framepack is not None and sections is None:
        notify(f"seconds and sections have no effect on {pipeline.spec.title}: its length is in frames")
    if sections is not None and job.settings.frames not in (0, clip_frames(pipeline, sections, job.settings.fps)):
        notify(f"frames has no effect on {pipeline.spec.title}: its length is in seconds")
    asked: list[Any] = [job.prompt, job.settings, *([] if sections is None else [sections])]
    given = {item.name: getattr(part, item.name) for part in asked for item in fields(part)}
    own = own_inputs(pipeline, {**given, "fit": job.fit}, notify)
    prompt, settings, *rest = (replace(part, **{item.name: own[item.name] for item in fields(part)}) for part in asked)
    return replace(job, prompt=prompt, settings=settings, framepack=next(iter(rest), None), fit=own["fit"])


def planned_size(job: VideoJob, machine: Machine, pipeline: Pipeline) -> tuple[Size, SampleSettings]:
    """The size that a run of ``job`` samples, and its settings; pictures are read for their shape, nothing is encoded.
    Raises CheckpointError for a picture that is not here, InputError for a size out of range."""
    progress = Silent()
    job = as_run(job, pipeline, progress.notify)
    settings, usual = job.sampled, of_checkpoint(pipeline).sizes.defaults
    width, height, frames, clip = settings.width, settings.height, settings.frames, False
    if job.pictures:
        picture = _frames("image", job.pictures[0].file, job, machine, progress, pipeline)
        if job.resolved is None:  # else its settings already have the size made for the picture
            width, height = picture_size(pipeline, picture, width, height, job.fit)
        clip = len(picture) > 1
    if job.video is not None:
        video = _frames("images", job.video, job, machine, progress, pipeline)
        width, height, frames = video_size(pipeline, video, width, height, VIDEO_FIT)
    if job.framepack is not None:
        frames = clip_frames(pipeline, job.framepack, settings.fps)
    size = page.planned_size(pipeline, width, height, frames, (settings.cfg or usual.cfg) > 1.0)
    return (size if job.framepack is None else replace(size, window=job.framepack.window, clip=clip)), settings


def _frames(
    name: str, content: Content, job: VideoJob, machine: Machine, progress: Progress, pipeline: Pipeline
) -> torch.Tensor:
    """Frames (F, H, W, 3) in 0..1 of a job's picture (``image``) or video (``images``), or of a demo model's own."""
    frames, _ = machine.places.frames(content, progress.check)
    return own_inputs(pipeline, {name: frames, "fit": job.fit}, progress.notify)[name]


def _sampled_before(job: VideoJob, machine: Machine, progress: Progress, pipeline: Pipeline) -> Latents | None:
    """Latents of the job's first pass, for which its own pipeline is loaded if the model differs; None without one."""
    if job.first is None:
        return None
    same = job.first.model_key == job.model_key
    return sample(job.first, machine, progress, pipeline if same else load_pipeline(job.first, machine, progress))


def _images(
    job: VideoJob, machine: Machine, progress: Progress, pipeline: Pipeline, before: Latents | None
) -> tuple[Any, torch.Tensor | None]:
    """A job's pictures as one condition, at its size or that of ``before``, and the first picture; else two None."""
    condition, start = None, None
    for picture in job.pictures:
        frames = _frames("image", picture.file, job, machine, progress, pipeline)
        start = frames if start is None else start
        how = encoding_of(picture) | {"seed": job.settings.seed if picture.seed < 0 else picture.seed}
        request = ImageRequest(frames, job.sampled.width, job.sampled.height, previous=condition, **how)
        condition = stages.encode_image(pipeline, request, job.fit, progress, before, exact=job.resolved is not None)
    return condition, start


def _video(job: VideoJob, machine: Machine, progress: Progress, pipeline: Pipeline) -> Latents | None:
    """The latents of a job's video, encoded at the size of its settings; None for a job without one."""
    if job.video is None:
        return None
    frames, size = _frames("images", job.video, job, machine, progress, pipeline), job.settings
    return stages.encode_video(pipeline, frames, size.width, size.height, VIDEO_FIT, size.seed, progress)


def replay(path: Path, machine: Machine, progress: Progress) -> receipts.Replayed:
    """Render the video of the receipt in ``path`` again and compare the latents; a file of the same name but other
    content is taken, and reported. PackError for a receipt that says too little, an absent file, or a refusal."""
    record = receipts.read_receipt(path)
    job = receipts.job_of(record, VideoJob)
    machine.places.differences = differences = []
    if not job.model.whole:
        progress.notify(f"{job.model.name!r} is known by samples of its bytes alone: the receipt has no hash of all")
    with torch.no_grad():
        pipeline = load_pipeline(job, machine, progress)
        differences += receipts.differences_from(record, pipeline)
        for line in differences:
            progress.notify(f"differs: {line}")
        made = run(job, machine, progress, pipeline)
    expected = record.get("latents")
    same = receipts.latents_hash(made.latents) == expected if isinstance(expected, str) else None
    if path.suffix in receipts.LATENT_FILES and same is False:
        stored = load_latent(path, progress.notify)["samples"]
        if stored.shape == made.latents.samples.shape:
            largest = float((stored - made.latents.samples).abs().max())
            differences.append(f"latents by at most {largest:.3g} of {float(stored.abs().max()):.3g}")
    return receipts.Replayed(made, same, tuple(dict.fromkeys(differences)))
