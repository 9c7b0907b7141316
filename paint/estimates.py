"""Forecasts of what each stage of painting needs on the device, and what it used once it has run.

Weights are counted from names and shapes. Activations follow formulas fitted to counts of every living tensor of the
full-size networks (`tests/paint/counting.py`); `tests/paint/test_needs.py` holds them within 15 %. They count tensors:
what a vendor's library takes for itself comes on top.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..compat.memory.parts import PartBytes, part_bytes
from ..compat.memory.standalone import ahead_bytes
from ..compat.memory.statistics import StageNeed
from .choices import DELIGHT_STEPS, PUBLISHED
from .networks.layers import FED_TOKENS
from .networks.pbr import MATERIALS
from .networks.vae import REDUCTION

BLOCK = re.compile(r"^(.*?\.\d+)\.")
MARGIN = 1.15  # what a forecast may be off by
ENCODED, DECODED = 644, 768  # features per pixel that the VAE has alive at its peak
TAUGHT_SIZE, TAUGHT_VIEWS = 512, 6
STEPPING = {False: "painting", True: "delighting"}


@dataclass(frozen=True, slots=True)
class Copies:
    """Number of first-level feature maps alive at once: in the residual stream's dtype, and as operands."""

    residual: float
    operands: float


ATTENDING = Copies(12.3, 1.3)  # while the views look at one another
FEEDING = {"paint": Copies(7.0, 3.1), "paint_pbr": Copies(9.1, 3.1), "delight": Copies(7.0, 3.1)}
FED = 19.6  # copies, as operands, of the tokens that the feed-forward takes at once
LOOKING = Copies(7.0, 24.9)  # the reference stream, with what it keeps
ATTENDED, KEPT = 16.7, 8.4  # copies of the reference's own map while it is attended to, and all the time


def paint_bytes(entries: Mapping[str, int]) -> PartBytes:
    """The bytes of a part from those of its tensors by name; what is outside the blocks moves as blocks of its own."""
    size = part_bytes(entries, BLOCK)
    return PartBytes(size.total, max(size.block, size.outer), size.layer)


@dataclass(frozen=True, slots=True)
class PaintRun:
    """Settings of a painting or a delighting; zeros stand for the values that the model was trained with.

    Args:
        size: of a view or the picture, pixels.
        views: cameras.
        steps: of the sampler.
        rows: of guidance in a step, beside one another.
        references: pictures of the object.
    """

    steps: int
    rows: int
    size: int = TAUGHT_SIZE
    views: int = TAUGHT_VIEWS
    references: int = 1


def planned_run(pipeline: Any, size: int = 0, views: int = 0, steps: int = 0, guided: int | None = None) -> PaintRun:
    """Replace zeros by the values that the model was trained with, and None by its publisher's.

    Args:
        guided: rows of a step beside the first.
    """
    delight = pipeline.family == "delight"
    own = None if delight else PUBLISHED[pipeline.variant]
    if guided is None:
        guided = int(own is not None and own.guidance != 1)
    usual = DELIGHT_STEPS if own is None else own.steps
    return PaintRun(steps or usual, 1 + guided, size or TAUGHT_SIZE, 1 if delight else views or TAUGHT_VIEWS)


def paint_needs(pipeline: Any, run: PaintRun, mode: str = "") -> tuple[StageNeed, ...]:
    """Memory that each stage of a paint or delight pipeline needs, in the order they run.

    Args:
        mode: of our own offloader; by default the pipeline's own.
    """
    mode, delight = mode or str(pipeline.offloader.mode), pipeline.family == "delight"
    pictures = run.rows * run.views * (MATERIALS if pipeline.family == "paint_pbr" else 1)
    side, dtype = run.size // REDUCTION, pipeline.precision.vae
    active = [  # one picture, or 77 tokens, take less than a layer
        ("text", "text_encoder", 0),
        ("encoding", "vae", vae_bytes(ENCODED, run.size, dtype)),
        ("image", "image_encoder", 0),
        ("reference", "reference", looking_bytes(pipeline, run.references, (side, side))),
        (STEPPING[delight], "unet", step_bytes(pipeline, pictures, (side, side), 0 if delight else run.references)),
        ("decoding", "vae", vae_bytes(DECODED, run.size, dtype)),
    ]
    needs, stays = [], dict[str, int]()
    for name, part, activations in active:
        if part not in pipeline.weights:
            continue
        kept = sum(size for other, size in stays.items() if other != part)
        size = pipeline.weights[part]
        own, ahead = size.resident(mode, part), ahead_bytes(pipeline.offloader, size, part, mode)
        needs.append(StageNeed(name, kept, own, activations, ahead=ahead))
        if mode == "none" and not part.endswith("_encoder"):  # these leave after their one use
            stays[part] = pipeline.weights[part].total
    return tuple(needs)


def step_bytes(pipeline: Any, pictures: int, size: tuple[int, int], references: int = 1) -> int:
    """Activations at the peak of one forward of the UNet.

    Args:
        pictures: rows times materials times views.
        size: of the latents.
        references: pictures kept; 0 for delight.
    """
    fed = min(pictures * size[0] * size[1], max(FED_TOKENS, size[0] * size[1])) / (size[0] * size[1])
    attending = map_bytes(pipeline, pictures, size, ATTENDING) + map_bytes(
        pipeline, references, size, Copies(0, ATTENDED)
    )
    feeding = map_bytes(pipeline, pictures, size, FEEDING[pipeline.family]) + map_bytes(
        pipeline, fed, size, Copies(0, FED)
    )
    return max(attending, feeding + map_bytes(pipeline, references, size, Copies(0, KEPT)))


def looking_bytes(pipeline: Any, references: int, size: tuple[int, int]) -> int:
    """Activations at the peak of the reference stream, what it keeps among them."""
    return map_bytes(pipeline, references, size, LOOKING)


def map_bytes(pipeline: Any, pictures: float, size: tuple[int, int], copies: Copies) -> int:
    """Bytes of ``copies`` of the first level's feature maps of ``pictures`` latents of ``size``."""
    precision = pipeline.precision
    operands = (precision.compute or precision.transformer).itemsize
    residual = (precision.residual or precision.compute or precision.transformer).itemsize
    features = pictures * size[0] * size[1] * pipeline.shape.widths[0]
    return int(features * (copies.residual * residual + copies.operands * operands))


def vae_bytes(features: int, side: int, dtype: torch.dtype) -> int:
    """Activations at the peak of one square picture: ``features`` is :data:`ENCODED` or :data:`DECODED`."""
    return side**2 * features * dtype.itemsize


def asked(activations: int) -> int:
    """Bytes to keep free for a forward, from the forecast of its activations."""
    return int(activations * MARGIN)
