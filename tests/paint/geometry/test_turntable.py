"""The turntable shows the texture where it belongs."""

import pytest
import torch
from anygpu.compat.errors import InputError, UnsupportedError
from anygpu.paint.baking.bake import BakeSettings, bake, texels_of
from anygpu.paint.baking.fill import filled
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS
from anygpu.paint.geometry.mesh import Mesh, Surface
from anygpu.paint.geometry.turntable import film, looked_up, turntable
from paint.shapes import box, sphere
from paint.synthetic import ideal_texture

from paint import synthetic

SIDES = torch.tensor(
    [[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]]
)  # of the box: +Z, +X, -Z, -X, +Y, -Y


def coloured_box() -> tuple[Surface, torch.Tensor]:
    surface = Surface.of(box())
    texels = texels_of(surface, 96)
    texture = torch.zeros(96 * 96, 3)
    texture[texels.shown.pixel] = SIDES[texels.shown.face // 2]
    return surface, texture.view(96, 96, 3)


def test_each_quarter_turn_shows_the_next_side():
    surface, texture = coloured_box()
    frames = turntable(surface, texture, frames=4, size=32, elevation=0)
    assert frames.shape == (4, 32, 32, 3)
    assert torch.equal(frames[:, 16, 16], SIDES[:4])
    assert frames[:, 0, 0].eq(1).all()


def test_more_frames_than_memory_are_refused(monkeypatch):
    monkeypatch.setattr("anygpu.paint.geometry.turntable.host_free_bytes", lambda: 4 * 32 * 32 * 12)
    assert len(turntable(coloured_box()[0], None, 4, 32)) == 4
    with pytest.raises(UnsupportedError, match="5 frames of 32 pixels"):
        turntable(coloured_box()[0], None, 5, 32)
    with pytest.raises(UnsupportedError, match="4 frames of 32 pixels"):
        film(4, 32, beside=2)


@pytest.mark.parametrize(("elevation", "side"), [(90, 4), (-90, 5)])
def test_from_above_and_below(elevation, side):
    surface, texture = coloured_box()
    assert torch.equal(turntable(surface, texture, 1, 32, elevation)[0, 16, 16], SIDES[side])


def test_the_texture_is_read_as_a_renderer_reads_it():
    texture = torch.rand(4, 4, 3, generator=torch.Generator().manual_seed(0))
    centres = torch.tensor([[0.125, 0.125], [0.875, 0.125], [0.375, 0.625]])
    torch.testing.assert_close(looked_up(texture, centres), texture[[0, 0, 2], [0, 3, 1]])


def test_the_ideal_texture_looks_like_the_ideal_surface():
    surface = Surface.of(synthetic.torus())
    texture = ideal_texture(texels_of(surface, 256))
    ours, right = (turntable(surface, source, 2, 64) for source in (texture, synthetic.waves))
    covered = turntable(surface, None, 2, 64, background=0)[..., 0] > 0
    assert (ours - right).abs()[covered].mean() < 2e-3


def test_clay_needs_no_uvs():
    mesh = synthetic.torus()
    frames = turntable(Surface.of(Mesh(mesh.vertices, mesh.faces)), None, 1, 32)
    assert 0.3 < frames.min() < frames.max() == 1
    with pytest.raises(InputError, match="without UVs"):
        turntable(Surface.of(Mesh(mesh.vertices, mesh.faces)), torch.zeros(4, 4, 3), 1, 32)


@pytest.mark.parametrize(("name", "value"), [("frames", 0), ("size", 5000), ("elevation", 91), ("background", 2)])
def test_values_out_of_range_are_refused(name, value):
    with pytest.raises(InputError, match=f"{name} of the turntable {value}"):
        turntable(Surface.of(box()), None, **{name: value})


@pytest.mark.parametrize("make", [synthetic.torus, sphere, box])
def test_made_meshes_look_outwards(make):
    surface = Surface.of(make())
    places = surface.vertices[surface.faces].mean(1)
    flat = places * torch.tensor([1.0, 0.0, 1.0])
    core = flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-6) * 0.575 / 1.4 if make is synthetic.torus else 0
    assert ((places - core) * surface.face_normals).sum(1).min() > 0


@pytest.mark.full
@pytest.mark.parametrize("wrong", [False, True])
def test_a_baked_torus_is_right_and_its_views_in_another_order_are_not(wrong):
    surface = Surface.of(synthetic.torus())
    views = synthetic.photographs(surface, DEFAULT_VIEWS, 160, 320).roll(int(wrong), 0)
    baked = bake(surface, DEFAULT_VIEWS, views, BakeSettings(192, 320))
    texture = filled(baked, surface)
    errors = synthetic.errors(texture, baked.texels, baked.texels.covered).sort().values
    frames, right = (turntable(surface, each, 2, 48, elevation=25.0) for each in (texture, synthetic.waves))
    figures = (
        float(errors.mean()),
        float(errors[int(0.999 * (len(errors) - 1))]),
        float((frames - right).abs().mean()),
    )
    assert baked.share >= 0.9 and (frames[0] - frames[1]).abs().mean() > 0.05
    assert [figure <= most for figure, most in zip(figures, (5e-3, 0.12, 2e-3), strict=True)] == [not wrong] * 3
