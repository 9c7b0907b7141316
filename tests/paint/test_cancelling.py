"""A cancel is obeyed in the middle of every stage without a network: between any two operations, and while reading."""

import sys
import threading
import types

import pytest
import torch
from anygpu.compat.device.execution import Checked
from anygpu.compat.memory.parts import Silent
from anygpu.paint import texturing
from anygpu.paint.baking.bake import BakeSettings, bake
from anygpu.paint.baking.fill import filled
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS
from anygpu.paint.geometry.cleaning import cleaned
from anygpu.paint.geometry.mesh import CALLS, Surface, load_mesh
from anygpu.paint.geometry.turntable import turntable

from paint.shapes import box
from paint.synthetic import torus

MESH = torus(6, 12)
PICTURES = torch.rand(6, 16, 16, 3, generator=torch.Generator().manual_seed(0))


class Cancel(Exception):
    """What the host raises."""


class Cancelling(Silent):
    """Counts how often it is asked, and cancels at one of these times."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.asked = at, 0

    def check(self) -> None:
        self.asked += 1
        if self.asked == self.at:
            raise Cancel


def painted_exactly(progress: Cancelling) -> None:
    surface = Surface.of(MESH)
    baked = bake(surface, DEFAULT_VIEWS, PICTURES, BakeSettings(32, 64, exact=True))
    filled(baked, surface, exact=True, check=progress.check)


def textured(form: str):
    settings = texturing.BakeSettings(texture_size=32, view_size=64, form=form)
    return lambda progress: texturing.texture_of(MESH, DEFAULT_VIEWS, PICTURES, PICTURES, settings, progress)


def turned(progress: Cancelling) -> None:
    with Checked(progress.check):
        turntable(Surface.of(MESH), None, 2, 32)


def tidied(progress: Cancelling) -> None:
    with Checked(progress.check):
        cleaned(MESH)


STAGES = {  # what is done, and the least number of operations it has
    "maps": (lambda progress: texturing.maps_of(MESH, None, "paint", "auto", 64, progress), 500),
    "greedy cameras": (lambda progress: texturing.greedy_cameras(box(), 7, progress), 500),
    "bake by gathering, and fill": (textured("gather"), 2000),
    "bake by scattering, and fill": (textured("scatter"), 2000),
    "fill in the published order": (painted_exactly, 50),
    "turntable": (turned, 200),
    "clean": (tidied, 100),
}


SLOW = {"greedy cameras", "bake by scattering, and fill"}


@pytest.mark.parametrize("stage", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in STAGES])
def test_a_stage_is_left_at_once(stage):
    act, least = STAGES[stage]
    whole = Cancelling()
    act(whole)
    assert whole.asked >= least
    for at in (1, whole.asked // 2, whole.asked):
        progress = Cancelling(at)
        with pytest.raises(Cancel):
            act(progress)
        assert progress.asked == at, "it went on after the cancel"


def test_checks_change_nothing():
    plain = texturing.texture_of(MESH, DEFAULT_VIEWS, PICTURES, None, texturing.BakeSettings(32, 64))
    surface = Surface.of(MESH)
    baked = bake(surface, DEFAULT_VIEWS, PICTURES, BakeSettings(32, 64))
    assert torch.equal(plain.colour, filled(baked, surface))


def test_a_file_that_takes_long_to_read_is_left_at_once(tmp_path, monkeypatch):
    """In the reader itself: nothing of it goes on, also where it swallows what is raised in it."""
    progress, swallowed, others = Cancelling(5), [], threading.active_count()

    def load_scene(path, process, resolver):
        try:
            while len(swallowed) < 10 * CALLS:
                swallowed.append(str(len(swallowed)))
        except Cancel:
            swallowed.append("the cancel")
        return types.SimpleNamespace(geometry={}, to_mesh=lambda: swallowed.append("it went on"))

    util = types.SimpleNamespace(unique_id=None)
    monkeypatch.setitem(sys.modules, "trimesh", types.SimpleNamespace(load_scene=load_scene, util=util))
    (tmp_path / "shape.glb").write_bytes(b"")
    with pytest.raises(Cancel):
        load_mesh(tmp_path / "shape.glb", progress.check)
    assert progress.asked == 5 and swallowed[-1] == "the cancel" and len(swallowed) < 2 * CALLS
    assert threading.active_count() == others and sys.getprofile() is None
