"""The probe of rates, beside a device that is modelled: launches, two queues, caches, clocks that rise, and noise."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from anygpu.compat.device import work
from anygpu.compat.device.facts import DeviceFacts
from anygpu.compat.device.probe_store import ProbeStore
from anygpu.compat.device.rates import ATTENTION, CONVOLUTION, PRODUCT, work_of
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[3]

LAUNCH, WAIT, NOISE, CACHE = 50e-6, 50e-6, 0.1, 96 * 2**20
META = torch.device("meta")


class Modelled(TorchDispatchMode):
    """A device of known rates: the host launches ahead of it, and waits for it when it asks.

    Args:
        flops: per second of products; convolutions have 0.7 of it, attention 0.5. memory: bytes per second beyond the
            cache, which has four times as many.
    """

    def __init__(self, flops: float, memory: float) -> None:
        super().__init__()
        self.rates = {PRODUCT: flops, CONVOLUTION: 0.7 * flops, ATTENTION: 0.5 * flops}
        self.memory, self.random = memory, random.Random(0)
        self.now = self.busy = self.worked = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        flops, moved = work_of(function, args, kwargs, result)
        self.launch(work._kind(function, flops), flops, moved)
        return result

    def launch(self, kind: str, flops: float, moved: int) -> None:
        cold = 2.0 if self.worked < 0.25 else 1.0
        memory = self.memory * (4 if moved <= CACHE else 1)
        seconds = cold * max(flops / self.rates.get(kind, 1e30), moved / memory)
        self.now += LAUNCH
        self.busy = max(self.busy, self.now) + seconds * self.random.uniform(1 - NOISE, 1 + NOISE)
        self.worked += seconds

    def attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.launch(ATTENTION, work._attention_flops(query, key, value), 4 * query.nbytes)
        return torch.empty_like(query)

    def wait(self, *_: Any) -> None:
        self.now = max(self.now, self.busy) + WAIT


@pytest.mark.parametrize(
    ("tera", "giga"),
    [
        (2, 100),
        (2250, 8000),
        *(pytest.param(*card, marks=pytest.mark.full) for card in ((25, 360), (165, 1008), (989, 3350))),
    ],
)
def test_rates_are_probed_within_five_percent_in_two_seconds(monkeypatch, tera, giga):
    device = Modelled(tera * 1e12, giga * 1e9)
    monkeypatch.setattr(torch.accelerator, "synchronize", device.wait)
    monkeypatch.setattr(work.F, "scaled_dot_product_attention", device.attention)
    monkeypatch.setattr(work, "counting", lambda: _Counting(device))
    with device:
        pace = work.measured_pace(META, torch.bfloat16, lambda: device.now)
    assert pace.product == pytest.approx(tera * 1e12, rel=0.05)
    assert pace.convolution == pytest.approx(0.7 * tera * 1e12, rel=0.05)
    assert pace.attention == pytest.approx(0.5 * tera * 1e12, rel=0.05)
    assert pace.memory == pytest.approx(giga * 1e9, rel=0.05), "beyond the caches"
    assert pace.launch == pytest.approx(LAUNCH, rel=0.05) and pace.ahead
    assert device.now < 2.0


class _Counting:
    """The work of a block by the modelled device's own account of it."""

    def __init__(self, device: Modelled) -> None:
        self.device = device

    def __enter__(self) -> work.Work:
        self.work, self.own = work.Work(), self.device.launch

        def launch(kind: str, flops: float, moved: int) -> None:
            self.work[kind, int(flops), moved] += 1
            self.own(kind, flops, moved)

        self.device.launch = launch
        return self.work

    def __exit__(self, *_: Any) -> None:
        self.device.launch = self.own


def test_a_card_that_is_too_small_for_more_is_timed_with_what_it_holds(monkeypatch):
    device = Modelled(25e12, 360e9)
    monkeypatch.setattr(torch.accelerator, "synchronize", device.wait)
    monkeypatch.setattr(work, "counting", lambda: _Counting(device))

    def made(side: int) -> Any:
        if side > 1024:
            raise torch.OutOfMemoryError("out of memory")
        a = torch.zeros(side, side, dtype=torch.bfloat16, device=META)
        return lambda: a @ a

    with device:
        assert 1e12 < work._Timer(META, lambda: device.now).rate(made) < 26e12
    with device, pytest.raises(ValueError, match="broken"):
        work._Timer(META, lambda: device.now).rate(lambda side: made(side) if side < 64 else _broken())


