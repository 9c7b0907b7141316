"""MV-Adapter's frame: where the mesh lies, what its maps hold, and which view paints which side."""

import pytest
import torch
from anygpu.compat.errors import InputError
from anygpu.paint.baking.bake import BakeSettings, bake
from anygpu.paint.geometry.cameras import ADAPTER, ADAPTER_VIEWS, DEFAULT_VIEWS, CameraTable, camera_table, views_for
from anygpu.paint.geometry.mesh import Mesh, Surface, load_mesh
from anygpu.paint.geometry.views import rasterised, rendered_maps
from anygpu.paint.texturing import texture_of
from paint.shapes import box, sphere

from paint import synthetic

SIDES = {(0, 0, 1): 0, (1, 0, 0): 1, (0, 0, -1): 2, (-1, 0, 0): 3, (0, 1, 0): 4, (0, -1, 0): 5}


def grid(size):
    """The places (a, b) right and up of the pixel centres of a view 1.1 wide."""
    places = ((torch.arange(size, dtype=torch.float64) + 0.5) / size - 0.5) * 1.1
    return places[None].expand(size, size), -places[:, None].expand(size, size)


def axes(camera):
    return (torch.tensor(axis, dtype=torch.float64) for axis in camera.axes())


def in_map(places):
    return torch.stack((places[..., 0], -places[..., 2], places[..., 1]), dim=-1) + 0.5


@pytest.mark.full
def test_the_maps_of_a_ball_follow_the_formula():
    size, mesh = 96, sphere(128, 256)
    surface = Surface.of(Mesh(mesh.vertices * 0.31, mesh.faces, mesh.uvs), frame=ADAPTER)
    assert float(surface.vertices.abs().max()) == pytest.approx(0.5)
    maps = rendered_maps(surface, ADAPTER_VIEWS, size)
    a, b = grid(size)
    for index, camera in enumerate(ADAPTER_VIEWS):
        right, up, towards = axes(camera)
        inside = a**2 + b**2 < 0.48**2
        depth = (0.25 - a**2 - b**2).clamp(min=0).sqrt()
        wanted = in_map(a[..., None] * right + b[..., None] * up + depth[..., None] * towards)
        for found in (maps.position[index], maps.normal[index]):
            assert (found - wanted)[inside].abs().max() < 5e-3, camera
            assert (found - wanted)[inside].abs().mean() < 5e-4, camera
        outside = a**2 + b**2 > 0.51**2
        assert maps.position[index][outside].eq(0.5).all() and maps.normal[index][outside].eq(0.5).all()
        assert not maps.mask[index][outside].any() and maps.mask[index][inside].all()
    lengths = (maps.normal - 0.5)[maps.mask].norm(dim=-1)
    assert (lengths - 0.5).abs().max() < 1e-5


def test_a_box_off_centre_stays_where_it_is_and_is_exact_on_its_flat_faces():
    size, mesh = 64, box(0.4, 0.5, 0.6)
    moved = mesh.vertices + torch.tensor([0.15, -0.2, 0.05])
    surface = Surface.of(Mesh(moved, mesh.faces, mesh.uvs), frame=ADAPTER)
    scale = 0.5 / float(moved.abs().max())
    assert torch.allclose(surface.vertices, moved * scale, atol=1e-6) and surface.centre.tolist() == [0, 0, 0]
    assert any("beside the origin" in note for note in surface.notes)
    maps = rendered_maps(surface, ADAPTER_VIEWS, size, flat=True)
    a, b = grid(size)
    for index, camera in enumerate(ADAPTER_VIEWS):
        right, up, towards = axes(camera)
        depth = (surface.vertices.double() @ towards).max()
        wanted = in_map(a[..., None] * right + b[..., None] * up + depth * towards)
        assert (maps.position[index] - wanted)[maps.mask[index]].abs().max() < 1e-5
        normal = in_map(towards / 2)
        assert (maps.normal[index] - normal)[maps.mask[index]].abs().max() < 1e-5


def test_a_vertex_normal_is_weighted_by_the_angle_of_its_faces():
    """A box cut into unequal triangles: one side counts as much as another, whatever its triangles."""
    corners = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0.5, 0.5, 0]])
    faces = torch.tensor([[0, 4, 1], [0, 2, 4], [0, 1, 3], [0, 3, 2]])  # two of the ground, one of each wall
    by_angle = Surface.of(Mesh(corners, faces), frame=ADAPTER).vertex_normals[0]
    assert torch.allclose(by_angle, torch.full((3,), -(3**-0.5)), atol=1e-5)
    plain = Surface.of(Mesh(corners, faces)).vertex_normals[0]
    assert plain[2] < plain[0] - 0.2


