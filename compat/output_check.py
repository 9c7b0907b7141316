"""Checks whether a VAE's output can be right: finite, not empty, not a single colour."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .errors import InputError

BROKEN, COLOUR, ZEROS, CONSTANT = "NaN or infinite values", "one colour", "nothing but zeros", "one value everywhere"
CAST = "values that this device changes when casting to fp32 or back"
Validator = Callable[[torch.Tensor], str]


class InvalidOutputError(Exception):
    """Raised for a result that cannot be right; the text is one of the faults above."""


class NotFinite(InputError):
    """Values that are NaN or infinite."""

    __module__ = "anygpu"


FIX = (
    "Choose precision fp32 (or bf16 if the device supports it) on the load node; if it is fp32 already, use the "
    "default settings, and no LoRA."
)


def require_finite(tensor: torch.Tensor, subject: str, fix: str = FIX) -> None:
    """Raise when ``tensor`` holds NaN or infinity, with how many."""
    broken = int((~torch.isfinite(tensor)).sum())
    if broken:
        raise NotFinite(
            f"{broken} of {tensor.numel()} values of the {subject} are NaN or infinite",
            expected="finite values",
            fix=fix,
        )


def fault_in_frames(video: torch.Tensor, cell: int = 1) -> str:
    """The fault of decoded frames (B, C, F, H, W), on any device; empty for none.

    One colour is a frame that says the same in every cell, exactly, which no picture does. A decoder that unfolds
    channels into pixels repeats a pattern there when its input is lost.

    Args:
        cell: pixels that one latent covers in each direction.
    """
    if not bool(video.isfinite().all()):
        return BROKEN
    rows, columns = video.shape[-2:]
    if rows % cell or columns % cell or rows * columns == cell * cell:
        return COLOUR if is_flat(video) else ""
    cells = video.unflatten(-1, (columns // cell, cell)).unflatten(-3, (rows // cell, cell))
    return COLOUR if bool((cells.amin((-4, -2)) == cells.amax((-4, -2))).all()) else ""


def fault_in_latents(latents: torch.Tensor) -> str:
    """The fault of encoded latents (B, C, T, H, W), on any device; empty for none.

    A plain wall has one value per channel, so what counts as constant here is one value in all channels.
    """
    if not bool(latents.isfinite().all()):
        return BROKEN
    low, high = latents.amin(), latents.amax()
    if bool(low != high):
        return ""
    return CONSTANT if bool(low) else ZEROS


def is_flat(tensor: torch.Tensor) -> bool:
    """True if every channel of (B, C, ...) is one value."""
    rows = tensor.flatten(2)
    return bool((rows.amin(-1) == rows.amax(-1)).all())


@contextmanager
def checked_parts(coder: nn.Module, validate: Validator) -> Iterator[None]:
    """Check each output of ``coder``, a VAE's encoder or decoder: a tile, a chunk of frames, or the whole.

    Raises:
        InvalidOutputError: in the block, after the first part with a fault, so that no further part is computed.
    """

    def check(_module: nn.Module, _inputs: Any, output: Any) -> None:
        fault = validate(output[0] if isinstance(output, tuple) else output)
        if fault:
            raise InvalidOutputError(fault)

    handle = coder.register_forward_hook(check)
    try:
        yield
    finally:
        handle.remove()


def fault_in_weight(name: str, tensor: torch.Tensor, samples: int = 4096) -> str:
    """The fault of a weight that was just read, on the host; empty for none.

    Some thousand values all over the tensor are looked at; all of them only where those are zeros. One value alone, a
    bias or a norm may be zero throughout; a matrix may not.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return ""
    some = tensor.reshape(-1)[:: max(1, tensor.numel() // samples)].float()  # nothing is asked of 8 bits directly
    if not bool(some.isfinite().all()):
        return BROKEN
    matrix = tensor.ndim > 1 and tensor.numel() > 1 and name.endswith("weight")
    if not matrix or bool(some.any()):
        return ""
    return "" if bool((tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor).any()) else ZEROS
