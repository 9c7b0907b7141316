"""Maps equal the published ones, and the PBR model's views are chosen greedily."""

from functools import partial

import pytest
import torch
from anygpu.compat.errors import InputError
from anygpu.paint.geometry import views
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS, Camera
from anygpu.paint.geometry.mesh import Mesh, Surface
from anygpu.paint.geometry.raster import face_ids
from anygpu.paint.geometry.views import SELECTION_STEPS, chosen_views, on_screen, rasterised, rendered_maps
from paint.shapes import box

from paint import rendered, synthetic

STEP = 1.001 / 255  # one level of 8 bits


@pytest.mark.parametrize(("name", "flat"), [("normal", False), ("normal_flat", True)])
def test_maps_equal_the_published_ones(name, flat):
    maps = rendered_maps(rendered.surface(), size=rendered.SIZE, flat=flat)
    for found, stored in ((maps.normal, name), (maps.position, "position")):
        expected = rendered.pictures(stored)
        off = (found - expected).abs().amax(-1) > STEP
        assert off.float().mean() <= 5e-4, stored  # pixels on an edge between faces
        assert (found - expected).abs().mean() <= 1e-5, stored
    assert torch.equal(maps.mask, rendered.arrays("raster")["face_id_plus_1"] > 0)
    assert maps.position[~maps.mask].eq(1).all()
    assert torch.equal((maps.normal * 255).round() / 255, maps.normal)


def test_a_view_names_depth_towards_the_camera():
    surface = Surface.of(box(2, 2, 1))
    view = rasterised(surface, Camera(0, 0), 64)
    assert view.depth.max() == pytest.approx(float(surface.vertices[:, 2].max()), abs=1e-6)
    assert view.image(view.depth, background=-9).min() == -9


def test_corners_of_the_picture_are_pixel_centres():
    corner = torch.tensor([[-0.6, 0.6, 0.0], [0.6, -0.6, 0.0]])
    torch.testing.assert_close(on_screen(corner, Camera(0, 0), 512)[:, :2], torch.tensor([[0.0, 0.0], [511.0, 511.0]]))


def test_a_size_out_of_range_is_refused():
    for size in (8, 8193):
        with pytest.raises(InputError, match=f"view size {size}"):
            rendered_maps(rendered.surface(), size=size)


def test_greedy_views_end_when_nothing_is_added():
    table, seen = chosen_views(Surface.of(box()), 12, size=128)
    assert table == DEFAULT_VIEWS
    assert seen == pytest.approx(1)


def shielded() -> Surface:
    """A cube with a plate floating before each side: only slanted views look behind the plates."""
    cube, vertices, faces = box(), [], []
    plates = [(axis, side) for axis in range(3) for side in (-1.3, 1.3)]
    for index, (axis, side) in enumerate([(0, 0.0), *plates]):
        size, move = torch.ones(3), torch.zeros(3)
        if side:
            size[axis], move[axis] = 0.05, side
        vertices.append(cube.vertices * size + move)
        faces.append(cube.faces + 24 * index)
    return Surface.of(Mesh(torch.cat(vertices), torch.cat(faces)))


def test_greedy_views_take_the_view_that_adds_most():
    surface = shielded()
    table, seen = chosen_views(surface, 9, size=128)
    areas = surface.areas() / surface.areas().sum()

    def shows(camera: Camera) -> set[int]:
        screen = on_screen(surface.vertices, camera, 128)
        return set(face_ids(screen, surface.faces, 128, 128, steps=SELECTION_STEPS).unique().tolist()) - {-1}

    assert len(table) > 6
    known = set().union(*(shows(camera) for camera in DEFAULT_VIEWS))
    for camera in table.cameras[6:]:
        gains = {other: float(areas[sorted(shows(other) - known)].sum()) for other in views.RING_VIEWS}
        assert gains[camera] == pytest.approx(max(gains.values()), abs=1e-6)
        assert gains[camera] > views.ENOUGH
        known |= shows(camera)
    assert seen == pytest.approx(float(areas[sorted(known)].sum()), abs=1e-5)


def ring_with_pieces(seed: int) -> Surface:
    """A bumpy ring with six small rings flying about."""
    generator = torch.Generator().manual_seed(seed)
    base, piece = synthetic.torus(24, 48), synthetic.torus(8, 12)
    vertices = [base.vertices * (1 + 0.35 * torch.rand(len(base.vertices), 1, generator=generator))]
    faces = [base.faces]
    for _ in range(6):
        faces.append(piece.faces + sum(map(len, vertices)))
        vertices.append(piece.vertices * 0.25 + torch.randn(3, generator=generator) * 0.8)
    return Surface.of(Mesh(torch.cat(vertices), torch.cat(faces)))


@pytest.mark.full
@pytest.mark.parametrize(
    ("surface", "published"),
    [
        (rendered.surface, []),
        (shielded, [(30, 20), (30, -20)]),
        (partial(ring_with_pieces, 0), [(270, 20), (120, -20)]),
        (partial(ring_with_pieces, 1), [(240, -20)]),
        (partial(ring_with_pieces, 2), [(60, -20), (330, 20)]),
        (partial(ring_with_pieces, 3), [(120, 20), (270, -20), (30, -20)]),
    ],
)
def test_greedy_views_are_those_of_the_published_code(surface, published):
    """At its size. ``published``: what tencent/Hunyuan3D-2.1's ``bake_view_selection`` chose on its CPU rasteriser."""
    table, _ = chosen_views(surface(), 12)
    assert [(camera.azimuth, camera.elevation) for camera in table.cameras[6:]] == published


def test_greedy_views_within_their_limits():
    surface = Surface.of(box())
    assert chosen_views(surface, 6, size=64)[0] == DEFAULT_VIEWS
    for most in (5, 13):
        with pytest.raises(InputError, match="max_views"):
            chosen_views(surface, most, size=64)
