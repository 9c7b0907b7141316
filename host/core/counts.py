"""Effects of a fit, counted in one call of a network: a network may cast by itself, or hide its attention."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import comfy.ops
import torch
from comfy.ldm.modules import attention
from torch import nn
from torch.nn import functional

COUNTS = "_anygpu_counts"  # on a layer while its calls are counted
SAFE, PLAIN = "fp16-safe", "plain fp16"
WRAPPER = attention.attention_basic.__code__  # of every attention function of core's: all are closures of one wrapper
PAST_FORWARD = getattr(getattr(comfy.ops, "linear_input_act", None), "__code__", None)  # computes packed layers itself


@dataclass
class Counts:
    layers: dict[nn.Module, str] = field(default_factory=dict)  # how each layer was computed that was called
    ways: Counter[str] = field(default_factory=Counter)  # how often attention that reached us was computed in which way
    attention: int = 0  # all calls of attention: core's, and torch's own outside them
    complete: bool = False  # whether all calls were seen; False under another profiler
    _depth: int = 0

    @property
    def casts(self) -> bool:
        return PLAIN in self.layers.values() and SAFE not in self.layers.values()

    @property
    def unreached(self) -> int:
        return max(0, self.attention - self.ways.total())

    def note(self, layer: nn.Module, way: str) -> None:
        if self.layers.get(layer, SAFE) == SAFE:
            self.layers[layer] = way

    @contextmanager
    def inside_attention(self) -> Iterator[None]:
        self.attention += not self._depth
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextmanager
    def counting(self, left: Mapping[nn.Module, str]) -> Iterator[None]:
        """Count this thread's calls inside the block, also of attention past the override; ``left`` has reasons."""
        hooks = [
            layer.register_forward_pre_hook(lambda layer, _, why=why: self.note(layer, why))
            for layer, why in left.items()
        ]
        self.complete = sys.getprofile() is None

        def profile(frame: Any, event: str, argument: Any) -> None:
            if frame.f_code is WRAPPER and event in ("call", "return"):
                self.attention += event == "call" and not self._depth
                self._depth += 1 if event == "call" else -1
            elif event == "c_call" and argument is functional.scaled_dot_product_attention and not self._depth:
                self.attention += 1
            elif event == "call" and frame.f_code is PAST_FORWARD and frame.f_locals["linear"] in left:
                self.note(frame.f_locals["linear"], left[frame.f_locals["linear"]])

        if self.complete:
            sys.setprofile(profile)
        try:
            yield
        finally:
            if self.complete:
                sys.setprofile(None)
            for hook in hooks:
                hook.remove()

    def __str__(self) -> str:
        ways = Counter(self.layers.values())
        ours = [f"{way} in {ways.pop(way)}" for way in (PLAIN, SAFE) if way in ways] or [f"{SAFE} in 0"]
        layers = f"{' and '.join(ours)} of {len(self.layers)} layers called" if self.layers else ""
        if ways:
            layers += f" (left: {'; '.join(f'{count} {way}' for way, count in ways.most_common())})"
        if not (calls := max(self.ways.total(), self.attention)):
            return layers
        named = "; ".join(f"{count} {way}" for way, count in self.ways.most_common())
        message = f"attention {calls - self.unreached} of {calls}" + (f" ({named})" if named else "")
        if self.unreached:
            message += ", the rest is core's own: it passes no options to its attention there"
        return ", ".join(filter(None, (layers, message)))


def note_call(layer: nn.Module, way: str) -> None:
    """Count a call of a patched layer where calls are counted; graphs that are compiled have no counts in them."""
    if not torch.compiler.is_compiling() and COUNTS in layer.__dict__:
        layer.__dict__[COUNTS].note(layer, way)
