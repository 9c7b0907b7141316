"""The ring that the demo paint model textures after a picture of two colours: `anygpu demo` shows it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..compat.memory.parts import Silent
from .adapter_loading import AdapterRequest, load_adapter
from .baking.bake import BakeSettings, bake, scaled
from .baking.fill import filled
from .choices import DEMO_ADAPTER, DEMO_SIZE, PUBLISHED, demo_adapter
from .geometry.cameras import views_for
from .geometry.mesh import Mesh, Surface, write_glb
from .geometry.turntable import turntable
from .geometry.views import rasterised
from .loading import PaintPipeline, PaintRequest, load_paint
from .sampling.painting import PaintInputs, PaintSettings
from .texturing import maps_of, painted_views

MARGIN = 0.02  # of the texture, round each chart
FRAMES, ELEVATION = 6, 25.0  # of the turntable
CARRIED, BY_CHANCE = 0.15, 0.3  # mean error of what is painted after its own picture, and after the other's
ColourPair = tuple[tuple[float, ...], tuple[float, ...]]
PAIRS: tuple[ColourPair, ...] = (  # colours above and below
    ((0.9, 0.2, 0.1), (0.1, 0.3, 0.8)),
    ((0.2, 0.7, 0.3), (0.9, 0.8, 0.2)),
)


@dataclass(frozen=True, eq=False)
class PaintedRing:
    picture: Tensor  # (S, S, 3), which the model was given
    views: Tensor  # (V, S, S, 3), which it painted
    texture: Tensor  # (T, T, 3), baked from the views and filled
    frames: Tensor  # (F, S, S, 3), a turntable


def show(model: Path, folder: Path) -> tuple[dict[str, Tensor], tuple[str, ...], dict[str, tuple[bool, str]]]:
    """Paint a ring after each of :data:`PAIRS` and write the first to ``folder``, as ``ring.glb``, or for MV-Adapter as
    ``ring_mv_adapter.glb``. Raises MissingPackageError without trimesh.
    Returns pictures (1 + F, S, S, 3), the given one, then the turntable, by caption; the model's decisions; and by name
    of a check (passed, measured)."""
    pipeline, surface = opened(model), Surface.of(ring())
    rings = [painted_ring(pipeline, pair) for pair in PAIRS]
    write_glb(folder / f"ring{f'_{model.name}' if model == DEMO_ADAPTER else ''}.glb", ring(), rings[0].texture)
    expected = [turntable(surface, halves(pair), FRAMES, DEMO_SIZE, ELEVATION) for pair in PAIRS]

    def error(others: list[Tensor]) -> float:  # on the ring alone: the background is white
        errors = [(each.frames - other)[other.amin(-1) < 0.99] for each, other in zip(rings, others, strict=True)]
        return float(torch.cat(errors).abs().mean())

    own, other = error(expected), error(expected[::-1])
    checks = {
        "carries the picture's colours": (own <= CARRIED, f"mean error {own:.3f} of 1"),
        "not those of another picture": (other >= BY_CHANCE, f"mean error {other:.3f} of 1"),
    }
    strips = {
        f"{model.name}: picture {number}, and a ring painted after it": torch.cat((each.picture[None], each.frames))
        for number, each in enumerate(rings, 1)
    }
    return strips, tuple(map(str, pipeline.decisions)), checks


def opened(model: Path) -> PaintPipeline:
    """The pipeline of a demo model, on the CPU."""
    if model != DEMO_ADAPTER:
        return load_paint(PaintRequest(model, device="cpu"))
    return load_adapter(AdapterRequest(model, *demo_adapter()[1].values(), device="cpu"))


def painted_ring(pipeline: PaintPipeline, pair: ColourPair, frames: int = FRAMES, steps: int = 0) -> PaintedRing:
    """A ring painted after a picture of itself in two colours; ``steps`` 0 is the published number."""
    mesh, adapter = ring(), pipeline.family == "mv_adapter"
    table = views_for(pipeline.family, None)
    surface = Surface.of(mesh, None, table.frame)
    view = rasterised(surface, next(iter(table)), 2 * DEMO_SIZE, table.ortho_scale)
    colours = halves(pair)(view.shown.interpolated(surface.vertices, surface.faces))
    picture = scaled(view.image(colours, PUBLISHED[pipeline.variant].background), DEMO_SIZE)
    maps, table, _ = maps_of(mesh, None, pipeline.family, size=DEMO_SIZE if adapter else 2 * DEMO_SIZE)
    inputs = PaintInputs([picture], maps.normal, maps.position, table)
    views = painted_views(pipeline, inputs, PaintSettings(DEMO_SIZE, steps, seed=1), Silent()).views
    texture = filled(bake(surface, table, views, BakeSettings(512, 1024)), surface)
    return PaintedRing(picture, views, texture, turntable(Surface.of(mesh), texture, frames, DEMO_SIZE, ELEVATION))


def halves(pair: ColourPair) -> Callable[[Tensor], Tensor]:
    """The colours (P, 3) of places (P, 3) in the frame: ``pair``'s first above the middle, its second below."""
    above, below = (torch.tensor(colour) for colour in pair)
    return lambda places: torch.where(places[:, 1:2] > 0, above, below)


def ring() -> Mesh:
    """A torus that faces the first camera."""
    flat = torus()
    return Mesh(flat.vertices[:, [0, 2, 1]], flat.faces[:, [0, 2, 1]], flat.uvs)


def grid(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """UVs (P, 2), v down, and faces (M, 3) of ``rows`` x ``columns`` squares; left and right edges stay separate."""
    v, u = torch.meshgrid(torch.linspace(0, 1, rows + 1), torch.linspace(0, 1, columns + 1), indexing="ij")
    index = torch.arange((rows + 1) * (columns + 1)).view(rows + 1, columns + 1)
    corners = (index[:-1, :-1], index[1:, :-1], index[:-1, 1:], index[1:, 1:])
    left, below_left, right, below_right = (corner.reshape(-1) for corner in corners)
    faces = torch.cat((torch.stack((left, below_left, right), 1), torch.stack((right, below_left, below_right), 1)))
    return torch.stack((u.reshape(-1), v.reshape(-1)), dim=1), faces


def torus(rows: int = 32, columns: int = 64, tube: float = 0.4) -> Mesh:
    """A ring lying in the plane of X and Z, outer radius 1 + ``tube``; one chart, ``rows`` of it round the tube."""
    uvs, faces = grid(rows, columns)
    around, along = uvs[:, 0] % 1 * 2 * math.pi, -(uvs[:, 1] % 1) * 2 * math.pi
    reach = 1 + tube * along.cos()
    vertices = torch.stack((reach * around.sin(), tube * along.sin(), reach * around.cos()), dim=1)
    return Mesh(vertices, faces, uvs * (1 - 2 * MARGIN) + MARGIN)
