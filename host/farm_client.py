"""A farm at a Ray address: jobs and their pictures go there, their files come back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ..compat.device.facts import value_or
from ..compat.durable import replacing
from ..compat.errors import InputError, MissingPackageError, UnsupportedError, first_line
from ..compat.memory.parts import ProgressStage
from ..compat.ray_clusters import GATEWAY, LOOK_SECONDS, NAMESPACE, TOKEN_FIX, answer, join, token_mode
from ..pipelines.records.job_folder import SUFFIXES
from ..pipelines.records.job_lists import JobList
from .farm import Collected, collect, farm_address, line_of
from .progress import NodeProgress

POLL_SECONDS = 1.0
ANSWER_SECONDS = 30.0  # less than the minute after which Ray ends a process whose cluster is gone
FILE_SECONDS = 600.0  # for a picture, a mesh or a video on its way
CANCEL_SECONDS = 0.5
FIX = TOKEN_FIX.format("start ComfyUI with RAY_AUTH_MODE=token")


def render_at(address: str, jobs: JobList, progress: NodeProgress) -> Collected:
    """Have the farm at ``address`` render the jobs, and bring their files into their folder here.

    A cancel here ends them there.

    Raises:
        CheckpointError: an address that is not listed, or a file that is not one of the jobs' own; nothing is asked
            or read then. InputError: nothing answers there, or it fails later. UnsupportedError: it asks for no token.
    """
    from ..paint.jobs import job_of  # painting is read when it is used, not at ComfyUI's start

    with _farm(farm_address(address), progress) as farm:
        missing = {key: line for key, line in zip(jobs.keys, jobs.lines, strict=True) if not jobs.folder.is_done(key)}
        if missing:
            names = dict.fromkeys(item.name for line in missing.values() for item in job_of(line).inputs)
            for file in [jobs.folder.input_file(name) for name in names]:
                farm.answer(farm.gateway.put_input.remote(file.read_bytes(), file.suffix.lower()), FILE_SECONDS)
            farm.answer(farm.gateway.submit.remote(jobs.name, list(missing.values())))
        try:
            farm.fetch(jobs, list(missing))
        except BaseException:
            with suppress(Exception):  # waited for: else it may be lost with the connection
                farm.ray.get(farm.gateway.cancel.remote(list(missing)), timeout=CANCEL_SECONDS)
            raise
    return collect(jobs, False, progress)


@dataclass(slots=True)
class _Farm:
    """A connection to a farm.

    Args:
        gateway: the farm's actor.
        worker: whose picture is shown.
        call: for its next picture, on its way.
        frames: (1, H, W, 3) in 0..1, the picture that came last; none before the first.
    """

    ray: Any
    gateway: Any
    progress: NodeProgress
    worker: str = ""
    call: Any = None
    frames: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 8, 8, 3))

    def answer(self, call: Any, seconds: float = ANSWER_SECONDS) -> Any:
        """The answer to a call; a cancel ends the wait. Raises as :func:`..compat.ray_clusters.answer`."""
        return answer(self.ray, call, self.progress.check, seconds)

    def look(self) -> torch.Tensor:
        """The last picture; asks for the next once it has arrived, and waits for nothing."""
        if self.call is not None and self.ray.wait([self.call], timeout=0)[0]:
            pixels, self.call = value_or(lambda: self.ray.get(self.call), None), None
            if pixels is not None:
                self.frames = torch.from_numpy(pixels.copy())[None].float() / 255
        if self.call is None and self.worker:
            self.call = self.gateway.preview.remote(self.worker)
        return self.frames

    def fetch(self, jobs: JobList, keys: list[str]) -> None:
        """Fetch each result as soon as it is there, until all jobs are done or have failed."""
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
            self.worker = next((str(worker["worker"]) for worker in workers if worker.get("total")), "")
            progress.step(len(keys) - len(left), len(keys), ProgressStage("waiting for the farm"), self.look)
            until = time.monotonic() + POLL_SECONDS
            while left and time.monotonic() < until:
                progress.check()
                time.sleep(LOOK_SECONDS)

    def _fetch(self, jobs: JobList, key: str) -> None:
        suffix, content = self.answer(self.gateway.result.remote(key), FILE_SECONDS) or ("", b"")
        if suffix not in SUFFIXES:
            jobs.folder.fail(key, "its file is gone from the farm")
            return
        with replacing(jobs.folder.results / f"{key}{suffix}") as temporary:
            temporary.write_bytes(content)
        from ..paint.jobs import job_of  # painting is read when it is used, not at ComfyUI's start

        job = job_of(jobs.lines[jobs.keys.index(key)])
        jobs.folder.show(f"{key}{suffix}", f"{job.title} {key[:8]}{suffix}")
        jobs.folder.finish(key, {"from": "a farm"})


@contextmanager
def _farm(address: str, progress: NodeProgress) -> Iterator[_Farm]:
    """The farm at ``address``; Ray's socket in this process is closed behind it.

    Raises:
        InputError: no farm works there, or it fails later. UnsupportedError: it lets anybody in.
    """
    ray = _ray_module()
    ours = not ray.is_initialized()  # else another pack's, which is not ours to end
    try:
        if ours and (reason := join(ray, address, progress.check, "error")):
            raise InputError(
                f"no farm at {address!r} ({reason})",
                expected="the address of a Ray cluster to which this machine belongs, with its Ray, Python and token",
                fix=f"Join it with `ray start --address=HEAD:6379 --num-cpus=0 --num-gpus=0`. {FIX}",
            )
        try:
            farm = _Farm(ray, ray.get_actor(GATEWAY, namespace=NAMESPACE), progress)
        except ValueError as error:
            raise InputError(
                f"no farm in the cluster at {address!r}",
                expected="`anygpu-farm watch` on one of its machines",
                fix="Run there: anygpu-farm watch FOLDER --address auto.",
            ) from error
        if not farm.answer(farm.gateway.ready.remote()):
            raise UnsupportedError(
                f"a farm at {address!r} that asks for no token", expected="RAY_AUTH_MODE=token there", fix=FIX
            )
        yield farm
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
        import ray._private.authentication.authentication_utils
    except ImportError as error:
        raise MissingPackageError(
            f"no ray for AnyGPU Farm ({first_line(error)})",
            expected="the Ray and Python version of the farm",
            fix="Install it into ComfyUI's Python: pip install ray. Or use AnyGPU Queue Jobs and a shared folder.",
        ) from error
    if not value_or(token_mode, False):
        raise UnsupportedError(
            "Ray without a token in this ComfyUI", expected="RAY_AUTH_MODE=token where ComfyUI starts", fix=FIX
        )
    return ray
