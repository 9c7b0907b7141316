"""Exhibits of `anygpu demo`: a clip by each demo model, read back by the checker, a contact sheet and a page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...compat.device.execution import picture_of
from ...compat.device.facts import facts_for
from .. import stages
from ..base import FramePackSettings, ImageRequest, PromptRequest, SampleSettings, Silent
from ..load.folder import load
from ..movie import read_frames, write_mp4
from ..pipeline import Pipeline
from ..requests import LoadRequest
from ..settings import of_checkpoint
from .scenes import EXAMPLE, Scene, first_frame, scene_in, scene_of
from .stand_in import FIT, one_section

SHEET_FRAMES, SHEET_PIXELS, LABEL_PIXELS, MP4_ZOOM = 5, 128, 12, 4
SEED, CHANGED = 7, 1e-3
ASKED = (  # each model draws one, and the next to see that it follows its prompt
    Scene("circle", "red", "left", "blue"),
    Scene("triangle", "white", "up", "green"),
    Scene("square", "blue", "right", "yellow"),
    Scene("circle", "green", "grow", "white"),
    Scene("square", "yellow", "down", "black"),
)
Checks = Mapping[str, tuple[bool, str]]


@dataclass(frozen=True, eq=False)
class Exhibit:
    """One thing that the demo shows."""

    title: str  # of its section on the page
    strips: Mapping[str, Tensor]  # caption to frames (F, H, W, 3) in 0..1, a row of the contact sheet each
    notes: Sequence[str]  # what the model decided, a line each
    checks: Checks  # name to result and figure


def exhibit(title: str, model: Path, number: int, folder: Path) -> Exhibit:
    """The checked clip of a demo model, of scene ``number``, saved in ``folder``; one of two seeds has to show it."""
    pipeline = load(LoadRequest(model, precision="fp32", device="cpu"))
    asked, other = ASKED[number % len(ASKED)], ASKED[(number + 1) % len(ASKED)]
    clip, second, reseeded = (
        drawn(pipeline, scene.caption, seed) for scene, seed in ((asked, SEED), (other, SEED), (asked, SEED + 1))
    )
    shown = clip if scene_of(clip) == asked else reseeded  # each misses a few of a hundred: its card says how many
    own = of_checkpoint(pipeline).sizes.defaults
    enlarged = shown.repeat_interleave(MP4_ZOOM, 1).repeat_interleave(MP4_ZOOM, 2)
    frames, rate = read_frames(write_mp4(enlarged, own.fps, folder / f"{model.name}.mp4"))
    expected = (own.frames, MP4_ZOOM * own.height, MP4_ZOOM * own.width, own.fps)
    change = float((reseeded - clip).abs().max())
    checks = {
        "shows what was asked for": _seen(shown, asked),
        "another prompt gives another clip": _seen(second, other),
        "another seed gives another clip": (change > CHANGED, f"largest change {change:.3f}"),
        "file has the size, frames and rate": ((*frames.shape[:3], rate) == expected, f"{len(frames)} at {rate:g} fps"),
    }
    return Exhibit(title, {f"{model.name}: {asked.caption}": shown}, tuple(map(str, pipeline.plan.decisions)), checks)


def _seen(clip: Tensor, asked: Scene) -> tuple[bool, str]:
    """True if the clip shows the scene ``asked`` for, and the scene that it shows in words."""
    seen = scene_of(clip)
    return seen == asked, seen.caption if seen.shape else "no shape"


def drawn(pipeline: Pipeline, prompt: str, seed: int = 0, **settings: Any) -> Tensor:
    """The frames (F, H, W, 3) in 0..1 of one clip as the model was trained, from the scene's picture if it needs it."""
    progress = Silent()
    with torch.no_grad():
        encoded = stages.encode_prompt(pipeline, PromptRequest(prompt), progress)
        chosen = SampleSettings(**{"width": 0, "height": 0, "frames": 0, "seed": seed, **settings})
        if pipeline.spec.recipes.sections:
            picture = first_frame(scene_in(prompt) or EXAMPLE)
            image = stages.encode_image(pipeline, ImageRequest(picture, *picture.shape[2:0:-1]), FIT, progress)
            framepack = FramePackSettings(*one_section(pipeline))
            latents = stages.sample_framepack(pipeline, encoded, image, chosen, framepack, progress)
        else:
            latents = stages.sample(pipeline, encoded, None, chosen, progress)
        return stages.decode(pipeline, latents, progress)


def write_page(exhibits: Iterable[Exhibit], folder: Path, notify: Callable[[str], None]) -> int:
    """The number of checks that failed, after writing ``contact_sheet.png`` and ``report.md`` into ``folder``.

    ``exhibits`` may be made as they are iterated; ``notify`` takes a line with the result and seconds of each."""
    page = [f"# What AnyGPU drew\n\nDevice: {facts_for()}\n\nThe demo itself runs on {facts_for('cpu')}.\n"]
    strips: dict[str, Tensor] = {}
    failed, began = 0, time.monotonic()
    for shown in exhibits:
        wrong = [name for name, (held, _) in shown.checks.items() if not held]
        verdict = f"FAILED: {', '.join(wrong)}" if wrong else f"all {len(shown.checks)} checks passed"
        notify(f"{shown.title}: {verdict}, {time.monotonic() - began:.1f} s")
        failed, began = failed + len(wrong), time.monotonic()
        strips |= shown.strips
        notes = "\n".join(f"- {note}" for note in shown.notes)
        checks = shown.checks.items()
        rows = "\n".join(f"| {name} | {'yes' if held else 'NO'} | {figure} |" for name, (held, figure) in checks)
        page.append(f"## {shown.title}\n\n{notes}\n\n| check | held | figure |\n| --- | --- | --- |\n{rows}\n")
    sheet = save_sheet(list(strips.values()), list(strips), folder / "contact_sheet.png")
    page.insert(1, f"![each clip from left to right]({sheet.name})\n")
    (folder / "report.md").write_text("\n".join(page), encoding="utf-8")
    notify(f"pictures of every clip: {sheet}; what was decided: {folder / 'report.md'}; {failed} checks failed")
    return failed


def save_sheet(clips: Sequence[Tensor], captions: Sequence[str], path: Path) -> Path:
    """Write clips below each other with their captions, evenly spaced frames from left to right; returns ``path``."""
    from PIL import Image, ImageDraw

    height, width = clips[0].shape[1:3]
    size = (SHEET_PIXELS * width // height, SHEET_PIXELS)
    cell, row_height = size[0] + 2, SHEET_PIXELS + LABEL_PIXELS + 4
    sheet = Image.new("RGB", (SHEET_FRAMES * cell, len(clips) * row_height), "white")
    pen = ImageDraw.Draw(sheet)
    for row, (clip, caption) in enumerate(zip(clips, captions, strict=True)):
        pen.text((2, row * row_height), caption, fill="black")
        for column, frame in enumerate(clip[torch.linspace(0, len(clip) - 1, SHEET_FRAMES).round().long()]):
            sheet.paste(picture_of(frame).resize(size, 0), (column * cell, row * row_height + LABEL_PIXELS + 2))
    sheet.save(path, quality=65, method=6)  # of a WebP; a PNG passes both over
    return path
