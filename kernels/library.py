"""Registration of the operations with torch, and the choice between an operation and its reference.
The choice is made before the operation: where nothing is launched the reference runs as plain torch, so that a compiler
can fuse it. An operation is opaque to a compiler, has a fake, and never breaks a graph."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)
NAMESPACE = "anygpu_3"  # one more where a schema changes, so that two versions of the pack can live in one process
AUTO, TRITON, REFERENCE = "auto", "triton", "reference"
FORMS = (AUTO, TRITON, REFERENCE)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# By operation, device and dtype of its first argument: why no kernel is launched there. Its reference runs instead.
FAULTS: dict[tuple[str, torch.device, torch.dtype], str] = {}
LAUNCHED_ON = "cuda"  # torch's name for NVIDIA and for AMD; each has its own backend in Triton
META = "meta"  # where work is counted before it runs: an operation is one there, as where it is launched
try:
    HAS_TRITON = find_spec("triton") is not None
except (ImportError, ValueError):
    HAS_TRITON = False


class KernelError(RuntimeError):
    """An operation cannot do what was asked for explicitly; the text says found, expected and fix."""


def reason_against(device: torch.device, dtype: torch.dtype) -> str:
    """The reason why nothing can be launched for tensors of ``dtype`` on ``device``; empty where it can."""
    if dtype not in DTYPES:
        return f"{dtype} is not one of float32, float16 and bfloat16"
    if not HAS_TRITON:
        return "Triton is not installed"
    if device.type not in (LAUNCHED_ON, META) and not (device.type == "cpu" and interpreting()):
        return f"Triton launches on NVIDIA and AMD GPUs, not on {device.type!r}"
    return ""


def launches(x: Tensor, form: str = AUTO) -> bool:
    """True where an operation on ``x`` is launched; otherwise its reference runs.
    Raises KernelError where ``triton`` was asked for and cannot be had, or ``form`` is unknown."""
    if form == AUTO:
        return HAS_TRITON and x.device.type in (LAUNCHED_ON, META) and x.dtype in DTYPES
    if form == REFERENCE:
        return False
    reason = reason_against(x.device, x.dtype) if form == TRITON else f"there is no form {form!r}"
    if reason:
        raise KernelError(
            f"kernels: {form!r} cannot run here: {reason}; expected one of {', '.join(FORMS)}, and for 'triton' a GPU "
            "and a dtype that it serves. Choose 'auto', which uses the reference if no kernel can be launched."
        )
    return True


def interpreting() -> bool:
    """True where launches are interpreted on the CPU: Triton was imported under TRITON_INTERPRET=1."""
    return "triton" in sys.modules and _interpreted()  # importing it takes half a second


@cache
def _interpreted() -> bool:
    try:
        return bool(sys.modules["triton"].knobs.runtime.interpret)
    except Exception:  # broken in whatever way
        return False


def operation(
    schema: str, fake: Callable[..., Any], reference: Callable[..., Any],
    terms: Callable[..., tuple[Any, ...]] | None = None, launch: Callable[..., Any] | None = None,
) -> Any:  # fmt: skip
    """Register the operation of ``schema``, once per process however often this file is imported, and return it.
    ``fake`` makes empty results, ``reference`` computes them in torch, ``launch`` on a GPU, by default the function of
    its name in ``_triton.launches``; ``terms`` maps the schema's arguments to theirs, None where they are the same."""
    name = schema.partition("(")[0]

    def load() -> Callable[..., Any]:
        if launch is not None:
            return with_schema_arguments(launch)
        from ._triton import launches as kernels  # slow to import

        return with_schema_arguments(getattr(kernels, name))

    def with_schema_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
        return function if terms is None else lambda *arguments: function(*terms(*arguments))

    namespace, plain = getattr(torch.ops, NAMESPACE), with_schema_arguments(reference)
    if not hasattr(namespace, name):
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        library.define(schema)
        library.impl(name, _Launch(name, load, plain), "CUDA")
        library.impl(name, _OnCpu(name, load, plain) if launch is None else plain, "CPU")
        library.impl(name, fake, "Meta")  # its fake; torch's register_fake looks for our source in every module: 70 ms
        # A library takes its operations with it when it is collected; this file may be imported again and dropped.
        setattr(namespace, f"_library_{name}", library)
    return getattr(namespace, name).default


class _Launch:
    """Launches an operation's kernel; after the first launch that fails, it runs the reference instead.
    Building a kernel fails without a compiler, Python headers, or a Triton that knows the GPU; the errors share no base
    class but Exception. Shortage of memory is no such failure: the caller makes room and tries again."""

    __name__ = "launch"

    def __init__(self, name: str, load: Callable[[], Callable[..., Any]], reference: Callable[..., Any]) -> None:
        self.name, self.load, self.reference = name, load, reference
        self.function: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        key = self.name, args[0].device, args[0].dtype
        if key in FAULTS and not _strict.get():
            return self.reference(*args)
        try:
            return self.launch(*args)
        except Exception as error:
            words = "out of memory", "ALLOC_FAILED"  # in Triton's own error, and in those of cuBLAS and hipBLAS
            shortage = isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)
            if shortage or _strict.get():  # the caller makes room and tries again; a self-test wants to see the failure
                raise
            FAULTS[key] = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning("AnyGPU: kernel %s failed on %s in %s (%s); its reference runs from now on", *key, FAULTS[key])
        return self.reference(*args)

    def launch(self, *args: Any) -> Any:
        """The kernel's result; the first argument's device is the current one meanwhile: Triton launches on that."""
        if self.function is None:
            self.function = self.load()
        device = args[0].device
        if device.type != LAUNCHED_ON or device.index == torch.accelerator.current_device_index():
            return self.function(*args)
        with torch.accelerator.device_index(device.index):
            return self.function(*args)


class _OnCpu(_Launch):
    __name__ = "on_cpu"

    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) if interpreting() else self.reference(*args)


_strict = ContextVar("strict", default=False)  # each thread has its own


@contextmanager
def failures_raise() -> Iterator[None]:
    """Have failed launches of this thread raise within the block, so that a kernel's test never tests its reference."""
    before = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(before)
