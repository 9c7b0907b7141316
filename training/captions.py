"""What the demo models are told: whole captions, captions with parts left out, and none."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

from anygpu.pipelines.demo.scenes import COLOURS, MOTIONS, SHAPES, Scene

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from tiny.vocabulary import TokenizerFiles, t5_of

ONGOING = {
    "left": "moving left",
    "right": "moving right",
    "up": "moving up",
    "down": "moving down",
    "still": "staying still",
    "grow": "growing",
    "shrink": "shrinking",
    "spin": "spinning",
}
OTHERS = "worst quality, inconsistent motion, blurry, jittery, distorted, low quality, static"
STRANGERS = (", high quality", ", in the style of a cartoon", " at night", ", best quality, 4k")
NO_CAPTION, PARTIAL, STRANGE = 0.1, 0.2, 0.1


def vocabulary() -> list[str]:
    """Every word of a caption, small and with a capital; all others are unknown to the models."""
    spoken = " ".join(
        (*COLOURS, *SHAPES, *MOTIONS.values(), *ONGOING.values(), "a an the on shape background video of")
    )
    words = sorted(set(spoken.split()))
    return [*words, *(word.capitalize() for word in words), ".", ","]


def caption(scene: Scene, draw: random.Random) -> str:
    """A caption of the scene, sometimes an incomplete one or none at all, so that a negative prompt has a meaning."""
    kind = draw.random()
    if kind < NO_CAPTION:
        return "" if draw.random() < 0.6 else OTHERS
    keep = [True] * 4
    if kind < NO_CAPTION + PARTIAL:
        keep = [draw.random() < 0.6 for _ in keep]
    form = draw.random()
    moves = MOTIONS[scene.motion] if form < 0.7 else ONGOING[scene.motion]
    ground = f"on {scene.ground}" if form < 0.85 else f"on a {scene.ground} background"
    subject = " ".join((*([scene.colour] if keep[0] else []), scene.shape if keep[1] else "shape"))
    text = " ".join(("a", subject, *([moves] if keep[2] else []), *([ground] if keep[3] else [])))
    if draw.random() < STRANGE:
        text += draw.choice(STRANGERS)
    if draw.random() < 0.25:
        text = text[0].upper() + text[1:] + "."
    return text


def t5_tokenizer(max_length: int) -> TokenizerFiles:
    """A T5 tokenizer of which each known word is one piece."""
    pieces = [word if re.fullmatch(r"\W", word) else f"▁{word}" for word in vocabulary()]
    return t5_of(dict.fromkeys(pieces, -4.0), max_length)
