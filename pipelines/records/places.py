"""The models and pictures that jobs name by content, found on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ...compat.checkpoints.identity import FileIndex, content_of, whole_of
from ...compat.errors import CheckpointError
from ..files.models import find_models
from ..files.single_file import Files
from ..movie import Allowance, Check, content_in, read_frames, size_in, transparency
from ..pipeline import DEMO_LORAS
from .job import Content
from .job_folder import inside

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".bmp", ".tif", ".tiff", ".mp4", ".webm", ".mkv", ".mov", ".gif")
FORMER_DEMOS = {  # content of demo models that shipped before, to their version: here the weights were in bf16
    "17a349e9ce546016318eb3d29c7ce9a1": "0.1.0",
    "61594e49d3fa6f0c98bf89342a9d6d2d": "0.1.0",
    "956f5c6bb644a92bb9a673f278968a46": "0.1.0",
    "648893e3cc274a2949595e8c540b4d38": "0.1.0",
    "6106608de0ad712a5f8110791336b3bf": "0.1.0",
    "53fdd7823afbffa95aa37ed82194ce1a": "0.1.0",
}
MOST_PICTURES = 500  # of a folder in which a picture is searched by its content
MOST_SOUGHT = 2**33  # pixels that one such search decodes: 2,071 frames of 1920x1080, each counted and then hashed
FILE = "pictures_as_core_reads.json"
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Places:
    """The paths of the contents that jobs name on this machine."""

    models: tuple[Path, ...] = ()  # folders in which models and LoRAs are searched
    files: tuple[Path, ...] = ()  # folders with pictures and videos
    known: dict[Content, Path] = field(default_factory=dict)  # paths that were chosen, by content
    differences: list[str] | None = None  # what stands in for a content that is not here, by name; None to refuse that
    state: Path | None = None  # folder with the index of pictures; None for none

    def content(self, path: Path, name: str = "", check: Check | None = None) -> Content:
        """The content of a model, LoRA or mesh at ``path``, which is put in ``known``. ``name`` replaces the file's
        name; ``check`` has every byte hashed as well, and may raise to cancel."""
        content = Content(name or path.name, content_of(path), whole_of(path, self.state, check) if check else "")
        self.known[content] = path
        return content

    def picture(self, path: Path) -> Content:
        """The content of a picture or video, whose path goes into ``known``; CheckpointError for what is neither."""
        index = PictureIndex(self.state)
        digest = index.content(path, lambda: None, Allowance())
        index.save()
        digest = digest or content_in(path, lambda: None, Allowance())  # raises, and says why
        content = Content(path.name, digest, size=size_in(path))
        self.known[content] = path
        return content

    def model(self, content: Content, check: Check | None = None) -> Path:
        """The model folder or file with this content: first by its name, then among all models. Without one the error
        of an unreadable file of that name is raised, else :meth:`_stand_in` decides. ``check`` is called while all
        bytes are hashed and may raise to cancel; with None that is left to the background, and samples must match."""

        def same(path: Path) -> bool:
            try:
                if content_of(path) != content.content:
                    return False
                return not content.whole or whole_of(path, self.state, check) in ("", content.whole)
            except CheckpointError as error:  # of this path: another one may be the model
                unreadable.extend([error] if path in paths else [])
                return False

        if content in self.known:
            return self.known[content]
        roots, unreadable = (*self.models, DEMO_LORAS), list[CheckpointError]()
        paths = inside(roots, content.name)
        if paths:
            paths += [path for root in roots for path in root.rglob(escape(PurePosixPath(content.name).name))]
        path = _first(content, paths, same)
        if path is None and content.content:
            path = _first(content, find_models(self.models), same)
        if path is None and unreadable:
            raise unreadable[0]
        if path is not None and (check or not content.whole):
            self.known[content] = path
        return path or self._stand_in(content, paths, self.models, "Copy it there")

    def frames(
        self, content: Content, check: Check = lambda: None, most: int | None = None
    ) -> tuple[torch.Tensor, float]:
        """The first ``most`` frames, and the frame rate, of the picture or video with this content, or of what
        :meth:`_stand_in` finds in its place. ``check`` may raise to cancel."""
        if content not in self.known:
            self.known[content] = self._find_picture(content, check)
        return read_frames(self.known[content], most, check)

    def mask(self, content: Content, size: Sequence[int]) -> torch.Tensor | None:
        """The :func:`transparency` of the file of a ``content`` that is known."""
        return transparency(self.known[content], size)

    def _find_picture(self, content: Content, check: Check) -> Path:
        """The path of the picture or video with this content in ``files``, by its name first, else the first match in
        MOST_SOUGHT pixels; else as :meth:`_stand_in`."""
        paths = [path for path in inside(self.files, content.name) if path.is_file()]
        index, allowance = PictureIndex(self.state), Allowance(MOST_SOUGHT)

        def same(path: Path) -> bool:
            check()
            return allowance.left > 0 and index.content(path, check, allowance, content.size) == content.content

        try:
            path = _first(content, paths, same)
            if path is None and content.content:
                path = _first(content, [path for root in self.files for path in _pictures(root)], same)
        finally:
            index.save()
        fix = "Put the picture beside the job file, or into ComfyUI's input folder"
        if allowance.left <= 0:
            fix += f", under its name: the search ends after {MOST_SOUGHT:,} pixels"
        return path or self._stand_in(content, paths, self.files, fix)

    def _stand_in(self, content: Content, paths: list[Path], roots: tuple[Path, ...], fix: str) -> Path:
        """The first of ``paths`` that exists, though its content differs: put in ``known`` and noted in
        ``differences``. CheckpointError, of ``roots`` and ``fix``, where none exists or ``differences`` is None."""
        version = FORMER_DEMOS.get(content.content)
        if version:
            fix = f"It is the demo model of version {version}: install that one, or make the job again"
        path = next((path for path in paths if path.exists()), None)
        if path is not None and self.differences is not None:
            why = f", with the demo model of version {version}" if version else ""
            self.differences.append(f"{content.name!r} has other content here than where it was made{why}")
            self.known[content] = path
            return path
        where = ", ".join(map(str, roots)) or "no folder"
        name = repr(content.name) if content.name else "such picture"
        found = f"{name} with other content in {where}" if path else f"no {name} in {where}"
        raise CheckpointError(found, expected=f"content {content.content or 'of that name'}", fix=f"{fix}.")


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that runs a job, with its folders."""

    places: Places  # where its models and pictures are
    state: Path  # folder for probe results and kept latents
    device: Any = None  # None for the default device
    trace: Path | None = None  # file for a profile; None for none
    host: Mapping[str, Any] = field(default_factory=dict)  # further arguments of ``load``
    single: Files | None = None  # what else pipelines of single files may take: other files, tokenizers
    unfinished: Path | None = None  # for samplings cut short, may be shared between machines; None: the kept latents'
    cards: Mapping[torch.device, int | None] = field(default_factory=dict)  # as :class:`LoadRequest` has them
    enlarged: Callable[[Path, torch.Tensor], torch.Tensor] | None = None  # pictures by the file of an upscale model


