"""From a mesh and a picture to a texture: what the nodes call, in one step and in several."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from anygpu.compat.device.execution import HOST
from anygpu.compat.errors import InputError, UnsupportedError
from anygpu.compat.memory.parts import Silent
from anygpu.paint import texturing
from anygpu.paint.baking.bake import BakeSettings, bake
from anygpu.paint.baking.fill import filled
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS, camera_table
from anygpu.paint.geometry.mesh import MANY_FACES, Mesh, Surface, load_mesh, write_glb
from anygpu.paint.geometry.views import rendered_maps
from anygpu.paint.pictures import cut_out
from anygpu.paint.sampling.painting import Painted, PaintSettings, latents_of, to_latent
from PIL import Image

from paint.shapes import box
from paint.synthetic import errors, photographs, torus

BAKING = texturing.BakeSettings(texture_size=64, view_size=128)
QUICK = texturing.OneStep(PaintSettings(size=64, steps=1), BAKING)
PICTURE = torch.rand(40, 64, 4, generator=torch.Generator().manual_seed(0))


def test_in_place_of_the_pbr_model_a_demo_paints_no_metal_and_full_roughness(monkeypatch, recorded):
    monkeypatch.setattr(texturing, "paint_views", lambda *_: Painted(torch.rand(6, 4, 4, 3), None, None))
    pipeline = SimpleNamespace(family="paint", stands_in_for=texturing.PBR)
    found = texturing.painted_views(pipeline, None, None, recorded()).metallic_roughness
    assert torch.equal(found, torch.tensor((0.0, 1.0, 0.0)).expand(6, 4, 4, 3))


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "normals", "flat"),
    [
        (None, "auto", False),
        ("paint", "auto", False),
        ("paint_pbr", "auto", True),
        ("paint_pbr", "smooth", False),
        ("paint", "flat", True),
    ],
)
def test_each_model_gets_the_normals_it_was_taught(family, normals, flat):
    maps, table, surface = texturing.maps_of(torus(8, 16), None, family, normals, 64)
    assert table is DEFAULT_VIEWS
    assert torch.equal(maps.normal, rendered_maps(surface, DEFAULT_VIEWS, 64, flat).normal)


def test_maps_that_the_host_has_no_room_for_are_refused(monkeypatch):
    monkeypatch.setattr(texturing, "host_free_bytes", lambda: 1 << 30)
    monkeypatch.setattr(texturing, "swap_free_bytes", lambda: 0)
    with pytest.raises(UnsupportedError, match=r"1.0 GB free in memory; expected 13.1 GB"):
        texturing.maps_of(box(), None, None, "auto", 8192)


def test_a_delight_model_that_a_family_does_not_take_is_named(recorded):
    progress, pipeline = recorded(), SimpleNamespace(family="mv_adapter")
    assert texturing.references_of(pipeline, [PICTURE], object(), None, progress) == [PICTURE]
    assert progress.said == ["delight has no effect on this model"]


def test_unknown_normals_and_greedy_without_a_mesh_are_one_line():
    with pytest.raises(InputError, match="normals 'x'; expected one of auto, smooth, flat"):
        texturing.maps_of(box(), None, None, "x", 64)
    with pytest.raises(InputError, match="no mesh for greedy cameras"):
        texturing.greedy_cameras(None, 8, Silent())


@pytest.mark.full
def test_a_texture_is_the_baked_and_filled_one_and_near_the_ideal(recorded):
    mesh, progress = torus(16, 32), recorded()
    surface = Surface.of(mesh)
    pictures = photographs(surface, DEFAULT_VIEWS, 128, 256)
    settings = texturing.BakeSettings(texture_size=128, view_size=256)
    found = texturing.texture_of(mesh, DEFAULT_VIEWS, pictures, None, settings, progress)
    baked = bake(surface, DEFAULT_VIEWS, pictures, BakeSettings(texture_size=128, view_size=256))
    assert torch.equal(found.colour, filled(baked, surface))
    assert torch.equal(found.painted, baked.painted)
    assert float(errors(found.colour, baked.texels, baked.texels.covered).mean()) < 0.02
    assert (found.metallic, found.roughness) == (None, None)
    assert [step[:2] for step in progress.steps] == [(index, 6) for index in range(1, 7)]
    assert found.notes[0].endswith("of the surface painted, the rest filled from neighbouring areas")


@pytest.mark.full
def test_metal_and_roughness_are_baked_like_colours():
    mesh = torus(8, 16)
    pictures = photographs(Surface.of(mesh), DEFAULT_VIEWS, 64, 128)
    found = texturing.texture_of(mesh, DEFAULT_VIEWS, pictures, pictures.flip(-1), BAKING)
    assert torch.equal(found.metallic, found.colour[..., 2])
    assert torch.equal(found.roughness, found.colour[..., 1])


def test_a_device_without_room_leaves_baking_to_the_cpu(monkeypatch, recorded):
    progress, device = recorded(), torch.device("meta")
    for free, chosen in ((None, device), (1 << 30, device), (1 << 20, HOST)):
        monkeypatch.setattr(texturing, "free_bytes", lambda _device, free=free: free)
        assert texturing.roomy(device, 1 << 29, progress.notify) == chosen
    assert progress.said == ["computed on the CPU: 0.0 GB free on the device, 0.5 GB needed"]
    monkeypatch.setattr(texturing, "host_free_bytes", lambda: 1 << 28)
    monkeypatch.setattr(texturing, "swap_free_bytes", lambda: 1 << 27)
    for where in (None, HOST, device):
        with pytest.raises(UnsupportedError, match=r"0.4 GB free in memory; expected 0.5 GB. Use a sm"):
            texturing.roomy(where, 1 << 29, progress.notify)
    monkeypatch.setattr(texturing, "swap_free_bytes", lambda: 1 << 29)
    assert texturing.roomy(None, 1 << 29, progress.notify) is None


@pytest.mark.full
def test_one_step_is_the_single_steps(paint):
    texture, painted, cameras = texturing.textured(box(), [PICTURE], paint, None, QUICK)
    assert cameras is DEFAULT_VIEWS
    assert painted.views.shape == (6, 64, 64, 3)
    single = texturing.texture_of(box(), DEFAULT_VIEWS, painted.views, None, BAKING)
    assert torch.equal(texture.colour, single.colour)
    other = texturing.textured(box(), [1 - PICTURE], paint, None, QUICK)[1]
    assert not torch.equal(painted.views, other.views), "the picture counts"


@pytest.mark.full
def test_pbr_in_one_step_chooses_its_views_and_gives_metal_and_roughness(pbr, recorded):
    progress = recorded()
    settings = replace(QUICK, max_views=7)
    dino = torch.randn(1, 17, 1536, generator=torch.Generator().manual_seed(0))
    texture, painted, cameras = texturing.textured(torus(8, 16), [PICTURE], pbr, None, settings, progress, dino)
    assert 6 <= len(cameras) <= 7
    assert texture.metallic.shape == texture.roughness.shape == (64, 64)
    assert len(painted.views) == len(painted.metallic_roughness) == len(cameras)
    assert any("views see" in line for line in progress.said)


def test_an_unusable_mesh_is_found_before_anything_is_painted(paint, recorded):
    progress = recorded()
    with pytest.raises(InputError, match="a mesh without UVs"):
        texturing.textured(replace(box(), uvs=None), [PICTURE], paint, None, QUICK, progress)
    assert progress.steps == []


def test_painted_views_are_kept_when_baking_fails_and_forgotten_when_it_does_not(paint, tmp_path):
    saving = partial(texturing.saved_views, folder=tmp_path / "views", place="temp/anygpu")
    bad = replace(QUICK, texture=replace(BAKING, texture_size=4))
    with pytest.raises(InputError, match=r"texture_size 4; .* The painted views are saved in temp/anygpu\.$"):
        texturing.textured(box(), [PICTURE], paint, None, bad, saving=saving)
    kept = sorted((tmp_path / "views").iterdir())
    assert len(kept) == 6 and numpy.array(Image.open(kept[0])).shape == (64, 64, 3)
    asked, device = [], paint.offloader.device
    make_room = lambda *given: asked.append(given)  # noqa: E731
    texturing.textured(box(), [PICTURE], paint, None, QUICK, saving=saving, make_room=make_room)
    assert not list(tmp_path.iterdir()) and asked == [(texturing.TEXEL_BYTES * BAKING.texture_size**2, device)]
    text, painted = "out of memory while baking", Painted(torch.rand(1, 8, 8, 3), None, torch.zeros(1, 4, 1, 1))
    with pytest.raises(torch.OutOfMemoryError, match=f"(?s)^{text}.* saved in temp/anygpu.$"), saving(painted):
        raise torch.OutOfMemoryError(text)


def test_views_that_a_full_disk_did_not_take_are_not_left_there_in_part(tmp_path, monkeypatch):
    kept, full = texturing.picture_of, iter([False, False, True])

    def written(picture):
        if next(full):
            raise OSError(28, "No space left on device")
        return kept(picture)

    monkeypatch.setattr(texturing, "picture_of", written)
    painted = Painted(torch.rand(3, 8, 8, 3), None, torch.zeros(3, 4, 1, 1))
    with texturing.saved_views(painted, tmp_path / "views", "temp/anygpu"):
        assert not list(tmp_path.iterdir())


def test_latents_carry_their_model_and_others_are_refused(paint):
    painted = texturing.textured(box(), [PICTURE], paint, None, QUICK)[1]
    latent = to_latent(paint, painted)
    assert torch.equal(latents_of(paint, latent), painted.latents)
    assert latents_of(paint, None) is None
    assert torch.equal(latents_of(paint, {"samples": painted.latents}), painted.latents), "from a core node"
    wrongs = ({**latent, "anygpu": {"family": "paint_pbr"}}, {"samples": painted.latents[:, :, None]}, {})
    for wrong in (*wrongs, {**latent, "noise_mask": torch.ones(1, 8, 8)}):
        with pytest.raises(InputError, match=r"a LATENT .* for painting"):
            latents_of(paint, wrong)


def test_a_mask_cuts_the_object_out_and_an_empty_one_does_nothing():
    pictures, mask = torch.rand(2, 8, 8, 3), torch.zeros(1, 64, 64)
    assert all(picture.shape == (8, 8, 3) for picture in cut_out(pictures, mask)), "Load Image without alpha"
    mask = torch.zeros(1, 8, 8)
    mask[:, :4] = 1
    first, second = cut_out(pictures, mask)
    assert torch.equal(first[..., 3], 1 - mask[0])
    assert torch.equal(second[..., :3], pictures[1])
    assert cut_out(pictures, torch.ones(2, 4, 4))[0].shape == (8, 8, 4)
    with pytest.raises(InputError, match="3 masks for 2 reference pictures"):
        cut_out(pictures, torch.ones(3, 8, 8))
    with pytest.raises(InputError, match="with NaN or infinite values"):
        cut_out(pictures, torch.full((1, 8, 8), float("nan")))


def test_a_mesh_far_from_the_origin_is_moved_where_nodes_would_lose_its_shape(tmp_path):
    mesh = torus(8, 16)
    lines = [f"v {x + 1e7} {y} {z}" for x, y, z in mesh.vertices.double().tolist()]
    lines += [f"f {a + 1} {b + 1} {c + 1}" for a, b, c in mesh.faces.tolist()]
    (tmp_path / "far.obj").write_text("\n".join(lines))
    found, notes = load_mesh(tmp_path / "far.obj")
    assert any("moved to the origin: it was 1e+07 away" in note for note in notes)
    assert (found.vertices.float() - mesh.vertices).abs().max() < 1e-5
    write_glb(tmp_path / "near.glb", mesh, torch.zeros(4, 4, 3))
    assert not any("moved" in note for note in load_mesh(tmp_path / "near.glb")[1])


def test_a_large_mesh_is_told_what_unwrapping_costs():
    count = MANY_FACES + 1
    mesh = Mesh(torch.rand(3, 3), torch.arange(3).expand(count, 3))
    assert f"{count} faces: Unwrap Mesh UVs takes about 8 s" in " ".join(Surface.of(mesh).notes)


@pytest.mark.parametrize("missing", [1, 7])
def test_pictures_of_another_number_than_cameras_are_one_line(missing):
    with pytest.raises(InputError, match=f"{missing} pictures for 6 cameras"):
        texturing.texture_of(box(), DEFAULT_VIEWS, torch.zeros(missing, 8, 8, 3), None, BAKING)


def test_a_camera_the_model_does_not_know_is_refused_before_painting(paint, recorded):
    from anygpu.paint.sampling.painting import PaintInputs, paint_views

    table, progress = camera_table([0], [45], [1]), recorded()
    maps, _, _ = texturing.maps_of(box(), table, "paint", "auto", 64)
    with pytest.raises(InputError, match=r"elevations \[45.0\] .*; expected each one of -90, -20, 0, 20, 90 degrees"):
        paint_views(paint, PaintInputs([PICTURE], maps.normal, maps.position, table), QUICK.paint, progress)
    assert progress.steps == []
