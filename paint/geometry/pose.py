"""The camera that took a picture of a mesh, found by the outline of the object, and by its colours where outlines tie.

A pose maps the frame to the picture as a projective map of space: straight edges stay straight and depth stays linear
on the screen, so the orthographic raster sees the mapped mesh as the camera saw the mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.device.execution import to_host
from .cameras import Camera
from .mesh import Surface, welded
from .raster import Fragments
from .turntable import looked_up
from .views import View, rasterised

FRONT = Camera(0, 0)  # looks along the axis of depth of what a pose has placed
COARSE, FINE = 96, 320  # pixels of the outlines that are compared, first and last
SOFT = 48  # pixels of the colours that are compared
TURNS, HEIGHTS = (-30, -15, 0, 15, 30), (-15, 0, 15, 30)  # degrees tried, from the given direction
PERSPECTIVES = (0.0, 0.45)  # one over the distance from the mesh's middle, in units of the frame, whose radius is 0.575
NEAREST_CAMERA = 1.1  # the largest such value: a wide lens
CLOSEST = 0.05  # depth, of that of the middle: what is behind a camera that was tried in vain has it too
STARTS, FIRST, LAST = 3, 3, 10  # best poses of the grid; rasters by which each is refined, and then the best of them
STEPS, DELTA = 2, 1e-4  # least-squares steps for each raster; change of a pose's value that measures the slope
POINTS = 1500  # of an outline
SPACING = 0.01  # units of the frame between points of the mesh's outline
FAR, NEAR = 0.06, 0.006  # widths of the picture beyond which an outline's point counts little, at first and at last
COLOUR_WEIGHT = 0.03  # of a colour that is off by 1, against an outline that is off by a picture's width
TYPICAL = (0.5, 0.5, 0.15, 0.5, 1.0, 1.0, 1.0)  # how far each of a pose's numbers usually lies from where it starts
DOUBT = 1e-6  # weight of those typical values against the mean squared distance of the outlines


@dataclass(frozen=True, slots=True)
class Pose:
    """A camera and where its picture lies."""

    azimuth: float  # radians, as those below
    elevation: float
    roll: float = 0.0  # turns the picture counter-clockwise
    perspective: float = 0.0  # one over the distance to the frame's middle; 0: orthographic
    scale: float = 0.0  # logarithm of the focal length, in widths of the picture, over that distance
    right: float = 0.0  # of the frame's middle from the picture's, in widths of the picture
    up: float = 0.0
    axis: tuple[float, float] = (0.0, 0.0)  # where the line of sight meets the picture: right and up, as above

    def values(self) -> Tensor:  # (7,) float64 on the CPU: all but the axis
        return torch.tensor([getattr(self, name) for name in self.__slots__[:-1]], dtype=torch.float64)

    def with_values(self, values: Tensor) -> Pose:
        return Pose(*to_host(values).tolist(), self.axis)

    def axes(self, places: Tensor) -> Tensor:
        """(3, 3), dtype and device of ``places``: right, up and towards a camera that looks at the frame's middle."""
        return places.new_tensor(Camera(math.degrees(self.azimuth), math.degrees(self.elevation)).axes())

    def turn(self) -> tuple[float, float]:
        """(right, up): tangents of the angles from the line of sight to the frame's middle, in an unrolled picture."""
        reach = self.perspective / math.exp(self.scale)  # one over the focal length
        right, up = (self.right - self.axis[0]) * reach, (self.up - self.axis[1]) * reach
        cosine, sine = math.cos(self.roll), math.sin(self.roll)
        return cosine * right + sine * up, cosine * up - sine * right

    def rays(self, places: Tensor) -> Tensor:
        """(P, 3), unit: from ``places`` (P, 3) in the frame towards the camera."""
        return F.normalize(self.axes(places)[2] - self.perspective * places, dim=1)

    def nearness(self, places: Tensor) -> Tensor:
        """(P,): one over the depth of ``places`` along the line of sight, 1 at the middle."""
        sight = places.new_tensor((*self.turn(), 1.0)) @ self.axes(places)
        return 1 / (1 - self.perspective * (places @ sight)).clamp(min=CLOSEST)

    def placed(self, places: Tensor) -> Tensor:
        """(P, 3): right and up from the picture's middle, in its widths, and depth, larger where nearer. A camera that
        looks past the frame's middle, by the tangents t and s of :meth:`turn`, sees the picture of one that looks at
        it, warped by the homography of a rotation."""
        (t, s), (cosine, sine) = self.turn(), (math.cos(self.roll), math.sin(self.roll))
        stretch = math.sqrt(1 + t**2 + s**2)
        x, y, z = (places @ self.axes(places).T * (self.nearness(places) * math.exp(self.scale))[:, None]).unbind(1)
        aside = t * x + s * y
        x, y = ((value + tangent * aside / (stretch + 1)) * stretch for value, tangent in ((x, t), (y, s)))
        right, up = cosine * x - sine * y + self.right, sine * x + cosine * y + self.up
        return torch.stack((right, up, z + aside), dim=1)


