"""The formula of classifier-free guidance, for every sampler."""

from __future__ import annotations

import torch


def classifier_free_guidance(cond: torch.Tensor, uncond: torch.Tensor, scale: float) -> torch.Tensor:
    """The prediction without the prompt, moved ``scale`` times as far towards the one with it.

    Source: Ho and Salimans, Classifier-Free Diffusion Guidance (2022), in diffusers' order of operations.
    """
    return uncond + scale * (cond - uncond)
