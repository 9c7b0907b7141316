"""Jobs that other machines render: the folders that hand them over, what came back, and a farm at a Ray address."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import folder_paths
import torch
from comfy_execution.graph_utils import ExecutionBlocker

from ..compat.device.facts import first_line, value_or
from ..compat.durable import replacing
from ..compat.errors import CheckpointError, InputError, MissingPackageError, UnsupportedError
from ..compat.records import shown
from ..paint.choices import MESH_FILES
from ..pipelines.movie import read_frames
from ..pipelines.records.job import Job, VideoJob, job_on
from ..pipelines.records.job_folder import SUFFIXES, JobFolder, lines_of
from ..pipelines.records.job_lists import PICTURES, JobList, write_list
from .api import InputImpl
from .folders import AUTO, paint_path, paint_provider_folder, state_folder
from .progress import NodeProgress

OWN, ROOTS, NONE = "output/farm", "anygpu_farm", "none"  # in ComfyUI's output folder; a key of extra_model_paths.yaml
ADDRESSES = "farm_addresses.txt"  # of the machine's owner, in our folder of ComfyUI's user folder
NAMESPACE, GATEWAY = "anygpu", "gateway"  # as farm/cluster.py names them
POLL_SECONDS = 1.0
LOOK_SECONDS = 0.1  # between looks for a cancel
ANSWER_SECONDS = 30.0  # less than the minute after which Ray ends a process whose cluster is gone
FILE_SECONDS = 600.0  # for a picture, a mesh or a video on its way
CANCEL_SECONDS = 0.5
TOKEN_FIX = (
    "Run `ray get-auth-token --generate` once, copy ~/.ray/auth_token to each machine, and start ComfyUI with "
    "RAY_AUTH_MODE=token."
)


@dataclass(frozen=True, slots=True)
class Collected:
    """What came back: the file of each job that is done, and why others failed, by key."""

    files: tuple[Path, ...]
    failed: Mapping[str, str]
    waiting: int


@dataclass(frozen=True, slots=True)
class PaintModels:
    """What textures meshes, by its names in lists: ``delight`` may be ``none``, ``image_encoder`` ``auto``."""

    model: str
    delight: str = NONE
    image_encoder: str = AUTO


def folder_choices() -> list[str]:
    """The folders through which jobs are handed over: one of ComfyUI's, then those that the machine's owner names."""
    return [OWN, *map(str, _roots())]


def job_folder(name: str) -> JobFolder:
    """The folder of a listed name; nothing else can be named.

    Raises:
        CheckpointError: it is not listed.
    """
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


def picture_folders() -> list[str]:
    """``none``, then the folders with pictures below ComfyUI's input folder."""
    return _folders_with(PICTURES)


def mesh_folders() -> list[str]:
    """``none``, then the folders with meshes below ComfyUI's input folder."""
    return _folders_with(MESH_FILES)


def input_folder(name: str) -> Path:
    """The folder of a listed name, of pictures or meshes.

    Raises:
        CheckpointError: it is not listed.
    """
    if name == NONE or name not in (*picture_folders(), *mesh_folders()):
        raise CheckpointError(
            f"no folder of pictures or meshes {name!r}",
            expected="a folder with some in ComfyUI's input folder",
            fix="Put one there and press R.",
        )
    return Path(folder_paths.get_input_directory()) / name


def queue_meshes(
    folder: JobFolder, name: str, models: PaintModels, meshes: str, pictures: str, seeds: Sequence[int], steps: int
) -> JobList:
    """Write a job for each mesh of a listed folder, to be textured by listed models."""
    from ..paint.jobs import model_item, paint_jobs
    from ..paint.sampling.painting import PaintSettings

    encoder = paint_provider_folder(models.image_encoder)
    others = {
        "delight": None if models.delight == NONE else model_item(paint_path(models.delight), models.delight),
        "image_encoder": None if encoder is None else model_item(encoder, models.image_encoder),
    }
    item, painting = model_item(paint_path(models.model), models.model), PaintSettings(steps=steps)
    sources = input_folder(meshes), input_folder(meshes if pictures == NONE else pictures)
    return write_list(folder, name, paint_jobs(item, *sources, seeds, painting, folder.add_input, **others))


