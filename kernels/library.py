"""Registration of the operations with torch, and the choice between an operation and its reference.

The choice is made before the operation: where nothing is launched the reference runs as plain torch, so that a compiler
can fuse it. An operation is opaque to a compiler, has a fake, and never breaks a graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "anygpu_2"  # one more where a schema changes, so that two versions of the pack can live in one process
AUTO, TRITON, REFERENCE = "auto", "triton", "reference"
FORMS = (AUTO, TRITON, REFERENCE)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAUNCHED_ON = "cuda"  # torch's name for NVIDIA and for AMD; each has its own backend in Triton


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


HAS_TRITON = _installed("triton")


class KernelError(RuntimeError):
    """An operation cannot do what was asked for explicitly; the text says found, expected and fix."""


def reason_against(device: torch.device, dtype: torch.dtype) -> str:
    """Why nothing can be launched for tensors of ``dtype`` on ``device``; empty where it can."""
    if dtype not in DTYPES:
        return f"{dtype} is not one of float32, float16 and bfloat16"
    if not HAS_TRITON:
        return "Triton is not installed"
    if device.type != LAUNCHED_ON and not (device.type == "cpu" and interpreting()):
        return f"Triton launches on NVIDIA and AMD GPUs, not on {device.type!r}"
    return ""


def launches(x: Tensor, form: str = AUTO) -> bool:
    """Whether an operation on ``x`` is launched; otherwise its reference runs.

    Raises:
        KernelError: ``triton`` was asked for and cannot be had, or ``form`` is unknown.
    """
    if form == AUTO:
        return HAS_TRITON and x.device.type == LAUNCHED_ON and x.dtype in DTYPES
    if form == REFERENCE:
        return False
    reason = reason_against(x.device, x.dtype) if form == TRITON else f"there is no form {form!r}"
    if reason:
        raise KernelError(
            f"kernels: {form!r} cannot run here: {reason}; expected one of {', '.join(FORMS)}, and for 'triton' a GPU "
            "and a dtype that it serves. Choose 'auto', which takes the reference where nothing can be launched."
        )
    return True


def interpreting() -> bool:
    """Whether launches are interpreted on the CPU (TRITON_INTERPRET=1 when Triton was first imported)."""
    if not HAS_TRITON:
        return False
    from ._triton.rounding import INTERPRETED

    return bool(INTERPRETED)


def operation(
    schema: str, fake: Callable[..., Any], reference: Callable[..., Any], launch: Callable[[], Callable[..., Any]]
) -> Any:
    """The operation of ``schema``, registered once per process however often this file is imported.

    Args:
        schema: ``name(Tensor x, ...) -> Tensor``, functional.
        fake: from the same arguments to empty results; reads no data.
        reference: what the operation runs on a CPU.
        launch: imports and returns what launches the kernel; called on first use, since Triton is slow to import.
    """
    name = schema.partition("(")[0]
    namespace = getattr(torch.ops, NAMESPACE)
    if not hasattr(namespace, name):
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        library.define(schema)
        library.impl(name, _Launch(launch), "CUDA")
        library.impl(name, _OnCpu(reference, launch), "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
        # A library takes its operations with it when it is collected; this file may be imported again and dropped.
        setattr(namespace, f"_library_{name}", library)
    return getattr(namespace, name).default


class _Launch:
    """Calls what ``load`` returns, loading it once, with the device of the first argument as the current one.

    Triton launches on the current device, whichever the tensors are on.
    """

    __name__ = "launch"

    def __init__(self, load: Callable[[], Callable[..., Any]]) -> None:
        self.load = load
        self.pipeline: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self.pipeline is None:
            self.pipeline = self.load()
        device = args[0].device
        if device.type != LAUNCHED_ON or device.index == torch.accelerator.current_device_index():
            return self.pipeline(*args)
        with torch.accelerator.device_index(device.index):
            return self.pipeline(*args)


class _OnCpu:
    """Interprets the launch where Triton does, else runs the reference."""

    __name__ = "on_cpu"

    def __init__(self, reference: Callable[..., Any], load: Callable[[], Callable[..., Any]]) -> None:
        self.reference, self.launch = reference, _Launch(load)

    def __call__(self, *args: Any) -> Any:
        interpreted = "triton" in sys.modules and interpreting()
        return (self.launch if interpreted else self.reference)(*args)
