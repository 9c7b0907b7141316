"""The attention kernel by the clock: timed once per device, kept, said; never on a CPU or for an explicit choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from anygpu.compat.decision import Decision
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.probe_store import ProbeStore
from anygpu.compat.transforms import attention_timing
from anygpu.compat.transforms.attention import LONG, Attention
from anygpu.compat.transforms.attention_timing import by_time

BF16, WIDTH = torch.bfloat16, 64
FLASH = Decision("attention", "torch's fused kernel (flash)", "the default", "auto")
AUTO = Attention("auto", decision=FLASH, fused=frozenset({(BF16, WIDTH)}))


@pytest.fixture
def card(monkeypatch):
    """Facts of a card on which three of torch's kernels run."""
    monkeypatch.setattr(attention_timing, "candidates", lambda *_: ["native", "native_cudnn", "native_efficient"])
    return replace(facts_for("cpu"), backend="cuda")


def clock(times, asked):
    def measure(name, _device, _dtype, _width):
        asked.append(name)
        return times[name]

    return measure


def test_the_fastest_is_taken_once_kept_and_said(card, tmp_path):
    asked = []
    measure = clock({"native": 4.0, "native_cudnn": 2.0, "native_efficient": 5.0}, asked)
    for _ in range(2):
        found = by_time(AUTO, card, ProbeStore(card, tmp_path), BF16, WIDTH, measure)
        assert found.fastest == "native_cudnn"
        assert (found.label, found.decision.verdict, found.decision.source) == ("native_cudnn", "native_cudnn", "auto")
        assert found.decision.why == (
            "the fastest of native_cudnn 2.00 ms, native 4.00 ms, native_efficient 5.00 ms on this device, timed once"
        )
    assert asked == ["native", "native_cudnn", "native_efficient"], "it was timed again"


def test_a_gain_too_small_to_trust_changes_nothing(card, tmp_path):
    measure = clock({"native": 4.0, "native_cudnn": 3.9, "native_efficient": 5.0}, [])
    found = by_time(AUTO, card, ProbeStore(card, tmp_path), BF16, WIDTH, measure)
    assert found.fastest == "" and "timed on this device: native_cudnn 3.90 ms" in found.decision.why


def test_not_on_a_cpu_not_without_a_store_and_not_for_a_choice(card, tmp_path):
    def measure(*_):
        raise AssertionError("timed")

    store, cpu = ProbeStore(card, tmp_path), facts_for("cpu")
    assert by_time(AUTO, cpu, ProbeStore(cpu, tmp_path), BF16, WIDTH, measure) is AUTO
    assert by_time(AUTO, card, None, BF16, WIDTH, measure) is AUTO
    assert by_time(AUTO, card, ProbeStore(card, tmp_path, quiet=True), BF16, WIDTH, measure) is AUTO
    chosen = replace(AUTO, choice="native_flash")
    assert by_time(chosen, card, store, BF16, WIDTH, measure) is chosen
    assert by_time(AUTO, card, store, torch.float16, WIDTH, measure) is AUTO


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


def test_the_clock_times_what_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(attention_timing, "TOKENS", 64)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    assert attention_timing.milliseconds("native", torch.device("cpu"), torch.float32, WIDTH) > 0
