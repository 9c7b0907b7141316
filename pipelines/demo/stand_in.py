"""What the inputs of a published model's workflow become where a demo model runs in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..base import Pipeline
from ..settings import of_checkpoint
from .scenes import COLOURS, EXAMPLE, MOTIONS, SHAPES, first_frame, scene_in

SECTION = ("clip_seconds", "window")
SIZES = ("width", "height", "frames", "steps", "cfg", "fps")  # what it was trained for, and draws nothing else
FIT = "crop"  # of pictures: a bucket of another shape would be another size


def own_inputs(pipeline: Pipeline, inputs: Mapping[str, Any], notify: Callable[[str], None]) -> dict[str, Any]:
    """``inputs`` of a node as the demo model can draw them, and said; as they are where none stands in.

    Args:
        inputs: values by name. Sizes become the demo model's own, a text in words that it does not know an example,
            and so does the picture of a model that starts from one.
    """
    if not pipeline.stands_in_for:
        return dict(inputs)
    defaults = of_checkpoint(pipeline).defaults
    own = {name: getattr(defaults, name) for name in SIZES if name in inputs}
    own |= {"fit": FIT} if "fit" in inputs else {}
    own |= dict(zip(SECTION, one_section(pipeline), strict=True)) if pipeline.spec.sections else {}
    own = {name: value for name, value in own.items() if name in inputs}
    changed = [
        f"{name} {inputs[name]:g} -> {own[name]:g}"
        for name in (*SIZES, *SECTION)
        if inputs.get(name) not in (0, own.get(name))
    ]
    if changed:
        notify(f"the demo model draws at its own size: {', '.join(changed)}")
    if "text" in inputs and scene_in(inputs["text"]) is None:
        own["text"] = EXAMPLE.caption
        words = "; ".join(", ".join(words) for words in (SHAPES, COLOURS, MOTIONS.values()))
        notify(f"the demo model draws {EXAMPLE.caption!r} instead of this text. Its words: {words}")
    elif inputs.get("negative"):
        notify("the demo model knows no negative prompt: it is left out")
    own |= {"negative": ""} if "negative" in inputs else {}
    if pipeline.task == "image" and "fit" in inputs and inputs.get("image") is not None:
        own["image"] = first_frame(EXAMPLE)
        notify(
            f"the demo model starts from a {EXAMPLE.colour} {EXAMPLE.shape} on {EXAMPLE.ground}, not from this picture"
        )
    return {**inputs, **own}


def one_section(pipeline: Pipeline) -> tuple[float, int]:
    """Seconds of a clip of the demo model's own length, and the latent frames of a single section that shows it."""
    defaults = of_checkpoint(pipeline).defaults
    return defaults.frames / defaults.fps, (defaults.frames - 1) // pipeline.spec.stride + 1
