"""ComfyUI's model folders: which models, LoRAs and parts from elsewhere are there, by the names that nodes list."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import folder_paths

from ..compat.device.facts import facts_for, value_or
from ..compat.errors import CheckpointError
from ..paint.choices import IG2MV, PAGES, STANDS_IN_FOR, demo_adapter, demo_paint_models, is_paint_folder
from ..pipelines.demo import demo_folder, demo_loras, demo_models
from ..pipelines.family import FamilySpec
from ..pipelines.files.catalogue import published_family, remedy
from ..pipelines.files.models import MODEL_FOLDER, family_of_folder, find_models, no_model_in
from ..pipelines.latents.steps import FOLDER
from ..pipelines.records.job_folder import inside

MODEL_KEYS = ("diffusers", "diffusion_models")
ENCODER_KEYS = ("diffusers", "clip_vision", "style_models")
PAINT_PROVIDER_KEYS = ("diffusers", "clip_vision", "diffusion_models")
LORA_KEYS = ("loras",)
TINY_DECODER_KEYS = ("vae_approx",)
BASE_KEYS = ("checkpoints", "diffusers")
ADAPTER_KEYS = ("diffusion_models", "model_patches", "controlnet", "diffusers")
ADAPTER_WORDS = ("mvadapter", "mv-adapter", "mv_adapter", "ig2mv", "tg2mv")
UPSCALER_KEYS = ("latent_upscale_models", "upscale_models")
NO_MODEL, NO_PAINT_MODEL, NO_LORA = "no model found", "no paint model found", "no LoRA found"
NO_FILE, NO_UPSCALER, NO_ADAPTER = "no file found", "no upscaler found", "no MV-Adapter found"
NOTHING = (NO_MODEL, NO_PAINT_MODEL, NO_LORA, NO_FILE, NO_UPSCALER, NO_ADAPTER)  # entries of lists that have no other
AUTO, NONE = "auto", "none"
DEPTHS = ("*.safetensors", "*/*.safetensors")
PAINT_SUFFIXES = (".safetensors", ".bin")


def roots(keys: Iterable[str]) -> list[Path]:
    """The folders of these kinds, those of extra_model_paths.yaml included."""
    known = [key for key in keys if key in folder_paths.folder_names_and_paths]
    return list(dict.fromkeys(Path(path) for key in known for path in folder_paths.get_folder_paths(key)))


def path_of(name: str, listed: Mapping[str, Path], searched: list[Path], what: tuple[str, str], fix: str) -> Path:
    """The path of a ``listed`` name; for any other CheckpointError with the folders ``searched``. ``what`` is the kind
    of file and what is expected; ``{}`` in ``fix`` becomes the first folder."""
    if name in listed:
        return listed[name]
    kind, expected = what
    where = ", ".join(map(str, searched))
    found = f"no {kind} in {where}" if name in NOTHING else f"no {kind} {name!r} in {where}"
    raise CheckpointError(found, expected=expected, fix=fix.replace("{}", str(next(iter(searched), ""))))


def stamp(*paths: Path | None) -> list[tuple[str, int, int]]:
    """A value that changes with any of these files, their .json files, or files in these folders; None is skipped."""
    there = [path for path in paths if path is not None]
    there += [each for path in there for each in (path.with_suffix(".json"), path.with_name("adapter_config.json"))]
    files = {file for path in there for file in ([path] if path.is_file() else path.rglob("*.*"))}
    states = ((file, file.stat()) for file in files if file.exists())  # a dangling link is not a file
    return sorted((str(file), status.st_mtime_ns, status.st_size) for file, status in states)


def is_safetensors(name: str) -> bool:
    return name.lower().endswith((".safetensors", ".sft"))


def model_roots() -> list[Path]:
    return roots(MODEL_KEYS)


def models() -> dict[str, Path]:
    return _models_at(_change_times(model_roots()))


@functools.lru_cache(maxsize=1)
def _models_at(_changed: tuple[tuple[str, float], ...]) -> dict[str, Path]:
    return _by_name(model_roots(), find_models(model_roots()))


def model_choices() -> list[str]:
    return [*models(), *demo_models()] or [NO_MODEL]


def stand_in_for(name: str) -> str:
    """The demo model that runs in place of a published one while no model of its family is installed; else empty. Also
    empty for image-to-video if the demo takes text alone, and for an unfinished folder: the user should hear."""
    family, there = published_family(name), models()
    families = (value_or(lambda path=path: family_of_folder(path), None) for path in there.values())
    if family is None or name in there or family in families:
        return ""
    return "" if _unfinished(name) or _needs_picture(family, name) else _demo_of(family)


def draws_text_alone(family: FamilySpec | None) -> bool:
    """True if the family's demo takes no picture although other models of the family need one."""
    return family is not None and family.files.image_required and "text" in family.files.pipelines.values()


