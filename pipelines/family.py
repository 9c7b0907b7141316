"""The families as data: each ``families/<id>/spec.py`` builds one :class:`FamilySpec`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from inspect import isfunction, signature
from pathlib import Path
from types import ModuleType

from ..compat.device.facts import GIBIBYTE
from ..compat.device.precision import PLAIN, ModelPrecision
from ..compat.errors import UnsupportedError, json_file
from ..compat.memory.parts import denoises
from ..compat.ranks import SplitPlan
from ..compat.records import parse
from .keys import Layout

SCHEDULERS = ("auto", "euler", "unipc", "dpm++_2m", "unipc_bh1")  # grows at the end
HUB = "https://huggingface.co/"
FITS = ("nearest bucket", "crop", "pad", "stretch")
GUIDED = frozenset({"cfg", "cfg_start", "cfg_end", "negative", "shift", "sigmas", "latents", "noise_mask"})  # settings
REQUIRED = {  # hooks, functions of ``families/<id>/pipeline.py``: name -> arguments
    "encode_prompt": "pipeline request progress",
    "prompt_from_core": "embeds extra",
    "sample": "pipeline prompt image settings progress",  # with sections: framepack and keeper too
    "decode": "pipeline latents progress form",
    "call_transformer": "pipeline transformer call",
}
OPTIONAL = {  # None where a family has none
    "encode_image": "pipeline request progress",
    "encode_video": "pipeline frames seed progress",
    "nearest_size": "pipeline width height",
    "upscale": "pipeline latents path progress",
    "enlarged": "latents path",  # as ``upscale`` leaves them, without its samples
    "defaults_for": "pipeline",
    "recipe_for": "pipeline",
    "guess_variant": "evidence",
    "settings_in": "evidence",
    "vae_settings_in": "evidence place",
    "task_of": "config",
    "encoder_task": "config",
    "text_forwards": "pipeline request",
    "batches": "pipeline settings",
    "frames_for": "framepack fps",
    "sections_for": "framepack frames",
    "training_plan": "frames window order",
    "training_sections": "film image plan",
}
HOOKS = REQUIRED | OPTIONAL


@dataclass(frozen=True, slots=True)
class Defaults:
    """Defaults of upstream's own pipeline; ``guidance``, ``cfg`` and ``shift`` of 0 mean that there is none to set."""

    width: int
    height: int
    frames: int
    steps: int
    fps: float
    guidance: float = 0.0
    cfg: float = 1.0
    max_tokens: int = 256
    shift: float = 0.0
    cfg_end: float = 1.0  # share of the steps that ``cfg`` guides


@dataclass(frozen=True, slots=True)
class GuidanceStep:
    """Guidance while the noise level is at least ``level``; of several the first that fits acts, else the last."""

    level: float = 0.0  # share of noise, 1 at the start and 0 at the end
    cfg: float = 1.0  # classifier-free guidance; 1 is none
    stg: float = 0.0  # spatio-temporal guidance, away from a prediction in which ``blocks`` do not attend; 0 is none
    rescale: float = 0.0  # share by which the guided prediction gets the spread of the one with the prompt
    blocks: tuple[int, ...] = ()  # indices of transformer blocks

    def __str__(self) -> str:
        skipped = f" without attention in block {', '.join(map(str, self.blocks))}" if self.stg else ""
        words = [f"cfg {self.cfg:g}", f"STG {self.stg:g}{skipped}" if self.stg else ""]
        return ", ".join(filter(None, (*words, f"rescale {self.rescale:g}" if self.stg and self.rescale else "")))


