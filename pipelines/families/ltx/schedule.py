"""The noise levels of LTX-Video: shifted by the video's size, linear then quadratic, or fixed by distillation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...base import SampleSettings
from ...sampling.loop import latent_shape
from ...sampling.schedules import TRAIN_TIMESTEPS, Levels, Schedule, schedule_for
from .spec import SPEC


def ltx_schedule(
    config: Mapping[str, Any],
    settings: SampleSettings,
    conditioned: bool,
    fixed: Sequence[float] | None,
    device: torch.device,
) -> Schedule:
    """The schedule for one sampling.

    Args:
        config: the scheduler's own. conditioned: whether it is the one of ``LTXConditionPipeline``.
        fixed: the timesteps of a distilled model, which it was trained on.
    """
    if not conditioned and fixed is None:
        levels: Callable[[int], Levels] = partial(_shifted, config, math.prod(latent_shape(SPEC, 1, settings)))
    else:
        levels = partial(_stretched, fixed) if fixed is not None else _linear_quadratic
        if config.get("use_dynamic_shifting"):
            config = {**config, "use_dynamic_shifting": False, "shift_terminal": None}
        if settings.shift:
            # A shift acts on noise levels only: given as timesteps, the transformer would see other ones.
            levels = partial(_as_sigmas, levels)
    return schedule_for(config, settings, settings.steps, levels, device)


def _shifted(config: Mapping[str, Any], tokens: int, steps: int) -> Levels:
    """Evenly spaced levels, moved by the scheduler's dynamic shift: ``LTXPipeline``'s schedule."""
    import numpy
    from diffusers.pipelines.ltx.pipeline_ltx import calculate_shift

    rows = (("base_image_seq_len", 256), ("max_image_seq_len", 4096), ("base_shift", 0.5), ("max_shift", 1.15))
    mu = calculate_shift(tokens, *(config.get(name, usual) for name, usual in rows))
    return Levels(sigmas=numpy.linspace(1.0, 1 / steps, steps).tolist(), mu=mu)


def _linear_quadratic(steps: int) -> Levels:
    """``LTXConditionPipeline``'s schedule."""
    from diffusers.pipelines.ltx.pipeline_ltx_condition import linear_quadratic_schedule

    return Levels(timesteps=(linear_quadratic_schedule(steps) * TRAIN_TIMESTEPS).tolist())


def _stretched(fixed: Sequence[float], steps: int) -> Levels:
    """The fixed timesteps; read between them where another number of steps is asked."""
    import numpy

    places = numpy.linspace(0, len(fixed) - 1, steps)
    return Levels(timesteps=numpy.interp(places, range(len(fixed)), fixed).tolist())


def _as_sigmas(levels: Callable[[int], Levels], steps: int) -> Levels:
    return Levels(sigmas=[time / TRAIN_TIMESTEPS for time in levels(steps).timesteps or ()])
