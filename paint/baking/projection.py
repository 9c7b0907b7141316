"""Reference pictures on a finished texture: where a picture shows the surface squarely, its own detail is put there.

It fades out towards slanted surface, towards whatever hides it, and where its colours contradict the texture; what it
does not show stays bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.errors import InputError
from ..geometry.cameras import HUNYUAN
from ..geometry.mesh import Surface
from ..geometry.pose import Pose, found_pose, posed_view, softened
from ..geometry.raster import Fragments
from ..geometry.turntable import looked_up
from .bake import Texels, depth_steps, gathered, grown, texels_of
from .fill import pull_push

MATCH = 0.93  # of the union of both outlines: below it the picture shows another shape
CUT_MATCH = 0.97  # where the object reaches the picture's edge, beyond which it may go on: cut by a tenth it had less
SQUARELY, DETAILED, WHOLLY = 0.5, 0.51, 0.6  # cosines from which a picture counts, gives all detail, all colour
SMOOTH = 0.85  # cosine between the normals of a face and of its corners, below which an edge is meant to be sharp
DOUBTED, REFUSED = 0.2, 0.35  # soft colours that differ so much fade out; are left out
LIGHT = 0.5, 2  # how much darker and brighter a channel of the whole picture may be
FADES = 1 / 1024, 1 / 128  # of the picture, over which detail and colour end at a rim, an edge of depth or a crease
PADDING = 4  # texels round a chart, which renderers mix with it
FRAME = 0.06  # of the object's box, kept free round it
SIZES = (1024, 2048)  # pixels at which the mesh is rasterised
GROUND = 0.06  # from the colour of a plain background to the object's
CELLS, SPECK = 256, 0.01  # along each side, in which pieces hang together; of the largest piece: less is no object
PLAIN = 0.9  # of the picture's edge, which has one colour where the background is plain


@dataclass(frozen=True, eq=False)
class Reference:
    picture: Tensor  # (H, W, 3 or 4) in 0..1 on the CPU; with alpha, or before a plain background
    name: str = "front"  # of its place, for the user
    azimuth: float = 0.0  # degrees
    elevation: float = 0.0
    given: bool = False  # it was taken exactly from there, not roughly


@dataclass(frozen=True, eq=False)
class Projected:
    """``texture`` (T, T, 3), how much of each texel is a picture's, (T, T) in 0..1, and lines for the user."""

    texture: Tensor
    weight: Tensor
    notes: tuple[str, ...]


def projected(
    surface: Surface, texture: Tensor, references: Sequence[Reference], check: Callable[[], None] = lambda: None
) -> Projected:
    """``texture`` with the detail of pictures where they show the surface, on the surface's device.

    It equals ``texture`` wherever no picture counts, but for :data:`PADDING` texels beside what changed. A picture
    whose outline differs from the mesh's is left out, with a note. Peak extra memory: 210 bytes per texel, and 170 MB.
    Raises InputError for a texture that is not square, unusable UVs, or a picture without an object.

    Args:
        texture: (T, T, 3) in 0..1 of the whole surface, on its device.
        check: called between steps of 0.1 s to a few seconds; may raise to cancel."""
    if texture.ndim != 3 or texture.shape[0] != texture.shape[1]:
        found, expected = f"a texture of shape {tuple(texture.shape)}", "(size, size, 3)"
        raise InputError(found, expected=expected, fix="Bake a square texture.")
    surface, _ = surface.with_uvs()
    texels, size = texels_of(surface, len(texture)), len(texture)
    colours = torch.zeros_like(texture)
    total, most = torch.zeros_like(texture[..., 0]), torch.zeros_like(texture[..., 0])
    notes = list(surface.notes)
    for each in references:
        picture, whole, axis = cropped(each.picture, each.name, min(max(4 * size, SIZES[0]), SIZES[1]))
        found = found_pose(surface, texture, picture, (each.azimuth, each.elevation), each.given, check, axis)
        least, where = (MATCH, "") if whole else (CUT_MATCH, "the object reaches the picture's edge, and ")
        if found.overlap < least:
            covers = f"{where}the picture's outline covers {found.overlap:.1%} of the mesh's, not {least:.0%}"
            notes.append(f"{each.name}: {covers}: the texture is left as it is")
            continue
        check()
        colour, cosine, weight = shown_by(surface, texture, texels, picture.to(texture.device), found.pose)
        part = weight * cosine**HUNYUAN.exponent
        colours, total, most = colours + colour * part[..., None], total + part, torch.maximum(most, weight)
        share = float((weight > 0).sum() / texels.covered.sum().clamp(min=1))
        azimuth, elevation, roll = (f"{math.degrees(angle):.0f}" for angle in astuple(found.pose)[:3])
        notes.append(
            f"{each.name}: outlines agree by {found.overlap:.1%}, camera at {azimuth}, {elevation}, rolled by {roll} "
            f"degrees; detail on {share:.1%} of the surface"
        )
    mixed = texture + (colours / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None] - texture) * most[..., None]
    changed = most > 0
    made = torch.where(changed[..., None], mixed.clamp(0, 1), texture)
    if bool(changed.any()):
        beside = grown(changed, PADDING) & ~texels.covered
        made = torch.where(beside[..., None], pull_push(made, texels.covered), made)
    return Projected(made, most, tuple(notes))


