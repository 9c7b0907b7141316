"""What a failure was about: memory, a kernel, or values that cannot be right."""

from __future__ import annotations

import torch

from .errors import PackError
from .output_check import UnsoundError

MEMORY, KERNEL, VALUES = "memory", "kernel", "values"
SHORTAGES = {  # words of errors that are no torch.OutOfMemoryError -> who says them
    "out of memory": "the allocators of MPS and XPU; cuDNN and MIOpen for their workspace",
    "can't allocate memory": "torch's CPU allocator on Linux",
    "not enough memory": "torch's CPU allocator on Windows",
    "could not allocate": "oneDNN",
}
MISTAKES = ("same device", "should be the same")  # of ours: another dtype or device would only hide them


def kind_of(error: BaseException) -> str:
    """What a failure was about: memory, a kernel, or values; empty for one that no other attempt can cure."""
    text = str(error).lower()
    if isinstance(error, UnsoundError):
        return VALUES
    if isinstance(error, PackError) or not isinstance(error, (RuntimeError, TypeError)):
        return ""
    if isinstance(error, torch.OutOfMemoryError) or any(words in text for words in SHORTAGES):
        return MEMORY
    if isinstance(error, TypeError):  # what MPS raises for a dtype it lacks
        return KERNEL if "float64" in text or "backend" in text else ""
    return "" if any(words in text for words in MISTAKES) else KERNEL
