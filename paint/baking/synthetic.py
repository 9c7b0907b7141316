"""Meshes and pictures whose right texture is known: what the demo bakes, and what tests measure errors against."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry.cameras import DEFAULT_VIEWS, CameraTable
from ..geometry.mesh import Mesh, Surface
from ..geometry.views import rasterised
from .bake import Texels

MARGIN = 0.02  # of the texture, round each chart
Colouring = Callable[[Tensor], Tensor]


def grid(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """UVs (P, 2), v down, and faces (M, 3) of a sheet whose left and right edges are separate vertices."""
    v, u = torch.meshgrid(torch.linspace(0, 1, rows + 1), torch.linspace(0, 1, columns + 1), indexing="ij")
    index = torch.arange((rows + 1) * (columns + 1)).view(rows + 1, columns + 1)
    a, b, c, d = (part.reshape(-1) for part in (index[:-1, :-1], index[1:, :-1], index[:-1, 1:], index[1:, 1:]))
    faces = torch.cat((torch.stack((a, b, c), 1), torch.stack((c, b, d), 1)))
    return torch.stack((u.reshape(-1), v.reshape(-1)), dim=1), faces


def torus(rows: int = 32, columns: int = 64, tube: float = 0.4) -> Mesh:
    """A ring lying in the plane of X and Z, outer radius 1 + ``tube``; one chart."""
    uvs, faces = grid(rows, columns)
    around, along = uvs[:, 0] % 1 * 2 * math.pi, -(uvs[:, 1] % 1) * 2 * math.pi
    reach = 1 + tube * along.cos()
    vertices = torch.stack((reach * around.sin(), tube * along.sin(), reach * around.cos()), dim=1)
    return Mesh(vertices, faces, uvs * (1 - 2 * MARGIN) + MARGIN)


def waves(places: Tensor) -> Tensor:
    """Colours (P, 3) in 0.05..0.95 of ``places`` (P, 3) in the frame: soft stripes of another direction per channel."""
    directions = places.new_tensor(((9.0, 4.0, 2.0), (-3.0, 8.0, 5.0), (4.0, -6.0, 8.0)))
    return 0.5 + 0.45 * (places @ directions.T + places.new_tensor((0.3, 1.1, 2.3))).sin()


def photographs(
    surface: Surface,
    table: CameraTable = DEFAULT_VIEWS,
    size: int = 512,
    view_size: int = 2048,
    colouring: Colouring = waves,
    background: float = 1.0,
) -> Tensor:
    """(V, size, size, 3): what each camera sees of the coloured surface, taken at ``view_size`` and made smaller."""
    pictures = []
    for camera in table:
        view = rasterised(surface, camera, view_size, table.ortho_scale)
        places = view.shown.interpolated(surface.vertices, surface.faces)
        picture = view.image(colouring(places), background)
        if size != view_size:
            smaller = F.interpolate(picture.movedim(-1, 0)[None], (size, size), mode="bilinear", antialias=True)
            picture = smaller[0].movedim(0, -1)
        pictures.append(picture)
    return torch.stack(pictures)


def ideal_texture(texels: Texels, colouring: Colouring = waves) -> Tensor:
    """(T, T, 3): the colour that each covered texel should have; 0 elsewhere."""
    texture = torch.zeros((texels.size**2, 3), device=texels.place.device)
    texture[texels.shown.pixel] = colouring(texels.place)
    return texture.view(texels.size, texels.size, 3)


def errors(texture: Tensor, texels: Texels, chosen: Tensor, colouring: Colouring = waves) -> Tensor:
    """(P,): mean absolute error over the channels at each covered texel of ``chosen`` (T, T)."""
    return (texture - ideal_texture(texels, colouring)).abs().mean(-1)[chosen & texels.covered]