def shown_by(
    surface: Surface, texture: Tensor, texels: Texels, picture: Tensor, pose: Pose
) -> tuple[Tensor, Tensor, Tensor]:
    """Colour (T, T, 3), cosine (T, T) and weight (T, T) in 0..1 of each texel in a picture (S, S, 4) taken at ``pose``.
    The weight is of detail; where that of whole colour is less, the texture's blurred colour replaces the picture's."""
    size = min(max(len(picture), SIZES[0]), SIZES[1])
    mapped, view, shown = posed_view(surface, pose, size)
    posed = replace(texels, place=pose.placed(texels.place))
    colour, seen, _ = gathered(mapped, view, picture[..., :3].contiguous(), posed, exact=False)
    scaled = F.interpolate(picture.movedim(-1, 0)[None], (size, size), mode="bilinear", antialias=True)[0]
    visible = (view.ids >= 0) & ~grown(depth_steps(view), 1) & (scaled[3] > 0.5)
    assert surface.uvs is not None
    painted = view.image(looked_up(texture, shown.interpolated(surface.uvs, surface.faces)))
    agrees, difference = compared(painted.movedim(-1, 0), scaled[:3], visible)
    smooth, flat = facing(surface, shown, pose)
    bands = []  # weights of detail, then of whole colour, each (S, S)
    for full, reach in zip((DETAILED, WHOLLY), FADES, strict=True):
        counts = ((smooth - SQUARELY) / (full - SQUARELY)).clamp(0, 1) * (flat > SQUARELY)
        bands.append(faded(view.image(counts) * visible * agrees, reach))
    grid = (posed.place[None, None, :, :2] * posed.place.new_tensor((2.0, -2.0))).clamp(-2, 2)
    values = F.grid_sample(torch.cat((torch.stack(bands), difference))[None], grid, align_corners=False)[0, :, 0].T
    smooth, flat = facing(surface, texels.shown, pose)
    values = torch.where((flat > SQUARELY)[:, None], torch.cat((values, smooth[:, None]), dim=1), 0)
    placed = seen.new_zeros(seen.numel(), values.shape[1])
    placed[texels.shown.pixel] = values
    placed = placed.view(*seen.shape, -1) * (seen > 0)[..., None]
    detail, whole, difference, cosine = placed.split((1, 1, 3, 1), dim=-1)
    # the picture's soft colours end far more gently than its detail, as bands of another width in Burt and Adelson 1983
    return colour - (detail - whole) / detail.clamp(min=1e-6) * difference, cosine[..., 0], detail[..., 0]


def facing(surface: Surface, shown: Fragments, pose: Pose) -> tuple[Tensor, Tensor]:
    """Cosines (P,) of the ray to the camera with the interpolated normal, or at a sharp edge the face's, and (P,) with
    the face's normal. Both are absolute: where a face turned away is the one in front, its winding is wrong, not its
    place."""
    flat = surface.face_normals[shown.face]
    smooth = F.normalize(shown.interpolated(surface.vertex_normals, surface.faces), dim=1)
    smooth = torch.where(((smooth * flat).sum(1) > SMOOTH)[:, None], smooth, flat)
    rays = pose.rays(shown.interpolated(surface.vertices, surface.faces))
    return (smooth * rays).sum(1).abs(), (flat * rays).sum(1).abs()


