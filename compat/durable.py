"""Files that are written whole or not at all, and are on the disk when the call returns."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import CheckpointError, InputError, first_line, json_file


@contextmanager
def replacing(path: Path, suffix: str = ".part", synced: bool = True) -> Iterator[Path]:
    """A temporary file for the block to write, renamed to ``path`` after it; some libraries go by its ``suffix``.
    The file is synced to the disk before that, and the folder after it: a crash, a power cut or a full disk leaves the
    old file or the new one. Without ``synced`` the file survives the end of this process, but not a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{suffix}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # as this user's files have; safetensors would keep others from reading it
        yield temporary
        if synced:
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):  # whatever ended the block is what the user has to know
            temporary.unlink(missing_ok=True)
        raise
    if synced:
        _sync_folder(path.parent)


def saved_json(path: Path) -> Any:
    """The value in a JSON file of ours; None where the file is absent, unreadable or damaged."""
    try:
        return json_file(path)
    except (OSError, ValueError):
        return None


def write_json(path: Path, value: Any, indent: int | None = None, synced: bool = True) -> None:
    """Replace a JSON file as :func:`replacing` does; raises OSError where it cannot be written."""
    with replacing(path, synced=synced) as temporary:
        temporary.write_text(json.dumps(value, indent=indent), encoding="utf-8")


def write_file(path: Path, content: str | bytes) -> Path:
    """Replace a file as :func:`replacing` does and return ``path``; a lone surrogate in a text becomes its escape.
    Raises CheckpointError with the system's ``errno`` where the file cannot be written."""
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
    except OSError as error:
        found = f"{str(path)!r} cannot be written ({first_line(error)})"
        expected = "a folder that you may write to, with room on its disk"
        refused = CheckpointError(found, expected=expected, fix="Free space there, or choose another folder.")
        refused.errno = error.errno
        raise refused from error
    return path


def require_writable(path: Path, needed_bytes: int, name: str) -> None:
    """Raise InputError if ``path``, of input ``name``, cannot be written or lacks ``needed_bytes``; make its folder."""
    if path.is_dir():
        found = f"the folder {str(path)!r} as {name}"
        raise InputError(found, expected="a file", fix="Add a file name, such as a.mp4.")
    probe = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
        free = shutil.disk_usage(path.parent).free
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        found = f"{name} {str(path)!r} cannot be written ({first_line(error)})"
        expected = "a file in a folder that you may write to"
        raise InputError(found, expected=expected, fix="Choose another place.") from error
    if free < needed_bytes:
        found, expected = f"{free / 1e6:.0f} MB free for {name} {str(path)!r}", f"{needed_bytes / 1e6:.0f} MB or more"
        raise InputError(found, expected=expected, fix="Free space on this disk, or choose a place on another one.")


def _sync_folder(folder: Path) -> None:
    """Have the rename itself reach the disk, on systems where a folder can be opened for that."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows, which writes it down by itself
        return
    with suppress(OSError):  # some network file systems refuse
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
