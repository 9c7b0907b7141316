"""Makes a run fit: chooses the mode for each stage by the memory that is free at that moment, and refuses what
cannot fit. A mode that the user chose changes only after running out of memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...compat.decision import Decision
from ...compat.device.execution import HOST
from ...compat.device.facts import GIBIBYTE, facts_for
from ...compat.errors import UnsupportedError, require_choice, require_range
from ...compat.memory.offloader import DISK, HOSTED, MODES, HostWeights, Offloader, OffloadOptions
from ...compat.memory.parts import PartBytes
from ...compat.memory.statistics import amount_of
from ...compat.transforms import compile as compiling
from ..base import Progress
from ..pipeline import Pipeline
from ..sizes import MARGIN, SPARE, TRANSFORMER, VAE, Size, bytes_on, transformer_bytes
from ..vae.plan import room_on
from .memory import COMPUTES, forecast
from .seconds import Run, quickest
from .times import times_of

MOST_KEPT_FREE = 1023.0  # GB: the widget's
PARTS = (TRANSFORMER, "text_encoder", VAE)  # what may compute on a device of its own


def offload_options(
    devices: Mapping[str, Any], keep_free_gb: float, state: Path | None, host_weights: HostWeights
) -> OffloadOptions:
    """The user's offloader settings, checked; a part on ``auto`` is not placed. Raises InputError for a part that
    cannot be placed or a size out of range, UnsupportedError for a device that does not answer."""
    for part in devices:
        require_choice("a device for", part, PARTS, "Name one of these.")
    require_range("keep_free_gb", keep_free_gb, 0, MOST_KEPT_FREE, "GB")
    chosen = {part: str(device) for part, device in devices.items() if device not in (None, "", "auto")}
    placed = {part: facts_for(device).device for part, device in chosen.items()}
    return OffloadOptions(placed, int(keep_free_gb * GIBIBYTE), state, host_weights)


def host_weight_decisions(offloader: Offloader) -> tuple[Decision, ...]:
    """The decision on how host weights are kept, where some stay on disk or our offloader moves them to a device."""
    kept = offloader.options.host_weights
    ours = offloader.device.type != HOST.type and offloader.mode != HOSTED
    return (kept.decision,) if kept.kinds and (ours or kept.of(DISK)) else ()


def require_room(
    weights: Mapping[str, PartBytes], device: torch.device, free: int | None, options: OffloadOptions
) -> None:
    """Raise UnsupportedError for a model whose largest layer alone does not fit on ``device``, before anything is read.
    ``free``: its bytes (None: unknown, not checked); under a host all of its memory, as that unloads other models."""
    if device.type == HOST.type or free is None:
        return
    room = free - options.keep_free_bytes
    here = {part: size.layer for part, size in weights.items() if options.place(part, device) == device}
    part = max(here, key=lambda name: here[name], default="")
    if part and here[part] > room:
        raise UnsupportedError(
            f"{amount_of(max(room, 0))} left on {device} for the largest layer of the {part}, {amount_of(here[part])}",
            expected=f"{amount_of(here[part] - room)} more",
            fix="Close other programs that use this device, lower keep_free_gb, or choose device cpu for this part.",
        )


def fit_offload(pipeline: Pipeline, stage: str, size: Size | None, progress: Progress, run: Run | None = None) -> None:
    """Switch the pipeline, if ``auto`` decides, to a mode in which ``stage`` (``text``, ``sampling``) fits, and tell
    the user: the quickest by the times of ``run``, without it the first; if none fits surely, the one that needs least.
    ``size`` is the run's, None if not known yet. Nothing changes on the host or where free memory is unknown. Raises
    UnsupportedError, before the stage's weights are read, where not even the last one fits."""
    offloader = pipeline.offloader
    device = offloader.device_of(COMPUTES[stage])
    if not offloader.automatic or device.type == HOST.type or not pipeline.weights:
        return
    free = room_on(pipeline, device)
    if free is None:
        return
    own = 0 if offloader.evicts else bytes_on(device, *pipeline.parts.values())  # parts that a mode can move off
    room = free + own - offloader.options.keep_free_bytes
    needs = {mode: _need(pipeline, stage, size, mode) for mode in modes_of(pipeline)}
    fitting = [mode for mode, need in needs.items() if need * SPARE <= room]
    times = {} if run is None or len(fitting) < 2 else times_of(pipeline, run, fitting, room)
    fits = quickest(fitting, times)
    least = min(needs, key=lambda mode: needs[mode])
    if not fits and needs[least] > room * MARGIN:
        raise UnsupportedError(
            f"{amount_of(room)}{'' if offloader.evicts else ' free'} on {device} for {stage}, which needs "
            f"{amount_of(needs[least])} with offload {least}",
            expected=f"{amount_of(needs[least] - room)} more",
            fix=f"{'Lower width, height or frames, close' if size else 'Close'} other programs, or choose device cpu "
            "for this part.",
        )
    chosen, was = fits or least, offloader.mode
    if chosen != was:
        offloader.switch(chosen)
        quick = f", the quickest that fits: {times[chosen]}" if chosen in times else ""
        progress.notify(
            f"offload {was} -> {chosen} for {stage}: {amount_of(needs[chosen])} needed, {amount_of(room)} free{quick}"
        )


def release_text(pipeline: Pipeline, comes: str) -> None:
    """Release the text encoders on the device of ``comes``, the part that computes next, and those on the host."""
    offloader = pipeline.offloader
    for part in pipeline.spec.files.text_parts:
        if offloader.device_of(part) == offloader.device_of(comes) or offloader.device_of(part).type == HOST.type:
            offloader.release(part)


def plan_line(pipeline: Pipeline) -> str:
    """The order of operations on this pipeline's parts, and how its host weights are kept, in one line."""
    steps = sorted(getattr(pipeline.parts.prepare, "steps", ()), key=lambda step: step.order)
    adapters = pipeline.offloader.adapters
    lora = [f"LoRA {adapters}"] if adapters else []
    line = " -> ".join(["read", *lora, *(step.name for step in steps), repr(pipeline.offloader)])
    return "; ".join((line, *map(str, host_weight_decisions(pipeline.offloader))))


def _need(pipeline: Pipeline, stage: str, size: Size | None, mode: str) -> int:
    """Bytes of ``stage`` under ``mode``: its peak; without ``size`` at least the transformer's, if that is on the same
    device; with ``none`` at least all that stays there, and the activations of sampling."""
    weights = pipeline.weights
    needs = {need.name: need for need in forecast(pipeline, Size(64, 64, 1) if size is None else size, mode).stages}
    need = needs[stage].total if stage in needs else 0
    device_of, device = pipeline.offloader.device_of, pipeline.offloader.device_of(COMPUTES[stage])
    beside = device == device_of(TRANSFORMER)
    if size is None and beside:  # the transformer comes next
        need = max(need, transformer_bytes(pipeline, mode))
    vae = weights[VAE].total if device == device_of(VAE) else 0
    both = vae + (transformer_bytes(pipeline, mode) if beside else 0)
    stays = both if mode == "none" else 0
    return max(need, stays + (needs["sampling"].activations if stays and size is not None else 0))


def modes_of(pipeline: Pipeline) -> tuple[str, ...]:
    """The offload modes that a run may take: the chosen one, or with ``auto`` all that the compiled parts allow."""
    if not pipeline.offloader.automatic:
        return (pipeline.offloader.mode,)
    compiled = pipeline.plan.speed.compiled
    return tuple(mode for mode in MODES if not (compiled and compiling.WITH_OFFLOAD.get(mode)))
