"""What a worker does with one line of a job file: a video in the folder's results, by rename."""

from __future__ import annotations

import hashlib
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..compat.device.facts import value_or
from ..compat.durable import replacing, require_writable
from ..compat.ranks import Group
from ..compat.records import json_in
from ..paint.jobs import KIND as PAINT
from ..paint.jobs import Item, PaintJob, paint_job_in
from ..pipelines.base import Progress
from ..pipelines.demo import MODELS as DEMOS
from ..pipelines.job_folder import JobFolder
from ..pipelines.jobs import Content, Job, Machine, Places, job_in, load_pipeline, run
from ..pipelines.movie import read_frames, write_mp4
from ..pipelines.receipts import decoded_receipt, tags_for
from ..pipelines.split import on_group
from .schedule import Task

OUTPUT_BYTES = 100_000_000  # that must be free before hours of work
USUAL_STEPS, USUAL_FRAMES, USUAL_SIDE = 30, 97, 512  # where a job leaves them to its model


def job_of(line: str) -> Job | PaintJob:
    """The job of one line of a job file.

    Raises:
        InputError: it is none; says why.
    """
    record = json_in(line, "this line")
    return paint_job_in(record) if isinstance(record, dict) and record.get("kind") == PAINT else job_in(record)


def task_of(line: str) -> Task:
    """What the schedule needs to know of a line; raises as :func:`job_of`."""
    job = job_of(line)
    if isinstance(job, PaintJob):
        return Task(job.key, job.model_key, float(job.paint.size**2 * (job.paint.steps or USUAL_STEPS)), line)
    settings = job.settings
    pixels = (settings.width or USUAL_SIDE) * (settings.height or USUAL_SIDE) * (settings.frames or USUAL_FRAMES)
    branches = 2 if settings.cfg > 1 else 1
    return Task(job.key, job.model_key, float(pixels * (settings.steps or USUAL_STEPS) * branches), line)


@dataclass
class Renderer:
    """Renders jobs of one folder in one process, and keeps the last model that it loaded.

    Args:
        folder: whose results it writes, seen by all machines under this path.
        models: folders that are searched.
        state: of this machine, for probe results.
        device: None for the default device.
        group: processes that render each video together; None for this one alone.
    """

    folder: Path
    models: tuple[Path, ...]
    state: Path
    device: Any = None
    group: Group | None = None
    _pipeline: Any = field(default=None, repr=False)
    _delight: Any = field(default=None, repr=False)  # beside a paint pipeline
    _model: str = ""

    def render(self, line: str, progress: Progress) -> dict[str, Any]:
        """Render the job of ``line``; returns what is written down of it."""
        job, folder = job_of(line), JobFolder(self.folder)
        require_writable(folder.results / job.key, OUTPUT_BYTES, "the folder of jobs")
        if self._model != job.model_key:
            self._pipeline = self._delight = None  # before the next is loaded: both are never held
            self._model = job.model_key
        started = time.monotonic()
        with torch.no_grad():
            name, made = (self._textured if isinstance(job, PaintJob) else self._video)(job, folder, progress)
        digest = hashlib.sha256(made.contiguous().numpy().tobytes()).hexdigest()
        seconds = round(time.monotonic() - started, 3)
        return {"job": job.record(), "file": name, "pixels_sha256": digest, "seconds": seconds}

    def _video(self, job: Job, folder: JobFolder, progress: Progress) -> tuple[str, torch.Tensor]:
        """Name of the video's file, and its frames."""
        kept = folder.state / job.key  # of this job alone: whichever machine goes on with it finds its steps
        places = Places((*self.models, DEMOS), (self.folder,), state=self.state)
        machine = Machine(places, self.state, self.device, unfinished=kept)
        if self._pipeline is None:
            pipeline = load_pipeline(job, machine, progress)
            self._pipeline = pipeline if self.group is None else on_group(pipeline, self.group)
        rendered = run(job, machine, progress, self._pipeline)
        if self.group is not None and not self.group.leads:
            return "", rendered.frames
        tags = tags_for(decoded_receipt(rendered.latents, job.decode))
        path = write_mp4(rendered.frames, rendered.latents.fps, folder.results / f"{job.key}.mp4", tags)
        shutil.rmtree(kept, ignore_errors=True)
        return path.name, rendered.frames

    def _textured(self, job: PaintJob, folder: JobFolder, progress: Progress) -> tuple[str, torch.Tensor]:
        """Name of the textured mesh's file, and its texture."""
        from ..paint.geometry.mesh import load_mesh, write_glb
        from ..paint.loading import PaintRequest, load_paint
        from ..paint.texturing import OneStep, textured

        def find(item: Item, *roots: Path) -> Path:
            return Places(roots).model(Content(item.name, item.content))

        if self._pipeline is None:
            encoder = None if job.image_encoder is None else find(job.image_encoder, *self.models)
            request = PaintRequest(
                find(job.model, *self.models),
                image_encoder=encoder,
                precision=job.precision,
                device=self.device,
                state=self.state,
            )
            self._pipeline = load_paint(request, progress)
            if job.delight is not None:
                other = replace(request, model=find(job.delight, *self.models), image_encoder=None)
                self._delight = load_paint(other, progress)
        mesh, _ = load_mesh(find(job.mesh, folder.root), progress.check)
        pictures = [read_frames(find(job.picture, folder.root), 1, progress.check)[0][0]]
        settings = OneStep(job.paint, job.texture, job.max_views, job.delighting)
        texture, _, _ = textured(mesh, pictures, self._pipeline, self._delight, settings, progress)
        both = None if texture.metallic is None else torch.stack((texture.metallic, texture.roughness), dim=-1)
        path = folder.results / f"{job.key}.glb"
        with replacing(path) as temporary:
            write_glb(temporary, mesh, texture.colour, both)
        return path.name, texture.colour


def reached_in(folder: JobFolder, task: Task) -> float:
    """When a step of a job was last kept, 0 for never: by it a job that goes on is told from one that kills workers."""
    kept = [path for path in (folder.state / task.key).rglob("*.safetensors")]
    return max((value_or(lambda path=path: path.stat().st_mtime, 0.0) for path in kept), default=0.0)
