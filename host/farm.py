"""Jobs that other machines render: the folders that hand them over, and the files that came back."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import folder_paths
from comfy_execution.graph_utils import ExecutionBlocker

from ..compat.device.facts import value_or
from ..compat.errors import CheckpointError, InputError
from ..compat.memory.parts import ProgressStage
from ..compat.records import shown
from ..paint.choices import MESH_FILES
from ..pipelines.movie import Check, read_frames
from ..pipelines.records.job_folder import SUFFIXES, JobFolder, lines_of
from ..pipelines.records.job_lists import PICTURES, JobList, write_list
from ..pipelines.records.places import Places
from .api import InputImpl
from .folders import AUTO, paint_path, paint_provider_folder, state_folder
from .progress import NodeProgress

OWN, ROOTS, NONE = "output/farm", "anygpu_farm", "none"  # in ComfyUI's output folder; a key of extra_model_paths.yaml
ADDRESSES = "farm_addresses.txt"  # of the machine's owner, in our folder of ComfyUI's user folder
POLL_SECONDS = 1.0
LOOK_SECONDS = 0.1  # between looks for a cancel


@dataclass(frozen=True, slots=True)
class Collected:
    """The files of the jobs that are done, and the reasons why others failed, by key."""

    files: tuple[Path, ...]
    failed: Mapping[str, str]
    waiting: int


@dataclass(frozen=True, slots=True)
class PaintModels:
    """The models that texture meshes, by listed name; ``delight`` may be ``none``, ``image_encoder`` ``auto``."""

    model: str
    delight: str = NONE
    image_encoder: str = AUTO


def folder_choices() -> list[str]:
    """The folders through which jobs are handed over: one of ComfyUI's, then those that the machine's owner names."""
    listed = folder_paths.get_folder_paths(ROOTS) if ROOTS in folder_paths.folder_names_and_paths else []
    return [OWN, *(str(Path(path)) for path in listed)]


def job_folder(name: str) -> JobFolder:
    """The folder of a listed name; CheckpointError for any other."""
    fix = f"Name it as {ROOTS} in extra_model_paths.yaml and start ComfyUI again."
    listed = _listed(name, "folder of jobs", folder_choices(), fix)
    return JobFolder(Path(folder_paths.get_output_directory()) / "farm" if listed == OWN else Path(listed))


def farm_address(name: str) -> str:
    """``auto``, or an address that this machine's owner has listed: whoever is at it gets the farm's token.

    Raises:
        CheckpointError: it is not listed; says in which file the owner may add it.
    """
    path = state_folder() / ADDRESSES
    text = value_or(lambda: path.read_text(encoding="utf-8"), "")
    lines = [line.strip() for line in text.split("\n")]
    known = [AUTO, *(line for line in lines if line and not line.startswith("#"))]
    fix = f"The owner of this machine adds it to {str(path)!r}, one address to a line."
    return _listed(name, "address of a farm", known, fix)


def picture_folders(suffixes: Sequence[str] = PICTURES) -> list[str]:
    """``none``, then the folders with files of these endings below ComfyUI's input folder."""
    root = Path(folder_paths.get_input_directory())
    folders = {path.parent for path in root.glob("*/*.*") if path.suffix.lower() in suffixes}
    return [NONE, *sorted(folder.relative_to(root).as_posix() for folder in folders)]


def mesh_folders() -> list[str]:
    return picture_folders(MESH_FILES)


def input_folder(name: str) -> Path:
    """The folder of a listed name, of pictures or meshes; CheckpointError for any other."""
    if name == NONE or name not in (*picture_folders(), *mesh_folders()):
        raise CheckpointError(
            f"no folder of pictures or meshes {name!r}",
            expected="a folder with some in ComfyUI's input folder",
            fix="Put one there and press R.",
        )
    return Path(folder_paths.get_input_directory()) / name


def queue_meshes(
    folder: JobFolder,
    name: str,
    models: PaintModels,
    meshes: str,
    pictures: str,
    seeds: Sequence[int],
    steps: int,
    check: Check,
) -> JobList:
    """Write a job for each mesh of a listed folder, to be textured by listed models."""
    from ..paint.jobs import paint_jobs
    from ..paint.sampling.painting import PaintSettings

    encoder, delight = paint_provider_folder(models.image_encoder), models.delight
    content = partial(Places(state=state_folder()).content, check=check)
    others = {
        "delight": None if delight == NONE else content(paint_path(delight), delight),
        "image_encoder": None if encoder is None else content(encoder, models.image_encoder),
    }
    item, painting = content(paint_path(models.model), models.model), PaintSettings(steps=steps)
    sources = input_folder(meshes), input_folder(meshes if pictures == NONE else pictures)
    return write_list(folder, name, paint_jobs(item, *sources, seeds, painting, folder.add_input, **others))


