"""A pipeline from single files: transformer, VAE and encoders apart or in one, as ComfyUI's folders have them. What
no file brings comes from a diffusers folder; the small settings are shipped, and tokenizers may come from the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...compat.decision import AUTO, Decision
from ...compat.device.facts import value_or
from ...compat.errors import CheckpointError
from ...compat.memory.parts import denoises
from ..base import Progress
from ..family import FamilySpec
from ..keys import TRANSFORMER, listed
from ..registry import FAMILIES
from ..requests import Files as Files
from .evidence import CONFIGS, evidence_of, other_model, refusal
from .formats import ENDINGS, Configured, StoredModel, config_of, contents, entries_in, kinds, layouts, width_of
from .part import PartFiles, absent_text, tool_configs

CLASSES = {
    "t5": "T5EncoderModel",
    "clip_l": "CLIPTextModel",
    "llama": "LlamaModel",
    "qwen2_5_vl": "Qwen2_5_VLTextModel",
    "siglip": "SiglipVisionModel",
    "llava": "LlavaModel",  # without the head that predicts words, which single files leave out and nothing here asks
}
TITLES = {
    "t5": "a T5 encoder",
    "clip_l": "CLIP-L",
    "llama": "Llama 3 8B (llava_llama3)",
    "qwen2_5_vl": "Qwen 2.5 VL 7B",
    "siglip": "SigLIP (sigclip_vision_patch14_384)",
    "llava_vision": "the picture half of Llava (llava_llama3_vision)",
}
TOKENS = "embed_tokens.weight"  # of a language model, a row for each token
PLACES = "text_model.embeddings.position_embedding.weight"  # of CLIP, a row for each place: 77, Long-CLIP has 248
VOCABULARIES = ("tokenizer.json", "spiece.model", "tokenizer.model", "vocab.json", "added_tokens.json")


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed pipeline: ``files`` without their dtypes, ``folders`` of borrowed parts, readers of the tools."""

    family: FamilySpec
    task: str
    files: Mapping[str, PartFiles]
    folders: Mapping[str, Path]
    tools: Mapping[str, Callable[[], Any]]
    folder_tools: Mapping[str, Path]
    known: str  # name of the published configuration that its transformer has
    decisions: tuple[Decision, ...] = ()  # which of several models of the same shapes it was taken for


def family_in(path: Path) -> FamilySpec:
    """The family of the transformer in a file; raises CheckpointError where it is damaged or holds none."""
    return FAMILIES[_transformer(path).kind.partition("/")[0]]


def composed(request: Files, progress: Progress) -> Composed:
    """The pipeline of ``request``: each part from a single file (:func:`_content_for`), else from a provided folder;
    optional ones, and all text encoders, may be absent. Headers are read, weights are not. Raises CheckpointError for a
    part that is missing, damaged, or of another model; it names the file."""
    main = _transformer(request.parts["transformer"])
    family = FAMILIES[main.kind.partition("/")[0]]
    configured = config_of(main, "" if request.task == AUTO else request.task, request.known)
    task = configured.task or lone_task(family, configured.config)
    chosen = {"transformer": (main, configured)}
    folders: dict[str, Path] = {}
    given, (first, *_) = {*request.parts, *request.provided}, family.files.text_parts
    text = _content_for(family, first, task, configured.config, request, progress)  # others' files may fit the second
    spared = absent_text(family, lambda part: part in given or (part == first and text is not None), progress)
    for part in family.files.parts:
        if part == "transformer" or part in spared:
            continue
        content = text if part == first else _content_for(family, part, task, configured.config, request, progress)
        if content is not None:
            chosen[part] = (content, config_of(content))
        elif part in request.provided:
            folders[part] = request.provided[part]
        elif part not in family.files.optional:
            raise _absent(family, part, configured.config)
    files = {name: _part(name, family, *pair, progress) for name, pair in chosen.items()}
    sees_images = family.files.text_vision and encoder_task(family, configured.config, task) == "image"
    if sees_images and "text_encoder" in files:
        files["text_encoder"] = _with_vision(family, files["text_encoder"], request, progress)
    tools, folder_tools = _tools(family, task, chosen, request, spared)
    guessed = (Decision("model", configured.name, configured.why, AUTO, guessed=True),) if configured.why else ()
    return Composed(
        family=family,
        task=task,
        files=files,
        folders=folders,
        tools=tools,
        folder_tools=folder_tools,
        known=configured.name,
        decisions=guessed,
    )


