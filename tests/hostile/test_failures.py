"""Shortage of memory in each back end's own words is shortage; other failures are not."""

from __future__ import annotations

import errno

import pytest
import torch
from anygpu.compat.device.failures import KERNEL, MEMORY, SHORTAGE, failure_kind
from anygpu.compat.errors import UnsupportedError

MESSAGES = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB",
    "HIP out of memory. Tried to allocate 20.00 MiB",
    "MPS backend out of memory (MPS allocated: 17.93 GB, other allocations: 0 bytes, max allowed: 18.13 GB)",
    "Invalid buffer size: 24.00 GiB",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "HIP error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "miopenStatusAllocFailed",
    "hipErrorOutOfMemory",
    "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 1.00G",
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9",
    "[Errno 12] Cannot allocate memory",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes.",
)


@pytest.mark.parametrize("message", MESSAGES)
def test_shortage_in_the_words_of_a_back_end(message: str) -> None:
    assert failure_kind(RuntimeError(message)) == MEMORY


def test_the_error_that_torch_raises_here() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, dtype=torch.uint8)
    assert failure_kind(caught.value) == MEMORY


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "x"), torch.OutOfMemoryError("x")])
def test_shortage_by_class(error: BaseException) -> None:
    assert failure_kind(error) == MEMORY


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("slow_conv3d_forward: not implemented for 'BFloat16'"), KERNEL),
        (NotImplementedError("Could not run 'aten::conv3d' with arguments from the 'XPU' backend"), KERNEL),
        (RuntimeError("Expected all tensors to be on the same device, but found at least two"), ""),
        (UnsupportedError("out of memory", expected="room", fix="Buy some."), ""),
        (
            TypeError("Cannot convert a MPS Tensor to float64 dtype"),
            KERNEL,
        ),
        (TypeError("forward() got an unexpected keyword argument"), ""),
        (OSError(errno.ENOENT, "x"), ""),
        (ValueError("out of memory"), ""),
    ],
)
def test_other_failures(error: BaseException, kind: str) -> None:
    assert failure_kind(error) == kind


def test_each_wording_is_needed_and_sourced() -> None:
    for row in SHORTAGE:
        assert row.text == row.text.lower() and row.backend and row.source
        assert not any(other.text in row.text for other in SHORTAGE if other is not row), row.text
