"""Jobs that other machines render, by way of folders or of a farm at a Ray address, and the files that come back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import folder_paths
import torch
from comfy_execution.graph_utils import ExecutionBlocker

from ..compat.device.facts import value_or
from ..compat.durable import write_file
from ..compat.errors import CheckpointError, InputError, MissingPackageError, UnsupportedError, first_line
from ..compat.memory.parts import ProgressStage
from ..compat.ray_clusters import GATEWAY, LOOK_SECONDS, NAMESPACE, TOKEN_FIX, answer, join, token_mode
from ..compat.records import shown
from ..paint.choices import MESH_FILES
from ..pipelines.movie import Check, read_frames
from ..pipelines.records.job_folder import SUFFIXES, JobFolder, lines_of
from ..pipelines.records.job_lists import PICTURES, JobList, write_list
from ..pipelines.records.places import Places
from .api import InputImpl
from .folders import AUTO, adapter_path, base_path, paint_path, paint_provider_folder, stamp, state_folder
from .progress import NodeProgress

OWN, ROOTS, NONE = "output/farm", "anygpu_farm", "none"  # in ComfyUI's output folder; a key of extra_model_paths.yaml
ADDRESSES = "farm_addresses.txt"  # of the machine's owner, in our folder of ComfyUI's user folder
POLL_SECONDS = 1.0
ANSWER_SECONDS = 30.0  # less than the minute after which Ray ends a process whose cluster is gone
FILE_SECONDS = 600.0  # for a picture, a mesh or a video on its way
GONE = "its file is gone from results: delete its .json there to have it rendered again"
CANCEL_SECONDS = 0.5  # for the farm to hear of a cancel, which the user waits for
FIX = TOKEN_FIX.format("start ComfyUI with RAY_AUTH_MODE=token")


@dataclass(frozen=True, slots=True)
class Collected:
    files: tuple[Path, ...]  # of the jobs that are done
    failed: Mapping[str, str]  # key of a job -> the reason
    waiting: int  # jobs that are neither


@dataclass(frozen=True, slots=True)
class PaintModels:
    model: str  # this and the others are names that :mod:`.folders` lists
    delight: str = NONE
    image_encoder: str = AUTO
    adapter: str = NONE  # MV-Adapter's file, on the checkpoint that is the model
    prompts: str = ""
    negative: str = ""


def folder_choices() -> list[str]:
    """The folders for jobs, which other machines share: ComfyUI's, then those that the machine's owner lists."""
    listed = folder_paths.get_folder_paths(ROOTS) if ROOTS in folder_paths.folder_names_and_paths else []
    return [OWN, *(str(Path(path)) for path in listed)]


def job_folder(name: str) -> JobFolder:
    """The folder of a listed name; CheckpointError for any other."""
    fix = f"Name it as {ROOTS} in extra_model_paths.yaml and start ComfyUI again."
    listed = _listed(name, "folder of jobs", folder_choices(), fix)
    return JobFolder(Path(folder_paths.get_output_directory()) / "farm" if listed == OWN else Path(listed))


def farm_address(name: str) -> str:
    """``name`` if it is ``auto`` or the owner lists it, else CheckpointError: an address is sent the farm's token."""
    path = state_folder() / ADDRESSES
    text = value_or(lambda: path.read_text(encoding="utf-8-sig"), "")  # Windows' editors begin with a mark
    known = [AUTO, *(line for line in map(str.strip, text.split("\n")) if line and not line.startswith("#"))]
    fix = f"The owner of this machine adds it to {str(path)!r}, one address to a line."
    return _listed(name, "address of a farm", known, fix)


def picture_folders(suffixes: Sequence[str] = PICTURES) -> list[str]:
    """``none``, then the folders with files of these endings below ComfyUI's input folder."""
    root = Path(folder_paths.get_input_directory())
    folders = {path.parent for path in root.glob("*/*.*") if path.suffix.lower() in suffixes}
    return [NONE, *sorted(folder.relative_to(root).as_posix() for folder in folders)]


def input_folder(name: str) -> Path:
    """The folder of a listed name, of pictures or meshes; CheckpointError for any other."""
    if name == NONE or name not in (*picture_folders(), *picture_folders(MESH_FILES)):
        expected, fix = "a folder with some in ComfyUI's input folder", "Put one there and press R."
        raise CheckpointError(f"no folder of pictures or meshes {name!r}", expected=expected, fix=fix)
    return Path(folder_paths.get_input_directory()) / name


