"""Sampled latents, saved automatically, so that no later failure can lose them: a file per sampling. FramePack's is
replaced after each finished section and holds what the next one needs, to resume with the same video."""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...compat.checkpoints.latents import metadata_of, read_record, record_in
from ...compat.device.execution import generator_for
from ...compat.device.facts import value_or
from ...compat.errors import CheckpointError, PackError
from ..base import Latents
from ..sampling.resume import SectionState
from .convert import to_core
from .store import LISTED, Origin, load_latent, save_latent, save_plain

log = logging.getLogger(__name__)

LIMIT_BYTES = 4 * 1024**3  # of the whole folder; a 720p clip of HunyuanVideo is 30 MB
MOST_FILES = 1000  # whose headers are read for a list
STALE_SECONDS = 3600  # after which an unfinished file of a writer that died is swept up
TICK_SECONDS = 2.0  # in which the coarsest file system (FAT) counts
HISTORY = "history"
ID = re.compile(r"[0-9a-z_-]{1,120}")
UNLISTED = (OSError, PackError, LookupError, AttributeError, TypeError, ValueError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class SavedLatents:
    """One saved sampling. Sizes and fps of latents that core sampled for another pack's model are unknown, which is 0;
    ``family`` is then that model's class, and ``latent_format`` core's class for its latents."""

    id: str  # a plain name without a folder
    name: str
    family: str
    total_bytes: int
    date: str  # local time, ISO
    seed: int
    frames: int
    width: int
    height: int
    fps: float
    prompt: str = ""
    unfinished: str = ""  # such as ``section 2 of 5``; empty for a whole one
    latent_format: str = ""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Latents sampled by other nodes than ours; frames, width and height in pixels, 0 where they are unknown."""

    samples: Sequence[torch.Tensor]  # of any shape, on any device; more than one where they are nested
    family: str  # of our pipeline, or the class of the model
    seed: int = 0
    frames: int = 0
    width: int = 0
    height: int = 0
    fps: float = 0.0
    latent_format: str = ""  # name of core's class for its latents
    unfinished: str = ""  # how far the sampling came, such as ``step 3 of 20``; empty for a whole one


def save(folder: Path, latents: Latents, notify: Callable[[str], None]) -> str:
    """Save ``latents`` and return their id; where the disk refuses, ``notify`` is told and the id is empty."""
    name = _new_id(latents.family, latents.seed)
    return name if _write(folder, name, lambda path: _save_to(path, latents, notify), notify) else ""


def save_plain_recovery(folder: Path, sampled: Sampled, notify: Callable[[str], None]) -> str:
    """Save latents of core's samplers and of paint like :func:`save`; they are loaded as a plain LATENT."""
    name = _new_id(sampled.family, sampled.seed)
    listed = {item.name: getattr(sampled, item.name) for item in fields(sampled) if item.name != "samples"}
    return name if _write(folder, name, lambda path: save_plain(path, sampled.samples, listed), notify) else ""


def listing(folder: Path) -> list[SavedLatents]:
    """The saved samplings, newest first; files that are not ours or damaged are left out. Reads headers only."""
    dated: list[tuple[float, SavedLatents]] = []
    for path in folder.glob("*.safetensors"):
        try:
            stat, record = path.stat(), record_in(metadata_of(path), path)
            if ID.fullmatch(path.stem) and record.get("kind") == "latent":
                dated.append((stat.st_mtime, _saved_latents(path.stem, stat.st_size, record)))
        except UNLISTED as error:  # another process may have removed it, or somebody edited it
            log.debug("%s is not listed: %s", path.name, error)
    return [saved for _, saved in sorted(dated, key=lambda item: (item[0], item[1].id), reverse=True)]


def by_date(folder: Path) -> list[Path]:
    """The files in the folder, newest first, unread."""
    return sorted(folder.glob("*.safetensors"), key=_modified, reverse=True)


def load(folder: Path, name: str, notify: Callable[[str], None], family: str = "") -> dict[str, Any]:
    """The LATENT in the file that :func:`path_of` gives; of an unfinished video, its finished sections."""
    return load_latent(path_of(folder, name, family), notify)


def path_of(folder: Path, name: str, family: str = "") -> Path:
    """The file of a listed id, or for ``newest`` the newest of ``family`` (empty: of all); else CheckpointError."""
    every = listing(folder)
    ids = [saved.id for saved in every]
    if name == "newest" and ids:
        fitting = [saved.id for saved in every if family in ("", saved.family)]
        if not fitting:
            found, kept = f"no saved latents of {family!r}", f"the {len(ids)} that are kept"
            fix = f"Load the {every[0].family} model, whose latents are the newest, or choose one from the list."
            raise CheckpointError(found, expected=f"a sampling of {family!r} among {kept}", fix=fix)
        name = fitting[0]
    if name not in ids:
        raise CheckpointError(
            f"no saved latents {name!r}" if ids else "no saved latents at all",
            expected=f"one of the {len(ids)} that are kept" if ids else "a finished sampling",
            fix="Press R to refresh the list." if ids else "Sample something first; each result is saved.",
        )
    return folder / f"{name}.safetensors"


DOUBTED = "_doubted"  # ends the id of sections after which values were not finite


@dataclass(slots=True)
class SavedSections:
    """FramePack's finished sections in one file per sampling, for :func:`pipelines.stages.sample_framepack`."""

    folder: Path
    notify: Callable[[str], None]
    names: dict[str, str] = field(default_factory=dict)
    describe: Callable[[Latents], Latents] = lambda latents: latents  # adds what made them, before they are written

    def found(self, key: str) -> SectionState | None:
        """The state of the newest unfinished sampling of ``key`` that can be read; None without one, or for no key."""
        for saved in (each for each in (listing(self.folder) if key else ()) if each.unfinished):
            if saved.id.endswith(DOUBTED):
                continue
            path = self.folder / f"{saved.id}.safetensors"
            try:
                record = record_in(metadata_of(path), path)
                if record.get("resume") != key:
                    continue
                tensors, _ = read_record(path, "latents")
                lengths = tuple(int(length) for length in record["extra"]["section_lengths"])
                state = bytes.fromhex(record["extra"]["generator_state"])
                generator_for(0, state)  # raises where this is none
                standing = SectionState(tensors[HISTORY], lengths, state)
            except (*UNLISTED, RuntimeError) as error:
                log.warning("AnyGPU: cannot resume from %s: %s", path.name, error)
                continue
            self.names[key] = saved.id
            return standing
        return None

    def drop(self, key: str) -> None:
        """Have no later run go on from what is saved, which stays to be recovered; ``key`` may have changed since."""
        for name in self.names.values():
            with suppress(OSError):  # swept, or never written
                (self.folder / f"{name}.safetensors").replace(self.folder / f"{name}{DOUBTED}.safetensors")
        self.names.clear()

    def save(self, key: str, index: int, count: int, latents: Latents, standing: SectionState) -> None:
        """Replace what is saved of this sampling by all sections so far, until the last with what resumes it, and tell
        the user how. Where the disk refuses, a note alone."""
        latents = self.describe(latents)
        earlier = self.names.pop("", "")  # saved before the model was hashed, until when its key is empty
        name = self.names.setdefault(key, earlier or _new_id(latents.family, latents.seed))
        record: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        if index + 1 < count:
            record = {"resume": key, "unfinished": f"section {index + 1} of {count}"}
            tensors = {HISTORY: standing.latents}
        write = partial(_save_to, latents=latents, notify=self.notify, origin=Origin(record=record, tensors=tensors))
        if _write(self.folder, name, write, self.notify):
            log.info("AnyGPU: section %d of %d saved as %s", index + 1, count, name)
            resume = f"to resume, queue the same graph again with seed {latents.seed}"
            self.notify(f"finished sections are saved{': ' + resume if key else ''}")
        elif index + 1 == count:
            del self.names[key]  # that file lacks sections


def _save_to(path: Path, latents: Latents, notify: Callable[[str], None], origin: Origin | None = None) -> None:
    save_latent(path, to_core(latents), notify, origin=origin)


def _write(folder: Path, name: str, write: Callable[[Path], Any], notify: Callable[[str], None]) -> bool:
    """Have ``write`` make the file of the id ``name``, the newest, and sweep; False, with a note, where that fails."""
    path = folder / f"{name}.safetensors"
    try:
        write(path)
        _make_newest(folder, path)
        _sweep(folder, path)
    except (OSError, PackError) as error:  # a full disk must not cost the sampling too
        log.warning("AnyGPU: latents could not be saved: %s", error)
        notify(f"the latents could not be kept for AnyGPU Recover Latents: {error}")
        return False
    return True


def _make_newest(folder: Path, path: Path) -> None:
    """Date ``path`` after all others: where the clock was set back, an older sampling would count as the newest."""
    newest = max((_modified(file) for file in folder.glob("*.safetensors") if file != path), default=0.0)
    if _modified(path) <= newest:
        with suppress(OSError):  # some shares refuse it: what was just saved is saved
            os.utime(path, (newest + TICK_SECONDS, newest + TICK_SECONDS))


def _sweep(folder: Path, newest: Path) -> None:
    """Remove the oldest files beyond LIMIT_BYTES or MOST_FILES, but not ``newest``, and stale ``.part`` files."""
    total = 0
    for place, path in enumerate([newest, *(file for file in by_date(folder) if file != newest)]):
        with suppress(OSError):  # another process may sweep too, or read it: what was just saved is saved
            total += path.stat().st_size
            if place and (total > LIMIT_BYTES or place >= MOST_FILES):
                path.unlink()
    for part in folder.glob(".*.part"):
        with suppress(OSError):
            if time.time() - _modified(part) > STALE_SECONDS:
                part.unlink()


def _modified(path: Path) -> float:
    return value_or(lambda: path.stat().st_mtime, 0.0)  # another process may have removed it


def _new_id(family: str, seed: int) -> str:
    model = re.sub(r"[^0-9a-z_-]+", "_", family.lower())[:40]
    return f"{time.strftime('%Y%m%d-%H%M%S')}_{model}_{seed}_{uuid.uuid4().hex[:6]}"


def _saved_latents(name: str, total_bytes: int, whole: Mapping[str, Any]) -> SavedLatents:
    """The entry of a list, from a file's ``whole`` record; raises one of :data:`UNLISTED` for an edited record."""
    record = whole.get(LISTED, whole)  # latents that core sampled have their facts under a key of their own
    saved = SavedLatents(
        **{number: int(record[number]) for number in ("frames", "seed", "width", "height")},
        id=name,
        name="",
        family=str(record["family"]),
        total_bytes=total_bytes,
        date=str(whole["saved"]),
        fps=float(record["fps"]),
        prompt=str(record.get("extra", {}).get("prompt", "")),
        unfinished=str(whole.get("unfinished") or record.get("unfinished", "")),
        latent_format=str(record.get("latent_format", "")),
    )
    sizes = [f"{saved.width}x{saved.height}", f"{saved.frames} frame{'s' if saved.frames > 1 else ''}"]
    words = (saved.date.replace("T", " "), saved.family, *(sizes if saved.width else ()), f"seed {saved.seed}")
    return replace(saved, name=", ".join(filter(None, (*words, saved.unfinished))))
