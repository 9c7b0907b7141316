"""Photographs whose object lies off their middle, by a pinhole camera that is written here alone: one ray a sample."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from anygpu.paint.baking.bake import texels_of
from anygpu.paint.baking.projection import Reference, cropped, projected
from anygpu.paint.geometry import pose as poses
from anygpu.paint.geometry.cameras import Camera
from anygpu.paint.geometry.mesh import Surface
from anygpu.paint.geometry.pose import Pose
from paint.baking.test_projection import CASES, SIZE, decibels, known
from torch import Tensor

RAYS = 4096  # at once
WIDTH = 0.38  # of the picture, by an object of the frame's width
CAMERAS = (  # azimuth, elevation, roll, degrees; focal length and place of the object, in widths of the picture
    (15, 0, 0, 0.72, (0.25, 0)),
    (-12, 10, 4, 1.0, (-0.2, 0.15)),
    (8, -15, 5, 1.5, (0.1, -0.25)),
    (-15, 15, -5, 0.85, (0.25, 0.25)),
    (10, 8, -3, 2.5, (-0.25, 0)),
    (0, -5, 0, 0.72, (0, 0.22)),
    (-7, 3, 2, 1.0, (0.25, -0.1)),
    (5, 12, -4, 0.72, (-0.15, -0.2)),
)


@dataclass(frozen=True)
class Pinhole:
    eye: Tensor  # (3,)
    axes: Tensor  # (3, 3): right, up, ahead
    focal: float  # widths of the picture

    @classmethod
    def of(cls, azimuth, elevation, roll, focal, place, distance) -> "Pinhole":
        """The camera whose picture has the frame's middle at ``place``."""
        a, e, r = (math.radians(angle) for angle in (azimuth, elevation, roll))
        towards = torch.tensor((math.sin(a) * math.cos(e), math.sin(e), math.cos(a) * math.cos(e)), dtype=torch.float64)
        right = torch.tensor((math.cos(a), 0, -math.sin(a)), dtype=torch.float64)
        axes = torch.stack((right, torch.linalg.cross(towards, right), -towards))
        rolled = torch.eye(3, dtype=torch.float64)
        rolled[:2, :2] = torch.tensor(((math.cos(r), -math.sin(r)), (math.sin(r), math.cos(r))))
        x, y = place[0] / focal, place[1] / focal  # turned round the axis that is square to both directions
        angle = math.atan(math.hypot(x, y)) / max(math.hypot(x, y), 1e-12)
        turn = torch.tensor(((0, 0, x), (0, 0, y), (-x, -y, 0)), dtype=torch.float64) * angle
        return cls(towards * distance, torch.linalg.matrix_exp(turn) @ rolled @ axes, focal)

    def placed(self, places: Tensor) -> Tensor:
        """(P, 3): right and up in the picture, and the depth."""
        right, up, ahead = ((places - self.eye) @ self.axes.T).unbind(1)
        return torch.stack((right / ahead * self.focal, up / ahead * self.focal, ahead), dim=1)

    def hits(self, surface: Surface, rays: Tensor) -> tuple[Tensor, Tensor]:
        """The first face (R,) on each ray (R, 3) from the eye, -1 for none, and the weights of its corners (R, 3)."""
        a, b, c = (surface.vertices.double()[surface.faces] - self.eye).unbind(1)
        planes = torch.stack([torch.linalg.cross(*pair) for pair in ((b, c), (c, a), (a, b))])  # (3, M, 3)
        volume = (a * planes[0]).sum(1)
        faces, weights = [], []
        for part in rays.split(RAYS):
            inside = part @ planes.transpose(1, 2) * volume.sign()[:, None].T  # (3, R, M)
            reach = torch.where((inside >= 0).all(0), volume.abs() / inside.sum(0).clamp(min=1e-12), math.inf)
            least, face = reach.min(1)
            chosen = inside[:, torch.arange(len(part)), face].T
            faces.append(torch.where(least.isfinite(), face, -1))
            weights.append(chosen / chosen.sum(1, keepdim=True))
        return torch.cat(faces), torch.cat(weights)

    def photograph(self, surface: Surface, texture: Tensor, height: int, width: int) -> Tensor:
        """(H, W, 4), each pixel the mean of four rays; the focal length counts the longer side."""
        low, high = self.placed(surface.vertices.double())[:, :2].aminmax(dim=0)
        row, column = torch.meshgrid(torch.arange(2 * height), torch.arange(2 * width), indexing="ij")
        side = 2 * max(height, width)
        places = torch.stack((column + 0.5 - width, height - row - 0.5), dim=2).double() / side
        near = ((places >= low) & (places <= high)).all(2)
        sight = torch.cat((places[near] / self.focal, torch.ones(int(near.sum()), 1, dtype=torch.float64)), dim=1)
        face, weights = self.hits(surface, sight @ self.axes)
        hit = face >= 0
        uvs = (surface.uvs.double()[surface.faces[face[hit]]] * weights[hit, :, None]).sum(1)
        colours = F.grid_sample(
            texture.double().movedim(2, 0)[None], uvs[None, None] * 2 - 1, padding_mode="border", align_corners=False
        )[0, :, 0].T
        seen = torch.zeros(len(face), 4, dtype=torch.float64)
        seen[hit] = F.pad(colours, (0, 1), value=1.0)
        samples = torch.zeros(2 * height, 2 * width, 4, dtype=torch.float64)
        samples[near] = seen
        small = F.avg_pool2d(samples.movedim(2, 0)[None], 2)[0].movedim(0, 2).float()
        return torch.cat((small[..., :3] / small[..., 3:].clamp(min=0.25), small[..., 3:]), dim=2)

    def cosines(self, surface: Surface) -> Tensor:
        """(T, T): cosine to the ray at each texel whose face is the first on it, or as near as the first; else 0."""
        texels = texels_of(surface, SIZE)
        rays, own = texels.place.double() - self.eye, texels.shown.face
        face, weights = self.hits(surface, rays)
        first = (surface.vertices.double()[surface.faces[face]] * weights[..., None]).sum(1) - self.eye
        seen = (face == own) | ((face >= 0) & (first.norm(dim=1) > rays.norm(dim=1) - 3e-3))
        cosine = -(F.normalize(rays, dim=1) * surface.face_normals.double()[own]).sum(1) * seen
        found = torch.zeros(SIZE * SIZE)
        found[texels.shown.pixel] = cosine.float()
        return found.view(SIZE, SIZE)


