"""The forecast of a run as text and as a picture: a bar per stage against what is free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...compat.device.facts import host_free_bytes
from ...compat.memory.statistics import StageNeed, amount_of
from ..base import PromptRequest, SampleSettings
from ..pipeline import Pipeline
from ..settings import of_checkpoint, snap
from ..sizes import Size
from .fit import plan_line
from .memory import Forecast, forecasts
from .placement import CARDS
from .savings import savings
from .seconds import advice, planned_run, quickest
from .times import Times, known_or_why, room_now, times_of

WIDTH, MARGIN, SIZE, BAR, GAP, LEFT = 1200, 24, 18, 26, 10, 300
PAPER, INK, FAINT, HEAD, FREE, OVER = "#1b1d21", "#e8e8e8", "#a8adb5", "#7cc4ff", "#3a3f47", "#ff8a7a"
COLOURS = {"kept": "#5b6f8f", "weights": "#4f9dde", "activations": "#e0a84f"}
LEGEND = {"kept": "still there from before"}


def planned_size(pipeline: Pipeline, width: int, height: int, frames: int, guided: bool) -> Size:
    """The size of a run on the family's grid; zeros take its defaults; raises InputError for negative ones."""
    size = snap(of_checkpoint(pipeline), width, height, frames)
    return Size(size.width, size.height, size.frames, guided)


def memory_plan(
    pipeline: Pipeline, size: Size, settings: SampleSettings | None = None, texts: PromptRequest | None = None
) -> tuple[str, torch.Tensor]:
    """Memory of a run of ``size`` in each mode, as text and as a picture (1, H, 1200, 3) in 0..1; nothing runs."""
    title = f"{pipeline.spec.title} {size.width}x{size.height}, {size.frames} frames"
    more = ", with true guidance" if size.guided else ""
    room = room_now(pipeline)
    needs = forecasts(pipeline, size, room)
    run = planned_run(pipeline, size, settings, texts)
    times = times_of(pipeline, run, [each.mode for each in needs], room)
    less = known_or_why(lambda: savings(pipeline, run, room=room))[0] if pipeline.offloader.mode in times else None
    return shown(pipeline, title, more, needs, times, less or ())


def shown(
    pipeline: Any, title: str, more: str, needs: tuple[Forecast, ...], times: Times, less: Sequence[object] = ()
) -> tuple[str, torch.Tensor]:
    """Memory needed in each mode, the fastest first, as text and picture; ``less`` are changes that would save time."""
    room = room_now(pipeline)
    text = "\n".join([_text(pipeline, title + more, needs, times, room), *map(str, less)])
    return text, _picture(pipeline, title, needs, times, room)


def _text(pipeline: Any, title: str, needs: tuple[Forecast, ...], times: Times, room: int | None) -> str:
    """The bytes and the time of each mode, a line each, after what is free and the mode to choose."""
    device, mode = pipeline.offloader.device, pipeline.offloader.mode
    have = "does not report its free memory" if room is None else f"has {amount_of(room)} free"
    fitting = [each.mode for each in needs if room is not None and each.fits(room)]
    quick = quickest(fitting, times) or ("model" if room is None else "nothing, lower the size")
    now = (f"now: offload {mode}; fastest that fits: {quick}", advice(needs, times, room))
    lines = [f"{title}: {device} {have}", "; ".join(filter(None, now))]
    for each in needs:
        stages = ", ".join(map(_stage, each.stages))
        fits = "" if room is None else " fits" if each.fits(room) else f" lacks {amount_of(each.lacks(room))}"
        lines.append(f"{each.mode}: peak {amount_of(each.peak)}{fits} ({stages})")
        if each.mode in times:
            lines.append(f"{each.mode}: {times[each.mode]}: {', '.join(map(str, times[each.mode].stages))}")
    total, host = sum(weights.total for weights in pipeline.weights.values()), host_free_bytes()
    kept = "stay in host memory" if total <= host else "do not fit there together: some are read from disk again"
    lines.append(f"host: {amount_of(host)} free; weights of {amount_of(total)} {kept}")
    if isinstance(pipeline, Pipeline):  # one that paints is never shared out
        lines += [str(decision) for decision in pipeline.plan.decisions if decision.subject == CARDS]
    lines.append(f"plan: {plan_line(pipeline)}")
    lines.append("Forecasts are within 15 % on the simulated device; vendor libraries need a little more.")
    lines += [times.unknown] if times.unknown else []
    if times:
        lines.append("Times are without reading from disk. Each run corrects those of the next.")
    return "\n".join(lines)


