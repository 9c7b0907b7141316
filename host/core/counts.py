"""Effects of a fit, counted in one call of a network: a network may cast by itself, or hide its attention."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from comfy.ldm.modules import attention
from torch import nn

COUNTS = "_anygpu_counts"  # on a layer while its calls are counted
WRAPPER = attention.attention_basic.__code__  # of every attention function of core's: all are closures of one wrapper
INNER = "_inside_attn_wrapper"  # by which core tells a call from within another


@dataclass
class Counts:
    """The layers and attention calls of one call of a network.

    Args:
        called: the layers that were patched and called.
        safe: those of them whose product was in safe fp16.
        ways: how often attention that reached us was computed in which way.
        attention: the number of all calls of core's attention.
    """

    called: set[nn.Module] = field(default_factory=set)
    safe: set[nn.Module] = field(default_factory=set)
    ways: Counter[str] = field(default_factory=Counter)
    attention: int = 0

    @property
    def unused(self) -> bool:
        """True if layers were called and none of them was computed in safe fp16."""
        return bool(self.called) and not self.safe

    @contextmanager
    def attention_counted(self) -> Iterator[None]:
        """Count core's attention calls of this thread, those too that reach no override; not under another profiler."""

        def profile(frame: Any, event: str, _argument: Any) -> None:
            if event == "call" and frame.f_code is WRAPPER and INNER not in frame.f_locals.get("kwargs", {}):
                self.attention += 1

        if sys.getprofile() is not None:
            yield
            return
        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    def __str__(self) -> str:
        layers = f"fp16-safe in {len(self.safe)} of {len(self.called)} layers called" if self.called else ""
        reached = self.ways.total()
        if not (calls := max(reached, self.attention)):
            return layers
        ways = "; ".join(f"{count} {way}" for way, count in self.ways.most_common())
        message = f"attention {reached} of {calls}" + (f" ({ways})" if ways else "")
        if reached < calls:
            message += ", the rest is core's own: it passes no options to its attention there"
        return ", ".join(filter(None, (layers, message)))


def note_call(layer: nn.Module, safe: bool) -> None:
    """Count a call of a patched layer where calls are counted; graphs that are compiled have no counts in them."""
    if torch.compiler.is_compiling() or COUNTS not in layer.__dict__:
        return
    counts: Counts = layer.__dict__[COUNTS]
    counts.called.add(layer)
    if safe:
        counts.safe.add(layer)
