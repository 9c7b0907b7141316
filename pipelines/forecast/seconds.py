"""Time of each stage of a run: its work at its device's rates, copies over the link, and earlier runs of its kind."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...compat.device.execution import HOST
from ...compat.device.facts import DeviceFacts, facts_for
from ...compat.device.probe_store import ProbeStore
from ...compat.device.rates import ATTENTION, PRODUCT, quicker_by
from ...compat.device.work import HEAD_WIDTH
from ...compat.memory.offloader import PINNED
from ...compat.memory.standalone import resident_bytes
from ...compat.memory.statistics import amount_of, duration
from ...compat.probe_results import probe_results_of
from ...compat.transforms.attention import DEFAULT as NATIVE
from ...compat.transforms.step_cache import PYRAMID, TAYLOR
from ..base import PromptRequest, SampleSettings
from ..pipeline import Pipeline
from ..settings import guidance_steps, of_checkpoint, recipe_of
from ..sizes import MARGIN, TRANSFORMER, VAE, Size, sampling_bytes
from ..vae.plan import DecodeRequest, planned_decode
from . import counts
from .memory import COMPUTES, Forecast
from .times import IMAGE, TEXT, PlannedStage, TimeForecast, key_of

PROJECTIONS = 1 / 3  # of a block's products, which an attention that is skipped skips too: 4 of 12 widths squared
WORTH = 0.9  # of the time, below which another mode is worth it
SAMPLING, DECODING = "sampling", "decoding"
PARTS = {**COMPUTES, IMAGE: VAE}  # stage to the part whose device it takes its time on


@dataclass(frozen=True, slots=True)
class Run:
    """Specification of a run: its size, completed settings, and its texts and decode method where known."""

    size: Size
    settings: SampleSettings
    texts: PromptRequest | None = None
    form: DecodeRequest | None = None

    def places(self, pipeline: Pipeline, mode: str) -> dict[str, torch.device]:
        """The stages of a run, in order, with their devices, which here are those of every offload ``mode``."""
        text, image = pipeline.configs.keys() & set(pipeline.spec.files.text_parts), pipeline.model.task == "image"
        names = (*([TEXT] if text else []), *([IMAGE] if image else []), SAMPLING, DECODING)
        return {name: pipeline.offloader.device_of(COMPUTES[name]) for name in names}

    def planned(self, pipeline: Pipeline, name: str, room: int | None) -> PlannedStage:
        """The stage ``name``, to forecast its time with ``room`` bytes on its device (None: as many as it needs)."""
        if name == SAMPLING:
            return self._sampling(pipeline, room)
        precision, weights = pipeline.precision, pipeline.weights
        if name == TEXT:
            forwards = counts.text_forwards(pipeline, self.texts)
            calls, work = max(map(len, forwards.values()), default=0), partial(counts.text_work, pipeline, self.texts)
            return self._stage(pipeline, name, tuple(forwards), dtype=precision.text, work=work, calls=calls)
        if name == IMAGE:
            parts, work = weights.keys() & {counts.IMAGE_ENCODER, VAE}, partial(counts.image_work, pipeline, self.size)
            return self._stage(pipeline, name, tuple(parts), dtype=precision.vae, work=work)
        room = sys.maxsize if room is None else room - (weights[VAE].total if VAE in weights else 0)
        method, _ = planned_decode(pipeline, self.size, room, self.form)
        work = partial(counts.decoding_work, pipeline, self.size, method)
        return self._stage(pipeline, name, (VAE,), on_host=method.on_host, dtype=method.dtype, work=work)

    def _sampling(self, pipeline: Pipeline, room: int | None) -> PlannedStage:
        parts, beside = pipeline.spec.transformers, sampling_bytes(pipeline, self.size)
        each = (pipeline.weights[part] for part in parts if part in pipeline.weights)
        calls = sum(map(len, counts.batches_of(pipeline, self.settings))) * counts.sections_of(pipeline, self.size)
        return self._stage(
            pipeline,
            SAMPLING,
            parts,
            dtype=pipeline.precision.compute or pipeline.precision.transformer,
            work=partial(counts.sampling_work, pipeline, self.size, self.settings),
            calls=calls,
            beside=beside,
            stays=sum(resident_bytes(size.total, size.passing, room, int(MARGIN * beside)) for size in each),
            **sampling_speed(pipeline, self.settings.steps),
        )

    def _stage(
        self, pipeline: Pipeline, name: str, parts: tuple[str, ...], on_host: bool = False, **own: Any
    ) -> PlannedStage:
        """The planned stage of ``parts``: the fields that every stage has, and its ``own``."""
        device, kinds = pipeline.offloader.device_of(PARTS[name]), pipeline.offloader.options.host_weights.kinds
        facts, probes = _machine_of(pipeline, HOST if on_host else device)
        weights = sum(pipeline.weights[part].total for part in parts if part in pipeline.weights)
        pinned, key = all(kinds.get(part) == PINNED for part in parts), work_key(pipeline, name, self)
        return PlannedStage(name=name, facts=facts, probes=probes, weights=weights, key=key, pinned=pinned, **own)


def sampling_speed(pipeline: Pipeline, steps: int) -> dict[str, Any]:
    """The fields of :class:`PlannedStage` that attention and lossy choices set. A step cache that skips inside blocks
    makes attention and products quicker; any other leaves a ``share`` of all work."""
    speed, cache = pipeline.plan.speed, pipeline.plan.step_cache
    kernel = speed.attention.kernel if speed.attention.label == NATIVE else speed.attention.label
    stored = next(iter(counts.stored_products(pipeline)), "") if speed.request.stored_products else ""
    quicker = quicker_by(pipeline.facts, speed.request.fp16_sums, stored, kernel)
    share = 1.0 if cache is None else 1 - cache.skipped(steps)
    if cache is not None and cache.kind in (TAYLOR, PYRAMID):
        inside = {ATTENTION: share, PRODUCT: 1 - PROJECTIONS * (1 - share)}
        share, quicker = 1.0, quicker | {kind: quicker.get(kind, 1.0) / left for kind, left in inside.items()}
    width = int(pipeline.configs[TRANSFORMER].get("attention_head_dim", HEAD_WIDTH))
    return {"kernel": kernel, "width": width, "quicker": quicker, "share": share}


def work_key(pipeline: Pipeline, stage: str, run: Run) -> str:
    """The key of all that changes a stage's work or rate beside its model: runs of one key correct each other."""
    speed, adapters, own = pipeline.plan.speed, pipeline.offloader.adapters, dict[str, Any]()
    if stage == SAMPLING:
        rows = run.settings.guidance_steps
        own = {
            "step cache": pipeline.plan.step_cache,
            "adapters": 0 if adapters is None else zlib.crc32(repr(adapters.key).encode()),
            "watched": pipeline.run.doctor is not None,
            "skipping guidance": rows if len(rows) > 1 or any(row.stg for row in rows) else (),
        }
    elif stage == DECODING:
        own = {"form": None if run.form == DecodeRequest() else run.form}
    return key_of(
        precision=str(pipeline.precision),
        fallbacks=sorted(pipeline.parts.fallbacks),
        storage=dict(pipeline.model.storage),
        ranks=0 if pipeline.run.group is None else pipeline.run.group.world.size,
        demo=pipeline.model.stands_in_for,
        torch=pipeline.facts.torch_version,
        speed=(speed.request, speed.forms, speed.epilogue, sorted(speed.compiled), speed.attention.label),
        **own,
    )


