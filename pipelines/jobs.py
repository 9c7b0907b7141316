"""A render as one JSON document: the same for the command, nodes, other machines, receipts and replay.

Models, LoRAs, pictures and videos are named by what they contain; their names are hints where to look. What only says
where and how fast a job runs is left out of its key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ..compat.checkpoints.identity import content_of, picture_content
from ..compat.durable import replacing
from ..compat.errors import CheckpointError, InputError
from ..compat.records import FIX, WITHOUT, json_in, parse, plain, shown, wrong
from ..compat.transforms.step_cache import OFF, StepCacheSettings
from . import stages
from .base import FramePackSettings, ImageRequest, Latents, Pipeline, Progress, PromptRequest, SampleSettings
from .family import FITS
from .latents import recovery
from .latents.steps import FOLDER, KeptSteps
from .loading import lora
from .loading.folder import AUTO, LoadRequest, find_models, load
from .loading.single_file import Files
from .movie import read_frames
from .requests import LOAD_INPUTS, load_request
from .speed import with_step_cache
from .vae.plan import Form

VERSION, HEAD, KIND = 1, "anygpu_job", "video"
MOST_BYTES = 16 * 1024**2  # of a job file; the prompts are in it
PLACES = (  # inputs of loading that say where and how fast, not what
    *("offload", "attention", "keep_free_gb", "transformer_device", "text_device", "vae_device", "kernels"),
    *("compile", "compile_mode", "compile_dynamic", "compile_cache_size", "compile_vae"),
)
Value = str | float | int | bool


@dataclass(frozen=True, slots=True)
class Content:
    """A model folder, a file, or pictures.

    Args:
        name: where it may be, below a folder that is searched. content: its hash; empty for whatever has that name.
    """

    name: str
    content: str = ""


CONTENT = {item.name for item in fields(Content)}


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA, as ``with_lora`` takes it."""

    file: Content
    strength: float = 1.0
    blocks: str = ""
    mode: str = lora.MODES[0]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture or clip to start from, as :class:`ImageRequest` takes it."""

    file: Content
    frame: int = 0
    strength: float = 1.0


@dataclass(frozen=True, slots=True)
class Caching:
    """A lossy step cache: its preset, and the numbers of ``custom``."""

    preset: str = OFF
    settings: StepCacheSettings = field(default_factory=StepCacheSettings)


@dataclass(frozen=True, slots=True)
class Job:
    """One render.

    Args:
        model: folder of a pipeline or of a transformer, or the transformer's file where ``files`` names it.
        prompt, settings, framepack, decode: as the stages take them; ``framepack`` for its family alone.
        family: id of the model's family, a hint for people and schedulers.
        base, image_encoder: folders that provide parts; None for ``auto``.
        files: part name to single file, for a pipeline composed of them. task: of such a pipeline.
        load: inputs of loading that are not at their defaults, by the names of ``LOAD_INPUTS``.
        pictures: to start from, in the order in which they join. fit: how they are brought to size.
        video: to start from, in place of noise alone; ``settings.denoise`` says how much of it is redrawn.
        decode_timestep, decode_noise_scale: below 0 the model's own.
    """

    model: Content
    prompt: PromptRequest = field(metadata={WITHOUT: ("image",)})
    settings: SampleSettings = field(metadata={WITHOUT: ("latents", "noise_mask", "guidance_steps")})
    family: str = ""
    base: Content | None = None
    image_encoder: Content | None = None
    files: Mapping[str, Content] = field(default_factory=dict)
    task: str = AUTO
    load: Mapping[str, Value] = field(default_factory=dict)
    loras: tuple[Adapter, ...] = ()
    step_cache: Caching = field(default_factory=Caching)
    pictures: tuple[Picture, ...] = ()
    fit: str = FITS[0]
    video: Content | None = None
    framepack: FramePackSettings | None = None
    decode: Form = field(default_factory=Form)
    decode_timestep: float = -1.0
    decode_noise_scale: float = -1.0

    @property
    def key(self) -> str:
        """A hash of what decides the video: equal on machines whose paths, devices and speeds differ."""
        return _hash(_by_content({**plain(self), "family": ""}))

    @property
    def model_key(self) -> str:
        """A hash of what has to be loaded: jobs that share it can share a pipeline."""
        names = ("model", "base", "image_encoder", "files", "task", "load", "loras", "step_cache")
        return _hash(plain({name: getattr(self, name) for name in names}))

    def record(self) -> dict[str, Any]:
        """The job as JSON has it."""
        return {HEAD: VERSION, "kind": KIND, **plain(self)}


@dataclass(slots=True)
class Places:
    """Where the contents that jobs name are on this machine.

    Args:
        models: folders in which models and LoRAs are searched. files: folders with pictures and videos.
        known: paths that somebody chose, by content.
        differences: what stands in for a content that is not here, by name; None to refuse that.
    """

    models: tuple[Path, ...] = ()
    files: tuple[Path, ...] = ()
    known: dict[Content, Path] = field(default_factory=dict)
    differences: list[str] | None = None

    def content(self, path: Path, name: str = "") -> Content:
        """The content of a model or LoRA at ``path``, which is then known."""
        content = Content(name or path.name, content_of(path))
        self.known[content] = path
        return content

    def picture(self, path: Path) -> Content:
        """The content of a picture or video, which is then known."""
        content = Content(path.name, picture_content(read_frames(path)[0]))
        self.known[content] = path
        return content

    def model(self, content: Content) -> Path:
        """The model folder, or the file, with this content.

        Raises:
            CheckpointError: it is not on this machine.
        """
        if content in self.known:
            return self.known[content]
        paths = _inside(self.models, content.name)
        if paths:
            base = escape(PurePosixPath(content.name).name)
            paths += [path for root in self.models for path in root.rglob(base)]
        path = self._first(content, paths, content_of)
        if path is None and content.content:
            path = self._first(content, find_models(self.models), content_of)
        return path or self._other(content, paths, self.models, "Copy it there")

    def frames(self, content: Content) -> tuple[torch.Tensor, float]:
        """Frames and rate of the picture or video with this content.

        Raises:
            CheckpointError: it is not on this machine.
        """
        if content in self.known:
            return read_frames(self.known[content])
        paths = [path for path in _inside(self.files, content.name) if path.is_file()]
        path = self._first(content, paths, lambda path: picture_content(read_frames(path)[0]))
        return read_frames(path or self._other(content, paths, self.files, "Put the picture beside the job file"))

    def _first(self, content: Content, paths: list[Path], hashed: Callable[[Path], str]) -> Path | None:
        for path in dict.fromkeys(paths):
            if path.exists() and (not content.content or hashed(path) == content.content):
                self.known[content] = path
                return path
        return None

    def _other(self, content: Content, paths: list[Path], roots: tuple[Path, ...], fix: str) -> Path:
        """What has the name alone, where that is allowed."""
        path = next((path for path in paths if path.exists()), None)
        if path is not None and self.differences is not None:
            self.differences.append(f"{content.name!r} has other content here than where it was made")
            self.known[content] = path
            return path
        where = ", ".join(map(str, roots)) or "no folder"
        seen = f"{content.name!r} with other content in {where}" if path else f"no {content.name!r} in {where}"
        raise CheckpointError(seen, expected=f"content {content.content or 'of that name'}", fix=f"{fix}.")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a job runs.

    Args:
        places: where its models and pictures are. state: folder for probe results and kept latents.
        device: None for the default device. trace: file for a profile; None for none.
        host: further arguments of ``load``: how a host around us frees memory and moves weights.
        unfinished: folder for steps and sections of samplings that were cut short, which other machines may share;
            None for the one with the kept latents.
    """

    places: Places
    state: Path
    device: Any = None
    trace: Path | None = None
    host: Mapping[str, Any] = field(default_factory=dict)
    unfinished: Path | None = None


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a job made: ``frames`` (F, H, W, 3) in 0..1; ``kept``, the id of its latents in the recovery store."""

    frames: torch.Tensor
    latents: Latents
    kept: str


def read_job(path: Path) -> Job:
    """The job in a file.

    Raises:
        CheckpointError: the file cannot be read. InputError: it is no job that this version can run; says why.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read", expected="a job file", fix="Give another.") from error
    if len(content) > MOST_BYTES:
        raise InputError(f"{path.name!r} of more than {MOST_BYTES} bytes", expected="a job file", fix="Give another.")
    return job_in(json_in(content, repr(path.name)))