def _needs_picture(family: FamilySpec | None, name: str) -> bool:
    return draws_text_alone(family) and "i2v" in name.lower()


def _demo_of(family: FamilySpec | None) -> str:
    return next((demo for demo, folder in demo_models().items() if family_of_folder(folder) is family), "")


def _unfinished(name: str) -> Path | None:
    """The folder of a published model that is there but holds no whole model; None without one."""
    roots = tuple(model_roots())
    paths = (*inside(roots, name), *inside(roots, Path(name).name))
    return next((path for path in paths if value_or(path.is_dir, False) and path not in models().values()), None)


def model_folder(name: str) -> Path:
    """The folder of a listed model, or of a demo model under another size's name; else CheckpointError with advice."""
    listed = {**models(), **demo_models()}
    if folder := listed.get(name) or demo_folder(name):
        return folder
    family, unfinished = published_family(name), _unfinished(name)
    fix = remedy(name, model_roots()[0], facts_for("cpu").total_bytes)
    drawn = _demo_of(family) or next(iter(demo_models()), "")
    where = "in the text-to-video template" if _needs_picture(family, name) else "in the list"
    fix += f" {drawn!r} {where} runs at once and draws coloured shapes." if drawn else ""
    if family is not None and unfinished is not None:
        raise no_model_in(unfinished, fix)
    return path_of(name, listed, model_roots(), ("model", MODEL_FOLDER), fix)


def provider_folder(name: str) -> Path | None:
    return None if name == AUTO else providers().get(name) or model_folder(name)


def providers() -> dict[str, Path]:
    """Name -> folder of each model, and of each folder with an image encoder in it."""
    searched = roots(ENCODER_KEYS)
    configs = (config for root in searched for config in _matches(root, "*/image_encoder/config.json"))
    return {**models(), **_by_name(searched, (config.parent.parent for config in configs))}


def paint_models() -> dict[str, Path]:
    """Name -> path of paint models, then delight models: folders up to two deep, and files with such names."""
    models: list[Path] = []
    for root in roots(MODEL_KEYS):
        children = _children(root)
        for folder in sorted({root, *children, *(deep for child in children for deep in _children(child))}):
            with suppress(OSError):
                if is_paint_folder(folder) and folder != root:
                    models.append(folder)
                elif folder.is_dir():
                    files = (file for file in sorted(folder.iterdir()) if file.suffix in PAINT_SUFFIXES)
                    names = {file: file.name.lower() for file in files if "hunyuan3d" in file.name.lower()}
                    models += [file for file, name in names.items() if "paint" in name or "delight" in name]
    return dict(sorted(_by_name(roots(MODEL_KEYS), models).items(), key=lambda item: "delight" in item[0].lower()))


def paint_choices() -> list[str]:
    return [*paint_models(), *demo_paint_models()] or [NO_PAINT_MODEL]


def paint_stand_in(name: str) -> str:
    """The demo model that runs in the place of a published one while no paint model is installed; empty for none."""
    return next(iter(demo_paint_models()), "") if Path(name).name in STANDS_IN_FOR and not paint_models() else ""


def paint_path(name: str) -> Path:
    what = "paint model", "a folder hunyuan3d-… with the subfolders unet and vae"
    fix = f"Download one ({'; '.join(PAGES.values())}) into {{}} and press R."
    return path_of(name, {**demo_paint_models(), **paint_models()}, model_roots(), what, fix)


def paint_provider_folder(name: str) -> Path | None:
    if name == AUTO:
        return None
    return path_of(name, paint_providers(), roots(PAINT_PROVIDER_KEYS), ("folder", "one from the list"), "Press R.")


def base_models() -> dict[str, Path]:
    """Name -> path of what may be MV-Adapter's base: checkpoint files, and diffusers folders with a UNet."""
    searched = roots(BASE_KEYS)
    files = (file for root in roots(BASE_KEYS[:1]) for each in DEPTHS for file in _matches(root, each))
    configs = (config for root in searched for config in _matches(root, "*/unet/config.json"))
    saved = (config.parent.parent for config in configs)
    return _by_name(searched, (*files, *(folder for folder in saved if not is_paint_folder(folder))))


def base_path(name: str) -> Path:
    what = "checkpoint", "a .safetensors of Stable Diffusion XL or 2.1, or a diffusers folder of it"
    return path_of(name, {**demo_adapter()[0], **base_models()}, roots(BASE_KEYS), what, "Put one into {} and press R.")


def core_file(kind: str, name: object) -> Path | None:
    """The .safetensors file that core lists as ``name`` in its folders of a ``kind``, such as ``vae``; else None."""
    listed = isinstance(name, str) and is_safetensors(name) and name in folder_paths.get_filename_list(kind)
    return Path(path) if listed and (path := folder_paths.get_full_path(kind, name)) else None


