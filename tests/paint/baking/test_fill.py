"""Filling: the published vertex fill, and holes that close along the surface."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from anygpu.compat.errors import InputError, MissingPackageError
from anygpu.paint import texturing
from anygpu.paint.baking import fill
from anygpu.paint.baking.bake import Baked, BakeSettings, bake, texels_of
from anygpu.paint.baking.fill import filled, from_the_other_half, is_symmetric, pull_push, vertex_filled
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS, camera_table
from anygpu.paint.geometry.mesh import Surface
from paint.synthetic import errors, ideal_texture

from paint import rendered, synthetic


def published() -> Baked:
    """The published v2-0 bake, before filling."""
    stored = rendered.arrays("bake_v2_0")
    mask = stored["mask"] > 0
    return Baked(stored["merged"], mask.float(), mask, texels_of(rendered.surface(), rendered.SIZE, exact=True))


def test_exact_vertex_fill_equals_the_published_one():
    stored, baked = rendered.arrays("bake_v2_0"), published()
    texture, painted = vertex_filled(baked, rendered.surface(), exact=True)
    assert torch.equal(painted, stored["vertex_mask"] > 0)
    new = painted & ~baked.painted
    assert new.any()
    assert (texture - stored["vertex_inpainted"]).abs()[new].mean() <= 1e-3
    assert torch.equal(texture[~new], baked.texture[~new])


if find_spec("cv2"):

    def test_exact_fill_equals_the_published_texture():
        settings = BakeSettings(rendered.SIZE, rendered.SIZE, "scatter", exact=True)
        baked = bake(rendered.surface(), DEFAULT_VIEWS, rendered.pictures("view"), settings)
        texture = filled(baked, rendered.surface(), "opencv", exact=True)
        assert (texture - rendered.picture("bake_v2_0_final")).abs().mean() <= 5e-3


def holed(surface: Surface, size: int = 128) -> Baked:
    """The right colours, but for a round hole on the surface."""
    texels = texels_of(surface, size)
    texture = ideal_texture(texels)
    open_ = torch.zeros(size * size, dtype=torch.bool)
    centre = surface.vertices[surface.vertices.shape[0] // 2]
    open_[texels.shown.pixel] = (texels.place - centre).norm(dim=1) < 0.12
    painted = texels.covered & ~open_.view(size, size)
    return Baked(torch.where(painted[..., None], texture, 0), painted.float(), painted, texels)


def test_holes_close_along_the_surface():
    """A strip at the chart's left edge is open; across the seam, at the right edge, lies blue, beside it red."""
    surface = Surface.of(synthetic.torus(16, 64))
    texels = texels_of(surface, 128)
    columns = torch.arange(128).expand(128, 128)
    painted = texels.covered & (columns > 24)
    texture = torch.where((columns > 96)[..., None], torch.tensor([0.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 0.0]))
    baked = Baked(torch.where(painted[..., None], texture, 0), painted.float(), painted, texels)
    along, done = vertex_filled(baked, surface)
    assert torch.equal(done, texels.covered)
    row = along[64, texels.covered[64]][:, 2]
    assert row[0] > 0.85
    assert (row[:22].diff() <= 1e-4).all()
    assert pull_push(baked.texture, painted)[64, 4, 2] < 0.1, "the texture alone cannot know"


def test_a_hole_gets_the_colours_round_it():
    surface = Surface.of(synthetic.torus(48, 96))
    baked = holed(surface)
    hole = baked.texels.covered & ~baked.painted
    assert hole.sum() > 100
    assert errors(vertex_filled(baked, surface)[0], baked.texels, hole).mean() < 0.05


def lopsided(side: float) -> Surface:
    """A torus, whose right half is another's by ``side`` of its width."""
    mesh = synthetic.torus(16, 32)
    right = mesh.vertices[:, :1] > 0
    return Surface.of(replace(mesh, vertices=torch.where(right, mesh.vertices * (1 + side), mesh.vertices)))


def even(places):
    """Colours that are the same left and right."""
    return synthetic.waves(places * torch.tensor((0.0, 1.0, 1.0)))


SEEN = camera_table([90, 45], [0, 40], [1, 0.5])