@pytest.mark.full
def test_each_side_is_painted_by_its_own_view():
    colours = torch.rand(6, 3, generator=torch.Generator().manual_seed(1))
    pictures = colours[:, None, None].expand(6, 32, 32, 3)
    surface = Surface.of(box(), frame=ADAPTER)
    baked = bake(surface, ADAPTER_VIEWS, pictures, BakeSettings(128, 256))
    normals = surface.face_normals[baked.texels.shown.face].round().int().tolist()
    wanted = torch.zeros(128 * 128, 3)
    wanted[baked.texels.shown.pixel] = colours[[SIDES[tuple(normal)] for normal in normals]]
    sure = baked.painted & baked.texels.covered
    assert sure.sum() > 0.99 * baked.texels.covered.sum()
    assert torch.allclose(baked.texture[sure], wanted.view(128, 128, 3)[sure], atol=1e-6)


@pytest.mark.full
def test_what_the_views_see_comes_back_to_its_place():
    """Nothing is swapped, mirrored or upside down: a coloured ball photographed and baked has its own colours again."""
    mesh, size = sphere(64, 128), 256
    surface = Surface.of(mesh, frame=ADAPTER)
    pictures = []
    for camera in ADAPTER_VIEWS:
        view = rasterised(surface, camera, size, ADAPTER_VIEWS.ortho_scale, pixel_centres=True)
        pictures.append(view.image(synthetic.waves(view.shown.interpolated(surface.vertices, surface.faces)), 0.5))
    baked = bake(surface, ADAPTER_VIEWS, torch.stack(pictures), BakeSettings(128, 256))
    # half a pixel aside, as the other frame's rule would have it, the error is 3e-4
    assert synthetic.errors(baked.texture, baked.texels, baked.painted).mean() < 1e-4
    texture = texture_of(mesh, ADAPTER_VIEWS, torch.stack(pictures), settings=BakeSettings(128, 256))
    assert torch.equal(texture.painted, baked.painted), "the table's own frame is used"


def test_no_view_of_the_six_is_skipped_and_each_counts_alike():
    assert {camera.weight for camera in ADAPTER_VIEWS} == {1.0} and not ADAPTER.skips and ADAPTER.exponent == 3
    surface, pictures = Surface.of(box(), frame=ADAPTER), torch.rand(6, 32, 32, 3)
    twice = CameraTable((*ADAPTER_VIEWS, *ADAPTER_VIEWS), ADAPTER_VIEWS.ortho_scale, ADAPTER)
    assert not [
        note
        for note in bake(surface, twice, pictures.repeat(2, 1, 1, 1), BakeSettings(64, 128)).notes
        if "skipped" in note
    ]


@pytest.mark.parametrize(
    ("family", "cameras"),
    [
        ("mv_adapter", DEFAULT_VIEWS),
        ("mv_adapter", camera_table([0, 90], [0], [1])),
        ("paint", ADAPTER_VIEWS),
        ("paint_pbr", ADAPTER_VIEWS),
    ],
)
def test_cameras_of_another_family_are_refused(family, cameras):
    with pytest.raises(InputError, match="cameras of another family"):
        views_for(family, cameras)
    assert views_for(family, None) is (ADAPTER_VIEWS if family == "mv_adapter" else DEFAULT_VIEWS)
    assert views_for(None, cameras) is cameras


def test_the_normals_of_a_file_are_taken_and_split_vertices_stay_split(tmp_path):
    trimesh, mesh = pytest.importorskip("trimesh"), sphere(6, 8)
    own = torch.nn.functional.normalize(
        torch.randn(*mesh.vertices.shape, generator=torch.Generator().manual_seed(2)), dim=1
    )
    ball = trimesh.Trimesh(mesh.vertices.numpy(), mesh.faces.numpy(), vertex_normals=own.numpy(), process=False)
    turned = torch.tensor([[0.0, 0, 2], [0, 1, 0], [1, 0, 0]])  # mirrored and stretched
    scene = trimesh.Scene()
    for place in (torch.eye(3), turned):
        whole = torch.eye(4)
        whole[:3, :3] = place
        scene.add_geometry(ball, transform=whole.numpy())
    (tmp_path / "two.glb").write_bytes(scene.export(file_type="glb", include_normals=True))
    found, _ = load_mesh(tmp_path / "two.glb")
    wanted = [own, torch.nn.functional.normalize(own @ turned.inverse(), dim=1)]
    if not torch.equal(found.vertices[: len(own)].float(), mesh.vertices):  # trimesh may write them in another order
        wanted.reverse()
    assert torch.allclose(found.normals.float(), torch.cat(wanted), atol=1e-6)
    assert torch.equal(Surface.of(found, frame=ADAPTER).vertex_normals, found.normals.float())
    plain = Mesh(found.vertices, found.faces, found.uvs)
    assert torch.equal(Surface.of(found).vertex_normals, Surface.of(plain).vertex_normals), "Hunyuan3D's are its own"
    some = found.normals.clone()
    some[:8], some[8] = 0, float("nan")
    kept = Surface.of(Mesh(found.vertices, found.faces, normals=some), frame=ADAPTER).vertex_normals
    assert torch.equal(kept[:9], Surface.of(plain, frame=ADAPTER).vertex_normals[:9]) and torch.equal(
        kept[9:], some[9:].float()
    )
    (tmp_path / "none.obj").write_text("v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 3\n")
    assert load_mesh(tmp_path / "none.obj")[0].normals is None
