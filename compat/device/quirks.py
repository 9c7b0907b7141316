"""Known upstream bugs as dated rows, of ``quirks.json``; the only place that compares versions.
A row names operations as the probes do. A wrong operation counts as wrong until a probe has tested it on the device; a
costly one (emulated, or several times the memory) stays costly, as no probe measures that."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

import torch

from ..decision import Decision
from ..errors import json_file
from .execution import held
from .facts import DeviceFacts
from .probe_store import OK, UNKNOWN, ProbeResult, Probes
from .probes import DTYPES, NAMES

ANY = ("*",)


@dataclass(frozen=True, slots=True)
class Quirk:
    """One upstream bug."""

    name: str
    backends: tuple[str, ...]  # patterns, as arches and names; names without regard to case
    symptom: str
    source: str  # the threads that show it
    done: str  # what the pack does about it
    arches: tuple[str, ...] = ANY
    but_not: tuple[str, ...] = ()  # arches that the row leaves out
    names: tuple[str, ...] = ANY
    versions: Mapping[str, Sequence[str]] = field(default_factory=dict)  # package to [first bad, first good)
    optional: tuple[str, ...] = ()  # packages that must be there for the row to apply
    wrong: tuple[str, ...] = ()  # operations that fail or lie, until a probe says otherwise
    costly: tuple[str, ...] = ()  # operations that cost a multiple
    effect: Mapping[str, Any] = field(default_factory=dict)  # fields of DevicePolicy
    remedy: str = ""  # what the user can do about it
    seen: str = "2026-09"  # when it was last checked against its thread


QUIRKS: tuple[Quirk, ...] = tuple(
    Quirk(**cast("dict[str, Any]", {key: tuple(own) if isinstance(own, list) else own for key, own in row.items()}))
    for row in json_file(Path(__file__).with_suffix(".json"))
)


@dataclass(frozen=True, slots=True)
class DevicePolicy:
    """The combined effects of all rows that apply to a machine; callers read a field and never compare versions."""

    rows: tuple[Quirk, ...] = ()
    wrong: Mapping[str, Quirk] = field(default_factory=dict)  # operation to the row that says it fails or lies
    costly: Mapping[str, Quirk] = field(default_factory=dict)  # operation to the row that says it costs a multiple
    tile_pixels: int = 0  # largest side of a VAE's tile; 0 for no cap
    allocation_bytes: int = 0  # largest single buffer; 0 for no cap
    conv_bytes: int = 0  # largest input of one convolution; 0 for no cap
    vae_cudnn: bool = True  # cuDNN or MIOpen stays on around a VAE
    benchmark: bool = True  # their exhaustive tuning may be switched on
    contiguous_weights: bool = False  # of convolutions
    product_rows: int = 0  # most rows of a linear layer's product; 0 for any
    norm_rows: int = 0  # most rows of torch's own RMS norm; 0 for any
    plain_operands: bool = False  # contiguous: left operands of products, both of 2-D convolutions; linear on two axes
    pins: bool = True  # host memory may be locked for the device's kernels
    expandable_segments: bool = True  # of torch's allocator

    def care(self, *effects: str) -> list[Decision]:
        """A decision for each row that sets a field of the policy; with ``effects`` for each that sets one of them."""
        rows = (row for row in self.rows if row.effect.keys() & set(effects or row.effect))
        return [Decision("care", row.done, source=row.source) for row in rows]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on an operation on this device: if it works, if it is unusually costly, and the reason."""

    usable: bool
    costly: bool = False
    why: str = ""


def active(facts: DeviceFacts) -> tuple[Quirk, ...]:
    """The rows that apply to a device; an unknown version counts as broken, which the probes may refute."""
    return tuple(row for row in QUIRKS if _applies(row, facts))


def policy_for(facts: DeviceFacts) -> DevicePolicy:
    """The policy for the device of ``facts``: of the rows that apply, the smallest value of each cap, the last value of
    each switch, and the first row that names an operation."""
    rows = active(facts)
    wrong, costly, effects = dict[str, Quirk](), dict[str, Quirk](), dict[str, Any]()
    for row in rows:
        wrong |= {operation: row for operation in row.wrong if operation not in wrong}
        costly |= {operation: row for operation in row.costly if operation not in costly}
        for name, value in row.effect.items():
            effects[name] = min(value, effects.get(name, value)) if not isinstance(value, bool) else value
    return DevicePolicy(rows, wrong, costly, **effects)


@contextmanager
def convolution_switches(policy: DevicePolicy, library: bool = True) -> Iterator[None]:
    """For the block, turn off cuDNN (MIOpen) or its tuning if ``policy`` says so; without ``library`` cuDNN anyway."""
    off = {"enabled": not (library and policy.vae_cudnn), "benchmark": not policy.benchmark}
    with ExitStack() as stack:
        for name in filter(off.get, off):
            with suppress(Exception):  # torch does not tell, or has locked its flags
                stack.enter_context(held(torch.backends.cudnn, name, False))
        yield


