"""Meshes with UVs whose surface is known, beside the torus of the demo."""

import math

import torch
from anygpu.paint.demo import MARGIN, grid
from anygpu.paint.geometry.mesh import Mesh


def sphere(rows: int = 32, columns: int = 64) -> Mesh:
    """A unit ball; one chart, whose upper and lower edges are the poles."""
    uvs, faces = grid(rows, columns)
    around, down = uvs[:, 0] % 1 * 2 * math.pi, uvs[:, 1] * math.pi
    reach = down.sin().clamp(min=0)  # sin(pi) is -9e-8 in float32: a pole turned inside out
    vertices = torch.stack((reach * around.sin(), down.cos(), reach * around.cos()), dim=1)
    return Mesh(vertices, faces, uvs * (1 - 2 * MARGIN) + MARGIN)


def box(width: float = 2.0, height: float = 2.0, depth: float = 2.0) -> Mesh:
    """An axis-aligned box of two faces a side; six charts in three columns and two rows."""
    corners, uvs, faces = [], [], []
    sides = (  # outward axis, then the directions of u and of v
        ((0, 0, 1), (1, 0, 0), (0, -1, 0)),
        ((1, 0, 0), (0, 0, -1), (0, -1, 0)),
        ((0, 0, -1), (-1, 0, 0), (0, -1, 0)),
        ((-1, 0, 0), (0, 0, 1), (0, -1, 0)),
        ((0, 1, 0), (1, 0, 0), (0, 0, 1)),
        ((0, -1, 0), (1, 0, 0), (0, 0, -1)),
    )
    cell = torch.tensor((1 / 3, 1 / 2))
    for number, (out, right, below) in enumerate(torch.tensor(sides, dtype=torch.float32)):
        place = torch.tensor((number % 3, number // 3), dtype=torch.float32)
        for u, v in ((0, 0), (0, 1), (1, 0), (1, 1)):
            corners.append((out + (2 * u - 1) * right + (2 * v - 1) * below) / 2)
            uvs.append((place + MARGIN + (1 - 2 * MARGIN) * torch.tensor((float(u), float(v)))) * cell)
        faces += [(4 * number + a, 4 * number + b, 4 * number + c) for a, b, c in ((0, 1, 2), (2, 1, 3))]
    return Mesh(torch.stack(corners) * torch.tensor((width, height, depth)), torch.tensor(faces), torch.stack(uvs))
