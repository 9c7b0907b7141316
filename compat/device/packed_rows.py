"""The rows of packed_paths.py, from packed_rows.csv: how each card computes packed layers, and who has shown it. The
first that fits decides; a card without one dequantises until somebody asks it."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CORE, DEQUANTISE = "core's own", "dequantise"
INT8, W4A8, W4A4 = "int8_tensorwise", "asym_w4a8_int8", "convrot_w4a4"
INTEGERS = (INT8, W4A8, W4A4)  # core multiplies these packed on every device, without asking it
FP8, FP4 = ("float8_e4m3fn", "float8_e5m2"), ("nvfp4", "mxfp8")
AWQ = "awq_w4a16"
FORMATS = (*INTEGERS, *FP8, *FP4, AWQ)  # as core names them


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The path of layers of some formats on one kind of card."""

    card: str
    backends: tuple[str, ...]  # patterns, as the next ones; names without regard to case
    formats: tuple[str, ...]
    path: str  # ``CORE``, which goes through comfy-kitchen, or ``DEQUANTISE``
    why: str
    source: str
    arches: tuple[str, ...]
    names: tuple[str, ...]
    kernels: tuple[str, ...]  # comfy-kitchen's backends with which it holds; ``eager`` is torch's own
    ask: bool  # a timing may overrule the row; False where the question may end the process


GROUPS: Mapping[str, tuple[str, ...]] = {"integers": INTEGERS, "fp8": FP8, "fp4": FP4}


def _row(row: Mapping[str, str]) -> PackedRow:
    formats = tuple(each for name in row["formats"].split(";") for each in GROUPS.get(name, (name,)))
    several = {name: tuple(row[name].split(";")) for name in ("backends", "arches", "names", "kernels")}
    given: dict[str, Any] = {**row, **several, "formats": formats, "ask": not row["ask"]}
    return PackedRow(**given)


with Path(__file__).with_suffix(".csv").open(newline="", encoding="utf-8") as file:
    PACKED_ROWS = tuple(map(_row, csv.DictReader(file)))
