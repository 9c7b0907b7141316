"""Sampled latents, saved automatically, newest first, so that no later failure can lose them.

A file per sampling; FramePack's is replaced after each finished section and holds what the next section needs, so that
an interrupted sampling resumes where it stopped and gives the same video.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...compat.checkpoints.latents import metadata_of, read_record, record_in
from ...compat.errors import CheckpointError, PackError
from ..base import Latents
from ..sampling.resume import SectionState
from .convert import to_core
from .store import Origin, load_latent, save_latent, save_samples

log = logging.getLogger(__name__)

LIMIT_BYTES = 4 * 1024**3  # of the whole folder; a 720p clip of HunyuanVideo is 30 MB
STALE_SECONDS = 3600  # after which an unfinished file of a writer that died is swept up
HISTORY = "history"
ID = re.compile(r"[0-9a-z_-]{1,120}")
NO_NAME = re.compile(r"[^0-9a-z_-]")


@dataclass(frozen=True, slots=True)
class Kept:
    """One kept sampling.

    ``id`` is a plain name without a folder; ``family`` the class of the model where core's sampler made it; ``date``
    local time, ISO; ``unfinished`` such as ``section 2 of 5``, empty for a whole one.
    """

    id: str
    name: str
    family: str
    total_bytes: int
    date: str
    seed: int
    frames: int
    width: int
    height: int
    fps: float
    prompt: str = ""
    unfinished: str = ""


def keep(folder: Path, latents: Latents, notify: Callable[[str], None], limit_bytes: int = LIMIT_BYTES) -> str:
    """Keep ``latents`` and return their id; empty, and said, where they could not be kept. Never raises for a disk."""
    name = _new_id(latents)
    return name if _write(folder, name, latents, notify, limit_bytes) else ""


def keep_samples(
    folder: Path,
    samples: Sequence[torch.Tensor],
    record: Mapping[str, Any],
    notify: Callable[[str], None],
    limit_bytes: int = LIMIT_BYTES,
) -> str:
    """Keep what one of core's samplers has made and return its id; empty, and said, where it could not be kept.

    Args:
        samples: as for :func:`save_samples`.
        record: ``model``, ``frames``, ``width``, ``height``, ``seed``, ``fps``, and ``unfinished`` where it was cut
            short.
    """
    name = _new_name(str(record["model"]).lower(), int(record["seed"]))
    saved = _guarded(lambda path: save_samples(path, samples, record, notify), folder, name, notify, limit_bytes)
    return name if saved else ""


def listing(folder: Path) -> list[Kept]:
    """What is kept, newest first; files that are not ours or damaged are left out. Reads headers only."""
    found: list[tuple[float, Kept]] = []
    for path in folder.glob("*.safetensors"):
        try:
            stat, record = path.stat(), record_in(metadata_of(path), path)
            if ID.fullmatch(path.stem) and record.get("kind") == "latent":
                found.append((stat.st_mtime, _kept(path.stem, stat.st_size, record)))
        except (OSError, PackError, KeyError, TypeError, ValueError) as error:  # another process may have removed it
            log.debug("%s is not listed: %s", path.name, error)
    return [kept for _, kept in sorted(found, key=lambda item: (item[0], item[1].id), reverse=True)]


def load(folder: Path, name: str, notify: Callable[[str], None]) -> dict[str, Any]:
    """The kept LATENT of an id, or of the newest one for ``newest``; an unfinished video is as far as it came.

    Raises:
        CheckpointError: none of that id is kept.
    """
    return load_latent(path_of(folder, name), notify)


def path_of(folder: Path, name: str) -> Path:
    """The file of an id from :func:`listing`; nothing else can be named.

    Raises:
        CheckpointError: none of that id is kept.
    """
    ids = [kept.id for kept in listing(folder)]
    chosen = ids[0] if name == "newest" and ids else name
    if chosen not in ids:
        raise CheckpointError(
            f"no kept latents {name!r}" if ids else "no kept latents at all",
            expected=f"one of the {len(ids)} that are kept" if ids else "a finished sampling",
            fix="Press R to refresh the list."
            if ids
            else "Sample something first; every result is saved automatically.",
        )
    return folder / f"{chosen}.safetensors"


@dataclass(slots=True)
class KeptSections:
    """FramePack's finished sections in one file per sampling, for :func:`pipelines.stages.sample_framepack`."""

    folder: Path
    notify: Callable[[str], None]
    limit_bytes: int = LIMIT_BYTES
    names: dict[str, str] = field(default_factory=dict)

    def found(self, key: str) -> SectionState | None:
        """Where the newest unfinished sampling with the same ``key`` stands; None where there is none."""
        for kept in listing(self.folder):
            if not kept.unfinished:
                continue
            path = self.folder / f"{kept.id}.safetensors"
            try:
                record = record_in(metadata_of(path), path)
                if record.get("resume") != key:
                    continue
                tensors, _ = read_record(path, "latents")
                lengths = [int(length) for length in record["extra"]["section_lengths"]]
                state = bytes.fromhex(record["extra"]["generator_state"])
                standing = SectionState(tensors[HISTORY], tuple(lengths), state)
            except (OSError, PackError, KeyError, TypeError, ValueError) as error:
                log.warning("AnyGPU: cannot resume from %s: %s", path.name, error)
                continue
            self.names[key] = kept.id
            return standing
        return None

    def keep(self, key: str, index: int, count: int, latents: Latents, standing: SectionState) -> None:
        """Replace what is kept of this sampling by all sections so far."""
        name = self.names.setdefault(key, _new_id(latents))
        record: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        if index + 1 < count:
            record = {"resume": key, "unfinished": f"section {index + 1} of {count}"}
            tensors = {HISTORY: standing.latents}
        origin = Origin(record=record, tensors=tensors)
        if _write(self.folder, name, latents, self.notify, self.limit_bytes, origin):
            log.info("AnyGPU: section %d of %d saved as %s", index + 1, count, name)
            self.notify("finished sections are saved: after a cancel or a crash, queue the same graph again to resume")