@dataclass(frozen=True, slots=True)
class Recipe:
    """Publisher's recipe for running one variant of a model."""

    name: str  # of the variant, for people
    source: str  # the publisher's file that says so
    steps: int  # of the schedule, before some are left out
    guidance: tuple[GuidanceStep, ...] = ()  # from the highest noise level down; empty for the family's
    timesteps: tuple[float, ...] | None = None  # noise levels of a distilled model; None for the schedule's
    skip_first: int = 0  # steps of the schedule that are left out at its start
    skip_last: int = 0  # and at its end
    stochastic: bool = False  # whether each step removes all noise and puts new noise on
    star: bool = False  # whether the prediction without the prompt is first projected onto the one with it (CFG-Zero*)
    image_noise: float = 0.0  # share of noise put on pictures before each step, which loosens the motion
    decode_timestep: float = 0.0  # for VAEs that remove the last noise themselves
    decode_noise: float = 0.0  # share of noise put on before, for the same VAEs
    tone_map: float = 0.0  # share by which large latents are compressed before a decode
    size: tuple[int, int, float] | None = None  # width, height and frames per second; None for the family's
    frames: int = 0  # of the video; 0 for the family's
    shift: float = 0.0  # of the noise levels; 0 for the family's
    picture_filter: str = ""  # PIL's filter for pictures, which are cut to shape before; empty for the family's way
    second: Recipe | None = None  # the pass over upscaled latents; None where none is published
    nodes: str = ""  # of a second pass: the nodes and the file that run it, for people

    def __str__(self) -> str:
        levels, second = len(self.guidance) > 1, self.second
        words = [
            f"{self.steps} steps" + (f" without the last {self.skip_last}" if self.skip_last else ""),
            *(f"from noise {step.level:g} {step}" if levels else str(step) for step in self.guidance),
            f"shift {self.shift:g}" if self.shift else "",
            "new noise after each step" if self.stochastic else "",
            f"decoded at {self.decode_timestep:g} with noise {self.decode_noise:g}" if self.decode_noise else "",
        ]
        if second is not None:
            words.append(f"over upscaled latents {second.steps - sum(second.skips(second.steps))} more steps")
        return "; ".join(filter(None, words))

    def skips(self, steps: int) -> tuple[int, int]:
        """Counts of ``steps`` that are left out, at the start and at the end."""
        return round(self.skip_first * steps / self.steps), round(self.skip_last * steps / self.steps)


@dataclass(frozen=True, slots=True)
class FitFactors:
    """Factors of the memory forecast, fitted to measured peaks by ``benchmarks/memory.py``."""

    tokens: float  # copies of the token states alive at the peak of a transformer's forward
    latents: float  # copies of the latents in fp32 beside them
    pixels: float  # copies of the decoder's widest full-size activation
    plain: float  # further channels per pixel
    text: float  # copies of a text encoder's widest activation, which is that of its feed-forward
    streamed: float  # copies of a tile of the last layer that a streamed decode holds
    chunked: float = 1.0  # what the frames remembered make of a chunk
    attending: float = 1.0  # share of a forward's peak that is alive while attention computes


@dataclass(frozen=True, slots=True)
class ClipTerms:
    frames: int = 1  # pixel frames of the longest clip that a video goes on with
    batch: int = 1  # of them that are encoded at a time
    seen: Mapping[str, int] = field(default_factory=dict)  # further latent frames that a section sees, by variant


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    fit: FitFactors  # the fitted factors
    reference_tokens: int  # tokens that the text encoder runs on
    text_tokens: int = 0  # valid text tokens that join the video's where the prompt is not known yet; 0 where none join
    history_tokens: int = 0  # further tokens beside the video's, of pictures
    section_context: tuple[float, int] | None = None  # further latent frames of a section: as tokens, as latents
    clip: ClipTerms = ClipTerms()
    decode_window: int = 0  # most pixel frames that the decoder has in work at once; 0 for all


