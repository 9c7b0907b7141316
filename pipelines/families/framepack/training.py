"""FramePack's sections of a finished film, as its trainer caches them.

A section is trained as it is sampled, so its clean latents and indices are those of our own sampling. Source:
kohya-ss/musubi-tuner at 30c658c, ``fpack_cache_latents.py``, ``dataset/bucket.py``, ``dataset/image_video_dataset.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....compat.checkpoints.latents import dtype_name
from ....compat.device.execution import to_host
from ....compat.errors import InputError
from ...base import SECTION_ORDERS, ImageCondition
from ...latents.musubi import sized
from .keyframes import VISION
from .sections import LARGEST_WINDOW, History, Plan
from .spec import TEMPORAL_RATIO

INDICES = {  # its names of what the transformer's arguments are called here
    "latent_indices": "indices_latents",
    "clean_latent_indices": "indices_latents_clean",
    "clean_latent_2x_indices": "indices_latents_history_2x",
    "clean_latent_4x_indices": "indices_latents_history_4x",
}
CLEAN = {
    "latents_clean": "latents_clean",
    "latents_clean_2x": "latents_history_2x",
    "latents_clean_4x": "latents_history_4x",
}


def training_plan(frames: int, window: int, order: str) -> tuple[Plan, int]:
    """The sections of a film of so many latent frames, and how many pixel frames at its end are left out."""
    if not 1 <= window <= LARGEST_WINDOW or order not in SECTION_ORDERS:
        raise InputError(
            f"window {window}, order {order!r}",
            expected=f"window 1 to {LARGEST_WINDOW}, order {' or '.join(SECTION_ORDERS)}",
            fix="The models were trained with window 9.",
        )
    count = (frames - 1) // window
    if count < 1:
        raise InputError(
            f"{frames} latent frames for a section of {window}",
            expected=f"at least {window + 1}, which are {window * TEMPORAL_RATIO + 1} frames of video",
            fix="Use a longer video or a smaller window.",
        )
    return Plan(order, count, window), (frames - 1 - count * window) * TEMPORAL_RATIO


def training_sections(
    film: torch.Tensor, image: ImageCondition, plan: Plan
) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """The place in the film and the tensors of each section, in the order in which they would be sampled.

    Args:
        film: latents (C, T, H, W) in the transformer's space, the first of them of the start image alone.
        image: the encoded first frame.
    """
    history = History(plan, film[None, :, :1])
    for step in range(plan.count):
        place = plan.place(step)
        first = 1 + place * plan.window
        target, seen, indices = film[:, first : first + plan.window], history.seen(), plan.indices(step)
        size = sized(target)
        tensors = {f"latents_{size}": target}
        tensors |= {f"{theirs}_{size}": seen[ours][0] for theirs, ours in CLEAN.items()}
        tensors |= {f"{theirs}_{dtype_name(torch.int64)}": indices[ours] for theirs, ours in INDICES.items()}
        tensors[f"image_embeddings_{dtype_name(film.dtype)}"] = to_host(image.tensors[VISION][0]).to(film.dtype)
        yield place, tensors
        history.add(target[None])