def _transformer(path: Path) -> StoredModel:
    """The transformer in a file; raises CheckpointError where the file is damaged or has none of a family here."""
    models = contents(path)
    main = next((model for model in models if model.kind.endswith(TRANSFORMER)), None)
    if main is None:
        if other := other_model(entries_in(path)):
            raise refusal(other, path)
        held = ", ".join(TITLES.get(model.kind, model.layout) for model in models) or "no known model"
        expected = f"a transformer of {', '.join(family.title for family in FAMILIES.values())}"
        fix = "Choose the transformer's file. VAE and encoders have their own inputs."
        raise CheckpointError(f"{str(path)!r} holds {held}", expected=expected, fix=fix)
    return main


def lone_file(folder: Path) -> tuple[Path | None, str, str]:
    """(file, title, advice) of the first single file in a folder that holds a known model, else of the first, with the
    title ""; the file is None where there is none or the folder cannot be read."""
    files = value_or(lambda: sorted(file for file in folder.iterdir() if file.suffix in ENDINGS), [])
    compose = "choose it in AnyGPU Compose Pipeline"
    for file in files:
        if kind := next((kind for kind in kinds(file) if kind.endswith(TRANSFORMER)), ""):
            return file, FAMILIES[kind.partition("/")[0]].title, compose
        with suppress(Exception):  # a damaged file: choosing it shows the error
            if other := other_model(entries_in(file)):
                return file, other.title, f"use {other.runs}"
    return next(iter(files), None), "", compose


def lone_task(family: FamilySpec, config: Mapping[str, Any]) -> str:  # of a transformer without a pipeline around it
    task_of = family.code.task_of
    return task_of(config) if task_of is not None else family.files.lone_task


def encoder_task(family: FamilySpec, config: Mapping[str, Any], task: str) -> str:
    """The task of the pipelines whose text encoder a transformer for ``task`` needs: mostly the same."""
    of_encoder = family.code.encoder_task
    return of_encoder(config) if of_encoder is not None else task


def _content_for(
    family: FamilySpec, part: str, task: str, config: Mapping[str, Any], request: Files, progress: Progress
) -> StoredModel | None:
    """The model for ``part``: of the file given for it, else of the transformer's, else of an offered one. None where a
    folder provides the part, none is found, an optional image encoder has no use (text to video), and for a second
    transformer that is not given. Raises CheckpointError for a given file of another kind."""
    kind = family.files.kinds[part].kind
    width = int(config.get(family.files.kinds[part].width) or 0)
    given = request.parts.get(part)
    if given is not None:
        content = _of_kind(given, kind, width) or _of_halves(given, kind, request, progress)
        if content is None:
            found = f"{given.name!r} is not a valid {part} for {family.title}"
            fix = f"Choose another file as {part}, or auto."
            raise CheckpointError(found, expected=_wanted(family, part, config), fix=fix)
        return content
    if denoises(part):  # a second transformer, which no file's tensors tell from the first
        return None
    content = _of_kind(request.parts["transformer"], kind, width)
    unneeded = part == "image_encoder" and part in family.files.optional and task == "text"
    if content is not None or part in request.provided or unneeded:
        return content
    return _offered(part, kind, width, request, progress)


