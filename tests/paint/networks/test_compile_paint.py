"""The compiled paint path: graphs without a break, one for each kind and size of block, and the plain path's result."""

import pytest
import torch
from anygpu.paint.geometry.cameras import camera_table
from anygpu.paint.loading import PaintRequest, load_paint, settings_for
from anygpu.paint.sampling.painting import PaintInputs, PaintSettings, paint_views

SETTINGS = PaintSettings(size=64, steps=2, seed=3)
ROUNDING = 1e-3  # the first sigma is 4096: the last bit of a prediction shows


def inputs(views):
    generator = torch.Generator().manual_seed(views)
    pictures = [torch.rand(count, 64, 64, 3, generator=generator) for count in (1, views, views)]
    cameras = camera_table([30 * view for view in range(views)], [0], [1])
    return PaintInputs(*pictures, cameras, torch.randn(1, 17, 1536, generator=generator))


@pytest.mark.full
@pytest.mark.parametrize(("kind", "backend"), [("paint", "inductor"), ("paint_pbr", "eager")])
def test_compiled_paints_the_same_and_another_count_of_views_costs_one_more_graph_each(
    kind, backend, paint_folder, pbr_folder
):
    """A break in a graph would raise: each block is compiled with fullgraph."""
    folder = {"paint": paint_folder, "paint_pbr": pbr_folder}[kind]
    plain = load_paint(PaintRequest(folder, precision="fp32", device="cpu"))
    compiled = load_paint(PaintRequest(folder, precision="fp32", device="cpu", compiled=settings_for(64, backend)))
    made = []
    for views in (2, 2, 3):
        found, right = (paint_views(pipeline, inputs(views), SETTINGS).views for pipeline in (compiled, plain))
        assert (found - right).abs().max() <= ROUNDING
        made.append({name: part.graphs for name, part in compiled.compiled.items()})
    assert [part.failure for part in compiled.compiled.values()] == [""] * 3
    assert all(0 < made[0][name] <= part.blocks for name, part in compiled.compiled.items())
    assert made[1] == made[0], "the same again makes no graph"
    assert all(made[2][name] == made[0][name] for name in ("vae", "reference")), "they take one picture at a time"
    assert made[0]["unet"] < made[2]["unet"] <= 2 * made[0]["unet"]
