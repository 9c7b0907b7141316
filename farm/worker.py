"""One worker: a process of Ray's with a model in it, which renders one job at a time and answers while it does."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..compat.device.execution import to_host
from ..compat.device.facts import default_device, device_count
from ..compat.durable import require_writable, write_file
from ..compat.errors import InputError, MissingPackageError, PackError, first_line
from ..compat.output_check import NotFinite
from ..compat.ranks import RankLost
from ..compat.ray_clusters import own_devices, token_mode
from ..pipelines.base import Preview, Progress, ProgressStage
from ..pipelines.records.job_folder import JobFolder
from .schedule import Task

DONE, FAILED, CANCELLED, LOST = "done", "failed", "cancelled", "lost"
REFUSED, UNABLE, BROKEN = "refused", "unable", "broken"
JOB, MODEL, MACHINE = "job", "model", "machine"  # to whom an error belongs, by the phase in which it arises
OUTPUT_BYTES = 100_000_000  # that must be free before hours of work
PREVIEW_SECONDS = 30.0  # that a step may take until a preview is given up


class Renders(Protocol):
    """A renderer that writes into ``folder`` and computes on ``device``, None for the default one."""

    folder: Any
    device: Any

    def render(self, line: str, progress: Progress) -> dict[str, Any]: ...  # the record of the job of a line


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a job. ``failed``: nobody can do it; ``refused``: this worker cannot; ``unable``: it could not load
    the model; ``broken``: it can do no job now, as with a full disk; ``lost``: a process of its group died or hangs."""

    status: str
    text: str = ""
    seconds: float = 0.0


class Ended(Exception):
    """Raised inside a render that ended in another process, with its outcome there."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.text)
        self.outcome = outcome


class RenderCancelled(BaseException):
    """Raised inside a render that is to be cancelled."""


class RenderWatch:
    """The progress of one job, for those who ask; raises inside the render once it is to end."""

    def __init__(self) -> None:
        self.done, self.total, self.stage = 0, 0, ProgressStage("")
        self.notes: list[str] = []
        self.ended, self._wanted, self._shown = threading.Event(), threading.Event(), threading.Event()
        self._picture: Any = None

    def step(self, done: int, total: int, stage: ProgressStage, preview: Preview | None = None) -> None:
        """Note the progress, and make the preview that :meth:`picture` waits for; raises RenderCancelled."""
        self.done, self.total, self.stage = done, total, stage
        if preview is not None and self._wanted.is_set():
            self._wanted.clear()
            self._picture = pixels_of(preview()).numpy()
            self._shown.set()
        self.check()

    def check(self) -> None:
        if self.ended.is_set():
            raise RenderCancelled

    def notify(self, text: str) -> None:
        self.notes.append(text)

    def picture(self) -> Any:
        """Pixels (H, W, 3), uint8, of the next step, as numpy; None where none comes in time."""
        self._shown.clear()
        self._wanted.set()
        return self._picture if self._shown.wait(PREVIEW_SECONDS) else None


class Worker:
    """A process that renders. Ray makes an actor of it, with threads, so that it answers during a render."""

    def __init__(self, renderer: Renders) -> None:
        self.renderer = renderer
        self._task: Task | None = None
        self._watch = RenderWatch()
        self._began = 0.0
        self._finished = 0

    def ready(self) -> dict[str, Any]:
        """Choose the device; returns the host's name and if Ray asks for a token. Exits if a job still runs."""
        if self._task is not None:  # the network failed, and the driver took this process for dead: Ray starts another
            os._exit(1)
        bind(self.renderer)
        return {"host": socket.gethostname(), "token": token_mode()}

    def run(self, task: Task) -> Outcome:
        """Render a job into the folder; every failure is an outcome, so that only a dead process raises."""
        self._task, self._watch, self._began = task, RenderWatch(), time.monotonic()
        folder = JobFolder(self.renderer.folder)
        try:
            with during(MACHINE):
                done = folder.is_done(task.key)
            if not done:
                record = self.renderer.render(task.text, self._watch)
                with during(MACHINE):
                    folder.finish(task.key, record)
        except RenderCancelled:
            return Outcome(CANCELLED, "cancelled")
        except Ended as ended:
            return ended.outcome
        except Exception as error:  # whatever it is belongs to this job or this machine, and the next job is another
            return outcome_of(error, self.renderer.device)
        finally:
            self._task = None
        self._finished += 1
        return Outcome(DONE, seconds=time.monotonic() - self._began)

    def prove(self) -> str:
        """The reason why this worker can do no job now, in one line; empty where it can write, read and compute."""
        path = JobFolder(self.renderer.folder).results / f".{secrets.token_hex(8)}.proof"
        try:
            require_writable(path, OUTPUT_BYTES, "the folder of jobs")
            write_file(path, path.name)
            same = path.read_bytes() == path.name.encode()
            path.unlink()
        except Exception as error:  # of the system's many kinds
            return text_of(error)
        if not same:
            return f"the folder of jobs {str(path.parent)!r} gives back something else than was written"
        return device_fault(self.renderer.device)

    def state(self) -> dict[str, Any]:
        """The key of the job that runs, empty for none, its progress, and the number of finished jobs."""
        task, watch = self._task, self._watch
        if task is None:
            return {"key": "", "finished": self._finished}
        progress = {"done": watch.done, "total": watch.total, "stage": str(watch.stage), "notes": watch.notes[-5:]}
        seconds = round(time.monotonic() - self._began, 1)
        return {"key": task.key, "seconds": seconds, "finished": self._finished, **progress}

    def preview(self) -> Any:
        return None if self._task is None else self._watch.picture()

    def cancel(self, key: str) -> bool:
        """End the job of ``key`` at its next step, and return True, if it is the one that runs."""
        if self._task is None or self._task.key != key:
            return False
        self._watch.ended.set()
        return True


