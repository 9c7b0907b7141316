"""The turntable shows the texture where it belongs, and the demo is compared with what is right."""

from __future__ import annotations

import numpy
import pytest
import torch
from anygpu.compat.errors import InputError
from anygpu.paint import demo
from anygpu.paint.baking import synthetic
from anygpu.paint.baking.bake import texels_of
from anygpu.paint.baking.synthetic import ideal_texture
from anygpu.paint.geometry.mesh import Mesh, Surface, write_glb
from anygpu.paint.geometry.turntable import looked_up, turntable
from paint.shapes import box, sphere
from PIL import Image

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
    with pytest.raises(InputError, match=f"{name} {value} of the turntable"):
        turntable(Surface.of(box()), None, **{name: value})


@pytest.mark.parametrize("make", [synthetic.torus, sphere, box])
def test_made_meshes_look_outwards(make):
    surface = Surface.of(make())
    places = surface.vertices[surface.faces].mean(1)
    flat = places * torch.tensor([1.0, 0.0, 1.0])
    core = flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-6) * 0.575 / 1.4 if make is synthetic.torus else 0
    assert ((places - core) * surface.face_normals).sum(1).min() > 0


@pytest.fixture(scope="module")
def shown():
    """The demo, small."""
    return demo.demonstration(texture_size=192, picture_size=160, view_size=320, frames=2, frame_size=48)


def test_the_demo_is_right_and_not_only_finite(shown):
    assert shown.frames.shape == shown.right.shape == (2, 48, 48, 3)
    assert (shown.frames[0] - shown.frames[1]).abs().mean() > 0.05
    assert shown.texture.std() > 0.2


def test_the_demo_writes_what_it_checked(tmp_path, monkeypatch, shown):
    monkeypatch.setattr(demo, "demonstration", lambda: shown)
    checks = demo.show(tmp_path)
    assert len(checks) == 5
    assert all(held for held, _ in checks.values()), checks
    sheet = numpy.array(Image.open(tmp_path / "torus_turntable.png")).astype(float)
    assert sheet.shape == (96, 96, 3)
    assert abs(sheet[:48] - sheet[48:]).mean() < 1, "baked above, right below"
    assert sheet.std() > 20
    monkeypatch.setattr(demo, "write_glb", lambda path, mesh, _texture: write_glb(path, box(), _texture))
    assert not demo.show(tmp_path)["the GLB holds the mesh"][0]


def test_the_demo_notices_a_wrong_picture(monkeypatch, tmp_path):
    """Views in another order: the picture is as colourful, and wrong."""
    kept = synthetic.photographs
    monkeypatch.setattr(synthetic, "photographs", lambda *arguments: kept(*arguments).roll(1, 0))
    shown = demo.demonstration(texture_size=96, picture_size=96, view_size=96, frames=1, frame_size=48)
    assert shown.errors.mean() > 0.1
    assert (shown.frames - shown.right).abs().mean() > 0.02
    monkeypatch.setattr(demo, "demonstration", lambda: shown)
    checks = demo.show(tmp_path)
    failed = {"the texture is the right one", "no texel is far off", "the turntable is the right one"}
    assert {name for name, (held, _) in checks.items() if not held} == failed