def jobs_named(folder: JobFolder, name: str) -> JobList:
    """The jobs of a file in ``folder``, or of the newest for an empty name.

    Raises:
        CheckpointError: there is none. InputError: a line of it is not a job.
    """
    files = folder.job_files()
    path = next((path for path in reversed(files) if name in ("", path.stem)), None)
    if path is None:
        raise CheckpointError(
            f"no jobs {name!r} in {str(folder.root)!r}" if name else f"no jobs in {str(folder.root)!r}",
            expected="a file that AnyGPU Queue Jobs wrote",
            fix="Queue some, or correct the name.",
        )
    lines = tuple(lines_of(path))
    return JobList(folder, path.stem, lines, tuple(_job_of(line).key for line in lines))


def collect(jobs: JobList, wait: bool, progress: NodeProgress) -> Collected:
    """What became of the jobs; waits for all of them if ``wait``, and looks for a cancel meanwhile."""
    while True:
        progress.check()
        done = [key for key in jobs.keys if jobs.folder.is_done(key)]
        failed = {key: text for key in jobs.keys if key not in done and (text := jobs.folder.failure(key))}
        waiting = len(jobs.keys) - len(done) - len(failed)
        if not wait or not waiting:
            files = (jobs.folder.result(key) for key in done)
            return Collected(tuple(file for file in files if file is not None), failed, waiting)
        progress.step(len(done) + len(failed), len(jobs.keys), "waiting for jobs")
        _pause(progress)


def render_at(address: str, jobs: JobList, progress: NodeProgress) -> Collected:
    """Have the farm at ``address`` render the jobs, and bring what they made into their folder here.

    A cancel here ends them there.

    Raises:
        CheckpointError: an address that is not listed, or a file that is not one of the jobs' own; nothing is asked
            or read then. InputError: nothing answers there, or it fails later. UnsupportedError: it asks for no token.
    """
    address = farm_address(address)
    with _gateway(address, progress) as (ray, gateway):
        missing = [n for n, key in enumerate(jobs.keys) if not jobs.folder.is_done(key)]
        keys = [jobs.keys[n] for n in missing]
        lines = [jobs.lines[n] for n in missing]
        if keys:
            names = (item.name for line in lines for item in _job_of(line).inputs)
            for file in [jobs.folder.input_file(name) for name in dict.fromkeys(names)]:
                call = gateway.put_input.remote(file.read_bytes(), file.suffix.lower())
                _answer(ray, call, progress, FILE_SECONDS)
            _answer(ray, gateway.submit.remote(jobs.name, lines), progress)
        try:
            _bring(ray, gateway, jobs, keys, progress)
        except BaseException:
            with suppress(Exception):
                ray.get(gateway.cancel.remote(keys), timeout=CANCEL_SECONDS)  # else it may be lost with the connection
            raise
    return collect(jobs, False, progress)


def require_some(jobs: JobList, collected: Collected) -> None:
    """Raise where jobs have failed and none is done.

    Raises:
        InputError: with the reason of the first.
    """
    if collected.failed and not collected.files:
        key, reason = next(iter(collected.failed.items()))
        raise InputError(
            f"no job of {jobs.name!r} is done, {len(collected.failed)} failed ({key[:12]}: {reason.rstrip('.')})",
            expected="at least one that is done",
            fix="Mend what it says and queue the jobs again.",
        )


def videos_of(collected: Collected) -> list[Any]:
    """A VIDEO of each video that came back; without any, what lets ComfyUI pass over the nodes behind."""
    videos = [InputImpl.VideoFromFile(str(path)) for path in collected.files if path.suffix == SUFFIXES[0]]
    return videos or [ExecutionBlocker(None)]


