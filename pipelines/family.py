"""The families as data: each ``families/<id>/spec.py`` builds one :class:`FamilySpec`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from ..compat.device.precision import PLAIN, ModelPrecision
from ..compat.memory.parts import denoises
from ..compat.ranks import SplitPlan
from .hooks import code_of
from .keys import Layout
from .offers import HUB_FILES as HUB_FILES
from .offers import T5_XXL as T5_XXL
from .offers import Download as Download
from .offers import Offer as Offer
from .offers import Quantised as Quantised

SCHEDULERS = ("auto", "euler", "unipc", "dpm++_2m", "unipc_bh1")  # grows at the end
FITS = ("nearest bucket", "crop", "pad", "stretch")
GUIDED = frozenset({"cfg", "cfg_start", "cfg_end", "negative", "shift", "sigmas", "latents", "noise_mask"})  # settings


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


@dataclass(frozen=True, slots=True)
class GuidanceStep:
    """Guidance while the noise level is at least ``level``; of several the first that fits acts, else the last.

    Args:
        level: share of noise, 1 at the start and 0 at the end.
        cfg: classifier-free guidance; 1 is none.
        stg: spatio-temporal guidance, away from a prediction in which ``blocks`` do not attend; 0 is none.
        rescale: share by which the guided prediction gets the spread of the one with the prompt.
        blocks: indices of transformer blocks.
    """

    level: float = 0.0
    cfg: float = 1.0
    stg: float = 0.0
    rescale: float = 0.0
    blocks: tuple[int, ...] = ()

    def __str__(self) -> str:
        skipped = f" without attention in block {', '.join(map(str, self.blocks))}" if self.stg else ""
        words = [f"cfg {self.cfg:g}", f"STG {self.stg:g}{skipped}" if self.stg else ""]
        return ", ".join(filter(None, (*words, f"rescale {self.rescale:g}" if self.stg and self.rescale else "")))


@dataclass(frozen=True, slots=True)
class Recipe:
    """Publisher's recipe for running one variant of a model.

    Args:
        name: of the variant, for people.
        source: the publisher's file that says so.
        steps: of the schedule, before some are left out.
        guidance: from the highest noise level down; empty where the family's defaults say it.
        timesteps: the noise levels that a distilled model was trained on; None for the checkpoint's own schedule.
        skip_first, skip_last: steps of the schedule that are left out.
        stochastic: whether each step removes all noise and puts new noise on.
        star: whether the prediction without the prompt is first projected onto the one with it (CFG-Zero*).
        image_noise: share of noise put on pictures before each step, which loosens the motion.
        decode_timestep, decode_noise: for VAEs that remove the last noise themselves.
        tone_map: share by which large latents are compressed before a decode.
        size: width, height and frames per second; None for the family's.
        frames, shift: of the video, and of the noise levels; 0 for the family's.
        second: the pass over upscaled latents; None where none is published.
    """

    name: str
    source: str
    steps: int
    guidance: tuple[GuidanceStep, ...] = ()
    timesteps: tuple[float, ...] | None = None
    skip_first: int = 0
    skip_last: int = 0
    stochastic: bool = False
    star: bool = False
    image_noise: float = 0.0
    decode_timestep: float = 0.0
    decode_noise: float = 0.0
    tone_map: float = 0.0
    size: tuple[int, int, float] | None = None
    frames: int = 0
    shift: float = 0.0
    second: Recipe | None = None

    def __str__(self) -> str:
        guidance = [f"from noise {step.level:g} {step}" for step in self.guidance]
        words = [f"{self.steps} steps", *(guidance if len(guidance) > 1 else map(str, self.guidance))]
        words += [f"shift {self.shift:g}"] * (self.shift > 0) + ["new noise after each step"] * self.stochastic
        words += [f"decoded at {self.decode_timestep:g} with noise {self.decode_noise:g}"] * (self.decode_noise > 0)
        if (second := self.second) is not None:
            words.append(f"over upscaled latents {second.steps - second.skip_first - second.skip_last} more steps")
        return "; ".join(words)


@dataclass(frozen=True, slots=True)
class FitFactors:
    """Factors of the memory forecast, fitted to measured peaks by ``benchmarks/memory_fits.py``.

    Args:
        tokens: copies of the token states alive at the peak of a transformer's forward.
        latents: copies of the latents in fp32 beside them.
        pixels: copies of the decoder's widest full-size activation.
        plain: further channels per pixel.
        text: copies of a text encoder's widest activation, which is that of its feed-forward.
        streamed: copies of a tile of the last layer that a streamed decode holds.
        chunked: what the frames remembered make of a chunk.
    """

    tokens: float
    latents: float
    pixels: float
    plain: float
    text: float
    streamed: float
    chunked: float = 1.0


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    """Terms that the memory forecast counts.

    Args:
        fit: the fitted factors.
        reference_tokens: tokens that the text encoder runs on.
        text_tokens: valid text tokens that join the video's where the prompt is not known yet; 0 where none join.
        history_tokens: further tokens beside the video's, of pictures.
        section_context: latent frames that a section sees beside its own, as tokens and as latents; None where a
            video is sampled as a whole.
        decode_window: most pixel frames that the decoder has in work at once; 0 for all.
    """

    fit: FitFactors
    reference_tokens: int
    text_tokens: int = 0
    history_tokens: int = 0
    section_context: tuple[float, int] | None = None
    decode_window: int = 0


@dataclass(frozen=True, slots=True)
class FileKind:
    """Kind of model that a part in a single file is.

    Args:
        kind: as in a ``Layout``, such as ``t5`` or ``ltx/vae``.
        width: the key of the transformer's configuration that names its width; empty where the kind is enough.
    """

    kind: str
    width: str = ""


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A model that is close to those here, and that another program runs.

    Args:
        title: for people.
        marks: names that its files have, under any prefix; of a module where it ends with a dot.
        columns: second side of the first of ``marks``, which tells it from a model that is run; 0 where names do.
        runs: what runs its single file.
        classes: what its class names in diffusers begin with; empty where diffusers has none.
    """

    title: str
    marks: tuple[str, ...]
    columns: int = 0
    runs: str = "ComfyUI's own Load Diffusion Model, with AnyGPU Fit behind it"
    classes: str = ""


