"""The values that every family and every caller share. Letters of shapes in the whole pack: B batch, C channels, T
latent frames, F pixel frames, H W rows and columns, N tokens, D features."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..compat.errors import InputError
from ..compat.memory.parts import ProgressStage as ProgressStage
from ..compat.memory.parts import Silent as Silent
from .family import GuidanceStep

LATENT_VERSION = 1
HALF = re.compile("[\ud800-\udfff]")  # a lone UTF-16 surrogate, which UTF-8 cannot encode
MOST = {"sections": (1_024, "section prompts"), "template": (65_536, "letters of template")}  # 2 min: 720 sections
SECTION_ORDERS = ("inverted_anti_drifting", "vanilla")  # from the end of the film, from its start; grows at the end
EMBEDS, MASK = "prompt_embeds", "prompt_attention_mask"  # tensors of a prompt, by name
POOLED, EMBEDS_2 = "pooled_prompt_embeds", "prompt_embeds_2"
VISION = "vision"  # what the image encoder says of the start image, or of a clip's first frame
ENCODING = ProgressStage("encoding", "prompt")

Preview = Callable[[], torch.Tensor]  # makes the picture that goes with a step, where one is shown


class Progress(Protocol):
    """Receives the progress of a long call, and tells it about a cancel."""

    def step(self, done: int, total: int, stage: ProgressStage, preview: Preview | None = None) -> None:
        """Report ``done`` of ``total`` in ``stage``; ``preview`` is called only where previews are shown."""

    def check(self) -> None:
        """Raise when the user has cancelled."""

    def notify(self, text: str) -> None:
        """Show the user one line: what was assumed, rounded or has no effect."""


@dataclass(frozen=True, slots=True)
class SubProgress:
    """Reports part ``index`` of ``count`` equal parts to ``whole``, as its share of them all; ``name`` is a part's."""

    whole: Progress
    index: int
    count: int
    name: str

    def step(self, done: int, total: int, stage: ProgressStage, preview: Preview | None = None) -> None:
        if self.count > 1:
            detail = f"{stage.detail} {self.name} {self.index + 1} of {self.count}"
            stage = ProgressStage(stage.name, detail.lstrip(), counted=True, resumable=stage.resumable)
        self.whole.step(self.index * total + done, self.count * total, stage, preview)

    def check(self) -> None:
        self.whole.check()

    def notify(self, text: str) -> None:
        self.whole.notify(text)


Forwards = Mapping[str, tuple[tuple[int, ...], ...]]  # by text encoder: tokens of each text in each forward


@dataclass(frozen=True, slots=True)
class Prompt:
    """Encoded text: tensors (1, N, D) on the CPU, padding trimmed, by the family's own names."""

    family: str
    embeds: Mapping[str, torch.Tensor]
    negative: Mapping[str, torch.Tensor] | None = None
    sections: tuple[Mapping[str, torch.Tensor], ...] = ()  # for the sections of a FramePack video after the first
    has_negative: bool = False  # whether the user wrote one: an empty one is encoded too, for guidance that needs it
    extra: Mapping[str, Any] = field(default_factory=dict)  # what no model sees: ``text``, ``negative_text``

    def described(self, title: str) -> str:  # one line for people, on a model named ``title``
        tokens = next(iter(self.embeds.values())).shape[1]
        return f"prompt for {title}: {tokens} tokens{', with negative' if self.has_negative else ''}"

    def __repr__(self) -> str:
        return f"<{self.described(self.family)}>"


@dataclass(frozen=True, slots=True)
class PictureSource:
    """A picture that an image condition was encoded from."""

    content: str  # hash of its pixels
    fit: str  # how it was brought to size
    frame: int
    strength: float
    seed: int
    vision: bool  # whether another encoder looked at it
    size: tuple[int, ...] = ()  # width and height
    control: bool = False  # whether it is a control clip
    prepare: bool = True  # whether it was prepared as the publisher does
    final_size: tuple[int, ...] = ()  # as of :class:`ImageRequest`


@dataclass(frozen=True, slots=True)
class ImageCondition:
    """Encoded pictures: tensors on the CPU by the family's own names, and the size they were fitted to."""

    family: str
    tensors: Mapping[str, torch.Tensor]
    width: int
    height: int
    anchors: tuple[tuple[str, int, float], ...] = ()  # tensor name, pixel frame index, strength
    sources: tuple[PictureSource, ...] = ()  # in order; empty if another node encoded them
    beside: int = 0  # pixel frames of clips whose tokens come beside the video's

    def __repr__(self) -> str:
        return f"<image condition for {self.family}: {self.width}x{self.height}, {sorted(self.tensors)}>"


@dataclass(frozen=True, slots=True)
class Latents:
    """Sampled latents in the space that ComfyUI's core calls LATENT."""

    samples: torch.Tensor  # (1, C, T, H, W), fp32, on the CPU
    family: str
    task: str
    frames: int  # pixel frames that the user asked for; a decode gives no more
    height: int
    width: int
    fps: float
    seed: int
    space: str = "vae"
    extra: Mapping[str, Any] = field(default_factory=dict)  # plain values that decoding needs
    version: int = LATENT_VERSION
    more: Mapping[str, torch.Tensor] = field(default_factory=dict)  # such as audio, by the family's names