def compared(painted: Tensor, colours: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Agreement (S, S) in 0..1 of the blurred colours of a texture and a picture, both (3, S, S), and their difference
    (3, S, S), picture less texture, 0 outside ``chosen`` (S, S), the pixels that count. The agreement, but not the
    difference, allows for light of another colour or strength over the whole picture."""
    first, second = (softened(each, chosen[None].to(each.dtype)) for each in (painted, colours))
    off = torch.zeros_like(first[0])
    if bool(chosen.any()):
        own, other = first[:, chosen], second[:, chosen]
        light = (other.median(1).values / own.median(1).values.clamp(min=1e-3)).clamp(*LIGHT)
        off[chosen] = (own * light[:, None] - other).abs().amax(0)
    return ((REFUSED - off) / (REFUSED - DOUBTED)).clamp(0, 1), (second - first) * chosen


def faded(allowed: Tensor, share: float) -> Tensor:
    """(S, S): ``allowed`` (S, S) eroded by a ``share`` of its width, then blurred by as much, so that 0 stays 0."""
    reach = max(1, round(share * len(allowed)))
    kernels = ((2 * reach + 1, 1), (1, 2 * reach + 1))
    values = -F.pad(allowed, (reach, reach, reach, reach))[None, None]
    for kernel in kernels:
        values = F.max_pool2d(values, kernel, 1)
    values = -F.pad(values, (reach, reach, reach, reach))
    for kernel in kernels:
        values = F.avg_pool2d(values, kernel, 1)
    return values[0, 0]


def _cells_of_large_pieces(seen: Tensor) -> Tensor:
    """(H, W) bool: the connected pieces of ``seen`` (H, W) that are at least :data:`SPECK` as large as the largest, as
    cells of a grid of at most :data:`CELLS` a side, so coarser than ``seen``."""
    cells = F.adaptive_max_pool2d(seen[None].float(), [min(length, CELLS) for length in seen.shape])
    label = torch.arange(1.0, cells.numel() + 1).view_as(cells) * cells
    for _ in range(4 * CELLS):  # a cell takes the label of the cell that the largest label near it names
        before, label = label, label.view(-1)[F.max_pool2d(label, 3, 1, 1).long() - 1] * cells
        if torch.equal(before, label):
            break
    sizes = label[label > 0].long().bincount(minlength=cells.numel() + 1)
    return F.interpolate((sizes[label.long()] >= SPECK * sizes.max())[None].float(), seen.shape)[0, 0] > 0


def cropped(picture: Tensor, name: str, most: int) -> tuple[Tensor, bool, tuple[float, float]]:
    """The object of a picture (H, W, 3 or 4), centred in a square (S, S, 4) of at most ``most`` pixels; True if there
    is background all round it; and how far right and up the picture's middle is from the square's, in its widths.
    Without alpha, or where alpha hides nothing, the background must be plain. Specks far from the object are left out.
    Raises InputError, with the ``name``, where nothing, or everything, is the object."""
    if bool(picture[..., 3:].eq(1).all()):  # also where there is none
        picture = picture[..., :3]
        edge = torch.cat((picture[0], picture[-1], picture[:, 0], picture[:, -1]))
        ground = edge.median(0).values
        plain = float(((edge - ground).abs().amax(1) < GROUND).float().mean()) >= PLAIN
        apart = (picture - ground).abs().amax(-1, keepdim=True) >= (GROUND if plain else 0)
        picture = torch.cat((picture, apart.to(picture.dtype)), dim=-1)
    seen = picture[..., 3] > 0.5
    if not bool(seen.any()) or bool(seen.all()):
        found = f"a {name} picture whose object has no outline"
        fix = "Connect the mask of Load Image or of core's background removal."
        raise InputError(found, expected="an object cut out, or before a plain background", fix=fix)
    specks = seen & ~_cells_of_large_pieces(seen)
    picture, seen = torch.cat((picture[..., :3], picture[..., 3:] * ~specks[..., None]), dim=-1), seen & ~specks
    rows, columns = seen.any(1).nonzero().flatten(), seen.any(0).nonzero().flatten()
    top, left = int(rows[0]), int(columns[0])
    height, width = int(rows[-1]) + 1 - top, int(columns[-1]) + 1 - left
    whole = 0 < top < len(seen) - height and 0 < left < len(seen[0]) - width
    side = math.ceil(max(height, width) * (1 + 2 * FRAME)) + 2
    before = [(side - width) // 2 - left, (side - height) // 2 - top]
    after = [side - before[0] - picture.shape[1], side - before[1] - picture.shape[0]]
    axis = (before[0] - after[0]) / (2 * side), (after[1] - before[1]) / (2 * side)
    padded = F.pad(picture.movedim(-1, 0), (before[0], after[0], before[1], after[1]))
    if side <= most:
        return padded.movedim(0, -1).contiguous(), whole, axis
    colours = F.interpolate(torch.cat((padded[:3] * padded[3:], padded[3:]))[None], (most, most), mode="area")[0]
    return torch.cat((colours[:3] / colours[3:].clamp(min=1e-3), colours[3:])).movedim(0, -1).contiguous(), whole, axis
