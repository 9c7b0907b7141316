"""What a run needs under each offload mode, stage by stage, with the decode that the run will begin with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...compat.memory.offloader import MODES, ahead_bytes
from ...compat.memory.parts import denoises
from ...compat.memory.statistics import StageNeed
from ..base import Pipeline
from ..vae.plan import planned_decode
from .estimates import SPARE, VAE, Size, decoding_bytes, sampling_bytes, text_bytes, transformer_bytes


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run needs under one mode, stage by stage."""

    mode: str
    stages: tuple[StageNeed, ...]

    @property
    def peak(self) -> int:
        """Bytes at the highest point of the run, with what comes ahead."""
        return max(stage.total + stage.ahead for stage in self.stages)

    @property
    def least(self) -> int:
        """Bytes that the run cannot do without."""
        return max(stage.total for stage in self.stages)

    def fits(self, room: int) -> bool:
        """Whether the run is taken to fit into ``room`` bytes."""
        return self.least * SPARE <= room


def forecast(pipeline: Pipeline, size: Size, mode: str = "", room: int | None = None) -> Forecast:
    """What a run of ``size`` needs under ``mode``, by default the pipeline's own.

    Args:
        room: bytes of the device that the run may take, by which it chooses how it decodes; None for a decode of the
            whole video at once.
    """
    mode = mode or pipeline.offloader.mode
    weights, stays = pipeline.weights, mode == "none"
    stages, vae = [], weights[VAE].resident(mode, VAE)
    text = [part for part in weights if part.startswith("text_encoder")]
    kept = 0
    if "image_encoder" in weights and pipeline.task == "image":
        own = max(weights["image_encoder"].total, vae)
        stages.append(StageNeed("image", 0, own, decoding_bytes(pipeline, replace(size, frames=1))))
        kept = vae if stays else 0
    if text:
        active = {part: text_bytes(pipeline, part) for part in text}
        needs = (
            StageNeed(
                "text",
                kept,
                weights[p].resident(mode, p, active[p]),
                active[p],
                ahead=ahead_bytes(pipeline.offloader, weights[p], p, mode, active[p]),
            )
            for p in text
        )
        stages.append(max(needs, key=lambda need: need.total))
    forward = sampling_bytes(pipeline, size)
    own, all_own = transformer_bytes(pipeline, mode, forward), transformer_bytes(pipeline, "none") if stays else 0
    ahead = max(ahead_bytes(pipeline.offloader, weights[p], p, mode, forward) for p in weights if denoises(p))
    stages.append(StageNeed("sampling", kept, max(own, all_own), forward, ahead=ahead))
    ahead = ahead_bytes(pipeline.offloader, weights[VAE], VAE, mode)
    whole = StageNeed("decoding", all_own, vae, decoding_bytes(pipeline, size), ahead=ahead)
    stages.append(_decoding(pipeline, size, whole, room))
    if room is not None:
        stages = [replace(stage, ahead=max(0, min(stage.ahead, room - stage.total))) for stage in stages]
    return Forecast(mode, tuple(stages))


def forecasts(pipeline: Pipeline, size: Size, room: int | None = None) -> tuple[Forecast, ...]:
    """The forecast of every mode, the fastest first."""
    return tuple(forecast(pipeline, size, mode, room) for mode in MODES)


def fastest(needs: tuple[Forecast, ...], room: int | None) -> Forecast | None:
    """The fastest mode that fits into ``room`` bytes; None where none does."""
    if room is None:
        return next(each for each in needs if each.mode == "model")
    return next((each for each in needs if each.fits(room)), None)


def _decoding(pipeline: Pipeline, size: Size, whole: StageNeed, room: int | None) -> StageNeed:
    """The decode as a run begins it: whole, beside what is there from before; else alone, in the first form that fits.

    A decode in parts has the device for itself: other parts leave it first.
    """
    if room is None or whole.total * SPARE <= room:
        return whole
    attempt, needed = planned_decode(pipeline, size, room - whole.weights)
    weights = 0 if attempt.on_host else whole.weights
    return replace(whole, kept=0, weights=weights, activations=needed, form=str(attempt))
