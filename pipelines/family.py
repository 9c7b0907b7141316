"""What a family is, as data: classes, sizes, defaults, and which settings act on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SCHEDULERS = ("auto", "euler", "unipc", "dpm++_2m")
FITS = ("nearest bucket", "crop", "pad", "stretch")


@dataclass(frozen=True, slots=True)
class Defaults:
    """What upstream's own pipeline uses; ``guidance``, ``cfg`` and ``shift`` of 0 mean that there is none to set."""

    width: int
    height: int
    frames: int
    steps: int
    fps: float
    guidance: float = 0.0
    cfg: float = 1.0
    max_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Family:
    """One family of models.

    Args:
        id: frozen family id. title: name for people.
        pipelines: ``model_index.json`` class name to task, ``text`` or ``image``.
        transformers: class names that a transformer's ``config.json`` may carry.
        parts: part name to (library, class name, ...): the only classes that are ever built.
        tools: name to library; ``transformers`` or ``diffusers``.
        text_parts: the parts that only encode text.
        multiple: width and height are multiples of it, in pixels.
        stride: pixel frames per latent frame; frame counts are ``stride * n + 1``.
        effective: the optional settings that act on this family.
        variants: what files cannot tell.
        buckets: (height, width) the model was trained on; empty when any multiple is as good.
        min_steps: fewest steps that upstream's schedule allows.
        pages: where its files are published.
        base: the family whose pipeline lends a lone transformer its other parts; empty for its own.
        lone_task: the task of a transformer without a pipeline around it.
        text_width: the key of the transformer's configuration that names the width of its text embeddings.
        image_required: whether its image-to-video checkpoints need an image and its text checkpoints refuse one.
        optional: parts and tools that some of its pipelines lack.
    """

    id: str
    title: str
    pipelines: Mapping[str, str]
    transformers: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]]
    tools: Mapping[str, str]
    text_parts: tuple[str, ...]
    multiple: int
    stride: int
    defaults: Defaults
    effective: frozenset[str]
    variants: tuple[str, ...] = ()
    buckets: tuple[tuple[int, int], ...] = ()
    min_steps: int = 1
    schedulers: tuple[str, ...] = SCHEDULERS
    pages: tuple[str, ...] = ()
    base: str = ""
    lone_task: str = "text"
    optional: tuple[str, ...] = ()
    text_width: str = ""
    image_required: bool = False
