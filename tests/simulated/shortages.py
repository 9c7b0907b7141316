"""Memory that runs out at one operator, event, stream, hook or swap of values, and never before or after."""

import contextlib
import errno
from collections.abc import Iterator
from typing import Any

import torch
from anygpu.compat.memory import hooks, prefetch, transfer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

ERRORS = (
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    lambda: RuntimeError("HIP out of memory"),
    lambda: MemoryError(),
    lambda: RuntimeError("std::bad_alloc"),
    lambda: OSError(errno.ENOMEM, "Cannot allocate memory"),
    lambda: RuntimeError("[WinError 1455]"),
)
PLACES = (  # what allocates, or changes a module, and is no operator
    (prefetch.CopyStream, "_mark"),  # makes an event
    (prefetch.CopyStream, "__init__"),  # is given a stream
    (nn.Module, "register_forward_pre_hook"),
    (nn.Module, "register_forward_hook"),
    (hooks, "set_data"),
    (transfer, "set_data"),
)


class Shortage(TorchDispatchMode):
    """Raises at step number ``at`` and the ``times - 1`` that follow, of ``count`` steps so far.

    Args:
        behind: whether a step that is no operator fails once it is done.
    """

    def __init__(self, at: int, times: int = 1, behind: bool = False) -> None:
        super().__init__()
        self.at, self.times, self.behind, self.count = at, times, behind, 0

    def step(self) -> None:
        """Count one, and raise where it is the one."""
        self.count += 1
        if self.at <= self.count < self.at + self.times:
            raise ERRORS[self.count % len(ERRORS)]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.step()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def shortage(at: int, times: int = 1, behind: bool = False, operators: bool = True) -> Iterator[Shortage]:
    """Memory runs out as :class:`Shortage` says inside the block; without ``operators``, only in :data:`PLACES`."""
    with contextlib.ExitStack() as stack:
        short = Shortage(at, times, behind)
        if operators:
            stack.enter_context(short)
        for owner, name in PLACES:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, _counted(getattr(owner, name), short))
        yield short


def _counted(original: Any, short: Shortage) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        if short.behind:
            result = original(*args, **kwargs)
            short.step()
            return result
        short.step()
        return original(*args, **kwargs)

    return counted
