"""The kind of jobs that texture a mesh, and the jobs of either kind that a job file may hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..compat.decision import AUTO
from ..compat.durable import replacing
from ..compat.errors import InputError
from ..compat.records import WITHOUT, plain
from ..pipelines.records.job import USUAL_STEPS, Content, Job, Result, VideoJob, by_content, job_on
from ..pipelines.records.job_lists import files_in
from ..pipelines.records.places import PICTURES, Machine, Places
from .baking.bake import BakeSettings
from .geometry.mesh import FORMATS, load_mesh, write_glb
from .loading import PaintPipeline, PaintRequest, load_paint
from .sampling.delight import DelightSettings
from .sampling.painting import PaintSettings
from .texturing import OneStep, raster_size, textured


@dataclass(frozen=True, slots=True)
class PaintJob(Job):
    kind: ClassVar[str] = "paint"

    model: Content  # folder or file of a paint model
    mesh: Content  # with UVs
    picture: Content  # of the object, from the front
    paint: PaintSettings = field(default_factory=PaintSettings, metadata={WITHOUT: ("latents",)})
    texture: BakeSettings = field(default_factory=BakeSettings)
    precision: str = AUTO  # of the models
    max_views: int = 8  # as of OneStep
    delight: Content | None = None  # model that takes shading out of the picture first; None leaves it in
    image_encoder: Content | None = None  # folder of DINOv2-giant, which PBR models need
    delighting: DelightSettings = field(default_factory=DelightSettings)

    @property
    def key(self) -> str:
        return _hash(by_content(plain(self)))

    @property
    def model_key(self) -> str:
        given = {"delight": self.delight, "image_encoder": self.image_encoder}
        others = {name: item.whole or item.content for name, item in given.items() if item is not None}
        return _hash(self.model.whole or self.model.content, self.precision, *([others] if others else []))

    @property
    def size(self) -> float:
        return float(self.paint.size**2 * (self.paint.steps or USUAL_STEPS))

    @property
    def inputs(self) -> tuple[Content, ...]:
        return self.mesh, self.picture

    @property
    def title(self) -> str:
        return f"{Path(self.mesh.name).stem[:40]} {self.paint.seed}"


def job_of(line: str) -> Job:
    """The job of one line of a job file, a video or a mesh to texture; raises InputError for none, and says why."""
    return job_on(line, VideoJob, PaintJob)


def load(job: PaintJob, machine: Machine, progress: Any) -> tuple[PaintPipeline, ...]:
    """The pipeline that paints; behind it the one that takes shading out of the picture, for a job with one."""
    find = partial(machine.places.model, check=progress.check)
    request = PaintRequest(
        find(job.model),
        image_encoder=None if job.image_encoder is None else find(job.image_encoder),
        precision=job.precision,
        device=machine.device,
        state=machine.state,
    )
    painter = load_paint(request, progress)
    if job.delight is None:
        return (painter,)
    return painter, load_paint(replace(request, model=find(job.delight), image_encoder=None), progress)


def render(job: PaintJob, machine: Machine, progress: Any, loaded: Sequence[PaintPipeline]) -> Result:
    files = Places(machine.places.files, state=machine.state)
    mesh, _ = load_mesh(files.model(job.mesh, progress.check), progress.check)
    files.model(job.picture, progress.check)
    pictures = [files.frames(job.picture, progress.check, 1)[0][0]]
    painter, delight = loaded[0], loaded[1] if len(loaded) > 1 else None
    settings = OneStep(job.paint, job.texture, job.max_views, job.delighting)
    texture, _, _ = textured(mesh, pictures, painter, delight, settings, progress)
    both = None if texture.metallic is None else torch.stack((texture.metallic, texture.roughness), dim=-1)

    def write(path: Path) -> None:
        with replacing(path) as temporary:
            write_glb(temporary, mesh, texture.colour, both)

    return Result(texture.colour, ".glb", write)


def paint_jobs(
    model: Content,
    meshes: Path,
    pictures: Path,
    seeds: Sequence[int],
    painting: PaintSettings,
    add: Callable[[Path], str],
    texture_size: int = 2048,
    delight: Content | None = None,
    image_encoder: Content | None = None,
) -> list[PaintJob]:
    """A job for each mesh of a folder and each seed, painted from the picture of the same name.

    Raises InputError where there are no meshes, or one has no picture.

    Args:
        painting: whose seed is replaced.
        add: takes a file to where the machines find it, and returns its name there.
    """
    shapes = files_in(meshes, "meshes", FORMATS)
    by_name = {path.stem: path for path in sorted(pictures.glob("*.*")) if path.suffix.lower() in PICTURES}
    lonely = next((path for path in shapes if path.stem not in by_name), None)
    if lonely is not None:
        raise InputError(
            f"no picture for the mesh {lonely.name!r}",
            expected=f"a picture named {lonely.stem} in {str(pictures)!r}",
            fix="Give each mesh a picture of its name.",
        )
    baking = BakeSettings(texture_size, raster_size(painting.size, texture_size))
    return [
        PaintJob(
            *(model, mesh, picture, replace(painting, seed=seed), baking), delight=delight, image_encoder=image_encoder
        )
        for path in shapes
        for mesh, picture in [(_item(path, add), _item(by_name[path.stem], add))]
        for seed in seeds
    ]


def _item(path: Path, add: Callable[[Path], str]) -> Content:
    return Places().content(path, add(path), lambda: None)


def _hash(*values: Any) -> str:
    return hashlib.sha256(json.dumps([PaintJob.kind, *values], sort_keys=True).encode()).hexdigest()
