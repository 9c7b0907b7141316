"""Renders jobs: finds their models and pictures on this machine, and runs them through the stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ..compat.checkpoints.identity import content_of
from ..compat.errors import CheckpointError, InputError
from . import stages
from .base import DEMOS, FramePackSettings, ImageRequest, Latents, Pipeline, Progress, SampleSettings, Silent
from .demo.stand_in import own_inputs
from .job_folder import inside
from .job_format import Content, Job, Picture
from .latents import recovery
from .latents.steps import FOLDER, KeptSteps
from .loading import lora
from .loading.folder import LoadRequest, find_models
from .loading.single_file import Files
from .memory import page
from .memory.estimates import Size
from .movie import Allowance, content_in, read_frames
from .placement import load_placed
from .receipts import with_receipt
from .requests import load_request
from .sampling.resume import LeaderSections, LeaderSteps, StepStore
from .settings import of_checkpoint
from .speed import with_step_cache
from .vae.fallback import serve_decoding
from .vae.plan import Form
from .vae.shared import dismiss

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tiff", ".mp4", ".webm", ".mkv", ".mov", ".gif")
VIDEO_FIT = "crop"
# The demo models of version 0.1.0, whose weights were in bf16, by content.
FORMER_DEMOS = dict.fromkeys(
    (
        "17a349e9ce546016318eb3d29c7ce9a1",
        "61594e49d3fa6f0c98bf89342a9d6d2d",
        "956f5c6bb644a92bb9a673f278968a46",
        "648893e3cc274a2949595e8c540b4d38",
        "6106608de0ad712a5f8110791336b3bf",
        "53fdd7823afbffa95aa37ed82194ce1a",
    ),
    "0.1.0",
)
MOST_PICTURES = 500  # of a folder in which a picture is searched by its content
MOST_SOUGHT = 2**33  # pixels that one such search decodes: 2,071 frames of 1920x1080, each counted and then hashed


@dataclass(slots=True)
class Places:
    """Where the contents that jobs name are on this machine.

    Args:
        models: folders in which models and LoRAs are searched.
        files: folders with pictures and videos.
        known: paths that were chosen, by content.
        differences: what stands in for a content that is not here, by name; None to refuse that.
        state: folder with the index of pictures; None for none.
    """

    models: tuple[Path, ...] = ()
    files: tuple[Path, ...] = ()
    known: dict[Content, Path] = field(default_factory=dict)
    differences: list[str] | None = None
    state: Path | None = None

    def content(self, path: Path, name: str = "") -> Content:
        """The content of a model or LoRA at ``path``, which is then known."""
        content = Content(name or path.name, content_of(path))
        self.known[content] = path
        return content

    def picture(self, path: Path) -> Content:
        """The content of a picture or video, which is then known.

        Raises:
            CheckpointError: it cannot be decoded, or has more pixels than are read at once.
        """
        from .picture_index import PictureIndex

        index = PictureIndex(self.state)
        found = index.content(path, lambda: None, Allowance())
        index.save()
        content = Content(path.name, found or content_in(path, lambda: None, Allowance()))
        self.known[content] = path
        return content

    def model(self, content: Content) -> Path:
        """The model folder, or the file, with this content.

        Raises:
            CheckpointError: it is not on this machine.
        """
        if content in self.known:
            return self.known[content]
        paths = inside(self.models, content.name)
        if paths:
            base = escape(PurePosixPath(content.name).name)
            paths += [path for root in self.models for path in root.rglob(base)]
        path = self._first(content, paths, content_of)
        if path is None and content.content:
            path = self._first(content, find_models(self.models), content_of)
        return path or self._other(content, paths, self.models, "Copy it there")

    def frames(self, content: Content, check: Callable[[], None] = lambda: None) -> tuple[torch.Tensor, float]:
        """Frames and rate of the picture or video with this content; ``check`` may raise to cancel.

        Raises:
            CheckpointError: it is not on this machine, or was not found in :data:`MOST_SOUGHT` pixels.
        """
        if content not in self.known:
            self.known[content] = self._sought(content, check)
        return read_frames(self.known[content], check=check)

    def _sought(self, content: Content, check: Callable[[], None]) -> Path:
        """The picture with this content, found by its name or among all."""
        from .picture_index import PictureIndex

        paths = [path for path in inside(self.files, content.name) if path.is_file()]
        index, allowance = PictureIndex(self.state), Allowance(MOST_SOUGHT)

        def hashed(path: Path) -> str:
            check()
            return index.content(path, check, allowance) if allowance.left > 0 else ""

        try:
            path = self._first(content, paths, hashed)
            if path is None and content.content:
                path = self._first(content, [path for root in self.files for path in _pictures(root)], hashed)
        finally:
            index.save()
        fix = "Put the picture beside the job file"
        if allowance.left <= 0:
            fix += f", under its name: the search ends after {MOST_SOUGHT:,} pixels"
        return path or self._other(content, paths, self.files, fix)

    def _first(self, content: Content, paths: list[Path], hashed: Callable[[Path], str]) -> Path | None:
        for path in dict.fromkeys(paths):
            if path.exists() and (not content.content or hashed(path) == content.content):
                self.known[content] = path
                return path
        return None

    def _other(self, content: Content, paths: list[Path], roots: tuple[Path, ...], fix: str) -> Path:
        """What has the name alone, where that is allowed."""
        version = FORMER_DEMOS.get(content.content)
        if version:
            fix = f"It is the demo model of version {version}: install that one, or make the job again"
        path = next((path for path in paths if path.exists()), None)
        if path is not None and self.differences is not None:
            why = f", with the demo model of version {version}" if version else ""
            self.differences.append(f"{content.name!r} has other content here than where it was made{why}")
            self.known[content] = path
            return path
        where = ", ".join(map(str, roots)) or "no folder"
        seen = f"{content.name!r} with other content in {where}" if path else f"no {content.name!r} in {where}"
        raise CheckpointError(seen, expected=f"content {content.content or 'of that name'}", fix=f"{fix}.")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a job runs.

    Args:
        places: where its models and pictures are.
        state: folder for probe results and kept latents.
        device: None for the default device.
        trace: file for a profile; None for none.
        host: further arguments of ``load``: how a host around us frees memory and moves weights.
        single: what else pipelines of single files may take: other files, tokenizers.
        unfinished: folder for steps and sections of samplings that were cut short, which other machines may share; None
            for the one with the kept latents.
        cards: as :class:`LoadRequest` has them.
    """

    places: Places
    state: Path
    device: Any = None
    trace: Path | None = None
    host: Mapping[str, Any] = field(default_factory=dict)
    single: Files | None = None
    unfinished: Path | None = None
    cards: Mapping[torch.device, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a job made: ``frames`` (F, H, W, 3) in 0..1; ``kept``, the id of its latents in the recovery store."""

    frames: torch.Tensor
    latents: Latents
    kept: str


def request_of(job: Job, machine: Machine) -> LoadRequest:
    """What the job asks of loading on this machine.

    Raises:
        CheckpointError: a model is not on this machine.
    """
    find = machine.places.model
    parts = {part: find(content) for part, content in job.files.items()}
    return load_request(
        job.load,
        machine.trace,
        model=parts.get("transformer") or find(job.model),
        base=None if job.base is None else find(job.base),
        image_encoder=None if job.image_encoder is None else find(job.image_encoder),
        files=replace(machine.single or Files({}), parts=parts, task=job.task) if parts else None,
        device=machine.device,
        cards=machine.cards,
        search=tuple(root for root in machine.places.models if root != DEMOS),  # no part of a published model is there
        state=machine.state,
    )


def load_pipeline(job: Job, machine: Machine, progress: Progress, request: LoadRequest | None = None) -> Pipeline:
    """The pipeline of a job, with its LoRAs and its step cache.

    Args:
        request: what :func:`request_of` gave before; None asks it.
    """
    pipeline = load_placed(request or request_of(job, machine), progress, **machine.host)
    for adapter in job.loras:
        path = machine.places.model(adapter.file)
        pipeline = lora.with_lora(pipeline, path, adapter.strength, adapter.blocks, adapter.mode, progress)
    return with_step_cache(pipeline, job.step_cache.preset, job.step_cache.settings)


def run(job: Job, machine: Machine, progress: Progress, pipeline: Pipeline | None = None) -> Rendered:
    """Render a job.

    Args:
        pipeline: of an earlier job with the same ``model_key``; None loads it.

    Of a group, all processes call it, and the leader has the frames.

    Raises:
        PackError: what any of the stages refuses.
    """
    with torch.no_grad():
        pipeline = pipeline or load_pipeline(job, machine, progress)
        latents, kept = sample(job, machine, progress, pipeline)
        latents = stages.with_decode_noise(pipeline, latents, job.decode_timestep, job.decode_noise_scale, progress)
        return Rendered(decoded(pipeline, latents, progress, job.decode), latents, kept)


def decoded(pipeline: Pipeline, latents: Latents, progress: Progress, form: Form) -> torch.Tensor:
    """Frames (F, H, W, 3) in 0..1; of a group all decode regions, and the leader has the frames: none on the others."""
    group = pipeline.group
    if group is None:
        return stages.decode(pipeline, latents, progress, form=form)
    if not group.leads:
        serve_decoding(pipeline, latents.samples.shape, progress)
        return latents.samples.new_empty(0)
    try:
        return stages.decode(pipeline, latents, progress, form=form)
    finally:
        dismiss(group)


def sample(job: Job, machine: Machine, progress: Progress, pipeline: Pipeline) -> tuple[Latents, str]:
    """The latents of a job, saved before anything else can fail, and their id there."""
    group, job = pipeline.group, as_run(job, pipeline, progress.notify)
    image, start = pipeline.on_leader(lambda: _images(job, machine, progress, pipeline))
    asked = replace(job.prompt, image=start if "image" in pipeline.spec.effective else None)
    prompt = pipeline.on_leader(lambda: stages.encode_prompt(pipeline, asked, progress))
    size = (image.width, image.height) if image else (job.settings.width, job.settings.height)
    video = pipeline.on_leader(lambda: _video(job, machine, progress, pipeline))
    settings = replace(job.settings, width=size[0], height=size[1], latents=video)
    store = machine.state / "kept"
    unfinished = machine.unfinished or store
    steps: StepStore = KeptSteps(unfinished / FOLDER, progress.notify)
    steps = steps if group is None else LeaderSteps(group, steps)
    if not pipeline.spec.sections:
        latents = stages.sample(pipeline, prompt, image, settings, progress, steps)
        latents = with_receipt(latents, pipeline, prompt, image, settings, video=job.video)
        kept = recovery.keep(store, latents, progress.notify) if group is None or group.leads else ""
    elif image is None:
        raise InputError("no image for FramePack", expected="a start image", fix="Add --image FILE.")
    else:
        framepack = job.framepack
        assert framepack is not None  # as_run
        signed = partial(
            with_receipt, pipeline=pipeline, prompt=prompt, image=image, settings=settings, framepack=framepack
        )
        keeper = recovery.KeptSections(unfinished, progress.notify, describe=signed)
        sections = keeper if group is None else LeaderSections(group, keeper)
        latents = stages.sample_framepack(pipeline, prompt, image, settings, framepack, progress, sections, steps)
        latents = signed(latents)
        kept = next(iter(keeper.names.values()), "")
    if kept:
        progress.notify(f"the latents are kept: --recover {kept} decodes them again")
    return latents, kept


def as_run(job: Job, pipeline: Pipeline, notify: Callable[[str], None]) -> Job:
    """``job`` with the inputs that its model runs: a demo model has sizes and words of its own, which is said."""
    sections = job.framepack or (FramePackSettings(clip_seconds=5.0) if pipeline.spec.sections else None)
    asked: list[Any] = [job.prompt, job.settings, *([] if sections is None else [sections])]
    given = {item.name: getattr(part, item.name) for part in asked for item in fields(part)}
    own = own_inputs(pipeline, {**given, "fit": job.fit}, notify)
    prompt, settings, *rest = (replace(part, **{item.name: own[item.name] for item in fields(part)}) for part in asked)
    return replace(job, prompt=prompt, settings=settings, framepack=next(iter(rest), None), fit=own["fit"])


def planned_size(job: Job, machine: Machine, pipeline: Pipeline) -> tuple[Size, SampleSettings]:
    """The size that a run of ``job`` samples, and its settings; pictures are read for their shape, nothing is encoded.

    Raises:
        CheckpointError: a picture is not on this machine. InputError: a size out of range.
    """
    progress = Silent()
    job = as_run(job, pipeline, progress.notify)
    settings, usual = job.settings, of_checkpoint(pipeline).defaults
    width, height, frames = settings.width, settings.height, settings.frames
    if job.pictures:
        picture = _picture(job, job.pictures[0], machine, progress, pipeline)
        width, height = stages.picture_size(pipeline, picture, width, height, job.fit)
    if job.video is not None:
        video = _frames(job, machine, progress, pipeline)
        width, height, frames = stages.video_size(pipeline, video, width, height, VIDEO_FIT)
    if job.framepack is not None:
        frames = pipeline.spec.code.frames_for(job.framepack, settings.fps or usual.fps)
    guided = (settings.cfg or usual.cfg) > 1.0
    size = page.planned_size(pipeline, width, height, frames, guided)
    return size if job.framepack is None else replace(size, window=job.framepack.window), settings


def _picture(job: Job, picture: Picture, machine: Machine, progress: Progress, pipeline: Pipeline) -> torch.Tensor:
    """The frames of a job's picture, or those that a demo model starts from."""
    frames, _ = machine.places.frames(picture.file, progress.check)
    own: torch.Tensor = own_inputs(pipeline, {"image": frames, "fit": job.fit}, progress.notify)["image"]
    return own


def _frames(job: Job, machine: Machine, progress: Progress, pipeline: Pipeline) -> torch.Tensor:
    """The frames of a job's video, as many as a demo model draws."""
    assert job.video is not None
    frames, _ = machine.places.frames(job.video, progress.check)
    own: torch.Tensor = own_inputs(pipeline, {"images": frames}, progress.notify)["images"]
    return own


def _images(job: Job, machine: Machine, progress: Progress, pipeline: Pipeline) -> tuple[Any, torch.Tensor | None]:
    """The image condition of a job's pictures, and the first of them."""
    condition, start = None, None
    for picture in job.pictures:
        frames = _picture(job, picture, machine, progress, pipeline)
        start = frames if start is None else start
        request = ImageRequest(
            frames,
            width=job.settings.width,
            height=job.settings.height,
            frame=picture.frame,
            strength=picture.strength,
            previous=condition,
            seed=job.settings.seed if picture.seed < 0 else picture.seed,
        )
        condition = stages.encode_image(pipeline, request, job.fit, progress)
    return condition, start


def _video(job: Job, machine: Machine, progress: Progress, pipeline: Pipeline) -> Latents | None:
    """The latents of the video that a job starts from; None without one."""
    if job.video is None:
        return None
    frames, size = _frames(job, machine, progress, pipeline), job.settings
    return stages.encode_video(pipeline, frames, size.width, size.height, VIDEO_FIT, size.seed, progress)


def _pictures(folder: Path) -> list[Path]:
    """The pictures and videos in a folder, not deeper; the first :data:`MOST_PICTURES` by name."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES and path.is_file())
    except OSError:
        return []
    return paths[:MOST_PICTURES]