def images_of(collected: Collected) -> list[Any]:
    """An IMAGE of each file that came back, a picture or the first frame of a video; without any, as for videos."""
    images = [read_frames(path, 1)[0] for path in collected.files if path.suffix in SUFFIXES[:2]]
    return images or [ExecutionBlocker(None)]


def report_of(jobs: JobList, collected: Collected, workers: Sequence[Mapping[str, Any]]) -> str:
    """What the user reads: how many are done, why others failed, and what each worker does."""
    counts = f"{len(collected.files)} of {len(jobs.keys)} done"
    if collected.waiting:
        counts += f", {collected.waiting} waiting"
    failed = [f"{key[:12]}: {text}" for key, text in collected.failed.items()]
    return "\n".join([counts, *failed, *map(line_of, workers)])


def line_of(worker: Mapping[str, Any]) -> str:
    """What a worker does, in one line."""
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
    """``name``, one of ``choices``: a workflow names what the machine's owner has listed, and nothing else.

    Raises:
        CheckpointError: it is not listed.
    """
    if name not in choices:
        raise CheckpointError(f"no {what} {shown(name)} listed here", expected=f"one of {', '.join(choices)}", fix=fix)
    return name


def _folders_with(suffixes: Sequence[str]) -> list[str]:
    root = Path(folder_paths.get_input_directory())
    folders = {path.parent for path in root.glob("*/*.*") if path.suffix.lower() in suffixes}
    return [NONE, *sorted(folder.relative_to(root).as_posix() for folder in folders)]


def _roots() -> list[Path]:
    known = folder_paths.folder_names_and_paths
    return [Path(path) for path in folder_paths.get_folder_paths(ROOTS)] if ROOTS in known else []


def _job_of(line: str) -> Job:
    from ..paint.jobs import PaintJob  # painting is read when it is used, not at ComfyUI's start

    return job_on(line, VideoJob, PaintJob)


@dataclass(slots=True)
class _Window:
    """The picture of a job that runs: requested while the node is shown, and displayed once it has arrived."""

    ray: Any
    gateway: Any
    worker: str = ""
    call: Any = None
    frames: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 8, 8, 3))

    def look(self) -> torch.Tensor:
        """Frames (1, H, W, 3) in 0..1, the last that came; none before the first. Waits for nothing."""
        if self.call is not None and self.ray.wait([self.call], timeout=0)[0]:
            pixels, self.call = value_or(lambda: self.ray.get(self.call), None), None
            if pixels is not None:
                self.frames = torch.from_numpy(pixels.copy())[None].float() / 255
        if self.call is None and self.worker:
            self.call = self.gateway.preview.remote(self.worker)
        return self.frames


def _bring(ray: Any, gateway: Any, jobs: JobList, keys: Sequence[str], progress: NodeProgress) -> None:
    """Fetch each result as soon as it is there, until all jobs are done or have failed."""
    open_keys, window = list(keys), _Window(ray, gateway)
    while open_keys:
        progress.check()
        standing = _answer(ray, gateway.standing.remote(open_keys), progress)
        for key in standing["done"]:
            suffix, content = _answer(ray, gateway.result.remote(key), progress, FILE_SECONDS) or ("", b"")
            if suffix in SUFFIXES:
                with replacing(jobs.folder.results / f"{key}{suffix}") as temporary:
                    temporary.write_bytes(content)
                jobs.folder.finish(key, {"from": "a farm"})
            else:
                jobs.folder.fail(key, "its file is gone from the farm")
        for key, text in standing["failed"].items():
            jobs.folder.fail(key, str(text))
        jobs.folder.write_workers("farm", list(standing["workers"]))
        open_keys = [key for key in open_keys if key not in standing["done"] and key not in standing["failed"]]
        progress.lines[:] = [line_of(worker) for worker in standing["workers"]]
        window.worker = next((str(worker["worker"]) for worker in standing["workers"] if worker.get("total")), "")
        progress.step(len(keys) - len(open_keys), max(1, len(keys)), "waiting for the farm", window.look)
        if open_keys:
            _pause(progress)