@dataclass(frozen=True, slots=True)
class Caution:
    """Caution shown with a file that loads but has given others trouble.

    Args:
        named: a regular expression that the name of the file, or of a folder around it, has to fit.
        stored: the dtype, without scales, that some of its matrices must have; safetensors' name; empty for any.
        text: what is wrong with it and what to use instead.
        source: who says so.
    """

    named: str
    stored: str
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class MusubiCache:
    """The caches of an architecture of Musubi Tuner.

    Args:
        short: in file names.
        full: in metadata.
        ratio: pixels per latent row and column.
        text: its name of an embedding to ours, the padded one first.
        scale: what its latents are multiplied by; core's space has them unscaled.
        padded: text tokens that its own caches are padded to; 0 where each item has its own length.
        mask: its name of the padded embedding's mask.
        mask_dtype: of that mask.
    """

    short: str
    full: str
    ratio: int
    text: Mapping[str, str]
    scale: float = 1.0
    padded: int = 0
    mask: str = ""
    mask_dtype: torch.dtype = torch.int64


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyFiles:
    """The files of a family's models, and the classes that are built of them.

    Args:
        pipelines: ``model_index.json`` class name to task, ``text`` or ``image``.
        transformer_classes: class names that a lone transformer's ``config.json`` may carry.
        parts: part name to (library, class name, ...): the only classes that are ever built.
        tools: name to library; ``transformers`` or ``diffusers``.
        text_parts: the parts that only encode text.
        optional: parts and tools that some of its pipelines lack.
        base: the family whose pipeline provides the other parts of a lone transformer; empty for its own.
        lone_task: the task of a transformer without a pipeline around it.
        text_width: the key of the transformer's configuration that names the width of its text embeddings.
        text_vision: kind of the file with the picture half of its text encoder, for image to video; empty for none.
        image_required: whether its image-to-video checkpoints need an image and its text checkpoints refuse one.
        layouts: names of its tensors in single files.
        lora_layouts: names of layers in its LoRA files; empty for those of its transformer's ``layouts``.
        kinds: part to the kind of model that it is in single files.
        tokenizers: tool to the tokenizer it is, as the host names them.
    """

    pipelines: Mapping[str, str]
    transformer_classes: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]]
    tools: Mapping[str, str]
    text_parts: tuple[str, ...]
    optional: tuple[str, ...] = ()
    base: str = ""
    lone_task: str = "text"
    text_width: str = ""
    text_vision: str = ""
    image_required: bool = False
    layouts: tuple[Layout, ...] = ()
    lora_layouts: tuple[Layout, ...] = ()
    kinds: Mapping[str, FileKind] = field(default_factory=dict)
    tokenizers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes that a family makes.

    Args:
        multiple: width and height are multiples of it, in pixels.
        ratio: pixels per latent row and column.
        stride: pixel frames per latent frame; frame counts are ``stride * n + 1``.
        defaults: values of upstream's own pipeline.
        buckets: (height, width) the model was trained on; empty when any multiple is as good.
        min_steps: fewest steps that upstream's schedule allows.
        vae_tile: pixels per tile that upstream advises for its VAE; 0 for none.
        most_whole_cells: latent cells up to which a video goes through the VAE whole nevertheless, which is exact.
    """

    multiple: int
    ratio: int
    stride: int
    defaults: Defaults
    buckets: tuple[tuple[int, int], ...] = ()
    min_steps: int = 1
    vae_tile: int = 0
    most_whole_cells: int = 0

    def tile_for(self, cells: tuple[int, ...]) -> int:
        """Pixels per tile that are advised for a video of these latent frames, rows and columns; 0 for whole."""
        return self.vae_tile if math.prod(cells) > self.most_whole_cells else 0

    @property
    def ratios(self) -> tuple[int, int]:
        """Pixels per latent row and column, and pixel frames per latent frame."""
        return self.ratio, self.stride


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipes:
    """The ways in which a family's models are run.

    Args:
        effective: the optional settings that act on this family.
        known: how its variants are run, by names of its own.
        named: regular expression, for the name of a file, folder or LoRA, to a key of ``known``.
        variants: trainings that files cannot tell apart.
        newer_variants: how many of the last of them come after those of all families in the list of choices, which
            grows at its end.
        batched_cfg: whether classifier-free guidance is a batch of two; else it is a second forward per step.
        sections: whether a video is sampled section by section, by the node for that.
    """

    effective: frozenset[str]
    known: Mapping[str, Recipe] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    variants: tuple[str, ...] = ()
    newer_variants: int = 0
    batched_cfg: bool = False
    sections: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrites:
    """The differences of a family's modules that a rewrite of them has to know.

    Args:
        precision: where its dtypes differ from the common rows.
        causal_decoder: whether its decoder never looks ahead, so that a video can be decoded in chunks.
        vae_settings: attributes of its diffusers VAE that its publisher has otherwise.
        published_blocks: blocks of its published transformer: class, count, whether they leave the text alone.
        published_vae_fusion_points: those fused in the decoder of its published VAE.
        split: what goes by token in its blocks, for one video on several devices; None where that was not tried.
        returns_alone: whether its blocks return their tokens without the text.
    """

    precision: ModelPrecision = PLAIN
    causal_decoder: bool = False
    vae_settings: Mapping[str, int] = field(default_factory=dict)
    published_blocks: tuple[tuple[str, int, bool], ...] = ()
    published_vae_fusion_points: int = 0
    split: SplitPlan | None = None
    returns_alone: bool = False


@dataclass(frozen=True, slots=True)
class TinyDecoder:
    """A published network that decodes drafts in the place of the VAE.

    Args:
        name: how the names of its files begin.
        source: who publishes it.
        divisor: of the latents that the transformer makes, before it takes them.
        slope: of its activations below 0.
        symmetric: whether its pictures are in -1..1; else in 0..1.
    """

    name: str
    source: str
    divisor: float = 1.0
    slope: float = 0.0
    symmetric: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The published models of a family, and files that are taken for them.

    Args:
        pages: where its files are published.
        offer: the download to begin with; None offers nothing.
        more_offers: title to another download, such as image to video.
        musubi: its caches of Musubi Tuner; None where that trainer has no such model.
        others: models that are taken for it, and that it does not run.
        cautions: published files that gave others trouble.
        tiny_decoders: of drafts, the first that is found counts; empty where none is published.
    """

    pages: tuple[str, ...] = ()
    offer: Offer | None = None
    more_offers: Mapping[str, Offer] = field(default_factory=dict)
    musubi: MusubiCache | None = None
    others: tuple[OtherModel, ...] = ()
    cautions: tuple[Caution, ...] = ()
    tiny_decoders: tuple[TinyDecoder, ...] = ()


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class FamilySpec:
    """One family of models.

    Args:
        id: frozen family id.
        title: name for people.
        package: its folder's dotted name, ``__package__`` of its ``spec.py``.
        order: its place in lists that people see.
        memory: the terms of the memory forecast.
    """

    id: str
    title: str
    package: str
    order: int
    files: FamilyFiles
    sizes: Sizes
    recipes: Recipes
    memory: MemoryTerms
    rewrites: Rewrites
    published: Published = Published()

    @property
    def transformers(self) -> tuple[str, ...]:
        """The parts that denoise: ``transformer``, and ``transformer_2`` and so on where there are more."""
        return tuple(part for part in self.files.parts if denoises(part))

    @property
    def code(self) -> ModuleType:
        """The family's ``pipeline.py``, which has the functions of ``hooks.HOOKS``; checked on first access."""
        return code_of(self.package)

    @property
    def folder(self) -> Path:
        """Folder of its published configurations."""
        return Path(str(import_module(".spec", self.package).__file__)).parent