def folder_stamp(*names: str) -> Any:
    """A value that changes with the files in folders of :func:`picture_folders`; other names are ignored."""
    root, listed = Path(folder_paths.get_input_directory()), {*picture_folders(), *picture_folders(MESH_FILES)} - {NONE}
    return stamp(*(root / name for name in listed.intersection(names)))


def queue_meshes(
    folder: JobFolder, name: str, models: PaintModels, meshes: str, pictures: str, seeds: Sequence[int], steps: int,
    check: Check, **others: Any,
) -> JobList:  # fmt: skip
    """Write a list of jobs: one per mesh and seed, with an adapter also per prompt; ``others`` are fields of all."""
    from ..paint.jobs import adapter_fields, paint_jobs
    from ..paint.sampling.painting import PaintSettings

    folder.jobs_file(name)  # refused before gigabytes are hashed
    sources = input_folder(meshes), input_folder(meshes if pictures == NONE else pictures)
    adapter = None if models.adapter == NONE else adapter_path(models.adapter)
    model = paint_path(models.model) if adapter is None else base_path(models.model)
    delight = None if models.delight == NONE else paint_path(models.delight)
    encoder = paint_provider_folder(models.image_encoder)
    content = partial(Places(state=state_folder()).content, check=check)  # hashes gigabytes: all names are known by now
    others["delight"] = None if delight is None else content(delight, models.delight)
    others["image_encoder"] = None if encoder is None else content(encoder, models.image_encoder)
    if adapter is not None:
        others |= adapter_fields(model, adapter, content(adapter, models.adapter), models.prompts, models.negative)
    model_content, settings = content(model, models.model), PaintSettings(steps=steps)
    jobs = paint_jobs(model_content, *sources, seeds, settings, folder.add_input, check=check, **others)
    return write_list(folder, name, jobs, check)


def jobs_named(folder: JobFolder, name: str, check: Check = lambda: None) -> JobList:
    """The jobs of the list ``name`` in ``folder``, of the newest for an empty name; CheckpointError without one."""
    from ..paint.jobs import job_of  # painting is read when it is used, not at ComfyUI's start

    path = next((path for path in reversed(folder.job_files()) if name in ("", path.stem)), None)
    if path is None:
        found = f"no jobs {name!r} in {str(folder.root)!r}" if name else f"no jobs in {str(folder.root)!r}"
        fix = "Queue some, or correct the name."
        raise CheckpointError(found, expected="a file that AnyGPU Queue Jobs wrote", fix=fix)
    lines, keys = tuple(lines_of(path)), list[str]()
    for line in lines:
        check()
        keys.append(job_of(line).key)
    return JobList(folder, path.stem, lines, tuple(keys))


def collect(jobs: JobList, wait: bool, progress: NodeProgress) -> Collected:
    """The results of the jobs so far, or of all with ``wait``, which shows progress; raises at a cancel."""
    while True:
        files, failed = list[Path](), dict[str, str]()
        for key in jobs.keys:
            progress.check()
            if file := jobs.folder.result(key):
                files.append(file)
            elif text := GONE if jobs.folder.is_done(key) else jobs.folder.failure(key):
                failed[key] = text
        waiting = len(jobs.keys) - len(files) - sum(key in failed for key in jobs.keys)  # one may be listed twice
        if not wait or not waiting:
            return Collected(tuple(files), failed, waiting)
        progress.step(len(jobs.keys) - waiting, len(jobs.keys), ProgressStage("waiting for jobs"))
        _pause(progress)


def _pause(progress: NodeProgress) -> None:
    until = time.monotonic() + POLL_SECONDS
    while time.monotonic() < until:
        progress.check()
        time.sleep(LOOK_SECONDS)


def require_some(jobs: JobList, collected: Collected) -> None:
    if collected.failed and not collected.files:
        key, reason = next(iter(collected.failed.items()))
        found = f"no job of {jobs.name!r} is done, {len(collected.failed)} failed ({key[:12]}: {reason.rstrip('.')})"
        raise InputError(found, expected="at least one that is done", fix="Mend it; queue the jobs under a new name.")


