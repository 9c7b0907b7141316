"""ComfyUI's model folders: which models are there, by the names the load node lists."""

from __future__ import annotations

from pathlib import Path

import folder_paths

from ..compat.device.facts import facts_for
from ..compat.errors import CheckpointError
from ..pipelines.loading.folder import find_models
from ..pipelines.loading.published import remedy

MODEL_KEYS = ("diffusers", "diffusion_models")
ENCODER_KEYS = ("diffusers", "clip_vision", "style_models")
NO_MODEL = "no model found"
AUTO = "auto"

_listed: dict[tuple[tuple[str, float], ...], dict[str, Path]] = {}


def model_roots() -> list[Path]:
    """The folders in which models are searched, those of extra_model_paths.yaml included."""
    return _roots(MODEL_KEYS)


def encoder_roots() -> list[Path]:
    """The folders in which image encoders are searched."""
    return _roots(ENCODER_KEYS)


def models() -> dict[str, Path]:
    """Name to folder of every model found; scanned again only when a folder has changed."""
    stamp = _stamp(model_roots())
    if stamp not in _listed:
        _listed.clear()
        _listed[stamp] = _named(model_roots(), find_models(model_roots()))
    return _listed[stamp]


def model_choices() -> list[str]:
    """What the load node lists; one entry that says so when there is nothing."""
    return list(models()) or [NO_MODEL]


def provider_choices() -> list[str]:
    """What the inputs for borrowed parts list, ``auto`` first."""
    return [AUTO, *dict.fromkeys([*models(), *_encoders()])]


def model_folder(name: str) -> Path:
    """The folder of a listed model.

    Raises:
        CheckpointError: no model of that name; says which folders were searched.
    """
    if name in models():
        return models()[name]
    searched = ", ".join(map(str, model_roots()))
    raise CheckpointError(
        f"no model {name!r} in {searched}" if name != NO_MODEL else f"no model in {searched}",
        expected="a diffusers model folder with model_index.json, or a FramePack transformer folder",
        fix=remedy(name, model_roots()[0], facts_for("cpu").total_bytes),
    )


def provider_folder(name: str) -> Path | None:
    """The folder that lends parts; None for ``auto``."""
    if name == AUTO:
        return None
    return _encoders().get(name) or model_folder(name)


def kept_folder() -> Path:
    """Where sampled latents are kept: ComfyUI empties its temporary folder at each start, so not there."""
    return state_folder() / "kept"


def state_folder() -> Path:
    """Where probe results and settings are kept, in ComfyUI's user directory."""
    return Path(folder_paths.get_user_directory()) / "anygpu"


def _encoders() -> dict[str, Path]:
    """Name to folder of every folder with an image encoder in it."""
    roots = encoder_roots()
    return _named(roots, [found.parent.parent for root in roots for found in root.glob("*/image_encoder/config.json")])


def _roots(keys: tuple[str, ...]) -> list[Path]:
    found = [
        Path(path)
        for key in keys
        if key in folder_paths.folder_names_and_paths
        for path in folder_paths.get_folder_paths(key)
    ]
    return list(dict.fromkeys(found))


def _stamp(roots: list[Path]) -> tuple[tuple[str, float], ...]:
    """Each folder that :func:`find_models` looks into, and when it last changed: a download may be listed half way."""
    watched: dict[Path, None] = {}
    level = [root for root in roots if root.is_dir()]
    for _ in range(4):
        watched.update(dict.fromkeys(level))
        level = [child for folder in level for child in folder.iterdir() if child.is_dir() and child.name[0] != "."]
    return tuple((str(folder), folder.stat().st_mtime) for folder in watched)


def _named(roots: list[Path], folders: list[Path]) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for folder in folders:
        root = next((root for root in roots if folder.is_relative_to(root) and folder != root), None)
        if root is not None:
            named.setdefault(folder.relative_to(root).as_posix(), folder)
    return named
