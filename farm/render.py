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
from ..compat.errors import InputError
from ..compat.ranks import Group
from ..compat.records import json_in
from ..paint.jobs import KIND as PAINT
from ..paint.jobs import Item, PaintJob, paint_job_in
from ..pipelines.base import Progress
from ..pipelines.demo import MODELS as DEMOS
from ..pipelines.jobs import load_pipeline, run
from ..pipelines.movie import read_frames, write_mp4
from ..pipelines.records.job import MOST_BYTES, Content, Job, job_in
from ..pipelines.records.job_folder import JobFolder
from ..pipelines.records.places import Machine, Places
from ..pipelines.records.receipts import decoded_receipt, tags_for
from ..pipelines.split import on_group
from .schedule import Task
from .worker import MACHINE, MODEL, OUTPUT_BYTES, during

USUAL_STEPS, USUAL_FRAMES, USUAL_SIDE = 30, 97, 512  # where a job leaves them to its model


def job_of(line: str) -> Job | PaintJob:
    """The job of one line of a job file.

    Raises:
        InputError: it is none; says why.
    """
    if len(line) > MOST_BYTES:
        raise InputError(f"a line of {len(line)} characters", expected=f"{MOST_BYTES} at most", fix="Shorten it.")
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
    _loaded: tuple[str, Any] = field(default=("", None), repr=False)  # model key, and what was built for it

    def render(self, line: str, progress: Progress) -> dict[str, Any]:
        """Render the job of ``line``; returns what is written down of it."""
        job, folder = job_of(line), JobFolder(self.folder)
        with during(MACHINE):
            require_writable(folder.results / job.key, OUTPUT_BYTES, "the folder of jobs")
        paint = isinstance(job, PaintJob)
        started = time.monotonic()
        with torch.no_grad():
            if self._loaded[0] != job.model_key:
                self._loaded = ("", None)  # before the next is loaded: both are never held
                with during(MODEL):
                    loaded = (self._paint_models if paint else self._pipeline)(job, folder, progress)
                self._loaded = (job.model_key, loaded)
            name, made = (self._textured if paint else self._video)(job, folder, progress)
        digest = hashlib.sha256(made.contiguous().numpy().tobytes()).hexdigest()
        seconds = round(time.monotonic() - started, 3)
        return {"job": job.record(), "file": name, "pixels_sha256": digest, "seconds": seconds}

    def _video(self, job: Job, folder: JobFolder, progress: Progress) -> tuple[str, torch.Tensor]:
        """Name of the video's file, and its frames."""
        machine = self._machine(job, folder)
        rendered = run(job, machine, progress, self._loaded[1])
        if self.group is not None and not self.group.leads:
            return "", rendered.frames
        tags = tags_for(decoded_receipt(rendered.latents, job.decode))
        with during(MACHINE):
            path = write_mp4(rendered.frames, rendered.latents.fps, folder.results / f"{job.key}.mp4", tags)
        shutil.rmtree(machine.unfinished, ignore_errors=True)
        return path.name, rendered.frames

    def _machine(self, job: Job, folder: JobFolder) -> Machine:
        kept = folder.state / job.key  # of this job alone: whichever machine goes on with it finds its steps
        places = Places((*self.models, DEMOS), (self.folder,), state=self.state)
        return Machine(places, self.state, self.device, unfinished=kept)

    def _pipeline(self, job: Job, folder: JobFolder, progress: Progress) -> Any:
        pipeline = load_pipeline(job, self._machine(job, folder), progress)
        _mark_reading(pipeline.parts, pipeline.tools)
        return pipeline if self.group is None else on_group(pipeline, self.group)

    def _paint_models(self, job: PaintJob, folder: JobFolder, progress: Progress) -> tuple[Any, Any]:
        """The pipelines that paint, and that take shading out of the picture first; None without the second."""
        from ..paint.loading import PaintRequest, load_paint

        encoder = None if job.image_encoder is None else _found(job.image_encoder, *self.models)
        model = _found(job.model, *self.models)
        request = PaintRequest(
            model, image_encoder=encoder, precision=job.precision, device=self.device, state=self.state
        )
        both = [load_paint(request, progress)]
        if job.delight is not None:
            other = replace(request, model=_found(job.delight, *self.models), image_encoder=None)
            both.append(load_paint(other, progress))
        _mark_reading(*(pipeline.parts for pipeline in both))
        return both[0], both[1] if job.delight is not None else None

    def _textured(self, job: PaintJob, folder: JobFolder, progress: Progress) -> tuple[str, torch.Tensor]:
        """Name of the textured mesh's file, and its texture."""
        from ..paint.geometry.mesh import load_mesh, write_glb
        from ..paint.texturing import OneStep, textured

        mesh, _ = load_mesh(_found(job.mesh, folder.root), progress.check)
        pictures = [read_frames(_found(job.picture, folder.root), 1, progress.check)[0][0]]
        settings = OneStep(job.paint, job.texture, job.max_views, job.delighting)
        texture, _, _ = textured(mesh, pictures, *self._loaded[1], settings, progress)
        both = None if texture.metallic is None else torch.stack((texture.metallic, texture.roughness), dim=-1)
        path = folder.results / f"{job.key}.glb"
        with during(MACHINE), replacing(path) as temporary:
            write_glb(temporary, mesh, texture.colour, both)
        return path.name, texture.colour


def _mark_reading(*several: Any) -> None:
    """Have parts and tools, which are read when they are first used, fail as the model does."""
    for parts in several:
        parts.readers = {name: during(MODEL)(read) for name, read in parts.readers.items()}


def _found(item: Item, *roots: Path) -> Path:
    return Places(roots).model(Content(item.name, item.content))


def reached_in(folder: JobFolder, task: Task) -> float:
    """When a step of a job was last kept, 0 for never: by it a job that goes on is told from one that kills workers."""
    kept = (folder.state / task.key).rglob("*.safetensors")
    return max((value_or(lambda path=path: path.stat().st_mtime, 0.0) for path in kept), default=0.0)
