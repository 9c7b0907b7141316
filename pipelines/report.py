"""The report on a device for all families, as text and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..compat.check import FAILED, Check, check
from ..compat.decision import Decision
from ..compat.device.facts import GIBIBYTE, DeviceFacts, accelerators, facts_for, free_bytes, value_or
from ..compat.device.precision import DTYPES, PAINT, PLAIN, ModelPrecision
from ..compat.device.probe_store import ProbeStore
from ..compat.device.work import pace_of
from ..compat.memory.statistics import saved_stages
from ..compat.probe_results import probe_results_of
from ..compat.report import DEVICE, Report, dtypes_in_use, report_on
from .base import Progress, ProgressStage
from .pipeline import Pipeline
from .registry import FAMILIES

PAINT_TITLES = {
    "paint": "Hunyuan3D paint",
    "paint_pbr": "Hunyuan3D paint PBR",
    "delight": "Hunyuan3D delight",
    "mv_adapter": "MV-Adapter",
}
FITTED = "other models, by AnyGPU Fit Model"  # which leaves what core computes well as core loaded it
WIDTH, MARGIN, SIZE, GAP = 1600, 24, 18, 6
MOST_RUNS = 9  # stages that are shown beside their forecast
COLUMNS = (MARGIN, 330, 760)  # where subject, verdict and reason begin, in pixels
PAPER, BAND, INK, FAINT, HEAD, ALARM = "#1b1d21", "#23262b", "#e8e8e8", "#a8adb5", "#7cc4ff", "#ff8a7a"


def title_of(pipeline: Any) -> str:
    return pipeline.spec.title if isinstance(pipeline, Pipeline) else PAINT_TITLES[pipeline.family]


def precisions() -> dict[str, ModelPrecision]:
    """Title of each family to where its dtypes differ from the common rows."""
    videos = {family.title: family.rewrites.precision for family in FAMILIES.values()}
    return videos | dict.fromkeys(PAINT_TITLES.values(), PAINT) | {FITTED: PLAIN}


def hardware_report(device: Any, state: Path | None, again: bool = False) -> Report:
    """The report on ``device``, as ``facts_for`` takes it; ``state`` keeps answers of probes, ``again`` asks anew."""
    facts = facts_for(device)
    store = probe_results_of(facts, state)
    store.ask_all(again)
    page = report_on(facts, store, precisions(), free_bytes(facts.device), store.note, store.misses())
    costs = [] if state is None else [cost for cost in saved_stages(state) if cost.against_forecast][-MOST_RUNS:]
    runs = tuple(Decision(f"{cost.date} {cost.pipeline}", cost.against_forecast) for cost in costs)
    times = (("Speed", _speed(facts, store)), ("Last runs beside their forecast", runs))
    sections = ((name, (*rows, *_further(facts.device)) if name == DEVICE else rows) for name, rows in page.sections)
    return Report((*sections, *(section for section in times if section[1])))


def _further(device: torch.device) -> tuple[Decision, ...]:
    """A row for each accelerator beside ``device``: ``auto`` may place parts on it, and a farm renders on it too."""
    rows = []
    for other in accelerators(device)[1:]:
        facts = value_or(lambda other=other: facts_for(other), None)
        room = free_bytes(other)
        free = f"{room / GIBIBYTE:.1f} GB free" if room is not None else ""
        rows.append(Decision(str(other), str(facts) if facts else "does not answer", free, alarming=facts is None))
    return tuple(rows)


def _speed(facts: DeviceFacts, store: ProbeStore) -> tuple[Decision, ...]:
    """A row for each dtype in use whose rates are known, with these rates: times are forecast from them."""
    lines = []
    for name in sorted(dtypes_in_use(facts, store, precisions())):
        pace = pace_of(facts, store, DTYPES[name])
        if pace is not None:
            named = {"products": pace.product, "convolutions": pace.convolution, "attention": pace.attention}
            rates = (f"{kind} {rate / 1e12:.3g} TFLOPS" for kind, rate in named.items())
            lines.append(Decision(name, f"{', '.join(rates)}; memory {pace.memory / 1e9:.3g} GB/s", source=pace.source))
    return tuple(lines)


def hardware_check(device: Any, state: Path | None) -> Iterator[Check]:
    """Try known failures of users' devices on this one; yields each result as it comes."""
    facts = facts_for(device)
    return check(facts, probe_results_of(facts, state), precisions())


def checked(report: Report, device: Any, state: Path | None, progress: Progress) -> Report:
    """``report`` with a last section that has a row for each hardware check, which run here."""
    lines = []
    for count, result in enumerate(hardware_check(device, state), 1):
        progress.step(count, max(count + 1, 45), ProgressStage("checking"))  # about 45 checks; known only at the end
        lines.append(Decision(result.name, result.status, result.detail, alarming=result.status == FAILED))
    return Report((*report.sections, ("Checks on this device", tuple(lines))))


def drawn(report: Report) -> torch.Tensor:
    """The report as a table to look at: (1, H, 1600, 3) in 0..1, fp32 on the CPU."""
    import numpy
    from PIL import Image, ImageDraw, ImageFont

    font, bold = ImageFont.load_default(SIZE), ImageFont.load_default(SIZE + 6)
    rows = [(heading, line) for heading, lines in report.sections for line in (None, *lines)]  # None: the heading
    cells = [None if line is None else _cells(line, font) for _, line in rows]
    step = SIZE + GAP
    heights = [3 * step if cell is None else step * max(map(len, cell)) + GAP for cell in cells]
    picture = Image.new("RGB", (WIDTH, sum(heights) + 2 * MARGIN), PAPER)
    pen, top = ImageDraw.Draw(picture), MARGIN
    for number, ((heading, line), cell, height) in enumerate(zip(rows, cells, heights, strict=True)):
        if line is None or cell is None:
            pen.text((MARGIN, top + step), heading, fill=HEAD, font=bold)
        else:
            if number % 2:
                pen.rectangle((0, top, WIDTH, top + height), fill=BAND)
            for left, lines, ink in zip(COLUMNS, cell, (INK, ALARM if line.alarming else INK, FAINT), strict=True):
                for index, text in enumerate(lines):
                    pen.text((left, top + GAP // 2 + index * step), text, fill=ink, font=font)
        top += height
    return torch.from_numpy(numpy.asarray(picture).copy()).float().div(255).unsqueeze(0)


def _cells(line: Decision, font: Any) -> list[list[str]]:
    """The three columns of a row, each wrapped to its width; without a reason the verdict takes that column too."""
    widths = [end - start - MARGIN // 2 for start, end in zip(COLUMNS, (*COLUMNS[1:], WIDTH), strict=True)]
    if not line.reason:
        widths[1] = WIDTH - COLUMNS[1] - MARGIN
    texts = (line.subject, line.verdict, line.reason)
    return [_wrapped(text, font, width) for text, width in zip(texts, widths, strict=True)]


def _wrapped(text: str, font: Any, width: int) -> list[str]:
    """``text`` in lines of at most ``width`` pixels, one or more, broken at spaces; a wider word is cut."""
    lines, current = [], ""
    for word in text.split():
        while font.getlength(word) > width:
            fits = next(count for count in range(len(word), 0, -1) if font.getlength(word[:count]) <= width)
            lines += [current, word[:fits]] if current else [word[:fits]]
            current, word = "", word[fits:]
        wider = f"{current} {word}".strip()
        if current and font.getlength(wider) > width:
            lines.append(current)
            wider = word
        current = wider
    return [*lines, current] if current or not lines else lines
