"""The ladder of attempts ends, keeps what the user chose, and the switches and tiles around a VAE come back."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from anygpu.compat.device.quirks import DevicePolicy
from anygpu.compat.device.vae_policy import convolution_switches, largest_buffer_bytes, straightened, tiled, tiles_below
from anygpu.compat.errors import InputError, UnsupportedError
from anygpu.compat.output_check import (
    BROKEN,
    COLOUR,
    CONSTANT,
    ZEROS,
    UnsoundError,
    checked_parts,
    fault_in_frames,
    fault_in_latents,
)
from anygpu.pipelines.vae.fallback import KERNEL, MEMORY, VALUES, Allowed, Attempt, following, kind_of
from torch import nn

BF16, FP32 = torch.bfloat16, torch.float32
ALL = Allowed(dtype=True, host=True, tiles=(256, 128))


def ladder(kind: str, allowed: Allowed, text: str = "") -> list[str]:
    found, attempt = [], Attempt(BF16)
    while (attempt := following(attempt, kind, text, allowed)) is not None:
        found.append(str(attempt))
        assert len(found) < 10, "the ladder does not end"
    return found


def test_bad_values_go_to_fp32_then_tiles_then_the_cpu():
    cpu = "whole in fp32 on the CPU, which is slow"
    steps = ["whole in fp32", "in tiles of 256 pixels in fp32", "in tiles of 128 pixels in fp32", cpu]
    assert ladder(VALUES, ALL) == ladder(KERNEL, ALL) == steps


def test_memory_goes_to_tiles_first_and_keeps_the_dtype():
    steps = ladder(MEMORY, ALL)
    assert steps[:2] == ["in tiles of 256 pixels in bf16", "in tiles of 128 pixels in bf16"]
    assert "CPU" in steps[2] and len(steps) == 3


def test_a_chosen_precision_is_never_left():
    chosen = Allowed(dtype=False, host=False, tiles=(256,))
    assert ladder(VALUES, chosen) == ladder(MEMORY, chosen) == ["in tiles of 256 pixels in bf16"]
    assert ladder(VALUES, Allowed(False, False, ())) == []


def test_an_error_of_miopen_is_tried_once_without_it():
    steps = ladder(KERNEL, Allowed(False, False, ()), text="miopenStatusUnknownError")
    assert steps == ["whole in bf16 without MIOpen"]


def test_every_ladder_ends():
    for kind, dtype, host in itertools.product((MEMORY, KERNEL, VALUES), (False, True), (False, True)):
        ladder(kind, Allowed(dtype, host, (256, 128, 64), 128), text="MIOpen")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("no"), MEMORY),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), MEMORY),
        (RuntimeError("GET was unable to find an engine to execute this computation"), KERNEL),
        (NotImplementedError("no 3-D kernels"), KERNEL),
        (TypeError("Cannot convert a MPS Tensor to float64 dtype"), KERNEL),
        (UnsoundError(BROKEN), VALUES),
        (UnsupportedError("x", expected="y", fix="z"), ""),
        (InputError("x", expected="y", fix="z"), ""),
        (TypeError("decode() got an unexpected keyword"), ""),
        (RuntimeError("Expected all tensors to be on the same device"), ""),
    ],
    ids=str,
)
def test_failures_are_told_apart(error, kind):
    assert kind_of(error) == kind


def test_faults_of_frames_and_latents():
    noise = torch.randn(1, 3, 2, 4, 4)
    colour = torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1, 1).expand(1, 3, 2, 4, 4)
    spoiled = noise.clone()
    spoiled[0, 1, 1, 2, 3] = float("inf")
    assert [fault_in_frames(each) for each in (noise, colour, spoiled)] == ["", COLOUR, BROKEN]
    repeated = torch.randn(1, 3, 2, 2, 2).repeat(1, 1, 1, 2, 2)
    assert [fault_in_frames(repeated, cell) for cell in (1, 2)] == ["", COLOUR], "channels unfolded from lost latents"
    assert fault_in_frames(noise, 2) == fault_in_frames(noise, 4) == ""
    flat = [noise, colour, torch.zeros_like(noise), torch.ones_like(noise), spoiled]
    assert [fault_in_latents(each) for each in flat] == ["", "", ZEROS, CONSTANT, BROKEN]


def test_a_broken_part_stops_the_rest():
    class Two(nn.Module):
        def forward(self, x):
            calls.append(x)
            return x, None

    calls: list[torch.Tensor] = []
    coder = Two()
    with pytest.raises(UnsoundError, match=BROKEN), checked_parts(coder, fault_in_frames):
        for value in (1.0, float("nan"), 2.0):
            coder(torch.full((1, 3, 1, 2, 2), value) + torch.rand(1, 3, 1, 2, 2))
    assert len(calls) == 2
    coder(torch.full((1, 3, 1, 2, 2), float("nan")))  # nothing stays attached


@pytest.mark.parametrize("benchmark", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_switches_are_scoped_and_restored_also_after_an_error(monkeypatch, enabled, benchmark):
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "enabled", enabled)
    monkeypatch.setattr(cudnn, "benchmark", benchmark)
    radeon = DevicePolicy(vae_cudnn=False, benchmark=False)
    with pytest.raises(KeyError), convolution_switches(radeon):
        assert (cudnn.enabled, cudnn.benchmark) == (False, False)
        raise KeyError
    assert (cudnn.enabled, cudnn.benchmark) == (enabled, benchmark)
    with convolution_switches(DevicePolicy()):
        assert (cudnn.enabled, cudnn.benchmark) == (enabled, benchmark)
    with convolution_switches(DevicePolicy(), library=False):
        assert not cudnn.enabled


def test_tiling_is_scoped_and_its_stride_is_whole_latents():
    vae = SimpleNamespace(
        use_tiling=False,
        tile_sample_min_height=512,
        tile_sample_min_width=512,
        tile_sample_stride_height=448,
        tile_sample_stride_width=448,
        spatial_compression_ratio=32,
        config={},
    )
    before = dict(vars(vae))
    with tiled(vae, 64):
        assert (vae.use_tiling, vae.tile_sample_min_width, vae.tile_sample_stride_width) == (True, 64, 32)
    assert vars(vae) == before
    with tiled(vae, 0):
        assert not vae.use_tiling and vae.tile_sample_min_height == 512
    assert tiles_below(256, 32) == (128, 64) and tiles_below(256, 64) == (128,) and tiles_below(64) == ()


def test_weights_are_straightened_and_keep_their_values():
    conv = nn.Conv3d(4, 6, 3)
    plain = conv.weight.detach().clone()
    conv.weight.data = plain.transpose(2, 4).contiguous().transpose(2, 4)
    assert not conv.weight.is_contiguous()
    assert straightened(conv) == 1 and conv.weight.is_contiguous() and torch.equal(conv.weight, plain)
    conv.weight.data = plain.contiguous(memory_format=torch.channels_last_3d)
    assert straightened(conv) == 0


def test_the_largest_buffer_is_about_what_a_decoder_makes():
    config = {"block_out_channels": (128, 256, 512, 512)}
    assert largest_buffer_bytes(config, 17, 720, 1280, 2) == 2 * 128 * 19 * 722 * 1282 * 2