def adapters() -> dict[str, Path]:
    searched = roots(ADAPTER_KEYS)
    files = (file for root in searched for each in DEPTHS for file in _matches(root, each))
    return _by_name(searched, (file for file in files if any(word in file.name.lower() for word in ADAPTER_WORDS)))


def adapter_stand_in(name: str) -> tuple[str, ...]:
    """Names of the demo's base and adapter, in place of a published ig2mv while no adapter is installed; else empty."""
    named = f"mvadapter_{IG2MV}" in Path(name).name and not adapters()
    return (*demo_adapter()[0], *demo_adapter()[1]) if named else ()


def adapter_path(name: str) -> Path:
    what = "MV-Adapter", "a file such as mvadapter_ig2mv_sdxl.safetensors"
    fix = "Download one from huanngzh/mv-adapter into {} and press R."
    return path_of(name, {**demo_adapter()[1], **adapters()}, roots(ADAPTER_KEYS), what, fix)


def loras() -> dict[str, Path]:
    names = filter(is_safetensors, folder_paths.get_filename_list("loras"))
    return {name: Path(path) for name in names if (path := folder_paths.get_full_path("loras", name)) is not None}


def lora_choices() -> list[str]:
    return [*(loras() or [NO_LORA]), NONE, *demo_loras()]


def lora_file(name: str) -> Path:
    what = "LoRA", "a .safetensors file there"
    return path_of(name, {**demo_loras(), **loras()}, roots(LORA_KEYS), what, "Put it into {} and press R.")


def upscalers() -> dict[str, Path]:
    """Name -> path of latent upscalers: files, at most a folder deep, and those inside a publisher's model folder."""
    own = (file for root in roots(UPSCALER_KEYS) for each in DEPTHS for file in _matches(root, each))
    inside = (file for root in model_roots() for file in _matches(root, "*/upsampler/*/*.safetensors"))
    return _by_name([*roots(UPSCALER_KEYS), *model_roots()], (*own, *inside))


def upscaler_file(name: str) -> Path:
    what = "latent upscaler", "a file such as ltxv-spatial-upscaler-0.9.8.safetensors"
    return path_of(name, upscalers(), roots(UPSCALER_KEYS), what, "Put it into {} and press R.")


def picture_sides(name: object) -> tuple[int, int] | None:
    """Width and height of a picture in ComfyUI's folders, in pixels, after core's EXIF rotation; None if unreadable."""
    from PIL import ExifTags, Image

    if not isinstance(name, str):
        return None
    with suppress(Exception):  # the file may hold anything
        path = Path(os.path.normpath(folder_paths.get_annotated_filepath(name)))  # older releases do not check it
        homes = (folder_paths.get_directory_by_type(kind) for kind in ("input", "output", "temp"))
        if any(path.is_relative_to(os.path.normpath(home)) for home in homes):
            with Image.open(path) as picture:  # the base class's getexif, as a PNG's own decodes it
                sideways = Image.Image.getexif(picture).get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
                return picture.size[::-1] if sideways else picture.size
    return None


def saved_folder() -> Path:
    return state_folder() / "kept"


def unfinished_folder() -> Path:
    return saved_folder() / FOLDER


def state_folder() -> Path:
    return Path(folder_paths.get_user_directory()) / "anygpu"


def paint_providers() -> dict[str, Path]:
    """Name -> folder that may hold a VAE or an image encoder for a paint model: those with a config.json."""
    searched = roots(PAINT_PROVIDER_KEYS)
    patterns = "*/config.json", "*/vae/config.json"
    configs = (sorted(path for each in patterns for path in _matches(root, each)) for root in searched)
    return _by_name(searched, (config.parent for in_root in configs for config in in_root))


def _children(folder: Path) -> list[Path]:
    with suppress(OSError):
        return [child for child in folder.iterdir() if child.is_dir() and child.name[0] != "."]
    return []


def _matches(root: Path, pattern: str) -> list[Path]:
    """Matches in a folder, sorted; none if the folder cannot be read, such as a share that is gone."""
    with suppress(OSError):
        return sorted(root.glob(pattern))
    return []


def _change_times(level: list[Path]) -> tuple[tuple[str, float], ...]:
    """(path, time of its last change in seconds) of each folder that :func:`find_models` looks into."""
    watched = dict.fromkeys(level)
    for _ in range(3):  # as deep as it looks
        level = [child for folder in level for child in _children(folder)]
        watched.update(dict.fromkeys(level))
    times: dict[str, float] = {}
    for folder in watched:
        with suppress(OSError):
            times[str(folder)] = folder.stat().st_mtime
    return tuple(times.items())


def _by_name(roots: list[Path], paths: Iterable[Path]) -> dict[str, Path]:
    """Name below its root -> path; the first path of a name counts."""
    named: dict[str, Path] = {}
    for path in paths:
        root = next((root for root in roots if path.is_relative_to(root) and path != root), None)
        if root is not None:
            named.setdefault(path.relative_to(root).as_posix(), path)
    return named
