"""A painting that was cut short goes on after its last step, bit for bit as if nothing had happened."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from anygpu.compat.memory.parts import Silent
from anygpu.paint import texturing
from anygpu.paint.adapter_loading import AdapterRequest, load_adapter
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.sampling.painting import PaintInputs, PaintSettings
from anygpu.pipelines.latents.steps import SavedSteps
from anygpu.pipelines.sampling.resume import painting_steps
from paint.conftest import paint_folder  # noqa: F401
from paint.shapes import box

from paint import mv_stored, stored

STEPS = 4
PICTURE = torch.rand(48, 64, 4, generator=torch.Generator().manual_seed(0))


class Cut(BaseException):
    """What ends a painting here; ComfyUI's cancel is a BaseException too."""


class Keeping(Silent):
    """Progress that keeps steps as ComfyUI's does, is cancelled after step ``at``, and counts those that it is told."""

    def __init__(self, folder, at=0):
        self.folder, self.at, self.done, self.said, self.pauses = folder, at, [], [], []

    def saved_steps(self, pipeline, *decided):
        store = SavedSteps(self.folder, self.notify, share=0.0)  # none in time: the cancel itself saves
        return painting_steps(store, self, pipeline, *decided)

    def step(self, done, total, stage, preview=None):
        if stage.name == "painting":
            self.done.append(done)
            self.pauses.append(stage.resumable)
            if done == self.at:
                raise Cut

    def notify(self, text):
        self.said.append(text)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    root = tmp_path_factory.mktemp("mv")
    files = mv_stored.folder("sd21", root, "mine"), mv_stored.adapter_file("ig2mv", "sd21", root)
    return load_adapter(AdapterRequest(*files, precision="fp32", device="cpu"))


@stored.any_text()
def painted(pipeline, progress=None, **changes):
    maps, table, _ = texturing.maps_of(box(), None, pipeline.family, size=64)
    given = PaintInputs([PICTURE], maps.normal, maps.position, table, prompt=changes.pop("prompt", "a red cat"))
    settings = PaintSettings(**{"size": 64, "steps": STEPS, "seed": 3, **changes})
    return texturing.painted_views(pipeline, given, settings, progress or Silent())


def resumes(pipeline, folder, scheduler):
    paint = partial(painted, pipeline, scheduler=scheduler)
    wanted = paint()
    first = Keeping(folder, at=2)
    with pytest.raises(Cut):
        paint(first)
    assert first.said[-1].startswith("step 2 of 4 is saved") and len(list(folder.iterdir())) == 1
    again = Keeping(folder)
    found = paint(again)
    assert again.done == [3, 4] and again.pauses == [True, False], "a pause after a step that is kept"
    assert any("goes on after step 2 of 4" in line for line in again.said)
    assert torch.equal(found.latents, wanted.latents) and torch.equal(found.views, wanted.views)
    assert not list(folder.iterdir()), "what has ended leaves no state"


@pytest.mark.full
@pytest.mark.parametrize("scheduler", ["auto", pytest.param("unipc", marks=pytest.mark.full)])
def test_mv_adapter_goes_on_after_its_last_step(adapter, tmp_path, scheduler):
    resumes(adapter, tmp_path / "steps", scheduler)


@pytest.mark.full
@pytest.mark.parametrize("scheduler", ["unipc", *(pytest.param(s, marks=pytest.mark.full) for s in ("auto", "lcm"))])
def test_hunyuan_goes_on_after_its_last_step(paint_folder, tmp_path, scheduler):  # noqa: F811
    resumes(load_paint(PaintRequest(paint_folder, precision="fp32", device="cpu")), tmp_path / "steps", scheduler)


def test_another_painting_does_not_go_on_there(adapter, tmp_path):
    with pytest.raises(Cut):
        painted(adapter, Keeping(tmp_path / "steps", at=2))
    mv_stored.lora_file(tmp_path / "lora.safetensors", False, base="sd21")
    loaded = load_adapter(replace(adapter.request, lora=tmp_path / "lora.safetensors"))
    for other, changes in (
        (adapter, {"seed": 4}),
        (adapter, {"prompt": "a dog"}),
        (adapter, {"guidance": 2.0}),
        (loaded, {}),
    ):
        begun = Keeping(tmp_path / "steps", at=1)
        with pytest.raises(Cut):
            painted(other, begun, **changes)
        assert begun.done == [1], changes