@pytest.mark.full
def test_what_a_symmetric_mesh_hides_comes_from_its_other_half():
    surface, settings = lopsided(0.0), BakeSettings(128, 256)
    pictures = synthetic.photographs(surface, SEEN, 256, 256, even)
    baked = bake(surface, SEEN, pictures, settings)
    both = from_the_other_half(baked, surface, SEEN, pictures, settings)
    new = both.painted & ~baked.painted
    assert new.sum() > 0.15 * baked.texels.covered.sum()
    assert errors(both.texture, baked.texels, new, even).mean() < 0.02
    assert torch.equal(both.texture[baked.painted], baked.texture[baked.painted])
    texture = texturing.texture_of(synthetic.torus(16, 32), SEEN, pictures, None, settings)
    assert f"{both.share - baked.share:.1%} mirrored from its other half" in texture.notes[0]
    plain = errors(filled(baked, surface), baked.texels, new, even).mean()
    assert errors(texture.colour, baked.texels, new, even).mean() < plain / 2


def test_a_camera_of_no_weight_has_seen_nothing():
    surface, settings = lopsided(0.0), BakeSettings(64, 128)
    table = camera_table([90, 45, 270], [0, 40, 0], [1, 0.5, 0])  # the third is the first one's mirror image
    pictures = synthetic.photographs(surface, table, 64, 128, even)
    two, three = (bake(surface, each, pictures[: len(each)], settings) for each in (SEEN, table))
    mirrored = from_the_other_half(three, surface, table, pictures, settings)
    assert torch.equal(mirrored.texture, from_the_other_half(two, surface, SEEN, pictures[:2], settings).texture)


@pytest.mark.parametrize(("side", "same"), [(0.0, True), (0.005, True), (0.1, False)])
def test_symmetry_has_a_tolerance(side, same):
    assert is_symmetric(lopsided(side)) is same


def test_cameras_that_mirror_one_another_leave_the_bake_as_it_is():
    surface, settings = lopsided(0.0), BakeSettings(64, 128)
    pictures = synthetic.photographs(surface, DEFAULT_VIEWS, 64, 128)
    baked = bake(surface, DEFAULT_VIEWS, pictures, settings)
    assert from_the_other_half(baked, surface, DEFAULT_VIEWS, pictures, settings) is baked
    seen = bake(surface, SEEN, pictures[:2], exact := BakeSettings(64, 128, exact=True))
    assert from_the_other_half(seen, surface, SEEN, pictures[:2], exact) is seen


def test_every_texel_gets_a_colour_and_painted_ones_stay():
    surface = Surface.of(synthetic.torus())
    baked = holed(surface)
    texture = filled(baked, surface)
    assert torch.equal(texture[baked.painted], baked.texture[baked.painted])
    assert texture.amin() > 0.04
    assert texture.amax() < 0.96


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (64, 64), (33, 100)])
def test_pull_push_of_one_colour_is_that_colour(shape):
    painted = torch.zeros(shape, dtype=torch.bool)
    painted[-1, 0] = True
    texture = torch.where(painted[..., None], torch.tensor([0.25, 0.5, 0.75]), torch.zeros(3))
    assert torch.equal(pull_push(texture, painted), torch.tensor([0.25, 0.5, 0.75]).expand(*shape, 3))


def test_pull_push_takes_the_nearest_colours():
    painted = torch.zeros(64, 64, dtype=torch.bool)
    painted[:, :8] = painted[:, -8:] = True
    texture = torch.zeros(64, 64, 3)
    texture[:, -8:] = 1
    row = pull_push(texture, painted)[32, :, 0]
    assert row[:16].max() < 0.3
    assert row[-16:].min() > 0.7
    assert (row.diff() >= -1e-6).all()


def test_what_cannot_be_filled_is_refused():
    surface = rendered.surface()
    baked = published()
    with pytest.raises(InputError, match="fill method 'magic'"):
        filled(baked, surface, "magic")
    nothing = replace(baked, painted=torch.zeros_like(baked.painted))
    with pytest.raises(InputError, match="without one painted texel"):
        filled(nothing, surface)


def test_opencv_is_asked_for_by_name(monkeypatch):
    def absent(name):
        raise MissingPackageError(f"package {name!r}", expected="it", fix="Install it.")

    monkeypatch.setattr(fill, "imported", absent)
    with pytest.raises(MissingPackageError, match="cv2"):
        filled(published(), rendered.surface(), "opencv")
    assert filled(published(), rendered.surface()).isfinite().all()