@dataclass(frozen=True, slots=True)
class FileKind:
    kind: str  # as in a ``Layout``, such as ``t5`` or ``ltx/vae``
    width: str = ""  # the key of the transformer's configuration that names its width; empty where the kind is enough


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A model that is close to those here, and that another program runs."""

    title: str  # for people
    marks: tuple[str, ...]  # names that its files have, under any prefix; of a module where it ends with a dot
    columns: int = 0  # second side of the first of ``marks``, which tells it from a model that is run; 0 where names do
    runs: str = "ComfyUI's own Load Diffusion Model, with AnyGPU Fit behind it"  # what runs its single file
    classes: str = ""  # what its class names in diffusers begin with; empty where diffusers has none


@dataclass(frozen=True, slots=True)
class Caution:
    """Caution shown with a file that loads but has given others trouble."""

    named: str  # a regular expression that the name of the file, or of a folder around it, has to fit
    stored: str  # the dtype, without scales, that some of its matrices must have; safetensors' name; empty for any
    text: str  # what is wrong with it and what to use instead
    source: str  # who says so
    channels: int = 0  # that the transformer must take where it is known; 0 for any
    unlisted: bool = False  # whether a name that gives a recipe away makes it needless


@dataclass(frozen=True, slots=True)
class MusubiCache:
    """The caches of an architecture of Musubi Tuner."""

    short: str  # in file names
    full: str  # in metadata
    ratio: int  # pixels per latent row and column
    text: Mapping[str, str]  # its name of an embedding to ours, the padded one first
    scale: float = 1.0  # what its latents are multiplied by; core's space has them unscaled
    padded: int = 0  # text tokens that its own caches are padded to; 0 where each item has its own length
    mask: str = ""  # its name of the padded embedding's mask
    mask_bool: bool = False  # whether that mask has booleans; else int64


@dataclass(frozen=True, slots=True)
class Download:
    """One published repository at one commit."""

    repository: str  # its name on the Hub
    revision: str  # the commit
    only: tuple[str, ...] = ()  # what of it is read; none means all
    sizes: Mapping[str, int] = field(default_factory=dict)  # weights in bytes by folder, "" for the top

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weights that are read of it, as they are stored there; 0 where that is not known."""
        return sum(size for name, size in self.sizes.items() if not self.only or not name or name in self.only)

    @property
    def page(self) -> str:
        return HUB + self.repository

    @property
    def folder(self) -> str:
        return self.repository.rsplit("/", 1)[1]

    def text(self, root: Path) -> str:
        only = f" (only {', '.join(self.only)})" if self.only else ""
        return f"{self.page}{only} into {root / self.folder}"


@dataclass(frozen=True, slots=True)
class Quantised:
    """A published file in fewer bits: its repository, its name there, and its 10**9 bytes as the Hub lists them."""

    repository: str
    file: str
    gigabytes: float

    def __str__(self) -> str:
        return f"{self.file} of {self.repository} ({self.gigabytes:.1f} GB)"


