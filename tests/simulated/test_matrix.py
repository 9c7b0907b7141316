"""Five families, every machine, every offload mode: each cell ends and is near fp32 on the CPU.

`make test` runs a sample in which every machine has one family, each family a machine, and each mode some; `make
test-full` runs all cells and can write the table of docs/matrix.md.
"""

import pytest
import torch

from simulated import accelerator, profiles
from simulated.test_families import MODES, SMALL, loaded_for, rendered

FAMILIES = ("ltx", "hunyuan_video", "hunyuan_video_15", "framepack", "mochi")
MET = {  # in the sample
    "ltx": ("gtx16xx",), "hunyuan_video": ("turing",), "hunyuan_video_15": ("no-conv3d",), "framepack": ("xpu-like",),
    "mochi": ("no-conv3d", "gfx1151", "gfx1201", "mps-like"),
}  # fmt: skip
CELLS = [
    pytest.param(
        family,
        machine,
        offload,
        marks=[] if offload == MODES[(row + column) % len(MODES)] and machine in MET[family] else [pytest.mark.full],
    )
    for row, family in enumerate(FAMILIES)
    for column, machine in enumerate(profiles.PROFILES)
    for offload in MODES
]
# Share of the latents' length: half a dozen roundings of the dtype that the transformer computes in, per step; twice
# that in bf16, whose products CPUs sum differently: one cell is 0.049 off on one processor and 0.070 on another.
ALLOWED = {torch.float32: 1e-4, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-3}


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """Where probes are kept, so that a machine is asked once."""
    return tmp_path_factory.mktemp("state")


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("family", "machine", "offload"), CELLS)
def test_cell(tiny_folder, on_host, state, family, machine, offload):
    if reason := accelerator.reason():
        pytest.skip(reason)
    expected_latents, expected_frames = on_host(family)
    with profiles.on(machine) as profile:
        pipeline = loaded_for(SMALL[family], tiny_folder, profile.facts, offload, "auto", state=state)
        latents, frames = rendered(pipeline, SMALL[family])
        precision = pipeline.precision
    allowed = ALLOWED[precision.compute or precision.transformer]
    assert torch.isfinite(frames).all()
    assert _distance(latents, expected_latents) <= allowed, str(precision)
    assert float((frames - expected_frames).abs().mean()) <= allowed, str(precision)


def test_the_sample_has_every_family_machine_and_mode():
    sample = [cell.values for cell in CELLS if not cell.marks]
    assert [set(column) for column in zip(*sample, strict=True)] == [set(FAMILIES), set(profiles.PROFILES), set(MODES)]
