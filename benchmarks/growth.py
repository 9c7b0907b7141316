"""How the work of a step and of a decode grows with frames and pixels: ``python benchmarks/growth.py``.

FLOPs of the published models, counted without data, at twice and four times the frames and the pixels. The exponent is
the slope between the last two, in logarithms: 1 is linear, 2 is attention alone. Rows go to ``results/growth.csv``, and
the table of `docs/performance.md` is written anew.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from anygpu.pipelines.memory.estimates import Size
from anygpu.pipelines.time import counts
from minutes import FAMILIES, opened, published
from table import append

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
TABLE_ON_PAGE = re.compile(r"(<!-- growth -->).*?(<!-- /growth -->)", re.DOTALL)
FACTORS = (1, 2, 4)
LATENT_FRAMES, SIDE = 8, 256  # of the smallest


def rows(family: str, folder: Path) -> Iterator[dict[str, Any]]:
    """FLOPs of one call of the transformer and of one decode, along frames and along pixels."""
    pipeline = published(opened(family, folder), whole=True)
    stride = pipeline.spec.stride
    for axis in ("frames", "pixels"):
        along: dict[str, list[int]] = {"sampling": [], "decoding": []}
        for factor in FACTORS:
            frames = (LATENT_FRAMES * (factor if axis == "frames" else 1) - 1) * stride + 1
            size = Size(SIDE, SIDE * (factor if axis == "pixels" else 1), frames, window=(frames - 1) // stride + 1)
            along["sampling"].append(counts.transformer_work(pipeline, replace(size, text=64)).flops)
            along["decoding"].append(counts.decoding_work(pipeline, size).flops)
        for stage, flops in along.items():
            yield {
                "family": family,
                "stage": stage,
                "axis": axis,
                **{f"tflops_{factor}x": round(each / 1e12, 3) for factor, each in zip(FACTORS, flops, strict=True)},
                "exponent": round(math.log2(flops[-1] / flops[-2]), 2),
            }


def main() -> None:
    """Count, append the rows and write the table."""
    folder = ROOT / ".build" / "time"
    folder.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for family in FAMILIES:
        counted = list(rows(family, folder))
        append("growth", counted)
        found += counted
    titles = ("Family", "Stage", "Twice and four times the", *(f"TFLOPs, {f}x" for f in FACTORS), "Exponent")
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    lines += [f"| {' | '.join(map(str, row.values()))} |" for row in found]
    page, table = PAGE.read_text(encoding="utf-8"), "\n".join(lines)
    PAGE.write_text(TABLE_ON_PAGE.sub(lambda mark: f"{mark[1]}\n{table}\n{mark[2]}", page), encoding="utf-8")


if __name__ == "__main__":
    main()
