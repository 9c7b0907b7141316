"""Memory that each stage of a run needs under each offload mode, with the decode that the run begins with."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ...compat.device.facts import free_bytes
from ...compat.memory.offloader import MODES
from ...compat.memory.parts import denoises
from ...compat.memory.standalone import ahead_bytes, keeps, resident_bytes
from ...compat.memory.statistics import StageNeed
from ..pipeline import Pipeline
from ..sizes import (
    MARGIN,
    PAIR,
    SPARE,
    TRANSFORMER,
    VAE,
    Size,
    decoding_bytes,
    sampling_bytes,
    text_bytes,
    transformer_bytes,
)
from ..vae.plan import AUTO, DecodeRequest, form_to_forecast, planned_decode
from .times import Rooms, room_of

COMPUTES = {"text": "text_encoder", "image": "image_encoder", "sampling": TRANSFORMER, "decoding": VAE}  # by stage


@dataclass(frozen=True, slots=True)
class Forecast:
    mode: str
    stages: tuple[StageNeed, ...]

    @property
    def peak(self) -> int:
        """Bytes at the highest point of the run, with what comes ahead."""
        return max(stage.total + stage.ahead for stage in self.stages)

    def lacks(self, room: int) -> float:
        """Bytes that the run is taken to lack with ``room``, where it lacks most; 0 or less where it fits."""
        rooms = ((stage, room if not stage.device else stage.room) for stage in self.stages)
        return max((stage.total * SPARE - own for stage, own in rooms if own is not None), default=0.0)

    def fits(self, room: int) -> bool:
        return self.lacks(room) <= 0


def forecast(
    pipeline: Pipeline, size: Size, mode: str = "", room: int | None = None, rooms: Rooms = free_bytes
) -> Forecast:
    """Forecast the memory of a run of ``size`` under ``mode``, by default the pipeline's own. ``room`` is the bytes of
    the device, ``rooms`` gives those of others; they decide how the run decodes: whole where ``room`` is None."""
    mode = mode or pipeline.offloader.mode
    places = {stage: pipeline.offloader.device_of(part) for stage, part in COMPUTES.items()}
    own_rooms = {stage: room_of(pipeline, device, room, rooms) for stage, device in places.items()}
    stages = []
    for need in _needs(pipeline, size, mode, places, own_rooms):
        own = own_rooms[need.name]
        if places[need.name] != pipeline.offloader.device:
            need = replace(need, device=str(places[need.name]), room=own)
        if room is not None and own is not None:
            need = replace(need, ahead=max(0, min(need.ahead, own - need.total)))
        stages.append(need)
    return Forecast(mode, tuple(stages))


def _needs(
    pipeline: Pipeline, size: Size, mode: str, places: Mapping[str, torch.device], rooms: Mapping[str, int | None]
) -> list[StageNeed]:
    """The memory of each stage, in order, beside what stays on its device from before; of several text encoders that
    of the largest. ``rooms`` are the bytes that each stage may take."""

    def if_together(first: str, second: str, count: int) -> int:
        return count if places[first] == places[second] else 0

    weights, stays = pipeline.weights, mode == "none"
    stages, vae = [], weights[VAE].resident(mode, VAE)
    text = [part for part in weights if part.startswith("text_encoder")]
    kept = 0
    if "image_encoder" in weights and pipeline.model.task == "image":
        own, batch = max(weights["image_encoder"].total, vae), pipeline.spec.memory.clip.batch if size.clip else 1
        stages.append(StageNeed("image", 0, own, decoding_bytes(pipeline, replace(size, frames=batch))))
        kept = vae if stays else 0
    if text:
        here, needs = if_together("text", "decoding", kept), list[StageNeed]()
        for part in text:
            one, pair = (text_bytes(pipeline, part, count) for count in (1, PAIR))
            ahead = ahead_bytes(pipeline.offloader, weights[part], part, mode, one) + pair - one
            needs.append(StageNeed("text", here, weights[part].resident(mode, part, one), one, ahead=ahead))
        stages.append(max(needs, key=lambda need: need.total))
    forward = sampling_bytes(pipeline, size)
    own, all_own = transformer_bytes(pipeline, mode, forward), transformer_bytes(pipeline, "none") if stays else 0
    part = max((part for part in weights if denoises(part)), key=lambda part: weights[part].total)
    largest, stay = weights[part], 0
    if keeps(pipeline.offloader, part, mode):
        stay = resident_bytes(largest.total, largest.passing, rooms["sampling"], int(MARGIN * forward))
    ahead = ahead_bytes(pipeline.offloader, largest, part, mode, forward, stay)
    kept = if_together("sampling", "decoding", kept)
    stages.append(StageNeed("sampling", kept, max(own, all_own), forward, ahead=ahead, stays=stay))
    kept = if_together("sampling", "decoding", all_own)
    ahead = ahead_bytes(pipeline.offloader, weights[VAE], VAE, mode)
    whole = StageNeed("decoding", kept, vae, decoding_bytes(pipeline, size), ahead=ahead)
    return [*stages, _decoding(pipeline, size, whole, rooms["decoding"])]


def forecasts(pipeline: Pipeline, size: Size, room: int | None = None) -> tuple[Forecast, ...]:
    return tuple(forecast(pipeline, size, mode, room) for mode in MODES)


def _decoding(pipeline: Pipeline, size: Size, whole: StageNeed, room: int | None) -> StageNeed:
    """``whole``, the decode of the whole video, as a run begins it in ``room`` bytes. A method that was asked for, and
    ``auto``'s decode of the whole, leave other parts on the device if all fits there; any other decode begins after
    those have left, and one on the host takes nothing of the device."""
    room, form = sys.maxsize if room is None else room, form_to_forecast(pipeline.run.decode)
    if form == DecodeRequest() and whole.total * SPARE <= room:
        return whole
    method, needed = planned_decode(pipeline, size, room - whole.weights, form)
    if method.on_host:
        return replace(whole, kept=0, weights=0, activations=0, ahead=0, form=str(method))
    need = replace(whole, activations=needed, form="" if method.whole else str(method))
    beside = (form.method != AUTO or form.tile) and need.total * SPARE <= room
    return need if beside else replace(need, kept=0)
