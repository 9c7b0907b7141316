"""The demo's textured mesh: baked from synthetic pictures, compared with the right one, as a GLB and a turntable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .baking import synthetic
from .baking.bake import BakeSettings, bake
from .baking.fill import filled
from .geometry.cameras import DEFAULT_VIEWS
from .geometry.mesh import Mesh, Surface, load_mesh, write_glb
from .geometry.turntable import turntable
from .pictures import saved

PAINTED, MEAN_ERROR, WORST_ERROR, PICTURE_ERROR = 0.9, 5e-3, 0.12, 2e-3  # a wrong order of views: 0.1 and 0.02
Checks = dict[str, tuple[bool, str]]


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


def _read_back(mesh: Mesh, glb: Path) -> tuple[bool, str]:
    """Whether the file has the mesh's triangles and UVs."""
    read, notes = load_mesh(glb)
    same = read.uvs is not None and mesh.uvs is not None and len(read.faces) == len(mesh.faces)
    if same:
        apart = (read.vertices[read.faces] - mesh.vertices[mesh.faces]).abs().max()
        uvs = (read.uvs[read.faces] - mesh.uvs[mesh.faces]).abs().max()  # type: ignore[index]
        same = bool(apart < 1e-6) and bool(uvs < 1e-6)
    return same, notes[0]
