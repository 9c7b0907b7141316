"""Pictures of the views back onto the texture: one view at a time, then merged by how squarely each saw the surface.

*Gather* asks for each texel where the camera sees it, and leaves no holes (v2-1). *Scatter* spreads each pixel over
four texels (v2-0). ``exact`` repeats the reference's faults, for comparison with it: gather off by half a pixel, texel
corners in the place of centres, float noise taken for edges, and pixels near an edge thrown away."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.device.execution import to_host
from ...compat.errors import InputError, require_choice, require_range
from ..choices import BAKES as FORMS
from ..geometry.cameras import CameraTable
from ..geometry.mesh import Surface, uv_areas
from ..geometry.raster import POINTS_AT_ONCE, Fragments, face_ids, fragments
from ..geometry.views import SELECTION_SIZE, SIZES, VIEW_SIZE, View, rasterised

MIN_COSINE = math.cos(math.radians(75))
DEPTH_TOLERANCE = 3e-3  # units of the frame, for a texel to be the surface that the camera sees
SEEN_BEFORE = 0.99  # share of a view's texels that earlier views painted: above it the view adds nothing
DOUBTED = 1e-4  # weight of a pixel near an edge, against 1: it counts where nothing better is
LEAST_SHARE = 1e-6  # of a pixel, for a texel to be seen by it: less is rounding
CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))  # down, right
MARGIN = 2 / 512  # of the picture: two pixels at the size that the model paints
JUMP = 0.03  # units of the frame: the weaker Canny threshold, 30 of 255, on a mesh whose depth range is about 1
LOW, HIGH = 30, 80  # Canny thresholds of the reference, sums of absolute gradients
TAN_22 = 13573  # tan(22.5 degrees) * 2^15: directions are compared in whole numbers, as OpenCV does


@dataclass(frozen=True, slots=True)
class BakeSettings:
    texture_size: int = 2048  # texels, 16..8192
    view_size: int = VIEW_SIZE  # pixels at which the maps were rendered; the pictures may have any size
    form: str = "gather"  # "gather" or "scatter"
    exact: bool = False  # the reference's arithmetic, faults included
    fill: str = "auto"  # of fill.METHODS, for fill.filled


@dataclass(frozen=True, eq=False)
class Texels:
    """The texture's raster: ``covered`` (T, T) bool, what lies at each covered texel, its ``place`` (P, 3)."""

    size: int
    covered: Tensor
    shown: Fragments
    place: Tensor


@dataclass(frozen=True, eq=False)
class Baked:
    texture: Tensor  # (T, T, 3) float32, 0 where not painted
    weight: Tensor  # (T, T) float32
    painted: Tensor  # (T, T) bool
    texels: Texels
    notes: tuple[str, ...] = ()

    @property
    def share(self) -> float:  # painted, of the surface's texels, 0..1
        return float((self.painted & self.texels.covered).sum() / self.texels.covered.sum().clamp(min=1))


def texels_of(surface: Surface, size: int, exact: bool = False) -> Texels:
    """Surface points at the texels of a texture of ``size`` (T): of faces that share a texel, the first has it.
    ``exact`` puts texel centres at u (T - 1), as the reference, instead of u T - 1/2, as renderers."""
    surface, uvs = surface.with_uvs()
    screen = F.pad(texel_places(uvs, size, exact), (0, 1))
    ids = face_ids(screen, surface.faces, size, size)
    shown = fragments(screen, surface.faces, ids)
    return Texels(size, ids >= 0, shown, shown.interpolated(surface.vertices, surface.faces))


def texel_places(uvs: Tensor, size: int, exact: bool) -> Tensor:  # (N, 2): column and row, centres at whole numbers
    return uvs * (size - 1) if exact else uvs * size - 0.5


