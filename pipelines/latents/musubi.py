"""Caches of Musubi Tuner as LATENT and prompt, and back: three of its architectures are families of ours. What we do
not compute with is written back as read. Source: kohya-ss/musubi-tuner 30c658c ``dataset/{cache_io,bucket}.py``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ...compat.checkpoints.latents import dtype_name, dtype_named, written
from ...compat.device.execution import to_host
from ...compat.errors import CheckpointError, InputError, UnsupportedError
from ..base import EMBEDS, LATENT_VERSION, MASK, SECTION_ORDERS, VISION, ImageCondition, Prompt
from ..family import MusubiCache
from ..registry import FAMILIES, family_named
from .convert import KEY, samples_of

MUSUBI = "musubi"  # the key under which a LATENT and a prompt carry what was read
FORMAT_VERSION = "1.0.1"
DTYPES = ("as loaded", "float32", "bfloat16", "float16")  # of a written cache; grows at the end
LATENTS = re.compile(r"latents_(\d+)x(\d+)x(\d+)_(\w+)")
RANGE = re.compile(r"_\d{5}-\d{3,}(-\d+)?$")  # first frame, frames and section, behind the name of a video
NAME = re.compile(r"[^/\\]*[^/\\.\s][^/\\]*")
GUESSED_DTYPES = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "float64", "int64", "int32")


def architectures() -> dict[str, MusubiCache]:
    """Our family ids to their caches, of those that this trainer has."""
    return {family.id: family.published.musubi for family in FAMILIES.values() if family.published.musubi is not None}


def kind_in(metadata: Mapping[str, str], file_name: str) -> str:
    """``latent`` or ``prompt`` for a cache of an architecture that we have; empty for any other file."""
    if not any(kind.full == metadata.get("architecture") for kind in architectures().values()):
        return ""
    return "prompt" if "caption1" in metadata or file_name.endswith("_te.safetensors") else "latent"


def latent_of(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """A latent cache as a LATENT (1, C, T, H, W) in core's space, fp32 where that is scaled, else in the file's dtype.
    UnsupportedError for an unknown architecture, CheckpointError for a tensor that its name does not describe."""
    family, kind = _architecture(path, metadata)
    name, match = next((name, parsed) for name in tensors if (parsed := LATENTS.fullmatch(name)))
    stored, sizes = tensors[name], [int(size) for size in match.groups()[:3]]
    if stored.ndim != 4 or list(stored.shape[1:]) != sizes or dtype_name(stored.dtype) != match[4]:
        found = f"{name!r} of {str(path)!r} is {dtype_name(stored.dtype)} {tuple(stored.shape)}"
        raise CheckpointError(found, expected="what its name says, (C, F, H, W)", fix="Cache this item again.")
    known = {"family": family, "task": "text", **_sizes(stored, kind)}
    known |= {"fps": family_named(family).sizes.defaults.fps, "seed": 0, "space": "vae"}
    others = {other: tensor for other, tensor in tensors.items() if other != name}
    return {
        "samples": (stored if kind.scale == 1.0 else stored.float() / kind.scale).unsqueeze(0),
        KEY: {**known, "version": LATENT_VERSION, "extra": {}},
        MUSUBI: {"architecture": kind.full, "dtype": match[4], "tensors": others, "metadata": dict(metadata)},
    }


def prompt_of(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Prompt:
    """A cache of text embeddings as a prompt in fp32, cut to its valid tokens, without a negative. UnsupportedError for
    an unknown architecture, CheckpointError for embeddings or a mask that are missing or of another shape."""
    family, kind = _architecture(path, metadata)
    own = {_bare(name): tensor for name, tensor in tensors.items()}
    missing = [name for name in (*kind.text, kind.mask) if name and name not in own]
    if missing:
        found, expected = f"no {missing[0]!r} in {str(path)!r}", f"the embeddings {', '.join(kind.text)}"
        fix = "Let Musubi Tuner cache the outputs of every text encoder."
        raise CheckpointError(found, expected=expected, fix=fix)
    embeds = {ours: own[theirs].float().unsqueeze(0) for theirs, ours in kind.text.items()}
    axes = {theirs: (2,) if ours == EMBEDS else (1, 2) for theirs, ours in kind.text.items()}
    strange = [theirs for theirs, count in axes.items() if own[theirs].ndim not in count]
    if kind.mask and not strange and own[kind.mask].shape != embeds[EMBEDS].shape[1:2]:
        strange = [kind.mask]
    if strange:
        found = f"{strange[0]!r} of {tuple(own[strange[0]].shape)} in {str(path)!r}"
        fix = "Let Musubi Tuner cache the outputs of the text encoders again."
        raise CheckpointError(found, expected="embeddings (N, D), and a mask of N tokens", fix=fix)
    if kind.mask:
        length = max(1, int(own[kind.mask].ne(0).sum()))
        embeds[EMBEDS] = embeds[EMBEDS][:, :length]
        embeds[MASK] = torch.ones(1, length, dtype=torch.long)
    read = {"architecture": kind.full, "tensors": dict(tensors), "metadata": dict(metadata)}
    return Prompt(family, embeds, extra={"text": metadata.get("caption1", ""), MUSUBI: read})


def save_latent_cache(folder: Path, name: str, latent: Mapping[str, Any], dtype: str = DTYPES[0]) -> Path:
    """Write a LATENT as a latent cache and return its path; a video's name gets the frame range that its reader wants.
    The first of :data:`DTYPES` is the dtype of the cache it came from, else fp32. Raises UnsupportedError for a family
    without caches, FramePack's latents that came from none, or resized latents of a cache with further tensors."""
    samples, known, read = samples_of(latent), latent.get(KEY, {}), latent.get(MUSUBI, {})
    kind = _architecture_of(str(known.get("family", "")), "latents")
    if not read and family_named(str(known.get("family"))).recipes.sections:
        found = f"{family_named(str(known['family'])).title} latents without image embeddings"
        expected = "the encoded first frame, which Musubi Tuner caches beside each section"
        raise UnsupportedError(found, expected=expected, fix="Connect AnyGPU Encode Image to image.")
    stored = _scaled(samples, kind, str(read.get("dtype", "float32")) if dtype == DTYPES[0] else dtype)
    sizes, more, metadata = _sizes(stored, kind), read.get("tensors", {}), read.get("metadata", {})
    if any(known[key] != size for key, size in sizes.items()):  # a node of core's keeps the record as it was
        if more:
            found, expected = "resized latents of a cache with further tensors", "the size that these have"
            raise UnsupportedError(found, expected=expected, fix="Cache the video again at this size.")
        metadata = {}
    return _write_latents(folder, name, kind, sizes, {f"latents_{sized(stored)}": stored, **more}, metadata)


