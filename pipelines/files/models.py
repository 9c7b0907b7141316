"""The models on disk: which folders hold one, of which family, and where each of its parts lies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...compat.checkpoints.headers import reading
from ...compat.checkpoints.weights import read_json
from ...compat.errors import CheckpointError
from ..base import Progress
from ..family import FamilySpec
from ..pipeline import DEMOS
from ..registry import FAMILIES
from .evidence import other_class
from .part import absent_text
from .single_file import encoder_task, lone_file, lone_task

INDEX = "model_index.json"
MODEL_FOLDER = "a diffusers model folder with model_index.json, or a FramePack transformer folder"
CHOOSE_FOLDER = "Choose the folder that directly contains model_index.json, or download the model again."
OF_DEMOS = "_anygpu_parts_of"  # part to the demo model that ships it, for a part that two of them have
ENCODER_FOLDER = ("image_encoder", "feature_extractor")


def find_models(roots: Iterable[Path]) -> list[Path]:
    """Folders under ``roots`` that hold a pipeline or a lone transformer of a known family, sorted by path. Looks
    three levels deep, not into hidden folders, and leaves out what cannot be read, such as ``lost+found``."""
    folders: dict[Path, None] = {}
    for root in roots:
        level, seen = [Path(root)], set()
        for _ in range(4):
            deeper: list[Path] = []
            for folder in level:
                with suppress(OSError, RuntimeError):  # before Python 3.13 a loop of links is a RuntimeError
                    real = folder.resolve()
                    if real in seen or not folder.is_dir():
                        continue
                    seen.add(real)
                    if _is_model(folder):
                        folders[folder] = None
                    else:
                        deeper += [child for child in folder.iterdir() if not child.name.startswith(".")]
            level = deeper
    return sorted(folders)


def family_of_folder(folder: Path) -> FamilySpec | None:
    """The family of a pipeline or transformer folder, None for another; raises CheckpointError for a damaged one."""
    with reading(folder):
        if (folder / INDEX).is_file():
            name = str(read_json(folder / INDEX, "a diffusers pipeline").get("_class_name"))
            return next((family for family in FAMILIES.values() if name in family.files.pipelines), None)
        if (folder / "config.json").is_file():
            name = str(read_json(folder / "config.json", "a model configuration").get("_class_name"))
            return next((family for family in FAMILIES.values() if name in family.files.transformer_classes), None)
    return None


def _is_model(folder: Path) -> bool:
    with suppress(CheckpointError):
        return (folder / INDEX).is_file() or family_of_folder(folder) is not None
    return False


def part_folders(
    model: Path, given: Mapping[str, Path | None], search: Sequence[Path], progress: Progress
) -> tuple[FamilySpec, dict[str, Path]]:
    """The family of a model folder, and the folder of every part and tool. Parts that it lacks come from the folders
    ``given`` as ``base`` and ``image_encoder`` (``base`` brings that encoder too where none is given). Such a folder is
    looked for, beside the model and in ``search``, only for required parts of a lone transformer. The user is told of
    each. All text encoders may be absent. Raises CheckpointError for no model, or where another part is missing."""
    if not model.is_dir():
        found = f"no model folder {str(model)!r}"
        fix = "Put the model into ComfyUI/models/diffusers and refresh, or correct the path."
        raise CheckpointError(found, expected="a folder with model_index.json or a transformer's config.json", fix=fix)
    family = family_of_folder(model)
    if family is None:
        raise no_model_in(model)
    whole = (model / INDEX).is_file()
    folders = folders_in(model) if whole else {"transformer": model}
    wanted = [*family.files.parts, *family.files.tools]
    for name in ("base", "image_encoder"):
        lacking = {part for part in wanted if part not in folders or not folders[part].is_dir()}
        missing = [part for part in wanted if part in lacking and (part in ENCODER_FOLDER) == (name == "image_encoder")]
        named = given.get(name)
        if name == "base" and given.get("image_encoder") is None and (missing or named is not None):
            missing += [part for part in ENCODER_FOLDER if part in lacking]
        required = any(part not in family.files.optional for part in missing)
        if missing and (named is not None or (not whole and required)):
            source = named or _searched(name, family, model, search)
            progress.notify(f"{name} from {source.name}{'' if named else ' (auto)'}")
            offered = folders_in(source)
            folders.update({part: offered[part] for part in missing if part in offered})
    left_out = absent_text(family, lambda part: part in folders and folders[part].is_dir(), progress)
    folders = {part: folder for part, folder in folders.items() if part not in left_out}
    for tool in family.files.tools:
        if tool in folders and not any(folders[tool].glob("*.json")) and not any(folders[tool].glob("*.model")):
            found = f"no files in {str(folders[tool])!r}"
            fix = "Download the missing folder, and keep its published name."
            raise CheckpointError(found, expected=f"the {tool} of this model", fix=fix)
    absent = [part for part in wanted if part not in folders and part not in (*family.files.optional, *left_out)]
    if absent:
        found = f"no {absent[0]} for {str(model)!r}"
        fix = "Download the missing folder, or choose the folder that has it as base or image_encoder."
        raise CheckpointError(found, expected=f"the parts {', '.join(family.files.parts)}", fix=fix)
    return family, {part: folder for part, folder in folders.items() if part in wanted}


def folders_in(folder: Path) -> dict[str, Path]:
    """Name to folder of each part and tool in a pipeline's model_index.json, whether the folder exists or not; one
    listed under OF_DEMOS lies in that shipped demo. Without an index, all subfolders. CheckpointError for no folder."""
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX, "a diffusers pipeline")
        pairs = {name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2}
        owners = index.get(OF_DEMOS)
        owners = owners if isinstance(owners, dict) else {}
        demos = {child.name: child for child in DEMOS.iterdir()} if owners else {}
        homes = {name: demos.get(str(owners.get(name, "")), folder) for name in pairs}
        return {name: homes[name] / name for name, (_, cls) in pairs.items() if cls is not None}
    if not folder.is_dir():
        expected, fix = "a folder with the parts that this model lacks", "Choose another folder."
        raise CheckpointError(f"no folder {str(folder)!r}", expected=expected, fix=fix)
    return {child.name: child for child in folder.iterdir() if child.is_dir()}


def _searched(name: str, family: FamilySpec, model: Path, search: Sequence[Path]) -> Path:
    """The first folder beside the model or in ``search`` to use as ``name``: for ``base`` a pipeline of the same text
    encoder with all other parts, one without text encoders last; for ``image_encoder`` one with a SigLIP, a pipeline's
    last, as it may have been trained further. Raises CheckpointError where there is none."""
    roots = [model.parent, *search]
    if name == "base":
        own = model / "transformer" if (model / INDEX).is_file() else model
        provider, task = family.files.base or family.id, "text" if family.files.base else _encoder_task(family, own)
        for left_out in ((), family.files.text_parts):  # then without text encoders: a prompt can be loaded instead
            for folder in find_models(roots):
                with suppress(CheckpointError):  # a damaged one is passed over
                    other = family_of_folder(folder) if (folder / INDEX).is_file() and folder != model else None
                    if other is None or other.id != provider or _encoder_task(other, folder / "transformer") != task:
                        continue  # of another family or text encoder
                    not_needed = (*family.transformers, *ENCODER_FOLDER, *left_out)
                    if all((folder / part).is_dir() for part in family.files.parts if part not in not_needed):
                        return folder
    else:
        for root in roots:
            files = [*root.glob("*/image_encoder/config.json"), *root.glob("*/*/image_encoder/config.json")]
            for config in sorted(files, key=lambda file: ((file.parent.parent / INDEX).is_file(), file)):
                with suppress(CheckpointError):
                    if read_json(config, "an image encoder").get("model_type") == "siglip_vision_model":
                        return config.parent.parent
    found = f"no {name} found for {family.title} in {', '.join(map(str, dict.fromkeys(roots)))}"
    fix = f"Download it ({'; '.join(family.published.pages)}) or choose its folder as {name}."
    raise CheckpointError(found, expected=f"a folder with the missing parts of {family.title}", fix=fix)


def task_beside(family: FamilySpec, transformer: Path) -> str:
    """The task, ``text`` or ``image``, by the index around the folder ``transformer``, else by its configuration."""
    index = index_beside(transformer)
    if not index:
        return lone_task(family, read_json(transformer / "config.json", "a model configuration"))
    return family.files.pipelines.get(str(index.get("_class_name")), family.files.lone_task)


def _encoder_task(family: FamilySpec, transformer: Path) -> str:  # :func:`encoder_task` of a folder
    config = transformer / "config.json"
    settings = read_json(config, "a model configuration") if config.is_file() else {}
    return encoder_task(family, settings, task_beside(family, transformer))


def index_beside(transformer: Path) -> dict[str, Any]:
    """The ``model_index.json`` of the pipeline around ``transformer``; empty for a lone one."""
    index = transformer.parent / INDEX
    return read_json(index, "a diffusers pipeline") if index.is_file() else {}


def no_model_in(model: Path, fix: str = CHOOSE_FOLDER) -> CheckpointError:
    """The error for a folder without a model of ours; ``fix`` is advice for one with neither JSON nor a single file."""
    index = model / (INDEX if (model / INDEX).is_file() else "config.json")
    single, title, use = lone_file(model)
    if index.is_file():
        name = str(read_json(index, "a model description").get("_class_name"))
        other = other_class(name)
        found = f"{str(index)!r} describes a {name!r}{f', which is {other.title}' if other else ''}"
        expected = f"one of {', '.join(f.title for f in FAMILIES.values())}"
        fix = f"Use its single file with {other.runs}." if other else "Choose a model of these families."
    else:
        held = "a download that has not ended" if any(model.iterdir()) else "an empty folder"
        held = f"the single file {single.name!r}{title and f' of {title}'}" if single else held
        found, expected = f"neither model_index.json nor config.json in {str(model)!r}: {held}", MODEL_FOLDER
    if single and (title or not index.is_file()):
        fix = f"Move {single.name} to models/diffusion_models and {use}."
    return CheckpointError(found, expected=expected, fix=fix)
