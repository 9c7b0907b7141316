"""Products of 8-bit weights as they are stored: the activations are rounded to 8 bits too, a scale per token.

Lossy, and off by default. It saves unpacking the weights, and 8-bit units multiply twice as fast as
16-bit ones. Layers with few tokens (modulations), other storage and patched weights compute as always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.packed import EIGHT, StoredLinear
from ..device.facts import DeviceFacts
from ..errors import UnsupportedError

# Where torch multiplies a format: back end, the least architecture, and whose product it is.
NEEDS: Mapping[torch.dtype, tuple[str, int, str]] = {
    torch.int8: ("cuda", 75, "torch._int_mm: integer tensor cores, from Turing (RTX 20) on"),
    torch.float8_e4m3fn: ("cuda", 89, "torch._scaled_mm: fp8 tensor cores, from Ada (RTX 40) on"),
}
LEAST_TOKENS = 17  # that torch._int_mm takes on CUDA
MULTIPLE = 16  # of both sides of a weight that torch._scaled_mm takes
LARGEST = {dtype: largest for dtype, largest in EIGHT.values()}


def formats_on(facts: DeviceFacts) -> tuple[torch.dtype, ...]:
    """The formats whose products the device of ``facts`` has."""
    digits = facts.arch.removeprefix("sm")
    number = int(digits) if digits.isdigit() else 0
    return tuple(dtype for dtype, (backend, least, _) in NEEDS.items() if facts.backend == backend and number >= least)


def require_stored_matmuls(facts: DeviceFacts) -> tuple[torch.dtype, ...]:
    """The formats whose products the device has.

    Raises:
        UnsupportedError: none.
    """
    formats = formats_on(facts)
    if not formats:
        raise UnsupportedError(
            f"stored_products on {facts.device}: {facts.arch or facts.backend} does not multiply 8-bit weights",
            expected="an NVIDIA GPU: RTX 20 or newer for int8, RTX 40 or newer for fp8",
            fix="Switch off stored_products.",
        )
    return formats


def multiply_as_stored(module: nn.Module, formats: tuple[torch.dtype, ...]) -> tuple[int, Callable[[], None]]:
    """Make the packed layers of ``module`` in one of ``formats`` multiply as stored; how many, and what undoes it."""
    layers = [layer for layer in module.modules() if isinstance(layer, StoredLinear) and not layer.codec]
    layers = [layer for layer in layers if layer.stored.dtype in formats]
    for layer in layers:
        layer.__dict__["multiply"] = product

    def undo() -> None:
        for layer in layers:
            layer.__dict__.pop("multiply", None)

    return len(layers), undo


def product(layer: Any, x: Tensor) -> Tensor | None:
    """The output of a packed ``layer`` in the dtype of ``x``; None where its product does not suit it.

    Peak extra memory: ``x`` in 8 bits and the output in fp32.
    """
    rows = x.reshape(-1, x.shape[-1])
    sides = (layer.in_features, layer.out_features)
    adapted = bool(getattr(layer, "weight_function", None))
    if rows.shape[0] < LEAST_TOKENS or any(side % MULTIPLE for side in sides) or adapted:
        return None
    stored: Tensor = layer.stored
    largest = LARGEST[stored.dtype]
    scale = (rows.abs().amax(1, keepdim=True).float() / largest).clamp(min=torch.finfo(torch.float32).tiny)
    small = rows.float() / scale
    if stored.dtype is torch.int8:
        wide = torch._int_mm(small.round().to(torch.int8), stored.t()).float()
    else:
        one = torch.ones((), device=x.device)
        narrow = small.clamp(-largest, largest).to(stored.dtype)
        wide = torch._scaled_mm(narrow, stored.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    wide = wide.mul_(scale)
    if layer.factors is not None:
        wide = wide.mul_(layer.factors.view(1, -1))
    if layer.bias is not None:
        wide = wide.add_(layer.bias.float())
    return wide.to(x.dtype).view(*x.shape[:-1], layer.out_features)
