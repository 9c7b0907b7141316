"""The small MV-Adapter that ships with the pack: its parts are others', and it paints a mesh after a picture."""

from dataclasses import replace

import pytest
import torch
from anygpu.compat.errors import CheckpointError
from anygpu.paint import demo
from anygpu.paint.adapter_loading import AdapterRequest, load_adapter
from anygpu.paint.baking.bake import BakeSettings
from anygpu.paint.choices import DEMO_ADAPTER, DEMO_SIZE, demo_adapter
from anygpu.paint.forecast import planned_run
from anygpu.paint.geometry.cameras import ADAPTER_VIEWS
from anygpu.paint.geometry.mesh import Surface
from anygpu.paint.sampling.painting import PaintSettings, completed
from anygpu.paint.texturing import OneStep, textured
from anygpu.pipelines.decisions import status_of

from paint.synthetic import photographs, views_in_two_colours


@pytest.fixture(scope="module")
def pipeline():
    return demo.opened(DEMO_ADAPTER)


def test_it_is_listed_with_its_size_and_has_a_card():
    ((choice, folder),), ((adapter, file),) = (each.items() for each in demo_adapter())
    assert (choice, adapter) == ("demo: MV-Adapter (2 MB)", "demo: ig2mv")
    assert file.parent == folder and f"# {choice.partition(' (')[0]}\n" in (folder / "README.md").read_text("utf-8")


def test_parts_that_other_demo_models_ship_are_read_from_there_and_only_for_a_demo(pipeline, tmp_path):
    assert {each.name for each in DEMO_ADAPTER.iterdir()}.isdisjoint({"vae", "text_encoder", "tokenizer"})
    assert pipeline.tokenizers["text_encoder"].parts[-2:] == ("hunyuan_video", "tokenizer_2")
    for file in DEMO_ADAPTER.rglob("*.*"):
        there = tmp_path / file.relative_to(DEMO_ADAPTER)
        there.parent.mkdir(exist_ok=True)
        there.write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match="vae"):
        load_adapter(AdapterRequest(tmp_path, *demo_adapter()[1].values(), device="cpu"))


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.full)])
def test_it_paints_the_colours_of_the_picture_and_not_others(pipeline, number, monkeypatch):
    surface = Surface.of(demo.ring(), None, ADAPTER_VIEWS.frame)

    def seen(pair: demo.ColourPair, *_light: float) -> torch.Tensor:
        return photographs(surface, ADAPTER_VIEWS, DEMO_SIZE, 2 * DEMO_SIZE, demo.halves(pair), 0.0)

    views_in_two_colours(pipeline, number, monkeypatch, seen)


def test_it_paints_at_its_own_size_in_its_own_steps_and_says_so(pipeline, recorded):
    said = recorded()
    settings, asked = (completed(pipeline, PaintSettings(512, *given), said) for given in ((), (7, 2.0)))
    assert (settings.size, settings.steps, settings.guidance) == (DEMO_SIZE, 20, 1.0)
    assert (asked.size, asked.steps, asked.guidance) == (DEMO_SIZE, 7, 2.0)
    assert said.said[:2] == [
        "the demo model was made for 20 steps and guidance 1",
        f"the demo model paints at its own size: view_size 512 -> {DEMO_SIZE}",
    ]
    run = planned_run(pipeline)
    assert (run.steps, run.rows, run.size) == (20, 1, DEMO_SIZE), "as it is forecast"


@pytest.mark.full
def test_in_one_step_its_maps_have_its_own_size(pipeline, recorded):
    progress, settings = recorded(), OneStep(PaintSettings(512, 1), BakeSettings(64, 128))
    textured(demo.ring(), [torch.rand(32, 32, 3)], pipeline, None, settings, progress)
    assert not any("Render Views at" in line for line in progress.said)


def test_what_it_stands_in_for_is_decided_and_said():
    asked = AdapterRequest(DEMO_ADAPTER, *demo_adapter()[1].values(), device="cpu")
    made = [load_adapter(replace(asked, stands_in_for=name)) for name in ("mvadapter_ig2mv_sdxl.safetensors", "")]
    assert status_of(made[0]).startswith("demo model in place of 'mvadapter_ig2mv_sdxl.safetensors': ")
    assert status_of(made[1]).startswith("demo model, MV-Adapter")
    for each in made:
        assert [decision.subject for decision in each.decisions].count("model") == 1
        assert not any("velocities" in str(decision) for decision in each.decisions), "it was taught on them"


def test_there_is_no_tg2mv_of_it():
    with pytest.raises(CheckpointError, match="declared as tg2mv has the layers of ig2mv"):
        load_adapter(AdapterRequest(DEMO_ADAPTER, *demo_adapter()[1].values(), variant="tg2mv", device="cpu"))
