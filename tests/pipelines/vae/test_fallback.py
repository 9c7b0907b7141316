"""Decode fallbacks end and keep what the user chose, and the switches and tiles around a VAE come back."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.device.execution import checked_parts
from anygpu.compat.device.failures import KERNEL, MEMORY, VALUES, failure_kind
from anygpu.compat.device.quirks import DevicePolicy, convolution_switches
from anygpu.compat.errors import InputError, UnsupportedError
from anygpu.compat.output_check import (
    BROKEN,
    COLOUR,
    CONSTANT,
    ZEROS,
    InvalidOutputError,
    fault_in_frames,
    fault_in_latents,
)
from anygpu.pipelines.base import Silent
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.vae.fallback import decoding, make_contiguous, tiled
from anygpu.pipelines.vae.plan import (
    DecodeMethod,
    DecodeRequest,
    decode_methods,
    ladder_for,
    largest_buffer_bytes,
    next_method,
    tiles_below,
)
from torch import nn

BF16 = torch.bfloat16
TILED = {"tiles": (256, 128), "host": True}
CAUSAL = {"counts": (0, 2, 1), "streams": (256, 128), **TILED}
CPU, CPU_CHUNKS = (f"{form} in fp32 on the CPU (slow)" for form in ("whole", "in chunks of 1 latent frame"))


def fallbacks(kind: str, text: str = "", automatic: bool = True, first: int = 0, **allowed: Any) -> list[str]:
    """What is tried, in words, while every method from form ``first`` on fails."""
    forms = decode_methods(DecodeMethod(BF16), **allowed)
    method, tried = forms[first], []
    while (method := next_method(method, kind, text, forms, automatic)) is not None:
        tried.append(str(method))
        assert len(tried) < 20, "the fallbacks do not end"
    return tried


def forms_of(**allowed: Any) -> list[str]:
    return [str(form).removesuffix(" in bf16") for form in decode_methods(DecodeMethod(BF16), **allowed)]


def test_exact_forms_come_before_seams():
    chunks = ["in chunks of 2 latent frames", "in chunks of 1 latent frame"]
    layers = [f"{chunks[1]}, layer by layer over {side} pixels" for side in (256, 128)]
    tiles = [f"in tiles of {side} pixels, {chunks[1]}" for side in (256, 128)]
    assert forms_of(**CAUSAL) == ["whole", *chunks, *layers, *tiles, CPU_CHUNKS]
    assert fallbacks(MEMORY, **CAUSAL)[:-1] == [f"{form} in bf16" for form in (*chunks, *layers, *tiles)]


def test_tiles_that_are_a_choice_come_before_the_slow_way():
    chunks = ["whole", "in chunks of 2 latent frames", "in chunks of 1 latent frame"]
    tiles = ["in tiles of 256 pixels", *(f"in tiles of 256 pixels, {form}" for form in chunks[1:])]
    smaller = f"in tiles of 128 pixels, {chunks[2]}"
    layers = [f"{chunks[2]}, layer by layer over {side} pixels" for side in (256, 128)]
    cpu = "in tiles of 256 pixels, in chunks of 1 latent frame in fp32 on the CPU (slow)"
    assert forms_of(start=256, **CAUSAL) == [*chunks, *tiles, smaller, *layers, cpu]
    assert forms_of(start=256, whole_first=False, **CAUSAL) == [*tiles, smaller, *layers, cpu]


def test_bad_values_go_to_fp32_then_tiles_then_the_cpu():
    steps = ["whole in fp32", "in tiles of 256 pixels in fp32", "in tiles of 128 pixels in fp32", CPU]
    assert fallbacks(VALUES, **TILED) == fallbacks(KERNEL, **TILED) == steps
    assert fallbacks(VALUES, **CAUSAL, first=3)[1:] == [CPU_CHUNKS], "nothing is smaller than the CPU's way"


def test_memory_keeps_the_dtype():
    steps = fallbacks(MEMORY, **TILED)
    assert steps == ["in tiles of 256 pixels in bf16", "in tiles of 128 pixels in bf16", CPU]


def test_a_chosen_precision_is_never_left():
    steps = ["in tiles of 256 pixels in bf16"]
    assert fallbacks(VALUES, automatic=False, tiles=(256,)) == fallbacks(MEMORY, automatic=False, tiles=(256,)) == steps
    assert fallbacks(VALUES, automatic=False) == []


def test_an_error_of_miopen_is_tried_once_without_it():
    assert fallbacks(KERNEL, "miopenStatusUnknownError", automatic=False) == ["whole in bf16 without MIOpen"]


def test_every_list_of_fallbacks_ends():
    for kind, automatic, host in itertools.product((MEMORY, KERNEL, VALUES), (False, True), (False, True)):
        for start in (0, 256):
            fallbacks(kind, "MIOpen", automatic, start=start, **{**CAUSAL, "host": host})


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("no"), MEMORY),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), MEMORY),
        (RuntimeError("GET was unable to find an engine to execute this computation"), KERNEL),
        (NotImplementedError("no 3-D kernels"), KERNEL),
        (TypeError("Cannot convert a MPS Tensor to float64 dtype"), KERNEL),
        (InvalidOutputError(BROKEN), VALUES),
        (UnsupportedError("x", expected="y", fix="z"), ""),
        (InputError("x", expected="y", fix="z"), ""),
        (TypeError("decode() got an unexpected keyword"), ""),
        (RuntimeError("Expected all tensors to be on the same device"), ""),
    ],
    ids=str,
)
def test_failures_are_told_apart(error, kind):
    assert failure_kind(error) == kind


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
    with pytest.raises(InvalidOutputError, match=BROKEN), checked_parts(coder, fault_in_frames):
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
        use_tiling=False, tile_sample_min_height=512, tile_sample_min_width=512, tile_sample_stride_height=448,
        tile_sample_stride_width=448, spatial_compression_ratio=32, config={},
    )  # fmt: skip
    before = dict(vars(vae))
    with tiled(vae, 64):
        assert (vae.use_tiling, vae.tile_sample_min_width, vae.tile_sample_stride_width) == (True, 64, 32)
    assert vars(vae) == before
    with tiled(vae, 0):
        assert not vae.use_tiling and vae.tile_sample_min_height == 512
    assert tiles_below(256, 32) == (128, 64) and tiles_below(256, 64) == (128,) and tiles_below(64) == ()


def test_weights_are_made_contiguous_and_keep_their_values():
    conv = nn.Conv3d(4, 6, 3)
    plain = conv.weight.detach().clone()
    conv.weight.data = plain.transpose(2, 4).contiguous().transpose(2, 4)
    assert not conv.weight.is_contiguous()
    assert make_contiguous(conv) == 1 and conv.weight.is_contiguous() and torch.equal(conv.weight, plain)
    conv.weight.data = plain.contiguous(memory_format=torch.channels_last_3d)
    assert make_contiguous(conv) == 0


def test_the_largest_buffer_is_about_what_a_decoder_makes():
    config = {"block_out_channels": (128, 256, 512, 512)}
    assert largest_buffer_bytes(config, 17, 720, 1280, 2) == 2 * 128 * 19 * 722 * 1282 * 2


def test_a_bar_goes_with_the_tiles_and_a_cpu_is_not_told_to_offload(tiny_folder, recorded, monkeypatch):
    pipeline, progress = load(LoadRequest(tiny.build("mochi", tiny_folder), device="cpu", precision="fp32")), recorded()
    latents = torch.randn(1, 12, 1, 16, 16)
    with decoding(pipeline, latents.shape, progress, DecodeRequest("streaming", tile=16)) as passes:
        passes.decode(latents)
    done = [done for done, total, stage in progress.steps if stage == "decoding" and done < total]
    assert len(done) == len(set(done)) > 12, "each step is further, beyond the layers' number"

    def refuse(*_):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(pipeline.parts.read("vae").decoder, "forward", refuse)
    told = pytest.raises(torch.OutOfMemoryError, match=r"The input is kept: decode again with method auto\.$")
    with told, decoding(pipeline, latents.shape, Silent(), DecodeRequest("full")) as passes:
        passes.decode(latents)
    nan = torch.full((1, 3, 1, 128, 128), float("nan"))
    monkeypatch.setattr(pipeline.parts.read("vae").decoder, "forward", lambda *_: (nan, None))
    told = pytest.raises(UnsupportedError, match=r"in fp32, or download the VAE again; the input is kept\.$")
    with told, decoding(pipeline, latents.shape, Silent(), DecodeRequest("full")) as passes:
        passes.decode(latents)


@pytest.mark.parametrize("mode", ["none", "model", "group", "sequential", "comfyui"])
def test_a_decode_without_room_is_told_of_an_offload_that_it_does_not_have(tiny_folder, monkeypatch, mode):
    """Other parts have left the device by then, so that offload model would make no more room."""
    pipeline = load(LoadRequest(tiny.build("mochi", tiny_folder), device="cpu", precision="fp32"))
    with decoding(pipeline, (1, 12, 1, 16, 16), Silent(), DecodeRequest("full")) as passes:
        passes.device = torch.device("cuda", 0)
        monkeypatch.setattr(type(pipeline.offloader), "mode", mode)
        error = passes._final_error(torch.OutOfMemoryError("no"), MEMORY, "no", "decoding", "")
    assert ("choose offload group on the load node" in str(error)) == (mode in ("none", "model"))
    assert "offload" not in str(error) or "offload group" in str(error)


def test_what_overflows_between_the_layers_of_a_stream_is_one_line(tiny_folder, monkeypatch):
    """No layer made it, so none can be named."""
    pipeline = load(LoadRequest(tiny.build("mochi", tiny_folder), device="cpu", precision="fp32"))
    monkeypatch.setattr("anygpu.pipelines.vae.tiled.streamed", lambda *_: torch.full((1, 3, 1, 128, 128), float("nan")))
    told = pytest.raises(UnsupportedError, match="NaN or infinite values")
    with told, decoding(pipeline, (1, 12, 1, 16, 16), Silent(), DecodeRequest("streaming", tile=16)) as passes:
        passes.decode(torch.randn(1, 12, 1, 16, 16))


def test_where_a_decoder_goes_wrong_is_named_and_one_colour_may_be_the_model_s(tiny_folder, recorded):
    pipeline = load(LoadRequest(tiny.build("mochi", tiny_folder), device="cpu", precision="fp32"))
    decoder = pipeline.parts.read("vae").decoder
    name, weight = next((n, w) for n, w in decoder.named_parameters() if "up_blocks.1" in n and w.ndim > 1)
    with torch.no_grad():
        weight.view(-1)[0] = float("nan")
    named = pytest.raises(UnsupportedError, match=rf"NaN first from .*vae\.decoder\.{name.rpartition('.')[0]} \(")
    with named, decoding(pipeline, (1, 12, 2, 4, 4), Silent()) as passes:
        passes.decode(torch.randn(1, 12, 2, 4, 4))
    for weight in decoder.parameters():
        weight.requires_grad_(False).zero_()
    vae, progress = pipeline.parts.read("vae"), recorded()
    with decoding(pipeline, (1, 12, 1, 8, 12), progress, DecodeRequest("tiled", tile=64)) as passes:
        passes.decode(torch.randn(1, 12, 1, 8, 12))
        assert vae.use_tiling
        _held = passes._open  # whose collection would close it
    assert not vae.use_tiling and any(f"{COLOUR}, in fp32 on the CPU too" in text for text in progress.said)


def test_frames_per_chunk_is_what_a_decode_begins_with(tiny_folder):
    pipeline = load(LoadRequest(tiny.build("mochi", tiny_folder), device="cpu", precision="fp32"))
    for method in ("auto", "tiled", "chunked", "cpu"):
        plans = [ladder_for(pipeline, (9, 16, 16), DecodeRequest(method, frames=frames)) for frames in (4, 0)]
        assert [plan.method.frames for plan in plans] == [4, 8 if method == "chunked" else 0], method
