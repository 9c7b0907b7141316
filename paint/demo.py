"""The demo's textured meshes: one baked from synthetic pictures, and rings that the demo model paints after a picture,
compared with the right ones, as a GLB and turntables.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .baking import synthetic
from .baking.bake import BakeSettings, bake
from .baking.fill import filled
from .choices import DEMO_SIZE
from .geometry.cameras import DEFAULT_VIEWS
from .geometry.mesh import Mesh, Surface, load_mesh, write_glb
from .geometry.turntable import turntable
from .loading import PaintPipeline, PaintRequest, load_paint
from .pictures import GREY, saved
from .sampling.painting import PaintInputs, PaintSettings, paint_views
from .texturing import maps_of

PAINTED, MEAN_ERROR, WORST_ERROR, PICTURE_ERROR = 0.9, 5e-3, 0.12, 2e-3  # a wrong order of views: 0.1 and 0.02
CARRIED, BY_CHANCE = 0.15, 0.3  # mean error of views painted after their own picture, and after the other's
PAIRS = (((0.9, 0.2, 0.1), (0.1, 0.3, 0.8)), ((0.2, 0.7, 0.3), (0.9, 0.8, 0.2)))  # colours above and below
Checks = dict[str, tuple[bool, str]]
Pair = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, eq=False)
class Shown:
    """A torus, painted.

    Args:
        mesh: with UVs.
        texture: (T, T, 3), every texel coloured.
        share: of the surface's texels that a view painted, 0..1.
        errors: (P,), mean absolute error of each of these texels after filling, rising.
        frames, right: (F, H, W, 3), turntables of it and of the right colours.
    """

    mesh: Mesh
    texture: Tensor
    share: float
    errors: Tensor
    frames: Tensor
    right: Tensor


def demonstration(
    texture_size: int = 512, picture_size: int = 256, view_size: int = 1024, frames: int = 8, frame_size: int = 192
) -> Shown:
    """A torus painted from six synthetic pictures, baked, filled, compared with the right texture, and turned."""
    mesh = synthetic.torus()
    surface = Surface.of(mesh)
    pictures = synthetic.photographs(surface, DEFAULT_VIEWS, picture_size, view_size)
    baked = bake(surface, DEFAULT_VIEWS, pictures, BakeSettings(texture_size, view_size))
    texture = filled(baked, surface)
    return Shown(
        mesh=mesh,
        texture=texture,
        share=baked.share,
        errors=synthetic.errors(texture, baked.texels, baked.texels.covered).sort().values,
        frames=turntable(surface, texture, frames, frame_size, elevation=25.0),
        right=turntable(surface, synthetic.waves, frames, frame_size, elevation=25.0),
    )


def show(folder: Path) -> Checks:
    """Each check's result with its figure, after writing ``torus.glb`` and ``torus_turntable.png`` into ``folder``.

    The picture shows the baked mesh above and the right one below.

    Raises:
        MissingPackageError: trimesh is absent.
    """
    shown = demonstration()
    glb = write_glb(folder / "torus.glb", shown.mesh, shown.texture)
    sheet = torch.cat([torch.cat(list(frames), dim=1) for frames in (shown.frames, shown.right)])
    (written,) = saved(sheet[None], folder, "torus_turntable")
    written.replace(folder / "torus_turntable.png")
    mean, worst = float(shown.errors.mean()), float(shown.errors[int(0.999 * (len(shown.errors) - 1))])
    apart = float((shown.frames - shown.right).abs().mean())
    return {
        "the views paint the mesh": (shown.share >= PAINTED, f"{shown.share:.1%} before filling"),
        "the texture is the right one": (mean <= MEAN_ERROR, f"mean error {mean:.4f} of 1"),
        "no texel is far off": (worst <= WORST_ERROR, f"99.9 % below {worst:.3f}"),
        "the turntable is the right one": (apart <= PICTURE_ERROR, f"mean difference {apart:.4f} of 1"),
        "the GLB holds the mesh": _read_back(shown.mesh, glb),
    }


def paint(model: Path, folder: Path) -> Checks:
    """Whether the demo model carries a picture's colours onto a ring, after writing ``NAME_painted.png``.

    The sheet shows two pictures of a ring in two colours, each beside a turntable of what was painted after it.
    """
    pipeline, surface = load_paint(PaintRequest(model, device="cpu")), Surface.of(ring())
    rings = [painted_ring(pipeline, pair) for pair in PAIRS]
    sheet = torch.cat([torch.cat([picture, *frames], dim=1) for picture, _, frames in rings])
    (written,) = saved(sheet[None], folder, f"{model.name}_painted")
    written.replace(folder / f"{model.name}_painted.png")
    rights = [photographs(surface, pair) for pair in PAIRS]
    inside = photographs(surface, ((1.0,) * 3,) * 2, 0.0) > 0.99

    def error(turn: int) -> float:
        pairs = zip(rings, rights[turn:] + rights[:turn], strict=True)
        return sum(float((views - right).abs()[inside].mean()) for (_, views, _), right in pairs) / len(PAIRS)

    return {
        "carries the picture's colours": (error(0) <= CARRIED, f"mean error {error(0):.3f} of 1"),
        "not those of another picture": (error(1) >= BY_CHANCE, f"mean error {error(1):.3f} of 1"),
    }


def painted_ring(pipeline: PaintPipeline, pair: Pair, frames: int = 6, steps: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A picture (S, S, 3) of a ring in two colours, six views (V, S, S, 3) painted after it, and their turntable.

    Args:
        frames: of the turntable (F, S, S, 3).
        steps: 0 for the published number.
    """
    mesh = ring()
    surface = Surface.of(mesh)
    picture = photographs(surface, pair, GREY)[0]
    maps, table, _ = maps_of(mesh, None, "paint", size=2 * DEMO_SIZE)
    inputs = PaintInputs([picture], maps.normal, maps.position, table)
    views = paint_views(pipeline, inputs, PaintSettings(DEMO_SIZE, steps, seed=1)).views
    texture = filled(bake(surface, DEFAULT_VIEWS, views, BakeSettings(512, 1024)), surface)
    return picture, views, turntable(surface, texture, frames, DEMO_SIZE, elevation=25.0)


def ring() -> Mesh:
    """A torus that faces the first camera."""
    flat = synthetic.torus()
    return Mesh(flat.vertices[:, [0, 2, 1]], flat.faces[:, [0, 2, 1]], flat.uvs)


def photographs(surface: Surface, pair: Pair, ground: float = 1.0) -> Tensor:
    """What the six cameras see of a surface in one colour above and another below, (V, S, S, 3)."""
    above, below = (torch.tensor(colour) for colour in pair)

    def halves(places: Tensor) -> Tensor:
        return torch.where(places[:, 1:2] > 0, above, below)

    return synthetic.photographs(surface, DEFAULT_VIEWS, DEMO_SIZE, 2 * DEMO_SIZE, halves, ground)


def _read_back(mesh: Mesh, glb: Path) -> tuple[bool, str]:
    """Whether the file has the mesh's triangles and UVs."""
    read, notes = load_mesh(glb)
    same = read.uvs is not None and mesh.uvs is not None and len(read.faces) == len(mesh.faces)
    if same:
        apart = (read.vertices[read.faces] - mesh.vertices[mesh.faces]).abs().max()
        uvs = (read.uvs[read.faces] - mesh.uvs[mesh.faces]).abs().max()  # type: ignore[index]
        same = bool(apart < 1e-6) and bool(uvs < 1e-6)
    return same, notes[0]
