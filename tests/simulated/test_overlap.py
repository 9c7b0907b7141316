"""Weights that come while others compute: modelled time, the order of streams, and results, by a clock."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from anygpu.compat.device.rates import RATES
from anygpu.compat.memory import prefetch
from anygpu.compat.memory.hooks import GroupHooks
from anygpu.compat.memory.offloader import PINNED, PLAIN, HostWeights, OffloadOptions
from anygpu.compat.memory.parts import Parts
from anygpu.compat.memory.prefetch import CopyStream, GroupLayout, copy_stream
from anygpu.compat.memory.standalone import StandaloneOffloader
from anygpu.compat.memory.statistics import MemoryStats
from torch import nn

from simulated import accelerator
from simulated.clock import Times, clocked

BLOCKS, WIDTH, TOKENS, FORWARDS = 24, 64, 96, 4
PART = "text_encoder"  # of which nothing stays on the device between forwards
TIED = 1.05  # times the slower of link and device, and no more
# Copying a block takes as long as computing it, so that whatever is not overlapped shows.
EVEN = replace(RATES["RTX 4090"], fp32=0.9e12, link=20e9, memory=1e15, launch=1e-9)


class Blocks(nn.Module):
    """Blocks of two layers, behind a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def run(acc: torch.device, pinned: bool = True, ahead: bool = True, mode: str = "group") -> tuple[Times, MemoryStats]:
    """A few forwards by the clock under our offload; they give what the resident model gives, bit for bit.

    Args:
        ahead: False leaves no room for weights that come ahead.
    """
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(TOKENS, WIDTH).to(acc)
    host_weights = HostWeights({PART: PINNED if pinned else PLAIN})
    options = OffloadOptions(keep_free_bytes=0 if ahead else 2**50, host_weights=host_weights)
    with torch.no_grad():
        resident = model.to(acc)(x).cpu()
        offloader = StandaloneOffloader(Parts({PART: lambda _: model.to("cpu")}), acc, mode, options)
        with offloader.hold(PART) as part, clocked(EVEN, index=acc.index) as clock:
            for _ in range(FORWARDS):
                result = part(x)
            times = clock.times()
        assert torch.equal(result.cpu(), resident)
        offloader.release(PART)
    return times, offloader.memory_stats


@pytest.mark.full
@pytest.mark.parametrize("mode", ["group", "sequential"])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("pinned", [True, False], ids=["locked", "staged"])
def test_streaming_takes_what_the_slower_of_link_and_device_must_take(acc, pinned, index, mode):
    device = torch.device(acc.type, index)
    with torch.acc.device(index):
        times, stats = run(device, pinned, mode=mode)
        alone, _ = run(device, pinned, ahead=False, mode=mode)
    assert times.elapsed <= TIED * times.bound < 0.6 * alone.elapsed
    weights = sum(tensor.nbytes for tensor in Blocks().parameters())
    assert stats.moved_bytes <= weights * (FORWARDS + 2 / BLOCKS), "each forward once, and one block for nothing"
    assert accelerator.memory(index).allocated_bytes == 0


def test_memory_is_that_of_the_block_in_use_and_of_what_comes_ahead(acc):
    block = 2 * 4 * WIDTH * (WIDTH + 1)
    for ahead in (0, 1, 2):
        accelerator.reset_peak()
        torch.manual_seed(0)
        model, x = Blocks(), torch.randn(TOKENS, WIDTH).to(acc)
        hooks = GroupHooks(model, acc, True, MemoryStats(), pinned=True, copies=copy_stream(acc))
        hooks.ahead_bytes = ahead * hooks.largest_bytes
        with torch.no_grad():
            model(x), model(x)
        assert hooks.largest_bytes == block
        assert 3 * x.nbytes + ahead * block < accelerator.memory().peak_bytes <= 5 * x.nbytes + (1 + ahead) * block
        hooks.remove()
        del x


# ---- what the clock must see --------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_prefetch_that_is_one_block_late_costs_time(acc, monkeypatch):
    """It begins when its own block is asked for; the clock tells what the computation then waits for."""
    monkeypatch.setattr(GroupHooks, "_prefetch", lambda hooks, copies: None)
    times, _ = run(acc)
    assert times.elapsed > 1.8 * times.bound and times.waited_for_copies > 0.8 * times.copying


@pytest.mark.parametrize("pinned", [True, False], ids=["locked", "staged"])
def test_a_missing_wait_for_a_copy_is_refused(acc, monkeypatch, pinned):
    monkeypatch.setattr(CopyStream, "wait_for", lambda copies, arrived: None)
    with pytest.raises(RuntimeError, match=r"uses memory that stream .* writes; found no wait"):
        run(acc, pinned)


def test_memory_that_is_filled_while_it_is_read_is_refused(acc, monkeypatch):
    monkeypatch.setattr(CopyStream, "leave", lambda copies: None)
    with pytest.raises(RuntimeError, match="may be given memory that stream 0 of acc:0 still uses; found no wait"):
        run(acc)


