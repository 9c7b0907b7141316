"""Painting on the simulated accelerator in every offload mode gives what the CPU gives."""

import pytest
import torch
from anygpu.compat.device.execution import HOST
from anygpu.paint.geometry.cameras import camera_table
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.sampling.delight import DelightSettings, delight_image
from anygpu.paint.sampling.painting import PaintInputs, PaintSettings, paint_views
from simulated import accelerator

from paint import stored

MODES = [
    pytest.param("model", marks=pytest.mark.full),  # tests/simulated/test_paint.py runs it whole
    "sequential",
    pytest.param("none", marks=pytest.mark.full),
    pytest.param("group", marks=pytest.mark.full),
]
GENERATOR = torch.Generator().manual_seed(0)
INPUTS = PaintInputs(
    torch.rand(1, 64, 64, 3, generator=GENERATOR),
    torch.rand(2, 64, 64, 3, generator=GENERATOR),
    torch.rand(2, 64, 64, 3, generator=GENERATOR),
    camera_table([0, 180], [0], [1]),
    torch.randn(1, 17, 1536, generator=GENERATOR),
)
SETTINGS = PaintSettings(size=64, steps=2, seed=3)
ROUNDING = 1e-3  # the first sigma is 4096: the last bit of a prediction shows, and kernels see other alignments
_wanted: dict[str, torch.Tensor] = {}


def wanted(folder) -> torch.Tensor:
    if folder.name not in _wanted:
        pipeline = load_paint(PaintRequest(folder, precision="fp32", device="cpu"))
        _wanted[folder.name] = paint_views(pipeline, INPUTS, SETTINGS).views
    return _wanted[folder.name]


def painted(folder, device, offload):
    pipeline = load_paint(PaintRequest(folder, precision="fp32", offload=offload, device=device))
    return pipeline, [paint_views(pipeline, INPUTS, SETTINGS).views for _ in range(2)]


@pytest.mark.parametrize("offload", MODES)
def test_paint_twice_in_a_row(acc, paint_folder, offload):
    pipeline, found = painted(paint_folder, acc, offload)
    for views in found:
        assert views.device == HOST
        assert (views - wanted(paint_folder)).abs().max() <= ROUNDING
    if offload == "model":
        del found, pipeline
        assert accelerator.memory().allocated_bytes == 0


@pytest.mark.full
@pytest.mark.parametrize("offload", ["model", "sequential"])
def test_pbr(acc, pbr_folder, offload):
    for views in painted(pbr_folder, acc, offload)[1]:
        assert (views - wanted(pbr_folder)).abs().max() <= ROUNDING


@pytest.mark.parametrize("offload", ["group"])
@stored.any_text()
def test_delight(acc, delight_folder, offload):
    settings = DelightSettings(size=64, steps=2)
    found = []
    for device, mode in (("cpu", "auto"), (acc, offload)):
        pipeline = load_paint(PaintRequest(delight_folder, precision="fp32", offload=mode, device=device))
        found.append(delight_image(pipeline, INPUTS.references, settings))
    assert (found[0] - found[1]).abs().max() <= ROUNDING


def test_inputs_where_the_module_seems_to_be_break_without_us(acc, paint_folder):
    """What users report: inputs that follow a module's own device instead of the one it executes on."""
    pipeline = load_paint(PaintRequest(paint_folder, precision="fp32", offload="none", device=acc))
    with (
        torch.no_grad(),
        pipeline.offloader.hold("reference") as stream,
        pytest.raises(RuntimeError, match=r"same device|should be the same"),
    ):
        stream(torch.zeros(1, 1, 4, 8, 8))
