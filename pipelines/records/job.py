"""A render as one JSON document: the same for the command, nodes, other machines, receipts and replay. Models and
pictures are identified by content, names are hints; placement and speed are left out of a job's key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from ...compat.decision import AUTO
from ...compat.durable import write_file
from ...compat.errors import CheckpointError, InputError
from ...compat.records import FIX, WITHOUT, json_in, parse, plain, shown, versioned, wrong
from ...compat.transforms.step_cache import OFF, StepCacheSettings
from ..base import FramePackSettings, ImageRequest, PictureSource, PromptRequest, SampleSettings
from ..family import FITS
from ..requests import BECAME, LOAD_INPUTS, LORA_MODES
from ..vae.plan import DecodeRequest

VERSION, HEAD = 1, "anygpu_job"
MOST_BYTES = 16 * 1024**2  # of a job file; the prompts are in it
PLACES = (  # inputs of loading that say where and how fast, not what
    *("offload", "attention", "keep_free_gb", "transformer_device", "text_device", "vae_device", "kernels"),
    *("compile", "compile_mode", "compile_dynamic", "compile_cache_size", "compile_vae"),
)
SIZE, LEFT = ("width", "height", "frames"), ("steps", "fps", "guidance", "cfg", "shift", "guidance_steps")  # 0: auto
MOST_PASSES = 3  # over the latents of one video
USUAL_STEPS, USUAL_FRAMES, USUAL_SIDE = 30, 97, 512  # for the size of jobs that leave them to their model
Value = str | float | int | bool


class Job(Protocol):
    """One render of any kind: a frozen dataclass of plain values."""

    kind: ClassVar[str]

    @property
    def key(self) -> str:
        """A hash of all that decides the result: equal on machines whose paths, devices and speeds differ."""

    @property
    def model_key(self) -> str:
        """A hash of all that has to be loaded: jobs that share it can share a pipeline."""

    @property
    def size(self) -> float:
        """The amount of work compared with other jobs of this model, in any unit."""

    @property
    def inputs(self) -> tuple[Content, ...]:
        """The pictures, meshes and videos that it starts from."""

    @property
    def title(self) -> str:
        """Words by which a person knows it."""

    def record(self) -> dict[str, Any]:
        """The job as JSON has it."""
        return {HEAD: VERSION, "kind": self.kind, **plain(self)}


J = TypeVar("J", bound=Job)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a job: its pixels in 0..1, and the ending and the writer of its file."""

    pixels: torch.Tensor
    suffix: str
    write: Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Content:
    """A model folder, a file, or pictures."""

    name: str  # where it may be, below a folder that is searched
    content: str = ""  # the hash by which it is found; empty for whatever has that name
    whole: str = ""  # of a model or mesh, the hash of every byte; empty where only samples are known
    size: tuple[int, ...] = ()  # of pictures, width and height: files of another are not decoded in a search


CONTENT = {item.name for item in fields(Content)}
FOUND_BY = {"name", "content"}


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA, as ``with_lora`` takes it."""

    file: Content
    strength: float = 1.0
    blocks: str = ""
    mode: str = LORA_MODES[0]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture or clip to start from, as :class:`ImageRequest` takes it; ``seed`` below 0 is that of the video."""

    file: Content
    frame: int = 0
    strength: float = 1.0
    seed: int = -1
    control: bool = False
    prepare: bool = True
    final_size: tuple[int, ...] = ()


def encoding_of(one: Picture | PictureSource | ImageRequest) -> dict[str, Any]:
    """Inputs of a picture's encoding, by the names that a job, a receipt and a request have for them."""
    return {item.name: getattr(one, item.name) for item in fields(Picture) if item.name != "file"}


@dataclass(frozen=True, slots=True)
class Caching:
    """A lossy step cache: its preset, and the numbers of ``custom``."""

    preset: str = OFF
    settings: StepCacheSettings = field(default_factory=StepCacheSettings)


