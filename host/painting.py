"""Paint models among ComfyUI's folders, the preview of painted views, and views kept until they are baked."""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.latent_formats
import comfy.model_management
import folder_paths
import latent_preview
import torch

from ..compat.errors import CheckpointError
from ..paint.loading import PAGES, is_paint_folder
from ..paint.pictures import saved
from ..paint.sampling.painting import Painted
from .folders import AUTO, MODEL_KEYS, kept_folder
from .progress import NodeProgress

log = logging.getLogger(__name__)

NO_MODEL = "no paint model found"
ENCODER_KEYS = ("diffusers", "clip_vision", "diffusion_models")
SUFFIXES = (".safetensors", ".bin")
PREVIEW_SIZE = 768


def paint_models() -> dict[str, Path]:
    """Name to path of every paint and delight checkpoint: folders up to two deep, and files named after them."""
    found: dict[str, Path] = {}
    for root in _roots(MODEL_KEYS):
        for folder in sorted({root, *_folders(root), *(deep for child in _folders(root) for deep in _folders(child))}):
            if is_paint_folder(folder) and folder != root:
                found.setdefault(folder.relative_to(root).as_posix(), folder)
            elif "hunyuan3d" not in folder.name.lower() or folder == root:
                for file in sorted(folder.iterdir()):
                    name = file.name.lower()
                    if file.suffix in SUFFIXES and "hunyuan3d" in name and ("paint" in name or "delight" in name):
                        found.setdefault(file.relative_to(root).as_posix(), file)
    return found


def paint_choices() -> list[str]:
    """What the load node lists; one entry that says so when there is nothing."""
    return list(paint_models()) or [NO_MODEL]


def paint_path(name: str) -> Path:
    """The folder or file of a listed paint model.

    Raises:
        CheckpointError: no paint model of that name; says which folders were searched.
    """
    models = paint_models()
    if name in models:
        return models[name]
    searched = ", ".join(map(str, _roots(MODEL_KEYS)))
    raise CheckpointError(
        f"no paint model {name!r} in {searched}" if name != NO_MODEL else f"no paint model in {searched}",
        expected="a folder hunyuan3d-… that holds the folders unet and vae",
        fix=f"Download one ({'; '.join(PAGES.values())}) into {_roots(MODEL_KEYS)[0]} and press R.",
    )


def model_stamp(name: str) -> Any:
    """What changes when the files of a listed model change."""
    path = paint_models().get(name)
    files = [path] if path is not None and path.is_file() else [] if path is None else path.rglob("*.*")
    return sorted((str(file), file.stat().st_mtime, file.stat().st_size) for file in files)


def provider_choices() -> list[str]:
    """What the inputs for a VAE or image encoder from elsewhere list: ``auto``, then folders with a config.json."""
    return [AUTO, *_lenders()]


def provider_path(name: str) -> Path | None:
    """The folder of a listed lender; None for ``auto``.

    Raises:
        CheckpointError: it is gone.
    """
    if name == AUTO:
        return None
    if name not in _lenders():
        raise CheckpointError(f"no folder {name!r} that lends parts", expected="one of the list", fix="Press R.")
    return _lenders()[name]


def _lenders() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for root in _roots(ENCODER_KEYS):
        for config in sorted([*root.glob("*/config.json"), *root.glob("*/vae/config.json")]):
            found.setdefault(config.parent.relative_to(root).as_posix(), config.parent)
    return found


def _roots(keys: tuple[str, ...]) -> list[Path]:
    known = [key for key in keys if key in folder_paths.folder_names_and_paths]
    found = (Path(path) for key in known for path in folder_paths.get_folder_paths(key))
    return [root for root in dict.fromkeys(found) if root.is_dir()]


def _folders(folder: Path) -> list[Path]:
    return [child for child in folder.iterdir() if child.is_dir() and child.name[0] != "."] if folder.is_dir() else []


class PaintProgress(NodeProgress):
    """A node's progress whose previews are the views beside one another."""

    def _picture(self, preview: Callable[[], torch.Tensor]) -> Any:
        """The views as one row, or None when previews are off."""
        from PIL import Image

        device = comfy.model_management.get_torch_device()
        if latent_preview.get_previewer(device, comfy.latent_formats.SD15()) is None:
            return None
        row = torch.cat(list(preview()), dim=1).clamp(0, 1).mul(255).to(torch.uint8).cpu().numpy()
        picture = Image.fromarray(row)
        return ("JPEG", picture.resize((picture.width * 4, picture.height * 4)), PREVIEW_SIZE)


def keep_views(painted: Painted) -> tuple[str, Callable[[], None]]:
    """Painted views as pictures in ComfyUI's temporary folder: where they are, and what deletes them again."""
    folder = kept_folder() / f"views-{uuid.uuid4().hex[:8]}"
    try:
        saved(painted.views, folder, "view")
        if painted.metallic_roughness is not None:
            saved(painted.metallic_roughness, folder, "metallic_roughness")
    except OSError as error:
        log.warning("AnyGPU: painted views could not be kept in %s: %s", folder, error)
        return "", lambda: None
    log.info("AnyGPU: painted views are kept in %s until they are baked", folder)
    shown = folder.relative_to(kept_folder().parent.parent).as_posix()
    return shown, lambda: shutil.rmtree(folder, ignore_errors=True)
