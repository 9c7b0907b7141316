"""What the VAEs of several families share: encoding, decoding, and the part that a noise mask keeps."""

from __future__ import annotations

import torch
from torch.nn import functional

from ...compat.device.execution import generator_for
from ...compat.device.vae_policy import Form
from ..base import Pipeline, Progress, SampleSettings, StageText
from ..pictures import unsigned
from ..sampling.loop import Kept
from .checked import decoding, encoding


def decoded(
    pipeline: Pipeline, samples: torch.Tensor, progress: Progress, form: Form | None = None, tile: int = 0
) -> torch.Tensor:
    """Frames (F, H, W, 3) in 0..1 from latents in the VAE's own space.

    Args:
        form: what the user asks; None for ``auto``. tile: pixels per tile that ``auto`` begins with; 0 for whole.
    """
    with decoding(pipeline, samples.shape, progress, form, tile) as passes:
        return unsigned(passes.decode(samples))


def encoded_moments(
    pipeline: Pipeline, frames: torch.Tensor, progress: Progress, stage: str, tile: int = 0
) -> torch.Tensor:
    """What the VAE says of ``frames`` (F, H, W, 3): mean and log variance (1, 2C, T, H, W), fp32, on the CPU."""
    with encoding(pipeline, frames, progress, tile) as passes:
        return passes.encode(frames, stage)


def encoded(
    pipeline: Pipeline, frames: torch.Tensor, seed: int, progress: Progress, mode: bool = False, tile: int = 0
) -> torch.Tensor:
    """Latents (1, C, T, H, W) in the VAE's own space, fp32, on the CPU.

    Args:
        frames: (F, H, W, 3) in 0..1. mode: take the distribution's mode instead of a draw from ``seed``.
    """
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    distribution = DiagonalGaussianDistribution(
        encoded_moments(pipeline, frames, progress, StageText("encoding", "video"), tile)
    )
    latents: torch.Tensor = distribution.mode() if mode else distribution.sample(generator_for(seed))
    return latents


def kept_part(settings: SampleSettings, clean: torch.Tensor | None, noise: torch.Tensor) -> Kept | None:
    """What the noise mask of ``settings`` keeps; None without a mask or without latents to keep."""
    if settings.noise_mask is None or clean is None:
        return None
    mask = settings.noise_mask.float()
    mask = mask.reshape(1, 1, -1, *mask.shape[-2:])
    mask = functional.interpolate(mask, size=clean.shape[2:], mode="nearest").to(clean)
    return Kept(clean, noise, mask)