def _stage(stage: StageNeed) -> str:
    """A stage in words: its bytes, decode method, weights kept there though not needed, and its device if another."""
    stays = f"and {amount_of(stage.stays)} of weights kept there" if stage.stays else ""
    free = "" if stage.room is None else f" of {amount_of(stage.room)} free"
    where = f"on {stage.device}{free}" if stage.device else ""
    return " ".join(filter(None, (stage.name, amount_of(stage.total), stage.form, stays, where)))


def _picture(pipeline: Any, title: str, needs: tuple[Forecast, ...], times: Times, room: int | None) -> torch.Tensor:
    """The bar chart (1, H, 1200, 3) in 0..1: one group of bars for each mode, a bar for each stage."""
    import numpy
    from PIL import Image, ImageDraw, ImageFont

    font, bold = ImageFont.load_default(SIZE), ImageFont.load_default(SIZE + 4)
    rows = sum(len(each.stages) for each in needs)
    height = 2 * MARGIN + 80 + len(needs) * (SIZE + 2 * GAP) + rows * (BAR + GAP) + 40
    picture = Image.new("RGB", (WIDTH, height), PAPER)
    pen, top = ImageDraw.Draw(picture), MARGIN
    scale = (WIDTH - LEFT - MARGIN - 120) / (max([*(each.peak for each in needs), room or 0]) or 1)
    pen.text((MARGIN, top), title, fill=HEAD, font=bold)
    for index, (name, colour) in enumerate(COLOURS.items()):
        pen.rectangle((MARGIN + index * 220, top + 40, MARGIN + index * 220 + 18, top + 58), fill=colour)
        pen.text((MARGIN + index * 220 + 26, top + 38), LEGEND.get(name, name), fill=FAINT, font=font)
    top += 80
    for each in needs:
        long = f", {times[each.mode]}" if each.mode in times else ""
        pen.text((MARGIN, top), f"offload {each.mode}{long}", fill=INK, font=bold)
        top += SIZE + 2 * GAP
        for stage in each.stages:
            _bar(pen, stage, top, scale, room, font)
            top += BAR + GAP
    if room is not None:
        pen.text((MARGIN, top), f"line: {amount_of(room)} free on {pipeline.offloader.device}", fill=FAINT, font=font)
    return torch.from_numpy(numpy.asarray(picture).copy()).float().div(255).unsqueeze(0)


def _bar(pen: Any, stage: Any, top: int, scale: float, room: int | None, font: Any) -> None:
    """Draw a stage's bar at height ``top``, ``scale`` pixels per byte, with a line at the ``room`` that it has."""
    name = f"{stage.name} on {stage.device}" if stage.device else stage.name
    pen.text((MARGIN + 16, top + 3), name, fill=INK, font=font)
    pen.rectangle((LEFT, top, WIDTH - MARGIN - 120, top + BAR), fill=FREE)
    left = float(LEFT)
    for name, colour in COLOURS.items():
        size = getattr(stage, name)
        right = left + size * scale
        if size:
            pen.rectangle((left, top, right, top + BAR), fill=colour)
        left = right
    room = stage.room if stage.device else room
    over = room is not None and stage.total > room
    pen.text((left + 8, top + 3), amount_of(stage.total), fill=OVER if over else INK, font=font)
    if room is not None:
        line = LEFT + room * scale
        pen.line((line, top - 4, line, top + BAR + 4), fill=OVER if over else INK, width=3)
