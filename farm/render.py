"""The rendering of one line of a job file: a file in the folder's results, by rename."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..compat.device.facts import value_or
from ..compat.durable import require_writable
from ..compat.memory.parts import Parts
from ..compat.ranks import Group
from ..paint import jobs as paint_jobs
from ..paint.jobs import PaintJob, job_of
from ..pipelines import jobs
from ..pipelines.base import Progress
from ..pipelines.demo import MODELS as DEMOS
from ..pipelines.latents.steps import FOLDER, SavedSteps
from ..pipelines.records.job import Job, Result, VideoJob
from ..pipelines.records.job_folder import JobFolder
from ..pipelines.records.places import Machine, Places
from ..pipelines.sampling.resume import painting_steps
from ..pipelines.split import on_group
from .schedule import Task
from .worker import MACHINE, MODEL, OUTPUT_BYTES, during


@dataclass(frozen=True, slots=True)
class JobKind:
    """The functions that render one kind of job."""

    load: Callable[..., Sequence[Any]]  # returns the pipelines of a job
    render: Callable[..., Result]  # renders a job with these pipelines
    parts: Callable[[Any], Sequence[Parts]]  # the parts of a pipeline that are read on first use
    split: Callable[[Any, Group], Any] | None = None  # a pipeline on a group; None for a kind that one device renders


def _paint(job: PaintJob, machine: Machine, progress: Progress, loaded: Sequence[Any]) -> Result:
    """Render a painting, which goes on after its last saved step, as a video does."""
    store = SavedSteps((machine.unfinished or machine.state) / FOLDER, progress.notify, keeps=True)
    steps = partial(painting_steps, store, progress)
    resuming = SimpleNamespace(check=progress.check, notify=progress.notify, step=progress.step, saved_steps=steps)
    return paint_jobs.render(job, machine, resuming, loaded)


KINDS = {
    VideoJob.kind: JobKind(
        load=lambda *given: (jobs.load_pipeline(*given),), render=jobs.render,
        parts=lambda pipeline: (pipeline.parts, pipeline.tools), split=on_group,
    ),
    PaintJob.kind: JobKind(load=paint_jobs.load, render=_paint, parts=lambda pipeline: (pipeline.parts,)),
}  # fmt: skip


def task_of(line: str) -> Task:
    """The job of a line, for the schedule; raises as :func:`job_of`."""
    job = job_of(line)
    return Task(job.key, job.model_key, job.size, line)


@dataclass
class Renderer:
    """Renders jobs of one folder in one process, and keeps the last model that it loaded."""

    folder: Path  # whose results it writes, seen by all machines under this path
    models: tuple[Path, ...]  # folders that are searched
    state: Path  # of this machine, for probe results
    device: Any = None  # None for the default device
    group: Group | None = None  # processes that render each video together; None for this one alone
    _loaded: tuple[str, Sequence[Any]] = field(default=("", ()), repr=False)  # model key, and its pipelines

    def render(self, line: str, progress: Progress) -> dict[str, Any]:
        """Render the job of ``line``, write its file unless another rank leads, and return the job's record."""
        job, folder = job_of(line), JobFolder(self.folder)
        kind, unfinished = KINDS[job.kind], folder.state / job.key  # whichever machine goes on with it finds its steps
        with during(MACHINE):
            require_writable(folder.results / job.key, OUTPUT_BYTES, "the folder of jobs")
        places = Places((*self.models, DEMOS), (self.folder,), state=self.state)
        machine = Machine(places, self.state, self.device, unfinished=unfinished)
        started = time.monotonic()
        with torch.no_grad():
            if self._loaded[0] != job.model_key:
                self._loaded = ("", ())  # before the next is loaded: both are never held
                with during(MODEL):
                    self._loaded = (job.model_key, self._pipelines(kind, job, machine, progress))
            made = kind.render(job, machine, progress, self._loaded[1])
        name = f"{job.key}{made.suffix}" if self.group is None or self.group.leads else ""
        if name:
            with during(MACHINE):
                made.write(folder.results / name)
                folder.show(name, f"{job.title} {job.key[:8]}{made.suffix}")
        digest = hashlib.sha256(made.pixels.contiguous().view(-1).numpy()).hexdigest()
        seconds = round(time.monotonic() - started, 3)
        return {"job": job.record(), "file": name, "pixels_sha256": digest, "seconds": seconds}

    def _pipelines(self, kind: JobKind, job: Job, machine: Machine, progress: Progress) -> Sequence[Any]:
        """The pipelines of a job, on its group if any; errors in reading a part, on first use, count as in loading."""
        loaded = kind.load(job, machine, progress)
        for parts in (parts for pipeline in loaded for parts in kind.parts(pipeline)):
            parts.readers = {name: during(MODEL)(read) for name, read in parts.readers.items()}
        if self.group is None or kind.split is None:
            return loaded
        return [kind.split(pipeline, self.group) for pipeline in loaded]


def reached_in(folder: JobFolder, task: Task) -> float:
    """The time (s since 1970) at which a job last saved a step, 0 for never: it grows while the job progresses."""
    saved = (folder.state / task.key).rglob("*.safetensors")
    return max((value_or(lambda path=path: path.stat().st_mtime, 0.0) for path in saved), default=0.0)
