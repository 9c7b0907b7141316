"""Adapters, such as LoRAs, that several pipelines apply to a part they share.

An offloader gives out a part with the adapters of its own pipeline and nobody else's. Another structure is put on at
its place in the one order of operations: the offload comes off, every rewrite is taken back, the adapters go on, the
rewrites follow, and the offload comes back. Strengths change in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from .parts import Parts


class Adapters(Protocol):
    """The adapters that one pipeline puts on its parts."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Which parts."""

    @property
    def key(self) -> Hashable:
        """Equal for adapters that :meth:`tune` can turn into one another."""

    @property
    def in_weights(self) -> bool:
        """Whether they are merged into the weights, so that they cannot be switched off temporarily."""

    def step(self) -> Any:
        """The preparation step that applies them."""

    def tune(self, module: nn.Module, active: bool) -> None:
        """Set the strengths of the layers on the part, or switch them off."""


@dataclass(slots=True)
class ActiveAdapters:
    """What is on a part: ``owner`` is gone when no pipeline wants it any more, ``plain`` prepares the part without."""

    key: Hashable
    in_weights: bool
    owner: Callable[[], Any]
    plain: Any
    order: Any


@contextmanager
def adapters_on(
    parts: Parts, part: str, adapters: Adapters | None, take_off: Callable[[str], None], progress: Any = None
) -> Iterator[nn.Module]:
    """The part with these adapters; layers that can be switched off are, when the block ends.

    Args:
        parts: what the part is read from.
        part: its name.
        adapters: of the pipeline that holds the part; None for none.
        take_off: brings a part to host memory, without hooks, so that it can be changed.
        progress: told while the part is read.
    """
    wanted = adapters if adapters is not None and part in adapters.parts else None
    module, active = parts.read(part, progress), parts.active_adapters.get(part)
    if wanted is not None:
        if active is None or active.key != wanted.key:
            _change(parts, part, wanted, take_off)
        parts.active_adapters[part].owner = weakref.ref(wanted)
        wanted.tune(module, True)
    elif active is not None and (active.in_weights or active.owner() is None):
        _change(parts, part, None, take_off)
    try:
        yield module
    finally:
        if wanted is not None and part in parts:
            wanted.tune(module, False)


def _change(parts: Parts, part: str, wanted: Adapters | None, take_off: Callable[[str], None]) -> None:
    """Take back what is after the adapters in the order of operations, and them, and go on from there."""
    active, module = parts.active_adapters.get(part), parts[part]
    plain: Any = parts.prepare if active is None else active.plain
    step: Any = None if wanted is None else wanted.step()
    undo: Any = parts.undo[part]
    order = active.order if active is not None and step is None else step.order
    with torch.inference_mode(False), torch.no_grad():
        take_off(part)
        undo.back_to(order)
        parts.active_adapters.pop(part, None)
        try:
            (plain if step is None else plain.with_steps([step])).onwards(part, module, undo, order)
        except BaseException:
            plain.onwards(part, module, undo, order)  # the part goes on without them
            raise
    if wanted is not None:
        parts.active_adapters[part] = ActiveAdapters(
            key=wanted.key, in_weights=wanted.in_weights, owner=weakref.ref(wanted), plain=plain, order=order
        )