def write_job(path: Path, job: Job) -> Path:
    """Write ``job`` to a file, whole or not at all; returns ``path``."""
    text = json.dumps(job.record(), indent=1, ensure_ascii=False) + "\n"
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # of half a character: JSON's escape
    return path


def job_in(record: Any) -> Job:
    """The job that a JSON object describes.

    Raises:
        InputError: no job, a newer version, an unknown field, or a value of a wrong type.
    """
    if not isinstance(record, dict) or type(record.get(HEAD)) is not int or record[HEAD] < 1:
        raise InputError(f"no job but {shown(record)}", expected=f'an object with "{HEAD}": {VERSION}', fix=FIX)
    if record[HEAD] > VERSION:
        raise InputError(
            f"a job of version {record[HEAD]}", expected=f"version {VERSION} or older", fix="Update AnyGPU."
        )
    if record.get("kind", KIND) != KIND:
        raise wrong("a job of kind", record["kind"], repr(KIND))
    job = parse(Job, {name: value for name, value in record.items() if name not in (HEAD, "kind")}, "the job")
    for name, value in job.load.items():
        if name not in LOAD_INPUTS:
            raise InputError(
                f"unknown field {shown(name)} in the job.load", expected=f"one of {', '.join(LOAD_INPUTS)}", fix=FIX
            )
        kind = type(LOAD_INPUTS[name].default)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise wrong(f"the job.load.{name}", value, f"a value such as {LOAD_INPUTS[name].default!r}")
    return job


