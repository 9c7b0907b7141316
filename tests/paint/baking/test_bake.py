"""Back-projection: the published results in exact mode, better than those by default, and plain words on bad input."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from anygpu.compat.errors import InputError
from anygpu.paint.baking.bake import (
    BakeSettings,
    bake,
    canny,
    depth_steps,
    gathered,
    grown,
    rim_cleaned,
    scattered,
    texels_of,
)
from anygpu.paint.baking.fill import filled
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS, Camera, CameraTable
from anygpu.paint.geometry.mesh import Mesh, Surface
from anygpu.paint.geometry.views import rasterised
from paint.shapes import box
from paint.synthetic import errors, photographs

from paint import rendered, synthetic

FORMS = {"scatter": "bake_v2_0", "gather": "bake_v2_1"}
SMALL = BakeSettings(texture_size=256, view_size=256)


@pytest.fixture
def baked_alone(monkeypatch):
    """The published bake without the choice of views before it."""
    monkeypatch.setattr("anygpu.paint.baking.bake.SELECTION_SIZE", rendered.SIZE)


@pytest.mark.parametrize("form", FORMS)
def test_exact_mode_equals_the_published_bake(form, baked_alone):
    stored = rendered.arrays(FORMS[form])
    settings = BakeSettings(rendered.SIZE, rendered.SIZE, form, exact=True)
    baked = bake(rendered.surface(), DEFAULT_VIEWS, rendered.pictures("view"), settings)
    expected, mask = stored["merged"], stored["mask"] > 0
    assert (baked.painted == mask).float().mean() >= 0.999
    both = baked.painted & mask
    assert (baked.texture - expected).abs()[both].mean() <= 1e-3
    both = both & baked.texels.covered  # outside, the ideal is background
    ideal = rendered.picture("ideal")
    assert (baked.texture - ideal).abs()[both].mean() <= (expected - ideal).abs()[both].mean()


@pytest.mark.parametrize(("form", "index"), [("scatter", 0), ("scatter", 1), ("gather", 0)])
def test_exact_mode_equals_the_published_single_views(form, index, baked_alone):
    surface, stored = rendered.surface(), rendered.arrays(FORMS[form])
    view = rasterised(surface, list(DEFAULT_VIEWS)[index], rendered.SIZE)
    project = gathered if form == "gather" else scattered
    texels = texels_of(surface, rendered.SIZE, exact=True)
    colour, cosine, trust = project(surface, view, rendered.picture(f"view_{index}"), texels, True)
    expected = stored[f"cos{index}"][..., 0]
    assert ((cosine > 0) == (expected > 0)).float().mean() >= 0.9999
    both = (cosine > 0) & (expected > 0)
    assert (cosine - expected).abs()[both].mean() <= 5e-3
    assert (colour - stored[f"texture{index}"]).abs()[both].mean() <= 5e-4
    assert trust[cosine > 0].eq(1).all()


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_an_axis_aligned_box_is_painted_whole_and_better_than_the_reference_paints_it(form):
    surface = Surface.of(box())
    pictures = photographs(surface, DEFAULT_VIEWS, 256, 256)
    ours = bake(surface, DEFAULT_VIEWS, pictures, replace(SMALL, form=form))
    reference = bake(surface, DEFAULT_VIEWS, pictures, replace(SMALL, form=form, exact=True))
    assert ours.share >= 0.99
    assert reference.share < 0.65, "the flat-face fault, which exact mode keeps"
    error = errors(ours.texture, ours.texels, ours.painted)
    # each against the ideal at its own texel centres: the reference has them at u (T - 1)
    assert error.mean() < 0.5 * errors(reference.texture, reference.texels, reference.painted).mean()
    assert error.max() < 0.03


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_small_pictures_do_not_blend_surfaces_that_lie_one_behind_the_other(form):
    """Published sizes are 512 for pictures and 2048 for maps; here half as far apart."""
    surface, settings = rendered.surface(), BakeSettings(512, 512, form)
    pictures = photographs(surface, DEFAULT_VIEWS, 256, 512)
    ours = bake(surface, DEFAULT_VIEWS, pictures, settings)
    assert errors(ours.texture, ours.texels, ours.painted).max() < 0.05
    reference = bake(surface, DEFAULT_VIEWS, pictures, replace(settings, exact=True))
    assert ours.painted.sum() > reference.painted.sum()
    ours_error, theirs = (
        errors(filled(each, surface), each.texels, each.texels.covered).mean() for each in (ours, reference)
    )
    assert ours_error < theirs, "no further from the ideal than the reference, every texel counted"


@pytest.mark.parametrize("size", [64, 192])
def test_pictures_may_have_another_size_than_the_maps(size):
    """A half pixel off, at any size, would show as an error many times this one."""
    surface = Surface.of(synthetic.torus())
    sharp, soft = (
        bake(surface, DEFAULT_VIEWS, photographs(surface, DEFAULT_VIEWS, pixels, 256), BakeSettings(128, 256))
        for pixels in (256, size)
    )
    assert not bool((soft.painted & ~sharp.painted).any()), "only what a small picture blends is left to be filled"
    assert soft.painted.sum() > 0.75 * sharp.painted.sum()
    assert errors(soft.texture, soft.texels, soft.painted).mean() < (6e-3 if size == 64 else 1e-3)
    exact = BakeSettings(128, 256, exact=True)
    for form in FORMS:  # the reference enlarges them before it bakes
        sharp, soft = (
            bake(surface, DEFAULT_VIEWS, photographs(surface, DEFAULT_VIEWS, pixels, 256), replace(exact, form=form))
            for pixels in (256, size)
        )
        print(
            form,
            size,
            (sharp.texture - soft.texture).abs()[sharp.painted].mean(),
            torch.equal(sharp.painted, soft.painted),
        )
        assert (sharp.texture - soft.texture).abs()[sharp.painted].mean() < 6e-3


@pytest.mark.full
def test_gather_is_not_off_by_half_a_pixel():
    surface = Surface.of(synthetic.torus())
    pictures = photographs(surface, DEFAULT_VIEWS, 256, 256)
    ours, exact = (bake(surface, DEFAULT_VIEWS, pictures, replace(SMALL, exact=exact)) for exact in (False, True))
    ours_error, fault = (float(errors(b.texture, b.texels, b.painted).mean()) for b in (ours, exact))
    assert ours_error < fault / 10


@pytest.mark.full
def test_what_only_a_doubted_pixel_sees_yields_to_what_a_sure_one_sees():
    """Two cameras on one side, the second's picture of another colour: it decides where the first is near its rim."""
    surface = Surface.of(box())
    table = CameraTable((Camera(0, 0, 1.0), Camera(40, 0, 1.0)))
    pictures = torch.stack((torch.full((64, 64, 3), 0.25), torch.full((64, 64, 3), 0.75)))
    front = bake(surface, CameraTable(table.cameras[:1]), pictures[:1], replace(SMALL, view_size=512))
    both = bake(surface, table, pictures, replace(SMALL, view_size=512))
    second = bake(surface, CameraTable(table.cameras[1:]), pictures[1:], replace(SMALL, view_size=512))
    doubted, sure = front.painted & (front.weight < 0.01), front.painted & (front.weight > 0.01)
    yields = doubted & (second.weight > 0.01)
    assert yields.any()
    assert both.texture[yields][:, 0].min() > 0.74
    assert both.texture[sure & second.painted & (second.weight < 0.01)][:, 0].max() < 0.26
    assert both.texture[sure & (second.weight > 0.01)][:, 0].sub(0.5).abs().max() < 0.24, "two sure ones are mixed"