def test_the_stream_of_copies_waits_for_a_block_as_soon_as_it_is_left(acc, monkeypatch):
    """torch waits for this stream alone before it unmaps memory of expandable segments (pytorch/pytorch#196258)."""
    waited, copies = [], copy_stream(acc)
    monkeypatch.setattr(CopyStream, "_mark", lambda copies, stream: SimpleNamespace(of=stream))
    copies.stream = SimpleNamespace(wait_event=waited.append)
    copies.leave()
    assert [event.of for event in waited] == [torch.accelerator.current_stream(acc)]


def test_a_buffer_that_is_written_before_its_copy_has_ended_is_refused(acc, monkeypatch):
    monkeypatch.setattr(prefetch._Buffer, "wait", lambda buffer: None)
    with pytest.raises(RuntimeError, match="locked host memory is written while a copy out of it is on its way"):
        run(acc, pinned=False)


# ---- what may go wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [True, False], ids=["locked", "staged"])
def test_a_copy_waits_for_the_computation_that_had_its_memory(acc, pinned):
    """Else it overwrites weights in use, where the link is faster than the device."""
    weight = torch.randn(WIDTH, WIDTH)
    layout, copies = GroupLayout([weight.pin_memory() if pinned else weight]), copy_stream(acc)
    x = torch.randn(TOKENS, WIDTH).to(acc)
    with clocked(EVEN):
        for _ in range(2):
            memory, arrived = copies.bytes_on_device(layout, lambda: None)
            copies.wait_for(arrived)
            x = x @ layout.places[0].within(memory)
            del memory
            copies.leave()


def test_a_device_without_room_brings_nothing_ahead_and_goes_on(acc):
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(TOKENS, WIDTH).to(acc)
    with torch.no_grad():
        resident = model.to(acc)(x).cpu()
        hooks = GroupHooks(model.to("cpu"), acc, True, MemoryStats(), pinned=True, copies=copy_stream(acc))
        hooks.ahead_bytes = hooks.largest_bytes
        with accelerator.limit(accelerator.memory().allocated_bytes + 3 * x.nbytes + int(1.2 * hooks.largest_bytes)):
            assert torch.equal(model(x).cpu(), resident)
        assert hooks.ahead_bytes == 0 and accelerator.memory().refusals > 0
        hooks.remove()


def test_another_order_is_right_and_becomes_the_known_one(acc):
    """As where a step cache leaves blocks out."""
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(TOKENS, WIDTH).to(acc)
    blocks = list(model.blocks)
    orders = [blocks[::-1], blocks[:3] + blocks[9:], blocks[::-1], blocks]
    with torch.no_grad():
        model.to(acc)
        expected = []
        for order in orders:
            y = x
            for block in order:
                y = block(y)
            expected.append(y.cpu())
        hooks = GroupHooks(model.to("cpu"), acc, True, MemoryStats(), pinned=True, copies=copy_stream(acc))
        hooks.ahead_bytes = 2 * hooks.largest_bytes
        with clocked(EVEN):
            for order, result in zip(orders, expected, strict=True):
                y = x
                for block in order:
                    y = block(y)
                assert torch.equal(y.cpu(), result)
        hooks.remove()


def test_one_block_out_of_turn_is_no_other_order(acc):
    """What came ahead stays: it is used in a moment."""
    torch.manual_seed(0)
    model, x, stats = Blocks(), torch.randn(TOKENS, WIDTH).to(acc), MemoryStats()
    first, second, third, *others = model.blocks
    with torch.no_grad():
        hooks = GroupHooks(model, acc, True, stats, pinned=True, copies=copy_stream(acc))
        hooks.ahead_bytes = hooks.largest_bytes
        for block in (first, third, second, *others):
            block(x)
        assert stats.moved_bytes <= (BLOCKS + 2) * hooks.largest_bytes, "the third twice, and one for the next forward"
        hooks.remove()


class CancelledAfter:
    """A progress that is cancelled at a question with this number."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.came: list[int] = []

    def step(self, done: int, *_told: object) -> None:
        """Bytes that came so far."""
        self.came.append(done)

    def check(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_a_cancel_leaves_little_behind_it(acc, monkeypatch):
    """The device has at most a few blocks left to compute, nothing stays on it, and the next run is right."""
    monkeypatch.setattr("anygpu.compat.memory.hooks.REPORT_SECONDS", 0)
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(TOKENS, WIDTH).to(acc)
    with torch.no_grad():
        resident = model.to(acc)(x).cpu()
        hooks = GroupHooks(model.to("cpu"), acc, True, MemoryStats(), pinned=True, copies=copy_stream(acc))
        hooks.ahead_bytes, hooks.progress = hooks.largest_bytes, CancelledAfter(BLOCKS // 2)
        with clocked(EVEN) as clock, pytest.raises(KeyboardInterrupt):
            model(x)
        hooks.offload()
        del clock
        assert accelerator.memory().allocated_bytes == x.nbytes
        hooks.progress = CancelledAfter(0)
        assert torch.equal(model(x).cpu(), resident)
        assert hooks.progress.came[0] <= hooks.largest_bytes, "bytes count from the first block on"
        hooks.remove()
