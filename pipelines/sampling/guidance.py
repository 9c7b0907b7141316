"""Classifier-free guidance of one sampling: at which steps it acts, and how two predictions become one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...compat.guidance import Branch, both, classifier_free_guidance
from ...compat.ranks import Group
from ..base import SampleSettings


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