def jobs_named(folder: JobFolder, name: str, check: Check = lambda: None) -> JobList:
    """The jobs of a file in ``folder``, or of the newest for an empty name.

    Raises:
        CheckpointError: there is none. InputError: a line of it is not a job.
    """
    from ..paint.jobs import job_of  # painting is read when it is used, not at ComfyUI's start

    files = folder.job_files()
    path = next((path for path in reversed(files) if name in ("", path.stem)), None)
    if path is None:
        raise CheckpointError(
            f"no jobs {name!r} in {str(folder.root)!r}" if name else f"no jobs in {str(folder.root)!r}",
            expected="a file that AnyGPU Queue Jobs wrote",
            fix="Queue some, or correct the name.",
        )
    lines, keys = tuple(lines_of(path)), list[str]()
    for line in lines:
        check()
        keys.append(job_of(line).key)
    return JobList(folder, path.stem, lines, tuple(keys))


def collect(jobs: JobList, wait: bool, progress: NodeProgress) -> Collected:
    """The results of the jobs; waits for all of them if ``wait``, and looks for a cancel meanwhile."""
    while True:
        done, failed = list[str](), dict[str, str]()
        for key in jobs.keys:
            progress.check()
            if jobs.folder.is_done(key):
                done.append(key)
            elif text := jobs.folder.failure(key):
                failed[key] = text
        waiting = len(jobs.keys) - len(done) - len(failed)
        if not wait or not waiting:
            files = (jobs.folder.result(key) for key in done)
            return Collected(tuple(file for file in files if file is not None), failed, waiting)
        progress.step(len(done) + len(failed), len(jobs.keys), ProgressStage("waiting for jobs"))
        until = time.monotonic() + POLL_SECONDS
        while time.monotonic() < until:
            progress.check()
            time.sleep(LOOK_SECONDS)


def require_some(jobs: JobList, collected: Collected) -> None:
    """Raise InputError, with the reason of the first, where jobs have failed and none is done."""
    if collected.failed and not collected.files:
        key, reason = next(iter(collected.failed.items()))
        raise InputError(
            f"no job of {jobs.name!r} is done, {len(collected.failed)} failed ({key[:12]}: {reason.rstrip('.')})",
            expected="at least one that is done",
            fix="Mend what it says and queue the jobs again.",
        )


def videos_of(collected: Collected) -> list[Any]:
    """A VIDEO of each video that came back; without any, a blocker that has ComfyUI skip the nodes after it."""
    videos = [InputImpl.VideoFromFile(str(path)) for path in collected.files if path.suffix == SUFFIXES[0]]
    return videos or [ExecutionBlocker(None)]


def images_of(collected: Collected) -> list[Any]:
    """An IMAGE of each file that came back, a picture or the first frame of a video; without any, as for videos."""
    images = [read_frames(path, 1)[0] for path in collected.files if path.suffix in SUFFIXES[:2]]
    return images or [ExecutionBlocker(None)]


def report_of(jobs: JobList, collected: Collected, workers: Sequence[Mapping[str, Any]]) -> str:
    """The text for the user: counts, failures and the state of each worker."""
    counts = f"{len(collected.files)} of {len(jobs.keys)} done"
    if collected.waiting:
        counts += f", {collected.waiting} waiting"
    failed = [f"{key[:12]}: {text}" for key, text in collected.failed.items()]
    return "\n".join([counts, *failed, *map(line_of, workers)])


def line_of(worker: Mapping[str, Any]) -> str:
    """The state of a worker in one line."""
    name, host = str(worker.get("worker", "")), str(worker.get("host", ""))
    parts = [f"{name} on {host}: {worker.get('state', '')}"]
    if worker.get("job"):
        step = f", {worker['stage']} {worker['done']}/{worker['total']}" if worker.get("total") else ""
        parts.append(f"{str(worker['job'])[:12]}{step}")
    parts.append(f"{worker.get('finished', 0)} finished")
    if worker.get("deaths"):
        parts.append(f"{worker['deaths']} deaths")
    return "; ".join([*parts, *filter(None, [str(worker.get("error", ""))])])


def _listed(name: str, what: str, choices: Sequence[str], fix: str) -> str:
    """``name``, one of ``choices``; CheckpointError for what the machine's owner has not listed."""
    if name not in choices:
        raise CheckpointError(f"no {what} {shown(name)} listed here", expected=f"one of {', '.join(choices)}", fix=fix)
    return name