def videos_of(collected: Collected) -> list[Any]:
    videos = [InputImpl.VideoFromFile(str(path)) for path in collected.files if path.suffix == SUFFIXES[0]]
    return videos or [ExecutionBlocker(None)]


def images_of(collected: Collected) -> list[Any]:
    images = [read_frames(path, 1)[0] for path in collected.files if path.suffix in SUFFIXES[:2]]
    return images or [ExecutionBlocker(None)]


def report_of(jobs: JobList, collected: Collected, workers: Sequence[Mapping[str, Any]]) -> str:
    counts = f"{len(collected.files)} of {len(jobs.keys)} done"
    if collected.waiting:
        counts += f", {collected.waiting} waiting"
    failed = [f"{key[:12]}: {text}" for key, text in collected.failed.items()]
    return "\n".join([counts, *failed, *map(line_of, workers)])


def line_of(worker: Mapping[str, Any]) -> str:
    """A line on the state of one worker: its job and step, jobs finished, deaths, and error."""
    name, host = str(worker.get("worker", "")), str(worker.get("host", ""))
    parts = [f"{name} on {host}: {worker.get('state', '')}"]
    if worker.get("job"):
        step = f", {worker.get('stage', '')} {worker.get('done', 0)}/{worker['total']}" if worker.get("total") else ""
        parts.append(f"{str(worker['job'])[:12]}{step}")
    parts.append(f"{worker.get('finished', 0)} finished")
    if worker.get("deaths"):
        parts.append(f"{worker['deaths']} death{'s' * (worker['deaths'] != 1)}")
    return "; ".join([*parts, *filter(None, [str(worker.get("error", ""))])])


def _listed(name: str, what: str, choices: Sequence[str], fix: str) -> str:
    if name not in choices:
        raise CheckpointError(f"no {what} {shown(name)} listed here", expected=f"one of {', '.join(choices)}", fix=fix)
    return name


def render_at(address: str, jobs: JobList, progress: NodeProgress) -> Collected:
    """Render jobs at a farm and fetch their files into the folder of the jobs; a cancel also cancels them there.
    Raises CheckpointError for an unlisted ``address`` or a file that no job owns, before any is read or sent;
    InputError where nothing answers there, or fails later; UnsupportedError without a token."""
    from ..paint.jobs import job_of  # painting is read when it is used, not at ComfyUI's start

    with _farm(farm_address(address), progress) as farm:
        missing = {key: line for key, line in zip(jobs.keys, jobs.lines, strict=True) if not jobs.folder.is_done(key)}
        sent = None
        if missing:
            names = dict.fromkeys(item.name for line in missing.values() for item in job_of(line).inputs)
            for file in [jobs.folder.input_file(name) for name in names]:
                farm.answer(farm.gateway.put_input.remote(file.read_bytes(), file.suffix.lower()), FILE_SECONDS)
            sent = farm.gateway.submit.remote(jobs.name, list(missing.values()))
        try:
            if sent is not None:
                farm.answer(sent)
            farm.fetch(jobs, list(missing))
        except BaseException:
            with suppress(Exception):  # waits for both: the cancel may be lost, or a late submission undo it
                if sent is not None:
                    farm.ray.wait([sent], timeout=ANSWER_SECONDS)
                farm.ray.get(farm.gateway.cancel.remote(list(missing)), timeout=CANCEL_SECONDS)
            raise
    return collect(jobs, False, progress)


