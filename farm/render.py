"""What a worker does with one line of a job file: a video in the folder's results, by rename."""

from __future__ import annotations

import hashlib
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..compat.device.facts import value_or
from ..compat.durable import require_writable
from ..compat.records import json_in
from ..pipelines.base import Pipeline, Progress
from ..pipelines.demo import MODELS as DEMOS
from ..pipelines.job_folder import JobFolder
from ..pipelines.jobs import Job, Machine, Places, job_in, load_pipeline, run
from ..pipelines.movie import write_mp4
from ..pipelines.receipts import decoded_receipt, tags_for
from .schedule import Task

OUTPUT_BYTES = 100_000_000  # that must be free before hours of work
USUAL_STEPS, USUAL_FRAMES, USUAL_SIDE = 30, 97, 512  # where a job leaves them to its model


def job_of(line: str) -> Job:
    """The job of one line of a job file.

    Raises:
        InputError: it is none; says why.
    """
    return job_in(json_in(line, "this line"))


def task_of(line: str) -> Task:
    """What the schedule needs to know of a line; raises as :func:`job_of`."""
    job = job_of(line)
    settings = job.settings
    pixels = (settings.width or USUAL_SIDE) * (settings.height or USUAL_SIDE) * (settings.frames or USUAL_FRAMES)
    branches = 2 if settings.cfg > 1 else 1
    return Task(job.key, job.model_key, float(pixels * (settings.steps or USUAL_STEPS) * branches), line)


@dataclass
class Renderer:
    """Renders jobs of one folder in one process, and keeps the last model that it loaded.

    Args:
        folder: whose results it writes, seen by all machines under this path. models: folders that are searched.
        state: of this machine, for probe results. device: None for the default device.
    """

    folder: Path
    models: tuple[Path, ...]
    state: Path
    device: Any = None
    _pipeline: Pipeline | None = field(default=None, repr=False)
    _model: str = ""

    def render(self, line: str, progress: Progress) -> dict[str, Any]:
        """Render the job of ``line`` unless it is done; returns what is written down of it."""
        job, folder = job_of(line), JobFolder(self.folder)
        kept = folder.state / job.key  # of this job alone: whoever goes on with it finds its steps, on any machine
        path = folder.results / f"{job.key}.mp4"
        require_writable(path, OUTPUT_BYTES, "the folder of jobs")
        if self._model != job.model_key:
            self._pipeline, self._model = None, ""  # before the next is loaded, so that both are never held
        started = time.monotonic()
        places = Places((*self.models, DEMOS), (self.folder,))
        machine = Machine(places, self.state, self.device, unfinished=kept)
        with torch.no_grad():
            self._pipeline = self._pipeline or load_pipeline(job, machine, progress)
            self._model = job.model_key
            rendered = run(job, machine, progress, self._pipeline)
        write_mp4(rendered.frames, rendered.latents.fps, path, tags_for(decoded_receipt(rendered.latents, job.decode)))
        shutil.rmtree(kept, ignore_errors=True)
        return {
            "job": job.record(),
            "file": path.name,
            "frames_sha256": hashlib.sha256(rendered.frames.contiguous().numpy().tobytes()).hexdigest(),
            "seconds": round(time.monotonic() - started, 3),
        }


def reached_in(folder: JobFolder, task: Task) -> float:
    """When a step of a job was last kept, 0 for never: by it a job that goes on is told from one that kills workers."""
    kept = [path for path in (folder.state / task.key).rglob("*.safetensors")]
    return max((value_or(lambda path=path: path.stat().st_mtime, 0.0) for path in kept), default=0.0)