def planned_run(
    pipeline: Pipeline, size: Size, asked: SampleSettings | None = None, texts: PromptRequest | None = None
) -> Run:
    """A run of ``size`` with the steps and guidance that are ``asked``, where 0 is the checkpoint's; without ``asked``
    its guidance only where ``size`` is guided. ``texts`` tell how many tokens are encoded."""
    recipe = recipe_of(pipeline, asked)
    usual = of_checkpoint(pipeline, recipe).sizes.defaults
    settings = asked or SampleSettings(size.width, size.height, size.frames)
    cfg = settings.cfg or (usual.cfg if size.guided or asked is not None else 1.0)
    rows = settings.guidance_steps or guidance_steps(recipe, settings, cfg)
    steps = len(settings.sigmas) - 1 if settings.sigmas else settings.steps or usual.steps
    settings = replace(settings, fps=settings.fps or usual.fps, steps=steps)
    settings = replace(settings, width=size.width, height=size.height, frames=size.frames, cfg=cfg, guidance_steps=rows)
    return Run(replace(size, guided=cfg > 1.0), settings, texts, pipeline.run.decode)


def _machine_of(pipeline: Pipeline, device: torch.device) -> tuple[DeviceFacts, ProbeStore | None]:
    """Facts and probe results of ``device``, which need not be the pipeline's own; None without a state folder."""
    if device == pipeline.offloader.device:
        return pipeline.facts, pipeline.device.probes
    facts, state = facts_for(device), pipeline.offloader.options.state
    quiet = pipeline.device.probes is None or pipeline.device.probes.quiet
    return facts, None if state is None else probe_results_of(facts, state, quiet)


def quickest(modes: Sequence[str], times: Mapping[str, TimeForecast]) -> str:
    """The first mode, or the quickest where that is worth it and all times are known; empty for no modes."""
    first = next(iter(modes), "")
    if any(mode not in times for mode in modes) or not first:
        return first
    best = min(modes, key=lambda mode: times[mode].seconds)
    return best if times[best].seconds < WORTH * times[first].seconds else first


def advice(needs: Sequence[Forecast], times: Mapping[str, TimeForecast], room: int | None) -> str:
    """Time with more memory, such as ``with offload model 6 min, needs 3.0 GB more``; empty where nothing is gained."""
    if room is None:
        return ""
    now = quickest([each.mode for each in needs if each.fits(room)], times)
    larger = [each for each in needs if not each.fits(room) and each.mode in times]
    if now not in times or not larger:
        return ""
    best = min(larger, key=lambda each: (times[each.mode].seconds, each.peak))
    if times[best.mode].seconds > WORTH * times[now].seconds:
        return ""
    return f"with offload {best.mode} {duration(times[best.mode].seconds)}, needs {amount_of(best.lacks(room))} more"
