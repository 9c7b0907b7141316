"""Exact copies of tensors between host and device: floats of 16 bits are integers on the way.

One stack turned bf16 into zeros on its way to the host, another damaged it only in copies above 10 MB, so that no small
probe can clear a device for floats. Relabelling bits costs nothing, and no device is known to damage integers. Every
value that leaves a device passes through :func:`to_host`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .execution import HOST
from .failures import is_shortage

BITS = torch.int16
HALVES = (torch.bfloat16, torch.float16)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in host memory, detached, in its own dtype, bit for bit."""
    tensor = tensor.detach()
    return tensor if tensor.device.type == HOST.type else carried(tensor, lambda bits: bits.to(HOST))


def carried(tensor: torch.Tensor, copy: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The result of ``copy``, which takes a tensor to another device as it is; it is given integers for 16-bit floats.

    A tensor of another class, whose dtype may be that of what it unpacks to, is copied as that class does it; a backend
    that cannot relabel bits has only the plain copy.
    """
    if tensor.dtype in HALVES and type(tensor) in (torch.Tensor, nn.Parameter):
        try:
            return copy(tensor.view(BITS)).view(tensor.dtype)
        except RuntimeError as error:
            if is_shortage(error):
                raise
    return copy(tensor)


def placed(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """``value`` with every tensor in it on ``device``; floating ones cast to ``dtype``, if given, before they leave.

    Args:
        value: a tensor, or a dict, list or tuple of values; anything else is returned as it is.
    """
    if isinstance(value, torch.Tensor):
        cast = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        return cast if cast.device == device else carried(cast, lambda bits: bits.to(device))
    if isinstance(value, Mapping):
        return {key: placed(item, device, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(placed(item, device, dtype) for item in value)
    return value


@contextmanager
def inputs_placed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Bring the inputs of ``module`` to ``device`` in each call, for libraries that would copy them plainly."""

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return placed(args, device), placed(kwargs, device)

    handle = module.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
