"""Decoders in chunks of time and layer by layer equal the whole; tiles add up to one; nothing is done twice."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from anygpu.compat.device.execution import DrawnOnHost, generator_for, state_of
from anygpu.compat.errors import InputError, UnsupportedError
from anygpu.compat.memory.transfer import Transfer
from anygpu.pipelines.base import ProgressStage, Silent, SubProgress
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.vae import tiled as decode_work
from anygpu.pipelines.vae.fallback import decoding
from anygpu.pipelines.vae.plan import DecodeMethod, DecodeRequest, checked_request
from anygpu.pipelines.vae.tiled import HeldDecoder, RegionTask, ResumableDecode, decode_as_published, decoder_call
from tiny import parts
from tiny.weights import randomise

HOST = Transfer(torch.device("cpu"), torch.float32)
# Each value is a sum of a few hundred products, added up in another order: some ulps of values around 1.
ROUNDING = 64 * torch.finfo(torch.float32).eps
CASES = {  # name: latent channels, pixels per cell, frames per latent frame
    "hunyuan_vae": (16, 8, 4),
    "mochi_vae": (12, 8, 6),
    "hunyuan15_vae": (32, 16, 4),
    "ltx_vae": (128, 32, 8),
    "ltx_vae_095": (128, 32, 8),
}
CAUSAL = ("mochi_vae", "hunyuan15_vae")
FULL = pytest.mark.full


def sampled(names, *quick: str) -> list:
    """``names`` as parameters, of which only ``quick`` run outside the full run."""
    return [pytest.param(name, marks=[] if name in quick else [FULL]) for name in names]


@pytest.fixture(scope="module")
def made():
    found = {}

    def of(name: str):
        if name not in found:
            module = getattr(parts, name)().eval()
            randomise(module, 0)
            decode_as_published(module)
            found[name] = module
        return found[name]

    with torch.no_grad():
        yield of


def work_for(name: str, frames: int = 3, rows: int = 2, columns: int = 3, **watched: Any) -> ResumableDecode:
    channels, spatial, temporal = CASES[name]
    latents = torch.randn(1, channels, frames, rows, columns, generator=torch.Generator().manual_seed(1))
    return ResumableDecode(latents, (spatial, temporal), **watched)


def upstream(module, work: ResumableDecode, time=None) -> torch.Tensor:
    arguments = (work.latents,) if time is None else (work.latents, time)
    return module.decode(*arguments, return_dict=False)[0]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=ROUNDING * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("side", [0, 16, pytest.param(64, marks=FULL)])
@pytest.mark.parametrize("name", sampled(CASES, "hunyuan_vae", "ltx_vae_095", "mochi_vae"))
def test_whole_and_layer_by_layer_are_upstreams_own_decode(made, name, side):
    """Six latent frames are two windows of HunyuanVideo's framewise decode."""
    module, work = made(name), work_for(name, frames=6 if name == "hunyuan_vae" and not side else 3)
    time = torch.tensor([0.05]) if name == "ltx_vae_095" else None
    close(work.frames(module, HOST, DecodeMethod(torch.float32, stream=side), time), upstream(module, work, time))


def test_short_windows_are_those_of_diffusers(made, monkeypatch):
    module, work = made("hunyuan_vae"), work_for("hunyuan_vae", frames=6)
    expected = upstream(module, work)
    monkeypatch.setattr(module, "tile_sample_min_num_frames", 64)
    monkeypatch.setattr(module, "tile_sample_stride_num_frames", 48)
    close(work.frames(module, HOST, DecodeMethod(torch.float32, window=4)), expected)