def _offered(part: str, kind: str, width: int, request: Files, progress: Progress) -> StoredModel | None:
    """The model of ``kind`` from the first offered file that holds it whole, else from two halves; tells the user
    which. Files with the fewest models come first: a checkpoint's may be of another version, or trained with that
    model. Of language models the one with most tokens wins: LLaVA has 64 more than HiDream's Llama, else alike; of
    CLIPs the one with fewest places, as the model was trained with it."""
    held, half = request.offered, next(iter(_halves(kind)), None)  # the other half is found from this one
    paths = sorted(held, key=lambda path: (len(held[path]), "checkpoints" in path.parts, path))
    models = (_of_kind(path, kind, width) for path in paths if kind in held[path])
    whole = max(filter(None, models), key=lambda one: (_rows(one, TOKENS), -_rows(one, PLACES)), default=None)
    path = whole.path if whole else next((path for path in paths if half in held[path]), None)
    if path is None:
        return None
    progress.notify(f"{part} from {path.name} (auto)")
    return whole or _of_halves(path, kind, request, progress)


def _rows(content: StoredModel, name: str) -> int:  # of a tensor; 0 without it
    return getattr(content.entries.get(name), "shape", (0,))[0]


def _halves(kind: str) -> list[str]:
    """The kinds of the two files in which a model is also published; none for most."""
    return [layout.kind for layout in layouts() if layout.half_of == kind]


def _of_halves(path: Path, kind: str, request: Files, progress: Progress) -> StoredModel | None:
    """The model of two files, ``path`` and one beside it or offered, of which the user is told; None where ``path`` is
    no half. Raises CheckpointError where the other half is not found."""
    own = next((content for content in contents(path) if content.kind in _halves(kind)), None)
    if own is None:
        return None
    wanted = next(half for half in _halves(kind) if half != own.kind)
    beside = sorted(file for file in path.parent.iterdir() if file.suffix in ENDINGS and file != path)
    for other in dict.fromkeys([*beside, *sorted(request.offered)]):
        if wanted in (request.offered[other] if other in request.offered else kinds(other)):
            progress.notify(f"{wanted.rpartition('_')[2]} of the VAE from {other.name} (auto)")
            other_half = _of_kind(other, wanted, 0)
            assert other_half is not None
            entries = {**own.entries, **other_half.entries}
            return StoredModel(kind, f"{own.layout}, with {other.name}", own.prefix, entries=entries, path=path)
    expected = f"the {wanted.rpartition('_')[2]} too"
    fix = "Put its file into the same folder, or use a VAE as a single file."
    raise CheckpointError(f"{path.name!r} is {own.layout} alone", expected=expected, fix=fix)


def _of_kind(path: Path, kind: str, width: int) -> StoredModel | None:  # the file's model, of any width for 0
    fitting = (content for content in contents(path) if content.kind == kind)
    return next((content for content in fitting if not width or width_of(content) == width), None)


def _part(name: str, family: FamilySpec, content: StoredModel, configured: Configured, progress: Progress) -> PartFiles:
    """The files of a part, of no dtype yet, an encoder's ``vocab_size`` as its table has it. Tells the user of tensors
    left out; raises CheckpointError where the configuration names a class that the family does not allow."""
    library, *allowed = family.files.parts[name]
    config = dict(configured.config)
    cls = CLASSES.get(content.kind) or str(config.get("_class_name"))
    if content.kind in CLASSES and "vocab_size" in config:  # releases add tokens, or round the number up
        table = "text_model.embeddings.token_embedding.weight" if content.kind == "clip_l" else TOKENS
        entry = content.entries.get("shared.weight") or content.entries.get(table)
        config["vocab_size"] = config["vocab_size"] if entry is None else entry.shape[0]
    if content.kind == "clip_l" and (places := _rows(content, PLACES)):
        config["max_position_embeddings"] = places
    if cls not in allowed:
        found = f"the {name} in {str(content.path)!r} is a {cls}"
        fix = f"Choose another file as {name}, or correct the JSON file beside it."
        raise CheckpointError(found, expected=f"one of {', '.join(allowed)}", fix=fix)
    if left := (*content.unknown, *configured.unused):
        progress.notify(f"{name}: tensors that {configured.name} has no place for are left out: {listed(left)}")
    entries = {key: entry for key, entry in content.entries.items() if key not in configured.unused}
    return PartFiles(
        name=name, library=library, cls=cls, folder=content.path, config=config, entries=entries, dtype=torch.float32
    )


