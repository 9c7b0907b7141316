"""The attention kernel by the clock: timed once per device, kept, said; never on a CPU or for an explicit choice."""

from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from anygpu.compat.decision import Decision
from anygpu.compat.device import timed_choice
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.probe_store import ProbeStore
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.transforms import attention as attention_module
from anygpu.compat.transforms.attention import LONG, Attention, attention_for, by_time

BF16, WIDTH = torch.bfloat16, 64
FLASH = Decision("attention", "torch's fused kernel (flash)", "the default", "auto")
AUTO = Attention("auto", decision=FLASH, fused=frozenset({(BF16, WIDTH)}))


KEPT = f"attention bfloat16 heads of {WIDTH}"


@pytest.fixture
def card(monkeypatch):
    """Facts of a card; the CPU that stands in for it has a clock."""
    monkeypatch.setattr(timed_choice, "CLOCKED", ("cpu",))
    return replace(facts_for("cpu"), backend="cuda")


@pytest.fixture
def clock(monkeypatch):
    """Makes the clock show these milliseconds; returns the list of what was timed."""

    def made(**times):
        asked = []
        monkeypatch.setattr(attention_module, "kernel_times", lambda *given: asked.append(given) or times)
        return asked

    return made


def test_the_fastest_is_taken_once_kept_and_said(card, clock, tmp_path):
    asked = clock(native=4.0, native_cudnn=2.0, native_efficient=5.0)
    for _ in range(2):
        found = by_time(AUTO, card, ProbeStore(card, tmp_path), BF16, WIDTH)
        assert found.fastest == "native_cudnn"
        assert (found.label, found.decision.verdict, found.decision.source) == ("native_cudnn", "native_cudnn", "auto")
        assert found.decision.why == (
            "the fastest of native_cudnn 2.00 ms, native 4.00 ms, native_efficient 5.00 ms on this device, timed once"
        )
    assert asked == [(card, BF16, WIDTH, False)], "it was timed again"
    assert ProbeStore(card, tmp_path).recall(KEPT)["native"] == 4.0, "what users have kept is read by this name"


def test_the_clock_is_the_one_that_runs(monkeypatch):
    ticks = iter(range(0, 100, 2))
    monkeypatch.setattr(timed_choice.time, "perf_counter", lambda: float(next(ticks)))
    assert timed_choice.milliseconds({"way": lambda: None}, torch.device("cpu"), 3) == {"way": 2000.0}


def test_a_shortage_while_it_is_timed_is_not_kept_as_a_way_that_does_not_run(card, tmp_path):
    ways, store = {"frames": Mock(), "native": Mock(side_effect=torch.OutOfMemoryError)}, ProbeStore(card, tmp_path)
    measure = partial(timed_choice.milliseconds, ways, card.device, 1)
    assert timed_choice.stored_times("conv3d", measure, card, store) == {} and store.recall("conv3d") is None


@pytest.mark.parametrize("kept", [3, {"native": "fast"}, [1.0]])
def test_kept_timings_that_are_none_count_as_none(card, tmp_path, kept):
    store = ProbeStore(card, tmp_path)
    store.keep("conv3d", kept)
    assert timed_choice.stored_times("conv3d", dict, card, store) == {}


def test_a_gain_too_small_to_trust_changes_nothing(card, clock, tmp_path):
    clock(native=4.0, native_cudnn=3.9, native_efficient=5.0)
    found = by_time(AUTO, card, ProbeStore(card, tmp_path), BF16, WIDTH)
    assert found.fastest == "" and "timed on this device: native_cudnn 3.90 ms" in found.decision.why


def test_not_on_a_cpu_not_without_a_store_and_not_for_a_choice(card, clock, tmp_path):
    asked, store, cpu = clock(native=4.0, native_cudnn=2.0), ProbeStore(card, tmp_path), facts_for("cpu")
    assert by_time(AUTO, cpu, ProbeStore(cpu, tmp_path), BF16, WIDTH) is AUTO
    assert by_time(AUTO, card, None, BF16, WIDTH) is AUTO
    assert by_time(AUTO, card, ProbeStore(card, tmp_path, quiet=True), BF16, WIDTH) is AUTO
    chosen = replace(AUTO, choice="native_flash")
    assert by_time(chosen, card, store, BF16, WIDTH) is chosen
    assert by_time(AUTO, card, store, torch.float16, WIDTH) is AUTO
    assert not asked


def test_the_fastest_runs_long_sequences_without_a_mask_only(monkeypatch):
    ran = []
    stand_in = {"native_cudnn": lambda q, k, v: ran.append(q.shape[2]) or q}
    monkeypatch.setattr("anygpu.compat.transforms.attention.EXPLICIT", stand_in)
    attention = replace(AUTO, fastest="native_cudnn")
    long, short = (torch.ones(1, 1, count, 16, dtype=BF16) for count in (LONG, 16))
    attention(long, long, long)
    attention(short, short, short)
    attention(long, short, short)
    attention(short, short, short, torch.ones(1, 1, 16, 16, dtype=torch.bool))
    assert ran == [LONG]


def test_only_kernels_that_are_right_here_are_timed_and_one_alone_is_not(monkeypatch):
    cpu, ran = facts_for("cpu"), []
    monkeypatch.setattr(attention_module, "TOKENS", 64)
    monkeypatch.setattr(attention_module, "EXPLICIT", {"native_flash": lambda *given: ran.append(len(given))})
    assert set(attention_module.kernel_times(cpu, torch.float32, WIDTH)) == {"native", "native_flash"}
    assert ran and set(ran) == {3}
    monkeypatch.setattr(attention_module, "BACKENDS", {})
    assert attention_module.kernel_times(cpu, torch.float32, WIDTH) == {}


@pytest.mark.parametrize(
    ("times", "absent", "ran"),
    [
        ({"sage": 4.0, "kitchen_int8": 2.0}, "", "kitchen_int8"),
        ({"sage": 2.0, "kitchen_int8": 4.0}, "", "sage"),
        ({}, "sage", "kitchen_int8"),
        ({}, "kitchen_int8", "sage"),
    ],
)
def test_the_lossy_choice_takes_the_faster_of_its_kernels_and_nothing_else_does(
    card, clock, tmp_path, monkeypatch, times, absent, ran
):
    def require(kernel, *_given):
        if kernel == absent:
            raise UnsupportedError("it", expected="another", fix="No.")

    calls = []
    kernels = {name: lambda *_, name=name: calls.append(name) for name in ("sage", "kitchen_int8")}
    monkeypatch.setattr("anygpu.compat.transforms.attention_kernels.require_usable", require)
    monkeypatch.setattr(attention_module, "EXPLICIT", kernels)
    clock(**times)
    chosen = by_time(attention_for("sage", card, BF16, WIDTH), card, ProbeStore(card, tmp_path), BF16, WIDTH)
    q = torch.ones(1, 1, 4, WIDTH, dtype=BF16)
    chosen(q, q, q)
    assert calls == [ran] and chosen.label == ran
    assert by_time(attention_for("auto", card, BF16, WIDTH), card, None, BF16, WIDTH).fastest == ""
