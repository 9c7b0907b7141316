"""Texturing a mesh as one JSON document, for other machines: files are identified by content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..compat.checkpoints.identity import content_of
from ..compat.decision import AUTO
from ..compat.errors import InputError
from ..compat.records import WITHOUT, parse, plain
from .baking.bake import BakeSettings
from .geometry.mesh import FORMATS
from .sampling.delight import DelightSettings
from .sampling.painting import PaintSettings
from .texturing import raster_size

VERSION, HEAD, KIND = 1, "anygpu_job", "paint"  # a kind of the jobs of pipelines/jobs.py


@dataclass(frozen=True, slots=True)
class Item:
    """A model, a mesh or a picture: where it may be, below a folder that is searched, and the hash of its content."""

    name: str
    content: str


def model_item(path: Path, title: str = "") -> Item:
    """A paint model at ``path``; ``title`` is its name below the folders that other machines search."""
    return Item(title or path.name, content_of(path))


@dataclass(frozen=True, slots=True)
class PaintJob:
    """One mesh to texture.

    Args:
        model: folder or file of a paint model.
        mesh: with UVs.
        picture: of the object, from the front.
        precision: of the models.
        max_views, delighting: as of :class:`texturing.OneStep`.
        delight: model that takes shading out of the picture first; None leaves the picture as it is.
        image_encoder: folder of DINOv2-giant, which PBR models need.
    """

    model: Item
    mesh: Item
    picture: Item
    paint: PaintSettings = field(default_factory=PaintSettings, metadata={WITHOUT: ("latents",)})
    texture: BakeSettings = field(default_factory=BakeSettings)
    precision: str = AUTO
    max_views: int = 8
    delight: Item | None = None
    image_encoder: Item | None = None
    delighting: DelightSettings = field(default_factory=DelightSettings, metadata={WITHOUT: ("text", "negative")})

    @property
    def key(self) -> str:
        """A hash of what decides the texture."""
        items = {"model": self.model, "mesh": self.mesh, "picture": self.picture, **self._others}
        whole = {**plain(self), **{name: item.content for name, item in items.items()}}
        return hashlib.sha256(json.dumps([KIND, whole], sort_keys=True).encode()).hexdigest()

    @property
    def model_key(self) -> str:
        """A hash of what has to be loaded."""
        others = [{name: item.content for name, item in self._others.items()}] if self._others else []
        return hashlib.sha256(json.dumps([KIND, self.model.content, self.precision, *others]).encode()).hexdigest()

    @property
    def _others(self) -> dict[str, Item]:
        """The models beside the first, by field; a job without them has the keys that it always had."""
        given = {"delight": self.delight, "image_encoder": self.image_encoder}
        return {name: item for name, item in given.items() if item is not None}

    def record(self) -> dict[str, Any]:
        """The job as JSON has it."""
        return {HEAD: VERSION, "kind": KIND, **plain(self)}


def paint_job_in(record: dict[str, Any]) -> PaintJob:
    """The job that a JSON object of this kind describes.

    Raises:
        InputError: another version, an unknown field, or a value of a wrong type.
    """
    if record.get(HEAD) != VERSION:
        raise InputError(
            f"a paint job of version {record.get(HEAD)}", expected=f"version {VERSION}", fix="Update AnyGPU."
        )
    values = {name: value for name, value in record.items() if name not in (HEAD, "kind")}
    return parse(PaintJob, values, "the paint job")


def paint_jobs(
    model: Item,
    meshes: Path,
    pictures: Path,
    seeds: Sequence[int],
    painting: PaintSettings,
    add: Callable[[Path], str],
    texture_size: int = 2048,
    delight: Item | None = None,
    image_encoder: Item | None = None,
) -> list[PaintJob]:
    """A job for each mesh of a folder and each seed, painted from the picture of the same name.

    Args:
        painting: whose seed is replaced.
        add: takes a file to where the machines find it, and returns its name there.
        delight, image_encoder: as of :class:`PaintJob`.

    Raises:
        InputError: no meshes, or one without a picture.
    """
    shapes = sorted(path for path in meshes.glob("*.*") if path.suffix.lower() in FORMATS)
    if not shapes:
        raise InputError(
            f"no meshes in {str(meshes)!r}",
            expected=f"files that end in {', '.join(FORMATS)}",
            fix="Put some there, or choose another folder.",
        )
    by_name = {path.stem: path for path in sorted(pictures.glob("*.*")) if path.suffix.lower() not in FORMATS}
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


def _item(path: Path, add: Callable[[Path], str]) -> Item:
    return Item(add(path), content_of(path))
