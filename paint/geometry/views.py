"""Camera views: position and normal maps for the UNet, and the same raster for baking."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...compat.errors import require_range
from .cameras import DEFAULT_VIEWS, ORTHO_SCALE, RING_VIEWS, Camera, CameraTable, Frame
from .mesh import Surface
from .raster import Fragments, face_ids, fragments

VIEW_SIZE = 2048  # px: the published maps are rendered so, then made smaller
SELECTION_SIZE = 1024
# The published rasteriser counts depth in whole steps, 2^18 for 100 units: at a silhouette the faces that turn away lie
# in the same step as those in front, and the lower one counts as seen, in maps too. Its start, and one step:
SELECTION_STEPS = (-1.350999, 3.8109588e-4)
ENOUGH = 0.01  # of the area: a view that adds less is not worth painting
SIZES = (16, 8192)


@dataclass(frozen=True, eq=False)
class View:
    """One camera's raster."""

    camera: Camera
    size: int  # pixels, high and wide
    ortho_scale: float
    ids: Tensor  # (H, W) int32, the face in front or -1
    shown: Fragments  # where a face is, and the place inside it
    depth: Tensor  # (P,) float32, towards the camera, of each covered pixel
    pixel_centres: bool = False

    def on_screen(self, points: Tensor) -> Tensor:
        return on_screen(points, self.camera, self.size, self.ortho_scale, self.pixel_centres)

    def image(self, values: Tensor, background: float = 0.0) -> Tensor:
        """(H, W, C) or (H, W) with ``values`` (P, C) or (P,) at the covered pixels."""
        canvas = values.new_full((self.size * self.size, *values.shape[1:]), background)
        canvas[self.shown.pixel] = values
        return canvas.view(self.size, self.size, *values.shape[1:])


@dataclass(frozen=True, eq=False)
class Maps:
    """Pictures for the UNet: ``position`` and ``normal`` (V, H, W, 3), 0..1; ``mask`` (V, H, W) bool."""

    position: Tensor
    normal: Tensor
    mask: Tensor


def on_screen(
    points: Tensor, camera: Camera, size: int, ortho_scale: float = ORTHO_SCALE, pixel_centres: bool = False
) -> Tensor:
    """(P, 3): column and row in pixels and depth away from the camera, of ``points`` (P, 3) in the frame."""
    right, up, towards = (points @ axis for axis in points.new_tensor(camera.axes()))
    column, row = right / ortho_scale + 0.5, 0.5 - up / ortho_scale
    if pixel_centres:
        return torch.stack((column * size - 0.5, row * size - 0.5, -towards), dim=1)
    return torch.stack((column * (size - 1), row * (size - 1), -towards), dim=1)


def rasterised(
    surface: Surface, camera: Camera, size: int, ortho_scale: float = ORTHO_SCALE, pixel_centres: bool = False,
    steps: tuple[float, float] | None = None,
) -> View:  # fmt: skip
    """The raster of ``surface`` as ``camera`` sees it, ``size`` pixels square; ``steps`` as in :func:`face_ids`."""
    screen = on_screen(surface.vertices, camera, size, ortho_scale, pixel_centres)
    ids = face_ids(screen, surface.faces, size, size, steps=steps)
    shown = fragments(screen, surface.faces, ids)
    depth = -shown.interpolated(screen[:, 2:], surface.faces)[:, 0]
    return View(camera, size, ortho_scale, ids=ids, shown=shown, depth=depth, pixel_centres=pixel_centres)


def rendered_maps(
    surface: Surface, table: CameraTable = DEFAULT_VIEWS, size: int = VIEW_SIZE, flat: bool = False,
    collected: torch.device | None = None,
) -> Maps:  # fmt: skip
    """Position and normal maps of every camera, as the checkpoints were trained on.
    Values of Hunyuan3D's are cut, not rounded, to 8 bits. Raises InputError for a size out of range.

    Args:
        size: pixels, 16..8192.
        flat: normals of faces (v2-1) instead of vertices (v2-0).
        collected: where the maps go, one after the other; None: the surface's device."""
    require_range("view size", size, *SIZES, "pixels", advice="; 2048 suits most meshes")
    target, shape = collected or surface.vertices.device, (len(table), size, size)
    # filled in place: stacked at the end they would be there twice
    positions, normals = (torch.empty((*shape, 3), device=target) for _ in range(2))
    masks = torch.empty(shape, dtype=torch.bool, device=target)
    for index, camera in enumerate(table):
        steps = SELECTION_STEPS if table.frame.eight_bits else None
        view = rasterised(surface, camera, size, table.ortho_scale, table.frame.pixel_centres, steps)
        shown, faces = view.shown, surface.faces
        normal = surface.face_normals[shown.face] if flat else shown.interpolated(surface.vertex_normals, faces)
        if not table.frame.eight_bits:
            normal = torch.nn.functional.normalize(normal, dim=1)
        positions[index] = _map(view, shown.interpolated(surface.vertices, faces), table.frame.gain, table.frame)
        normals[index] = _map(view, normal, 0.5, table.frame)
        masks[index] = view.ids >= 0
    return Maps(positions, normals, masks)


def _map(view: View, values: Tensor, gain: float, frame: Frame) -> Tensor:
    """(H, W, 3) in 0..1, of ``values`` (P, 3) times ``gain`` plus 0.5, in the maps' axes: X, -Z, Y of glTF."""
    colours = (torch.stack((values[:, 0], -values[:, 2], values[:, 1]), dim=1) * gain + 0.5).clamp(0, 1)
    if frame.eight_bits:
        colours = (colours * 255).floor() / 255
    return view.image(colours, background=frame.background)


def chosen_views(surface: Surface, most: int, size: int = SELECTION_SIZE) -> tuple[CameraTable, float]:
    """The six fixed views, then, up to ``most`` in all, each time the candidate that shows most area not seen so far,
    until one would add 1 % or less; and the share of the area that all see, 0..1. A face counts as seen with one pixel
    of ``size``. Raises InputError for a ``most`` that is not 6 to 12."""
    require_range("max_views", most, len(DEFAULT_VIEWS), 12, advice="; 6 uses only the fixed views")
    areas = surface.areas()
    areas = areas / areas.sum()

    def seen(camera: Camera) -> Tensor:  # (M,) bool: faces that show in a pixel
        ids = face_ids(on_screen(surface.vertices, camera, size), surface.faces, size, size, steps=SELECTION_STEPS)
        visible = torch.zeros(surface.faces.shape[0] + 1, dtype=torch.bool, device=ids.device)
        visible[ids.view(-1).long()] = True  # -1, the background, falls on the last, spare place
        return visible[:-1]

    cameras = list(DEFAULT_VIEWS)
    known = torch.stack([seen(camera) for camera in cameras]).any(0)
    open_views = {camera: seen(camera) for camera in RING_VIEWS} if most > len(cameras) else {}
    while open_views and len(cameras) < most:
        gains = {camera: float(areas[shows & ~known].sum()) for camera, shows in open_views.items()}
        best = max(gains, key=gains.__getitem__)
        if gains[best] <= ENOUGH:
            break
        known |= open_views.pop(best)
        cameras.append(best)
    return CameraTable(tuple(cameras)), float(areas[known].sum())
