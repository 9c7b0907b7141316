"""One store for all probes: those of the device and those of the layers above it."""

from __future__ import annotations

from pathlib import Path

import torch

from .facts import DeviceFacts
from .probe_store import ProbeStore

TRITON = "triton"


def probe_results_of(facts: DeviceFacts, folder: Path | None = None, quiet: bool = False) -> ProbeStore:
    """The probe results for the device of ``facts``, including Triton's; each probe runs when its result is read.

    Args:
        folder: where answers are kept; None keeps them in memory only.
        quiet: gives only what is kept.
    """
    return ProbeStore(facts, folder, more={TRITON: _triton}, quiet=quiet)


def _triton(device: torch.device) -> str:
    from ..transforms.fused import triton_fault  # which imports the kernels

    return triton_fault(device)