def _write(
    folder: Path,
    name: str,
    latents: Latents,
    notify: Callable[[str], None],
    limit_bytes: int,
    origin: Origin | None = None,
) -> bool:
    def save(path: Path) -> Path:
        return save_latent(path, to_core(latents), notify, origin=origin)

    return _guarded(save, folder, name, notify, limit_bytes)


def _guarded(
    save: Callable[[Path], Path], folder: Path, name: str, notify: Callable[[str], None], limit_bytes: int
) -> bool:
    """Whether ``save`` has written the file of ``name``; then what is too much is removed."""
    path = folder / f"{name}.safetensors"
    try:
        save(path)
        _sweep(folder, path, limit_bytes)
    except (OSError, PackError) as error:  # a full disk must not cost the sampling too
        log.warning("AnyGPU: latents could not be saved: %s", error)
        notify(f"the latents could not be kept for AnyGPU Recover Latents: {error}")
        return False
    return True


def _sweep(folder: Path, newest: Path, limit_bytes: int) -> None:
    """Remove the oldest files until the rest fits into ``limit_bytes``; the newest always stays."""
    files = sorted(folder.glob("*.safetensors"), key=_modified, reverse=True)
    total = 0
    for path in [newest, *(file for file in files if file != newest)]:
        total += path.stat().st_size if path.exists() else 0
        if total > limit_bytes and path != newest:
            path.unlink(missing_ok=True)
    for part in folder.glob(".*.part"):
        if time.time() - _modified(part) > STALE_SECONDS:
            part.unlink(missing_ok=True)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed by another process
        return 0.0


def _new_id(latents: Latents) -> str:
    return _new_name(latents.family, latents.seed)


def _new_name(model: str, seed: int) -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}_{NO_NAME.sub('-', model)}_{seed}_{uuid.uuid4().hex[:6]}"


def _kept(name: str, size: int, record: Mapping[str, Any]) -> Kept:
    family, frames, seed = str(record.get("family") or record["model"]), int(record["frames"]), int(record["seed"])
    width, height, unfinished = int(record["width"]), int(record["height"]), str(record.get("unfinished", ""))
    date, fps = str(record["saved"]), float(record["fps"])
    prompt = str(record.get("extra", {}).get("prompt", ""))
    title = f"{date.replace('T', ' ')}, {family}, {width}x{height}, {frames} frames, seed {seed}"
    title += f", {unfinished}" if unfinished else ""
    return Kept(name, title, family, size, date, seed, frames, width, height, fps, prompt, unfinished)