def load_inputs(values: Mapping[str, Any]) -> dict[str, Value]:
    """The inputs of loading among ``values`` that are not at their defaults, for :attr:`Job.load`."""
    return {name: values[name] for name, row in LOAD_INPUTS.items() if values.get(name, row.default) != row.default}


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
        files=Files(parts, task=job.task) if parts else None,
        device=machine.device,
        search=machine.places.models,
        state=machine.state,
    )


def load_pipeline(job: Job, machine: Machine, progress: Progress, request: LoadRequest | None = None) -> Pipeline:
    """The pipeline of a job, with its LoRAs and its step cache.

    Args:
        request: what :func:`request_of` gave before; None asks it.
    """
    pipeline = load(request or request_of(job, machine), progress, **machine.host)
    for adapter in job.loras:
        path = machine.places.model(adapter.file)
        pipeline = lora.with_lora(pipeline, path, adapter.strength, adapter.blocks, adapter.mode, progress)
    return with_step_cache(pipeline, job.step_cache.preset, job.step_cache.settings)


def run(job: Job, machine: Machine, progress: Progress, pipeline: Pipeline | None = None) -> Rendered:
    """Render a job.

    Args:
        pipeline: of an earlier job with the same ``model_key``; None loads it.

    Raises:
        PackError: what any of the stages refuses.
    """
    with torch.no_grad():
        pipeline = pipeline or load_pipeline(job, machine, progress)
        latents, kept = sample(job, machine, progress, pipeline)
        latents = stages.with_decode_noise(pipeline, latents, job.decode_timestep, job.decode_noise_scale, progress)
        return Rendered(stages.decode(pipeline, latents, progress, form=job.decode), latents, kept)


def sample(job: Job, machine: Machine, progress: Progress, pipeline: Pipeline) -> tuple[Latents, str]:
    """The latents of a job, saved before anything else can fail, and their id there."""
    image, start = _images(job, machine, progress, pipeline)
    asked = replace(job.prompt, image=start if "image" in pipeline.spec.effective else None)
    prompt = stages.encode_prompt(pipeline, asked, progress)
    size = (image.width, image.height) if image else (job.settings.width, job.settings.height)
    settings = replace(job.settings, width=size[0], height=size[1], latents=_video(job, machine, progress, pipeline))
    store = machine.state / "kept"
    unfinished = machine.unfinished or store
    steps = KeptSteps(unfinished / FOLDER, progress.notify)
    if not pipeline.spec.sections:
        latents = stages.sample(pipeline, prompt, image, settings, progress, steps)
        kept = recovery.keep(store, latents, progress.notify)
    elif image is None:
        raise InputError("no image for FramePack", expected="a start image", fix="Add --image FILE.")
    else:
        keeper = recovery.KeptSections(unfinished, progress.notify)
        framepack = job.framepack or FramePackSettings(clip_seconds=5.0)
        latents = stages.sample_framepack(pipeline, prompt, image, settings, framepack, progress, keeper, steps)
        kept = next(iter(keeper.names.values()), "")
    if kept:
        progress.notify(f"the latents are kept: --recover {kept} decodes them again")
    return latents, kept


def _images(job: Job, machine: Machine, progress: Progress, pipeline: Pipeline) -> tuple[Any, torch.Tensor | None]:
    """The image condition of a job's pictures, and the first of them."""
    condition, start = None, None
    for picture in job.pictures:
        frames, _ = machine.places.frames(picture.file)
        start = frames if start is None else start
        request = ImageRequest(
            frames,
            width=job.settings.width,
            height=job.settings.height,
            frame=picture.frame,
            strength=picture.strength,
            previous=condition,
            seed=job.settings.seed,
        )
        condition = stages.encode_image(pipeline, request, job.fit, progress)
    return condition, start


def _video(job: Job, machine: Machine, progress: Progress, pipeline: Pipeline) -> Latents | None:
    """The latents of the video that a job starts from; None without one."""
    if job.video is None:
        return None
    frames, _ = machine.places.frames(job.video)
    size = job.settings
    return stages.encode_video(pipeline, frames, size.width, size.height, "crop", size.seed, progress)


def _inside(roots: tuple[Path, ...], name: str) -> list[Path]:
    """The paths of ``name`` in ``roots``; none for a name that leads out of them."""
    place = PurePosixPath(name)
    if not name or "\0" in name or "\\" in name or place.is_absolute() or ".." in place.parts or ":" in name:
        return []
    return [root / place for root in roots]


def _by_content(record: Any) -> Any:
    """A record without names where there is a content, and without what says where it runs."""
    if isinstance(record, dict):
        if record.keys() == CONTENT:
            return record["content"]
        return {name: _by_content(value) for name, value in record.items() if name not in PLACES}
    return [_by_content(item) for item in record] if isinstance(record, list) else record


def _hash(record: Any) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
