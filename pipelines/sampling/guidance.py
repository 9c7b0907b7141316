"""Classifier-free guidance of one sampling: at which steps it acts, and how two predictions become one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...compat.guidance import classifier_free_guidance
from ...compat.ranks import Group
from ..base import SampleSettings

Branch = Callable[[], torch.Tensor]
BOTH, PROMPTED = slice(None), slice(-1, None)  # of a batch of two, without the prompt and with it


def both(group: Group | None, first: Branch, second: Branch) -> tuple[torch.Tensor, torch.Tensor]:
    """What the two branches of guidance return, alike in shape; of a group with halves, each half computes one."""
    if group is None or group.half is None:
        return first(), second()
    with group.apart():
        own = (first, second)[group.branch]()
    return group.swapped(own)


def by_halves(group: Group | None, run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``run`` itself; of a group with halves, each half computes one row of a batch of two.

    Args:
        run: from the rows of the batch, which are :data:`BOTH` or :data:`PROMPTED`, and more to their predictions.
    """
    if group is None or group.half is None:
        return run

    def shared(rows: slice, *more: Any) -> torch.Tensor:
        if rows != BOTH:
            return run(rows, *more)
        return torch.cat(both(group, lambda: run(slice(0, 1), *more), lambda: run(PROMPTED, *more)))

    return shared


@dataclass(frozen=True, slots=True)
class Guidance:
    """What ``cfg``, ``cfg_start``, ``cfg_end`` and ``guidance_rescale`` of ``settings`` ask of ``steps`` steps."""

    settings: SampleSettings
    steps: int

    def acts(self, index: int) -> bool:
        """Whether step ``index`` needs a prediction without the prompt beside the one with it."""
        settings = self.settings
        return settings.cfg > 1.0 and settings.cfg_start <= index / self.steps < settings.cfg_end

    def predict(self, index: int, group: Group | None, cond: Branch, uncond: Branch) -> torch.Tensor:
        """The prediction of step ``index``, guided where guidance acts; each branch is a call of the transformer."""
        return self.guide(*both(group, cond, uncond)) if self.acts(index) else cond()

    def guide(self, cond: torch.Tensor, uncond: torch.Tensor) -> torch.Tensor:
        """The guided prediction; rescaled to the spread of ``cond`` by the share that was asked for.

        Source: Lin et al., Common Diffusion Noise Schedules and Sample Steps are Flawed (2024), section 3.4.
        """
        guided = classifier_free_guidance(cond, uncond, self.settings.cfg)
        if self.settings.guidance_rescale <= 0:
            return guided
        from diffusers.guiders.guider_utils import rescale_noise_cfg

        rescaled: torch.Tensor = rescale_noise_cfg(guided, cond, guidance_rescale=self.settings.guidance_rescale)
        return rescaled

    def guide_batch(self, output: torch.Tensor) -> torch.Tensor:
        """The guided prediction of a batch of two, without the prompt and with it; a batch of one as it is."""
        if output.shape[0] == 1:
            return output
        uncond, cond = output.chunk(2)
        return self.guide(cond, uncond)