def detail(name: str, camera: tuple, height: int = 768, width: int = 768, moved: int = 0) -> tuple[float, float]:
    """Decibels of the texels that a photograph shows squarely, before and after it was projected.

    ``moved``: pixels by which the object was put to the right in the finished picture."""
    surface, texture, painted = known(name)
    pinhole = Pinhole.of(*camera, distance=camera[3] * 1.15 / WIDTH)
    picture = pinhole.photograph(surface, texture, height, width).roll(moved, 1)
    made = projected(surface, painted, [Reference(picture)])
    chosen = pinhole.cosines(surface) > 0.5
    return decibels(painted, texture, chosen), decibels(made.texture, texture, chosen)


def test_a_pose_sees_as_the_pinhole_camera_whose_line_of_sight_meets_the_pictures_middle():
    places = (torch.rand(64, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.5) * 0.6
    for azimuth, elevation, roll, focal, place in CAMERAS:
        pinhole, axis = Pinhole.of(azimuth, elevation, roll, focal, place, distance=2.2), (-0.1, 0.3)
        angles = (math.radians(angle) for angle in (azimuth, elevation, roll))
        middle = (place[0] + axis[0], place[1] + axis[1])
        pose = Pose(*angles, 1 / 2.2, math.log(focal / 2.2), *middle, axis)
        wanted, found = pinhole.placed(places), pose.placed(places)
        torch.testing.assert_close(found[:, :2] - torch.tensor(axis), wanted[:, :2])
        assert torch.equal(found[:, 2].argsort(), wanted[:, 2].argsort(descending=True))
        depth = pose.nearness(places) * wanted[:, 2]
        torch.testing.assert_close(depth, depth[:1].expand(64))
        ray = F.normalize(pinhole.eye - places, dim=1)
        torch.testing.assert_close(pose.rays(places), ray)


def test_a_camera_that_is_not_turned_sees_bit_for_bit_by_the_plain_formula():
    places = (torch.rand(64, 3, generator=torch.Generator().manual_seed(0)) - 0.5) * 0.6
    for azimuth, elevation, roll, focal, (right, up) in CAMERAS:
        for perspective, axis in ((1 / 2.2, (right, up)), (0.0, (-0.1, 0.3))):  # without perspective no turn is seen
            angles = math.radians(azimuth), math.radians(elevation), roll
            pose = Pose(*angles, perspective, math.log(focal), right, up, axis)
            axes = places.new_tensor(Camera(math.degrees(pose.azimuth), math.degrees(pose.elevation)).axes())
            near = 1 / (1 - perspective * (places @ axes[2]))
            x, y, z = (places @ axes.T * (near * math.exp(math.log(focal)))[:, None]).unbind(1)
            cosine, sine = math.cos(roll), math.sin(roll)
            seen = (cosine * x - sine * y + right, sine * x + cosine * y + up, z)
            assert pose.turn() == (0, 0)
            assert torch.equal(pose.nearness(places), near) and torch.equal(pose.placed(places), torch.stack(seen, 1))
            assert torch.equal(pose.rays(places), F.normalize(axes[2] - perspective * places, dim=1))


def test_a_part_of_a_picture_knows_the_pictures_middle():
    picture = torch.zeros(60, 200, 4)
    picture[10:30, 150:190] = 1
    crop, _, axis = cropped(picture, "front", 512)
    seen = (
        (crop[..., 3] > 0.5).nonzero().double().mean(0) + 0.5 - len(crop) / 2
    )  # of the object, from the part's middle
    assert axis == pytest.approx(((float(seen[1]) - 70) / len(crop), (-float(seen[0]) - 10) / len(crop)))


@pytest.mark.full
@pytest.mark.parametrize(("place", "moved"), [((0.25, -0.13), 0), ((0, 0), 160)], ids=["turned", "cropped"])
def test_a_photograph_whose_object_lies_off_its_middle_gives_its_detail(monkeypatch, place, moved):
    for tried in ("TURNS", "HEIGHTS"):
        monkeypatch.setattr(poses, tried, (0,))
    monkeypatch.setattr(poses, "STARTS", 1)
    before, after = detail("box", (8, 6, 3, 0.72, place), 240, 320, moved // 2)
    assert before < 24 and after >= 30, (before, after)


@pytest.mark.full
def test_forty_photographs_of_five_shapes_off_their_middle_give_their_detail():
    before, after = zip(*(detail(name, camera) for name in CASES for camera in CAMERAS), strict=True)
    assert max(before) <= 24 and sorted(after)[len(after) // 2] >= 30, after
