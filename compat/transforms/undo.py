"""The way back from changes to modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any


class Undo(list[Callable[[], Any]]):
    """What takes changes back, the newest last."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of ``owner`` itself, not of its class, until :meth:`restore`."""
        own = vars(owner)
        self.append(partial(setattr, owner, name, own[name]) if name in own else partial(delattr, owner, name))
        setattr(owner, name, value)

    def patch(self, module: Any, forward: Callable[..., Any]) -> None:
        """Give ``module``, and no other of its class, another forward."""
        self.set(module, "forward", MethodType(forward, module))

    def restore(self) -> None:
        """Take everything back, the newest change first; calling it again does nothing."""
        while self:
            self.pop()()