def _answer(ray: Any, call: Any, progress: NodeProgress, seconds: float = ANSWER_SECONDS) -> Any:
    """What a call returns, looking for a cancel while it is waited for.

    Raises:
        RayError: it fails, or takes longer than ``seconds``.
    """
    until = time.monotonic() + seconds
    while not ray.wait([call], timeout=LOOK_SECONDS)[0] and time.monotonic() < until:
        progress.check()
    return ray.get(call, timeout=0)


def _pause(progress: NodeProgress) -> None:
    """Wait until it is time to look again."""
    until = time.monotonic() + POLL_SECONDS
    while time.monotonic() < until:
        progress.check()
        time.sleep(LOOK_SECONDS)


@contextmanager
def _gateway(address: str, progress: NodeProgress) -> Iterator[tuple[Any, Any]]:
    """Ray and the farm's gateway at ``address``; Ray's socket in this process is closed behind it."""
    ray = _ray_module()
    ours = not ray.is_initialized()  # else another pack's, which is not ours to end
    try:
        if ours:
            _connect(ray, address, progress)
        yield ray, _guarded(ray, address, progress)
    except (ray.exceptions.RayError, ConnectionError) as error:
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        raise InputError(
            f"the farm at {address!r} failed ({first_line(cause)})",
            expected="a farm that runs until its jobs are done",
            fix="Look at the log of `anygpu-farm`, start it and run this node again: jobs that are done stay done.",
        ) from error
    finally:
        if ours:
            ray.shutdown()


def _ray_module() -> Any:
    """The package ``ray``, in token mode.

    Raises:
        MissingPackageError: it is not installed. UnsupportedError: ComfyUI was started without a token.
    """
    try:
        import ray
        from ray._private.authentication.authentication_utils import is_token_auth_enabled
    except ImportError as error:
        raise MissingPackageError(
            f"no ray for AnyGPU Farm ({first_line(error)})",
            expected="the Ray and Python version of the farm",
            fix="Install it into ComfyUI's Python: pip install ray. Or use AnyGPU Queue Jobs and a shared folder.",
        ) from error
    if not value_or(is_token_auth_enabled, False):
        raise UnsupportedError(
            "Ray without a token in this ComfyUI", expected="RAY_AUTH_MODE=token where ComfyUI starts", fix=TOKEN_FIX
        )
    return ray


def _connect(ray: Any, address: str, progress: NodeProgress) -> None:
    """Join the cluster at ``address``.

    Raises:
        InputError: nothing there lets this machine in.
    """
    from ..compat.ray_clusters import refusal

    reason = refusal(address, progress.check)
    try:
        if not reason:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    except Exception as error:  # of Ray's many kinds, which differ between its versions
        reason = first_line(error.__cause__ or error)
    if reason:
        raise InputError(
            f"no farm at {address!r} ({reason})",
            expected="the address of a Ray cluster to which this machine belongs, with its Ray, Python and token",
            fix=f"Join it with `ray start --address=HEAD:6379 --num-cpus=0 --num-gpus=0`. {TOKEN_FIX}",
        )


def _guarded(ray: Any, address: str, progress: NodeProgress) -> Any:
    """The farm's gateway, which asks for a token.

    Raises:
        InputError: no farm works in the cluster. UnsupportedError: it lets anybody in.
    """
    try:
        gateway = ray.get_actor(GATEWAY, namespace=NAMESPACE)
    except ValueError as error:
        raise InputError(
            f"no farm in the cluster at {address!r}",
            expected="`anygpu-farm watch` on one of its machines",
            fix="Run there: anygpu-farm watch FOLDER --address auto.",
        ) from error
    if not _answer(ray, gateway.ready.remote(), progress):
        raise UnsupportedError(
            f"a farm at {address!r} that asks for no token", expected="RAY_AUTH_MODE=token there", fix=TOKEN_FIX
        )
    return gateway
