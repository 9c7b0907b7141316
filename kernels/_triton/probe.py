"""The probe of Triton: whether it builds and runs a kernel here."""

from __future__ import annotations

import torch
import triton as _triton  # noqa: F401 - where it is missing or broken, the import says so best

from ..library import TRITON
from ..self_tests import self_tests


def triton(device: torch.device) -> str:
    """Empty where the rotation of queries and keys is launched on ``device`` and right; else what is wrong with it.

    Raises:
        ImportError: Triton is missing or broken.
        RuntimeError: nothing can be launched there; the message says why.
    """
    wrong = [trial for trial in self_tests(device, TRITON, only="qk_norm_rope") if not trial.right]
    if wrong and wrong[0].fault:
        raise RuntimeError(wrong[0].fault)
    return "; ".join(str(trial) for trial in wrong)
