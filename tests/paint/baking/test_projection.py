"""The detail of pictures on a texture: where they show the surface, nowhere else, and without a seam."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from anygpu.compat.errors import InputError
from anygpu.paint import texturing
from anygpu.paint.baking import projection
from anygpu.paint.baking.bake import BakeSettings, bake, gathered, grown, texels_of
from anygpu.paint.baking.fill import filled, pull_push
from anygpu.paint.baking.projection import Projected, Reference, cropped, projected
from anygpu.paint.demo import ring
from anygpu.paint.geometry import pose as poses
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS, camera_table
from anygpu.paint.geometry.mesh import Mesh, Surface
from anygpu.paint.geometry.pose import Found, Pose, found_pose, posed_view
from anygpu.paint.geometry.turntable import looked_up
from paint.shapes import box, sphere
from torch import Tensor

SIZE = 256  # of textures
PICTURE = 512
OFFSETS = (0.02, -0.02, 0.02, -0.02, 0.02, -0.02)  # in brightness of one painted view and the next
CASES = {  # azimuth, elevation, roll, perspective: as far as 15 degrees off; lenses from far to wide
    "bumps": (15, 0, 0, 0.5),
    "pear": (-12, 10, 4, 0.3),
    "chair": (8, -15, 5, 0.8),
    "ring": (-15, 15, -5, 0.1),
    "box": (10, 8, -3, 0.0),
}
FAST = ("pear", "box")  # a round shape through a lens, and flat sides without perspective
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.full) for name in CASES]


def joined(*parts: tuple[Mesh, tuple[float, float, float]]) -> Mesh:
    """Four meshes, each moved, in the quarters of one texture."""
    vertices, faces, uvs, count = [], [], [], 0
    for number, (mesh, offset) in enumerate(parts):
        vertices.append(mesh.vertices + torch.tensor(offset))
        faces.append(mesh.faces + count)
        uvs.append((mesh.uvs + torch.tensor((float(number % 2), float(number // 2)))) / 2)
        count += len(mesh.vertices)
    return Mesh(torch.cat(vertices), torch.cat(faces), torch.cat(uvs))


def shape(name: str) -> Mesh:
    ball = sphere(24, 48)
    x, y, z = ball.vertices.unbind(1)
    if name == "bumps":
        reach = 1 + 0.25 * (3 * x + 1).sin() * (2 * y).cos() + 0.2 * (4 * y + z).sin()
        return replace(ball, vertices=ball.vertices * reach[:, None])
    if name == "pear":
        reach = 1 - 0.35 * y + 0.3 * x.clamp(min=0) ** 2
        return replace(ball, vertices=ball.vertices * reach[:, None] * torch.tensor((1.0, 1.3, 0.8)))
    if name == "chair":
        legs = ((box(0.3, 1.2, 0.3), (-0.8, -0.7, 0.8)), (box(0.5, 1.2, 0.3), (0.7, -0.7, 0.7)))
        return joined((box(2, 0.3, 2), (0, 0, 0)), (box(2, 2, 0.3), (0, 1.1, -0.85)), *legs)
    return ring() if name == "ring" else box(1.2, 2.0, 0.8)


@cache
def known(name: str) -> tuple[Surface, Tensor, Tensor]:
    """A surface, its texture in high detail, and the texture that six small views of it make."""
    surface, _ = Surface.of(shape(name)).with_uvs()
    texels = texels_of(surface, SIZE)
    place = texels.place
    soft = (place @ place.new_tensor(((7.0, 3, 1), (-2, 6, 3), (3, -4, 6))).T + place.new_tensor((0.3, 1.1, 2.3))).sin()
    fine = (place @ place.new_tensor(((60.0, 25, 10), (-20, 55, 30), (25, -40, 50))).T).sin()
    texture = torch.zeros(SIZE * SIZE, 3)
    texture[texels.shown.pixel] = 0.5 + 0.25 * soft + 0.15 * fine
    texture = pull_push(texture.view(SIZE, SIZE, 3), texels.covered)
    views = [photograph(surface, texture, flat_pose(camera.azimuth, camera.elevation), 24) for camera in DEFAULT_VIEWS]
    views = torch.stack([view[..., :3] + offset for view, offset in zip(views, OFFSETS, strict=True)])
    return surface, texture, filled(bake(surface, DEFAULT_VIEWS, views, BakeSettings(SIZE, 256)), surface)


def flat_pose(azimuth: float, elevation: float) -> Pose:
    return Pose(math.radians(azimuth), math.radians(elevation), scale=-math.log(DEFAULT_VIEWS.ortho_scale))


def pose_of(azimuth: float, elevation: float, roll: float, perspective: float) -> Pose:
    angles = (math.radians(angle) for angle in (azimuth, elevation, roll))
    return Pose(*angles, perspective=perspective, scale=math.log(0.65), right=0.03, up=-0.02)


def photograph(surface: Surface, texture: Tensor, pose: Pose, size: int = PICTURE) -> Tensor:
    """(S, S, 4): what a camera sees, each pixel the mean of four."""
    _, view, shown = posed_view(surface, pose, 2 * size)
    colours = looked_up(texture, shown.interpolated(surface.uvs, surface.faces))
    large = view.image(torch.cat((colours, torch.ones_like(colours[:, :1])), dim=1))
    small = F.avg_pool2d(large.movedim(-1, 0)[None], 2)[0].movedim(0, -1)
    return torch.cat((small[..., :3] / small[..., 3:].clamp(min=0.25), small[..., 3:]), dim=-1)


def cosines(surface: Surface, pose: Pose) -> Tensor:
    """(T, T): cosine to the ray at each texel that a camera sees, 0 elsewhere."""
    texels = texels_of(surface, SIZE)
    mapped, view, _ = posed_view(surface, pose, 1024)
    placed = replace(texels, place=pose.placed(texels.place))
    seen = gathered(mapped, view, torch.zeros(1024, 1024, 3), placed, exact=False)[1]
    found = torch.zeros(SIZE * SIZE)
    found[texels.shown.pixel] = (pose.rays(texels.place) * surface.face_normals[texels.shown.face]).sum(1)
    return found.view(SIZE, SIZE) * (seen > 0)


def decibels(found: Tensor, wanted: Tensor, chosen: Tensor) -> float:
    return float(-10 * (found - wanted)[chosen].square().mean().log10())


@cache
def made(name: str) -> tuple[Tensor, Projected, Tensor, Found]:
    """A case's picture, what projection made of it, the cosines of its camera, and the camera that was found."""
    surface, texture, painted = known(name)
    pose = pose_of(*CASES[name])
    picture = photograph(surface, texture, pose)
    part, _, axis = cropped(picture, "front", 4 * SIZE)
    found = found_pose(surface, painted, part, (0, 0), axis=axis)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(projection, "found_pose", lambda *_, **__: found)
        return picture, projected(surface, painted, [Reference(picture)]), cosines(surface, pose), found


