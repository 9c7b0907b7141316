"""The demo model that ships with the pack: found by its name, it paints a mesh after a picture, at its own size."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from anygpu.paint import demo
from anygpu.paint.choices import DEMO_SIZE, GREY, demo_paint_models
from anygpu.paint.forecast import planned_run
from anygpu.paint.geometry.mesh import Surface
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.sampling.delight import DelightSettings, delight_image
from anygpu.paint.sampling.painting import PaintSettings, completed
from anygpu.pipelines.decisions import status_of

from paint.synthetic import in_two_colours, views_in_two_colours


@pytest.fixture(scope="module")
def pipeline():
    """The demo model."""
    (model,) = demo_paint_models().values()
    return load_paint(PaintRequest(model, device="cpu"))


def test_it_is_listed_with_its_size_and_has_a_card():
    ((choice, model),) = demo_paint_models().items()
    assert choice == "demo: Hunyuan3D paint (7 MB)"
    assert f"# {choice.partition(' (')[0]}\n" in (model / "README.md").read_text(encoding="utf-8")


@pytest.mark.full
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.full)])
def test_it_paints_the_colours_of_the_picture_and_not_others(pipeline, number, monkeypatch):
    surface = Surface.of(demo.ring())
    views_in_two_colours(pipeline, number, monkeypatch, lambda pair, *light: in_two_colours(surface, pair, *light))


def test_it_paints_at_its_own_size_and_says_so(pipeline, recorded):
    said = recorded()
    assert completed(pipeline, PaintSettings(512), said).size == DEMO_SIZE
    assert said.said == [f"the demo model paints at its own size: view_size 512 -> {DEMO_SIZE}"]
    assert completed(pipeline, PaintSettings(1024, latents=torch.zeros(6, 4, 32, 32)), said).size == 256
    other = replace(pipeline, source=Path("hunyuan3d-paint-v2-0"))
    assert completed(other, PaintSettings(512), recorded()).size == 512
    assert [planned_run(each).size for each in (pipeline, other)] == [DEMO_SIZE, 512], "as it is forecast"


def test_in_place_of_delight_it_leaves_the_light_and_says_so(pipeline, recorded):
    said, picture = recorded(), torch.zeros(32, 32, 4)
    assert torch.equal(delight_image(pipeline, picture, DelightSettings(), said), torch.full((512, 512, 3), GREY))
    assert said.said == ["the demo model leaves light and shadow in the picture, which is put on grey"]


def test_what_it_stands_in_for_is_decided_and_said():
    (model,) = demo_paint_models().values()
    made = load_paint(PaintRequest(model, device="cpu", stands_in_for="hunyuan3d-paint-v2-0"))
    assert status_of(made).startswith("demo model in place of 'hunyuan3d-paint-v2-0': ")
    assert any("paints simple bodies at 128x128" in str(decision) for decision in made.decisions)


@pytest.mark.full
def test_chosen_by_any_path_it_is_the_same_model_that_says_the_same(monkeypatch):
    (model,) = demo_paint_models().values()
    monkeypatch.chdir(model.parent)
    instead = load_paint(PaintRequest(model, device="cpu", stands_in_for="hunyuan3d-paint-v2-0"))
    for path in (model, Path(model.name), model / "unet", model / "unet" / "diffusion_pytorch_model.safetensors"):
        made = load_paint(PaintRequest(path, device="cpu"))
        assert made.is_demo and status_of(made).startswith("demo model, Hunyuan3D paint")
        assert [each.brief for each in made.decisions] == [each.brief for each in instead.decisions]
