"""Removes what causes trouble when painting: faces without area or twice, broken vertices, small loose pieces."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...compat.device.execution import to_host
from ...compat.errors import InputError, require_range
from ..choices import FLOATERS as FLOATERS
from .mesh import THIN, Mesh, checked_shapes, named_by, numbered, welded


@dataclass(frozen=True, slots=True)
class CleanSettings:
    floaters: float = FLOATERS  # pieces with less than this share of all faces, but for the largest; 0 keeps all
    degenerate: bool = True  # faces without area, and faces that are there twice
    broken: bool = True  # faces with a NaN or infinite corner


def cleaned(mesh: Mesh, settings: CleanSettings = CleanSettings()) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh without what ``settings`` name, and lines about what went; vertices that no face uses go too.
    Raises InputError for an empty mesh, indices outside, a share out of range, or where nothing would be left."""
    require_range("floaters", settings.floaters, 0, 1, "of all faces", advice=f"; {FLOATERS} is usual")
    checked_shapes(mesh)
    faces, notes = to_host(mesh.faces).long(), []
    vertices = to_host(mesh.vertices).double()
    steps = (
        (settings.broken, finite, "with a NaN or infinite corner"),
        (settings.degenerate, solid, "without area"),
        (settings.degenerate, single, "that were duplicates"),
    )
    for wanted, keep, message in steps:
        before = faces.shape[0]
        if wanted and before:
            faces = faces[keep(vertices, faces)]
            notes += [f"{before - faces.shape[0]} faces {message} removed"] if faces.shape[0] < before else []
    if settings.floaters and faces.shape[0]:
        used, corners = faces.unique(return_inverse=True)  # a vertex that no face names may lie anywhere
        numbers = pieces_of(vertices[used].nan_to_num(0, 0, 0), corners).unique(return_inverse=True)[1]
        counts = torch.bincount(numbers)
        large = counts >= settings.floaters * faces.shape[0]
        large[counts.argmax()] = True
        faces = faces[large[numbers]]
        notes += [] if bool(large.all()) else [f"{int((~large).sum())} loose pieces removed"]
    if not faces.shape[0]:
        found = f"a mesh whose {mesh.faces.shape[0]} faces are all broken or without area"
        raise InputError(found, expected="a surface", fix="Generate or export it again.")
    used = named_by(faces, len(vertices)).nonzero()[:, 0]
    index = torch.zeros(len(vertices), dtype=torch.int64).index_copy_(0, used, torch.arange(len(used)))[faces]
    if used.shape[0] < mesh.vertices.shape[0]:
        notes.append(f"{mesh.vertices.shape[0] - used.shape[0]} unused vertices removed")
    given = {name: getattr(mesh, name) for name in ("vertices", "uvs", "normals", "colours")}
    kept = {name: each[used.to(each.device)] for name, each in given.items() if each is not None}
    return replace(mesh, faces=index.to(mesh.faces), **kept), tuple(notes)


def finite(vertices: Tensor, faces: Tensor) -> Tensor:
    return torch.isfinite(vertices).all(1)[faces].all(1)


def solid(vertices: Tensor, faces: Tensor) -> Tensor:
    """(M,) bool: faces that the raster sees, higher than :data:`THIN` of the mesh's diagonal; broken ones stay."""
    corners = vertices[faces]
    points = corners.reshape(-1, 3)
    points = points[torch.isfinite(points).all(1)]
    if not points.shape[0]:
        return torch.ones(faces.shape[0], dtype=torch.bool)
    diagonal = (points.amax(0) - points.amin(0)).norm()
    longest = (corners - corners.roll(1, 1)).norm(dim=2).amax(1)
    twice_area = torch.linalg.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]).norm(dim=1)
    return (twice_area > THIN * diagonal * longest) | ~finite(vertices, faces)  # twice the area is longest * height


def single(_vertices: Tensor, faces: Tensor) -> Tensor:
    """(M,) bool: the first of the faces that have the same three corners."""
    numbers = numbered(faces.sort(1).values)
    first = torch.full((int(numbers.max()) + 1,), faces.shape[0])
    first.scatter_reduce_(0, numbers, torch.arange(faces.shape[0]), "amin")
    return first[numbers] == torch.arange(faces.shape[0])


def pieces_of(vertices: Tensor, faces: Tensor) -> Tensor:
    """(M,) int64: the same number for faces that hang together through shared places, seams of UVs included."""
    own = welded(vertices)
    corners = own[faces]
    label = torch.arange(int(own.max()) + 1)
    while True:
        least = label[corners].amin(1)
        lower = label.clone()
        for column in range(3):  # the roots of all corners get the least root, then everyone follows to its root
            lower.scatter_reduce_(0, label[corners[:, column]], least, "amin")
        while not torch.equal(lower, lower[lower]):
            lower = lower[lower]
        if torch.equal(lower, label):
            return label[corners[:, 0]]
        label = lower
