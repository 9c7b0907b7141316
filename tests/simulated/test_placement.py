"""Two cards in one machine: what `auto` computes where, by what is free on each and how fast each is."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.device import facts, rates
from anygpu.pipelines.decisions import card_of
from anygpu.pipelines.forecast import placement
from anygpu.pipelines.forecast.memory import forecast
from anygpu.pipelines.forecast.page import memory_plan, planned_size
from anygpu.pipelines.load.folder import load_placed
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest

from simulated import accelerator, profiles
from simulated.test_families import CASES, rendered

SLOW, FAST, UNKNOWN = "Slow card", "Fast card", "Strange card"
PLENTY = 1 << 33
TOLD = ("backend", "arch", "arch_class", "name", "total_bytes", "emulated", "versions")
LINK = 2e5 / rates.PLAIN_LINK  # bytes per second: the copies of a tiny model must take a time worth saving


@pytest.fixture
def machine(acc: Any, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> Callable[..., Pipeline]:
    """A pipeline on two devices that are called, and as fast as, the cards of a table."""
    ltx = rates.RATES["RTX 4090"]  # whose products and attention run at the same rate
    for name, speed in ((SLOW, 1e9), (FAST, 1e10)):
        row = replace(
            ltx, name=name, fp16=speed, bf16=speed, fp32=speed, memory=speed, link=LINK, launch=0.0, memory_gb=()
        )
        monkeypatch.setitem(rates.RATES, name, row)

    def loaded(names: tuple[str, str], rooms: tuple[int | None, int | None], **more: Any) -> Pipeline:
        def plugged_in(device: torch.device) -> dict[str, Any]:
            told = {"backend": device.type, "arch": "", "arch_class": "other", "total_bytes": PLENTY}
            return {**told, "name": names[device.index]}

        monkeypatch.setattr(facts, "_plug_in_facts", plugged_in)
        cards = {torch.device("acc", index): room for index, room in enumerate(rooms)}
        request = LoadRequest(tiny.build("ltx", tiny_folder), device="acc:0", precision="fp32", cards=cards)
        return load_placed(replace(request, **more))

    return loaded


def where(pipeline: Pipeline) -> str:
    """The device numbers of transformer, text encoder and VAE."""
    parts = ("transformer", "text_encoder", "vae")
    return "".join(str(pipeline.offloader.device_of(part).index) for part in parts)


def told(pipeline: Pipeline) -> tuple[str, str]:
    """Verdict and reason of the one decision about cards."""
    (decision,) = (decision for decision in pipeline.plan.decisions if decision.subject == placement.CARDS)
    return decision.verdict, decision.why


@pytest.mark.parametrize(
    ("names", "rooms", "places", "why"),
    [
        ((SLOW, SLOW), (PLENTY, PLENTY), "010", "saves 1.3 s of 62 min"),
        ((SLOW, FAST), (PLENTY, PLENTY), "101", "saves 17 min of 62 min"),
        ((FAST, SLOW), (PLENTY, PLENTY), "000", "would not be quicker with acc:1 (Slow card)"),
        ((SLOW, FAST), (PLENTY, 64 << 20), "100", "saves"),
        ((SLOW, FAST), (PLENTY, 40 << 20), "000", "not be quicker"),  # the VAE's planes take long
        ((SLOW, SLOW), (PLENTY, 1 << 18), "000", "no part of it fits on acc:1"),
        ((FAST, SLOW), (4 << 20, PLENTY), "101", "does not fit on acc:0 alone"),
        ((SLOW, FAST), (40 << 20, 40 << 20), "000", "fits neither on acc:0 nor on acc:1"),
        ((SLOW, UNKNOWN), (PLENTY, PLENTY), "000", "how fast acc:1 (Strange card) is, is not known"),
        ((SLOW, SLOW), (PLENTY, None), "000", "what is free on the other cards is not known"),
    ],
)
def test_each_part_computes_where_a_run_is_quickest(machine, names, rooms, places, why):
    pipeline = machine(names, rooms)
    verdict, reason = told(pipeline)
    assert (where(pipeline), why in reason) == (places, True), reason
    assert pipeline.facts.device.index == int(places[0]), "precision is chosen for the transformer's card"
    assert (verdict == "all on acc:0") == (places == "000")


def test_one_card_is_asked_nothing_and_changes_nothing(machine, monkeypatch):
    monkeypatch.setattr(placement, "_chosen", lambda *_: pytest.fail("nothing is to be chosen"))
    alone, twice = machine((SLOW, SLOW), ()), machine((SLOW, SLOW), (PLENTY,))
    subjects = [[(each.subject, each.verdict) for each in one.plan.decisions] for one in (alone, twice)]
    assert subjects[0] == subjects[1] and placement.CARDS not in dict(subjects[0])
    assert where(alone) == "000" and not alone.offloader.options.devices


def test_what_the_user_placed_stays_there(machine):
    pipeline = machine((SLOW, FAST), (PLENTY, PLENTY), devices={"text_encoder": "cpu"})
    assert pipeline.offloader.device_of("text_encoder").type == "cpu" and told(pipeline)[0].endswith("VAE on acc:1")
    pipeline = machine((SLOW, FAST), (PLENTY, PLENTY), devices={"vae": "acc:0"})
    assert where(pipeline)[2] == "0" and where(pipeline)[0] == "1"
    pipeline = machine((SLOW, FAST), (PLENTY, PLENTY), devices={"transformer": "acc:0"})
    assert where(pipeline) == "000" and placement.CARDS not in {each.subject for each in pipeline.plan.decisions}


@pytest.mark.parametrize(("other", "place"), [((0, 1), "0"), ((1, 0), "0"), ((0, 1), "1")], ids=str)
def test_the_card_that_the_user_gives_the_transformer_decides_on_precision(acc, monkeypatch, tiny_folder, other, place):
    names = [(("NVIDIA GeForce RTX 3090", "sm86"), ("NVIDIA GeForce RTX 2080 Ti", "sm75"))[index] for index in other]

    def plugged_in(device: torch.device) -> dict[str, Any]:
        return {name: value for name, value in profiles._nvidia(*names[device.index]).items() if name in TOLD}

    monkeypatch.setattr(facts, "_plug_in_facts", plugged_in)
    request = LoadRequest(tiny.build("ltx", tiny_folder), cards=dict.fromkeys(map(torch.device, ("acc:0", "acc:1"))))
    placed = load_placed(replace(request, device="acc:0", devices={"transformer": "acc:1", "vae": f"acc:{place}"}))
    alone = load_placed(replace(request, device="acc:1", cards={}))
    assert str(placed.precision) == str(alone.precision) and where(placed) == f"10{place}"


def test_a_card_that_computes_otherwise_gets_no_part_of_another(machine, monkeypatch):
    able = placement.abilities
    monkeypatch.setattr(placement, "abilities", lambda facts, probes: {**able(facts, probes), "conv_bytes": facts.name})
    assert where(machine((SLOW, FAST), (PLENTY, PLENTY))) == "111", "but all of it"
    assert where(machine((FAST, SLOW), (PLENTY, PLENTY), devices={"vae": "acc:1"})) == "001", "but what the user placed"


def test_each_card_is_forecast_once_in_each_mode(machine, monkeypatch):
    asked = []

    def counted(pipeline: Pipeline, size: Any, mode: str, room: int) -> Any:
        asked.append((mode, room))
        return forecast(pipeline, size, mode, room)

    monkeypatch.setattr(placement, "forecast", counted)
    machine((SLOW, FAST), (PLENTY, PLENTY // 2))
    assert asked and len(asked) == len(set(asked))


def test_a_forecast_that_fails_stops_no_load_and_is_said(machine, monkeypatch, failed_forecasts):
    monkeypatch.setattr(placement, "_shares", lambda *_: 1 / 0)
    why = "the forecast failed (ZeroDivisionError: division by zero)"
    assert told(machine((SLOW, FAST), (PLENTY, PLENTY))) == ("all on acc:0", why)
    assert len(failed_forecasts) == 1
    failed_forecasts.clear()


def test_text_encoders_stay_on_a_card_of_their_own_and_the_video_is_the_same(machine):
    alone = rendered(machine((SLOW, SLOW), ()), CASES["ltx"])
    assert accelerator.memory(1).allocated_bytes == 0
    pipeline = machine((SLOW, SLOW), (PLENTY, PLENTY))
    shared = rendered(pipeline, CASES["ltx"])
    assert all(map(torch.equal, alone, shared))
    assert accelerator.memory(1).allocated_bytes >= pipeline.weights["text_encoder"].total, "no copy in the next run"
    costs = {cost.stage: cost.device for cost in pipeline.offloader.memory_stats.stages}
    assert costs["text"] == "acc:1" and costs["sampling"] == costs["decoding"] == "acc:0"


@pytest.mark.full
def test_plan_and_tab_say_it_with_the_room_of_each_card(machine):
    pipeline = machine((SLOW, SLOW), (PLENTY, PLENTY))
    with accelerator.limit(1 << 24, 1):
        text, _ = memory_plan(pipeline, planned_size(pipeline, 64, 64, 9, True))
    assert "cards transformer and VAE on acc:0, text encoders on acc:1: auto: saves" in text
    assert " MB fits (text 0.5 MB on acc:1 of 16.0 MB free, sampling" in text
    with accelerator.limit(1 << 17, 1):
        text, _ = memory_plan(pipeline, planned_size(pipeline, 64, 64, 9, True))
    assert " lacks 0.4 MB (text 0.5 MB on acc:1 of 0.1 MB free, sampling" in text, "although all else has room"
    assert told(pipeline)[0] in {each["verdict"] for each in card_of(pipeline)["decisions"]}
