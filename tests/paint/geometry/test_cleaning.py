"""What cleaning takes out of a mesh, and what it leaves alone."""

from dataclasses import replace

import pytest
import torch
from anygpu.compat.errors import InputError
from anygpu.paint.geometry.cleaning import CleanSettings, cleaned, pieces_of
from anygpu.paint.geometry.mesh import Mesh, Surface
from paint.shapes import box
from paint.synthetic import torus

PLAIN = CleanSettings(floaters=0.0)


def joined(*meshes: Mesh) -> Mesh:
    """Several meshes as one, beside one another."""
    starts = torch.tensor([0, *[len(mesh.vertices) for mesh in meshes]]).cumsum(0)
    apart = [mesh.vertices + torch.tensor((10.0 * index, 0, 0)) for index, mesh in enumerate(meshes)]
    faces = [mesh.faces + start for mesh, start in zip(meshes, starts.tolist(), strict=False)]
    return Mesh(torch.cat(apart), torch.cat(faces), torch.cat([mesh.uvs for mesh in meshes]))


def changed(mesh: Mesh, faces: list[list[int]] | None = None, vertices: list[list[float]] | None = None) -> Mesh:
    """A mesh with more faces and vertices."""
    more = torch.tensor(vertices or []).reshape(-1, 3)
    uvs = torch.cat((mesh.uvs, torch.zeros(len(more), 2)))
    extra = torch.tensor(faces or [], dtype=torch.long).reshape(-1, 3)
    return Mesh(torch.cat((mesh.vertices, more)), torch.cat((mesh.faces, extra)), uvs)


def test_a_clean_mesh_comes_back_bit_for_bit():
    mesh = torus(8, 16)
    found, notes = cleaned(mesh)
    assert torch.equal(found.vertices[found.faces], mesh.vertices[mesh.faces])
    assert torch.equal(found.uvs[found.faces], mesh.uvs[mesh.faces])
    assert notes == ()


def test_small_loose_pieces_go_and_the_largest_stays():
    mesh = joined(torus(32, 64), box())  # 4096 faces and 12: below 0.5 %
    mesh = replace(mesh, normals=mesh.vertices + 1)
    found, notes = cleaned(mesh)
    assert len(found.faces) == 4096 and torch.equal(found.normals, found.vertices + 1)
    assert "1 loose pieces removed" in notes
    assert len(cleaned(mesh, PLAIN)[0].faces) == 4108
    assert len(cleaned(mesh, CleanSettings(floaters=1.0))[0].faces) == 4096


def test_pieces_hang_together_across_the_seams_of_uvs():
    assert pieces_of(box().vertices.double(), box().faces).unique().numel() == 1, "six charts, one box"
    three = joined(box(), torus(4, 8), box())
    assert pieces_of(three.vertices.double(), three.faces).unique().numel() == 3


def test_a_chain_of_faces_in_any_order_is_one_piece():
    order = torch.randperm(199, generator=torch.Generator().manual_seed(0))
    faces = torch.stack((torch.arange(199), torch.arange(1, 200), torch.arange(2, 201)), 1)[order]
    places = torch.stack((torch.arange(201.0), torch.arange(201.0) % 2, torch.zeros(201)), 1).double()
    assert pieces_of(places, faces).unique().numel() == 1


@pytest.mark.parametrize(
    ("faces", "said"),
    [
        ([[0, 0, 1]], "1 faces without area removed"),
        ([[0, 1, 2], [2, 0, 1], [1, 0, 2]], "3 faces that were duplicates removed"),
    ],
)
def test_faces_that_show_nothing_go(faces, said):
    found, notes = cleaned(changed(box(), faces), PLAIN)
    assert torch.equal(found.faces, box().faces)
    assert said in notes


def test_broken_corners_go_with_their_faces_and_what_is_left_can_be_painted():
    count = len(box().vertices)
    broken = changed(box(), [[0, 1, count], [0, 2, count + 1]], [[float("nan"), 0, 0], [0, float("inf"), 0]])
    with pytest.raises(InputError, match="2 of 26 vertices are NaN or infinite"):
        Surface.of(broken)
    found, notes = cleaned(broken, PLAIN)
    assert len(Surface.of(found).faces) == 12
    assert "2 faces with a NaN or infinite corner removed" in notes
    assert "2 unused vertices removed" in notes
    two = joined(torus(32, 64), box())
    two = changed(two, [[0, 1, len(two.vertices)]], [[0, float("inf"), 0]])
    assert "1 loose pieces removed" in cleaned(two)[1], "one far vertex puts not all others into one place"
    with pytest.raises(InputError, match="NaN"):
        Surface.of(cleaned(broken, CleanSettings(0.0, True, False))[0])


def test_tiny_and_far_meshes_lose_nothing():
    for scale, shift in ((1e-6, 0.0), (1.0, 1e6)):
        mesh = torus(8, 16)
        moved = Mesh(mesh.vertices.double() * scale + shift, mesh.faces, mesh.uvs)
        assert len(cleaned(moved)[0].faces) == len(mesh.faces)


def test_nothing_left_and_wrong_shares_are_one_line():
    flat = Mesh(torch.zeros(3, 3), torch.tensor([[0, 1, 2]]))
    with pytest.raises(InputError, match="all broken or without area"):
        cleaned(flat)
    with pytest.raises(InputError, match=r"floaters 1.5; expected 0 to 1 of all faces"):
        cleaned(box(), CleanSettings(floaters=1.5))
