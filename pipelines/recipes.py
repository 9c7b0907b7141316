"""Which published recipe a run follows, and what the user changes of it."""

from __future__ import annotations

import math
from dataclasses import replace

from ..compat.decision import AUTO, Decision
from .base import Pipeline, SampleSettings
from .family import Defaults, FamilySpec, GuidanceStep, Recipe

SECOND_PASS = "second_pass"  # in ``Latents.extra``: they were upscaled, and a second pass refines them
FINAL = ("final_width", "final_height")  # in ``Latents.extra``: pixels to which decoded frames are resized
OWN_DEFAULTS = "_anygpu_defaults"  # in model_index.json: sizes and steps that a checkpoint was trained for


def recipe_of(pipeline: Pipeline, settings: SampleSettings | None = None) -> Recipe | None:
    """The recipe of the variant that is loaded; None where its family has none.

    Args:
        settings: of the run; upscaled latents that are denoised as published take the recipe's second pass.
    """
    code = pipeline.spec.code
    known = pipeline.spec.recipes.values()
    recipe: Recipe | None = code.recipe_for(pipeline) if hasattr(code, "recipe_for") else next(iter(known), None)
    if recipe is None or settings is None or settings.latents is None:
        return recipe
    return recipe.second if _refines(settings) and recipe.second is not None else recipe


def final_size(settings: SampleSettings) -> dict[str, int]:
    """What goes into ``Latents.extra`` of the size asked of a second pass; nothing where that of its latents stays.

    A first pass has two thirds of the final width and height and is doubled, so that the frames are resized at the end.
    A size that is no larger than that of the first pass is one that was left there, and asks for nothing.

    Source: Lightricks/LTX-Video, ``LTXMultiScalePipeline``.
    """
    latents, asked = settings.latents, (settings.width, settings.height)
    if latents is None or not _refines(settings) or asked == (latents.width, latents.height):
        return {}
    larger = 2 * settings.width > latents.width and 2 * settings.height > latents.height
    return dict(zip(FINAL, asked, strict=True)) if larger else {}


def _refines(settings: SampleSettings) -> bool:
    latents = settings.latents
    return latents is not None and bool(latents.extra.get(SECOND_PASS)) and settings.denoise == 1.0


def of_checkpoint(pipeline: Pipeline, recipe: Recipe | None = None) -> FamilySpec:
    """The loaded family with this checkpoint's own defaults: what its files say, and its recipe.

    Args:
        recipe: the one to take; None for that of its first pass.
    """
    family, code = pipeline.spec, pipeline.spec.code
    defaults = code.defaults_for(pipeline) if hasattr(code, "defaults_for") else family.defaults
    recipe = recipe or recipe_of(pipeline)
    if recipe is not None:
        width, height, fps = recipe.size or (defaults.width, defaults.height, defaults.fps)
        cfg = max((step.cfg for step in recipe.guidance), default=defaults.cfg)
        defaults = replace(defaults, steps=recipe.steps, cfg=cfg, width=width, height=height, fps=fps)
    return replace(family, defaults=_with_own(defaults, pipeline.tools["index"].get(OWN_DEFAULTS)))


def _with_own(defaults: Defaults, own: object) -> Defaults:
    """``defaults`` with what the index of a checkpoint says that it was trained for; what cannot be meant is left out.

    Args:
        own: of the file, so anything: a number counts that is positive and of the type of the default.
    """
    given = own if isinstance(own, dict) else {}
    meant = {
        name: value
        for name, value in given.items()
        if name in Defaults.__slots__ and type(value) is type(getattr(defaults, name)) and 0 < value < math.inf
    }
    return replace(defaults, **meant)


def guidance_steps(recipe: Recipe | None, given: SampleSettings, cfg: float) -> tuple[GuidanceStep, ...]:
    """The guidance of a recipe with what the user ``given`` says otherwise; a rescale alone is the user's own."""
    rows = recipe.guidance if recipe is not None and recipe.guidance else (GuidanceStep(cfg=cfg),)
    usual = next((row.blocks for row in rows if row.blocks), ())

    def said(row: GuidanceStep) -> GuidanceStep:
        stg = row.stg if given.stg < 0 else given.stg
        rescale = given.guidance_rescale or (row.rescale if stg else 0.0)
        return GuidanceStep(row.level, given.cfg or row.cfg, stg, rescale, row.blocks or usual)

    return tuple(map(said, rows))


def recipe_decision(pipeline: Pipeline) -> tuple[Decision, ...]:
    """How the loaded variant is run where nothing else is chosen, and that a demo model stands in, where it does."""
    recipe = recipe_of(pipeline)
    chosen = () if recipe is None else (Decision("recipe", f"{recipe.name}: {recipe}", recipe.source, AUTO),)
    return (*_stand_in(pipeline), *chosen)


def _stand_in(pipeline: Pipeline) -> tuple[Decision, ...]:
    if not pipeline.stands_in_for:
        return ()
    defaults = of_checkpoint(pipeline).defaults
    size = f"{defaults.width}x{defaults.height}, {defaults.frames} frames"
    verdict = f"demo in place of {pipeline.stands_in_for!r}, which is not installed: coloured shapes at {size}"
    return (Decision("model", verdict, "no model is installed; AnyGPU Download Model fetches one", AUTO),)
