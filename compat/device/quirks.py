"""Known upstream bugs as dated rows: device, versions, symptom, and what we do about it.

A row names operations like the probes do (``conv3d.bf16``, ``cast.bf16_to_fp32``). A claim that an operation is wrong
holds until a probe has tested the device; a claim that it is costly (emulated, or using several times the memory)
cannot be refuted by a probe. This is the only place that compares versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch

from .facts import DeviceFacts, value_or
from .probe_store import OK, UNKNOWN, ProbeResult, Probes
from .quirk_rows import QUIRKS, Quirk

DTYPE_NAMES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class DevicePolicy:
    """The combined effects of all rows that apply to a machine; callers read a field and never compare versions.

    Args:
        rows: the rows in force.
        wrong: operation to the row that says it fails or lies.
        costly: operation to the row that says it costs a multiple.
        tile_pixels: largest side of a tile that a VAE may be given; 0 for no cap.
        allocation_bytes: largest single buffer; 0 for no cap.
        conv_bytes: largest input of one convolution; 0 for no cap.
        vae_cudnn: whether cuDNN or MIOpen stays on around a VAE.
        benchmark: whether their exhaustive tuning may be switched on.
        contiguous_weights: whether a convolution's weight must be contiguous.
    """

    rows: tuple[Quirk, ...] = ()
    wrong: Mapping[str, Quirk] = field(default_factory=dict)
    costly: Mapping[str, Quirk] = field(default_factory=dict)
    tile_pixels: int = 0
    allocation_bytes: int = 0
    conv_bytes: int = 0
    vae_cudnn: bool = True
    benchmark: bool = True
    contiguous_weights: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an operation works on this device, whether it is unusually costly, and why."""

    usable: bool
    costly: bool = False
    why: str = ""


def active(facts: DeviceFacts, versions: Mapping[str, str] | None = None) -> tuple[Quirk, ...]:
    """The rows that apply to the device of ``facts``.

    Args:
        versions: replaces ``facts.versions``, name to version. A row that asks for an unknown version applies: what
            is unknown may be broken, and the probes correct it.
    """
    known = facts.versions if versions is None else versions
    return tuple(row for row in QUIRKS if _stands(row, facts, known))


def policy_for(facts: DeviceFacts, versions: Mapping[str, str] | None = None) -> DevicePolicy:
    """The combined policy for the device of ``facts``: the smallest cap and the most cautious switch of all rows."""
    rows = active(facts, versions)
    wrong: dict[str, Quirk] = {}
    costly: dict[str, Quirk] = {}
    effects: dict[str, Any] = {}
    for row in rows:
        wrong |= {operation: row for operation in row.wrong if operation not in wrong}
        costly |= {operation: row for operation in row.costly if operation not in costly}
        for name, value in row.effect.items():
            effects[name] = min(value, effects.get(name, value)) if not isinstance(value, bool) else value
    return DevicePolicy(rows, wrong, costly, **effects)


@contextmanager
def convolution_switches(policy: DevicePolicy, library: bool = True) -> Iterator[None]:
    """Torch's switches for its convolution library (cuDNN; MIOpen on Radeon) as ``policy`` wants them, then as they
    were.

    Args:
        library: False switches the library off whatever ``policy`` says.
    """
    cudnn = torch.backends.cudnn

    def switch(name: str, value: bool | None) -> bool | None:
        """Set a switch; returns what it was, None where torch does not tell or has locked its flags."""
        before = value_or(lambda: bool(getattr(cudnn, name)), None)
        if value is not None:
            with suppress(Exception):
                setattr(cudnn, name, value)
        return before

    enabled = None if library and policy.vae_cudnn else switch("enabled", False)
    benchmark = None if policy.benchmark else switch("benchmark", False)
    try:
        yield
    finally:
        switch("enabled", enabled)
        switch("benchmark", benchmark)


