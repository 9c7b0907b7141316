"""Choice among several accelerators for each part that is left to ``auto``: every way to share the parts out is
forecast at the model's own size, and the quickest that fits is taken. A second card mostly saves copies of weights
that do not fit together on the first. With one card nothing is asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch

from ...compat.decision import AUTO, Decision
from ...compat.device.facts import DeviceFacts, facts_for
from ...compat.device.quirks import abilities
from ...compat.errors import PackError
from ...compat.memory.statistics import StageNeed, duration
from ..pipeline import Pipeline
from ..settings import of_checkpoint
from ..sizes import SPARE, VAE, default_size
from .fit import modes_of
from .memory import COMPUTES, forecast
from .seconds import DECODING, SAMPLING, TEXT, WORTH, planned_run
from .times import known_or_why, stage_time

CARDS = "cards"  # of the decision
LEAST_GAIN = 0.25  # seconds of a run, below which a further card is not worth being used
NAMES = {TEXT: "text encoders", SAMPLING: "transformer", DECODING: "VAE"}
Places = Mapping[str, torch.device]  # by stage
LoadOn = Callable[[torch.device, Places], Pipeline]  # a device, and those of parts


@dataclass(frozen=True, slots=True)
class Card:
    """One accelerator; forecasts of a stage there are made once."""

    facts: DeviceFacts
    room: int  # bytes that a run may take there
    pipeline: Pipeline  # as it is loaded for a card of this kind, all of it on one
    _needs: dict[str, dict[str, StageNeed]] = field(default_factory=dict, repr=False)
    _seconds: dict[tuple[str, str, bool], float | None] = field(default_factory=dict, repr=False)

    def weights(self, stage: str) -> int:
        return sum(size.total for part, size in self.pipeline.weights.items() if _stage_of(part) == stage)

    def need(self, stage: str, mode: str) -> StageNeed:  # of a run of the model's own size
        mode = "model" if mode == "none" else mode  # what stays on the card with none is added by the caller
        if mode not in self._needs:
            stages = forecast(self.pipeline, default_size(of_checkpoint(self.pipeline)), mode, self.room).stages
            self._needs[mode] = {need.name: need for need in stages}
        return self._needs[mode][stage]

    def seconds(self, stage: str, mode: str, stays: bool) -> float | None:
        """Seconds of a stage, None if unknown; with ``stays`` its weights are on the card already."""
        key = stage, mode, stays
        if key not in self._seconds:
            run = planned_run(self.pipeline, default_size(of_checkpoint(self.pipeline)))
            time, _ = known_or_why(lambda: stage_time(self.pipeline, stage, run, mode, self.room, stays))
            self._seconds[key] = None if time is None else time.seconds
        return self._seconds[key]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to share the stages out that fits, and how long a run takes; None if unknown."""

    places: Places
    seconds: float | None


def share_out(
    first: Pipeline, rooms: Mapping[torch.device, int | None], placed: Collection[str], load_on: LoadOn
) -> Pipeline:
    """The pipeline with each stage on the card where a run is quickest, and the decision about that among its plan's.
    ``first``, loaded on the first card but for the parts that the user ``placed``, comes back where that is quickest or
    the forecast fails, else one that ``load_on`` loads. ``rooms``: bytes that a run may take, None where unknown."""
    home = {stage: first.offloader.device_of(COMPUTES[stage]) for stage in dict.fromkeys(map(_stage_of, first.weights))}
    home = {stage: device for stage, device in home.items() if device in rooms}
    known = {device: room for device, room in rooms.items() if room is not None}
    fixed = {stage for stage in home if COMPUTES[stage] in placed}
    found, failed = known_or_why(lambda: _chosen(first, home, known, fixed, load_on))
    places, why = found or (home, failed)
    pipeline, where = first, f"all on {first.facts.device}"
    if places != home:
        pipeline = load_on(places[SAMPLING], {COMPUTES[stage]: device for stage, device in places.items()})
        where = _in_words(places)
    decisions = (*pipeline.plan.decisions, Decision(CARDS, where, why, AUTO))
    return replace(pipeline, plan=replace(pipeline.plan, decisions=decisions))


def _stage_of(part: str) -> str:
    """The stage that needs ``part``; a picture's encoder is where the transformer is."""
    return TEXT if part.startswith("text_encoder") else DECODING if part == VAE else SAMPLING


def _chosen(
    first: Pipeline, home: Places, rooms: Mapping[torch.device, int], fixed: set[str], load_on: LoadOn
) -> tuple[Places, str]:
    """The card of each stage, and why; ``fixed`` stages stay at ``home``."""
    own = first.facts.device
    cards = _cards(first, home, rooms, load_on)
    others = ", ".join(f"{device} ({card.facts.name})" for device, card in cards.items() if device != own)
    unknown = next((device for device in (own, *home.values()) if device not in cards), None)
    if unknown or not others:
        return home, f"what is free on {unknown or 'the other cards'} is not known, or the model cannot run there"
    ways = [way for places in _shares(home, fixed, cards) if (way := _way(places, cards)) is not None]
    if not ways:
        return home, f"a run of the model's own size fits neither on {own} nor on {others}"
    now = next((way for way in ways if way.places == home), None)
    best = _quickest(ways, cards, cards[own].facts.card)
    if now is None:
        return best.places, f"a run of the model's own size does not fit on {own} alone"
    if best is not now and now.seconds is not None and best.seconds is not None:
        saved = now.seconds - best.seconds
        return best.places, f"saves {_long(saved)} of {_long(now.seconds)} in each run after the first; a forecast"
    if len(ways) == 1:
        return home, f"no part of it fits on {others}, or would be computed in the same way there"
    if any(way.seconds is None for way in ways):
        return home, f"how fast {others} is, is not known"
    return home, f"a run would not be quicker with {others}"


