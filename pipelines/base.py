"""The values that every family and every caller share.

Shape alphabet, for the whole pack: B batch, C channels, T latent frames, F pixel frames, H W rows and columns,
N tokens, D features.
"""

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
HALF = re.compile("[\ud800-\udfff]")  # of a pair of UTF-16, which no UTF-8 has
MOST = {1_024: "section prompts", 65_536: "letters of template"}  # a video of two minutes has 720 sections at most
SECTION_ORDERS = ("inverted_anti_drifting", "vanilla")  # from the end of the film, from its start; grows at the end
EMBEDS, MASK = "prompt_embeds", "prompt_attention_mask"  # tensors of a prompt, by name
POOLED, EMBEDS_2 = "pooled_prompt_embeds", "prompt_embeds_2"
ENCODING = ProgressStage("encoding", "prompt")

Preview = Callable[[], torch.Tensor]  # makes the picture that goes with a step, where one is shown


class Progress(Protocol):
    """Receives the progress of a long call, and tells it about a cancel."""

    def step(self, done: int, total: int, stage: ProgressStage, preview: Preview | None = None) -> None:
        """Report ``done`` of ``total`` in ``stage``.

        Args:
            preview: returns the clean estimate, (B, C, T, H, W) in the transformer's space, or frames (F, H, W, 3)
                in 0..1; called only when previews are shown.
        """

    def check(self) -> None:
        """Raise when the user has cancelled."""

    def notify(self, text: str) -> None:
        """One line that the user should read: what was assumed, rounded or has no effect."""


@dataclass(frozen=True, slots=True)
class SubProgress:
    """The progress of one of ``count`` equal parts of a work, each called a ``name``."""

    whole: Progress
    index: int
    count: int
    name: str

    def step(self, done: int, total: int, stage: ProgressStage, preview: Preview | None = None) -> None:
        """Report ``done`` of ``total`` in this part as a share of the whole."""
        if self.count > 1:
            detail = f"{stage.detail} {self.name} {self.index + 1} of {self.count}"
            stage = ProgressStage(stage.name, detail.lstrip(), counted=True, resumable=stage.resumable)
        self.whole.step(self.index * total + done, self.count * total, stage, preview)

    def check(self) -> None:
        """Raise when the user has cancelled."""
        self.whole.check()

    def notify(self, text: str) -> None:
        """One line that the user should read."""
        self.whole.notify(text)


Forwards = Mapping[str, tuple[tuple[int, ...], ...]]  # by text encoder: tokens of each text in each forward


@dataclass(frozen=True, slots=True)
class Prompt:
    """Encoded text: tensors (1, N, D) on the CPU, padding trimmed, by the family's own names.

    ``sections`` holds further prompts, for the sections of a FramePack video after the first. ``has_negative`` is
    whether
    the user wrote a negative prompt: an empty one is encoded too, for guidance that needs it. ``extra`` holds what no
    model sees: ``text`` and ``negative_text`` where they are known.
    """

    family: str
    embeds: Mapping[str, torch.Tensor]
    negative: Mapping[str, torch.Tensor] | None = None
    sections: tuple[Mapping[str, torch.Tensor], ...] = ()
    has_negative: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def described(self, title: str) -> str:
        """Describe the prompt in one line; ``title`` is the family's."""
        tokens = next(iter(self.embeds.values())).shape[1]
        return f"prompt for {title}: {tokens} tokens{', with negative' if self.has_negative else ''}"

    def __repr__(self) -> str:
        return f"<{self.described(self.family)}>"


@dataclass(frozen=True, slots=True)
class PictureSource:
    """A picture that an image condition was encoded from.

    Args:
        content: hash of its pixels.
        fit: how it was brought to size.
        vision: whether another encoder looked at it.
        size: width and height.
        control: whether it is a control clip.
    """

    content: str
    fit: str
    frame: int
    strength: float
    seed: int
    vision: bool
    size: tuple[int, ...] = ()
    control: bool = False


@dataclass(frozen=True, slots=True)
class ImageCondition:
    """Encoded pictures: tensors on the CPU by the family's own names, and the size they were fitted to.

    ``anchors`` is for families that take several: (tensor name, pixel frame index, strength). ``sources`` are the
    pictures that it was encoded from, in order; empty if another node encoded them. ``beside`` counts the pixel frames
    of control clips, whose tokens come beside the video's.
    """

    family: str
    tensors: Mapping[str, torch.Tensor]
    width: int
    height: int
    anchors: tuple[tuple[str, int, float], ...] = ()
    sources: tuple[PictureSource, ...] = ()
    beside: int = 0

    def __repr__(self) -> str:
        return f"<image condition for {self.family}: {self.width}x{self.height}, {sorted(self.tensors)}>"


