"""Settings of a run, completed and checked: its variant's published recipe, valid sizes, and the user's changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..compat.decision import AUTO, CHOSEN, Decision
from ..compat.errors import InputError, require_choice, require_range
from ..compat.memory.parts import tell_once
from ..compat.output_check import fault_in_latents, require_finite
from ..compat.transforms.step_cache import StepCacheSettings, settings_for
from .base import FINAL, RESOLVED, FramePackSettings, ImageCondition, Progress, Prompt, SampleSettings
from .family import SCHEDULERS, Defaults, FamilySpec, GuidanceStep, Recipe
from .pipeline import Pipeline, Tools

SMALLEST_SIDE, LARGEST_SIDE, MOST_FRAMES, MOST_STEPS = 32, 4096, 4097, 1000
MOST_SHIFT = 100.0
SECOND_PASS = "second_pass"  # in ``Latents.extra``: they were upscaled, and a second pass refines them
FIRST_SIZE = "first_size"  # beside it: pixels of the first pass, where that is not half of theirs
STEP_CACHE = "step cache"
OWN_DEFAULTS = "_anygpu_defaults"  # in model_index.json: sizes and steps that a checkpoint was trained for
SIDES = frozenset(("width", "height"))  # of these: a checkpoint that names them takes no size of its family's
GUIDANCE = (
    *("guidance", "cfg", "cfg_start", "cfg_end", "shift", "guidance_rescale", "sigmas", "latents", "noise_mask", "stg"),
)


def recipe_of(pipeline: Pipeline, settings: SampleSettings | None = None) -> Recipe | None:
    """The recipe of the model: the one found when it was loaded, else that of the family's code, else the family's
    first, else None. For upscaled ``settings.latents`` it is the second pass's. With the user's ``sigmas``, or latents
    and a ``denoise`` below 1, it skips no steps and its levels go on to 0."""
    code = pipeline.spec.code
    known = pipeline.spec.published.recipes
    recipe: Recipe | None = known.get(pipeline.model.recipe) if pipeline.model.recipe else None
    recipe = recipe or (code.recipe_for(pipeline) if code.recipe_for is not None else next(iter(known.values()), None))
    if recipe is None or settings is None:
        return recipe
    recipe = recipe.second if refines(settings) and recipe.second is not None else recipe
    whole = settings.sigmas is None and (settings.latents is None or settings.denoise == 1.0)
    if whole:
        return recipe
    return replace(recipe, skip_first=0, skip_last=0, timesteps=recipe.timesteps and (*recipe.timesteps, 0.0))


def final_size(settings: SampleSettings) -> dict[str, int]:
    """Entries of ``Latents.extra`` for the size asked of a second pass; empty if the size of its latents stays. A first
    pass has two thirds of the final width and height and is doubled, so that the frames are resized at the end. A size
    not larger on both sides than the first pass was left unchanged by the user, and asks for nothing. Source:
    Lightricks/LTX-Video, ``LTXMultiScalePipeline``."""
    latents, asked = settings.latents, (settings.width, settings.height)
    if latents is None or not refines(settings) or asked == (latents.width, latents.height):
        return {}
    width, height = latents.extra.get(FIRST_SIZE) or (latents.width / 2, latents.height / 2)
    return dict(zip(FINAL, asked, strict=True)) if settings.width > width and settings.height > height else {}


def refines(settings: SampleSettings) -> bool:
    """True for the second pass over upscaled ``settings.latents``."""
    latents = settings.latents
    return latents is not None and bool(latents.extra.get(SECOND_PASS)) and settings.denoise == 1.0


def resolved(settings: SampleSettings) -> dict[str, Any]:
    """The entry of ``Latents.extra`` with the completed settings, in which no ``auto`` is left, for a receipt."""
    return {RESOLVED: replace(settings, latents=None, noise_mask=None)}


def of_checkpoint(pipeline: Pipeline, recipe: Recipe | None = None) -> FamilySpec:
    """The loaded family with the defaults of this checkpoint: those of its index come before those of ``recipe`` (None:
    the first pass's), and these before the family's. A recipe may bring its picture filter; an index that names a width
    or height leaves no size buckets."""
    family, code = pipeline.spec, pipeline.spec.code
    defaults = code.defaults_for(pipeline) if code.defaults_for is not None else family.sizes.defaults
    recipe = recipe or recipe_of(pipeline)
    if recipe is not None:
        width, height, fps = recipe.size or (defaults.width, defaults.height, defaults.fps)
        cfg = max((step.cfg for step in recipe.guidance), default=defaults.cfg)
        defaults = replace(defaults, steps=recipe.steps, cfg=cfg, width=width, height=height, fps=fps)
        defaults = replace(defaults, frames=recipe.frames or defaults.frames, shift=recipe.shift)
    own, sizes = own_defaults(pipeline), family.sizes
    if recipe is not None and recipe.picture_filter:
        sizes = replace(sizes, picture_filter=recipe.picture_filter, picture_cut=True)
    buckets = () if own.keys() & SIDES else sizes.buckets
    return replace(family, sizes=replace(sizes, defaults=replace(defaults, **own), buckets=buckets))


def clip_frames(pipeline: Pipeline, framepack: FramePackSettings, fps: float) -> int:
    """Pixel frames of a clip that is sampled in sections; of a demo model no more than it was trained to show."""
    defaults = of_checkpoint(pipeline).sizes.defaults
    frames = int(pipeline.spec.code.frames_for(framepack, fps or defaults.fps))
    return min(frames, defaults.frames) if pipeline.is_demo else frames


def own_defaults(pipeline: Pipeline) -> dict[str, Any]:
    """Defaults that a checkpoint's index says it was trained for."""
    return defaults_in(pipeline, pipeline.tools["index"].get(OWN_DEFAULTS))


def defaults_in(pipeline: Pipeline, given: Any) -> dict[str, Any]:
    """The valid fields of :class:`Defaults` in ``given``, JSON of a file: positive numbers of the usual type."""
    usual = pipeline.spec.sizes.defaults
    return {
        name: value
        for name, value in (given.items() if isinstance(given, dict) else ())
        if name in Defaults.__slots__ and type(value) is type(getattr(usual, name)) and 0 < value < math.inf
    }


def with_defaults(pipeline: Pipeline, given: Mapping[str, Any]) -> Pipeline:
    """A copy of ``pipeline`` whose :func:`own_defaults` are updated by ``given``."""
    index = {**pipeline.tools["index"], OWN_DEFAULTS: {**own_defaults(pipeline), **given}}
    return replace(pipeline, tools=Tools({**pipeline.tools.readers, "index": lambda: index}))


def guidance_steps(recipe: Recipe | None, given: SampleSettings, cfg: float) -> tuple[GuidanceStep, ...]:
    """The rows of guidance, by noise level, of ``recipe``, or one of ``cfg``, overridden by what the user set in
    ``given``. A row that names no blocks to leave out takes those of the first that does. Without any there is no STG,
    and without STG the recipe's rescale does not act."""
    rows = recipe.guidance if recipe is not None and recipe.guidance else (GuidanceStep(cfg=cfg),)
    usual = next((row.blocks for row in rows if row.blocks), ())

    def overridden(row: GuidanceStep) -> GuidanceStep:
        blocks = row.blocks or usual
        stg = (row.stg if given.stg < 0 else given.stg) if blocks else 0.0
        rescale = given.guidance_rescale or (row.rescale if stg else 0.0)
        return replace(row, cfg=given.cfg or row.cfg, stg=stg, rescale=rescale, blocks=blocks)

    return tuple(map(overridden, rows))


def recipe_decisions(pipeline: Pipeline, variant: tuple[Decision, ...], said: str = "") -> tuple[Decision, ...]:
    """``variant`` and a decision on the recipe, whose reason is the name ``said`` if the recipe was found by it. A demo
    model has one on its video instead, and no guessed ones."""
    if pipeline.is_demo:
        defaults = of_checkpoint(pipeline).sizes.defaults
        size = f"{defaults.width}x{defaults.height}, {defaults.frames} frames, {defaults.steps} steps"
        why = "ships with the pack; AnyGPU Download Model fetches published models"
        if name := pipeline.model.stands_in_for:
            why = f"in place of {name!r}, which is not installed; AnyGPU Download Model fetches it"
        drawn = Decision("model", f"draws coloured shapes at {size}", why, AUTO)
        return (*(each for each in variant if not each.guessed), drawn)
    recipe = recipe_of(pipeline)
    if recipe is None:
        return variant
    why = f"the name {said!r} says so; {recipe.source}" if said else recipe.source
    return (*variant, Decision("recipe", f"{recipe.name}: {recipe}", why, AUTO))


def with_step_cache(pipeline: Pipeline, preset: str, asked: StepCacheSettings) -> Pipeline:
    """A copy of ``pipeline`` whose plan and decisions have the step cache of ``preset``, or of ``asked`` if custom."""
    settings = settings_for(preset, asked)
    decisions = [decision for decision in pipeline.plan.decisions if decision.subject != STEP_CACHE]
    if settings is not None:
        decisions.append(Decision(STEP_CACHE, str(settings), "", CHOSEN))
    return replace(pipeline, plan=replace(pipeline.plan, step_cache=settings, decisions=tuple(decisions)))


@dataclass(frozen=True, slots=True)
class GridSize:
    """Width, height and frames on the family's grid, and what was changed, in words (empty when nothing was)."""

    width: int
    height: int
    frames: int
    said: str = ""


def snap(family: FamilySpec, width: int, height: int, frames: int) -> GridSize:
    """The nearest size that the family can make: sides of 32 pixels or more, frames rounded up where that does not pass
    the limit; 0 is the family's default. Raises InputError for a side or count out of range, with a valid one."""
    defaults, multiple, stride = family.sizes.defaults, family.sizes.multiple, family.sizes.stride
    width, height, frames = width or defaults.width, height or defaults.height, frames or defaults.frames
    smallest = _round_up(SMALLEST_SIDE, multiple)
    for name, side in (("width", width), ("height", height)):
        nearest = _nearest(min(max(side, smallest), LARGEST_SIDE), multiple)
        require_range(name, side, 1, LARGEST_SIDE, "pixels", nearest)
    require_range("frames", frames, 1, MOST_FRAMES, "frames")
    across, down = (max(smallest, _nearest(side, multiple)) for side in (width, height))
    most = (MOST_FRAMES - 1) // stride * stride  # rounded down: with a stride of 6 the limit itself is off the grid
    snapped = across, down, min(_round_up(frames - 1, stride), most) + 1
    changes = [
        f"{name} {asked} -> {got}"
        for name, asked, got in zip(("width", "height", "frames"), (width, height, frames), snapped, strict=True)
        if asked != got
    ]
    rules = [f"multiples of {multiple} pixels, {smallest} or more"] if snapped[:2] != (width, height) else []
    rules += [f"{stride}n+1 frames"] if snapped[2] != frames else []
    return GridSize(*snapped, f"{', '.join(changes)} ({family.title} needs {' and '.join(rules)})" if changes else "")


def _nearest(value: int, multiple: int) -> int:  # the multiple nearest to ``value``, but not 0
    return max(multiple, (value + multiple // 2) // multiple * multiple)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def complete(
    family: FamilySpec, prompt: Prompt, image: ImageCondition | None, settings: SampleSettings, progress: Progress
) -> SampleSettings:
    """``settings`` with defaults and a size on the family's grid: that of the latents, else as asked, else the image's.
    The user is told what has no effect. InputError for a value out of range, or parts that do not go together."""
    require_family(prompt.family, family, "a prompt")
    report_unused(family, settings, GUIDANCE, progress)
    if settings.sigmas is not None and (settings.steps or settings.shift):
        progress.notify("steps and shift have no effect beside sigmas")
    if image is not None:
        settings = replace(settings, width=settings.width or image.width, height=settings.height or image.height)
    size = snap(family, settings.width, settings.height, settings.frames)
    if size.said:
        progress.notify(size.said)
    defaults = family.sizes.defaults
    steps = (settings.steps if settings.sigmas is None else max(0, len(settings.sigmas) - 1)) or defaults.steps
    require_range("steps", steps, family.sizes.min_steps, MOST_STEPS, f"steps for {family.title}")
    settings = _at_rate(settings, defaults.fps, progress)
    own = {name: getattr(settings, name) or getattr(defaults, name) for name in ("fps", "guidance", "cfg", "shift")}
    own["cfg_end"] = settings.cfg_end if settings.cfg or settings.cfg_end < 1.0 else defaults.cfg_end
    own["guidance_rescale"] = settings.guidance_rescale if "guidance_rescale" in family.recipes.effective else 0.0
    settings = replace(settings, **own, width=size.width, height=size.height, frames=size.frames, steps=steps)
    for name in ("guidance", "cfg", "guidance_rescale"):
        if not 0 <= getattr(settings, name) < math.inf:
            found = f"{name} {getattr(settings, name)}"
            raise InputError(found, expected="a number from 0", fix="Leave it at its default.")
    for name, most in (("cfg_start", 1), ("cfg_end", 1), ("denoise", 1), ("shift", MOST_SHIFT)):
        require_range(name, getattr(settings, name), 0, most)
    if settings.cfg_start > settings.cfg_end:
        found = f"cfg_start {settings.cfg_start} after cfg_end {settings.cfg_end}"
        raise InputError(found, expected="start before end", fix="Swap them.")
    if not 0 < settings.fps <= 240:
        raise InputError(f"fps {settings.fps}", expected="more than 0, at most 240", fix="The usual value is 24.")
    if settings.cfg <= 1.0 and prompt.has_negative:
        progress.notify(f"the negative prompt has no effect at cfg {settings.cfg:g}: it needs cfg above 1")
    if settings.cfg > 1.0 and prompt.negative is None:
        found = f"cfg {settings.cfg} without a negative prompt"
        fix = "Connect the negative conditioning, or set cfg to 1."
        raise InputError(found, expected="a negative prompt, which may be an empty text", fix=fix)
    require_choice("scheduler", settings.scheduler, SCHEDULERS, "Choose auto.", f" for {family.title}")
    settings = _with_latents(family, settings, progress)
    if image is not None:
        require_family(image.family, family, "an image condition")
        for name, tensor in image.tensors.items():
            require_finite(tensor, f"image condition ({name})")
        if (image.width, image.height) != (settings.width, settings.height):
            found = f"an image condition of {image.width}x{image.height}"
            found += f" for a video of {settings.width}x{settings.height}"
            fix = "Connect the latent to Encode Image, or width and height of Encode Image to the sample node."
            raise InputError(found, expected="one size", fix=fix)
    return settings


def _at_rate(settings: SampleSettings, usual: float, progress: Progress) -> SampleSettings:
    """``settings``, at the frame rate of their latents if the user set none and these were sampled, or have more than
    the ``usual`` rate, the family's: upscaled in time. The user is told once of a rate that is not the usual one."""
    latents = settings.latents
    if latents is None or settings.fps or not (latents.extra or latents.fps > usual):
        return settings
    if latents.fps not in (0.0, usual):
        tell_once(progress, f"{latents.fps:g} fps, as its latents have; earlier versions took {usual:g}")
    return replace(settings, fps=latents.fps)


def _with_latents(family: FamilySpec, settings: SampleSettings, progress: Progress) -> SampleSettings:
    """``settings`` at the size of the latents to start from, which are checked; without any, or on a family that takes
    none, without them and at ``denoise`` 1. Raises InputError for latents that do not fit, or ``denoise`` 0."""
    latents = settings.latents
    if latents is None or "latents" not in family.recipes.effective:
        if settings.denoise < 1.0:
            progress.notify(f"denoise has no effect {'without latents' if latents is None else f'on {family.title}'}")
        return replace(settings, latents=None, denoise=1.0)
    require_family(latents.family, family, "the latents to start from")
    require_finite(latents.samples, "latents to start from")
    empty = fault_in_latents(latents.samples)
    if empty and settings.denoise < 1.0:
        progress.notify(f"the latents to start from are {empty}: was the video encoded with this model's VAE?")
    if settings.denoise == 0.0:
        fix = "0 would return the input unchanged. Use 0.3 to 0.8."
        raise InputError("denoise 0", expected="more than 0, at most 1", fix=fix)
    partly = settings.noise_mask is not None or settings.sigmas is not None or refines(settings)
    if settings.denoise == 1.0 and not (empty or partly):
        progress.notify("denoise 1 keeps nothing of the latents to start from but their size: 0.3 to 0.8 keeps some")
    width, height, frames, multiple = latents.width, latents.height, latents.frames, family.sizes.multiple
    if width % multiple or height % multiple:
        fix = f"Scale them to {_round_up(width, multiple)}x{_round_up(height, multiple)}, for one."
        raise InputError(f"latents of {width}x{height}", expected=f"multiples of {multiple} pixels", fix=fix)
    if (width, height, frames) != (settings.width, settings.height, settings.frames):
        progress.notify(f"size {width}x{height}, {frames} frames taken from the latents")
    return replace(settings, width=width, height=height, frames=frames)


def report_unused(family: FamilySpec, request: Any, names: tuple[str, ...], progress: Progress) -> None:
    """Tell the user which ``names`` of ``request`` are set but have no effect on this family; ``cfg`` 1 is not set."""
    usual = {field.name: field.default for field in fields(request)}
    for name in names:
        value = getattr(request, name)
        plain = isinstance(value, (int, float, str, tuple))
        unset = value is usual[name] or (plain and value == usual[name]) or (name == "cfg" and value == 1.0)
        if name not in family.recipes.effective and not unset:
            progress.notify(f"{name} has no effect on {family.title}")


def require_family(given: str, family: FamilySpec, subject: str) -> None:
    """Raise InputError where ``subject`` was made for ``given``, another family than the loaded one."""
    if given != family.id:
        found = f"{subject} made for {given!r}"
        fix = f"Connect the {family.title} pipeline's own nodes all the way, or load the {given} model."
        raise InputError(found, expected=f"made for {family.id!r}", fix=fix)
