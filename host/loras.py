"""ComfyUI's LoRA folders."""

from __future__ import annotations

from pathlib import Path

import folder_paths

from ..compat.errors import CheckpointError

KEY = "loras"
NONE = "no LoRA found"


def choices() -> list[str]:
    """The .safetensors files of every LoRA folder; one entry that says so when there are none."""
    return [name for name in folder_paths.get_filename_list(KEY) if name.endswith(".safetensors")] or [NONE]


def file_named(name: str) -> Path:
    """The file of a listed name; nothing else can be named.

    Raises:
        CheckpointError: none of that name; says which folders were searched.
    """
    found = folder_paths.get_full_path(KEY, name) if name in choices() else None
    if found is not None:
        return Path(found)
    searched = ", ".join(folder_paths.get_folder_paths(KEY))
    raise CheckpointError(
        f"no LoRA {name!r} in {searched}" if name != NONE else f"no LoRA in {searched}",
        expected="a .safetensors file there",
        fix=f"Put it into {folder_paths.get_folder_paths(KEY)[0]} and press R.",
    )


def stamp(name: str) -> tuple[str, int, int]:
    """Changes when the file of a name changes."""
    found = folder_paths.get_full_path(KEY, name) if name in choices() else None
    stat = None if found is None else Path(found).stat()
    return (name, 0, 0) if stat is None else (name, stat.st_mtime_ns, stat.st_size)
