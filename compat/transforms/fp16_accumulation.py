"""fp16 accumulation: matrix products of fp16 operands whose sums are fp16 too, twice as fast on GeForce, and lossy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..device.facts import DeviceFacts
from ..errors import UnsupportedError

SWITCH = "allow_fp16_accumulation"  # of torch.backends.cuda.matmul, for the whole process
BACKENDS: Mapping[str, str] = {"cuda": "cuBLAS sums fp16 products in fp16 where it is allowed (torch 2.7)"}


def require_fp16_sums(facts: DeviceFacts, dtype: torch.dtype) -> None:
    """Refuse fp16 accumulation where it would do nothing.

    Args:
        dtype: of the transformer's products.

    Raises:
        UnsupportedError: the device, this torch, or the dtype.
    """
    reason = ""
    if facts.backend not in BACKENDS:
        reason = f"{facts.backend} has no such products"
    elif not _known():
        reason = f"torch {torch.__version__} has no switch for it"
    elif dtype is not torch.float16:
        reason = f"the transformer's products are in {str(dtype).removeprefix('torch.')}"
    if reason:
        raise UnsupportedError(
            f"fp16_accumulation on {facts.device}: {reason}",
            expected="an NVIDIA GPU, torch 2.7 or newer, and precision fp16 or fp16-safe",
            fix="Switch fp16_accumulation off, or choose precision fp16-safe on the load node.",
        )


@contextmanager
def fp16_sums() -> Iterator[None]:
    """Products inside sum in fp16; then torch's switch is as it was."""
    products: Any = torch.backends.cuda.matmul
    before = getattr(products, SWITCH)
    setattr(products, SWITCH, True)
    try:
        yield
    finally:
        setattr(products, SWITCH, before)


def _known() -> bool:
    """Whether this torch has the switch; one that it lacks raises when it is read."""
    return hasattr(torch.backends.cuda.matmul, SWITCH)