@dataclass(frozen=True, slots=True)
class VideoJob(Job):
    """One video."""

    kind: ClassVar[str] = "video"

    model: Content  # folder of a pipeline or of a transformer, or the transformer's file where ``files`` names it
    prompt: PromptRequest = field(metadata={WITHOUT: ("image",)})
    settings: SampleSettings = field(metadata={WITHOUT: ("latents", "noise_mask", "guidance_steps")})
    family: str = ""  # id of the model's family, a hint for people and schedulers
    base: Content | None = None  # folders that provide parts; None for ``auto``
    image_encoder: Content | None = None  # folders that provide parts; None for ``auto``
    files: Mapping[str, Content] = field(default_factory=dict)  # part name to single file
    task: str = AUTO  # of such a pipeline
    load: Mapping[str, Value] = field(default_factory=dict)  # by the names of ``LOAD_INPUTS``; none at its default
    loras: tuple[Adapter, ...] = ()
    step_cache: Caching = field(default_factory=Caching)
    pictures: tuple[Picture, ...] = ()  # to start from, in the order in which they join
    fit: str = FITS[0]  # how they are brought to size
    video: Content | None = None  # to start from; ``settings.denoise`` says how much of it is redrawn
    framepack: FramePackSettings | None = None  # for its family alone
    upscalers: tuple[Content, ...] = ()  # that enlarge what was sampled, one after another
    first: VideoJob | None = None  # whose latents it starts from
    # What ``auto`` became in the run of a receipt, which another run takes.
    resolved: SampleSettings | None = field(default=None, metadata={WITHOUT: ("latents", "noise_mask")})
    resolved_variant: str = ""  # and what ``auto`` became there, whatever the model is called here
    resolved_recipe: str = ""
    resolved_model: str = ""  # name of the published configuration, of a single file
    decode: DecodeRequest = field(default_factory=DecodeRequest)
    decode_timestep: float = -1.0  # below 0 the model's own
    decode_noise_scale: float = -1.0  # below 0 the model's own

    def __post_init__(self) -> None:  # refuses, as InputError, what a job written by hand may have
        if self.files and "transformer" not in self.files:
            found = f"files of the job for {', '.join(sorted(self.files))}"
            raise InputError(found, expected="one for the transformer too", fix=FIX)
        for name, value in self.load.items():
            if name not in LOAD_INPUTS:
                found = f"unknown field {shown(name)} in the job.load"
                raise InputError(found, expected=f"one of {', '.join(LOAD_INPUTS)}", fix=FIX)
            usual = LOAD_INPUTS[name].default  # JSON writes 2.0 as 2
            if type(value) is not type(usual) and not (type(usual) is float and type(value) is int):
                raise wrong(f"the job.load.{name}", value, f"a value such as {usual!r}")

    @property
    def key(self) -> str:
        return _hash(by_content({**plain(self), "family": ""}))

    @property
    def model_key(self) -> str:
        names = ("model", "base", "image_encoder", "files", "task", "load", "loras", "step_cache")
        return _hash(plain({name: getattr(self, name) for name in (*names, *BECAME)}))

    @property
    def sampled(self) -> SampleSettings:
        """The settings to sample with: an earlier run's where they leave something to ``auto``."""
        if self.resolved is None:
            return self.settings
        sized = () if self.first is None else SIZE  # the latents of ``first`` decide it, whatever the settings ask for
        left = [name for name in (*SIZE, *LEFT) if name in sized or not getattr(self.settings, name)]
        left += ["cfg_end"] if "cfg" in left and self.settings.cfg_end == 1.0 else []  # the checkpoint's has both
        return replace(self.settings, **{name: getattr(self.resolved, name) for name in left})

    @property
    def size(self) -> float:
        given = self.settings
        pixels = (given.width or USUAL_SIDE) * (given.height or USUAL_SIDE) * (given.frames or USUAL_FRAMES)
        return float(pixels * (given.steps or USUAL_STEPS) * (2 if given.cfg > 1 else 1))

    @property
    def inputs(self) -> tuple[Content, ...]:
        before = () if self.first is None else self.first.inputs
        return (*before, *(picture.file for picture in self.pictures), *([] if self.video is None else [self.video]))

    @property
    def title(self) -> str:
        return f"{self.prompt.text[:40]} {self.settings.seed}"


def read_job(path: Path) -> VideoJob:
    """The job in a file. Raises CheckpointError for one that cannot be read, InputError for one that cannot run."""
    needed = {"expected": "a job file", "fix": "Choose another file."}
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read", **needed) from error
    if len(content) > MOST_BYTES:
        raise InputError(f"{path.name!r} of more than {MOST_BYTES} bytes", **needed)
    return job_in(json_in(content, repr(path.name)))


def write_job(path: Path, job: VideoJob) -> Path:
    """Write ``job`` to a file, whole or not at all; returns ``path``."""
    return write_file(path, json.dumps(job.record(), indent=1, ensure_ascii=False) + "\n")


def job_in(record: Any) -> VideoJob:
    """The video's job that a JSON object describes. Raises InputError for no job, a newer version, another kind, an
    unknown field, or a value of a wrong type."""
    return parsed(VideoJob, record)


def job_on(line: str, *kinds: type[Job]) -> Job:
    """The job of one line of a job file, of one of ``kinds`` (of the first, which refuses any other kind); raises as
    :func:`job_in`, and InputError for a line beyond MOST_BYTES."""
    if len(line) > MOST_BYTES:
        raise InputError(f"a line of {len(line)} characters", expected=f"{MOST_BYTES} at most", fix="Shorten it.")
    record = json_in(line, "this line")
    name = record.get("kind") if isinstance(record, dict) else None
    return parsed(next((kind for kind in kinds if kind.kind == name), kinds[0]), record)


def parsed(kind: type[J], record: Any) -> J:
    """The job of a ``kind`` that a JSON object describes; raises as :func:`job_in`."""
    record = versioned(record, HEAD, VERSION, "a job")
    if record.get("kind", VideoJob.kind) != kind.kind:
        raise wrong("a job of kind", record["kind"], repr(kind.kind))
    passes, before = 1, record.get("first")
    while isinstance(before, dict):
        passes, before = passes + 1, before.get("first")
    if passes > MOST_PASSES:
        raise InputError(f"a job of {passes} passes", expected=f"at most {MOST_PASSES}", fix=FIX)
    return parse(kind, {name: value for name, value in record.items() if name not in (HEAD, "kind")}, "the job")


def load_inputs(values: Mapping[str, Any]) -> dict[str, Value]:
    """The inputs of loading among ``values`` that are not at their defaults, for :attr:`VideoJob.load`."""
    return {name: values[name] for name, row in LOAD_INPUTS.items() if values.get(name, row.default) != row.default}


def decides(name: str, value: Any) -> bool:
    """Tell whether an input of loading says what is rendered, not only where and how fast: sparse attention does."""
    return name not in PLACES or value == "sparse"


def by_content(record: Any) -> Any:
    """``record`` with files' hashes, and without inputs that say where and how fast, or what ``auto`` became."""
    if isinstance(record, dict):
        if FOUND_BY <= record.keys() <= CONTENT:
            return record.get("whole") or record["content"]
        return {
            key: by_content(one) for key, one in record.items() if decides(key, one) and not key.startswith("resolved")
        }
    return [by_content(item) for item in record] if isinstance(record, list) else record


def _hash(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
