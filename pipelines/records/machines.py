"""A machine as one small file that its owner may share: device, versions, answers, decisions, last runs. No names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...compat.device.facts import GIBIBYTE, DeviceFacts, facts_for, indexed
from ...compat.device.precision import ModelPrecision, precision_for
from ...compat.device.probe_store import ProbeResult
from ...compat.memory.statistics import saved_stages
from ...compat.probe_results import probe_results_of
from ...compat.records import parse, plain
from ...compat.redaction import own_names, redact
from .receipts import versions

VERSION, HEAD = 1, "anygpu_machine"
MOST_TEXT, MOST_ITEMS = 200, 400
FILE = "anygpu-machine.json"
FORM = "https://github.com/anygpu/anygpu/issues/new?template=hardware.yml"
HINT = "never sent by AnyGPU: attach it to the issue form 'How it runs on my hardware' if you like"


@dataclass(frozen=True, slots=True)
class StageRun:
    """A stage of a run: ``pipeline`` is family and variant; peaks are 0 where the device does not tell."""

    stage: str
    pipeline: str
    mode: str
    precision: str
    seconds: float
    peak_gb: float = 0.0
    moved_gb: float = 0.0


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The result of a probe: its status, and the milliseconds that it took."""

    probe: str
    status: str
    milliseconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SharedMachine:
    device: str  # as :class:`DeviceFacts` has them
    backend: str
    arch: str
    driver: str
    memory_gb: float
    versions: dict[str, str]  # of the pack and its packages
    answers: tuple[ProbeAnswer, ...] = ()
    precision: dict[str, str] = field(default_factory=dict)  # title of a family to what ``auto`` decides for it here
    runs: tuple[StageRun, ...] = ()

    def text(self) -> str:
        return json.dumps({HEAD: VERSION, **plain(self)}, indent=1) + "\n"


def this_machine(device: Any, state: Path | None, models: Mapping[str, ModelPrecision]) -> SharedMachine:
    """The machine with ``device``, after all its probes have run, and the dtypes that ``auto`` picks for ``models``."""
    facts = facts_for(device)
    store = probe_results_of(facts, state)
    store.ask_all(False)
    return machine_of(facts, dict(store.items()), state, own_names(), models)


def machine_of(
    facts: DeviceFacts,
    probes: dict[str, ProbeResult],
    state: Path | None,
    names: Iterable[str],
    models: Mapping[str, ModelPrecision],
) -> SharedMachine:
    """The machine of ``facts``, with the runs on its device that ``state`` has, and the dtypes that ``auto`` picks for
    ``models``. Texts and lists are cut, and marks replace ``names``, paths, addresses, keys and serial numbers."""
    runs = [
        StageRun(
            stage=cost.stage,
            pipeline=cost.pipeline,
            mode=cost.mode,
            precision=cost.precision,
            seconds=round(cost.seconds, 2),
            peak_gb=round(cost.peak_bytes / 1e9, 2),
            moved_gb=round(cost.moved_bytes / 1e9, 2),
        )
        for cost in ([] if state is None else saved_stages(state))
        if cost.device == str(indexed(facts.device))
    ]
    kernel = re.match(r"\d+(\.\d+)*", facts.versions.get("kernel", ""))  # after it comes its builder's own text
    decided = {title: str(precision_for(model, facts, "auto", probes)) for title, model in models.items()}
    whole = SharedMachine(
        device=facts.name,
        backend=facts.backend,
        arch=facts.arch,
        driver=facts.driver,
        memory_gb=round(facts.total_bytes / GIBIBYTE, 1),
        versions={**versions(), **facts.versions, "kernel": kernel[0] if kernel else ""},
        answers=tuple(ProbeAnswer(name, one.status, round(one.milliseconds, 1)) for name, one in probes.items()),
        precision=decided,
        runs=tuple(runs),
    )
    return parse(SharedMachine, short(redact(plain(whole), tuple(names))), "the machine")


def short(value: Any) -> Any:
    """``value`` with texts cut to MOST_TEXT characters, lists and dictionaries to MOST_ITEMS, at every depth."""
    if isinstance(value, dict):
        return {str(name)[:MOST_TEXT]: short(item) for name, item in list(value.items())[:MOST_ITEMS]}
    if isinstance(value, list):
        return [short(item) for item in value[:MOST_ITEMS]]
    return value[:MOST_TEXT] if isinstance(value, str) else value
