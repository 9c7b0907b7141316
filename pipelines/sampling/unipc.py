"""UniPC of third order for flow models, in the form with which FramePack was published.

Diffusers' ``UniPCMultistepScheduler`` (our ``unipc``) takes the logarithm of (1 - level) / level and bh2. This solver
takes that of 1 / level and bh1, needs no margin below 1, and ends at the clean latents that its last call implies.
"""

from __future__ import annotations

import math

import torch

ORDER = 3


class FlowUniPC:
    """A solver with the interface and the fields of a diffusers scheduler, plain values and tensors only.

    Source: lllyasviel/FramePack 97fe5db, ``diffusers_helper/k_diffusion/uni_pc_fm.py``; Zhao et al., UniPC (2023).
    """

    def __init__(self, levels: tuple[float, ...], device: torch.device) -> None:
        self.levels = levels  # share of noise before each step and after the last, falling
        self.timesteps = torch.tensor(levels[:-1], device=device) * 1000
        self.index = 0
        self.clean: list[torch.Tensor] = []  # the newest estimates, oldest first
        self.corrected: torch.Tensor | None = None  # the latents of the step before

    def step(
        self, velocity: torch.Tensor, time: torch.Tensor, latents: torch.Tensor, return_dict: bool = False
    ) -> tuple[torch.Tensor]:
        """The latents one level lower, fp32; ``velocity`` is noise minus data at ``latents``."""
        clean = latents.float() - self.levels[self.index] * velocity.float()
        corrected = latents.float()
        if self.corrected is not None:
            corrected = self._moved(self.corrected, self.index - 1, clean)
        self.clean, self.corrected, self.index = [*self.clean, clean][-ORDER:], corrected, self.index + 1
        return (clean if self.levels[self.index] <= 0 else self._moved(corrected, self.index - 1),)

    def _moved(self, latents: torch.Tensor, index: int, reached: torch.Tensor | None = None) -> torch.Tensor:
        """``latents`` from level ``index`` to the next one; corrected where its clean estimate ``reached`` is known."""
        level, lower = self.levels[index : index + 2]
        order = max(1, min(index + 1, ORDER, len(self.levels) - 2))
        width = math.log(lower / level)
        now, older = self.clean[-1], self.clean[-order:-1][::-1]
        ratios = [math.log(self.levels[index - back] / level) / width for back in range(1, order)]
        changes = [(each - now) / ratio for each, ratio in zip(older, ratios, strict=True)]
        if reached is not None:
            ratios.append(1.0)
            changes.append(reached - now)
        moved = lower / level * latents - math.expm1(width) * now
        for weight, change in zip(_weights(ratios, width), changes, strict=True):
            moved = moved - width * weight * change
        return moved


def _weights(ratios: list[float], width: float) -> list[float]:
    """The share of each difference, by the bh1 form of the method."""
    import numpy

    if len(ratios) == 1:
        return [0.5]
    phi, sums = math.expm1(width) / width - 1.0, []
    for power in range(1, len(ratios) + 1):
        sums.append(math.factorial(power) * phi / width)
        phi = phi / width - 1.0 / math.factorial(power + 1)
    rows = [[ratio**power for ratio in ratios] for power in range(len(ratios))]
    return list(map(float, numpy.linalg.solve(rows, sums))) if ratios else []
