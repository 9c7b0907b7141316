"""The doctor beside a sampling of ours: checks steps, explains the first that is wrong, goes on with what was kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ...compat.doctor import EXPLAIN, Doctor, lifeless, unshrunk
from ...compat.repairs import RepairStore
from ..base import Pipeline, Progress

Predict = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Watch:
    """The transformers of one sampling, watched.

    Args:
        networks: the transformers by their parts' names. doctor: of the pipeline, who looks at every step; None where
            nobody asked for one: then the first and the last are looked at, where a transformer that overflows shows.
        tell: takes one line that the user should read.
    """

    networks: nn.ModuleDict
    doctor: Doctor | None
    tell: Callable[[str], None]

    def over(self, predict: Predict, count: int) -> Predict:
        """``predict`` of ``count`` steps, with what is kept for the transformers, and its output checked.

        Raises:
            NotFinite: where it is called: the output is not finite; the text names the layer.
        """
        return partial(self._ends_checked if self.doctor is None else self._repaired, predict, count)

    def _ends_checked(
        self, predict: Predict, count: int, latents: torch.Tensor, time: torch.Tensor, index: int
    ) -> torch.Tensor:
        output = predict(latents, time, index)
        if 0 < index < count - 1 or bool(output.isfinite().all()):
            return output
        doctor = Doctor("", RepairStore(None), EXPLAIN, self.tell)
        return doctor.checked(output, self.networks, partial(predict, latents, time, index), _step(index, count))

    def _repaired(
        self, predict: Predict, count: int, latents: torch.Tensor, time: torch.Tensor, index: int
    ) -> torch.Tensor:
        assert self.doctor is not None
        again = partial(predict, latents, time, index)
        with self.doctor.repaired(self.networks):
            return self.doctor.checked(again(), self.networks, again, _step(index, count), lifeless)

    def finish(self, noise: torch.Tensor, latents: torch.Tensor, count: int) -> None:
        """Say what is wrong with finite latents, or that nothing is, where somebody asked for a doctor."""
        if self.doctor is not None:
            self.doctor.tell(unshrunk(noise, latents) or f"no fault in {count} steps")


def watch_of(pipeline: Pipeline, progress: Progress) -> Watch | None:
    """The watch over a sampling that holds the transformers of ``pipeline``.

    None where nobody asked for a doctor and precision ``auto`` has another one to go on with, and on several devices:
    each would stop its search at the first layer that is wrong for its own tokens, while the others wait there.
    """
    doctor: Doctor | None = pipeline.doctor
    if pipeline.group is not None or (doctor is None and pipeline.parts.fallbacks):
        return None
    networks = {part: pipeline.parts[part] for part in pipeline.spec.transformers if part in pipeline.parts}
    return Watch(nn.ModuleDict(networks), doctor, progress.notify)


def _step(index: int, count: int) -> str:
    return f"step {index + 1} of {count}"
