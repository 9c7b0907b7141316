"""The demo's textured mesh: baked from synthetic pictures, compared with the right one, as a GLB and a turntable."""

from __future__ import annotations

from pathlib import Path

import torch

from .baking.synthetic import Shown, demonstration
from .geometry.mesh import load_mesh, write_glb
from .pictures import saved

PAINTED, MEAN_ERROR, WORST_ERROR, PICTURE_ERROR = 0.9, 5e-3, 0.12, 2e-3  # a wrong order of views: 0.1 and 0.02
Checks = dict[str, tuple[bool, str]]


def show(folder: Path, texture_size: int = 512, picture_size: int = 256, view_size: int = 1024) -> Checks:
    """Each check's result with its figure, after writing ``torus.glb`` and ``torus_turntable.png`` into ``folder``.

    The picture shows the baked mesh above and the right one below.

    Raises:
        MissingPackageError: trimesh is absent.
    """
    shown = demonstration(texture_size, picture_size, view_size)
    glb = write_glb(folder / "torus.glb", shown.mesh, shown.texture)
    sheet = torch.cat([torch.cat(list(frames), dim=1) for frames in (shown.frames, shown.right)])
    (written,) = saved(sheet[None], folder, "torus_turntable")
    written.replace(folder / "torus_turntable.png")
    return {**_figures(shown), "the GLB holds the mesh": _read_back(shown, glb)}


def _figures(shown: Shown) -> Checks:
    """What was baked against what is right."""
    return {
        "the views paint the mesh": (shown.painted >= PAINTED, f"{shown.painted:.1%} before filling"),
        "the texture is the right one": (shown.error <= MEAN_ERROR, f"mean error {shown.error:.4f} of 1"),
        "no texel is far off": (shown.worst <= WORST_ERROR, f"99.9 % below {shown.worst:.3f}"),
        "the turntable is the right one": (
            shown.picture_error <= PICTURE_ERROR,
            f"mean difference {shown.picture_error:.4f} of 1",
        ),
    }


def _read_back(shown: Shown, glb: Path) -> tuple[bool, str]:
    """Whether the file has the mesh's triangles and UVs."""
    mesh, notes = load_mesh(glb)
    same = mesh.uvs is not None and shown.mesh.uvs is not None and len(mesh.faces) == len(shown.mesh.faces)
    if same:
        apart = (mesh.vertices[mesh.faces] - shown.mesh.vertices[shown.mesh.faces]).abs().max()
        uvs = (mesh.uvs[mesh.faces] - shown.mesh.uvs[shown.mesh.faces]).abs().max()  # type: ignore[index]
        same = bool(apart < 1e-6) and bool(uvs < 1e-6)
    return same, notes[0]