def bake(
    surface: Surface, table: CameraTable, pictures: Tensor, settings: BakeSettings = BakeSettings(),
    check: Callable[[], None] = lambda: None,
) -> Baked:  # fmt: skip
    """The texture that ``pictures`` make on ``surface``, not filled yet, on the surface's device. Views blend by their
    camera's weight, their cosine and their trust; where the frame ``skips``, one that shows next to nothing new is left
    out and noted. Raises InputError for pictures of another number, shape or value, no usable UVs, or sizes out of
    range. Peak extra memory: about 200 bytes per texel, 0.8 GB at 2048.

    Args:
        surface: with UVs, in the frame of the ``table``.
        pictures: (V, H, W, 3 or 4) in 0..1, any device and square size; alpha is ignored.
        check: called before each view; may raise to cancel."""
    _check(table, pictures, settings)
    surface, uvs = surface.with_uvs()
    texels = texels_of(surface, settings.texture_size, settings.exact)
    shape = (settings.texture_size, settings.texture_size)
    total = torch.zeros(shape, device=uvs.device)
    colours = torch.zeros((*shape, 3), device=uvs.device)
    skipped = []
    project = gathered if settings.form == "gather" else scattered
    for index, camera in enumerate(table):
        check()
        view = rasterised(surface, camera, settings.view_size, table.ortho_scale, table.frame.pixel_centres)
        picture = pictures[index, ..., :3].to(uvs.device, torch.float32)
        colour, cosine, trust = project(surface, view, picture, texels, settings.exact)
        weight = camera.weight * cosine**table.frame.exponent * trust
        if table.frame.skips:
            sure = (weight > 0) & (trust == 1)
            if int((sure & (total > 0)).sum()) > SEEN_BEFORE * int(sure.sum()):  # never where it is sure of nothing
                skipped.append(index)
                continue
        total += weight
        colours += colour * weight[..., None]
    painted = total > 0
    texture = torch.where(painted[..., None], colours / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None], 0)
    return Baked(texture, total, painted, texels=texels, notes=_notes(surface, uvs, texels, skipped))