def bind(renderer: Any) -> None:
    """Set the device of ``renderer`` to the one that Ray gave this process, if torch sees more.
    Ray hides the others by one vendor's variable: cards of another, such as Intel's or a plug-in's, are all seen."""
    default, seen, ids = default_device(), [str(index) for index in range(device_count())], own_devices()
    if renderer.device is None and len(ids) < len(seen) and default.type != "cpu":
        renderer.device = next((torch.device(default.type, int(one)) for one in ids if one in seen), None)


@contextmanager
def during(phase: str) -> Iterator[None]:
    """Mark the errors of the block with the phase in which they arose; one that has a mark keeps it."""
    try:
        yield
    except Exception as error:
        if phase_of(error) == JOB:
            error.farm_phase = phase  # type: ignore[attr-defined]
        raise


def phase_of(error: BaseException) -> str:
    """The phase that an error, or the nearest one it was raised from, is marked with; :data:`JOB` without a mark."""
    link: BaseException | None = error
    while link is not None and not hasattr(link, "farm_phase"):
        link = link.__cause__  # not __context__: that error was handled
    return JOB if link is None else str(link.farm_phase)


def outcome_of(error: Exception, device: Any) -> Outcome:
    """The outcome of a job that raised ``error``, by the error's kind and phase, and by a test of ``device``."""
    text, phase = text_of(error), phase_of(error)
    if isinstance(error, RankLost):
        return Outcome(LOST, text)
    if phase == MACHINE:
        return Outcome(BROKEN, text)
    if isinstance(error, InputError) and not isinstance(error, NotFinite):  # of a value in the job's line
        return Outcome(FAILED if phase == JOB else REFUSED, text)
    if fault := device_fault(device):
        return Outcome(BROKEN, f"{fault}; seen after: {text}")
    return Outcome(UNABLE if phase == MODEL or isinstance(error, MissingPackageError) else REFUSED, text)


def device_fault(device: Any) -> str:
    """The reason, in one line, why ``device`` (None: the default one) fails to add 1 and 1; empty if it succeeds."""
    try:
        total = to_host(torch.ones(1, device=default_device() if device is None else device) + 1).item()
    except Exception as error:  # of the back ends' many kinds
        return f"the device does not answer ({first_line(error)})"
    return "" if total == 2 else f"one and one is {total:g} on the device"


def text_of(error: Exception) -> str:
    return str(error) if isinstance(error, PackError) else f"{type(error).__name__}: {first_line(error)}"


def pixels_of(preview: torch.Tensor) -> torch.Tensor:
    """Pixels (H, W, 3), uint8, of the first frame of frames (F, H, W, 3) in 0..1 or of latents (B, C, T, H, W).
    Latents are shown without a decoder: three groups of channels as red, green and blue, stretched to full range."""
    if preview.ndim == 4:
        return (to_host(preview[0]).float().clamp(0, 1) * 255).round().to(torch.uint8)
    groups = torch.stack([group.mean(0) for group in to_host(preview[0, :, 0]).float().tensor_split(3)], -1)
    low, high = groups.amin((0, 1)), groups.amax((0, 1))
    return ((groups - low) / (high - low).clamp_min(1e-6) * 255).round().to(torch.uint8)
