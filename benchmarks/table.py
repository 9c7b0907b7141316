"""The tables under ``results/``: rows are appended, never rewritten, so that each figure keeps its machine and date."""

from __future__ import annotations

import csv
import datetime
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"
sys.path.append(str(RESULTS.parents[1] / "tests"))  # the tiny checkpoints and meshes that benchmarks measure


def machine() -> dict[str, str]:
    """The columns that every table begins with: date, device and torch."""
    device = f"CPU {platform.machine()}, {torch.get_num_threads()} threads"
    return {"date": datetime.date.today().isoformat(), "device": device, "torch": torch.__version__}


def append(name: str, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Append ``rows`` to ``results/<name>.csv``, made with a header where it does not exist, and print each.

    Raises:
        ValueError: the columns differ from those of the file.
    """
    path = RESULTS / f"{name}.csv"
    for row in rows:
        print(dict(row))
        header = not path.exists()
        if not header:
            with path.open(newline="", encoding="utf-8") as file:
                columns = next(csv.reader(file))
            if columns != list(row):
                raise ValueError(f"{path.name} has the columns {columns}; expected {list(row)}: rename the old file")
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, row)
            if header:
                writer.writeheader()
            writer.writerow(row)
    return path
