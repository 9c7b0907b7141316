"""The doctor beside a sampling of ours: checks steps, explains the first that is wrong, goes on with what was kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ...compat.doctor import EXPLAIN, Doctor, lifeless, not_finite, unshrunk
from ...compat.repairs import RepairStore
from ..base import Pipeline, Progress

Predict = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Watch:
    """The transformers of one sampling under a doctor's eyes.

    Args:
        doctor: of the pipeline. networks: its transformers by their parts' names. each: whether every step is looked
            at; otherwise the first and the last, which is where a transformer that overflows shows.
    """

    doctor: Doctor
    networks: nn.ModuleDict
    each: bool

    def over(self, predict: Predict, count: int) -> Predict:
        """``predict`` of ``count`` steps, with what is kept for the transformers, and its output checked.

        Raises:
            NotFinite: where it is called: the output is not finite; the text names the layer.
        """

        def checked(latents: torch.Tensor, time: torch.Tensor, index: int) -> torch.Tensor:
            with self.doctor.repaired(self.networks):
                output = predict(latents, time, index)
                if not self.each and 0 < index < count - 1:
                    return output
                again, fault = partial(predict, latents, time, index), lifeless if self.each else not_finite
                return self.doctor.checked(output, self.networks, again, f"step {index + 1} of {count}", fault)

        return checked

    def finish(self, noise: torch.Tensor, latents: torch.Tensor, count: int) -> None:
        """Say what is wrong with finite latents, or that nothing is, where somebody asked for a doctor."""
        if self.each:
            self.doctor.tell(unshrunk(noise, latents) or f"no fault in {count} steps")


def watch_of(pipeline: Pipeline, progress: Progress) -> Watch | None:
    """The watch over a sampling that holds the transformers of ``pipeline``.

    None where nobody asked for a doctor and precision ``auto`` has another one to go on with.
    """
    chosen: Doctor | None = pipeline.doctor
    if chosen is None and pipeline.parts.fallbacks:
        return None
    networks = {part: pipeline.parts[part] for part in pipeline.spec.transformers if part in pipeline.parts}
    doctor = chosen or Doctor("", RepairStore(None), EXPLAIN, progress.notify)
    return Watch(doctor, nn.ModuleDict(networks), chosen is not None)