def _sizes(latents: torch.Tensor, kind: MusubiCache) -> dict[str, int]:
    """Pixel frames and pixels of latents (C, T, H, W)."""
    count, rows, columns = latents.shape[1:]
    return {"frames": (count - 1) * 4 + 1, "height": rows * kind.ratio, "width": columns * kind.ratio}


def _scaled(samples: torch.Tensor, kind: MusubiCache, dtype: str) -> torch.Tensor:
    """Latents (C, T, H, W) of a LATENT's samples in an architecture's space, of the named dtype, on the CPU."""
    stored = to_host(samples)[0]
    return (stored if kind.scale == 1.0 else stored.float() * kind.scale).to(dtype_named(dtype) or torch.float32)


def sized(latents: torch.Tensor) -> str:
    """The end of the name of a tensor of latents (C, T, H, W): its size and its dtype."""
    return f"{'x'.join(map(str, latents.shape[1:]))}_{dtype_name(latents.dtype)}"


def _write_latents(
    folder: Path, name: str, kind: MusubiCache, sizes: Mapping[str, int], tensors: Mapping[str, torch.Tensor],
    read: Mapping[str, str], section: int | None = None,
) -> Path:  # fmt: skip
    """Write the tensors of a latent cache and return its path. ``sizes`` are width, height and frames of the item,
    ``read`` is the metadata of the cache that it came from, ``section`` the place in the film of one of FramePack's."""
    width, height, frames = (sizes[key] for key in ("width", "height", "frames"))
    metadata = {"width": f"{width}", "height": f"{height}", "frame_count": f"{frames}", **read}
    metadata |= {"architecture": kind.full, "format_version": FORMAT_VERSION}
    item = _item(name) if frames == 1 or RANGE.search(name) else f"{_item(name)}_00000-{frames:03}"
    item += "" if section is None else f"-{section:04}"
    return written(folder / f"{item}_{width:04}x{height:04}_{kind.short}.safetensors", tensors, metadata)


def save_text_cache(folder: Path, name: str, prompt: Prompt, caption: str = "", dtype: str = DTYPES[0]) -> Path:
    """Write the positive embeddings of a prompt as a text cache and return its path; all ranges of a video share it.
    With the first of :data:`DTYPES` a prompt from such a cache is written as it was read, padding included, another in
    fp32. An empty ``caption`` stands for the text that the prompt was encoded from."""
    kind = _architecture_of(prompt.family, "a prompt")
    path = folder / f"{RANGE.sub('', _item(name))}_{kind.short}_te.safetensors"
    read = prompt.extra.get(MUSUBI, {})
    if read and dtype == DTYPES[0]:
        tensors = dict(read["tensors"])
    else:
        tensors = _text_tensors(kind, prompt, torch.float32 if dtype == DTYPES[0] else dtype_named(dtype))
    metadata = {**read.get("metadata", {}), "architecture": kind.full, "format_version": FORMAT_VERSION}
    metadata["caption1"] = caption or str(prompt.extra.get("text", ""))
    return written(path, tensors, metadata)


@dataclass(frozen=True, slots=True)
class Cut:
    """The way to cut a video into FramePack's sections."""

    image: ImageCondition  # its encoded first frame
    window: int = 9  # latent frames per section
    order: str = SECTION_ORDERS[0]  # one of :data:`SECTION_ORDERS`


