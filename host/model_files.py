"""The single files in ComfyUI's model folders for each part, and the tokenizers that ship with ComfyUI."""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from pathlib import Path

import comfy

from ..pipelines.files.formats import ENDINGS, kinds
from ..pipelines.files.single_file import AUTO, Files
from .folders import NO_FILE, path_of, roots, stamp

# By part, its model folders, the first for new files; ``unet`` and ``clip``, older names, are the same to ComfyUI.
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
DEEPEST = 6  # folders below a model folder


def file_choices(part: str) -> list[str]:
    """Choices of the input for ``part``: the files found; ``auto`` first, but for the transformer."""
    names = sorted(_files_of(part))
    return (names or [NO_FILE]) if part == "transformer" else [AUTO, *names]


def chosen_files(task: str, **names: str) -> Files:
    """The files that a node's inputs name, by part, and all others on offer; CheckpointError for unknown names."""
    ending, fix = f"a file ending in {', '.join(ENDINGS)}", "Put it into {} and press R."
    chosen = ((part, name) for part, name in names.items() if name != AUTO)
    paths = {p: path_of(name, _files_of(p), roots(KEYS[p]), (f"{p} file", ending), fix) for p, name in chosen}
    return Files(paths, offered(), task, tokenizers())


def offered() -> dict[Path, tuple[str, ...]]:
    """Each file in the model folders -> the kinds of models in it; headers are read again only after a change."""
    files: dict[Path, tuple[str, ...]] = {}
    for path in dict.fromkeys(path for part in KEYS for path in _files_of(part).values()):
        with suppress(OSError):  # a broken link
            files[path] = _kinds_of(path, path.stat().st_size, path.stat().st_mtime_ns)
    return files


@functools.lru_cache(maxsize=4096)
def _kinds_of(path: Path, _size: int, _changed: int) -> tuple[str, ...]:
    return kinds(path)


def tokenizers() -> dict[str, Path]:
    home = Path(str(comfy.__path__[0]))
    return {kind: home / place for kind, place in TOKENIZERS.items() if (home / place).is_dir()}


def stamp_of(**names: str) -> list[tuple[str, int, int]]:
    """A value that changes with the files named by part; ``auto`` stands for all files that hold a part."""
    candidates = (path for path, held in offered().items() if held) if AUTO in names.values() else ()
    return stamp(*candidates, *(_files_of(part).get(name) for part, name in names.items()))


def _files_of(part: str) -> dict[str, Path]:
    """Name below its model folder -> path of each file for ``part``; follows links, a loop of them once."""
    named: dict[str, Path] = {}
    for root in roots(KEYS[part]):
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
                    named.setdefault(path.relative_to(root).as_posix(), path)
    return named
