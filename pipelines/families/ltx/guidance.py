"""Guidance of LTX-Video: by the prompt, and away from a prediction in which some blocks do not attend (STG).

Source: Lightricks/LTX-Video, ``LTXVideoPipeline.__call__``; Hyung et al., Spatiotemporal Skip Guidance for Enhanced
Video Diffusion Sampling (2024); Fan et al., CFG-Zero* (2025), for the projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ....compat.guidance import classifier_free_guidance
from ....compat.memory.parts import Undo
from ...base import SampleSettings
from ...family import GuidanceStep, Recipe
from ...sampling.guidance import BOTH, PROMPTED

NOTHING = 1e-8  # added to a square norm before it divides


@dataclass(frozen=True, slots=True)
class LtxGuidance:
    """What ``settings`` ask of each step of a schedule with these noise ``levels``."""

    settings: SampleSettings
    levels: Sequence[float]
    star: bool

    def at(self, index: int) -> GuidanceStep:
        """The guidance of step ``index``; without cfg outside of ``cfg_start`` to ``cfg_end``."""
        rows, level, share = self.settings.guidance_steps, self.levels[index], index / (len(self.levels) - 1)
        row = next((row for row in rows if row.level <= level), rows[-1])
        acts = self.settings.cfg_start <= share < self.settings.cfg_end
        return row if acts else GuidanceStep(row.level, 1.0, row.stg, row.rescale, row.blocks)

    def guided(self, index: int, forward: Callable[[slice, tuple[int, ...]], torch.Tensor]) -> torch.Tensor:
        """The guided prediction (1, N, 128), fp32.

        Args:
            forward: from the rows of a batch of two, without the prompt and with it, and the blocks that do not attend,
                to the predictions (1 or 2, N, 128).
        """
        from diffusers.guiders.guider_utils import rescale_noise_cfg

        step = self.at(index)
        output = forward(BOTH if step.cfg > 1.0 else PROMPTED, ())
        prompted = guided = output[-1:]
        if step.cfg > 1.0:
            plain = output[:1]
            if self.star:
                plain = plain * ((prompted * plain).sum() / (plain.square().sum() + NOTHING))
            guided = classifier_free_guidance(prompted, plain, step.cfg)
        if step.stg > 0.0:
            guided = guided + step.stg * (prompted - forward(PROMPTED, step.blocks))
        if step.rescale > 0.0 and guided is not prompted:
            guided = rescale_noise_cfg(guided, prompted, step.rescale)
        return guided


def within(recipe: Recipe, count: int) -> Recipe:
    """``recipe`` for a transformer of ``count`` blocks: steps of which it has no block are without STG."""

    def kept(step: GuidanceStep) -> GuidanceStep:
        blocks = tuple(block for block in step.blocks if block < count)
        return replace(step, blocks=blocks) if blocks else replace(step, blocks=(), stg=0.0, rescale=0.0)

    second = None if recipe.second is None else within(recipe.second, count)
    return replace(recipe, guidance=tuple(map(kept, recipe.guidance)), second=second)


@contextmanager
def without_attention(transformer: nn.Module, blocks: Sequence[int]) -> Iterator[None]:
    """``transformer`` whose ``blocks`` take each video token's own value in place of attention.

    What is compiled runs as it is written meanwhile: its graphs hold the attention.
    """
    if not blocks:
        yield
        return
    layers: Any = transformer.transformer_blocks
    undo = Undo()
    try:
        with torch.compiler.set_stance("force_eager"):
            for index in blocks:
                undo.patch(layers[index].attn1, _values)
            yield
    finally:
        undo.restore()


def _values(attention: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """What attention gives where each token sees itself alone."""
    values: torch.Tensor = attention.to_v(hidden_states)
    for layer in attention.to_out:
        values = layer(values)
    return values
