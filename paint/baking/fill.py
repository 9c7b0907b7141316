"""Texels that no view painted: from the mesh's other half, then along the surface, then along the texture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.device.execution import to_host
from ...compat.errors import InputError, require_choice
from ...compat.packages import imported
from ..choices import FILLS as METHODS
from ..geometry.cameras import Camera, CameraTable
from ..geometry.mesh import Surface, named_by, welded
from ..geometry.views import rasterised
from .bake import Baked, BakeSettings, bake, texel_places

NEAREST = 1e-4  # units of the frame: neighbours closer than this count as that far
INPAINT_RADIUS = 3  # texels
SMOOTHINGS = 32  # sweeps after the last new vertex: by then a hole of ten rings has settled
COMPARED = (Camera(0, 0), Camera(90, 0), Camera(0, 90))  # a mesh that looks mirrored to all three is symmetric
OUTLINE = 128  # pixels of the views that COMPARED render
OFF, ALIKE = 0.02, 0.97  # units of the frame by which depths may differ; share of the pixels in which they must agree
EXACT_SWEEPS = 2  # that the reference makes where every vertex gets a colour


def filled(
    baked: Baked, surface: Surface, method: str = "auto", exact: bool = False, check: Callable[[], None] = lambda: None
) -> Tensor:
    """(T, T, 3): the texture with every texel coloured.

    Raises InputError for an unknown method, or where nothing is painted; MissingPackageError without OpenCV.

    Args:
        method: for what the surface leaves open: "pull_push" in torch, "opencv" (Navier-Stokes, needs the package), or
            "auto": pull_push.
        exact: as the reference: each vertex colours one texel, and seams of the texture are borders.
        check: called between the vertices of ``exact``, one after the other; may raise to cancel."""
    require_choice("fill method", method, METHODS, "auto needs no package.")
    if not bool(baked.painted.any()):
        found = "a texture without one painted texel"
        fix = "Check the cameras, and that the faces of the mesh point outwards."
        raise InputError(found, expected="cameras that see the mesh", fix=fix)
    texture, painted = vertex_filled(baked, surface, exact, check)
    if method != "opencv":
        return pull_push(texture, painted)
    cv2 = imported("cv2")  # Navier-Stokes in 8 bits, as the reference does
    picture = (to_host(texture).clamp(0, 1) * 255).to(torch.uint8).numpy()
    done = cv2.inpaint(picture, to_host(~painted).to(torch.uint8).numpy() * 255, INPAINT_RADIUS, cv2.INPAINT_NS)
    return torch.from_numpy(done).to(texture.device, texture.dtype) / 255


def from_the_other_half(
    baked: Baked, surface: Surface, table: CameraTable, pictures: Tensor, settings: BakeSettings,
    check: Callable[[], None] = lambda: None,
) -> Baked:  # fmt: skip
    """``baked`` with unpainted texels coloured from mirrored pictures of the mesh's other half, if its left and right
    halves are alike; front and back of one shape are seldom painted alike. Unchanged with ``settings.exact``, and where
    the mirror image of each camera is in the ``table`` too, as in the default one: then nothing more is seen."""
    known = {_direction(camera) for camera in table if camera.weight}
    images = [mirror_image(camera) for camera in table]
    fresh = [index for index, camera in enumerate(images) if _direction(camera) not in known and camera.weight]
    if settings.exact or not fresh or not is_symmetric(surface):
        return baked
    cameras = replace(table, cameras=tuple(images[index] for index in fresh))
    other = bake(surface, cameras, pictures[fresh].flip(2), settings, check)
    new = other.painted & ~baked.painted
    texture = torch.where(new[..., None], other.texture, baked.texture)
    return replace(baked, texture=texture, painted=baked.painted | new)


def mirror_image(camera: Camera) -> Camera:
    """The camera that sees the right half of a mesh as ``camera`` sees the left, and in a mirrored picture."""
    return replace(camera, azimuth=-camera.azimuth % 360)


def _direction(camera: Camera) -> tuple[float, ...]:
    return tuple(round(value, 3) for value in camera.axes()[2])


def is_symmetric(surface: Surface) -> bool:  # its left and right halves, within OFF and ALIKE
    for camera in COMPARED:
        views = (rasterised(surface, each, OUTLINE) for each in (camera, mirror_image(camera)))
        own, image = (view.image(view.depth, background=-9.0) for view in views)  # far behind any depth of the frame
        either = (own > -9) | (image.flip(1) > -9)
        if float(((own - image.flip(1)).abs() <= OFF)[either].float().mean()) < ALIKE:
            return False
    return True


def vertex_filled(
    baked: Baked, surface: Surface, exact: bool = False, check: Callable[[], None] = lambda: None
) -> tuple[Tensor, Tensor]:
    """Texture (T, T, 3) and bool mask of painted texels (T, T) after colours have spread from vertex to vertex.
    Unless ``exact``, vertices that unwrapping split are merged, and whole faces are coloured, not single texels."""
    surface, uvs = surface.with_uvs()
    size, device = baked.texels.size, baked.texture.device
    place = (texel_places(uvs, size, exact) + 0.5).floor().long().clamp(0, size - 1)  # halves up, as C++ rounds them
    texel = place[:, 1] * size + place[:, 0]
    used = named_by(surface.faces, len(uvs))
    merged = torch.arange(len(uvs), device=device) if exact else welded(surface.vertices)  # each vertex's merged index
    count = int(merged.max()) + 1
    counts = (baked.painted.view(-1)[texel] & used).to(torch.float32)  # 1 for a vertex on a painted texel
    sums = torch.zeros((count, 4), device=device)  # of colours, and how many
    coloured = torch.cat((baked.texture.view(-1, 3)[texel], torch.ones_like(counts)[:, None]), dim=1)
    sums.index_add_(0, merged, coloured * counts[:, None])
    places = torch.zeros((count, 3), device=device).index_copy_(0, merged, surface.vertices)
    means, faces = sums[:, :3] / sums[:, 3:].clamp(min=1), merged[surface.faces]
    start = (means, sums[:, 3] > 0, places, faces)
    colours, known = _sweep_in_order(*start, check) if exact else _spread(*start)
    texture, painted = baked.texture.clone().view(-1, 3), baked.painted.clone().view(-1)
    if exact:
        chosen = (known[merged] & used & ~painted[texel]).nonzero()[:, 0]
        texture[texel[chosen]], painted[texel[chosen]] = colours[merged[chosen]], True
    else:
        shown = baked.texels.shown
        corners = faces[shown.face]
        chosen = (known[corners].all(1) & ~painted[shown.pixel]).nonzero()[:, 0]
        mixed = torch.einsum("pk,pkc->pc", shown.weights[chosen], colours[corners[chosen]])
        texture[shown.pixel[chosen]], painted[shown.pixel[chosen]] = mixed, True
    return texture.view_as(baked.texture), painted.view_as(baked.painted)


def _spread(colours: Tensor, known: Tensor, places: Tensor, faces: Tensor) -> tuple[Tensor, Tensor]:
    """Colours (N, 3) and which are known (N,) once no uncoloured vertex has a coloured neighbour.
    Each vertex not coloured at first takes the mean of its coloured neighbours, weighted by 1 / distance^2: ring by
    ring inwards, then again until the hole is smooth."""
    ends = torch.cat((faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]))
    ends = torch.cat((ends, ends.flip(1)))
    ends = ends[~known[ends[:, 0]]]  # only edges that lead to an uncoloured vertex can bring something
    weights = (places[ends[:, 0]] - places[ends[:, 1]]).norm(dim=1).clamp(min=NEAREST).square().reciprocal()
    colours, known, settled = colours.clone(), known.clone(), 0
    while ends.shape[0] and settled < SMOOTHINGS:
        incoming = weights * known[ends[:, 1]]
        sums = torch.zeros((known.shape[0], 4), device=colours.device)
        near = torch.cat((colours[ends[:, 1]], torch.ones_like(incoming)[:, None]), dim=1)
        sums.index_add_(0, ends[:, 0], near * incoming[:, None])
        reached = sums[:, 3] > 0
        settled += not bool((reached & ~known).any())
        colours[reached], known[reached] = sums[reached, :3] / sums[reached, 3:], True
    return colours, known


def _sweep_in_order(
    colours: Tensor, known: Tensor, places: Tensor, faces: Tensor, check: Callable[[], None]
) -> tuple[Tensor, Tensor]:
    """:func:`_spread` as the reference does it, slowly: vertex after vertex in the faces' order, each from the colours
    that its neighbours have by then, in sweeps until none is coloured any more; ``check`` is called for each vertex."""
    import numpy as np

    target = colours.device
    paint, done = to_host(colours).double().numpy().copy(), to_host(known).numpy().copy()
    positions = to_host(places).double().numpy()
    triangles = to_host(faces).numpy()
    order = [vertex for vertex in triangles.reshape(-1).tolist() if not done[vertex]]
    near: dict[int, list[int]] = {vertex: [] for vertex in order}
    following = np.roll(triangles, -1, axis=1).reshape(-1).tolist()
    for first, second in zip(triangles.reshape(-1).tolist(), following, strict=True):
        if first in near:
            near[first].append(second)
    weights = {
        vertex: 1 / np.maximum(np.linalg.norm(positions[vertex] - positions[others], axis=1), NEAREST) ** 2
        for vertex, others in near.items()
    }
    left, before = EXACT_SWEEPS, 0
    while left:  # each sweep that changed how many corners stay open is followed by one more
        stuck = 0
        for vertex in order:
            check()
            share = weights[vertex] * done[near[vertex]]
            if share.sum() > 0:
                paint[vertex], done[vertex] = share @ paint[near[vertex]] / share.sum(), True
            else:
                stuck += 1
        left, before = left + (1 if stuck != before else -1), stuck
    return torch.from_numpy(paint).to(target, torch.float32), torch.from_numpy(done).to(target)


def pull_push(texture: Tensor, painted: Tensor) -> Tensor:
    """(H, W, 3) with every texel coloured: means of ever larger squares, the smallest that holds paint wins.
    Painted texels stay bit for bit. Source: Gortler et al. 1996, The Lumigraph, section 3.4."""
    weight = painted[None, None].to(texture.dtype)
    level = texture.movedim(-1, 0)[None] * weight
    levels = [(level, weight)]
    while max(level.shape[-2:]) > 1:
        odd = (0, level.shape[-1] % 2, 0, level.shape[-2] % 2)
        level, weight = (F.avg_pool2d(F.pad(values, odd), 2) * 4 for values in (level, weight))
        level, weight = level / weight.clamp(min=1), weight.clamp(max=1)
        levels.append((level, weight))
    for finer, own in reversed(levels[:-1]):
        coarse = F.interpolate(level, scale_factor=2, mode="bilinear", align_corners=False)
        coarse = coarse[..., : finer.shape[-2], : finer.shape[-1]]
        level = torch.where(own > 0, finer, coarse)
    return torch.where(painted[..., None], texture, level[0].movedim(0, -1))