def _broken() -> Any:
    raise ValueError("broken")


def measured(*given: Any) -> work.Pace:
    """The pace of this machine, which tests/conftest.py keeps from all others."""
    return work.measured_pace.__wrapped__(*given)


def test_what_is_multiplied_is_not_alike(monkeypatch):
    """A card multiplies zeros at a higher clock than it has in a run."""
    kinds = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(name in function.__name__ for name in ("mm", "conv", "attention")):
                kinds.extend(len(each.flatten()[:1000].unique()) > 100 for each in args[:2] if each.numel() > 100)
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(work._Timer, "rate", lambda self, make, most=0: float(make(32)() is not None))
    with Seen():
        measured(torch.device("cpu"), torch.float32)
    assert len(kinds) >= 6 and all(kinds)


@pytest.mark.full
def test_a_processor_is_timed_call_by_call_and_computes_as_it_is_asked():
    pace = measured(torch.device("cpu"), torch.float32)
    assert not pace.ahead and pace.link == pace.plain_link == 0.0 < pace.product


def test_the_kernel_that_was_timed_fastest_and_the_links_are_part_of_a_pace(monkeypatch):
    facts = DeviceFacts(torch.device("cuda:0"), "cuda", "sm90", "cuda-sm80+", "A card", 0, "2.13")
    store = ProbeStore(facts, asked={})
    calls = []
    monkeypatch.setattr(
        work, "measured_pace", lambda *_, width: calls.append(width) or work.Pace(1e12, 1e12, 1e12, 1e9, 0)
    )
    monkeypatch.setattr(work, "_links", lambda device: {"link": 2e9, "plain_link": 1e9})
    emptied: list[torch.device] = []
    monkeypatch.setattr(work, "empty_cache", emptied.append)
    store.remember("attention bfloat16 heads of 128", lambda: {"native": 2.0, "native_cudnn": 1.0})
    paced = [work.pace_of(facts, store, torch.bfloat16, kernel) for kernel in ("flash", "native_cudnn", "native_cudnn")]
    assert [pace.attention for pace in paced] == [1e12, 2e12, 2e12] and {pace.source for pace in paced} == {"probed"}
    assert (paced[0].link, paced[0].plain_link) == (2e9, 1e9)
    assert work.pace_of(facts, store, torch.bfloat16, "", 64).attention == 1e12 and calls == [128, 64], "once each"
    assert emptied == [facts.device] * 2, "the memory of a probe is free again"


def test_a_dtype_that_a_card_lacks_is_timed_once_and_a_shortage_or_a_silent_card_is_none(monkeypatch):
    facts, calls = DeviceFacts(torch.device("cuda:0"), "cuda", "sm75", "cuda-sm75", "A card", 0, "2.13"), []

    def timed(*_, width):
        calls.append(width)
        raise RuntimeError("CUDA out of memory" if len(calls) == 1 else "unable to find an engine")

    monkeypatch.setattr(work, "measured_pace", timed)
    monkeypatch.setattr(work, "device_fault", lambda _: "unspecified launch failure" * (len(calls) == 2))
    store = ProbeStore(facts, asked={})
    assert all(work.pace_of(facts, store, torch.bfloat16) is None for _ in range(5)) and len(calls) == 3


def test_published_rates_are_what_a_card_of_this_kind_gave():
    """Products, convolutions and memory of an H100, in the file that ``anygpu prove`` wrote there."""
    proof = json.loads((ROOT / "benchmarks" / "machines" / "nvidia-h100.json").read_text(encoding="utf-8"))
    facts = DeviceFacts(torch.device("cuda:0"), "cuda", "sm90", "cuda-sm80+", proof["device"], 80 * 2**30, "2.11")
    parts = {part["name"]: {each["what"]: each for each in part["figures"]} for part in proof["parts"]}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        pace, found = work.pace_of(facts, None, dtype), parts[f"rates {name}"]
        modelled = {"product": pace.product / 1e12, "convolution": pace.convolution / 1e12, "memory": pace.memory / 1e9}
        for what, value in modelled.items():
            assert 0.85 <= value / found[what]["measured"] <= 1.15, (name, what, value)
