"""Our z-buffer against a straightforward scatter-min prototype: same mesh and view, side by side in one run on the CPU.

    python benchmarks/paint_raster.py            # appends a row to benchmarks/results/paint_raster.csv

The prototype expands every face's pixel box, tests each pixel in float32 and takes the least int64 key, in chunks of
four million pixels. Ours must take at most 1.2 times as long. Process time, interleaved repeats, medians.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import time

import numpy as np
import torch
from anygpu.compat.packages import imported
from anygpu.paint.geometry.cameras import Camera
from anygpu.paint.geometry.mesh import Mesh, Surface
from anygpu.paint.geometry.raster import face_ids
from anygpu.paint.geometry.views import on_screen
from table import append, machine
from torch import Tensor

CHUNK = 4_000_000
LIMIT = 1.2
FAR = torch.iinfo(torch.int64).max


def bumpy_torus(faces: int) -> Mesh:
    """A closed ring with bumps of about ``faces`` triangles."""
    side = math.isqrt(faces // 2)
    turn = torch.arange(side) * (2 * math.pi / side)
    around, along = torch.meshgrid(turn, turn, indexing="ij")
    tube = 0.3 * (1 + 0.1 * (8 * around).sin() * (6 * along).sin())
    reach = 0.7 + tube * along.cos()
    vertices = torch.stack((reach * around.sin(), tube * along.sin(), reach * around.cos()), dim=-1).view(-1, 3)
    index = torch.arange(side * side).view(side, side)
    a, b, c, d = index, index.roll(-1, 0), index.roll(-1, 1), index.roll((-1, -1), (0, 1))
    triangles = torch.cat((torch.stack((a, b, c), -1).view(-1, 3), torch.stack((c, b, d), -1).view(-1, 3)))
    return Mesh(vertices, triangles)


def prototype(screen: torch.Tensor, faces: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """(H, W) face in front: pixel boxes, edge functions, one scatter-min."""
    corners = screen[faces]
    low = corners[..., :2].amin(1).ceil().long().clamp(min=0)
    high = torch.minimum(corners[..., :2].amax(1).floor().long(), torch.tensor((width - 1, height - 1)))
    box = (high - low + 1).clamp(min=0)
    counts = box[:, 0] * box[:, 1]
    ends = counts.cumsum(0)
    buffer, first, least = torch.full((height * width,), FAR), 0, screen[:, 2].min()
    while first < faces.shape[0]:
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(torch.searchsorted(ends, before + CHUNK, right=True)))
        face = torch.repeat_interleave(torch.arange(first, last), counts[first:last])
        place = torch.arange(face.shape[0]) - (ends[face] - counts[face] - before)
        x = low[face, 0] + place % box[face, 0].clamp(min=1)
        y = low[face, 1] + place // box[face, 0].clamp(min=1)
        a, b, c = corners[face].unbind(1)
        area = (b[:, 0] - a[:, 0]) * (c[:, 1] - a[:, 1]) - (c[:, 0] - a[:, 0]) * (b[:, 1] - a[:, 1])
        second = ((x - a[:, 0]) * (c[:, 1] - a[:, 1]) - (c[:, 0] - a[:, 0]) * (y - a[:, 1])) / area
        third = ((b[:, 0] - a[:, 0]) * (y - a[:, 1]) - (x - a[:, 0]) * (b[:, 1] - a[:, 1])) / area
        inside = (second >= 0) & (third >= 0) & (second + third <= 1)
        depth = (1 - second - third) * a[:, 2] + second * b[:, 2] + third * c[:, 2] - least
        key = ((depth * 2**20).long() << 31) + face
        buffer.scatter_reduce_(0, (y * width + x)[inside], key[inside], "amin")
        first = last
    return torch.where(buffer == FAR, -1, buffer & (2**31 - 1)).to(torch.int32).view(height, width)


def embree_face_ids(screen: Tensor, faces: Tensor, height: int, width: int) -> Tensor:
    """What :func:`face_ids` returns, by Embree's ray caster: faster on a CPU, needs the package embreex.

    Pixels on an edge or of equal depth may name the other face.

    Raises:
        MissingPackageError: embreex is absent.
    """
    scene = imported("embreex.rtcore_scene").EmbreeScene()
    corners = screen.detach().cpu().to(torch.float32)
    imported("embreex.mesh_construction").TriangleMesh(scene, corners.numpy(), faces.cpu().to(torch.int32).numpy())
    start = float(corners[:, 2].min()) - 1.0 if corners.shape[0] else 0.0
    ids_by_rows, rows_at_once = [], max(1, (1 << 20) // width)
    for first in range(0, height, rows_at_once):
        rows = np.arange(first, min(first + rows_at_once, height), dtype=np.float32)
        rays = np.empty((rows.size, width, 3), dtype=np.float32)
        rays[..., 0], rays[..., 1], rays[..., 2] = np.arange(width, dtype=np.float32), rows[:, None], start
        origin = rays.reshape(-1, 3)
        towards = np.zeros_like(origin)
        towards[:, 2] = 1
        ids_by_rows.append(scene.run(origin, towards).astype(np.int32))
    ids = np.concatenate(ids_by_rows) if ids_by_rows else np.zeros(0, dtype=np.int32)
    return torch.from_numpy(ids).view(height, width).to(screen.device)


def main() -> int:
    """Measure, print, append the row; 1 when ours is too slow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faces", type=int, default=500_000)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--embree", action="store_true", help="also time embreex")
    arguments = parser.parse_args()
    surface = Surface.of(bumpy_torus(arguments.faces))
    screen = on_screen(surface.vertices, Camera(0, 90), arguments.size)
    casters = {"ours": face_ids, "prototype": prototype} | ({"embree": embree_face_ids} if arguments.embree else {})
    ids = {"ours": face_ids(screen, surface.faces, arguments.size, arguments.size)}
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds: dict[str, list[float]] = {name: [] for name in casters}
    for repeat in range(arguments.repeats):
        for name in sorted(casters, reverse=repeat % 2 == 1):
            started = time.process_time()
            ids[name] = casters[name](screen, surface.faces, arguments.size, arguments.size)
            seconds[name].append(time.process_time() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    row = {
        **machine(),
        "faces": surface.faces.shape[0],
        "size": arguments.size,
        "seconds_ours": round(medians["ours"], 3),
        "seconds_prototype": round(medians["prototype"], 3),
        "ratio": round(medians["ours"] / medians["prototype"], 3),
        "seconds_embree": round(medians["embree"], 3) if arguments.embree else "",
        "other_faces": float((ids["ours"] != ids["prototype"]).float().mean()),
        "peak_process_mib": round(peak_mib),
    }
    append("paint_raster", [row])
    return int(row["ratio"] > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