@dataclass(frozen=True, slots=True)
class Latents:
    """Sampled latents: (1, C, T, H, W), fp32, on the CPU, in the space that ComfyUI's core calls LATENT.

    ``frames`` counts the pixel frames the user asked for; ``more`` holds further tensors, such as audio, by names of
    the family's own; ``extra`` plain values that decoding needs: ``generator_state`` (bytes), ``section_lengths``,
    ``window``, ``order``, ``drop_frames``.
    """

    samples: torch.Tensor
    family: str
    task: str
    frames: int
    height: int
    width: int
    fps: float
    seed: int
    space: str = "vae"
    extra: Mapping[str, Any] = field(default_factory=dict)
    version: int = LATENT_VERSION
    more: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """User's settings of sampling. A zero for ``steps``, ``guidance``, ``cfg``, ``shift`` or ``fps`` means the
    model's own default.

    Args:
        width, height: pixels.
        frames: pixel frames.
        steps: denoising steps.
        seed: 0 to 2**64 - 1.
        fps: frames per second.
        guidance: distilled guidance, an input of the transformer.
        cfg: true classifier-free guidance, a second forward per step.
        cfg_start, cfg_end: share of the steps, 0..1.
        shift: timestep shift.
        scheduler: one of :data:`SCHEDULERS`.
        sigmas: noise levels from 1 to 0, steps + 1 long.
        denoise: share of the noise that is put on ``latents``.
        noise_mask: (1, 1, T or 1, H, W), 1 where to sample.
        stg: spatio-temporal guidance; 0 for none, below 0 the model's own.
        guidance_steps: what the recipe and the user's own values make of guidance, by noise level; set by ``stages``.
    """

    width: int
    height: int
    frames: int
    steps: int = 0
    seed: int = 0
    fps: float = 0.0
    guidance: float = 0.0
    cfg: float = 0.0
    cfg_start: float = 0.0
    cfg_end: float = 1.0
    guidance_rescale: float = 0.0
    shift: float = 0.0
    scheduler: str = "auto"
    sigmas: tuple[float, ...] | None = None
    denoise: float = 1.0
    latents: Latents | None = None
    noise_mask: torch.Tensor | None = None
    stg: float = -1.0
    guidance_steps: tuple[GuidanceStep, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """The user's settings for text encoding.

    Args:
        text, negative: the prompts.
        max_tokens: limit in tokens; 0 means the family's default.
        template: text with one ``{}`` for the prompt (Llama and Qwen families); empty means upstream's own.
        template_crop: leading tokens of the template that are cut off; -1 finds them.
        sections: further prompts, for the sections of a FramePack video after the first.
        image: frames (1, H, W, 3) in 0..1 for text encoders that also look (HunyuanVideo image to video).
    """

    text: str
    negative: str = ""
    max_tokens: int = 0
    template: str = ""
    template_crop: int = -1
    sections: tuple[str, ...] = ()
    image: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for given, (most, what) in zip((self.sections, self.template), MOST.items(), strict=True):
            if len(given) > most:
                raise InputError(f"{len(given):,} {what}", expected=f"at most {most:,}", fix="Leave some out.")
        if any(HALF.search(text) for text in (self.text, self.negative, self.template, *self.sections)):
            raise InputError("half a character in a prompt", expected="whole ones", fix="Type the prompt again.")


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """The user's settings for image encoding.

    Args:
        frames: (F, H, W, 3) in 0..1, already fitted to ``width`` x ``height`` pixels; a clip where F > 1.
        frame: pixel frame of the picture; -1 is the last.
        strength: 0..1.
        vision: last hidden state of an image encoder, (1, N, D), in place of the family's own (core's
            CLIP_VISION_OUTPUT).
        previous: an earlier condition that this one joins.
        seed: for VAEs that draw.
        control: whether this is the control clip of an IC-LoRA, beside the video instead of in it.
    """

    frames: torch.Tensor
    width: int
    height: int
    frame: int = 0
    strength: float = 1.0
    vision: torch.Tensor | None = None
    previous: ImageCondition | None = None
    seed: int = 0
    control: bool = False


@dataclass(frozen=True, slots=True)
class FramePackSettings:
    """FramePack's additions to :class:`SampleSettings`, whose ``frames`` it replaces by a length.

    Args:
        clip_seconds: length of the video.
        window: latent frames per section.
        order: ``auto``, ``inverted_anti_drifting`` (from the end, FramePack I2V) or ``vanilla`` (from the start, F1).
        end_strength: how much the end image counts, 0..1.
        single_frame: sample one frame instead of a video.
    """

    clip_seconds: float
    window: int = 9
    order: str = "auto"
    end_strength: float = 1.0
    single_frame: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a transformer by a sampler of core's, batch B, everything on the device.

    Args:
        latents: (B, C, T, H, W) in the transformer's space, with what is put beside the noise already in C.
        time: noise level times 1000, (B,), or (B, N) where tokens differ (LTX-Video).
        embeds: text (B, N, D).
        mask: (B, N), 1 where it is valid; None where all is.
        pooled: (B, D).
        guidance: (B,).
        glyph_embeds: ByT5 states.
        vision: SigLIP states.
        picture: latents of the start picture in the transformer's space, (B, C, 1, H, W).
        next_time: of the next step, (B,).
        fps: of the video.
        branch: which prompts are in the batch, for caches that keep them apart.
    """

    latents: torch.Tensor
    time: torch.Tensor
    embeds: torch.Tensor
    mask: torch.Tensor | None = None
    pooled: torch.Tensor | None = None
    guidance: torch.Tensor | None = None
    glyph_embeds: torch.Tensor | None = None
    vision: torch.Tensor | None = None
    picture: torch.Tensor | None = None
    next_time: torch.Tensor | None = None
    fps: float = 25.0
    branch: str = "cond"

    @property
    def valid(self) -> torch.Tensor:
        """(B, N), bool: which text tokens count."""
        if self.mask is None:
            return torch.ones(self.embeds.shape[:2], dtype=torch.bool, device=self.embeds.device)
        # Core's mask of a HunyuanVideo text still covers the template, which is cut off the states.
        return self.mask.reshape(self.mask.shape[0], -1)[:, -self.embeds.shape[1] :] > 0.5
