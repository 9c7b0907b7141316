"""Each simulated machine has the faults it is named for, the probes find them all, and `auto` steers around them."""

import pytest
import torch
import torch.nn.functional as F
from anygpu.compat.device.precision import PLAIN, precision_for
from anygpu.compat.device.probe_store import OK, ProbeStore
from anygpu.compat.report import OPTIONAL
from safetensors.torch import load_file, save_file

from simulated import accelerator, profiles

FOUND = {  # what the probes say is not right, beside what nobody needs
    "turing": {"conv2d.bf16", "conv3d.bf16", "conv3d_channels_last.bf16"},
    "gtx16xx": {f"{name}.{d}" for name in ("conv2d", "conv3d", "conv3d_channels_last") for d in ("bf16", "fp16")},
    "no-conv3d": {f"{name}.{d}" for name in ("conv3d", "conv3d_channels_last") for d in ("fp32", "bf16", "fp16")},
    "gfx1151": {"cast.bf16_to_fp32", "copy.bf16", "conv2d.bf16", "conv3d.bf16", "conv3d_channels_last.bf16"},
    "gfx1201": set(),
    "mps-like": {f"{name}.{d}" for name in ("conv3d", "pad3d") for d in ("fp32", "bf16", "fp16")},
    "xpu-like": set(),
}
AUTO = {  # transformer, VAE of LTX-Video
    "turing": ("fp16-safe", torch.float32), "gtx16xx": ("fp32", torch.float32), "no-conv3d": ("fp32", torch.float32),
    "gfx1151": ("fp16-safe", torch.float32), "gfx1201": ("bf16", torch.bfloat16), "mps-like": ("bf16", torch.float32),
    "xpu-like": ("bf16", torch.bfloat16),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _buildable():
    if reason := accelerator.reason():
        pytest.skip(reason)


@pytest.mark.parametrize("name", profiles.PROFILES)
def test_the_probes_find_exactly_the_faults_and_auto_avoids_them(name, tmp_path):
    with profiles.on(name) as machine:
        store = ProbeStore(machine.facts, tmp_path)
        wrong = {probe for probe, found in store.ask_all().items() if found.status != OK and probe not in OPTIONAL}
        assert wrong == FOUND[name]
        chosen = precision_for(PLAIN, machine.facts, "auto", store)
        assert (chosen.choice, chosen.vae) == AUTO[name]
        met = dict(machine.hits)
        kept = ProbeStore(machine.facts, tmp_path)
        assert precision_for(PLAIN, machine.facts, "auto", kept) == chosen
        assert machine.hits == met, "kept answers ask the device nothing"


def test_faults_end_with_the_block():
    with profiles.on("no-conv3d") as machine, pytest.raises(RuntimeError, match="failed to legalize operation"):
        F.conv3d(torch.ones(1, 2, 3, 4, 4, device=machine.device), torch.ones(2, 2, 3, 3, 3, device=machine.device))
    with accelerator.fresh() as device:
        F.conv3d(torch.ones(1, 2, 3, 4, 4, device=device), torch.ones(2, 2, 3, 3, 3, device=device))


def test_turing_has_no_bf16_convolution_and_fp16_has_its_range():
    with profiles.on("turing") as machine:
        x, w = (torch.ones(1, 4, 3, 6, 6), torch.ones(4, 4, 3, 3, 3))
        with pytest.raises(RuntimeError, match="slow_conv3d_forward"):
            F.conv3d(x.to(machine.device, torch.bfloat16), w.to(machine.device, torch.bfloat16))
        big = torch.full((2, 2), 300.0, device=machine.device, dtype=torch.float16)
        assert (big @ big * 1000).cpu().isinf().all()
        assert machine.facts.emulated == ("bf16",)


def test_gtx16xx_fp16_convolutions_are_nan():
    with profiles.on("gtx16xx") as machine:
        x, w = (
            torch.ones(1, 4, 6, 6, device=machine.device).half(),
            torch.ones(4, 4, 3, 3, device=machine.device).half(),
        )
        assert F.conv2d(x, w).cpu().isnan().all()


@pytest.mark.parametrize("walk", [torch.Tensor.float, lambda x: x.to(torch.float32)])
def test_gfx1151_gives_zeros_on_the_device_only(walk):
    values = torch.randn(64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    with profiles.on("gfx1151", without=("_bf16_to_host_corrupt",)) as machine:
        there = values.to(machine.device)
        assert not walk(there).cpu().any()
        assert torch.equal(walk(values), walk(there.cpu())), "the host's own cast is right"
        assert torch.equal(there.half().cpu(), values.half())
        assert torch.equal(walk(values).to(machine.device).bfloat16().cpu(), values)
        assert torch.equal(values.half().to(machine.device).bfloat16().cpu(), values.half().bfloat16())
    with profiles.on("gfx1151", without=("_bf16_to_fp32_zeros",)) as machine:
        there = values.to(machine.device)
        assert not there.cpu().any()
        assert torch.equal(walk(there).cpu(), walk(values))


def test_gfx1151_aborts_on_large_conv3d_and_counts_mapped_copies(tmp_path):
    with profiles.on("gfx1151") as machine:
        w = torch.ones(1, 1, 1, 3, 3, device=machine.device)
        F.conv3d(torch.ones(1, 1, 1, 256, 256, device=machine.device), w)
        with pytest.raises(RuntimeError, match="Aborted"):
            F.conv3d(torch.ones(1, 1, 1, 512, 512, device=machine.device), w)
        save_file({"weight": torch.ones(64, 64)}, tmp_path / "x.safetensors")
        torch.ones(64, 64).to(machine.device)
        assert machine.stalls == 0
        load_file(tmp_path / "x.safetensors")["weight"].to(machine.device)
        assert machine.stalls == 1


def test_mps_pads_time_wrongly_from_65536_pixels():
    with profiles.on("mps-like") as machine:
        x = torch.ones(1, 1, 2, 256, 256)
        assert not torch.equal(F.pad(x.to(machine.device), (0, 0, 0, 0, 1, 0)).cpu(), F.pad(x, (0, 0, 0, 0, 1, 0)))
        small = x[..., :255]
        assert torch.equal(F.pad(small.to(machine.device), (0, 0, 0, 0, 1, 0)).cpu(), F.pad(small, (0, 0, 0, 0, 1, 0)))
        assert torch.equal(F.pad(x.to(machine.device), (1, 2)).cpu(), F.pad(x, (1, 2)))
        assert F.pad(x.half().to(machine.device), (0, 0, 0, 0, 1, 0)).cpu().isnan().any()
        assert machine.hits["time pad"] == 2


def test_mps_conv3d_is_wrong_in_contiguous_layout_only_and_has_no_float64():
    x, w = torch.ones(1, 8, 3, 4, 4), torch.ones(8, 8, 3, 3, 3)
    with profiles.on("mps-like") as machine:
        there = (x.to(machine.device), w.to(machine.device))
        assert not torch.equal(F.conv3d(*there).cpu(), F.conv3d(x, w))
        last = (tensor.contiguous(memory_format=torch.channels_last_3d) for tensor in there)
        assert torch.equal(F.conv3d(*last).cpu(), F.conv3d(x, w))
        with pytest.raises(RuntimeError, match="float64"):
            x.double().to(machine.device)
        with pytest.raises(RuntimeError, match="Float8"):
            x.to(torch.float8_e4m3fn).to(machine.device)


def test_xpu_refuses_one_large_buffer_and_sliced_weights():
    with profiles.on("xpu-like", allocation_bytes=1 << 20) as machine:
        x = torch.ones(600, 256, device=machine.device)
        with pytest.raises(torch.OutOfMemoryError, match="one allocation"):
            x @ x.mT
        weight = torch.ones(4, 4, 3, 3, 3, device=machine.device)[..., ::2]
        with pytest.raises(RuntimeError, match="strided weight"):
            F.conv3d(torch.ones(1, 4, 3, 6, 6, device=machine.device), weight)
