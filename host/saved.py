"""Files that the save nodes write and the load nodes list, in ComfyUI's input and output folders."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import folder_paths
from comfy.cli_args import args

from ..compat.device.facts import value_or
from ..compat.errors import CheckpointError, InputError
from ..pipelines.base import Latents
from ..pipelines.latents.store import LATENT, Origin, kind_of
from ..pipelines.records.receipts import TAG, tags_for, with_receipt
from .api import InputImpl, Types

SUFFIXES = (".safetensors", ".latent")
FILMS = (".mp4", ".webm", ".mkv", ".mov")
SIGNED = "video or latents"  # the kind of files with a receipt; textured meshes too
GLB = ".glb"
SAVE = "Save one with the AnyGPU save node, or put it into ComfyUI's input folder, and press R."
DEEPEST = 16  # levels of folders, the input or output folder counted
OUTPUT = " [output]"
DATES = {"%year%": "%Y", "%month%": "%m", "%day%": "%d", "%hour%": "%H", "%minute%": "%M", "%second%": "%S"}  # core's
MOST_BYTES = 200  # of a file name: file systems take 255, and a number and an ending follow


def new_path(prefix: str) -> Path:
    """The next free ``PREFIX_00001_.safetensors`` in the output folder, numbered as core's save nodes do."""
    folder, name = target_folder(prefix)
    numbered = re.compile(re.escape(name) + r"_(\d+)_\.safetensors", re.IGNORECASE)
    others = value_or(lambda: list(folder.iterdir()), [])
    numbers = [int(match[1]) for match in (numbered.fullmatch(path.name) for path in others) if match]
    return folder / f"{name}_{max(numbers, default=0) + 1:05}_.safetensors"


def target_folder(prefix: str, called: str = "filename_prefix") -> tuple[Path, str]:
    """Folder and file name in the output folder that ``prefix``, the input ``called``, means; else InputError."""
    for mark, form in DATES.items():
        prefix = prefix.replace(mark, time.strftime(form))
    root = Path(folder_paths.get_output_directory()).resolve()
    try:
        path = (root / prefix.strip()).resolve()
    except (ValueError, OSError, RuntimeError):  # a zero byte, or a loop of links
        path = root
    links = any(part.is_symlink() for part in (path, *path.parents))  # only a loop is left, from Python 3.13 on
    if links or not path.is_relative_to(root) or path == root or prefix.strip().endswith(("/", "\\")):
        expected = "a name in ComfyUI's output folder, such as latents/AnyGPU"
        fix = "Remove leading slashes and '..', and end with a file name."
        raise InputError(f"{called} {prefix!r}", expected=expected, fix=fix)
    inside = Path(folder_paths.get_output_directory()) / path.relative_to(root)
    longest = max(len(os.fsencode(part)) for part in inside.parts)
    if longest > MOST_BYTES:
        found = f"{called} with a name of {longest} bytes"
        raise InputError(found, expected=f"at most {MOST_BYTES} bytes", fix="Shorten it.")
    return inside.parent, inside.name


def shown(path: Path) -> str:
    """The path from ``output/`` on, as users know it; elsewhere the file name alone."""
    root = Path(folder_paths.get_output_directory())
    return f"output/{path.relative_to(root).as_posix()}" if path.is_relative_to(root) else path.name


def ui_record(path: Path) -> dict[str, str]:
    subfolder = path.parent.relative_to(folder_paths.get_output_directory()).as_posix()
    return {"filename": path.name, "subfolder": "" if subfolder == "." else subfolder, "type": "output"}


def origin(prompt: Any, extra: Any) -> Origin:
    """The prompt and the ``extra_pnginfo`` as JSON by name, for a file's metadata; under --disable-metadata none, and
    no texts of prompts in what the file holds."""
    if args.disable_metadata:
        return Origin(texts=False)
    texts = {} if prompt is None else {"prompt": json.dumps(prompt)}
    return Origin({**texts, **{name: json.dumps(value) for name, value in (extra or {}).items()}})


def signed(latents: Latents, **made: Any) -> Latents:
    """``latents`` with a receipt of the pipeline and inputs that ``made`` them; unchanged under --disable-metadata."""
    return latents if args.disable_metadata else with_receipt(latents, **made)


