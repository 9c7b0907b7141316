"""One training item for Musubi Tuner: its latents, whole or cut into FramePack's sections, and its caption."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...compat.errors import InputError, UnsupportedError
from ..base import SECTION_ORDERS, ImageCondition, Prompt
from ..family import FamilySpec
from ..registry import FAMILIES, family_named
from .convert import KEY, samples_of
from .musubi import (
    DTYPES,
    MUSUBI,
    architecture_of,
    save_latent_cache,
    save_text_cache,
    scaled,
    write_latents,
)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a video becomes FramePack's sections.

    Args:
        image: its encoded first frame.
        window: latent frames per section.
        order: one of :data:`SECTION_ORDERS`.
    """

    image: ImageCondition
    window: int = 9
    order: str = SECTION_ORDERS[0]


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
        cut: makes FramePack's sections of the latents. say: called with how many there are and what is left out.

    Raises:
        InputError: neither latents nor a prompt, or latents and a prompt of two architectures.
            Otherwise as :func:`save_latent_cache` and :func:`save_text_cache`.
    """
    if latent is None and prompt is None:
        raise InputError("neither latent nor prompt", expected="at least one of them", fix="Connect one of them.")
    paths: list[Path] = []
    if latent is not None:
        family = cut.image.family if cut is not None else str(latent.get(KEY, {}).get("family", ""))
        if prompt is not None and prompt.family != family:
            raise InputError(
                f"a prompt of {prompt.family!r} beside latents for {family!r}",
                expected="both of the same model, because Musubi Tuner looks for both under one name",
                fix=f"Encode the caption with a pipeline of {family}.",
            )
        if cut is None:
            paths = [save_latent_cache(folder, name, latent, dtype)]
        else:
            paths = _save_sections(folder, name, latent, cut, dtype, notify)
    return paths if prompt is None else [*paths, save_text_cache(folder, name, prompt, caption, dtype)]


def _save_sections(
    folder: Path, name: str, latent: Mapping[str, Any], cut: Cut, dtype: str, notify: Callable[[str], None]
) -> list[Path]:
    samples, known = samples_of(latent), latent.get(KEY, {})
    family = family_named(cut.image.family)
    _require_same_vae(family, known, latent)
    plan, left = family.code.training_plan(samples.shape[2], cut.window, cut.order)
    kind = architecture_of(family.id, "latents")
    film = scaled(samples, kind, DTYPES[1] if dtype == DTYPES[0] else dtype)
    told = f"{plan.count} sections of {plan.window} latent frames"
    notify(f"{told}; the last {left} frames are left out" if left else told)
    return [
        write_latents(folder, name, kind, known, tensors, {}, place)
        for place, tensors in family.code.training_sections(film, cut.image, plan)
    ]


def _require_same_vae(family: FamilySpec, known: Mapping[str, Any], latent: Mapping[str, Any]) -> None:
    """Raise where these latents cannot be cut into sections of ``family``."""
    source = str(known.get("family", ""))
    same = [other.id for other in FAMILIES.values() if other.files.kinds.get("vae") == family.files.kinds.get("vae")]
    if source not in same or not family.recipes.sections or latent.get(MUSUBI):
        of = "a Musubi Tuner cache" if latent.get(MUSUBI) else repr(source or "an unknown family")
        raise UnsupportedError(
            f"{family.title}'s sections of latents of {of} with an image of {family.id!r}",
            expected="latents of FramePack or HunyuanVideo, which share a VAE, and an image of FramePack",
            fix="Disconnect image for other models and for latents from a cache.",
        )