def save_item(
    folder: Path, name: str, latent: Mapping[str, Any] | None, prompt: Prompt | None, caption: str, dtype: str,
    cut: Cut | None = None, notify: Callable[[str], None] = lambda _text: None,
) -> list[Path]:  # fmt: skip
    """Write what there is of one training item, and return the paths; ``cut`` makes FramePack's sections of latents.
    Raises InputError for neither latents nor a prompt, the two of different families, or a name that is no file name;
    UnsupportedError for a family that Musubi Tuner lacks, or FramePack's latents without ``cut`` or a cache."""
    if latent is None and prompt is None:
        raise InputError("neither latent nor prompt", expected="at least one of them", fix="Connect one of them.")
    paths: list[Path] = []
    if latent is not None:
        family = cut.image.family if cut is not None else str(latent.get(KEY, {}).get("family", ""))
        if prompt is not None and family and prompt.family != family:
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
    """Write one latent cache for each section of FramePack that ``cut`` makes of ``latent``; returns their paths and
    tells the user their number and the frames left out. Raises UnsupportedError for latents of another VAE or from a
    cache, and for an image that is not FramePack's or has no vision states."""
    samples, family = samples_of(latent), family_named(cut.image.family)
    source = str(latent.get(KEY, {}).get("family", ""))
    same = [other.id for other in FAMILIES.values() if other.files.kinds.get("vae") == family.files.kinds.get("vae")]
    if source not in same or not family.recipes.sections or latent.get(MUSUBI) or VISION not in cut.image.tensors:
        of = "a Musubi Tuner cache" if latent.get(MUSUBI) else repr(source or "an unknown family")
        raise UnsupportedError(
            f"{family.title}'s sections of latents of {of} with an image of {family.id!r}",
            expected="latents of FramePack or HunyuanVideo, which share a VAE, and a start image of FramePack",
            fix="Disconnect image for other models and for latents from a cache, or encode it as frame 0.",
        )
    plan, left = family.code.training_plan(samples.shape[2], cut.window, cut.order)
    kind = _architecture_of(family.id, "latents")
    film = _scaled(samples, kind, DTYPES[1] if dtype == DTYPES[0] else dtype)
    summary = f"{plan.count} sections of {plan.window} latent frames"
    notify(f"{summary}; the video's last {left} frames are left out" if left else summary)
    return [
        _write_latents(folder, name, kind, _sizes(film, kind), tensors, read={}, section=place)
        for place, tensors in family.code.training_sections(film, cut.image, plan)
    ]


def _text_tensors(kind: MusubiCache, prompt: Prompt, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The positive embeddings by the names of a text cache, of ``dtype`` (None: fp32), padded and with a mask where the
    cache's are. Raises UnsupportedError for a prompt without one of them."""
    tensors: dict[str, torch.Tensor] = {}
    for theirs, ours in kind.text.items():
        if ours not in prompt.embeds:
            found, fix = f"a prompt without {ours!r}", "Encode the text with AnyGPU Encode Prompt."
            expected = f"the embeddings {', '.join(kind.text.values())} of {prompt.family}"
            raise UnsupportedError(found, expected=expected, fix=fix)
        embeds = prompt.embeds[ours][0].to(dtype or torch.float32)
        if ours == EMBEDS and kind.padded:
            length, room = embeds.shape[0], max(0, kind.padded - embeds.shape[0])
            embeds = functional.pad(embeds, (0, 0, 0, room))
            mask = torch.arange(length + room) < length
            tensors[kind.mask] = mask if kind.mask_bool else mask.long()
        tensors[f"{theirs}_{dtype_name(embeds.dtype)}"] = embeds
    return tensors


def _architecture(path: Path, metadata: Mapping[str, str]) -> tuple[str, MusubiCache]:
    """The family id and the kind of cache that a file's metadata names; raises UnsupportedError for another one."""
    name, known = metadata.get("architecture"), architectures()
    for family, kind in known.items():
        if kind.full == name:
            return family, kind
    found = f"a Musubi Tuner cache of {name!r} in {path.name!r}"
    expected = f"one of {', '.join(each.full for each in known.values())}"
    raise UnsupportedError(found, expected=expected, fix="Choose a cache of one of these architectures.")


def _architecture_of(family: str, subject: str) -> MusubiCache:
    """The caches of a family of ours; raises UnsupportedError, about ``subject``, where the trainer has none."""
    known = architectures()
    if family in known:
        return known[family]
    found = f"{subject} of {family or 'an unknown family'!r} for a Musubi Tuner cache"
    fix = "Use AnyGPU Save Latent or AnyGPU Save Prompt for other families."
    raise UnsupportedError(found, expected=f"one of {', '.join(known)}", fix=fix)


def _bare(name: str) -> str:
    """A tensor's name without the dtype behind it; masks have none."""
    return next((name.removesuffix(f"_{dtype}") for dtype in GUESSED_DTYPES if name.endswith(f"_{dtype}")), name)


def _item(name: str) -> str:
    if NAME.fullmatch(name) and "\0" not in name:
        return name
    raise InputError(f"name {name!r}", expected="a file name without a folder", fix="Type a name such as clip_01.")