@dataclass(slots=True)
class _Farm:
    """A connection to a farm, and the picture of the worker that is shown."""

    ray: Any
    gateway: Any  # the farm's actor
    progress: NodeProgress
    worker: str = ""  # name of the worker whose picture is shown
    call: Any = None  # to the actor for the next picture, not yet answered
    frames: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 8, 8, 3))  # (1, H, W, 3) in 0..1

    def answer(self, call: Any, seconds: float = ANSWER_SECONDS) -> Any:
        """The answer to a call of the actor; raises at a cancel, and RayError without an answer in ``seconds``."""
        return answer(self.ray, call, self.progress.check, seconds)

    def look(self) -> torch.Tensor:
        """The newest picture that has come, and ask for the next; never waits."""
        if self.call is not None and self.ray.wait([self.call], timeout=0)[0]:
            pixels, self.call = value_or(lambda: self.ray.get(self.call), None), None
            if pixels is not None:
                self.frames = torch.from_numpy(pixels.copy())[None].float() / 255
        if self.call is None and self.worker:
            self.call = self.gateway.preview.remote(self.worker)
        return self.frames

    def fetch(self, jobs: JobList, keys: list[str]) -> None:
        """Wait until the jobs ``keys`` are done or failed, saving results and the workers' states as they come."""
        left, progress = keys, self.progress
        while left:
            progress.check()
            standing = self.answer(self.gateway.standing.remote(left))
            for key in standing["done"]:
                self._fetch(jobs, key)
            for key, text in standing["failed"].items():
                jobs.folder.fail(key, str(text))
            workers: list[Mapping[str, Any]] = list(standing["workers"])
            jobs.folder.write_workers("farm", [dict(worker) for worker in workers])
            left = [key for key in left if key not in standing["done"] and key not in standing["failed"]]
            progress.lines[:] = map(line_of, workers)
            rendering = (worker for worker in workers if worker.get("total") and worker.get("job") in left)
            self.worker = next((str(worker["worker"]) for worker in rendering), "")
            progress.step(len(keys) - len(left), len(keys), ProgressStage("waiting for the farm"), self.look)
            if left:
                _pause(progress)

    def _fetch(self, jobs: JobList, key: str) -> None:
        """Save the file of a job that is done at the farm; the job fails here if the farm no longer has it."""
        from ..paint.jobs import job_of  # painting is read when it is used, not at ComfyUI's start

        job = job_of(jobs.lines[jobs.keys.index(key)])
        suffix, content = self.answer(self.gateway.result.remote(key), FILE_SECONDS) or ("", b"")
        if suffix not in SUFFIXES:
            jobs.folder.fail(key, "its file is gone from the farm")
            return
        write_file(jobs.folder.results / f"{key}{suffix}", content)
        jobs.folder.show(f"{key}{suffix}", f"{job.title} {key[:8]}{suffix}")
        jobs.folder.finish(key, {"from": "a farm"})


@contextmanager
def _farm(address: str, progress: NodeProgress) -> Iterator[_Farm]:
    """The farm at ``address`` for the block; InputError without one or once it fails, UnsupportedError for no token."""
    ray = _ray_module()
    ours = not ray.is_initialized()  # else another pack's, which is not ours to end
    try:
        if ours and (reason := join(ray, address, progress.check, "error")):
            expected = "the address of a Ray cluster to which this machine belongs, with its Ray, Python and token"
            fix = f"Join it with `ray start --address=HEAD:6379 --num-cpus=0 --num-gpus=0`. {FIX}"
            raise InputError(f"no farm at {address!r} ({reason})", expected=expected, fix=fix)
        try:
            farm = _Farm(ray, ray.get_actor(GATEWAY, namespace=NAMESPACE), progress)
        except ValueError as error:
            expected = "`anygpu-farm watch` on one of its machines"
            fix = "Run there: anygpu-farm watch FOLDER --address auto." if ours else "End the Ray of another pack here."
            raise InputError(f"no farm in the cluster at {address!r}", expected=expected, fix=fix) from error
        if not farm.answer(farm.gateway.ready.remote()):
            found = f"a farm at {address!r} that asks for no token"
            raise UnsupportedError(found, expected="RAY_AUTH_MODE=token there", fix=FIX)
        yield farm
    except (ray.exceptions.RayError, ConnectionError) as error:
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        expected = "a farm that runs until its jobs are done"
        fix = "Look at the log of `anygpu-farm`, start it and run this node again: jobs that are done stay done."
        raise InputError(f"the farm at {address!r} failed ({first_line(cause)})", expected=expected, fix=fix) from error
    finally:
        if ours:
            ray.shutdown()


def _ray_module() -> Any:
    """Ray, set up with a token; MissingPackageError without the package, UnsupportedError without a token."""
    try:
        import ray
        import ray._private.authentication.authentication_utils
    except ImportError as error:
        found = f"no ray for AnyGPU Farm ({first_line(error)})"
        fix = "Install it into ComfyUI's Python: pip install ray. Or use AnyGPU Queue Jobs and a shared folder."
        raise MissingPackageError(found, expected="the Ray and Python version of the farm", fix=fix) from error
    if not value_or(token_mode, False):
        found = "Ray without a token in this ComfyUI"
        raise UnsupportedError(found, expected="RAY_AUTH_MODE=token where ComfyUI starts", fix=FIX)
    return ray
