"""Which choices of the load node cannot work on a device, and why, from the tables alone: nothing is asked or tried."""

from __future__ import annotations

from ..compat import precision
from ..compat.device.facts import DeviceFacts
from ..compat.errors import PackError
from ..compat.memory import offloader
from ..compat.memory.offloader import offloader_for
from ..compat.memory.parts import Parts
from ..compat.precision import precision_for
from ..compat.transforms import attention
from ..compat.transforms.attention_kernels import lacking
from .registry import FAMILIES


def limits(facts: DeviceFacts) -> dict[str, dict[str, str]]:
    """Input of the load node -> choice that raises on this device -> the reason; inputs without one are left out."""
    found = {
        "precision": {choice: _no_precision(choice, facts) for choice in precision.CHOICES},
        "offload": {choice: _no_offload(choice, facts) for choice in offloader.CHOICES},
        "attention": {choice: lacking(choice, facts) for choice in attention.CHOICES},
    }
    named = {name: {choice: why for choice, why in each.items() if why} for name, each in found.items()}
    return {name: each for name, each in named.items() if each}


def tooltip(facts: DeviceFacts, name: str) -> str:
    """A sentence for the tooltip of the input ``name``, with a space before it; empty where every choice works."""
    here = limits(facts).get(name)
    if not here:
        return ""
    together: dict[str, list[str]] = {}
    for choice, why in here.items():
        together.setdefault(why, []).append(choice)
    named = "; ".join(f"{', '.join(choices)} ({why})" for why, choices in together.items())
    return f" On this machine ({facts.name}) not: {named}."


def line(facts: DeviceFacts) -> str:
    """All of it in one line for the status under the load node; empty where every choice works."""
    named = [f"{name} {', '.join(each)}" for name, each in limits(facts).items()]
    return f"cannot work here: {'; '.join(named)}" if named else ""


def _no_precision(choice: str, facts: DeviceFacts) -> str:
    """Why no family can have this precision; empty when one can."""
    for family in FAMILIES.values():
        try:
            precision_for(family.precision, facts, choice)
            return ""
        except PackError as error:
            why = error.found
    return why.removeprefix(f"precision {choice!r} ")


def _no_offload(choice: str, facts: DeviceFacts) -> str:
    """Why this offload cannot be inside ComfyUI, whose own memory manager is always there; empty when it can."""
    try:
        offloader_for(choice, Parts({}), facts.device, {}, hosted=lambda *_: None)
    except PackError as error:
        return error.found.removeprefix(f"offload {choice!r} ")
    return ""
