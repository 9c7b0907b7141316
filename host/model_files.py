"""Single files in ComfyUI's model folders: which are there for each part, and the tokenizers that ComfyUI ships."""

from __future__ import annotations

import os
from pathlib import Path

import comfy
import folder_paths

from ..compat.errors import CheckpointError
from ..pipelines.loading.formats import ENDINGS, kinds
from ..pipelines.loading.single_file import AUTO, Files

NO_FILE = "no file found"
# The model folders in which each part is looked for; the first is where a new file goes. ``unet`` and ``clip``, the
# older names of two of them, are the same folders to ComfyUI.
KEYS: dict[str, tuple[str, ...]] = {
    "transformer": ("diffusion_models", "checkpoints", "unet_gguf"),
    "vae": ("vae", "checkpoints"),
    "text_encoder": ("text_encoders", "checkpoints", "clip_gguf"),
    "text_encoder_2": ("text_encoders", "checkpoints", "clip_gguf"),
    "image_encoder": ("clip_vision", "style_models"),
}
TOKENIZERS = {
    "t5": "text_encoders/t5_tokenizer",
    "clip_l": "sd1_tokenizer",
    "llama": "text_encoders/llama_tokenizer",
    "qwen2_5_vl": "text_encoders/qwen25_tokenizer",
    "byt5": "text_encoders/byt5_tokenizer",
}
DEEPEST = 6

_kinds: dict[Path, tuple[tuple[int, int], tuple[str, ...]]] = {}  # of each file, while it does not change


def file_choices(part: str) -> list[str]:
    """What the input for ``part`` lists: the files found; ``auto`` first, but for the transformer."""
    names = sorted(_named(part))
    return (names or [NO_FILE]) if part == "transformer" else [AUTO, *names]


def chosen_files(task: str, **names: str) -> Files:
    """The files behind the names of a node's inputs, and everything else that is in the folders.

    Raises:
        CheckpointError: a name that is in none of the folders; a path is no name.
    """
    parts = {part: _path_of(part, name) for part, name in names.items() if name != AUTO}
    return Files(parts, offered(), task, tokenizers())


def offered() -> dict[Path, tuple[str, ...]]:
    """Every file of the folders with the kinds of models in it; its header is read again only when it has changed."""
    found: dict[Path, tuple[str, ...]] = {}
    for path in dict.fromkeys(path for part in KEYS for path in _named(part).values()):
        try:
            status = path.stat()
        except OSError:  # a broken link
            continue
        stamp = (status.st_size, status.st_mtime_ns)
        if _kinds.get(path, ((0, 0), ()))[0] != stamp:
            _kinds[path] = (stamp, kinds(path))
        found[path] = _kinds[path][1]
    return found


def tokenizers() -> dict[str, Path]:
    """The folders of the tokenizers that ComfyUI ships, by kind, where they are."""
    home = Path(str(comfy.__path__[0]))
    return {kind: home / place for kind, place in TOKENIZERS.items() if (home / place).is_dir()}


def roots(part: str) -> list[Path]:
    """The folders of a part, those of extra_model_paths.yaml included."""
    known = [key for key in KEYS[part] if key in folder_paths.folder_names_and_paths]
    return list(dict.fromkeys(Path(path) for key in known for path in folder_paths.get_folder_paths(key)))


def stamp_of(**names: str) -> list[tuple[str, int, int]]:
    """What changes when one of the named files does."""
    paths = [path for part, name in names.items() if (path := _named(part).get(name)) is not None]
    states = [(path, path.stat()) for path in paths if path.is_file()]
    return sorted((str(path), status.st_size, status.st_mtime_ns) for path, status in states)


def _path_of(part: str, name: str) -> Path:
    found = _named(part)
    if name not in found:
        searched = ", ".join(map(str, roots(part)))
        raise CheckpointError(
            f"no {part} file {name!r} in {searched}" if name != NO_FILE else f"no {part} file in {searched}",
            expected=f"a file of a list that ends with {', '.join(ENDINGS)}",
            fix=f"Put it into {roots(part)[0]} and press R.",
        )
    return found[name]


def _named(part: str) -> dict[str, Path]:
    """Name below its folder to path of each file; links are followed, a loop of them once."""
    found: dict[str, Path] = {}
    for root in roots(part):
        seen: set[str] = set()
        for folder, inner, files in os.walk(root, followlinks=True):
            real = os.path.realpath(folder)
            if real in seen or len(Path(folder).relative_to(root).parts) > DEEPEST:
                inner.clear()
                continue
            seen.add(real)
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            for file in sorted(files):
                if file.endswith(ENDINGS):
                    path = Path(folder) / file
                    found.setdefault(path.relative_to(root).as_posix(), path)
    return found
