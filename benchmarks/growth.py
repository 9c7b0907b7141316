"""How work grows with frames, pixels and faces: ``python benchmarks/growth.py``.

FLOPs of a step and of a decode of the published models, counted without data, at twice and four times the frames and
the pixels; seconds of drawing and baking a mesh, measured, at twice and four times the faces. The exponent is the slope
between the last two, in logarithms: 1 is linear, 2 is attention alone. Rows go to ``results/growth.csv`` and
``results/growth_faces.csv``; the tables of `docs/performance.md` and its plot are written anew.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from anygpu.paint.baking.bake import BakeSettings, bake
from anygpu.paint.demo import torus
from anygpu.paint.geometry.cameras import DEFAULT_VIEWS, Camera
from anygpu.paint.geometry.mesh import Surface
from anygpu.paint.geometry.raster import face_ids
from anygpu.paint.geometry.views import on_screen
from anygpu.pipelines.forecast import counts
from anygpu.pipelines.sizes import Size
from minutes import FAMILIES, opened, published
from table import append, machine

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "images" / "growth.svg"
FACTORS = (1, 2, 4)
LATENT_FRAMES, SIDE = 8, 256  # of the smallest
FACES, VIEW, ROUNDS = 100_000, 512, 3  # of the smallest mesh; pixels of a view and of the texture
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd")
PANEL, MARGIN = 260, 44  # pixels


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


def face_rows() -> Iterator[dict[str, Any]]:
    """Seconds of finding the face of each pixel of a view, and of baking six views, along faces."""
    stages: dict[str, Callable[[Surface, torch.Tensor], Any]] = {
        "drawing a view": lambda surface, screen: face_ids(screen, surface.faces, VIEW, VIEW),
        "baking six views": lambda surface, _: bake(surface, DEFAULT_VIEWS, pictures, settings),
    }
    pictures = torch.rand(len(DEFAULT_VIEWS), VIEW, VIEW, 3, generator=torch.Generator().manual_seed(0))
    settings = BakeSettings(texture_size=VIEW, view_size=VIEW)
    surfaces = [Surface.of(torus(side := math.isqrt(FACES * factor // 2), side)) for factor in FACTORS]
    for stage, act in stages.items():
        seconds = []
        for surface in surfaces:
            screen, taken = on_screen(surface.vertices, Camera(0, 90), VIEW), []
            for _ in range(ROUNDS):
                started = time.process_time()
                act(surface, screen)
                taken.append(time.process_time() - started)
            seconds.append(min(taken))
        yield {
            **machine(),
            "stage": stage,
            "faces": FACES,
            **{f"seconds_{factor}x": round(each, 3) for factor, each in zip(FACTORS, seconds, strict=True)},
            "exponent": round(math.log2(seconds[-1] / seconds[-2]), 2),
        }


def plotted(found: list[dict[str, Any]], drawn: list[dict[str, Any]]) -> str:
    """An SVG of all rows: how many times as much at twice and four times the frames, pixels and faces."""

    def line(row: dict[str, Any], unit: str, colour: str, dashed: bool, left: float) -> str:
        costs = [row[f"{unit}_{factor}x"] for factor in FACTORS]
        step = PANEL / (len(FACTORS) - 1)
        points = (
            f"{left + step * index:.0f},{MARGIN + PANEL * (1 - math.log2(cost / costs[0]) / 4):.0f}"
            for index, cost in enumerate(costs)
        )
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        return f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'

    def text(x: float, y: float, words: str, colour: str = "#666") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}">{words}</text>'

    parts, legend = [], MARGIN + PANEL + 44
    for panel, axis in enumerate(("frames", "pixels", "faces")):
        left = MARGIN + panel * (PANEL + MARGIN)
        parts.append(f'<rect x="{left}" y="{MARGIN}" width="{PANEL}" height="{PANEL}" fill="none" stroke="#999"/>')
        for slope in (1, 2):  # in proportion, and squared
            ends = f'x1="{left}" y1="{MARGIN + PANEL}" x2="{left + PANEL}" y2="{MARGIN + PANEL * (1 - slope / 2):.0f}"'
            parts.append(f'<line {ends} stroke="#bbb" stroke-width="1"/>')
        parts += [text(left + PANEL * i / 2 - 8, MARGIN + PANEL + 18, f"{f}x") for i, f in enumerate(FACTORS)]
        parts += [text(left - 30, MARGIN + PANEL * (1 - i / 4) + 5, f"{2**i}x") for i in range(5)]
        parts.append(text(left, MARGIN - 12, f"cost along {axis}"))
        for row in found:
            if row["axis"] == axis:
                colour = COLOURS[FAMILIES.index(row["family"])]
                parts.append(line(row, "tflops", colour, row["stage"] == "decoding", left))
        if axis == "faces":
            parts += [line(row, "seconds", COLOURS[i], False, left) for i, row in enumerate(drawn)]
            parts += [text(left, legend + 16 * i, row["stage"], COLOURS[i]) for i, row in enumerate(drawn)]
    parts += [text(MARGIN + 150 * i, legend, family, COLOURS[i]) for i, family in enumerate(FAMILIES[:4])]
    parts.append(text(MARGIN, legend + 16, FAMILIES[4], COLOURS[4]))
    parts.append(text(MARGIN + 150, legend + 16, "dashed: decoding; grey: exponents 1 and 2"))
    size = f'width="{3 * (PANEL + MARGIN) + MARGIN}" height="{legend + 30}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">\n{body}\n</svg>\n'


def written(name: str, titles: tuple[str, ...], table: list[list[Any]]) -> None:
    """Put a table between its two marks on the page."""
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in table]
    marks = re.compile(rf"(<!-- {name} -->).*?(<!-- /{name} -->)", re.DOTALL)
    page, body = PAGE.read_text(encoding="utf-8"), "\n".join(lines)
    PAGE.write_text(marks.sub(lambda mark: f"{mark[1]}\n{body}\n{mark[2]}", page), encoding="utf-8")


def main() -> None:
    """Count, measure, append the rows, write the tables and draw the plot."""
    torch.set_num_threads(1)
    folder = ROOT / ".build" / "time"
    folder.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for family in FAMILIES:
        counted = list(rows(family, folder))
        append("growth", counted)
        found += counted
    drawn = list(face_rows())
    append("growth_faces", drawn)
    titles = ("Family", "Stage", "Twice and four times the", *(f"TFLOPs, {f}x" for f in FACTORS), "Exponent")
    written("growth", titles, [list(row.values()) for row in found])
    keys = ("stage", *(f"seconds_{factor}x" for factor in FACTORS), "exponent")
    titles = ("Stage", *(f"Seconds, {factor * FACES:,} faces" for factor in FACTORS), "Exponent")
    written("faces", titles, [[row[key] for key in keys] for row in drawn])
    PLOT.write_text(plotted(found, drawn), encoding="utf-8")


if __name__ == "__main__":
    main()
