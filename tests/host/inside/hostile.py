"""Scenes in which ComfyUI's own memory functions fail or lie to this pack, and to nobody else."""

from __future__ import annotations

import subprocess
from typing import Any

import comfy.model_management as management
from anygpu.pipelines.base import Silent
from hostile.faults import LIES, misbehaving

from host.inside.device import bytes_on_device, distance, loaded_for, rendered
from host.inside.sight import state

BEHAVIOURS: dict[str, Any] = {
    "runtime": RuntimeError("The device doesn't support querying the available free memory"),
    "os": OSError(1450, "Insufficient system resources"),
    "attribute": AttributeError("no such attribute"),
    "process": subprocess.CalledProcessError(1, ["gcc"]),
    **{repr(lie): lie for lie in LIES},
}


def asked(name: str, question: str, behaviours: list[str]) -> dict[str, Any]:
    """A clip beside each behaviour of one question: its difference from the CPU's."""
    found = {}
    for behaviour in behaviours:
        management.unload_all_models()
        original = getattr(management, question)
        with state(**{question: misbehaving(original, BEHAVIOURS[behaviour], [0])}):
            found[behaviour] = distance(rendered(loaded_for(name), name), name)
    return found


def ordered(name: str, order: str) -> dict[str, Any]:
    """What becomes of a failure of something that ComfyUI was told to do: it is raised, and the next run is right."""
    pipeline, before = loaded_for(name), bytes_on_device()
    failure = RuntimeError("acc error: an illegal memory access was encountered")
    with state(**{order: misbehaving(getattr(management, order), failure, [0])}):
        try:
            rendered(pipeline, name, Silent())
            raised = ""
        except RuntimeError as error:
            raised = str(error)
    management.unload_all_models()
    left = bytes_on_device() - before
    return {"raised": raised, "left": left, "next": distance(rendered(pipeline, name), name)}
