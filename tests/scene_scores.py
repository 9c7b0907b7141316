"""Scenes to ask a demo model for, and how many of its clips show them."""

import random
from collections.abc import Sequence
from dataclasses import fields

import torch
from anygpu.pipelines.demo.scenes import Scene, scene_of, scenes


def chosen_scenes(count: int, seed: int = 19) -> list[Scene]:
    """Scenes drawn from all of them without repetition."""
    return random.Random(seed).sample(scenes(), count)


def scores(clips: Sequence[torch.Tensor], asked: Sequence[Scene]) -> dict[str, float]:
    """The share of clips that show what was asked for, in each respect, and ``shuffled`` against other prompts."""
    seen = [scene_of(clip) for clip in clips]
    return {**agreement(seen, asked), "shuffled": agreement(seen, [*asked[1:], asked[0]])["all"]}


def agreement(seen: Sequence[Scene], asked: Sequence[Scene]) -> dict[str, float]:
    """The share of clips that are right in each respect, and in all of them."""
    names = [field.name for field in fields(Scene)]
    pairs = list(zip(seen, asked, strict=True))
    shares = {name: sum(getattr(a, name) == getattr(b, name) for a, b in pairs) / len(pairs) for name in names}
    return {**shares, "all": sum(a == b for a, b in pairs) / len(pairs)}
