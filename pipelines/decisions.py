"""Decisions of a pipeline and choices that a device refuses, as plain values for a page and as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compat.device import precision
from ..compat.device.facts import DeviceFacts
from ..compat.device.precision import NAMES, SAFE
from ..compat.device.probe_store import ProbeResult
from ..compat.memory import offloader
from ..compat.report import conv3d_decision
from ..compat.transforms import attention
from ..compat.transforms.attention_kernels import reason_against
from .pipeline import Pipeline
from .registry import FAMILIES
from .report import title_of


def card_of(pipeline: Any, probes: Mapping[str, ProbeResult] | None = None) -> dict[str, Any]:
    """The card of a video or paint pipeline, as JSON values; without ``probes`` the tables decide about Conv3d."""
    decisions, does = [*pipeline.plan.decisions], [*_variant(pipeline)]
    if isinstance(pipeline, Pipeline):
        does.append(f"{pipeline.model.task} to video")
        if pipeline.offloader.device_of("vae") == pipeline.offloader.device:  # the device that the probes ran on
            decisions.append(conv3d_decision(pipeline.facts, probes, pipeline.precision.vae))
    return {
        "family": pipeline.family,
        "title": title_of(pipeline),
        "model": "demo model" if pipeline.is_demo else _source_holder(pipeline).source.name,
        "does": ", ".join(does),
        "decisions": [decision.as_json() for decision in decisions],
    }


def status_of(pipeline: Any) -> str:
    """A pipeline in one short line: model, variant, dtype, offload, device; for a demo, the model it stands in for."""
    what = ", ".join((title_of(pipeline), *_variant(pipeline)))
    if pipeline.is_demo:
        name = _source_holder(pipeline).stands_in_for
        what = f"demo model in place of {name!r}" if name else f"demo model, {title_of(pipeline)}"
    return f"{what}: {in_short(pipeline)}, on {pipeline.facts.name}"


def in_short(pipeline: Any, part: str = "transformer") -> str:
    """The dtype of a part and the offload mode, such as ``bf16, offload group``, for a status line."""
    dtype = getattr(pipeline.precision, part)
    safe = part == "transformer" and pipeline.precision.safe
    return f"{SAFE if safe else NAMES.get(dtype, str(dtype))}, offload {pipeline.offloader.mode}"


def limits(facts: DeviceFacts) -> dict[str, dict[str, str]]:
    """Input of the load node -> choice that raises on this device -> reason, by the tables alone; no probe runs."""
    models = [family.rewrites.precision for family in FAMILIES.values()]
    reasons = {
        "precision": {choice: precision.reason_against(choice, models, facts) for choice in precision.CHOICES},
        "offload": {choice: offloader.reason_against(choice, facts.device) for choice in offloader.CHOICES},
        "attention": {choice: reason_against(choice, facts) for choice in attention.CHOICES},
    }
    named = {name: {choice: why for choice, why in each.items() if why} for name, each in reasons.items()}
    return {name: each for name, each in named.items() if each}


def limit_tooltip(facts: DeviceFacts, name: str) -> str:
    """A sentence for the tooltip of the input ``name``, with a space before it; empty where every choice works."""
    here = limits(facts).get(name)
    if not here:
        return ""
    choices_by_reason: dict[str, list[str]] = {}
    for choice, why in here.items():
        choices_by_reason.setdefault(why, []).append(choice)
    named = "; ".join(f"{', '.join(choices)} ({why})" for why, choices in choices_by_reason.items())
    return f" Not on this machine ({facts.name}): {named}."


def _source_holder(pipeline: Any) -> Any:
    """The owner of ``source`` and ``stands_in_for``: a video pipeline's model, or a paint pipeline itself."""
    return pipeline.model if isinstance(pipeline, Pipeline) else pipeline


def _variant(pipeline: Any) -> tuple[str, ...]:
    """The pipeline's variant; empty for a demo model, or where the variant is named like the family."""
    return () if pipeline.is_demo or pipeline.variant == pipeline.family else (pipeline.variant,)