def posed_view(surface: Surface, pose: Pose, size: int) -> tuple[Surface, View, Fragments]:
    """The surface as the pose maps it, its raster of ``size`` pixels, and each covered pixel's place on ``surface``.
    The orthographic :data:`FRONT` sees the mapped surface in (-0.5, 0.5), as the pose's camera saw the mesh."""
    vertices = pose.placed(surface.vertices)
    a, b, c = (vertices[surface.faces[:, k]] for k in range(3))
    mapped = replace(surface, vertices=vertices, face_normals=F.normalize(torch.linalg.cross(b - a, c - a), dim=1))
    # pixels at whole numbers lie on the edges of a view, those of a picture half a pixel inside
    view = rasterised(mapped, FRONT, size, (size - 1) / size)
    weights = view.shown.weights * pose.nearness(surface.vertices)[surface.faces[view.shown.face]]
    return mapped, view, replace(view.shown, weights=weights / weights.sum(1, keepdim=True))


@dataclass(frozen=True, eq=False)
class Found:
    """A pose, the share of the two outlines' union that both cover, 0..1, and how far colours are off, 0..1."""

    pose: Pose
    overlap: float
    mismatch: float

    @property
    def score(self) -> float:
        return self.overlap - self.mismatch


def found_pose(
    surface: Surface, texture: Tensor, picture: Tensor, direction: tuple[float, float], given: bool = False,
    check: Callable[[], None] = lambda: None, axis: tuple[float, float] = (0.0, 0.0),
) -> Found:  # fmt: skip
    """The camera of a picture: a coarse grid round a direction, then the best of it moved onto the outline. An object
    thinner than a pixel has no outline: its overlap is 0.

    Args:
        surface: with UVs.
        texture: (T, T, 3) in 0..1 on the surface's device, for what outlines leave open: sides that look alike.
        picture: (S, S, 4) in 0..1 on the CPU, the object with its alpha.
        direction: azimuth and elevation in degrees from which to look first.
        given: the direction is known; only size, place, roll and perspective are found.
        check: called between steps, some 70, of at most 0.15 s for 40,000 faces on a CPU core; may raise to cancel.
        axis: of :class:`Pose`: where the middle of the whole picture lies in this part of it."""
    search = _PoseSearch.of(surface, texture, picture)
    if not len(search.outline):
        return Found(Pose(0.0, 0.0), 0.0, 1.0)  # an object thinner than a pixel
    turns, heights = ((0,), (0,)) if given else (TURNS, HEIGHTS)
    tried = []
    for turn, height, perspective in itertools.product(turns, heights, PERSPECTIVES):
        check()
        elevation = min(max(direction[1] + height, -90), 90)
        angles = math.radians(direction[0] + turn), math.radians(elevation)
        tried.append(search.compared(search.fitted(Pose(*angles, perspective=perspective, axis=axis)), COARSE))
    best = sorted(tried, key=lambda found: found.score, reverse=True)[:STARTS]
    middles = axis, (0.0, 0.0)  # where the picture was cropped before, the line of sight may meet the object's middle
    starts = [search.fitted(replace(each.pose, axis=middle)) for each in best for middle in middles]
    closer = [search.refined(pose, given, [FAR] * FIRST, check) for pose in starts]
    reaches = [FAR * (NEAR / FAR) ** (index / (LAST - 1)) for index in range(LAST)]
    return search.refined(max(closer, key=lambda found: found.score).pose, given, reaches, check)


