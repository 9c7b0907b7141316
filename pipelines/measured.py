"""What whole clips took on this device, as ``benchmarks/clips.py`` wrote it down, and what follows for the choices."""

from __future__ import annotations

import csv
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from ..compat.device.facts import DeviceFacts
from ..compat.device.report import Line

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "clips.py"  # the registry's archive has none
TABLE = SCRIPT.parent / "results" / "clips.csv"
COMMAND = "python benchmarks/clips.py --model FOLDER"
ELSEWHERE = "the script is in the repository: benchmarks/clips.py"
FORMS: Mapping[str, str] = {
    "neither": "kernels off, compile off",
    "kernels": "kernels auto, compile off",
    "compile": "kernels off, compile on",
    "both": "kernels auto, compile on",
}
LEAST_GAIN = 1.02  # over the form before it: less is within what two runs of one form differ by


def known_as(facts: DeviceFacts) -> str:
    """What the table calls a device; a CPU, which torch does not name, goes by its kind and threads."""
    return facts.name if facts.backend != "cpu" else f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def advice(facts: DeviceFacts, table: Path = TABLE, script: Path = SCRIPT) -> tuple[Line, ...]:
    """What was measured on the device of ``facts``: a line per model, or one that says how to measure, or where."""
    runs = _runs(facts, table)
    if not runs:
        return (Line("kernels and compile", "not measured on this device", COMMAND if script.is_file() else ELSEWHERE),)
    return tuple(Line(f"clips of {model}", *_advised(forms)) for (_, model), forms in runs.items())


def advised(facts: DeviceFacts, family: str, table: Path = TABLE) -> tuple[str, ...]:
    """The same for one family as notes, none where nothing was measured."""
    found = [(model, _advised(forms)) for (kind, model), forms in _runs(facts, table).items() if kind == family]
    return tuple(f"fastest for {model} on this device: {verdict} ({why})" for model, (verdict, why) in found)


def _advised(forms: Mapping[str, Mapping[str, str]]) -> tuple[str, str]:
    """The fastest form, and why: what it gains, and after how many clips its warm-up is won back."""
    best = "neither"
    for name in FORMS:  # plainer forms first: one more switch has to earn its place
        if name in forms and float(forms[best]["clip_s"]) >= LEAST_GAIN * float(forms[name]["clip_s"]):
            best = name
    row = forms[best]
    pays = f", from clip {row['pays_after']} on" if "compile" in FORMS[best] and row["pays_after"] else ""
    why = f"{float(row['over_neither']):.2f}x over neither{pays}; torch {row['torch']}, {row['date']}"
    return FORMS[best], why


def _runs(facts: DeviceFacts, table: Path) -> dict[tuple[str, str], dict[str, Mapping[str, str]]]:
    """Family and model to the newest row of each form that was measured on this device."""
    found: dict[tuple[str, str], dict[str, Mapping[str, str]]] = {}
    if not table.is_file():
        return found
    with table.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["device"] == known_as(facts) and row["form"] in FORMS:
                found.setdefault((row["family"], row["model"]), {})[row["form"]] = row
    return {key: forms for key, forms in found.items() if "neither" in forms}