@dataclass(frozen=True, slots=True)
class Abilities:
    """Operations that a device can be relied on for, by its probe results, measured when read, else by known bugs."""

    policy: DevicePolicy
    probes: Probes = None

    def verdict(self, *operations: str) -> Verdict:
        """The verdict of the first of ``operations`` (names of probes) that fails, else is costly, else of the last."""
        verdicts = [Verdict(True)]
        for operation in operations:  # none is asked after one that fails
            verdicts.append(self._verdict_on(operation))
            if not verdicts[-1].usable:
                return verdicts[-1]
        return next((each for each in verdicts if each.costly), verdicts[-1])

    def transformer(self, dtype: str) -> Verdict:
        """Verdict on a transformer in ``dtype``, such as ``bf16``: casts in both directions, matmuls, attention."""
        return self.verdict(*_casts(dtype), f"matmul.{dtype}", f"attention.{dtype}", f"masked_attention.{dtype}")

    def vae(self, dtype: str) -> Verdict:
        """Verdict on a VAE in ``dtype``: casts, GroupNorm, and 2-D convolutions."""
        return self.verdict(*_casts(dtype), f"groupnorm.{dtype}", f"conv2d.{dtype}")

    def _verdict_on(self, operation: str) -> Verdict:
        """The verdict on one operation: its probe's, else the rows'; only rows know that an operation is costly."""
        wrong, slow = self.policy.wrong.get(operation), self.policy.costly.get(operation)
        why_costly = "" if slow is None else _symptom(operation, slow)
        answer = None if self.probes is None or operation not in self.probes else self.probes[operation]
        if answer is not None and answer.status == OK:
            return Verdict(True, slow is not None, why_costly or answer.detail)
        if answer is not None and answer.status != UNKNOWN:
            return Verdict(False, slow is not None, f"{operation} is {answer}")
        return Verdict(wrong is None, slow is not None, why_costly if wrong is None else _symptom(operation, wrong))


def _casts(dtype: str) -> tuple[str, ...]:
    return () if dtype == "fp32" else (f"cast.{dtype}_to_fp32", f"cast.fp32_to_{dtype}")


def abilities_of(facts: DeviceFacts, probes: Probes = None) -> Abilities:
    """The abilities of the device of ``facts``."""
    return Abilities(policy_for(facts), probes)


def abilities(facts: DeviceFacts, probes: Probes = None, policy: DevicePolicy | None = None) -> dict[str, Any]:
    """Plain values for layers that choose kernels, as ``conv3d_choice.choose_by`` reads them: ``backend``, ``arch``,
    caps, ``cast``, and per operation whether each dtype works here without costing a multiple."""
    policy = policy or policy_for(facts)
    known = Abilities(policy, probes)
    able: dict[str, Any] = {"backend": facts.backend, "arch": facts.arch}
    able |= {"conv_bytes": policy.conv_bytes, "contiguous_weights": policy.contiguous_weights}
    able["cast"] = {name: known.verdict(f"cast.{name}").usable for name in ("bf16_to_fp32", "fp16_to_fp32")}
    for name in ("conv3d", "conv3d_channels_last", "conv2d", "pad3d", "matmul", "attention", "groupnorm"):
        each = {dtype: known.verdict(f"{name}.{dtype}") for dtype in DTYPES}
        able[name] = {dtype: answer.usable and not answer.costly for dtype, answer in each.items()}
    return able


def works(abilities: Mapping[str, Any], name: str, dtype: torch.dtype) -> bool:
    """True if ``name`` in ``dtype`` works by these :func:`abilities`, or is not listed; a bool is for all dtypes."""
    by_dtype = abilities.get(name, True)
    return bool(by_dtype.get(NAMES.get(dtype, ""), True)) if isinstance(by_dtype, Mapping) else bool(by_dtype)


def fixed(policy: DevicePolicy, probes: Mapping[str, ProbeResult]) -> tuple[Quirk, ...]:
    """The rows whose wrong operations all pass ``probes``: a newer driver has fixed them."""
    suspects = (row for row in policy.rows if row.wrong)
    return tuple(row for row in suspects if all(name in probes and probes[name].status == OK for name in row.wrong))


def within(version: str, first_bad: str, first_good: str) -> bool:
    """True if ``version`` lies in [first_bad, first_good); an empty bound is open, an empty version lies in."""
    if not version:
        return True
    number = _number(version)
    return (not first_bad or number >= _number(first_bad)) and (not first_good or number < _number(first_good))


def _applies(row: Quirk, facts: DeviceFacts) -> bool:
    """True if ``row`` is about this device and its versions; one that is not known counts as affected."""
    return (
        any(fnmatch(facts.backend, backend) for backend in row.backends)
        and any(fnmatch(facts.arch, arch) for arch in row.arches)
        and not any(fnmatch(facts.arch, arch) for arch in row.but_not)
        and any(fnmatch(facts.name.lower(), name.lower()) for name in row.names)
        and all(within(facts.versions.get(name, ""), *span) for name, span in row.versions.items())
        and facts.versions.keys() >= set(row.optional)
    )


def _number(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, to compare: 2.9.1+cu128 as (2, 9, 1), padded so that 2.9 equals 2.9.0."""
    numbers = tuple(map(int, re.findall(r"\d+", re.split(r"[+a-zA-Z]", version, maxsplit=1)[0])[:4]))
    return numbers + (0,) * (4 - len(numbers))


def _symptom(operation: str, row: Quirk) -> str:
    return f"{operation}: {row.symptom} ({row.source})"