def _with_vision(family: FamilySpec, text: PartFiles, request: Files, progress: Progress) -> PartFiles:
    """``text`` and the picture half of its encoder as one LLaVA; raises CheckpointError where no file has that half."""
    given = request.parts.get("image_encoder")
    kind = family.files.text_vision
    places = sorted(p for p, held in request.offered.items() if kind in held) if given is None else [given]
    vision = next(filter(None, (_of_kind(path, kind, 0) for path in places)), None)
    if vision is None:
        found = f"no picture half of the text encoder for {family.title} image to video"
        fix = "Put it into models/clip_vision and choose it as image_encoder, or name a diffusers folder as base."
        raise CheckpointError(found, expected=TITLES[kind], fix=fix)
    if given is None:
        progress.notify(f"image_encoder from {vision.path.name} (auto)")
    config = dict(config_of(vision).config)
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], **text.config}
    entries = {f"language_model.model.{name}": entry for name, entry in text.entries.items()} | dict(vision.entries)
    return replace(text, cls=CLASSES["llava"], config=config, entries=entries)


def _tools(
    family: FamilySpec,
    task: str,
    chosen: Mapping[str, tuple[StoredModel, Configured]],
    request: Files,
    spared: tuple[str, ...],
) -> tuple[dict[str, Callable[[], Any]], dict[str, Path]]:
    """Readers of the tools that are plain settings, and folders of the others, without the ``spared``: a base folder's,
    unless the chosen models change its settings; else the published settings so changed, shipped or host folders."""
    settings = tool_configs(family)
    changes = [chosen[part][1].tools for part in ("vae", "transformer") if part in chosen]
    if family.code.settings_in is not None:
        main, configured = chosen["transformer"]
        changes.append(family.code.settings_in(evidence_of(main.path, configured.config)))
    for name, changed in (item for each in changes for item in each.items()):
        settings[name] = {**settings.get(name, {}), **changed}
    plain: dict[str, Callable[[], Any]] = {"index": partial(dict, settings.pop("index", {}))}
    folders: dict[str, Path] = {}
    for name, library in family.files.tools.items():
        if name in spared:
            continue
        if name in request.provided and not any(name in changed for changed in changes):
            folders[name] = request.provided[name]
        elif library == "diffusers":
            plain[name] = partial(dict, settings[name])
        elif (CONFIGS / name).is_dir():
            if name not in family.files.optional or task == "image":
                folders[name] = CONFIGS / name
        else:
            folders[name] = _tokenizer(family, name, request)
    return plain, folders


def _tokenizer(family: FamilySpec, name: str, request: Files) -> Path:
    """The host's folder of the tokenizer ``name``; raises CheckpointError where the host has none."""
    kind = family.files.tokenizers[name]
    folder = request.tokenizers.get(kind)
    if folder is None or not any((folder / file).is_file() for file in VOCABULARIES):
        found = f"no {name} for {family.title}: a single file of a text encoder has none"
        expected = f"a {kind} tokenizer in a diffusers folder, or the one that ComfyUI ships"
        fix = f"Choose a diffusers folder of {family.title} as base; its tokenizer folders are enough."
        raise CheckpointError(found, expected=expected, fix=fix)
    return folder


def _wanted(family: FamilySpec, part: str, config: Mapping[str, Any]) -> str:
    """The kind of file, in words, of a part that goes with a transformer of ``config``."""
    kind, width = family.files.kinds[part].kind, int(config.get(family.files.kinds[part].width) or 0)
    return f"{TITLES.get(kind, f'the VAE of {family.title}')}{f' of width {width}' if width else ''}"


def _absent(family: FamilySpec, part: str, config: Mapping[str, Any]) -> CheckpointError:
    place = {"vae": "models/vae", "image_encoder": "models/clip_vision"}.get(part, "models/text_encoders")
    expected = f"{_wanted(family, part, config)} in {place}"
    fix = f"Put the file there and choose it as {part}, or name a diffusers folder as base."
    return CheckpointError(f"no {part} for {family.title}", expected=expected, fix=fix)