def _cards(first: Pipeline, home: Places, rooms: Mapping[torch.device, int], load: LoadOn) -> dict[torch.device, Card]:
    """The first card, those that the user placed a part on, and of each kind the one with most room; without those
    that do not answer or cannot run this model. For each kind the pipeline is loaded (``load``) once."""
    own, cards, pipelines = first.facts.device, dict[torch.device, Card](), {}
    order = sorted(rooms, key=lambda device: (device != own, device not in home.values(), -rooms[device]))
    for device in order:
        facts = first.facts if device == own else facts_for(device)
        kind, kinds = facts.card, [card.facts.card for one, card in cards.items() if one != own]
        if device not in (own, *home.values()) and kind in kinds:
            continue
        if kind not in pipelines:
            try:
                pipelines[kind] = first if device == own else load(device, {})
            except PackError:
                continue
        cards[device] = Card(facts, max(0, rooms[device] - first.offloader.options.keep_free_bytes), pipelines[kind])
    return cards


def _shares(home: Places, fixed: set[str], cards: Mapping[torch.device, Card]) -> Iterator[Places]:
    """Each way to share the stages out: as they are first, then with few that move, the transformer last; none that
    puts a stage which is not ``fixed`` on a card that would compute otherwise than the transformer's."""
    options = [[home[stage]] if stage in fixed else [*cards] for stage in home]
    every = (dict(zip(home, places, strict=True)) for places in product(*options))
    free = [stage for stage in home if stage not in fixed]  # the user may place others on unlike cards
    kept = (places for places in every if all(_alike(stage, places, cards) for stage in free))
    moved = {TEXT: 1, DECODING: 2, SAMPLING: 4}
    yield from sorted(kept, key=lambda places: sum(moved[stage] for stage in places if places[stage] != home[stage]))


def _alike(stage: str, places: Places, cards: Mapping[torch.device, Card]) -> bool:
    """True if the stage's card, of any architecture, has the transformer's precision and abilities, decided for all."""
    here, main = cards[places[stage]], cards[places[SAMPLING]]
    if here.facts.card == main.facts.card:
        return True
    dtypes = {(card.pipeline.precision.text, card.pipeline.precision.vae) for card in (here, main)}
    able = [{**abilities(card.facts, card.pipeline.device.probes), "arch": ""} for card in (here, main)]
    return len(dtypes) == 1 and able[0] == able[1]


def _way(places: Places, cards: Mapping[torch.device, Card]) -> Way | None:
    """The way that puts stages at ``places``, each in its fastest mode that fits; None where a stage fits in none."""
    total: float | None = 0.0
    for stage, device in places.items():
        card = cards[device]
        together = [other for other in places if places[other] == device]
        working = max(card.need(other, "model").activations for other in together)
        stays = SPARE * (sum(map(card.weights, together)) + working) <= card.room
        stays = stays and (stage != TEXT or len(together) == 1)  # it leaves the device that others compute on
        fitting = [mode for mode in modes_of(card.pipeline) if card.need(stage, mode).total * SPARE <= card.room]
        modes = [mode for mode in fitting if mode != "none" or stays or stage == TEXT]
        if not modes:
            return None
        times = [card.seconds(stage, mode, stays and mode not in ("model", "group", "sequential")) for mode in modes]
        known = [time for time in times if time is not None]
        total = None if total is None or not known else total + min(known)
    return Way(places, total)


def _quickest(ways: Sequence[Way], cards: Mapping[torch.device, Card], kind: str) -> Way:
    """The first of ``ways``, or the one that is quicker by enough; a forecast for another kind of card may be off."""
    best = ways[0]
    for way in ways[1:]:
        if way.seconds is None or best.seconds is None:
            continue
        share = 1.0 if all(cards[device].facts.card == kind for device in way.places.values()) else WORTH
        if way.seconds < best.seconds * share - LEAST_GAIN:
            best = way
    return best


def _in_words(places: Places) -> str:
    """Describe the placement, such as ``transformer on cuda:0, text encoders and VAE on cuda:1``."""
    names: dict[torch.device, list[str]] = {}
    for stage in (SAMPLING, TEXT, DECODING):
        if stage in places:
            names.setdefault(places[stage], []).append(NAMES[stage])
    return ", ".join(f"{' and '.join(each)} on {device}" for device, each in names.items())


def _long(seconds: float) -> str:
    """Seconds in words, with a tenth where they are few: what a card saves may be less than one."""
    return duration(seconds) if seconds >= 90 else f"{seconds:.1f} s"
