"""Receipts of textures that separate nodes make: each marks its pictures with what the next ones cannot know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from ..compat.checkpoints.identity import values_hash
from ..pipelines.records import receipts
from ..pipelines.records.job import parsed
from .baking.bake import BakeSettings
from .choices import PLACES
from .geometry.cameras import CameraTable
from .geometry.mesh import Mesh
from .jobs import Detail, PaintJob, Pictures, asked_job, geometry_hash, missing_of, texture_hash
from .loading import PaintPipeline
from .texturing import OneStep, Texture

MARK = "anygpu"  # attribute of a tensor
MOST = 64  # views that are remembered
_painted: dict[str, dict[str, Any]] = {}  # the facts of views by their history, for those that core enlarges


def marked(pictures: Tensor | None, kind: str, **facts: Any) -> Tensor | None:
    """``pictures``, if any, with ``facts`` of a ``kind`` for :func:`facts_of`, which a change of the values ends."""
    if pictures is not None:
        setattr(pictures, MARK, (kind, values_hash(pictures), facts))
    return pictures


def facts_of(pictures: Tensor | None, kind: str) -> dict[str, Any]:
    """The facts that :func:`marked` put on pictures of a kind; empty for what another node made or changed."""
    marked_kind, content, facts = getattr(pictures, MARK, ("", "", {}))
    return facts if pictures is not None and marked_kind == kind and content == values_hash(pictures) else {}


def remember(history: str, facts: dict[str, Any]) -> None:
    """Keep the facts of views by ``history``, the nodes that made them, for :func:`baked_record`; drop the oldest."""
    _painted[history] = facts
    if len(_painted) > MOST:
        _painted.pop(next(iter(_painted)))


def painted_record(
    pipeline: PaintPipeline, pictures: Mapping[str, Tensor | None], settings: OneStep, dino: Tensor | None
) -> dict[str, Any]:
    """The receipt of views painted from an ``image``, its ``mask``, and the maps ``normals`` and ``positions``.

    Its ``missing`` names inputs that no file describes; without maps of one Render Views there is no job at all. Where
    Delight evened the image as Texture Mesh does, the job begins with the picture before Delight."""
    image, mask, maps = pictures["image"], pictures["mask"], facts_of(pictures["normals"], "maps")
    light, delight = facts_of(image, "evened"), None
    repeatable = not light or (light["recenter"] and mask is None and pipeline.family == "paint")
    if light and repeatable:
        image, mask = light["image"], light["mask"]
        delight = SimpleNamespace(source=light["request"].model, request=light["request"])  # what a job reads of it
        settings = replace(settings, delight=light["settings"])
    missing = missing_of(pipeline, delight, dino) + ([] if repeatable else ["how light was taken out of its picture"])
    missing += ["the latents that it started from"] if settings.paint.continues else []
    if not maps or maps != facts_of(pictures["positions"], "maps") or maps["cameras"] != settings.cameras:
        return {receipts.HEAD: receipts.VERSION, "missing": [*missing, "maps of AnyGPU Render Views"]}
    settings, mesh = replace(settings, maps=maps["size"], shading=maps["shading"]), maps["mesh"]
    job = partial(asked_job, pipeline, delight, mesh, image, mask, settings)
    return receipts.record_of(job, pipeline, missing, mesh=geometry_hash(mesh))


def baked_record(
    views: Tensor, both: Tensor | None, mesh: Mesh, cameras: CameraTable, settings: BakeSettings, texture: Texture,
    enlarged: tuple[str, Path] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The receipt of a texture baked from ``views`` and, of PBR, from ``both``, metal and roughness; never raises.

    Views, cameras and mesh that are not those of one painting are named in ``missing``. ``enlarged`` is the history
    for :func:`remember` and the file of the upscale model, of views that the host enlarged."""
    facts = facts_of(views, "views") if enlarged is None else _painted.get(enlarged[0], {})
    material = facts if enlarged and both is not None else facts_of(both, "views")
    record, shape = dict(facts.get("record", {receipts.HEAD: receipts.VERSION})), geometry_hash(mesh)
    missing = list(record.pop("missing", ()))
    same_run = material == facts if facts.get("both") else both is None
    if not (facts and same_run and facts["cameras"] == cameras):
        missing.append("the views as AnyGPU Paint Views gave them")
    elif not missing and record["mesh"] != shape:
        missing.append("the mesh that its maps show")
    if not missing:
        upscaler = None if enlarged is None else receipts.named(enlarged[1], None)
        record["job"] = replace(parsed(PaintJob, record["job"]), texture=settings, upscaler=upscaler).record()
    made = {"texture": texture_hash(texture), "mesh": shape, "cameras": [list(astuple(camera)) for camera in cameras]}
    return record | made | ({"missing": missing} if missing else {})


def sign(mesh: Any, record: Mapping[str, Any], texture: Texture) -> None:
    """Mark a core MESH with the receipt of its texture, for :func:`projected_record`."""
    marked(mesh.texture, "texture", record=record, texture=texture, both=getattr(mesh, "metallic_roughness", None))


def projected_record(
    before: Any, after: Any, mesh: Mesh, given: Mapping[str, Any], cameras: CameraTable | None
) -> dict[str, Any]:
    """The receipt of the core MESH ``after``, on which pictures changed the texture of ``before``; never raises.

    Marks ``after`` with it. ``mesh`` is that of ``before``; ``given`` has the IMAGE of each place, and its MASK under
    the place and ``_mask``."""
    facts, look = facts_of(before.texture, "texture"), getattr(before, "material", None) or {}
    if not facts or look.get("base_color_factor") or facts["both"] is not getattr(before, "metallic_roughness", None):
        return {receipts.HEAD: receipts.VERSION, "missing": ["the texture as AnyGPU made it"]}
    record, texture = dict(facts["record"]), replace(facts["texture"], colour=after.texture[0])
    missing = list(record.pop("missing", ()))
    missing += [] if record["mesh"] == geometry_hash(mesh) else ["the mesh that was painted"]
    if not missing:
        pictures = {place: Pictures.of(given[place], given.get(f"{place}_mask")) for place in PLACES if place in given}
        job, detail = parsed(PaintJob, record["job"]), Detail(pictures, () if cameras is None else cameras.cameras)
        record["job"] = replace(job, details=(*job.details, detail)).record()
    record |= {"texture": texture_hash(texture), **({"missing": missing} if missing else {})}
    sign(after, record, texture)
    return record