@pytest.mark.parametrize("count", [2, pytest.param(1, marks=FULL)])
@pytest.mark.parametrize("name", CAUSAL)
def test_chunks_of_time_equal_the_whole(made, name, count):
    module, work, calls = made(name), work_for(name), []
    handle = module.decoder.register_forward_hook(lambda *_: calls.append(1))
    found = work.frames(module, HOST, DecodeMethod(torch.float32, frames=count))
    handle.remove()
    assert len(calls) == -(-3 // count)
    close(found, upstream(module, work))


@pytest.mark.parametrize("name", sampled(CAUSAL, "hunyuan15_vae"))
def test_chunks_of_time_layer_by_layer_equal_the_whole(made, name):
    module, work = made(name), work_for(name)
    close(work.frames(module, HOST, DecodeMethod(torch.float32, stream=16, frames=2)), upstream(module, work))


def test_no_forward_stays_changed(made):
    module = made("mochi_vae")
    before = {layer: "forward" in vars(layer) for layer in module.modules()}
    work_for("mochi_vae").frames(module, HOST, DecodeMethod(torch.float32, frames=1, stream=32))
    assert before == {layer: "forward" in vars(layer) for layer in module.modules()}


@pytest.mark.parametrize(("length", "tile", "overlap"), [(10, 4, 1), (9, 4, 3), (5, 4, 2), (7, 7, 3), (64, 9, 0)])
def test_tiles_cover_and_their_weights_add_up_to_one(length, tile, overlap):
    edges = decode_work.tiles_over(length, tile, overlap)
    total = torch.zeros(length)
    for (first, end), weight in zip(edges, decode_work.weights_over(edges, length), strict=True):
        assert end - first == min(tile, length) and bool((weight >= 0).all())
        total[first:end] += weight
    assert edges[0][0] == 0 and edges[-1][1] == length
    assert all(before[1] - after[0] >= overlap for before, after in pairwise(edges))
    torch.testing.assert_close(total, torch.ones(length))


class Flat(torch.nn.Module):
    """A decoder without a neighbourhood: every tile of it is a part of the whole, exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"block_out_channels": (3,)}
        self.decoder = torch.nn.Upsample(scale_factor=(1, 8, 8))


def flat_work() -> ResumableDecode:
    latents = torch.randint(-4, 5, (1, 3, 1, 6, 7), generator=torch.Generator().manual_seed(0)).float()
    return ResumableDecode(latents, (8, 1))


@pytest.mark.parametrize(("tile", "overlap"), [(16, 8), (32, -1), (24, 0)])
def test_blending_changes_nothing_where_tiles_agree(tile, overlap):
    module, work = Flat(), flat_work()
    found = work.frames(module, HOST, DecodeMethod(torch.float32, tile=tile, overlap=overlap))
    torch.testing.assert_close(found, module.decoder(work.latents), atol=ROUNDING, rtol=0)
    assert work.apart < ROUNDING


def test_tiles_that_disagree_are_measured(made):
    work = work_for("hunyuan_vae", frames=1, rows=5, columns=5)
    work.frames(made("hunyuan_vae"), HOST, DecodeMethod(torch.float32, tile=32))
    assert work.apart > 0.01


@pytest.mark.parametrize(("tile", "overlap"), [(64, 128), (64, 64), (128, 128)])
def test_an_overlap_that_larger_tiles_had_does_not_make_thousands_of_smaller_ones(tile, overlap):
    """What memory leaves of tiles of 256 or more pixels blends into half of each at most, as what can be asked for."""
    latents, method = torch.empty(1, 3, 1, 90, 160), DecodeMethod(torch.float32, tile=tile, overlap=overlap)
    (count,) = decode_work.pieces_of(Flat(), latents, method, 8).values()
    assert count == decode_work.pieces_of(Flat(), latents, replace(method, overlap=tile // 2), 8).total()
    assert count <= 5 * (90 * 160) // (tile // 8) ** 2


def failing(module, after: int, calls: list):
    """Make the decoder find no room once, at its call ``after``."""

    def before(_module, inputs):
        calls.append(tuple(inputs[0].shape[2:]))
        if len(calls) == after:
            raise torch.OutOfMemoryError("no room")

    return module.decoder.register_forward_pre_hook(before)


def test_tiles_that_are_done_are_not_done_again():
    """Six tiles of 32; the third finds no room: it and the three after it are split, the first two stay."""
    module, work, calls = Flat(), flat_work(), []
    handle = failing(module, 3, calls)
    with pytest.raises(torch.OutOfMemoryError):
        work.frames(module, HOST, DecodeMethod(torch.float32, tile=32, overlap=8))
    done = work.windows[0].video.clone()
    left = len(work.windows[0].pending)
    found = work.frames(module, HOST, DecodeMethod(torch.float32, tile=24, overlap=8))
    handle.remove()
    assert bool(done.any()) and left == 2 and calls[0] == (1, 4, 4) and calls[-1] == (1, 3, 3)
    assert calls.count((1, 4, 4)) == 3, "a finished tile was decoded again"
    torch.testing.assert_close(found, module.decoder(work.latents), atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("after", [DecodeMethod(torch.float32, frames=1), DecodeMethod(torch.float32, stream=32)])
@pytest.mark.parametrize("name", sampled(CAUSAL, "mochi_vae"))
def test_chunks_that_are_done_are_not_done_again(made, name, after):
    module, work, calls = made(name), work_for(name, frames=4), []
    handle = failing(module, 2, calls)
    with pytest.raises(torch.OutOfMemoryError):
        work.frames(module, HOST, DecodeMethod(torch.float32, frames=2))
    assert work.windows[0].pending[0].frames == 2
    found = work.frames(module, HOST, after)
    handle.remove()
    assert [shape[0] for shape in calls] == [2, 2] + [1, 1] * (after.stream == 0)
    close(found, upstream(module, work))


def without_neighbours(module):
    """``module`` with kernels that see their own column of voxels alone and an attention that adds nothing."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.Conv3d) and layer.kernel_size[-1] == 3:
            middle = layer.weight[..., 1, 1].clone()
            layer.weight.zero_()
            layer.weight[..., 1, 1] = middle
        if hasattr(layer, "proj_out"):
            layer.proj_out.weight.zero_(), layer.proj_out.bias.zero_()
    return module


def test_a_region_in_the_middle_of_its_chunks_splits_with_what_it_remembers():
    """Where no voxel sees its neighbours tiles are exact, so only a wrong memory could make a difference."""
    module, calls = parts.hunyuan15_vae().eval(), []
    randomise(module, 0)
    with torch.no_grad():
        without_neighbours(module)
        work = work_for("hunyuan15_vae", rows=2, columns=2)
        handle = failing(module, 2, calls)
        with pytest.raises(torch.OutOfMemoryError):
            work.frames(module, HOST, DecodeMethod(torch.float32, frames=1))
        found = work.frames(module, HOST, DecodeMethod(torch.float32, frames=1, tile=16, overlap=0))
        handle.remove()
        assert calls[2:] == [(1, 1, 1)] * 8, "four tiles of the two frames that were left"
        close(found, upstream(module, work))


@pytest.mark.full
def test_a_stream_goes_on_with_smaller_tiles(made):
    module, calls, sides = made("hunyuan15_vae"), [], []
    layer = module.decoder.up_blocks[-1].resnets[0]

    def before(_module, inputs):
        calls.append(inputs[0].shape[-1])
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room")

    def smaller(side: int) -> int:
        sides.append(side)
        return side // 2

    work = work_for("hunyuan15_vae", rows=3, columns=4, smaller=smaller)
    conv_in = []
    counting = module.decoder.conv_in.register_forward_pre_hook(lambda *_: conv_in.append(1))
    handle = layer.register_forward_pre_hook(before)
    found = work.frames(module, HOST, DecodeMethod(torch.float32, stream=32))
    handle.remove(), counting.remove()
    assert sides == [32] and calls[3] < calls[2]
    alone = len(conv_in)
    conv_in.clear()
    assert alone > 0
    close(found, upstream(module, work))


def test_a_decoder_that_draws_noise_is_not_streamed(made):
    module = made("ltx_vae")
    block = module.decoder.up_blocks[0].resnets[0]
    block.per_channel_scale1 = torch.nn.Parameter(torch.ones(block.conv1.conv.in_channels, 1, 1))
    try:
        with pytest.raises(UnsupportedError, match="draws new noise"):
            work_for("ltx_vae").frames(module, HOST, DecodeMethod(torch.float32, stream=32))
    finally:
        block.per_channel_scale1 = None


def test_chunks_of_a_decoder_that_looks_ahead_are_refused_without_a_way_that_it_may_refuse_too():
    with pytest.raises(UnsupportedError, match="looks ahead") as refused:
        decoding(SimpleNamespace(spec=FAMILIES["ltx"]), (1, 128, 3, 2, 2), Silent(), DecodeRequest("chunked"))
    assert "auto" in refused.value.fix and "streaming" not in refused.value.fix


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (DecodeRequest("fast"), "decode method 'fast'"),
        (DecodeRequest("tiled", tile=8), "at least 16 pixels"),
        (DecodeRequest("tiled", tile=64, overlap=40), "0 to 32 pixels"),
        (DecodeRequest("tiled", tile=64, overlap=-2), "The nearest value is -1"),
        (DecodeRequest("chunked", frames=-1), "frames_per_chunk -1"),
    ],
)
def test_values_out_of_range_are_told(form, told):
    with pytest.raises(InputError, match=told):
        checked_request(form, 8)


