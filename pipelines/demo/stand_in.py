"""Inputs of a published model's workflow, converted for a demo model that runs in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from ..pipeline import Pipeline
from ..settings import of_checkpoint
from .scenes import COLOURS, EXAMPLE, MOTIONS, SHAPES, first_frame, scene_in, scene_in_picture, unknown_words

SECTION = ("clip_seconds", "window")
SIZES = ("width", "height", "frames", "steps", "cfg", "cfg_end", "fps")  # that it was trained for
NAMED = 12  # words that are named: a node has room for no more
BUCKET, FIT = "nearest bucket", "crop"  # of pictures: a bucket of another shape would be another size
Inputs = Mapping[str, Any]
Change = tuple[dict[str, Any], list[str]]  # new inputs by name, and messages about them


def own_inputs(pipeline: Pipeline, inputs: Inputs, notify: Callable[[str], None]) -> dict[str, Any]:
    """A node's ``inputs`` as a demo model can draw them, with a note on what changed; another model's are unchanged.

    Sizes and the length of a clip become the demo model's own; a text or a start picture that shows no scene of its
    world is replaced by an example."""
    if not pipeline.is_demo:
        return dict(inputs)
    changes = (_sizes(pipeline, inputs), _words(inputs), _picture(pipeline, inputs))
    messages = [text for _, texts in changes for text in texts]
    if messages:
        notify(f"the demo model {'; it '.join(messages)}")
    return {**inputs, **{name: value for own, _ in changes for name, value in own.items()}}


def own_latents(pipeline: Pipeline, start: Inputs, notify: Callable[[str], None]) -> dict[str, Any]:
    """``start``, as ``start_of`` gives it, with latents and mask cut, with a note, if a demo model draws less."""
    latents = start.get("latents") if pipeline.is_demo else None
    if latents is None:
        return dict(start)
    samples, mask = corner(pipeline, latents.samples), start["noise_mask"]
    if samples.shape == latents.samples.shape:
        return dict(start)
    spatial, temporal = pipeline.spec.sizes.ratios
    count, rows, columns = samples.shape[-3:]
    frames, width, height = (count - 1) * temporal + 1, columns * spatial, rows * spatial
    notify(f"the demo model draws a corner of these latents at its own size: {width}x{height}, {frames} frames")
    own = replace(latents, samples=samples, width=width, height=height, frames=frames, extra={})
    if mask is not None:  # core's is in pixels
        mask = corner(pipeline, functional.interpolate(mask, size=latents.samples.shape[2:], mode="nearest"))
    return {"latents": own, "noise_mask": mask}


def corner(pipeline: Pipeline, latents: torch.Tensor, frames: int = 0) -> torch.Tensor:
    """The first latent frames (``frames``, 0 for its own number), rows and columns that a demo model draws."""
    own = of_checkpoint(pipeline).sizes.defaults
    spatial, temporal = pipeline.spec.sizes.ratios
    count = frames or (own.frames - 1) // temporal + 1
    return latents[..., :count, : own.height // spatial, : own.width // spatial].contiguous()


def _sizes(pipeline: Pipeline, inputs: Inputs) -> Change:
    """The demo model's own sizes, fit, length and single section in place of those in ``inputs``; a start clip is cut
    or its last frame repeated. Messages name what differs from a value that the user chose."""
    defaults = of_checkpoint(pipeline).sizes.defaults
    own: dict[str, Any] = {name: getattr(defaults, name) for name in SIZES}
    own |= dict(zip(SECTION, one_section(pipeline), strict=True)) if pipeline.spec.recipes.sections else {}
    own = {name: value for name, value in own.items() if name in inputs and (name != "cfg_end" or value < 1)}
    usual = {**dict.fromkeys(own, 0), "cfg_end": 1}  # values of a node's inputs that are no choice of the user's
    given = {name: value for name, value in own.items() if inputs[name] not in (usual[name], value)}
    changed = [f"{name} {inputs[name]:g} -> {value:g}" for name, value in given.items()]
    if inputs.get("fit") == BUCKET:
        own["fit"] = FIT
    clip = inputs.get("images")
    if clip is not None and len(clip) not in (0, defaults.frames):
        own["images"] = clip[torch.arange(defaults.frames).clamp(max=len(clip) - 1)]
        changed.append(f"frames {len(clip)} -> {defaults.frames}")
    messages = [f"draws at its own size: {', '.join(changed)}"] if changed else []
    if pipeline.spec.recipes.sections and inputs.get("sections"):
        own["sections"] = ()
        messages.append(f"draws a single section: {len(inputs['sections'])} section prompts are left out")
    return own, messages


def _words(inputs: Inputs) -> Change:
    """An example in the place of a text that is no scene, and no negative prompt."""
    own: dict[str, Any] = {"negative": ""} if "negative" in inputs else {}
    messages = ["knows no negative prompt: it is left out"] if inputs.get("negative", "").strip() else []
    if "text" in inputs and scene_in(inputs["text"]) is None:
        own["text"] = EXAMPLE.caption
        others = unknown_words(inputs["text"])
        unknown = ", ".join(others[:NAMED]) + (f" and {len(others) - NAMED} more words" if len(others) > NAMED else "")
        why = f"does not know {unknown}" if unknown else "draws one shape that does one thing"
        words = "; ".join(", ".join(words) for words in (SHAPES, COLOURS, MOTIONS.values()))
        messages.append(f"draws {EXAMPLE.caption!r} instead of this text, since it {why}. Its words: {words}")
    return own, messages


def _picture(pipeline: Pipeline, inputs: Inputs) -> Change:
    """An example in the place of a start picture that shows no scene; nothing for a model that starts from text."""
    picture = inputs.get("image")
    starts = pipeline.model.task == "image" and "fit" in inputs
    if picture is None or not starts or scene_in_picture(picture) is not None:
        return {}, []
    shown = f"a {EXAMPLE.colour} {EXAMPLE.shape} on {EXAMPLE.ground}"
    return {"image": first_frame(EXAMPLE)}, [f"starts from {shown}, not from this picture"]


def one_section(pipeline: Pipeline) -> tuple[float, int]:
    """Seconds of a clip of the demo model's own length, and the latent frames of a single section that shows it."""
    defaults = of_checkpoint(pipeline).sizes.defaults
    return defaults.frames / defaults.fps, (defaults.frames - 1) // pipeline.spec.sizes.stride + 1