@dataclass(frozen=True, eq=False)
class _PoseSearch:
    """One picture and the mesh, on the CPU but for ``surface`` and ``texture``."""

    surface: Surface
    texture: Tensor
    colours: Tensor  # (3, S, S) of the picture, smooth
    alpha: Tensor  # (S, S)
    outline: Tensor  # (Q, 2), places on the picture's outline, right and up
    outward: Tensor  # (Q, 2), the directions away from it
    edges: Tensor  # (E, 2), vertices; one across a seam of UVs
    sides: Tensor  # (M, 3), the edge of each side of each face
    vertices: Tensor  # (N, 3) float64
    faces: Tensor
    normals: Tensor  # (M, 3) float64

    @classmethod
    def of(cls, surface: Surface, texture: Tensor, picture: Tensor) -> _PoseSearch:
        """The search for a ``picture`` (S, S, 4); ``texture`` (T, T, 3) is made smaller, the picture softened."""
        small = resized(to_host(texture), min(FINE, len(texture))).movedim(0, -1)  # MPS pools only to sizes that divide
        alpha = F.adaptive_avg_pool2d(picture[None, ..., 3], FINE)[0]
        outline, outward = outline_of(alpha)
        vertices, faces = to_host(surface.vertices), to_host(surface.faces)
        corners = welded(vertices)[faces]
        ends = torch.stack((corners, corners.roll(-1, 1)), dim=2).sort(2).values  # (M, 3, 2): either way is one edge
        sides = (ends[..., 0] * (int(corners.max()) + 1) + ends[..., 1]).unique(return_inverse=True)[1]
        edges = torch.zeros((int(sides.max()) + 1, 2), dtype=torch.int64)
        edges[sides.view(-1)] = torch.stack((faces, faces.roll(-1, 1)), dim=2).view(-1, 2)
        return cls(
            surface=surface,
            texture=small.to(texture.device),
            colours=softened(resized(picture[..., :3], COARSE), resized(picture[..., 3:], COARSE)),
            alpha=alpha,
            outline=outline,
            outward=outward,
            edges=edges,
            sides=sides,
            vertices=vertices.double(),
            faces=faces,
            normals=to_host(surface.face_normals).double(),
        )

    def fitted(self, pose: Pose) -> Pose:
        """``pose`` with the size and place that lay the box of the mesh on that of the picture's outline."""
        low, high = self.outline.amin(0), self.outline.amax(0)
        for _ in range(2):  # the turn depends on the place
            places = pose.placed(self.vertices)[:, :2] - self.vertices.new_tensor((pose.right, pose.up))
            grow = float(((high - low) / (places.amax(0) - places.amin(0)).clamp(min=1e-6)).log().mean())
            shift = (low + high) / 2 - (places.amax(0) + places.amin(0)) / 2 * math.exp(grow)
            pose = replace(pose, scale=pose.scale + grow, right=float(shift[0]), up=float(shift[1]))
        return pose

    def compared(self, pose: Pose, size: int) -> Found:
        """``pose`` with its overlap of outlines and mismatch of colours, 1 without overlap, at ``size`` pixels."""
        covered, _, painted, pixel = self.seen(pose, size)
        alpha = F.adaptive_avg_pool2d(self.alpha[None, None], size)[0, 0] > 0.5
        overlap = float((covered & alpha).sum() / (covered | alpha).sum().clamp(min=1))
        chosen = alpha.view(-1)[pixel]
        if not bool(chosen.any()):
            return Found(pose, overlap, 1.0)
        colours = F.adaptive_avg_pool2d(self.colours[None], size)[0].view(3, -1).T[pixel[chosen]]
        return Found(pose, overlap, float((colours - adapted(painted[chosen], colours)).abs().mean()))

    def seen(self, pose: Pose, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mask (H, W) of the pixels that the mesh covers, and for each of them its place on the mesh (P, 3), the
        softened colour of the texture (P, 3) and its index (P,), row * W + column; all on the CPU."""
        _, view, shown = posed_view(self.surface, pose, size)
        assert self.surface.uvs is not None
        painted = looked_up(self.texture, shown.interpolated(self.surface.uvs, self.surface.faces))
        covered = to_host(view.ids >= 0)
        whole = softened(to_host(view.image(painted)).movedim(-1, 0), covered[None].float())
        place = shown.interpolated(self.surface.vertices, self.surface.faces)
        pixel = to_host(shown.pixel)
        return covered, to_host(place), whole.view(3, -1).T[pixel], pixel

    def rim(self, pose: Pose, covered: Tensor) -> Tensor:
        """(P, 3) float64: at most :data:`POINTS` points of the mesh's outline: they lie on an edge of one face, or of a
        face turned to the camera and one turned away, and within two pixels of the background in ``covered``."""
        front = (pose.rays(self.vertices[self.faces].mean(1)) * self.normals).sum(1) > 0
        sides = torch.zeros((len(self.edges), 2))  # of each edge, how many faces look away and how many towards
        sides.index_put_((self.sides, front.long()[:, None].expand(-1, 3)), torch.ones(()), accumulate=True)
        rims = self.edges[(sides > 0).all(1) | (sides.sum(1) == 1)]
        points, size = _points_along(*self.vertices[rims].unbind(1)), len(covered)
        background = F.max_pool2d((~covered).float()[None, None], 5, 1, 2)[0, 0] > 0
        right, up, _ = pose.placed(points).unbind(1)
        column, row = (((x + 0.5) * size - 0.5).round().long().clamp(0, size - 1) for x in (right, -up))
        return thinned(points[background[row, column]])

    def refined(self, pose: Pose, given: bool, reaches: list[float], check: Callable[[], None]) -> Found:
        """``pose`` moved until the outlines lie on one another, by damped least squares: one raster for each of
        ``reaches``, beyond which points count little. ``given`` keeps azimuth and elevation. Ends where nothing is
        seen. Source: Chen and Medioni 1992, points to the nearest lines; Geman and McClure's weights against strays."""
        start = values = pose.values()
        free = torch.ones(len(values), dtype=torch.float64)
        free[:2] = 0 if given else 1  # azimuth and elevation
        doubt = torch.diag(DOUBT / torch.tensor(TYPICAL, dtype=torch.float64) ** 2)
        for reach in reaches:
            check()
            pose = pose.with_values(values)
            covered, place, painted, _ = self.seen(pose, FINE // 2)
            rim, inside = self.rim(pose, covered), thinned(torch.cat((place.double(), painted.double()), 1))
            if not len(rim):
                break
            for _ in range(STEPS):
                residuals = self.residuals(pose.with_values(values), rim, inside, reach)
                now = residuals(values)
                steps = torch.eye(len(values), dtype=torch.float64) * DELTA * free
                slope = torch.stack([(residuals(values + step) - now) / DELTA for step in steps], dim=1)
                pull = slope.T @ now + doubt @ (values - start)
                values = values - free * torch.linalg.solve(slope.T @ slope + doubt, pull)
                values[3] = values[3].clamp(0, NEAREST_CAMERA)  # the perspective
        return self.compared(pose.with_values(values), FINE)

    def residuals(self, pose: Pose, rim: Tensor, inside: Tensor, reach: float) -> Callable[[Tensor], Tensor]:
        """The function from a pose's values to its weighted errors (R,): of outlines, along the picture's normals, then
        of colours. Points are paired as they lie at ``pose``: each of ``rim`` (P, 3), of the mesh's outline, with the
        nearest of the picture's, and back; ``inside`` (P, 6) has visible places with their colour in the texture."""
        apart = torch.cdist(pose.placed(rim)[:, :2], self.outline, compute_mode="donot_use_mm_for_euclid_dist")
        (near, partner), (far, other) = apart.min(1), apart.min(0)
        points = torch.cat((rim, rim[other]))
        targets = torch.cat((self.outline[partner], self.outline))
        lines = torch.cat((self.outward[partner], self.outward))
        weight = reach**2 / (reach**2 + torch.cat((near, far)) ** 2) / len(points) ** 0.5
        colours = adapted(inside[:, 3:], self.sampled(pose, inside[:, :3]))

        def off(values: Tensor) -> Tensor:  # (R,)
            moved = pose.with_values(values)
            lines_off = ((moved.placed(points)[:, :2] - targets) * lines).sum(1) * weight
            colours_off = (self.sampled(moved, inside[:, :3]) - colours) * COLOUR_WEIGHT / len(colours) ** 0.5
            return torch.cat((lines_off, colours_off.reshape(-1)))

        return off

    def sampled(self, pose: Pose, places: Tensor) -> Tensor:
        """(P, 3) float64: the picture's smooth colours where a pose puts ``places`` (P, 3)."""
        at = pose.placed(places)[None, None, :, :2] * torch.tensor((2.0, -2.0), dtype=places.dtype)
        return F.grid_sample(self.colours.double()[None], at, padding_mode="border", align_corners=False)[0, :, 0].T


def resized(picture: Tensor, size: int) -> Tensor:  # (C, size, size): means of (S, S, C)
    return F.adaptive_avg_pool2d(picture.movedim(-1, 0)[None], size)[0]


def _points_along(first: Tensor, second: Tensor) -> Tensor:
    """Points (P, 3) on the lines from ``first`` to ``second``, each (E, 3), at most :data:`SPACING` apart."""
    count = ((second - first).norm(dim=1) / SPACING).ceil().long().clamp(min=1)
    line = torch.repeat_interleave(torch.arange(len(count)), count)
    share = ((torch.arange(len(line)) - (count.cumsum(0) - count)[line] + 0.5) / count[line])[:, None]
    return first[line] * (1 - share) + second[line] * share


def softened(colours: Tensor, alpha: Tensor) -> Tensor:
    """(3, S, S): ``colours`` (3, S, S) blurred over a sixth of the picture, weighted by ``alpha`` (1, S, S)."""
    values = F.adaptive_avg_pool2d(torch.cat((colours * alpha, alpha))[None], SOFT)
    for _ in range(2):
        values = F.avg_pool2d(values, 9, 1, 4, count_include_pad=False)
    values = F.interpolate(values, colours.shape[1:], mode="bilinear")[0]
    return values[:3] / values[3:].clamp(min=1e-3)


def thinned(points: Tensor) -> Tensor:
    """At most :data:`POINTS` rows of ``points``, evenly spaced."""
    return points[:: -(-len(points) // POINTS) or 1]


def adapted(painted: Tensor, colours: Tensor) -> Tensor:
    """(P, 3) ``painted`` in the light of ``colours`` (P, 3): a gain from 1/2 to 2 and an offset for each channel."""
    own, other = painted - painted.mean(0), colours - colours.mean(0)
    gain = ((own * other).sum(0) / own.square().sum(0).clamp(min=1e-9)).clamp(0.5, 2)
    return own * gain + colours.mean(0)


def outline_of(alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Places at which ``alpha`` (S, S) crosses one half, and the directions out of the object, each (Q, 2) float64,
    at most :data:`POINTS`. Both count right and up; places from the middle, in widths."""
    size = len(alpha)
    smooth = F.pad(alpha[None, None], (3, 3, 3, 3), mode="replicate")
    for _ in range(3):
        smooth = F.avg_pool2d(smooth, 3, 1)
    down, across = (F.pad(smooth[0, 0], (1, 1, 1, 1)) for _ in range(2))
    slope = torch.stack((across[1:-1, :-2] - across[1:-1, 2:], down[2:, 1:-1] - down[:-2, 1:-1]), dim=2)
    places, outward = [], []
    for dim in (0, 1):
        first, second = alpha.narrow(dim, 0, size - 1), alpha.narrow(dim, 1, size - 1)
        row, column = ((first > 0.5) != (second > 0.5)).nonzero(as_tuple=True)
        share = ((0.5 - first) / (second - first))[row, column].double()
        moved = [row + share, column] if dim == 0 else [row, column + share]
        places.append(torch.stack(((moved[1] + 0.5) / size - 0.5, 0.5 - (moved[0] + 0.5) / size), dim=1))
        outward.append(slope[row, column])
    chosen = thinned(torch.cat((torch.cat(places), F.normalize(torch.cat(outward).double(), dim=1)), dim=1))
    return chosen[:, :2], chosen[:, 2:]