def test_noise_is_drawn_on_the_host_however_it_is_asked_for():
    state = state_of(generator_for(3))
    for ask in (lambda: torch.randn((2, 3)), lambda: torch.randn(2, 3), lambda: torch.randn(size=(2, 3))):
        with DrawnOnHost(state):
            assert torch.equal(ask(), torch.randn(2, 3, generator=generator_for(3)))


def test_noise_that_layers_draw_is_the_seeds_wherever_a_part_is_decoded(made):
    module, time, before = made("ltx_vae_091"), torch.tensor([0.05]), torch.get_rng_state()
    latents = torch.randn(1, 128, 2, 3, 3, generator=torch.Generator().manual_seed(1))

    def frames(seed: int, tile: int = 0, together: Any = None) -> torch.Tensor:
        noise = state_of(generator_for(seed))
        work = ResumableDecode(latents, (32, 8), together=together, noise=noise)
        return work.frames(module, HOST, DecodeMethod(torch.float32, tile=tile), time)

    def elsewhere(tasks: list[RegionTask], _: Any) -> list[torch.Tensor]:
        alone = HeldDecoder(module, HOST, tasks[0].method, time)
        return [ResumableDecode(task.latents, (32, 8), noise=task.noise).region(task, alone) for task in tasks]

    assert torch.equal(frames(1), frames(1)) and not torch.equal(frames(1), frames(2))
    assert torch.equal(frames(1, 64, elsewhere), frames(1, 64))
    assert torch.equal(torch.get_rng_state(), before)


def test_parts_of_a_work_share_the_bar(recorded):
    progress = recorded()
    share = SubProgress(progress, 1, 3, "part")
    share.step(2, 10, ProgressStage("decoding"))
    share.step(3, 10, ProgressStage("encoding", "image"))
    assert progress.steps == [(12, 30, "decoding part 2 of 3"), (13, 30, "encoding image part 2 of 3")]


def test_decoder_call_takes_the_quantised_latents(made):
    module, work = made("hunyuan_vae"), work_for("hunyuan_vae")
    with nullcontext():
        expected = module.decoder(module.post_quant_conv(work.latents))
    assert torch.equal(decoder_call(module, work.latents, None), expected)
