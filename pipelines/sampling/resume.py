"""Samplings that go section by section: what is kept after each section, so that the next run goes on from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..base import Latents


@dataclass(frozen=True, slots=True)
class SectionState:
    """The state of a sampling between two sections.

    Args:
        latents: sampled so far, (1, C, T, H, W), fp32, in the transformer's space, so that no bit is lost on the way.
        lengths: latent frames there were after each section. generator_state: for the noise of the next one.
    """

    latents: torch.Tensor
    lengths: tuple[int, ...]
    generator_state: bytes


class SectionStore(Protocol):
    """Saves finished sections, and returns them when the same video is sampled again."""

    def found(self, key: str) -> SectionState | None:
        """Where a sampling of the same ``key`` that was cut short stands; None where there is none."""

    def keep(self, key: str, index: int, count: int, latents: Latents, standing: SectionState) -> None:
        """Take in all sections so far, after section ``index`` of ``count``; ``latents`` can be decoded."""


class InMemorySections:
    """Keeps finished sections during one sampling, so that none is lost if it has to start again.

    Args:
        beyond: who keeps them for longer; None for nobody.
    """

    def __init__(self, beyond: SectionStore | None = None) -> None:
        self.beyond = beyond
        self.standing: SectionState | None = None

    def found(self, key: str) -> SectionState | None:
        """Where this sampling stands, else where an earlier one does."""
        return self.standing or (None if self.beyond is None else self.beyond.found(key))

    def keep(self, key: str, index: int, count: int, latents: Latents, standing: SectionState) -> None:
        """Take in all sections so far."""
        self.standing = standing
        if self.beyond is not None:
            self.beyond.keep(key, index, count, latents, standing)
