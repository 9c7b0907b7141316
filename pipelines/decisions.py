"""What was decided for a pipeline, as plain values for a page: a subject, a verdict and a sentence with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compat.device.probe_store import ProbeResult
from ..compat.device.report import conv3d_lines
from ..compat.precision import NAMES, SAFE
from .base import Pipeline
from .registry import FAMILIES
from .report import TITLES

CHOSEN = "as set on the load node"
SUBJECTS = {  # first word of a note -> what it is about; the first note is about precision
    "offload": "offload",
    "attention": "attention",
    "kernels": "kernels",
    "compile": "compile",
    "conv3d": "Conv3d",
    "cache": "step cache",
    "host": "host memory",
    "lora": "LoRA",
}


def card_of(pipeline: Any, probes: Mapping[str, ProbeResult] | None = None) -> dict[str, Any]:
    """The card of a pipeline: what it is, and its decisions as ``subject``, ``verdict`` and ``why``.

    Args:
        pipeline: of any family, those that paint too. probes: what the device answered so far; None relies on the
            tables.
    """
    decisions = [_decision(index, note) for index, note in enumerate(pipeline.notes)]
    video = pipeline.family in FAMILIES
    if video and not any(decision["subject"] == "Conv3d" for decision in decisions):
        decisions.append(_conv3d(pipeline, probes))
    return {
        "family": pipeline.family,
        "title": TITLES[pipeline.family],
        "model": pipeline.source.name,
        "does": ", ".join((*_variant(pipeline), *((f"{pipeline.task} to video",) if video else ()))),
        "decisions": decisions,
    }


def status_of(pipeline: Any) -> str:
    """A pipeline in one short line: model, variant, dtype, offload, device."""
    return (
        f"{', '.join((TITLES[pipeline.family], *_variant(pipeline)))}: {in_short(pipeline)}, on {pipeline.facts.name}"
    )


def in_short(pipeline: Any, part: str = "transformer") -> str:
    """The dtype of a part and the offload mode, such as ``bf16, offload group``, for a status line."""
    dtype = getattr(pipeline.precision, part)
    safe = part == "transformer" and pipeline.precision.safe
    return f"{SAFE if safe else NAMES.get(dtype, str(dtype))}, offload {pipeline.offloader.mode}"


def _variant(pipeline: Any) -> tuple[str, ...]:
    """The variant, where the family has several."""
    return () if pipeline.variant == pipeline.family else (pipeline.variant,)


def _decision(index: int, note: str) -> dict[str, str]:
    """One note, which reads ``verdict: reason``, with its subject."""
    words = note.split(maxsplit=1)
    subject = SUBJECTS.get(words[0].rstrip(":,").lower(), "") if words else ""
    if not subject and index == 0:
        subject = "precision"
    text = note.removeprefix(f"{words[0]} ") if subject and subject != "precision" and words else note
    verdict, _, why = text.partition(": ")
    if verdict == "auto" and why:  # "auto: this kernel; the reason"
        verdict, _, why = why.partition("; ")
        why = f"auto: {why}" if why else "auto"
    return {"subject": subject or "also", "verdict": verdict, "why": why or (CHOSEN if verdict == "off" else "")}


def _conv3d(pipeline: Pipeline, probes: Mapping[str, ProbeResult] | None) -> dict[str, str]:
    """The form of 3-D convolutions in the VAE's dtype: one where all kinds agree, else each with its own."""
    lines = conv3d_lines(pipeline.facts, probes, pipeline.precision.vae)
    forms = dict.fromkeys(line.verdict for line in lines)
    if len(forms) == 1:
        return {"subject": "Conv3d", "verdict": next(iter(forms)), "why": lines[0].why}
    named = "; ".join(f"{line.subject.removeprefix('Conv3d, ').rsplit(', ', 1)[0]} {line.verdict}" for line in lines)
    return {"subject": "Conv3d", "verdict": named, "why": "; ".join(dict.fromkeys(line.why for line in lines))}
