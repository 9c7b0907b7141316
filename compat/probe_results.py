"""One store for all probes: those of the device and those of the layers above it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from .device.facts import DeviceFacts
from .device.packed_paths import packed_probes
from .device.probe_store import ProbeStore
from .device.probes import DTYPES, Probe

TRITON = "triton"
GELU = "gelu_in_product"


def probe_results_of(facts: DeviceFacts, folder: Path | None = None, quiet: bool = False) -> ProbeStore:
    """The probe results of a device and its kernels, saved in ``folder`` (None: nowhere); ``quiet`` runs no probe."""
    gelus: dict[str, Probe] = {f"{GELU}.{name}": partial(_gelu, dtype) for name, dtype in DTYPES.items()}
    return ProbeStore(facts, folder, more={**packed_probes(facts), TRITON: _triton, **gelus}, quiet=quiet)


def _triton(device: torch.device) -> str:
    from .transforms.fused import triton_fault  # which imports the kernels

    return triton_fault(device)


def _gelu(dtype: torch.dtype, device: torch.device) -> str:
    from .transforms.fused import gelu_fault

    return gelu_fault(dtype, device)
