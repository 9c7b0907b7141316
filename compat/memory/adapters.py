"""Adapters, such as LoRAs, that several pipelines put on and take off one part that they share.

A pipeline's offloader is wrapped in :class:`Adapted`: whoever holds the part gets it with their own adapters and nobody
else's. Another structure is put on at its place in the one order of operations: the offloader comes off, every rewrite
is taken back, the adapters go on, the rewrites follow, and the next hold brings the offloader. Strengths change in
place.
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
        """Equal for adapters that differ by what :meth:`tune` can change only."""

    @property
    def in_weights(self) -> bool:
        """Whether they are in the weights themselves, where nobody can switch them off for a moment."""

    def step(self) -> Any:
        """What puts them on, as a step of the preparation."""

    def tune(self, module: nn.Module, active: bool) -> None:
        """Give layers that are on the part their strengths, or let them pass everything by."""


@dataclass(slots=True)
class ActiveAdapters:
    """What is on a part: ``owner`` is gone when no pipeline wants it any more, ``plain`` prepares the part without."""

    key: Hashable
    in_weights: bool
    owner: Callable[[], Any]
    plain: Any
    order: Any


class Adapted:
    """An offloader whose holder gets the part with its own adapters.

    Args:
        inner: who moves the parts. parts: what it moves. adapters: of this pipeline; None for none.
    """

    def __init__(self, inner: Any, parts: Parts, adapters: Adapters | None = None) -> None:
        self.inner, self.parts, self.adapters = inner, parts, adapters

    def __repr__(self) -> str:
        return repr(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "parts", "adapters"):  # asked for before they are there, as when copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def device(self) -> torch.device:
        """Where the parts execute."""
        return self.inner.device  # type: ignore[no-any-return]

    @property
    def active_adapters(self) -> str:
        """The adapters of this pipeline in words, for a key of what it samples."""
        return "" if self.adapters is None else repr(self.adapters)

    @contextmanager
    def hold(self, part: str, activation_bytes: int = 0, progress: Any = None) -> Iterator[nn.Module]:
        """The part with this pipeline's adapters; layers that can be switched off are, when the block ends."""
        wanted = self.adapters if self.adapters is not None and part in self.adapters.parts else None
        module = self.parts.read(part, progress)
        self._settle(part, module, wanted)
        try:
            with self.inner.hold(part, activation_bytes, progress) as held:
                yield held
        finally:
            if wanted is not None and part in self.parts:
                wanted.tune(module, False)

    def release(self, part: str) -> None:
        """Take the part off the device; where that is the host, free its memory."""
        self.inner.release(part)

    def _settle(self, part: str, module: nn.Module, wanted: Adapters | None) -> None:
        active_adapters: ActiveAdapters | None = self.parts.active_adapters.get(part)
        if wanted is None:
            if active_adapters is not None and (active_adapters.in_weights or active_adapters.owner() is None):
                self._change(part, module, None, active_adapters)
            return
        if active_adapters is None or active_adapters.key != wanted.key:
            self._change(part, module, wanted, active_adapters)
        self.parts.active_adapters[part].owner = weakref.ref(wanted)
        wanted.tune(module, True)

    def _change(
        self, part: str, module: nn.Module, wanted: Adapters | None, active_adapters: ActiveAdapters | None
    ) -> None:
        """Take back what is after the adapters in the order of operations, and them, and go on from there."""
        plain: Any = active_adapters.plain if active_adapters is not None else self.parts.prepare
        step = None if wanted is None else wanted.step()
        order = active_adapters.order if step is None and active_adapters is not None else step.order  # type: ignore[union-attr]
        done: Any = self.parts.undo[part]
        with torch.inference_mode(False), torch.no_grad():
            self.inner.take_off(part)
            done.back_to(order)
            self.parts.active_adapters.pop(part, None)
            try:
                (plain if step is None else plain.with_steps([step])).onwards(part, module, done, order)
            except BaseException:
                plain.onwards(part, module, done, order)  # the part goes on without them
                raise
        if wanted is not None:
            self.parts.active_adapters[part] = ActiveAdapters(
                wanted.key, wanted.in_weights, weakref.ref(wanted), plain, order
            )
