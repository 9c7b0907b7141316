"""Classifier-free guidance: its formula, for every sampler, and its two branches, which a group can share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .ranks import Group

Branch = Callable[[], torch.Tensor]
BOTH, PROMPTED = slice(None), slice(-1, None)  # of a batch of two, without the prompt and with it


def classifier_free_guidance(cond: torch.Tensor, uncond: torch.Tensor, scale: float) -> torch.Tensor:
    """The prediction without the prompt, moved ``scale`` times as far towards the one with it.

    Source: Ho and Salimans, Classifier-Free Diffusion Guidance (2022), in diffusers' order of operations."""
    return uncond + scale * (cond - uncond)


def both(group: Group | None, first: Branch, second: Branch) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of the two branches of guidance, alike in shape; of a group with halves, each half computes one."""
    if group is None or group.half is None:
        return first(), second()
    with group.apart():
        own = (first, second)[group.branch]()
    return group.swapped(own)


def by_halves(group: Group | None, run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``run``, from rows (:data:`BOTH`, :data:`PROMPTED`) to predictions; each half of a group computes one row."""
    if group is None or group.half is None:
        return run

    def shared(rows: slice, *more: Any) -> torch.Tensor:
        if rows != BOTH:
            return run(rows, *more)
        return torch.cat(both(group, lambda: run(slice(0, 1), *more), lambda: run(PROMPTED, *more)))

    return shared