@pytest.mark.parametrize("names", [FAST[:1], pytest.param(tuple(CASES), marks=pytest.mark.full)], ids=["one", "five"])
def test_shapes_get_the_detail_of_a_picture_from_an_unknown_camera(names):
    """Cameras off by up to 15 degrees, rolled, of focal lengths from infinite to a wide lens."""
    before, after = [], []
    for name in names:
        _, texture, painted = known(name)
        _, result, cosine, _ = made(name)
        chosen = cosine > 0.5
        before.append(decibels(painted, texture, chosen))
        after.append(decibels(result.texture, texture, chosen))
    assert sorted(after)[len(names) // 2] >= 30, after
    assert min(after) >= 27 and max(before) <= 24, (before, after)


@pytest.mark.parametrize("name", NAMES)
def test_texels_that_the_picture_does_not_show_squarely_stay_bit_for_bit(name):
    surface, _, painted = known(name)
    _, result, cosine, _ = made(name)
    covered = texels_of(surface, SIZE).covered
    # the found camera is off by a fraction of a degree: whoever is a hair's breadth from the limits may fall either way
    near = grown(cosine > 0.49, 1)
    assert torch.equal(result.texture[covered & ~near], painted[covered & ~near])
    assert torch.equal(result.texture[covered & (result.weight == 0)], painted[covered & (result.weight == 0)])
    assert ((result.weight > 0) & (cosine <= 0.5)).sum() <= 0.002 * covered.sum()
    assert result.weight[cosine > 0.5].mean() > 0.85
    margin = grown(result.weight > 0, 4) | covered
    assert torch.equal(result.texture[~margin], painted[~margin])


@pytest.mark.parametrize("name", NAMES[:-1])  # of the box whole sides are shown
def test_a_brighter_picture_leaves_no_seam_above_that_of_the_painted_views(name, monkeypatch):
    surface, _, painted = known(name)
    picture, plain, _, found = made(name)
    picture = torch.cat((picture[..., :3] * 0.95 + 0.08, picture[..., 3:]), dim=-1)
    monkeypatch.setattr(projection, "found_pose", lambda *_, **__: found)
    result = projected(surface, painted, [Reference(picture)])
    changed, covered = result.weight > 0, texels_of(surface, SIZE).covered
    edge = changed & grown(covered & ~changed, 1)
    middle = changed & ~grown(covered & ~changed, 16)
    light = result.texture - plain.texture
    assert light[middle].mean() > 0.03, "the picture's own light"
    assert edge.any() and light[edge].mean(0).abs().max() <= (max(OFFSETS) - min(OFFSETS)) / 2, "fades out"


def test_a_picture_of_another_shape_changes_nothing_and_says_so():
    surface, _, painted = known("box")
    other, texture, _ = known("ring")
    result = projected(surface, painted, [Reference(photograph(other, texture, pose_of(0, 0, 0, 0.3)), "back", 180)])
    assert torch.equal(result.texture, painted) and not result.weight.any()
    line = result.notes[-1]
    assert line.startswith("back: the picture's outline covers ") and line.endswith("the texture is left as it is")


@pytest.mark.full
def test_colours_that_contradict_the_texture_are_left_out(monkeypatch):
    surface, _, painted = known("pear")
    picture, whole, _, found = made("pear")
    picture = picture.clone()
    picture[: int(0.4 * PICTURE), :, :3] = torch.tensor((0.0, 1.0, 0.0))
    monkeypatch.setattr(projection, "found_pose", lambda *_, **__: found)
    result = projected(surface, painted, [Reference(picture)])
    texels, height = texels_of(surface, SIZE), torch.zeros(SIZE * SIZE)
    height[texels.shown.pixel] = texels.place[:, 1]
    height = torch.where(whole.weight == 1, height.view(SIZE, SIZE), 0)
    assert result.weight[height > 0.3].mean() < 0.05
    assert result.weight[height < -0.3].mean() > 0.8


def test_several_pictures_have_their_places_and_a_plain_background_is_enough(monkeypatch):
    for tried in ("TURNS", "HEIGHTS"):
        monkeypatch.setattr(poses, tried, (0,))  # a picture's own place alone
    surface, texture, painted = known("pear")
    cameras = pose_of(3, 0, 0, 0.2), pose_of(95, 4, 0, 0.2)
    front, right = (photograph(surface, texture, pose) for pose in cameras)
    plain = front[..., :3] * front[..., 3:] + torch.tensor((0.1, 0.9, 0.2)) * (1 - front[..., 3:])
    both = texturing.with_detail(shape("pear"), painted, {"right": [right], "front": [plain]})
    assert [note.partition(":")[0] for note in both.notes[-2:]] == ["front", "right"]
    for pose in cameras:
        assert decibels(both.texture, texture, cosines(surface, pose) > 0.5) >= 29
    with pytest.raises(InputError, match="0 pictures to project"):
        texturing.with_detail(shape("pear"), painted, {})
    with pytest.raises(InputError, match="1 pictures to project for 2 cameras"):
        texturing.with_detail(shape("pear"), painted, {"front": [front]}, camera_table([0, 90], [0], [1]))


def test_a_given_direction_is_kept():
    surface, texture, painted = known("ring")
    picture = photograph(surface, texture, pose_of(12, 5, 0, 0.2))
    found = found_pose(surface, painted, cropped(picture, "front", 512)[0], (9, 5), given=True)
    assert (found.pose.azimuth, found.pose.elevation) == (math.radians(9), math.radians(5))


def test_a_picture_that_the_mesh_does_not_reach_tells_nothing_of_colours():
    surface, texture, _ = known("pear")
    search = poses._PoseSearch.of(surface, texture, photograph(surface, texture, flat_pose(0, 0)))
    near, far = (search.compared(replace(flat_pose(0, 0), right=right), poses.COARSE) for right in (0.0, 0.95))
    assert near.mismatch < 0.1 and (far.overlap, far.mismatch) == (0.0, 1.0), (near, far)


def test_what_cannot_be_projected_is_one_line():
    surface, _, painted = known("pear")
    with pytest.raises(InputError, match=r"a texture of shape \(256, 128, 3\)"):
        projected(surface, painted[:, :128], [])
    for picture in (torch.rand(32, 32, 3), torch.zeros(32, 32, 3), torch.zeros(32, 32, 4), torch.ones(32, 32, 4)):
        with pytest.raises(InputError, match="a left picture whose object has no outline"):
            cropped(picture, "left", 64)


def test_a_wide_picture_is_cut_to_its_object():
    picture = torch.zeros(40, 200, 4)
    picture[10:30, 150:190] = 1
    crop, whole, _ = cropped(picture, "front", 512)
    assert crop.shape[0] == crop.shape[1] and crop[..., 3].sum() == 20 * 40 and whole
    assert cropped(picture, "front", 20)[0].shape == (20, 20, 4)
    for part in (picture[:30], picture[10:], picture[:, :190], picture[:, 150:]):
        assert not cropped(part, "front", 512)[1]


def test_specks_beside_the_object_and_alpha_that_hides_nothing_do_not_count():
    picture = torch.zeros(40, 200, 4)
    picture[10:30, 150:190] = 1
    picture[20, 170, 3] = 0
    wanted, opaque = cropped(picture, "front", 512)[0], torch.ones(40, 200, 1)
    solid = torch.cat((picture[..., :3], opaque), dim=-1)
    assert torch.equal(cropped(solid, "front", 512)[0][..., :3], wanted[..., :3])
    picture[0, 0], picture[30:32, 2:4], picture[36, 180] = 1, 1, 1
    crop, whole, _ = cropped(picture, "front", 512)
    assert whole and torch.equal(crop[..., 3], wanted[..., 3])
    picture[30:40, 2:4] = 1  # a piece of its own
    assert cropped(picture, "front", 512)[0].shape[1] > 180


@pytest.mark.full
def test_a_mesh_whose_faces_are_turned_inside_out_gets_the_same_detail(monkeypatch):
    surface, texture, painted = known("box")
    picture, mesh = photograph(surface, texture, pose_of(*CASES["box"])), shape("box")
    search = poses._PoseSearch.of(surface, painted, cropped(picture, "front", 4 * SIZE)[0])
    found = Found(search.fitted(pose_of(*CASES["box"])), overlap=1.0, mismatch=0.0)
    monkeypatch.setattr(projection, "found_pose", lambda *_, **__: found)
    monkeypatch.setattr(projection, "SIZES", (512, 1024))
    inside_out, _ = Surface.of(replace(mesh, faces=mesh.faces.flip(1))).with_uvs()
    wanted, result = (projected(each, painted, [Reference(picture)]) for each in (surface, inside_out))
    assert wanted.weight.mean() > 0.1
    torch.testing.assert_close(result.weight, wanted.weight, atol=1e-3, rtol=0)


def test_a_picture_that_cuts_the_object_is_held_against_more_of_the_outline(monkeypatch):
    surface, _, painted = known("pear")
    picture, _, _, found = made("pear")
    columns = (picture[..., 3] > 0.5).any(0).nonzero()[:, 0]
    monkeypatch.setattr(projection, "found_pose", lambda *_, **__: replace(found, overlap=0.96))
    part = picture[:, : int(columns[-1]) - 40]
    result = projected(surface, painted, [Reference(part)])
    assert torch.equal(result.texture, painted)
    assert result.notes[-1].startswith(
        "front: the object reaches the picture's edge, and the picture's outline covers "
    )
    assert projected(surface, painted, [Reference(picture)]).weight.any()
