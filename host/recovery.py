"""The latents of every sampling, saved in ComfyUI's user directory: their list, and a picture of each.

Not in the temporary folder: ComfyUI empties it when it starts and ends, so a crash would destroy them.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import comfy.latent_formats
import comfy.nested_tensor
import torch

from ..pipelines.latents import recovery
from ..pipelines.latents.recovery import Kept
from ..pipelines.latents.store import BESIDE
from .families import latent_format_of
from .folders import kept_folder

log = logging.getLogger(__name__)

NEWEST = "newest"
THUMBNAIL_PIXELS = 160


def listing() -> list[Kept]:
    """What is kept, newest first."""
    return recovery.listing(kept_folder())


def load(name: str, notify: Callable[[str], None] = log.info) -> dict[str, Any]:
    """The kept LATENT of an id, or of the newest one for ``newest``.

    Raises:
        CheckpointError: none of that id is kept.
    """
    latent = recovery.load(kept_folder(), name, notify)
    beside = latent.pop(BESIDE, None)
    if beside is not None:
        latent["samples"] = comfy.nested_tensor.NestedTensor([latent["samples"], *beside])
    return latent


def keep_samples(samples: Sequence[torch.Tensor], record: Mapping[str, Any]) -> str:
    """Keep what one of core's samplers has made; its id, or empty where the disk refused, which the log says.

    Args:
        samples: the tensors of one LATENT. record: as for :func:`recovery.keep_samples`.
    """
    return recovery.keep_samples(kept_folder(), samples, record, log.warning)


def choices() -> list[str]:
    """What the recover node lists: ``newest``, then every id."""
    return [NEWEST, *(item.id for item in listing())]


def stamp(name: str) -> tuple[str, int]:
    """Changes when another file is meant: the id, and when it was written."""
    path = recovery.path_of(kept_folder(), name)
    return path.stem, path.stat().st_mtime_ns


def thumbnail(name: str) -> bytes | None:
    """A small JPEG of the middle frame, by the family's rough colours; None where there are none for it.

    Raises:
        CheckpointError: none of that id is kept.
    """
    from PIL import Image

    latent = load(name)
    if "anygpu" not in latent:  # of core's samplers: nothing says which colours
        return None
    rough = latent_format_of(latent.get("anygpu", {}).get("family")) or comfy.latent_formats.LatentFormat()
    samples, factors = rough.process_in(latent["samples"]), rough.latent_rgb_factors
    if factors is None or len(factors) != samples.shape[1]:
        return None
    bias = torch.tensor(rough.latent_rgb_factors_bias or [0.0, 0.0, 0.0])
    frame = samples[0, :, samples.shape[2] // 2].movedim(0, -1) @ torch.tensor(factors) + bias
    pixels = ((frame.clamp(-1, 1) + 1) * 127.5).to(torch.uint8).numpy()
    picture, target = Image.fromarray(pixels), io.BytesIO()
    scale = THUMBNAIL_PIXELS / max(picture.size)
    picture.resize([max(1, round(side * scale)) for side in picture.size]).save(target, "JPEG", quality=85)
    return target.getvalue()
