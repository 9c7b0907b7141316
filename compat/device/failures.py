"""Causes of a failed operation: out of memory, a missing or broken kernel, wrong values, or our own mistake."""

from __future__ import annotations

from errno import EACCES, EDQUOT, ENOSPC, EROFS

from ..errors import PackError
from ..output_check import InvalidOutputError
from .facts import accelerators, default_device, device_fault, free_bytes
from .shortage import SHORTAGE, UNSURE, Wording, has_row, says_shortage

MEMORY, KERNEL, VALUES = "memory", "kernel", "values"
DEVICE_ERRORS = (RuntimeError, MemoryError, OSError, TypeError)  # of back ends, for shortage and for missing kernels
UNFIT = (RuntimeError, TypeError, ValueError, LookupError, AssertionError, AttributeError)  # of kernels of other packs
NEARLY_FULL = 512 * 1024**2  # bytes free: less than a library takes that is used for the first time
MISTAKES = ("same device", "should be the same")  # of devices, or of dtypes in a convolution: another way would hide it


def is_shortage(error: BaseException) -> bool:
    """True if ``error`` reports, in any back end's words, out of memory; for ambiguous words the device decides."""
    unsure = next((row for row in UNSURE if has_row(error, [row])), None)
    return says_shortage(error) if unsure is None or isinstance(error, PackError) else _is_full(unsure)


def is_passing(error: BaseException) -> bool:
    """True if memory is full or a cache such as Triton's cannot be written: no verdict on the operation itself."""
    return getattr(error, "errno", None) in (EACCES, EDQUOT, ENOSPC, EROFS) or is_shortage(error)


def is_unfit(error: BaseException) -> bool:
    """True if ``error`` means that another pack's kernel rejects its inputs; False for a shortage or a cancel."""
    return (isinstance(error, UNFIT) or type(error).__module__.partition(".")[0] == "triton") and not is_shortage(error)


def _is_full(row: Wording) -> bool:
    """True if each device that ``row`` may mean works and one is nearly full; if none tells, by ``row``'s words."""
    devices = [device for device in accelerators(default_device()) if device.type != "cpu" or "CPU" in row.backend]
    if any(device_fault(device) for device in devices):
        return False
    free = [size for size in map(free_bytes, devices) if size is not None]
    return min(free) < NEARLY_FULL if free else any(sure.text in row.text for sure in SHORTAGE)


def failure_kind(error: BaseException) -> str:
    """``memory``, ``kernel`` or ``values``: another implementation may help; empty where it would hide the cause."""
    if is_shortage(error):
        return MEMORY
    if isinstance(error, InvalidOutputError):
        return VALUES
    if isinstance(error, PackError) or any(word in str(error) for word in MISTAKES):
        return ""
    if isinstance(error, TypeError):  # what MPS raises for a dtype it lacks
        return KERNEL if any(word in str(error).lower() for word in ("float64", "backend")) else ""
    return KERNEL if isinstance(error, RuntimeError) else ""