class SignedVideo(InputImpl.VideoFromComponents):
    """A VIDEO that writes :attr:`receipt`, unless that is None, into its file, whichever node saves it."""

    receipt: Mapping[str, Any] | None = None

    def save_to(self, path: Any, *given: Any, **named: Any) -> None:
        """Save as core does, with the receipt; CheckpointError for a write error, after which a new file is removed."""
        call = inspect.signature(super().save_to).bind(path, *given, **named)
        if self.receipt is not None and not args.disable_metadata:
            call.arguments["metadata"] = {**(call.arguments.get("metadata") or {}), TAG: dict(self.receipt)}
        file = Path(path) if isinstance(path, str | Path) else None  # or a stream
        there = file is not None and file.exists()
        try:
            super().save_to(*call.args, **call.kwargs)
        except OSError as error:
            if file is not None and not there:
                with suppress(OSError):
                    file.unlink(missing_ok=True)
            raise CheckpointError(
                f"the video cannot be written to {str(path)!r}: {error.strerror or error}",
                expected="room on the disk, and leave to write there",
                fix="Make room and queue again. What AnyGPU sampled is kept: AnyGPU Recover Latents brings it back.",
            ) from error


def video(images: Any, rate: Fraction, receipt: Mapping[str, Any] | None) -> SignedVideo:
    """A VIDEO of IMAGE ``images`` at ``rate`` frames a second that is saved with ``receipt``."""
    signed_video = SignedVideo(Types.VideoComponents(images=images, frame_rate=rate))
    signed_video.receipt = receipt
    return signed_video


class SignedMesh(Types.File3D):
    """A GLB whose bytes are made when a node saves or shows it."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make, self._format = make, "glb"

    @functools.cached_property
    def _source(self) -> BytesIO:
        return BytesIO(self._make())


def textured_mesh(mesh: Any, made: Origin, receipt: Mapping[str, Any]) -> SignedMesh:
    """``mesh`` as the GLB that core's nodes save, with ``made`` and the receipt in it unless --disable-metadata."""

    def make() -> bytes:
        from comfy_extras.nodes_save_3d import mesh_item_to_glb_bytes

        tags = {} if args.disable_metadata else tags_for(receipt)
        return bytes(mesh_item_to_glb_bytes(mesh, 0, {**made.metadata, **tags}))

    return SignedMesh(make)


def choices(kind: str) -> list[str]:
    """Names of the ``latent``, ``prompt`` or :data:`SIGNED` files, newest first; without any, one entry that says so.
    Films and meshes are listed unread, with a receipt or without."""
    paths = _files_of_kind(kind)
    return sorted(paths, key=lambda name: _time_and_size(paths[name])[0], reverse=True) or [none_of(kind)]


def none_of(kind: str) -> str:
    return f"no {kind} found" if kind == SIGNED else f"no {kind} file found"


def file_named(kind: str, name: str) -> Path:
    """The path of a name that :func:`choices` lists; CheckpointError for any other."""
    paths = _files_of_kind(kind)
    if name in paths:
        return paths[name]
    what, expected, fix = f"{kind} file", f"a {kind} file there", SAVE
    if kind == SIGNED:
        what, expected, fix = kind, "a file that AnyGPU made there", "Put it there and press R."
    found = f"no {what} {name!r}" if name != none_of(kind) else f"{name} in ComfyUI's input and output folders"
    raise CheckpointError(found, expected=expected, fix=fix)


def stamp(kind: str, name: str) -> tuple[str, int, int]:
    path = _files_of_kind(kind).get(name)
    return (name, 0, 0) if path is None else (name, *_time_and_size(path))


def _files_of_kind(kind: str) -> dict[str, Path]:
    """Name -> path of the files of a kind in ComfyUI's input and, marked ``[output]``, output folder."""
    suffixes, wanted = ((*SUFFIXES, *FILMS, GLB), LATENT) if kind == SIGNED else (SUFFIXES, kind)
    paths: dict[str, Path] = {}
    for folder, mark in ((folder_paths.get_input_directory(), ""), (folder_paths.get_output_directory(), OUTPUT)):
        root = Path(folder)
        for path in _files_below(root, suffixes):
            if path.suffix.lower() in (*FILMS, GLB) or _kind(path, _time_and_size(path)) == wanted:
                paths[path.relative_to(root).as_posix() + mark] = path
    return paths


def _files_below(root: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files with these endings, :data:`DEEPEST` levels deep, but for hidden ones; follows links to folders once."""
    level, seen, files = [root], set(), []
    for _ in range(DEEPEST):
        deeper: list[Path] = []
        for folder in level:
            real = folder.resolve()
            if real in seen:
                continue
            seen.add(real)
            _, folders, names = next(os.walk(folder), ("", [], []))  # os.walk asks the disk only about links
            files += [folder / name for name in names if name[0] != "." and Path(name).suffix.lower() in suffixes]
            deeper += [folder / name for name in folders if name[0] != "."]
        level = deeper
    return files


def _time_and_size(path: Path) -> tuple[int, int]:
    """The time of a file's last change, in ns, and its bytes; zeros where it is gone."""
    stat = value_or(path.stat, None)
    return (0, 0) if stat is None else (stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=4096)
def _kind(path: Path, time_and_size: tuple[int, int]) -> str:
    return "" if time_and_size == (0, 0) else kind_of(path)
