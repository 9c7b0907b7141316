"""The denoising loop that all families share: noise in, latents out, previews, cancel, masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from ...compat.errors import InputError
from ..base import Progress, SampleSettings
from ..vae.fallback import MEMORY, kind_of
from .schedules import Schedule

Result = TypeVar("Result")
Predict = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Kept:
    """The part of a video that a noise mask keeps.

    Args:
        clean, noise: shaped as the latents that are sampled. mask: 1 where to sample, 0 where to keep.
    """

    clean: torch.Tensor
    noise: torch.Tensor
    mask: torch.Tensor

    def over(self, latents: torch.Tensor, level: float) -> torch.Tensor:
        """``latents`` with the kept part at noise ``level``."""
        kept = (1.0 - level) * self.clean + level * self.noise
        return self.mask * latents + (1.0 - self.mask) * kept


def noise_for(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """Gaussian noise, fp32, drawn on the CPU whatever the device, so that a seed means one video."""
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(device)


def start_from(clean: torch.Tensor | None, noise: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    """The latents that sampling starts from: noise, or ``clean`` under the first noise level."""
    if clean is None:
        return noise
    level = schedule.levels[0]
    return level * noise + (1.0 - level) * clean


def cfg_acts(settings: SampleSettings, index: int, steps: int) -> bool:
    """Whether classifier-free guidance acts at step ``index`` of ``steps``."""
    done = index / steps
    return settings.cfg > 1.0 and settings.cfg_start <= done < settings.cfg_end


def denoise(
    latents: torch.Tensor,
    schedule: Schedule,
    predict: Predict,
    *,
    progress: Progress,
    stage: str = "sampling",
    kept: Kept | None = None,
    preview: Callable[[torch.Tensor], torch.Tensor] | None = None,
    step: Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor] | None = None,
    again: Callable[[BaseException], bool] | None = None,
) -> torch.Tensor:
    """Latents at the last noise level.

    Args:
        latents: at the first noise level, fp32, on the device.
        predict: from (latents, timestep, index) to the transformer's guided output.
        preview: from latents to (1, C, T, H, W), where the family samples in another shape.
        step: replaces the schedule's own step.
        again: told of an error in a step; returns whether to try this step again, from the latents it began with. What
            ``step`` itself remembers, it must put back where it fails.

    Raises:
        NotFinite: the latents after the first step or the last hold NaN or infinity.
    """
    advance, count = step or schedule.step, len(schedule)

    def taken(before: torch.Tensor, time: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        output = predict(before, time, index).float()
        after = advance(output, index, before)
        if kept is not None:
            after = kept.over(after, schedule.levels[index + 1])
        if index == 0:  # a transformer that overflows does so at once: hours are not spent on a black video
            require_finite(after, "latents after the first step")
        if index == count - 1:
            require_finite(after, "sampled latents")
        return after, output

    for index, time in enumerate(schedule.timesteps):
        progress.check()
        before = latents
        latents, output = persisting(partial(taken, before, time, index), again, schedule.put_back)
        progress.step(index + 1, count, stage, _later(schedule.clean, output, index, before, preview))
    return latents


def persisting(
    run: Callable[[], Result], again: Callable[[BaseException], bool] | None, back: Callable[[], Callable[[], None]]
) -> Result:
    """What ``run`` returns, tried again as often as ``again`` says after an error.

    Args:
        back: asked before the first try for what puts things back as they are now.
    """
    put_back = back()
    while True:
        try:
            return run()
        except RuntimeError as error:
            if again is None:
                raise
            failed = error.with_traceback(None)  # whose frames hold the tensors of the failed try
        put_back()
        if not again(failed):
            raise failed
        del failed


class NotFinite(InputError):
    """Values that are NaN or infinite."""


def require_finite(tensor: torch.Tensor, subject: str) -> None:
    """Raise when ``tensor`` holds NaN or infinity, with how many."""
    broken = int((~torch.isfinite(tensor)).sum())
    if broken:
        raise NotFinite(
            f"{broken} of {tensor.numel()} values of the {subject} are NaN or infinite",
            expected="finite values",
            fix="Choose precision fp32 (or bf16 where the device has it) on the load node and sample again.",
        )


def _later(
    clean: Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor],
    output: torch.Tensor,
    index: int,
    latents: torch.Tensor,
    shaped: Callable[[torch.Tensor], torch.Tensor] | None,
) -> Callable[[], torch.Tensor]:
    """The clean estimate for a preview; made on the host where the device has no room for it."""

    def made(output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        found = clean(output, index, latents) if output.shape == latents.shape else latents
        return shaped(found) if shaped is not None else found

    def estimate() -> torch.Tensor:
        try:
            return made(output, latents)
        except RuntimeError as error:
            if kind_of(error) != MEMORY:
                raise
        return made(output.cpu(), latents.cpu())

    return estimate
