"""Visible face of each pixel: one z-buffer in plain torch, used for views and for UV space.

A screen is a tensor (N, 3): column and row in pixels, centres at whole numbers, and a depth, smaller where nearer, of
whose ties the lower face wins. Coordinates are snapped to 1/1024 pixel, so inside or outside is decided by exact whole
numbers: no cracks between faces, and the same pixels covered on every device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...compat.device.execution import to_host

logger = logging.getLogger(__name__)

SUBPIXELS = 1024
DEPTH_STEP = 2.0**-20  # of a depth unit: finer than the reference's, so thin shells keep their outer side
FACE_BITS = 31
SMALL = 64  # px: up to it the edge functions stay below 2^24, where float32 counts exactly
TILE = 64  # px: larger faces are cut into tiles and counted in int64
SIDES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)  # boxes are rounded up to these and tried together
CANDIDATES = {"cpu": 1 << 17}  # pixels tried at once, 60 bytes each: what a core's cache holds; else to fill a GPU
CANDIDATES_ELSEWHERE = 1 << 21
FACES_AT_ONCE = 1 << 17
TILED_AT_ONCE = 256  # large faces, each of up to 1,024 tiles in a view of 2048
POINTS_AT_ONCE = 1 << 20
FAR = torch.iinfo(torch.int64).max
Steps = tuple[float, float]  # where depth is counted from, and the depth of one step


@dataclass(frozen=True, slots=True)
class Fragments:
    """The covered pixels of one raster."""

    pixel: Tensor  # (P,) int64, row * width + column, ascending
    face: Tensor  # (P,) int64
    weights: Tensor  # (P, 3) float32, barycentric, each in 0..1, sum 1

    def interpolated(self, values: Tensor, faces: Tensor) -> Tensor:  # (P, C) from per-vertex values (N, C)
        values_at_pixels = values.new_empty((self.face.shape[0], values.shape[1]))
        for first in range(0, self.face.shape[0], POINTS_AT_ONCE):
            part = slice(first, first + POINTS_AT_ONCE)
            corners, weights = faces[self.face[part]], self.weights[part]
            a, b, c = (values[corners[:, k]] * weights[:, k, None] for k in range(3))
            values_at_pixels[part] = a + b + c
        return values_at_pixels


def face_ids(screen: Tensor, faces: Tensor, height: int, width: int, steps: Steps | None = None) -> Tensor:
    """The face in front at each pixel, (H, W) int32; -1 where nothing is. Faces without area show nowhere. Computed on
    the CPU for a device that cannot take the least of int64. Peak extra memory: 8 bytes per pixel, 64 MB of face
    set-up, tiles of TILED_AT_ONCE faces, and the candidates.

    Args:
        screen: (N, 3) float32, see the module.
        faces: (M, 3) int64, same device.
        steps: of depth, within which the lower face wins; None: from the nearest point, of :data:`DEPTH_STEP`."""
    device = screen.device
    if not _reduces_int64(device):
        return face_ids(to_host(screen), to_host(faces), height, width, steps).to(device)
    limit = CANDIDATES.get(device.type, CANDIDATES_ELSEWHERE)
    spare = SMALL * (width + 1)  # a box rounded up may hang over the last row: what it tries there never wins
    buffer = torch.full((height * width + spare,), FAR, dtype=torch.int64, device=device)
    near, step = steps or (screen[:, 2].min() if screen.shape[0] else 0, DEPTH_STEP)
    screen = torch.cat((screen[:, :2], (screen[:, 2:] - near) / step), dim=1)
    for first in range(0, faces.shape[0], FACES_AT_ONCE):
        triangles = _Triangles.of(screen, faces[first : first + FACES_AT_ONCE], (height, width), first)
        for pixel, key in _keys(triangles, width, height, limit):
            buffer.scatter_reduce_(0, pixel, key, "amin", include_self=True)
    buffer = buffer[: height * width]
    return torch.where(buffer == FAR, -1, buffer & ((1 << FACE_BITS) - 1)).to(torch.int32).view(height, width)


@dataclass(frozen=True, slots=True)
class _Triangles:
    """Set-up of the faces that can show: an inside test that only adds and multiplies whole numbers."""

    face: Tensor  # (F,) int64
    box: Tensor  # (F, 4) int64, first column, first row, columns, rows
    plain: Tensor  # (F,) bool, small and whole
    edge: Tensor  # (F, 3) int64: each edge function at the box's first pixel
    across: Tensor  # its steps
    down: Tensor
    depth: Tensor  # (F, 5) float32: steps of depth there, across, down; least, most

    @classmethod
    def of(cls, screen: Tensor, faces: Tensor, size: tuple[int, int], first: int) -> _Triangles:
        """The ``faces``, numbered from ``first``, that can cover a pixel of a raster of ``size`` (H, W)."""
        corners = (screen[:, :2] * SUBPIXELS).round().to(torch.int64)[faces]  # (F, 3, 2)
        x, y = corners.unbind(2)
        area = (x[:, 1] - x[:, 0]) * (y[:, 2] - y[:, 0]) - (x[:, 2] - x[:, 0]) * (y[:, 1] - y[:, 0])
        least, most = corners.amin(1), corners.amax(1)
        low, high = -(-least // SUBPIXELS), most // SUBPIXELS  # (F, 2): column and row of the outermost pixels inside
        last = torch.tensor((size[1] - 1, size[0] - 1), device=screen.device)
        start, stop = low.clamp(min=0), torch.minimum(high, last)  # of those that the raster has
        kept = ((area != 0) & (stop >= start).all(1)).nonzero()[:, 0]
        whole = ((start == low) & (stop == high)).all(1)
        plain = (whole & ((most - least).amax(1) <= SMALL * SUBPIXELS))[kept]
        box = torch.cat((start, stop - start + 1), dim=1)[kept]
        x, y, area, z = x[kept], y[kept], area[kept], screen[:, 2][faces[kept]]
        sign = area.sign()[:, None]
        across = (y.roll(-1, 1) - y.roll(-2, 1)) * sign  # of the edge opposite each corner
        down = (x.roll(-2, 1) - x.roll(-1, 1)) * sign
        from_x, from_y = box[:, :1] * SUBPIXELS - x.roll(-1, 1), box[:, 1:2] * SUBPIXELS - y.roll(-1, 1)
        # E + 1024 k >= 0 for a whole k asks the same as floor(E / 1024) + k >= 0: ten bits fewer to carry
        edge = torch.div(down * from_y + across * from_x, SUBPIXELS, rounding_mode="floor")
        depth = _depth_plane(x, y, z, area, box)
        return cls(kept + first, box, plain, edge=edge, across=across, down=down, depth=depth)


def _depth_plane(x: Tensor, y: Tensor, z: Tensor, area: Tensor, box: Tensor) -> Tensor:  # of _Triangles.depth
    (x1, x2), (y1, y2), (z1, z2) = ((v[:, 1] - v[:, 0], v[:, 2] - v[:, 0]) for v in (x, y, z))
    across = (z1 * y2 - z2 * y1) / area
    down = (z2 * x1 - z1 * x2) / area
    start = z[:, 0] + across * (box[:, 0] * SUBPIXELS - x[:, 0]) + down * (box[:, 1] * SUBPIXELS - y[:, 0])
    return torch.stack((start, across * SUBPIXELS, down * SUBPIXELS, z.amin(1), z.amax(1)), dim=1)


def _keys(triangles: _Triangles, width: int, height: int, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(pixel, key) batches, both (P,) int64, each of about ``limit`` pixels. A key has the steps of depth above
    :data:`FACE_BITS` bits of the face's number, so that the least one wins, or is :data:`FAR` outside of the face."""
    columns, rows = (triangles.box[:, k].contiguous() for k in (2, 3))
    sides = torch.tensor(SIDES, device=columns.device)
    group = torch.bucketize(columns, sides) * len(SIDES) + torch.bucketize(rows, sides)
    group = torch.where(triangles.plain, group, len(SIDES) ** 2)
    order = group.argsort(stable=True)
    counts = to_host(torch.bincount(group, minlength=len(SIDES) ** 2 + 1)).tolist()
    start = 0
    for index, count in enumerate(counts[:-1]):
        wide, high = SIDES[index // len(SIDES)], SIDES[index % len(SIDES)]
        step = max(1, limit // (wide * high))
        for first in range(start, start + count, step):
            chosen = order[first : min(first + step, start + count)]
            yield _small(triangles, chosen, (high, wide), width)
        start += count
    for chosen in order[start:].split(TILED_AT_ONCE):
        yield from _tiles(triangles, chosen, (height, width), limit)


def _small(faces: _Triangles, chosen: Tensor, shape: tuple[int, int], width: int) -> tuple[Tensor, Tensor]:
    """(pixel, key) of ``shape`` (rows, columns) pixels from the corner of each small face's box, in float32: exact."""
    device = chosen.device
    rows = torch.arange(shape[0], device=device)[:, None]
    columns = torch.arange(shape[1], device=device)
    edge, across, down = (v[chosen].to(torch.float32)[:, :, None, None] for v in (faces.edge, faces.across, faces.down))
    depth = faces.depth[chosen][:, :, None, None]
    y, x = rows.to(torch.float32), columns.to(torch.float32)
    values = (torch.addcmul(torch.addcmul(edge[:, k], down[:, k], y), across[:, k], x) for k in range(3))
    least = next(values)
    for value in values:
        least = torch.minimum(least, value, out=least)
    steps = torch.addcmul(torch.addcmul(depth[:, 0], depth[:, 2], y), depth[:, 1], x)
    steps = steps.clamp_(depth[:, 3], depth[:, 4])
    key = steps.to(torch.int64).mul_(1 << FACE_BITS).add_(faces.face[chosen][:, None, None])
    key.masked_fill_(least < 0, FAR)
    box = faces.box[chosen]
    pixel = (box[:, 1] * width + box[:, 0])[:, None, None] + (rows * width + columns)
    return pixel.view(-1), key.view(-1)


def _tiles(faces: _Triangles, chosen: Tensor, size: tuple[int, int], limit: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(pixel, key) batches of faces that are large or cut by the picture's rim, tile by tile, in int64."""
    across, down = (-(-faces.box[chosen, k] // TILE) for k in (2, 3))
    owner = torch.repeat_interleave(chosen, across * down)
    place = torch.arange(owner.shape[0], device=chosen.device)
    place = place - torch.repeat_interleave((across * down).cumsum(0) - across * down, across * down)
    columns_of = torch.repeat_interleave(across, across * down)
    offset = torch.stack((place % columns_of, place // columns_of), dim=1) * TILE
    reach = TILE - 1  # a tile whose best corner is outside one edge shows nothing of the face
    best = faces.edge[owner] + faces.across[owner] * offset[:, :1] + faces.down[owner] * offset[:, 1:]
    best = best + faces.across[owner].clamp(min=0) * reach + faces.down[owner].clamp(min=0) * reach
    seen = (best >= 0).all(1)
    owner, offset = owner[seen], offset[seen]
    step = max(1, limit // TILE**2)
    for first in range(0, owner.shape[0], step):
        yield _tile(faces, owner[first : first + step], offset[first : first + step], size)


def _tile(faces: _Triangles, owner: Tensor, offset: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(pixel, key) of the pixels that tiles cover: the face ``owner`` (t,) of each, ``offset`` (t, 2) in its box."""
    steps = torch.arange(TILE, device=owner.device)
    y = (offset[:, 1, None] + steps)[:, :, None]  # (t, rows, 1), from the box's first row
    x = (offset[:, 0, None] + steps)[:, None, :]
    inside = (x < faces.box[owner, 2, None, None]) & (y < faces.box[owner, 3, None, None])
    for k in range(3):
        edge, across, down = (v[owner, k][:, None, None] for v in (faces.edge, faces.across, faces.down))
        inside = inside & (edge + across * x + down * y >= 0)
    batch, row, column = inside.nonzero(as_tuple=True)
    chosen, row, column = owner[batch], y[batch, row, 0], x[batch, 0, column]
    start, across, down, least, most = faces.depth[chosen].unbind(1)
    depth = torch.minimum(torch.maximum(start + across * column + down * row, least), most)
    key = depth.to(torch.int64).mul_(1 << FACE_BITS).add_(faces.face[chosen])
    return (faces.box[chosen, 1] + row) * size[1] + faces.box[chosen, 0] + column, key


def fragments(screen: Tensor, faces: Tensor, ids: Tensor) -> Fragments:
    """Pixels where ``ids`` (H, W) of :func:`face_ids` show a face, and the position inside it.
    Weights are clamped to the face: snapping lets a pixel lie up to 1/2048 pixel outside."""
    flat = ids.view(-1)
    pixel = (flat >= 0).nonzero()[:, 0]
    face = flat[pixel].to(torch.int64)
    weights = screen.new_empty((pixel.shape[0], 3))
    for first in range(0, pixel.shape[0], POINTS_AT_ONCE):
        part = slice(first, first + POINTS_AT_ONCE)
        weights[part] = _barycentric(screen, faces[face[part]], pixel[part], ids.shape[1])
    return Fragments(pixel, face, weights)


def _barycentric(screen: Tensor, corners: Tensor, pixel: Tensor, width: int) -> Tensor:
    """(P, 3): place of each pixel in its triangle of ``corners`` (P, 3), each weight in 0..1."""
    x0, y0 = screen[:, 0][corners[:, 0]], screen[:, 1][corners[:, 0]]
    x1, y1, x2, y2 = (screen[:, axis][corners[:, k]] - base for k in (1, 2) for axis, base in ((0, x0), (1, y0)))
    x, y = (pixel % width).to(x0.dtype) - x0, torch.div(pixel, width, rounding_mode="floor").to(x0.dtype) - y0
    area = x1 * y2 - x2 * y1
    area = torch.where(area == 0, torch.ones_like(area), area)
    second, third = (x * y2 - x2 * y) / area, (x1 * y - x * y1) / area
    weights = torch.stack((1 - second - third, second, third), dim=1).clamp_(min=0)
    return weights / weights.sum(1, keepdim=True)


def _reduces_int64(device: torch.device) -> bool:
    """True if the device takes the least of int64 keys, which Metal and DirectML may not."""
    if device.type == "cpu":
        return True
    try:
        probe = torch.tensor([FAR, FAR], device=device)
        keys = torch.tensor([1 << 40, 1 << 39], device=device)
        probe.scatter_reduce_(0, torch.tensor([0, 0], device=device), keys, "amin")
        return to_host(probe).tolist() == [1 << 39, FAR]
    except (RuntimeError, NotImplementedError, TypeError) as error:
        logger.info("views are rasterised on the CPU: %s has no int64 scatter-min (%s)", device, error)
        return False