def gathered(
    surface: Surface, view: View, picture: Tensor, texels: Texels, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Each texel's colour (T, T, 3) in one view, cosine (T, T), 0 where not seen, trust (T, T): 1, less near edges."""
    cosines = surface.face_normals @ torch.tensor(view.camera.axes()[2], device=picture.device)
    sure = trusted(view, exact, SELECTION_SIZE if exact else view.size)  # the reference's mask is of its view selection
    shows = (view.ids >= 0) & ~blended(view, picture.shape[0])
    sight = _Sight(view, view.image(view.depth, background=-math.inf), sure=sure, pure=shows, cosines=cosines)
    picture = scaled(picture, view.size) if exact else rim_cleaned(picture, view)
    size, count = texels.size, texels.place.shape[0]
    colour, (cosine, trust) = picture.new_zeros((size * size, 3)), picture.new_zeros((2, size * size))
    for first in range(0, count, POINTS_AT_ONCE):
        part = slice(first, first + POINTS_AT_ONCE)
        screen = view.on_screen(texels.place[part])
        seen, sureness = sight.as_reference(screen) if exact else sight.tolerant(screen, texels.shown.face[part])
        chosen = (seen > 0).nonzero()[:, 0]
        place = texels.shown.pixel[part][chosen]
        colour[place] = _sampled(picture, screen[chosen, :2], view.size, exact)
        cosine[place], trust[place] = seen[chosen], sureness[chosen]
    return colour.view(size, size, 3), cosine.view(size, size), trust.view(size, size)


@dataclass(frozen=True, eq=False)
class _Sight:
    """Decides which points a view sees, by its depth (H, W), the pixels to trust (H, W), the pixels whose colour is of
    one surface alone (H, W), and each face's cosine to the camera (M,)."""

    view: View
    depth: Tensor
    sure: Tensor
    pure: Tensor
    cosines: Tensor

    def as_reference(self, screen: Tensor) -> tuple[Tensor, Tensor]:
        """(cosine, trust), each (P,), by the reference's rule: a point is seen if the one pixel at its place, scaled by
        W / (W - 1), is sure and shows its depth in a face that is not too steep, whose cosine it is; 0 where not seen.
        Trust is 1. Depths of a view grow towards the camera, those of ``screen`` away from it."""
        size = self.view.size
        column, row = (screen[:, :2] * (size / (size - 1))).floor().long().clamp(0, size - 1).unbind(1)
        ids = self.view.ids[row, column].long()
        cosine = torch.where((ids >= 0) & self.sure[row, column], self.cosines[ids], 0)
        close = (-screen[:, 2] - self.depth[row, column]).abs() < DEPTH_TOLERANCE
        return torch.where(close & (cosine >= MIN_COSINE), cosine, 0), torch.ones_like(cosine)

    def tolerant(self, screen: Tensor, face: Tensor) -> tuple[Tensor, Tensor]:
        """(cosine, trust), each (P,): a point is seen if one of the four pixels round it shows its depth or its face;
        cosine 0 where not seen, trust 1 where the nearest pixel is sure, else :data:`DOUBTED`. A face turned away
        counts if it is the one in front: there its winding is wrong, not its place."""
        cosine = self.cosines[face]
        steep = (1 - cosine.square()).clamp(min=0).sqrt() / cosine.abs().clamp(min=MIN_COSINE)
        tolerance = DEPTH_TOLERANCE + steep * (self.view.ortho_scale / self.view.size)
        seen, trust = torch.zeros_like(cosine), torch.full_like(cosine, DOUBTED)
        size, low = self.view.size, screen[:, :2].floor()
        nearest, low = (screen[:, :2] - low >= 0.5).long(), low.long()
        chosen = ((screen[:, :2] >= -0.5) & (screen[:, :2] <= size - 0.5)).all(1).nonzero()[:, 0]  # inside the picture
        for down, right in CORNERS:  # the nearest pixel, then the other three for points not seen in it
            offset = nearest[chosen] ^ torch.tensor((right, down), device=face.device)
            column, row = (low[chosen] + offset).clamp(0, size - 1).unbind(1)
            same = self.view.ids[row, column] == face[chosen]
            close = (-screen[chosen, 2] - self.depth[row, column]).abs() < tolerance[chosen]
            facing = torch.where(same, cosine[chosen].abs(), torch.where(close, cosine[chosen], 0))
            shows = (facing >= MIN_COSINE) & self.pure[row, column]
            seen[chosen[shows]] = facing[shows]
            if (down, right) == (0, 0):
                trust[chosen[shows & self.sure[row, column]]] = 1.0
            chosen = chosen[~shows & (cosine[chosen].abs() >= MIN_COSINE)]
        return seen, trust


def rim_cleaned(picture: Tensor, view: View) -> Tensor:
    """``picture`` (H, W, 3) with the mesh's own colours carried over its rim, where the background mixes in.

    Two rings of pixels: as far as bilinear sampling of the mesh can reach."""
    covered = to_host(view.ids >= 0).to(picture.dtype)[None, None]  # on the host: MPS pools only sizes that divide
    clean = (F.interpolate(covered, picture.shape[:2], mode="area") > 0.999).to(picture)
    colours = picture.movedim(-1, 0)[None]
    for _ in range(2):
        # both averages divide by 9, so their quotient is the mean of the clean pixels round each pixel
        spread, weight = (F.avg_pool2d(values, 3, 1, 1) for values in (colours * clean, clean))
        reached = weight > 0.5 / 9
        colours = torch.where((clean == 0) & reached, spread / weight.clamp(min=0.5 / 9), colours)
        clean = reached.to(picture.dtype)
    return colours[0].movedim(0, -1)


def _sampled(picture: Tensor, places: Tensor, size: int, exact: bool) -> Tensor:
    """(P, 3): bilinear colours of ``picture`` (H, W, 3) at ``places`` (P, 2), in pixels of a view of ``size``.

    The picture may have any size, but with ``exact`` must be ``size`` wide and high."""
    height, width = picture.shape[:2]
    scale = torch.tensor((width, height), device=places.device) / size
    # two pictures of one field of view agree at their edges, not at the centres of their first pixels
    places = places * (size / (size - 1)) if exact else (places + 0.5) * scale - 0.5
    limit = torch.tensor((width - 1, height - 1), device=places.device)
    places = torch.minimum(places.clamp(min=0), limit)
    low = torch.minimum(places.floor(), (limit - 1).clamp(min=0))
    share = (places - low)[:, :, None]
    low = low.long()
    flat = picture.reshape(height * width, -1)
    index = low[:, 1] * width + low[:, 0]
    upper = flat[index] * (1 - share[:, 0]) + flat[index + 1] * share[:, 0]
    lower = flat[index + width] * (1 - share[:, 0]) + flat[index + width + 1] * share[:, 0]
    return upper * (1 - share[:, 1]) + lower * share[:, 1]


def scaled(picture: Tensor, size: int) -> Tensor:  # (H, W, C) as (size, size, C), bilinear and antialiased
    if picture.shape[:2] == (size, size):
        return picture
    return F.interpolate(picture.movedim(-1, 0)[None], (size, size), mode="bilinear", antialias=True)[0].movedim(0, -1)


def scattered(
    surface: Surface, view: View, picture: Tensor, texels: Texels, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the result of :func:`gathered` with each pixel spread over the four texels round its place.
    The sums are made in no fixed order on a GPU: their last digits may differ from run to run."""
    surface, uvs = surface.with_uvs()
    pixel = view.shown.pixel
    sure = trusted(view, exact, view.size).view(-1)[pixel]
    if exact:
        trust = sure.to(picture.dtype)
    else:
        trust = torch.where(blended(view, picture.shape[0]).view(-1)[pixel], 0.0, torch.where(sure, 1.0, DOUBTED))
        picture = rim_cleaned(picture, view)
    picture = scaled(picture, view.size)
    towards = torch.tensor(view.camera.axes()[2], device=picture.device)
    sums = picture.new_zeros((texels.size**2, 6))  # colour and cosine by trust, trust, and shares of trusted pixels
    for part in torch.arange(trust.shape[0], device=trust.device).split(POINTS_AT_ONCE):
        shown = Fragments(pixel[part], view.shown.face[part], view.shown.weights[part])
        normals = F.normalize(shown.interpolated(surface.vertex_normals, surface.faces), dim=1)
        # the pixel shows this face: turned away, its winding is wrong
        cosine = normals @ towards if exact else (normals @ towards).abs()
        weight = torch.where(cosine >= MIN_COSINE, trust[part], 0)[:, None]
        seen = torch.cat((picture.reshape(-1, 3)[shown.pixel], cosine[:, None]), dim=1)
        values = torch.cat((seen * weight, weight, (weight > 0).to(weight.dtype)), dim=1)
        _splat(sums, texel_places(shown.interpolated(uvs, surface.faces), texels.size, exact), values, texels.size)
    seen, weight, pixels = sums.split((4, 1, 1), dim=1)
    tiny, shape = torch.finfo(sums.dtype).tiny, (texels.size, texels.size)
    # weighed by trust, a doubted pixel does not dilute the colour of a sure one beside it
    mean = torch.where(pixels > (0 if exact else LEAST_SHARE), seen / weight.clamp(min=tiny), 0)
    level = torch.ones_like(weight) if exact else torch.where(weight / pixels.clamp(min=tiny) > 0.5, 1.0, DOUBTED)
    return mean[:, :3].view(*shape, 3), mean[:, 3].view(shape), level.view(shape)


def _splat(sums: Tensor, places: Tensor, values: Tensor, size: int) -> None:
    """Add ``values`` (P, C) to the four texels round each of ``places`` (P, 2) in ``sums`` (T * T, C)."""
    places = places.clamp(0, size - 1)
    low = places.floor().clamp(max=size - 2)
    share = places - low
    index = (low[:, 1] * size + low[:, 0]).long()
    for down, right in CORNERS:
        part = (share[:, 0] if right else 1 - share[:, 0]) * (share[:, 1] if down else 1 - share[:, 1])
        sums.index_add_(0, index + down * size + right, values * part[:, None])


def _check(table: CameraTable, pictures: Tensor, settings: BakeSettings) -> None:  # InputError for the first fault
    shape = tuple(pictures.shape)
    if len(shape) != 4 or shape[-1] not in (3, 4) or shape[1] != shape[2] or shape[1] < 2:
        found, expected = f"pictures of shape {shape} to bake", "(views, size, size, 3)"
        raise InputError(found, expected=expected, fix="Bake square pictures, as Paint Views makes them.")
    if shape[0] != len(table):
        found, expected = f"{shape[0]} pictures for {len(table)} cameras", "one per camera"
        raise InputError(found, expected=expected, fix="Connect the same cameras to Paint Views and Bake Texture.")
    if not bool(torch.isfinite(pictures).all()):
        found = "pictures with NaN or infinite values to bake"
        raise InputError(found, expected="colours from 0 to 1", fix="Paint again in bf16 or fp32.")
    for name, size in (("texture_size", settings.texture_size), ("view_size", settings.view_size)):
        require_range(name, size, *SIZES, advice="; 2048 suits most meshes")
    require_choice("bake form", settings.form, FORMS, "gather leaves no holes.")


def _notes(surface: Surface, uvs: Tensor, texels: Texels, skipped: list[int]) -> tuple[str, ...]:  # lines for the user
    notes = list(surface.notes)
    areas = uv_areas(uvs, surface.faces)
    uv_area, covered = float(areas.sum()), float(texels.covered.sum()) / texels.size**2
    if uv_area > covered * 1.05 + 4 / texels.size:  # more than rounding at the rims of charts
        notes.append(f"{1 - covered / uv_area:.0%} of the UV area overlaps other faces, which then share their colours")
    flat = int((areas == 0).sum())
    if flat:
        notes.append(f"{flat} faces have no area in the texture and cannot be painted")
    if skipped:
        notes.append(f"views {', '.join(map(str, skipped))} show nothing new and were skipped")
    return tuple(notes)


def trusted(view: View, exact: bool, size: int) -> Tensor:
    """(H, W) bool: covered pixels at least two pixels, per 512 of ``size``, from the mesh's rim and from depth edges.
    ``exact`` finds edges as the reference, by Canny on depth scaled to its own range, which takes float noise for edges
    where a view shows one flat face. Otherwise a step of depth is measured in units of the frame."""
    covered = view.ids >= 0
    reach = int(MARGIN * size)
    if exact and view.depth.numel():
        low, high = view.depth.min(), view.depth.max()
        span = torch.where(high > low, high - low, torch.ones_like(high))
        edges = canny(view.image((view.depth - low) / span * 255).to(torch.uint8))
    else:
        edges = depth_steps(view)
    return ~grown(~covered, reach) & ~grown(edges, reach)


def blended(view: View, size: int) -> Tensor:
    """(H, W) bool: pixels whose colour a smaller picture, of ``size``, mixes with that of what is behind; else none."""
    if size >= view.size:
        return torch.zeros_like(view.ids, dtype=torch.bool)
    return grown(depth_steps(view), math.ceil(view.size / size))


def grown(mask: Tensor, reach: int) -> Tensor:
    """(H, W) bool: ``mask`` spread by ``reach`` pixels, as a square; two passes, each along one axis."""
    if reach == 0:
        return mask
    values = mask[None, None].to(torch.float32)
    values = F.max_pool2d(values, (2 * reach + 1, 1), 1, (reach, 0))
    return F.max_pool2d(values, (1, 2 * reach + 1), 1, (0, reach))[0, 0] > 0


def depth_steps(view: View) -> Tensor:
    """(H, W) bool: covered pixels whose depth differs from a covered neighbour's by more than a slope explains."""
    depth, covered = view.image(view.depth), view.ids >= 0
    # a face at 75 degrees, the steepest that is baked, changes by this much from one pixel to the next
    limit = max(JUMP, 4 * view.ortho_scale / view.size)
    steps = torch.zeros_like(covered)
    for dim in (0, 1):
        count = depth.shape[dim] - 1
        first, second = depth.narrow(dim, 0, count), depth.narrow(dim, 1, count)
        step = covered.narrow(dim, 0, count) & covered.narrow(dim, 1, count) & ((first - second).abs() > limit)
        steps.narrow(dim, 0, count).logical_or_(step)
        steps.narrow(dim, 1, count).logical_or_(step)
    return steps


def canny(image: Tensor) -> Tensor:
    """(H, W) bool: Canny edges of an 8-bit picture (H, W), 3x3 Sobel, sum of absolute gradients.
    Source: Canny 1986, in whole numbers with OpenCV's rounding, so that its result can be compared pixel for pixel."""
    padded = F.pad(image[None, None].to(torch.float32), (1, 1, 1, 1), mode="replicate")[0, 0]
    rows = padded[:-2] + 2 * padded[1:-1] + padded[2:]
    columns = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    dx, dy = (rows[:, 2:] - rows[:, :-2]).to(torch.int32), (columns[2:] - columns[:-2]).to(torch.int32)
    strength = dx.abs() + dy.abs()
    around = F.pad(strength, (1, 1, 1, 1))

    def shifted(down: int, right: int) -> Tensor:
        return around[1 + down : around.shape[0] - 1 + down, 1 + right : around.shape[1] - 1 + right]

    flat, steep = dx.abs() * TAN_22, dy.abs() << 15
    level = (steep < flat) & (strength > shifted(0, -1)) & (strength >= shifted(0, 1))
    upright = (steep > flat + (dx.abs() << 16)) & (strength > shifted(-1, 0)) & (strength >= shifted(1, 0))
    slanted = (steep >= flat) & (steep <= flat + (dx.abs() << 16))
    falling = (dx ^ dy) < 0
    ridges = [(strength > shifted(-1, side)) & (strength > shifted(1, -side)) for side in (1, -1)]
    weak = (strength > LOW) & (level | upright | (slanted & torch.where(falling, ridges[0], ridges[1])))
    edges = weak & (strength > HIGH)
    while True:  # strong edges pull in the weak ones that touch them
        more = grown(edges, 1) & weak
        if torch.equal(more, edges):
            return edges
        edges = more
