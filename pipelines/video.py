"""What the VAEs of several families share: encoding, decoding, and the part that a noise mask keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..compat.execution import checked_leaves, execution_device, generator_for
from .contract import Loaded, Progress, SampleSettings
from .denoising import Kept, require_finite
from .pictures import signed, unsigned

LEAVES_PER_REPORT = 8


@contextmanager
def watched(module: nn.Module, progress: Progress, stage: str) -> Iterator[None]:
    """Report each eighth leaf module that runs, and obey a cancel before any of them."""
    total = sum(1 for leaf in module.modules() if next(leaf.children(), None) is None)
    count = 0

    def called() -> None:
        nonlocal count
        progress.check()
        count += 1
        if count % LEAVES_PER_REPORT == 0:
            progress.step(min(count, total), total, stage)

    with checked_leaves(module, called):
        yield
    progress.step(total, total, stage)


def decoded(loaded: Loaded, samples: torch.Tensor, progress: Progress, **arguments: Any) -> torch.Tensor:
    """Frames (F, H, W, 3) in 0..1 from latents in the VAE's own space.

    Args:
        arguments: passed to the VAE's ``decode``.
    """
    require_finite(samples, "latents")
    device = execution_device(loaded.residency)
    with loaded.residency.hold("vae", 0, progress) as vae, watched(vae.decoder, progress, "decoding"):
        video = vae.decode(samples.to(device, loaded.precision.vae), return_dict=False, **arguments)[0]
    return unsigned(video)


def encoded(loaded: Loaded, frames: torch.Tensor, seed: int, progress: Progress, mode: bool = False) -> torch.Tensor:
    """Latents (1, C, T, H, W) in the VAE's own space, fp32, on the CPU.

    Args:
        frames: (F, H, W, 3) in 0..1. mode: take the distribution's mode instead of a draw from ``seed``.
    """
    device = execution_device(loaded.residency)
    with loaded.residency.hold("vae", 0, progress) as vae, watched(vae.encoder, progress, "encoding video"):
        distribution = vae.encode(signed(frames).to(device, loaded.precision.vae)).latent_dist
        latents = distribution.mode() if mode else distribution.sample(generator_for(seed))
    return latents.float().cpu()


def kept_part(settings: SampleSettings, clean: torch.Tensor | None, noise: torch.Tensor) -> Kept | None:
    """What the noise mask of ``settings`` keeps; None without a mask or without latents to keep."""
    if settings.noise_mask is None or clean is None:
        return None
    mask = settings.noise_mask.float()
    mask = mask.reshape(1, 1, -1, *mask.shape[-2:])
    mask = functional.interpolate(mask, size=clean.shape[2:], mode="nearest").to(clean)
    return Kept(clean, noise, mask)
