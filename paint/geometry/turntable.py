"""The mesh turning once, as pictures: the same z-buffer, the finished texture, a little light."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.device.execution import to_host
from ...compat.device.facts import GIBIBYTE, host_free_bytes
from ...compat.errors import UnsupportedError, require_range
from .cameras import ORTHO_SCALE, Camera
from .mesh import Surface
from .views import View, rasterised

FRAMES_LIMIT = 720
SIZES = (16, 4096)
SMOOTHING = 2  # samples along each side of a pixel
AMBIENT = 0.65  # brightness of a face seen edge-on, against 1 seen squarely
CLAY = 0.75  # grey of a mesh without a texture
POINTS_AT_ONCE = 1 << 20


def turntable(
    surface: Surface, texture: Tensor | Callable[[Tensor], Tensor] | None, frames: int = 24, size: int = 512,
    elevation: float = 15.0, background: float = 1.0, check: Callable[[], None] = lambda: None,
    into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Pictures of one full turn, the last one step before the first: (F, H, W, 3) float32 in 0..1 on the CPU.
    Raises InputError for a value out of range, or a texture for a mesh without UVs; UnsupportedError as ``film``
    does. Peak extra memory: one frame at twice the size.

    Args:
        surface: in its frame; with UVs when ``texture`` is a texture.
        texture: (T, T, 3) in 0..1; (N, 3) of the vertices; a function from places (P, 3) to colours; None: grey clay.
        elevation: degrees, -90..90.
        background: grey, 0..1.
        check: called before each frame; may raise to cancel.
        into: where they are drawn, (F, H, W, 3) of a ``film``; None: a new one."""
    require_range("frames of the turntable", frames, 1, FRAMES_LIMIT)
    require_range("size of the turntable", size, *SIZES, "pixels")
    require_range("elevation of the turntable", elevation, -90, 90, "degrees")
    require_range("background of the turntable", background, 0, 1)
    if isinstance(texture, Tensor):
        surface = surface.with_uvs()[0] if texture.ndim == 3 else surface
        texture = texture.to(surface.vertices.device, torch.float32)
    pictures = film(frames, size) if into is None else into
    for index in range(frames):
        check()
        # the camera goes round; the picture looks as if the mesh turned
        view = rasterised(surface, Camera(360 * index / frames, elevation), size * SMOOTHING, ORTHO_SCALE)
        picture = view.image(_shaded(surface, view, texture), background).movedim(-1, 0)[None]
        pictures[index] = to_host(F.avg_pool2d(picture, SMOOTHING)[0].movedim(0, -1).clamp(0, 1))
    return pictures


def film(frames: int, size: int, beside: int = 1) -> Tensor:
    """An empty (F, H, W, 3) for ``beside`` turntables side by side; UnsupportedError above the free host memory."""
    if (needed := 12 * frames * size**2 * beside) > (free := host_free_bytes()):
        found = f"{frames} frames of {size} pixels, {needed / GIBIBYTE:.0f} GB"
        raise UnsupportedError(found, expected=f"the {free / GIBIBYTE:.0f} GB free", fix="Lower frames or size.")
    return torch.empty((frames, size, size * beside, 3))  # filled in place: stacked they would be there twice


def _shaded(surface: Surface, view: View, texture: Tensor | Callable[[Tensor], Tensor] | None) -> Tensor:
    """(P, 3): lit colours of the covered pixels; the light is at the camera."""
    shown = view.shown
    towards = torch.tensor(view.camera.axes()[2], device=surface.vertices.device)
    normals = F.normalize(shown.interpolated(surface.vertex_normals, surface.faces), dim=1)
    light = AMBIENT + (1 - AMBIENT) * (normals @ towards).abs()
    if texture is None:
        colours = normals.new_full((1, 3), CLAY)
    elif isinstance(texture, Tensor) and texture.ndim == 2:
        colours = shown.interpolated(texture, surface.faces)
    elif isinstance(texture, Tensor):
        assert surface.uvs is not None
        colours = looked_up(texture, shown.interpolated(surface.uvs, surface.faces))
    else:
        colours = texture(shown.interpolated(surface.vertices, surface.faces))
    return colours * light[:, None]


def looked_up(texture: Tensor, uvs: Tensor) -> Tensor:
    """(P, 3): bilinear colours of ``texture`` (T, T, 3) at ``uvs`` (P, 2), v down, as renderers read it."""
    source = texture.movedim(-1, 0)[None]
    parts = [
        F.grid_sample(source, part[None, None] * 2 - 1, padding_mode="border", align_corners=False)[0, :, 0].T
        for part in uvs.split(POINTS_AT_ONCE)
    ]
    return torch.cat(parts)
