"""Probes as green, amber and red lights, each with what it means and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .facts import DeviceFacts
from .probe_store import OK, UNKNOWN, ProbeResult
from .quirks import DevicePolicy, policy_for
from .report import OPTIONAL, PROMISED
from .wheels import install, wheel_index

GREEN, AMBER, RED, GREY = "green", "amber", "red", "grey"


@dataclass(frozen=True, slots=True)
class ProbeStatus:
    """One probe for a reader: its name, its colour, what the device answered, and what to do."""

    name: str
    colour: str
    verdict: str
    advice: str = ""


def probe_statuses(
    facts: DeviceFacts, probes: Mapping[str, ProbeResult], policy: DevicePolicy | None = None
) -> list[ProbeStatus]:
    """A light per probe.

    Green: right. Amber: right but slow, or absent and not needed. Red: wrong or unusable. Grey: not asked.

    Args:
        probes: answers by name; they are read as they are.
    """
    policy = policy or policy_for(facts)
    return [_light(name, probes[name], facts, policy) for name in probes]


def _light(name: str, answer: ProbeResult, facts: DeviceFacts, policy: DevicePolicy) -> ProbeStatus:
    if answer.status == UNKNOWN:
        return ProbeStatus(name, GREY, answer.detail or "not asked yet", "Ask the device.")
    row = policy.wrong.get(name) or policy.costly.get(name)
    if answer.status == OK:
        slow = policy.costly.get(name)
        return (
            ProbeStatus(name, AMBER, f"right, but slow: {slow.symptom}", slow.done)
            if slow
            else ProbeStatus(name, GREEN, "right")
        )
    if name in OPTIONAL:
        return ProbeStatus(name, AMBER, "absent, not needed", "Nothing to do: there is another way.")
    if row is not None:
        return ProbeStatus(name, RED, str(answer), ". ".join(filter(None, (row.done, row.remedy))))
    return ProbeStatus(name, RED, str(answer), _update(facts))


def _update(facts: DeviceFacts) -> str:
    """What helps where no known bug explains the answer."""
    if facts.backend not in PROMISED:
        return "Nothing to do: AnyGPU takes another way on this device."
    index, _ = wheel_index(facts)
    driver = f" (now {facts.driver})" if facts.driver else ""
    return (
        f"Update the driver{driver} and torch. {install(index)}" if index else f"Update the driver{driver} and torch."
    )