def verdict(operation: str, policy: DevicePolicy, probes: Probes = None) -> Verdict:
    """Whether ``operation`` may be relied on: the device's own answer first, then the rows.

    Args:
        operation: a probe's name.
        probes: answers by name, asked when read; None relies on the rows alone.
    """
    costly = operation in policy.costly
    asked = None if probes is None or operation not in probes else probes[operation]
    if asked is not None and asked.status != UNKNOWN:
        if asked.status != OK:
            return Verdict(False, costly, f"{operation} is {asked}")
        return Verdict(True, costly, _said(operation, policy.costly[operation]) if costly else asked.detail)
    if operation in policy.wrong:
        return Verdict(False, costly, _said(operation, policy.wrong[operation]))
    return Verdict(True, costly, _said(operation, policy.costly[operation]) if costly else "")


def verdicts(operations: Sequence[str], policy: DevicePolicy, probes: Probes = None) -> Verdict:
    """The first operation that fails, else the first that is costly, else a right one."""
    costly = None
    for operation in operations:
        one = verdict(operation, policy, probes)
        if not one.usable:
            return one
        costly = costly or (one if one.costly else None)
    return costly or Verdict(True)


def abilities(facts: DeviceFacts, probes: Probes = None, policy: DevicePolicy | None = None) -> dict[str, Any]:
    """Plain values for layers that choose kernels: ``backend``, and per operation whether each dtype is worth using.

    Returns:
        ``conv3d``, ``conv3d_channels_last``, ``conv2d``, ``pad3d``, ``matmul``, ``attention`` and ``groupnorm``, each a
        mapping from ``fp32``, ``bf16`` and ``fp16`` to whether it works here without costing a multiple; ``cast``, a
        mapping such as ``{"bf16_to_fp32": False}``; ``conv_bytes`` and ``contiguous_weights`` as in
        :class:`DevicePolicy`.
    """
    policy = policy or policy_for(facts)
    able: dict[str, Any] = {
        "backend": facts.backend,
        "arch": facts.arch,
        "conv_bytes": policy.conv_bytes,
        "contiguous_weights": policy.contiguous_weights,
        "cast": {
            f"{dtype}_to_fp32": verdict(f"cast.{dtype}_to_fp32", policy, probes).usable for dtype in ("bf16", "fp16")
        },
    }
    for name in ("conv3d", "conv3d_channels_last", "conv2d", "pad3d", "matmul", "attention", "groupnorm"):
        each = {dtype: verdict(f"{name}.{dtype}", policy, probes) for dtype in DTYPE_NAMES}
        able[name] = {dtype: answer.usable and not answer.costly for dtype, answer in each.items()}
    return able


def fixed(policy: DevicePolicy, probes: Mapping[str, ProbeResult]) -> tuple[Quirk, ...]:
    """The rows whose operations all work on this device now: a newer driver has fixed them."""
    return tuple(
        row
        for row in policy.rows
        if row.wrong and all(name in probes and probes[name].status == OK for name in row.wrong)
    )


def within(version: str, first_bad: str, first_good: str) -> bool:
    """Whether ``version`` lies in [first_bad, first_good); an empty bound is open, an empty version lies in."""
    if not version:
        return True
    number = _number(version)
    return (not first_bad or number >= _number(first_bad)) and (not first_good or number < _number(first_good))


def _stands(row: Quirk, facts: DeviceFacts, versions: Mapping[str, str]) -> bool:
    return (
        any(fnmatch(facts.backend, backend) for backend in row.backends)
        and any(fnmatch(facts.arch, arch) for arch in row.arches)
        and not any(fnmatch(facts.arch, arch) for arch in row.but_not)
        and any(fnmatch(facts.name.lower(), name.lower()) for name in row.names)
        and all(
            within(versions.get(name, ""), *span) for name, span in row.versions.items() if name not in row.optional
        )
        and all(name in versions and within(versions[name], *row.versions[name]) for name in row.optional)
    )


def _number(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, to compare: 2.9.1+cu128 as (2, 9, 1), padded so that 2.9 equals 2.9.0."""
    numbers = tuple(map(int, re.findall(r"\d+", re.split(r"[+a-zA-Z]", version, maxsplit=1)[0])[:4]))
    return numbers + (0,) * (4 - len(numbers))


def _said(operation: str, row: Quirk) -> str:
    return f"{operation}: {row.symptom} ({row.source})"