def test_a_view_that_shows_nothing_new_is_left_out():
    surface = Surface.of(box())
    table = CameraTable((Camera(0, 0), Camera(0, 0)))
    pictures = torch.stack((torch.full((64, 64, 3), 0.25), torch.full((64, 64, 3), 0.75)))
    baked = bake(surface, table, pictures, SMALL)
    assert baked.texture[baked.painted].max() == 0.25
    assert "views 1 show nothing new" in baked.notes[0]


def test_faces_with_the_wrong_winding_are_painted_from_the_side_that_shows_them():
    mesh = box()
    surface = Surface.of(Mesh(mesh.vertices, mesh.faces.flip(1), mesh.uvs))
    baked = bake(surface, DEFAULT_VIEWS, photographs(surface, DEFAULT_VIEWS, 128, 128), replace(SMALL, view_size=128))
    assert baked.share >= 0.99
    assert errors(baked.texture, baked.texels, baked.painted).mean() < 2e-3


def test_what_is_behind_is_not_painted():
    surface = Surface.of(box(1, 1, 0.002))  # a sheet whose back is nearer than the depth tolerance
    table = CameraTable((Camera(0, 0),))
    baked = bake(surface, table, photographs(surface, table, 128, 128), replace(SMALL, view_size=128))
    normals = surface.face_normals[baked.texels.shown.face[baked.painted.view(-1)[baked.texels.shown.pixel]]]
    assert normals.unique(dim=0).tolist() == [[0, 0, 1]]


def test_a_picture_says_nothing_of_what_lies_beside_it():
    surface = Surface.of(box())
    table = CameraTable((Camera(0, 0),), ortho_scale=0.6)
    for form in FORMS:
        baked = bake(surface, table, torch.full((1, 64, 64, 3), 0.25), replace(SMALL, form=form))
        texels = baked.texels
        places = texels.place[baked.painted.view(-1)[texels.shown.pixel]]
        view = rasterised(surface, table.cameras[0], 256, 0.6)
        assert len(places) > 500 and (view.on_screen(places)[:, :2] - 127.5).abs().max() < 132, form