class PictureIndex(FileIndex):
    """The contents of picture and video files, kept in ``state`` unless that is None; empty for what is none."""

    def __init__(self, state: Path | None) -> None:
        super().__init__(None if state is None else state / FILE)

    def content(self, path: Path, check: Check, allowance: Allowance, size: tuple[int, ...] = ()) -> str:
        """The content of a file; empty where it cannot be decoded, has another ``size``, or needs more pixels than are
        left of ``allowance``, which decoding uses up."""

        def decoded() -> str | None:
            if size and sorted(size_in(path)) != sorted(size):  # which may lie on its side
                return None
            most = min(allowance.left, Allowance().left)
            own, digest = Allowance(most), ""
            try:
                digest = content_in(path, check, own)
            except CheckpointError as error:
                log.debug("no picture: %s", error)
                if isinstance(error.__cause__, OSError):  # of the disk or network, which may give it another time
                    return None
            finally:
                allowance.left -= most - own.left
            return None if allowance.left < 0 else digest  # None, which the index does not keep: another search may

        try:
            return self.of(path, decoded) or ""
        except OSError:
            return ""


def _first(content: Content, paths: list[Path], same: Callable[[Path], bool]) -> Path | None:
    """The first path that exists and passes ``same``, or just exists for a content without a hash; None for none."""
    return next((path for path in dict.fromkeys(paths) if path.exists() and (not content.content or same(path))), None)


def _pictures(folder: Path) -> list[Path]:
    """The first MOST_PICTURES pictures and videos in a folder by name, none of subfolders; [] if it is unreadable."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES and path.is_file())
    except OSError:
        return []
    return paths[:MOST_PICTURES]