RECEIPT = "receipt"  # under a latent's extra values
RESOLVED = "resolved"  # there until its receipt has them: the completed settings
FINAL = ("final_width", "final_height")  # in ``Latents.extra``: pixels to which decoded frames are resized


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """User's settings of sampling; for ``steps``, ``guidance``, ``cfg``, ``shift`` and ``fps`` 0 is the model's own."""

    width: int  # pixels
    height: int  # pixels
    frames: int  # pixel frames
    steps: int = 0  # denoising steps
    seed: int = 0  # 0 to 2**64 - 1
    fps: float = 0.0  # frames per second
    guidance: float = 0.0  # distilled guidance, an input of the transformer
    cfg: float = 0.0  # true classifier-free guidance, a second forward per step
    cfg_start: float = 0.0  # share of the steps, 0..1
    cfg_end: float = 1.0  # share of the steps, 0..1
    guidance_rescale: float = 0.0
    shift: float = 0.0  # timestep shift
    scheduler: str = "auto"  # one of :data:`SCHEDULERS`
    sigmas: tuple[float, ...] | None = None  # noise levels from 1 to 0, steps + 1 long
    denoise: float = 1.0  # share of the noise that is put on ``latents``
    latents: Latents | None = None
    noise_mask: torch.Tensor | None = None  # (1, 1, T or 1, H, W), 1 where to sample
    stg: float = -1.0  # spatio-temporal guidance; 0 for none, below 0 the model's own
    guidance_steps: tuple[GuidanceStep, ...] = ()  # recipe's and user's guidance by noise level; set by ``stages``


@dataclass(frozen=True, slots=True)
class PromptRequest:
    text: str
    negative: str = ""
    max_tokens: int = 0  # limit in tokens; 0 means the family's default
    template: str = ""  # text with one ``{}`` for the prompt (Llama and Qwen families); empty means upstream's own
    template_crop: int = -1  # leading tokens of the template that are cut off; -1 finds them
    sections: tuple[str, ...] = ()  # further prompts, for the sections of a FramePack video after the first
    image: torch.Tensor | None = None  # frames (1, H, W, 3) in 0..1 for encoders that also look (HunyuanVideo I2V)

    def __post_init__(self) -> None:
        """Raise InputError for too many sections, too long a template, or a lone surrogate in a text."""
        for name, (most, what) in MOST.items():
            if (count := len(getattr(self, name))) > most:
                raise InputError(f"{count:,} {what}", expected=f"at most {most:,}", fix="Leave some out.")
        if any(HALF.search(text) for text in (self.text, self.negative, self.template, *self.sections)):
            raise InputError("half a character in a prompt", expected="whole ones", fix="Type the prompt again.")


@dataclass(frozen=True, slots=True)
class ImageRequest:
    frames: torch.Tensor  # (F, H, W, 3) in 0..1, already fitted to ``width`` x ``height`` pixels; a clip where F > 1
    width: int
    height: int
    frame: int = 0  # pixel frame of the picture; -1 is the last
    strength: float = 1.0  # 0..1
    vision: torch.Tensor | None = None  # last hidden state (1, N, D) of core's image encoder, for the family's own
    previous: ImageCondition | None = None  # an earlier condition that this one joins
    seed: int = 0  # for VAEs that draw
    control: bool = False  # whether this is the control clip of an IC-LoRA, beside the video instead of in it
    prepare: bool = True  # whether the pictures are prepared as the publisher does; else they are only brought to size
    seen: torch.Tensor | None = None  # the picture at the size that its image encoder sees; None for ``frames``
    final_size: tuple[int, ...] = ()  # width and height of the finished video, where this is one of its two passes


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """User's choices for a decode."""

    method: str = "auto"  # one of ``vae.plan.METHODS``
    tile: int = 0  # pixels of a tile, 0 for the method's own
    overlap: int = -1  # pixels of it that blend into the next, -1 for a quarter
    frames: int = 0  # latent frames per chunk, 0 for the method's own


@dataclass(frozen=True, slots=True)
class FramePackSettings:
    """FramePack's additions to :class:`SampleSettings`, whose ``frames`` it replaces by a length."""

    clip_seconds: float  # length of the video
    window: int = 9  # latent frames per section
    order: str = "auto"  # of :data:`SECTION_ORDERS`, or ``auto``
    end_strength: float = 1.0  # how much the end image counts, 0..1
    single_frame: bool = False  # sample one frame instead of a video
    blend_sections: int = 0  # that a prompt takes to blend into the next one; 0 switches at once


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a transformer by a sampler of core's, batch B, everything on the device."""

    latents: torch.Tensor  # (B, C, T, H, W) in the transformer's space, with what is put beside the noise already in C
    time: torch.Tensor  # noise level times 1000, (B,), or (B, N) where tokens differ (LTX-Video)
    embeds: torch.Tensor  # text (B, N, D)
    mask: torch.Tensor | None = None  # (B, N), 1 where it is valid; None where all is
    pooled: torch.Tensor | None = None  # (B, D)
    guidance: torch.Tensor | None = None  # (B,)
    glyph_embeds: torch.Tensor | None = None  # ByT5 states
    vision: torch.Tensor | None = None  # SigLIP states
    picture: torch.Tensor | None = None  # latents of the start picture in the transformer's space, (B, C, 1, H, W)
    next_time: torch.Tensor | None = None  # of the next step, (B,)
    fps: float = 25.0  # of the video
    sections: int = 1  # of the video, whose first in the order of sampling this is
    branch: str = "cond"  # which prompts are in the batch, for caches that keep them apart

    @property
    def valid(self) -> torch.Tensor:
        """(B, N), bool: which text tokens count."""
        if self.mask is None:
            return torch.ones(self.embeds.shape[:2], dtype=torch.bool, device=self.embeds.device)
        # Core's mask of a HunyuanVideo text still covers the template, which is cut off the states.
        return self.mask.reshape(self.mask.shape[0], -1)[:, -self.embeds.shape[1] :] > 0.5
