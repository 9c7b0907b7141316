"""A failure at one operator, event, stream, pin, hook or swap of values: no memory, or whatever else is raised."""

import contextlib
import errno
import mmap
from collections.abc import Iterator, Sequence
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
    (hooks, "pin"),
    (mmap, "mmap"),
)

COMPATIBLE = torch.ops.aten._has_compatible_shallow_copy_type.default  # compares types and asks no device


class Shortage(TorchDispatchMode):
    """Raises at step number ``at`` and the ``times - 1`` that follow, of ``count`` steps so far.

    Args:
        times: infinite for a device that is lost.
        behind: whether a step that is no operator fails once it is done.
        errors: raised by turns. device: the kind of device whose operators alone are steps; empty for every operator.
    """

    def __init__(
        self, at: int, times: float = 1, behind: bool = False, errors: Sequence[Any] = ERRORS, device: str = ""
    ) -> None:
        super().__init__()
        self.at, self.times, self.behind, self.errors, self.device, self.count = at, times, behind, errors, device, 0

    def step(self) -> None:
        """Count one, and raise where it is the one."""
        self.count += 1
        if self.at <= self.count < self.at + self.times:
            raise self.errors[self.count % len(self.errors)]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.device or (
            func is not COMPATIBLE
            and any(self.device in str(getattr(one, "device", one)) for one in leaves((args, kwargs)))
        ):
            self.step()
        return func(*args, **(kwargs or {}))


def leaves(values: Any) -> Iterator[Any]:
    """The tensors and devices among the arguments of an operator."""
    found = values.values() if isinstance(values, dict) else values if isinstance(values, (list, tuple)) else ()
    for each in found:
        if isinstance(each, (torch.Tensor, torch.device)):
            yield each
        else:
            yield from leaves(each)


@contextlib.contextmanager
def shortage(
    at: int, times: float = 1, behind: bool = False, operators: bool = True, **more: Any
) -> Iterator[Shortage]:
    """Memory runs out as :class:`Shortage` says inside the block; without ``operators``, only in :data:`PLACES`.

    Args:
        more: of :class:`Shortage`. A device that is lost fails in its operators, streams and events alone.
    """
    with contextlib.ExitStack() as stack:
        short = Shortage(at, times, behind, **more)
        if operators:
            stack.enter_context(short)
        for owner, name in PLACES[: 2 if short.device else None]:
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
