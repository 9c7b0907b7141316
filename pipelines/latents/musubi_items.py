"""One training item for Musubi Tuner: its latents, whole or cut into FramePack's sections, and its caption.

A section is trained as it will be sampled, so its clean latents and indices are those of our own FramePack: what stands
around it in the film takes the place of what would have been sampled before it.

Source: kohya-ss/musubi-tuner at 30c658c, ``fpack_cache_latents.py`` (what its caches hold), ``dataset/bucket.py`` and
``dataset/image_video_dataset.py`` (names that its readers find).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...compat.checkpoints.latents import dtype_name
from ...compat.errors import InputError, UnsupportedError
from ..base import ImageCondition, Prompt
from ..families.framepack.sections import INVERTED, LARGEST_WINDOW, TEMPORAL_RATIO, VANILLA, History, Plan
from .convert import KEY, samples_of
from .musubi import (
    DTYPES,
    MUSUBI,
    Architecture,
    architecture_of,
    save_latent_cache,
    save_text_cache,
    scaled,
    sized,
    write_latents,
)

FRAMEPACK = "framepack"
ORDERS = (INVERTED, VANILLA)  # in which FramePack's sections are trained; grows at the end
SAME_VAE = (FRAMEPACK, "hunyuan_video")
VISION = "vision"
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


@dataclass(frozen=True, slots=True)
class Cut:
    """How a video becomes FramePack's sections.

    Args:
        image: its encoded first frame. window: latent frames per section. order: one of :data:`ORDERS`.
    """

    image: ImageCondition
    window: int = 9
    order: str = INVERTED


def save_item(
    folder: Path,
    name: str,
    latent: Mapping[str, Any] | None,
    prompt: Prompt | None,
    caption: str,
    dtype: str,
    cut: Cut | None = None,
    notify: Callable[[str], None] = lambda _text: None,
) -> list[Path]:
    """Write what there is of one training item, and return the paths.

    Args:
        cut: makes FramePack's sections of the latents. say: told how many there are and what is left out.

    Raises:
        InputError: neither latents nor a prompt, or latents and a prompt of two architectures; as :func:`sections`.
            Otherwise as :func:`save_latent_cache` and :func:`save_text_cache`.
    """
    if latent is None and prompt is None:
        raise InputError("neither latent nor prompt", expected="at least one of them", fix="Connect what to save.")
    if latent is None:
        paths = []
    else:
        family = FRAMEPACK if cut is not None else str(latent.get(KEY, {}).get("family", ""))
        if prompt is not None and prompt.family != family:
            raise InputError(
                f"a prompt of {prompt.family!r} beside latents for {family!r}",
                expected="both of one model, since that trainer looks for both under one name",
                fix=f"Encode the caption with a pipeline of {family}.",
            )
        if cut is None:
            paths = [save_latent_cache(folder, name, latent, dtype)]
        else:
            paths = _save_sections(folder, name, latent, cut, dtype, notify)
    return paths if prompt is None else [*paths, save_text_cache(folder, name, prompt, caption, dtype)]


def sections(film: torch.Tensor, embeddings: torch.Tensor, plan: Plan) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """The place in the film and the tensors of each section, in the order in which they would be sampled.

    Args:
        film: latents (C, T, H, W) in the transformer's space, the first of them of the start image alone.
        embeddings: of the start image, (N, D).
    """
    history = History(plan, film[None, :, :1])
    for step in range(plan.count):
        place = plan.place(step)
        first = 1 + place * plan.window
        target, seen, indices = film[:, first : first + plan.window], history.seen(), plan.indices(step)
        size = sized(target)
        found = {f"latents_{size}": target}
        found |= {f"{theirs}_{size}": seen[ours][0] for theirs, ours in CLEAN.items()}
        found |= {f"{theirs}_{dtype_name(torch.int64)}": indices[ours] for theirs, ours in INDICES.items()}
        found[f"image_embeddings_{dtype_name(film.dtype)}"] = embeddings.to(film.dtype)
        yield place, found
        history.add(target[None])


def _save_sections(
    folder: Path, name: str, latent: Mapping[str, Any], cut: Cut, dtype: str, notify: Callable[[str], None]
) -> list[Path]:
    samples, known = samples_of(latent), latent.get(KEY, {})
    kind, plan, embeddings = _checked(samples, known, latent, cut)
    film = scaled(samples, kind, DTYPES[1] if dtype == DTYPES[0] else dtype)
    left = film.shape[1] - 1 - plan.count * plan.window
    told = f"{plan.count} sections of {plan.window} latent frames"
    notify(f"{told}; the last {left * TEMPORAL_RATIO} frames are left out" if left else told)
    return [
        write_latents(folder, name, kind, known, tensors, {}, place)
        for place, tensors in sections(film, embeddings, plan)
    ]


def _checked(
    samples: torch.Tensor, known: Mapping[str, Any], latent: Mapping[str, Any], cut: Cut
) -> tuple[Architecture, Plan, torch.Tensor]:
    """The architecture, the plan of sections and the embeddings (N, D) of the first frame."""
    family = str(known.get("family", ""))
    if family not in SAME_VAE or cut.image.family != FRAMEPACK or latent.get(MUSUBI):
        of = "a Musubi Tuner cache" if latent.get(MUSUBI) else repr(family or "an unknown family")
        raise UnsupportedError(
            f"FramePack's sections of latents of {of} with an image of {cut.image.family!r}",
            expected="latents of FramePack or HunyuanVideo, which share a VAE, and an image of FramePack",
            fix="Disconnect image for other models, and where the latents came from a cache.",
        )
    if not 1 <= cut.window <= LARGEST_WINDOW or cut.order not in ORDERS:
        raise InputError(
            f"window {cut.window}, order {cut.order!r}",
            expected=f"window 1 to {LARGEST_WINDOW}, order {' or '.join(ORDERS)}",
            fix="The models were trained with window 9.",
        )
    count = (samples.shape[2] - 1) // cut.window
    if count < 1:
        raise InputError(
            f"{samples.shape[2]} latent frames for a section of {cut.window}",
            expected=f"at least {cut.window + 1}, which are {cut.window * TEMPORAL_RATIO + 1} frames of video",
            fix="Use a longer video or a smaller window.",
        )
    kind = architecture_of(FRAMEPACK, "latents")
    return kind, Plan(cut.order, count, cut.window), cut.image.tensors[VISION][0].detach().cpu()