def test_overlapping_uvs_are_said():
    mesh = box()
    assert mesh.uvs is not None
    folded = Surface.of(Mesh(mesh.vertices, mesh.faces, (mesh.uvs * torch.tensor([3.0, 2.0])) % 1))
    baked = bake(folded, DEFAULT_VIEWS, photographs(folded, size=64, view_size=64), replace(SMALL, view_size=64))
    assert any("83% of the UV area overlaps other faces" in note for note in baked.notes)


PICTURES = torch.zeros(6, 32, 32, 3)


@pytest.mark.parametrize(
    ("pictures", "changes", "text"),
    [
        (PICTURES[:4], {}, "4 pictures for 6 cameras"),
        (PICTURES[:, :16], {}, r"pictures of shape \(6, 16, 32, 3\)"),
        (PICTURES[0], {}, "pictures of shape"),
        (PICTURES + torch.nan, {}, "NaN"),
        (PICTURES, {"texture_size": 9000}, "texture_size 9000"),
        (PICTURES, {"view_size": 4}, "view_size 4"),
        (PICTURES, {"form": "spray"}, "gather, scatter"),
    ],
)
def test_bad_pictures_and_settings_are_refused(pictures, changes, text):
    with pytest.raises(InputError, match=text):
        bake(rendered.surface(), DEFAULT_VIEWS, pictures, replace(SMALL, **changes))


def test_can_be_cancelled_between_views():
    class Cancelled(Exception):
        pass

    calls = []

    def check():
        calls.append(1)
        if len(calls) == 3:
            raise Cancelled

    with pytest.raises(Cancelled):
        bake(rendered.surface(), DEFAULT_VIEWS, PICTURES, replace(SMALL, view_size=32, texture_size=32), check)
    assert len(calls) == 3


def test_alpha_is_ignored():
    surface = Surface.of(box())
    pictures = photographs(surface, DEFAULT_VIEWS, 32, 32)
    settings = BakeSettings(32, 32)
    alpha = torch.cat((pictures, torch.zeros(6, 32, 32, 1)), dim=-1)
    assert torch.equal(
        bake(surface, DEFAULT_VIEWS, pictures, settings).texture, bake(surface, DEFAULT_VIEWS, alpha, settings).texture
    )


def test_the_rim_takes_the_colour_of_the_mesh():
    view = rasterised(Surface.of(box()), Camera(0, 0), 64)
    picture = torch.where((view.ids >= 0)[..., None], 0.25, 1.0).expand(-1, -1, 3)
    assert rim_cleaned(picture, view)[grown(view.ids >= 0, 2)].eq(0.25).all()
    assert rim_cleaned(picture, view)[~grown(view.ids >= 0, 2)].eq(1).all()


def test_steps_of_depth_are_found_and_slopes_are_not():
    assert not depth_steps(rasterised(Surface.of(box()), Camera(70, 20), 128)).any()
    found = depth_steps(rasterised(Surface.of(synthetic.torus()), Camera(0, 30), 128))
    assert found[:, 64].any(), "the near rim of the hole before its far wall"


@pytest.mark.parametrize(("height", "found"), [(0.02, False), (0.05, True)])
def test_how_high_a_step_of_depth_is_an_edge(height, found):
    """In units of the frame, at a size where neighbouring pixels lie close together."""
    low = torch.tensor([[-1.0, -1, 0], [0, -1, 0], [-1, 1, 0], [0, 1, 0]])
    high = low + torch.tensor([1.0, 0, height / 0.575 * 2**0.5])
    faces = torch.tensor([[0, 1, 2], [1, 3, 2]])
    surface = Surface.of(Mesh(torch.cat((low, high)), torch.cat((faces, faces + 4))))
    assert bool(depth_steps(rasterised(surface, Camera(0, 0), 512)).any()) == found


def test_grown_is_a_square():
    mask = torch.zeros(9, 9, dtype=torch.bool)
    mask[4, 3] = True
    assert grown(mask, 2).nonzero().amin(0).tolist() == [2, 1]
    assert grown(mask, 2).sum() == 25


def test_canny_of_a_step_is_one_line():
    picture = torch.zeros(12, 12, dtype=torch.uint8)
    picture[:, 6:] = 60
    assert canny(picture).nonzero()[:, 1].unique().tolist() == [5]
    assert not canny(picture // 10).any()
    weak = picture // 6  # 10 levels, a gradient of 40: between the thresholds
    assert not canny(weak).any()
    weak[0, 6:] = 60
    assert canny(weak).sum() > 5, "a strong edge pulls in the weak one that it touches"


if find_spec("cv2"):

    @pytest.mark.parametrize("seed", range(3))
    def test_canny_equals_opencv(seed):
        import cv2

        noise = torch.randint(0, 256, (90, 133), generator=torch.Generator().manual_seed(seed)).float()
        soft = (
            torch.nn.functional.avg_pool2d(noise[None, None], 5, 1)[0, 0].mul(3).sub(200).clamp(0, 255).to(torch.uint8)
        )
        assert torch.equal(canny(soft), torch.tensor(cv2.Canny(soft.numpy(), 30, 80)) > 0)