@dataclass(frozen=True, slots=True)
class Offer:
    """A model to start with."""

    downloads: tuple[Download, ...]  # its repositories
    gib: Mapping[str, float]  # weights per part as bf16, by the published configurations' parameter counts
    quantised: Mapping[str, tuple[Quantised, ...]] = field(default_factory=dict)  # files by part, largest first

    @property
    def total_bytes(self) -> int:
        return int(sum(self.gib.values()) * GIBIBYTE)

    @property
    def size(self) -> str:
        """Download size in words: some parts are stored wider than bf16."""
        each = [download.stored_bytes for download in self.downloads]
        stored = f"{sum(each) / 1e9:.0f} GB" if all(each) else "an unknown size"
        return f"{stored} to download, {self.total_bytes / 1e9:.0f} GB of weights in bf16"

    @property
    def largest_bytes(self) -> int:
        """The largest part, in bf16: the least that must fit into the computer's memory at a time."""
        return int(max(self.gib.values()) * GIBIBYTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyFiles:
    """The files of a family's models, and the classes that are built of them."""

    pipelines: Mapping[str, str]  # ``model_index.json`` class name to task, ``text`` or ``image``
    transformer_classes: tuple[str, ...]  # class names that a lone transformer's ``config.json`` may carry
    parts: Mapping[str, tuple[str, ...]]  # part name to (library, class name, ...): the only classes built
    tools: Mapping[str, str]  # name to library; ``transformers`` or ``diffusers``
    text_parts: tuple[str, ...]  # the parts that only encode text
    optional: tuple[str, ...] = ()  # parts and tools that some of its pipelines lack
    base: str = ""  # the family whose pipeline provides the other parts of a lone transformer; empty for its own
    lone_task: str = "text"  # the task of a transformer without a pipeline around it
    text_width: str = ""  # the key of the transformer's configuration that names the width of its text embeddings
    text_vision: str = ""  # kind of the file with the picture half of its text encoder, for image to video
    image_required: bool = False  # image-to-video checkpoints need an image, its text checkpoints refuse one
    layouts: tuple[Layout, ...] = ()  # names of its tensors in single files
    lora_layouts: tuple[Layout, ...] = ()  # names of layers in its LoRA files; empty for ``layouts``
    kinds: Mapping[str, FileKind] = field(default_factory=dict)  # part to the kind of model that it is in single files
    tokenizers: Mapping[str, str] = field(default_factory=dict)  # tool to the tokenizer it is, as the host names them


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    multiple: int  # width and height are multiples of it, in pixels
    ratio: int  # pixels per latent row and column
    stride: int  # pixel frames per latent frame; frame counts are ``stride * n + 1``
    defaults: Defaults  # values of upstream's own pipeline
    buckets: tuple[tuple[int, int], ...] = ()  # (height, width) it was trained on; empty where any multiple is as good
    picture_filter: str = ""  # PIL's filter by which the publisher brings pictures to size; empty for ours
    picture_crf: int = 0  # of H.264, through which the publisher takes each picture after a blur; 0 for neither
    picture_floor: bool = False  # the side that is cut is rounded down before, as torchvision's Resize does
    picture_cut: bool = False  # whether it is cut to shape before it is brought to size
    min_steps: int = 1  # fewest steps that upstream's schedule allows
    vae_tile: int = 0  # pixels per tile that upstream advises for its VAE; 0 for none
    most_whole_cells: int = 0  # latent cells up to which a video goes through the VAE whole nevertheless

    def tile_for(self, cells: tuple[int, ...]) -> int:
        """Pixels per tile that are advised for a video of these latent frames, rows and columns; 0 for whole."""
        return self.vae_tile if math.prod(cells) > self.most_whole_cells else 0

    @property
    def ratios(self) -> tuple[int, int]:
        """Pixels per latent row and column, and pixel frames per latent frame."""
        return self.ratio, self.stride


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipes:
    """The ways in which a family's models are run."""

    effective: frozenset[str]  # the optional settings that act on this family
    variants: tuple[str, ...] = ()  # trainings that files cannot tell apart
    newer_variants: int = 0  # how many of the last stand at the end of the common list of choices, which only grows
    batched_cfg: bool = False  # classifier-free guidance is a batch of two; else a second forward per step
    sections: bool = False  # whether a video is sampled section by section, by the node for that


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrites:
    """The differences of a family's modules that a rewrite of them has to know."""

    precision: ModelPrecision = PLAIN  # where its dtypes differ from the common rows
    causal_decoder: bool = False  # whether its decoder never looks ahead, so that a video can be decoded in chunks
    vae_settings: Mapping[str, int] = field(default_factory=dict)  # attributes that its publisher's VAE has otherwise
    published_blocks: tuple[tuple[str, int, bool], ...] = ()  # class, count, whether they leave the text alone
    published_vae_fusion_points: int = 0  # those fused in the decoder of its published VAE
    split: SplitPlan | None = None  # by token in its blocks, for several devices; None where that was not tried
    returns_alone: bool = False  # whether its blocks return their tokens without the text
    sparse: bool = False  # whether its publisher has models of sparse attention


@dataclass(frozen=True, slots=True)
class TinyDecoder:
    """A published network that decodes drafts in the place of the VAE."""

    name: str  # how the names of its files begin
    source: str  # who publishes it
    divisor: float = 1.0  # of the latents that the transformer makes, before it takes them
    slope: float = 0.0  # of its activations below 0
    symmetric: bool = False  # whether its pictures are in -1..1; else in 0..1


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The published models of a family, and files that are taken for them."""

    pages: tuple[str, ...] = ()  # where its files are published
    recipes: Mapping[str, Recipe] = field(default_factory=dict)  # how its variants are run, by names of its own
    recipe_names: Mapping[str, str] = field(default_factory=dict)  # pattern of a file's or LoRA's name to such a name
    offer: Offer | None = None  # the download to begin with; None offers nothing
    more_offers: Mapping[str, Offer] = field(default_factory=dict)  # title to another download, such as image to video
    musubi: MusubiCache | None = None  # its caches of Musubi Tuner; None where that trainer has no such model
    others: tuple[OtherModel, ...] = ()  # models that are taken for it, and that it does not run
    cautions: tuple[Caution, ...] = ()  # published files that gave others trouble
    tiny_decoders: tuple[TinyDecoder, ...] = ()  # of drafts; the first that is found counts


def published_beside(spec: str) -> Published:
    """The published models that ``published.json`` beside a family's ``spec.py`` names."""
    path = Path(spec).with_name("published.json")
    return parse(Published, json_file(path), path.name)


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class FamilySpec:
    """One family of models."""

    id: str  # frozen family id
    title: str  # name for people
    package: str  # its folder's dotted name, ``__package__`` of its ``spec.py``
    order: int  # its place in lists that people see
    files: FamilyFiles
    sizes: Sizes
    recipes: Recipes
    memory: MemoryTerms  # the terms of the memory forecast
    rewrites: Rewrites
    published: Published = Published()

    @property
    def transformers(self) -> tuple[str, ...]:
        """The parts that denoise: ``transformer``, and ``transformer_2`` and so on where there are more."""
        return tuple(part for part in self.files.parts if denoises(part))

    @property
    def code(self) -> ModuleType:
        """The family's ``pipeline.py``, which has the functions of :data:`HOOKS`; checked on first access."""
        return code_of(self.package)

    @property
    def folder(self) -> Path:
        return Path(str(import_module(".spec", self.package).__file__)).parent


@cache
def code_of(package: str) -> ModuleType:
    """``pipeline.py`` of a family's package, with None for each optional hook that it lacks. Raises UnsupportedError
    for a function that is no hook, a hook with other arguments, or none where one is required."""
    module = import_module(".pipeline", package)
    for name, value in list(vars(module).items()):
        # Defined here, or imported under another name; a function imported under its own name is only used here.
        own = isfunction(value) and (value.__module__ == module.__name__ or value.__name__ != name)
        if own and name not in HOOKS and not name.startswith("_"):
            _refuse(f"a function {name}() in {module.__name__}", f"one of {', '.join(HOOKS)}")
    for name, arguments in HOOKS.items():
        hook = vars(module).setdefault(name, None)
        if hook is None and name in REQUIRED:
            _refuse(f"no {name}() in {module.__name__}", f"{name}({', '.join(arguments.split())})")
        given = [] if hook is None else list(signature(hook).parameters)
        if hook is not None and not set(arguments.split()) <= set(given):
            _refuse(f"{name}({', '.join(given)}) in {module.__name__}", f"{name}({', '.join(arguments.split())})")
    return module


def _refuse(found: str, expected: str) -> None:  # raises, for a function that is not as :data:`HOOKS` declares
    fix = "Correct its name; begin it with an underscore if it is no hook, or declare it in pipelines/family.py."
    raise UnsupportedError(found, expected=expected, fix=fix)
