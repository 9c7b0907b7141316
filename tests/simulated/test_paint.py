"""Texturing as a whole on the simulated accelerator, offloaded and compiled, and what it does without our code."""

from dataclasses import replace

import pytest
import torch
from anygpu.compat.device.execution import HOST
from anygpu.paint import texturing
from anygpu.paint.adapter_loading import AdapterRequest, load_adapter
from anygpu.paint.loading import PaintRequest, load_paint, settings_for
from anygpu.paint.sampling import painting
from anygpu.paint.sampling.delight import DelightSettings
from anygpu.paint.sampling.painting import PaintSettings
from paint.conftest import delight_folder, paint_folder  # noqa: F401
from paint.shapes import box

from paint import mv_stored, stored
from simulated import accelerator

PICTURE = torch.rand(48, 64, 4, generator=torch.Generator().manual_seed(0))
SETTINGS = texturing.OneStep(
    PaintSettings(size=64, steps=2, seed=3),
    texturing.BakeSettings(texture_size=64, view_size=128),
    delight=DelightSettings(size=64, steps=2),
)
ROUNDING = 2e-3  # the first sigma is 4096: the last bit of a prediction shows, in the views and so in the texture


def pipeline(folder, device, **chosen):
    return load_paint(PaintRequest(folder, precision="fp32", device=device, **chosen))


@stored.any_text()
def run(paint, delight):
    return texturing.textured(box(), [PICTURE], paint, delight, SETTINGS)


@pytest.fixture(scope="module")
def wanted(paint_folder, delight_folder):  # noqa: F811
    return run(pipeline(paint_folder, "cpu"), pipeline(delight_folder, "cpu"))


def same(found, wanted):
    (texture, painted, _), (right, pictures, _) = found, wanted
    assert texture.colour.device == painted.views.device == HOST
    assert (painted.views - pictures.views).abs().max() <= ROUNDING
    assert torch.equal(texture.painted, right.painted)
    assert (texture.colour - right.colour).abs().max() <= ROUNDING


def test_offloaded(acc, paint_folder, delight_folder, wanted):  # noqa: F811
    paint, delight = pipeline(paint_folder, acc), pipeline(delight_folder, acc)
    assert {one.offloader.mode for one in (paint, delight)} == {"model"}, "without compile, auto means offload"
    same(run(paint, delight), wanted)
    sizes = [sum(t.nbytes for t in paint.parts.read(part).state_dict().values()) for part in ("unet", "reference")]
    peak = max(cost.peak_bytes for one in (paint, delight) for cost in one.offloader.memory_stats.stages)
    assert max(sizes) < peak < max(sizes) + 2**26, "never two parts at a time"
    assert accelerator.memory().allocated_bytes == 0


@pytest.mark.full
def test_compiled_and_resident(acc, paint_folder, delight_folder, wanted):  # noqa: F811
    settings = settings_for(64, "eager")  # dynamo's own graphs; no compiler makes code for a simulated device
    paint, delight = pipeline(paint_folder, acc, compiled=settings), pipeline(delight_folder, acc, compiled=settings)
    assert {one.offloader.mode for one in (paint, delight)} == {"none"}, "compiled, auto means resident"
    found = run(paint, delight)
    same(found, wanted)
    assert set(paint.compiled) == {"unet", "reference", "vae"}
    for blocks in (*paint.compiled.values(), *delight.compiled.values()):
        assert not blocks.failure
        assert 0 < blocks.graphs <= 2 * 64
    made = sum(blocks.graphs for blocks in paint.compiled.values())
    assert torch.equal(run(paint, delight)[1].views, found[1].views)
    assert sum(blocks.graphs for blocks in paint.compiled.values()) == made, "the second run makes no graph"


@pytest.mark.full
@pytest.mark.parametrize(("offload", "mode"), [("auto", "none"), ("model", "model")])
def test_mv_adapter_compiled(acc, tmp_path, offload, mode):
    """Each block is one graph, and layers share them: what is kept of the reference is no name in a graph."""
    base = mv_stored.folder("sd21", tmp_path, "mine")
    adapter = mv_stored.adapter_file("ig2mv", "sd21", tmp_path)
    settings = replace(SETTINGS, prompt="a red cat")

    def painted(device, **chosen):
        asked = AdapterRequest(base, adapter, device=device, precision="fp32", **chosen)
        pipeline = load_adapter(asked)
        return pipeline, [texturing.textured(box(), [PICTURE], pipeline, None, settings) for _ in range(2)]

    _, (right, _) = painted("cpu")
    pipeline, (found, again) = painted(acc, compiled=settings_for(64, "eager"), offload=offload)
    assert pipeline.offloader.mode == mode and set(pipeline.compiled) == {"unet", "vae"}
    same(found, right)
    assert torch.equal(again[1].views, found[1].views)
    unet = pipeline.compiled["unet"]
    assert not unet.failure and 0 < unet.graphs <= unet.blocks / 2, "as many graphs as kinds and sizes, both times"
    assert not any(blocks.failure for blocks in pipeline.compiled.values())


class WhereTheWeightsWait:
    """What a wrapper sees that asks an offloaded module for its device."""

    device = HOST

    def __init__(self, offloader):
        self.offloader = offloader

    def __getattr__(self, name):
        return getattr(self.offloader, name)


def misplaced(paint):
    return replace(paint, offloader=WhereTheWeightsWait(paint.offloader))


def as_cuda_says_it(_name, arguments):
    """The check, and the words, of CUDA's convolution; a CPU's kernel has others for the same mistake."""
    x, weight = arguments[:2]
    if (x.device, x.dtype) != (weight.device, weight.dtype):
        raise RuntimeError(f"Input type ({x.type()}) and weight type ({weight.type()}) should be the same")


def test_without_our_placement_pictures_meet_weights_of_another_type(acc, paint_folder):  # noqa: F811
    wrong = r"Input type \(torch.FloatTensor\) and weight type \(torch.acc.FloatTensor\) should be the same"
    with accelerator.hook("aten::convolution*", before=as_cuda_says_it), pytest.raises(RuntimeError, match=wrong):
        run(misplaced(pipeline(paint_folder, acc)), None)


def test_without_our_placement_latents_meet_conditions_on_another_device(acc, paint_folder, monkeypatch):  # noqa: F811
    real = painting.sampled
    monkeypatch.setattr(painting, "sampled", lambda paint, *given, **named: real(misplaced(paint), *given, **named))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        run(pipeline(paint_folder, acc), None)
