"""Why an operation failed: memory ran out, a kernel is missing or broken, values are wrong, or it is our mistake."""

from __future__ import annotations

import errno
from typing import NamedTuple

import torch

from ..errors import PackError
from ..output_check import InvalidOutputError

MEMORY, KERNEL, VALUES = "memory", "kernel", "values"
DEVICE_ERRORS = (RuntimeError, MemoryError, TypeError)  # what back ends raise for shortage and for missing kernels


class Wording(NamedTuple):
    """How one back end words a shortage of memory, in lower case, and where that is stated."""

    text: str
    backend: str
    source: str


SHORTAGE = (
    Wording("out of memory", "CUDA, ROCm, MPS, XPU", "CUDACachingAllocator.cpp and MPSAllocator.mm of torch"),
    Wording("hiperroroutofmemory", "ROCm", "hip/hip_runtime_api.h, hipError_t"),
    Wording("cublas_status_alloc_failed", "CUDA", "cuBLAS, cublasStatus_t; aten/src/ATen/cuda/CUDABlas.cpp"),
    Wording("hipblas_status_alloc_failed", "ROCm", "hipBLAS, hipblasStatus_t"),
    Wording("cudnn_status_alloc_failed", "CUDA", "cuDNN 8, cudnnStatus_t; replaced by the next in cuDNN 9"),
    Wording("cudnn_status_internal_error_host_allocation_failed", "CUDA", "cuDNN 9, cudnnStatus_t"),
    Wording("cudnn_status_internal_error_device_allocation_failed", "CUDA", "cuDNN 9, cudnnStatus_t"),
    Wording("miopenstatusallocfailed", "ROCm", "MIOpen, miopenStatus_t"),
    Wording("out_of_device_memory", "XPU", "Unified Runtime, UR_RESULT_ERROR_*, and Level Zero, ZE_RESULT_ERROR_*"),
    Wording("out_of_host_memory", "XPU", "Unified Runtime, UR_RESULT_ERROR_*, and Level Zero, ZE_RESULT_ERROR_*"),
    Wording("out_of_resources", "XPU", "Unified Runtime, UR_RESULT_ERROR_OUT_OF_RESOURCES"),
    Wording("invalid buffer size", "MPS", "aten/src/ATen/mps/MPSAllocator.mm: larger than Metal's maxBufferLength"),
    Wording("resource_exhausted", "XLA", "absl::StatusCode::kResourceExhausted"),
    Wording("can't allocate memory", "CPU", "c10/core/impl/alloc_cpu.cpp, DefaultCPUAllocator"),
    Wording("cannot allocate memory", "CPU", "strerror(ENOMEM) of the C library"),
    Wording("not enough memory", "CPU, DirectML", "c10/core/impl/alloc_cpu.cpp on Windows; E_OUTOFMEMORY"),
    Wording("could not allocate", "CPU, DirectML", "c10/core/CPUAllocator.cpp; torch-directml"),
    Wording("failed to allocate", "ROCm, XPU", "hipMalloc in MIOpen's logs; sycl::malloc_device"),
)
MISTAKES = ("same device", "should be the same")  # another dtype or device would only hide them


def is_shortage(error: BaseException) -> bool:
    """Whether ``error`` says, in any back end's words, that memory ran out."""
    if isinstance(error, PackError):
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    text = str(error).lower()
    return isinstance(error, (RuntimeError, OSError)) and any(row.text in text for row in SHORTAGE)


def failure_kind(error: BaseException) -> str:
    """``memory``, ``kernel``, ``values``, or empty where trying another way would only hide the cause."""
    if is_shortage(error):
        return MEMORY
    if isinstance(error, InvalidOutputError):
        return VALUES
    if isinstance(error, PackError) or any(word in str(error) for word in MISTAKES):
        return ""
    if isinstance(error, TypeError):  # what MPS raises for a dtype it lacks
        return KERNEL if any(word in str(error).lower() for word in ("float64", "backend")) else ""
    return KERNEL if isinstance(error, RuntimeError) else ""
