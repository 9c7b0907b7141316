"""Out-of-memory errors of each back end: by class, by number, or by wording."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..errors import PackError


class Wording(NamedTuple):
    """One back end's wording of out of memory, in lower case with blanks for "_", and its source."""

    text: str
    backend: str
    source: str


SHORTAGE = (
    Wording("out of memory", "all", "CUDACachingAllocator.cpp and MPSAllocator.mm of torch; cuda.h; dnnl_status_t"),
    Wording("outofmemory", "ROCm, MPS", "hipError_t; kIOGPUCommandBufferCallbackError*, MTLCommandBufferError*"),
    Wording("errormemoryallocation", "CUDA, ROCm", "cudaError_t; hip/hip_runtime_api.h, hipError_t"),
    Wording("alloc failed", "CUDA, ROCm", "status types of cuBLAS, cuSOLVER, cuSPARSE, cuFFT, cuDNN 8, and hip*"),
    Wording("status allocation failed", "CUDA, ROCm", "curandStatus_t; hiprandStatus_t"),
    Wording("status memory error", "ROCm", "rocblas_status, rocsparse_status"),
    Wording("host allocation failed", "CUDA", "cuDNN 9, cudnnStatus_t"),
    Wording("device allocation failed", "CUDA", "cuDNN 9, cudnnStatus_t"),
    Wording("nvml error memory", "CUDA", "nvml.h, nvmlReturn_t"),
    Wording("miopenstatusallocfailed", "ROCm", "MIOpen, miopenStatus_t"),
    Wording("out of device memory", "XPU", "Unified Runtime, UR_RESULT_ERROR_*, and Level Zero, ZE_RESULT_ERROR_*"),
    Wording("out of host memory", "XPU", "Unified Runtime, Level Zero and OpenCL, CL_OUT_OF_HOST_MEMORY"),
    Wording(" error out of resources", "XPU, ROCm", "UR_RESULT_ERROR_*; hsa_status_t, HSA_STATUS_ERROR_*"),
    Wording("cl out of resources", "XPU", "OpenCL, CL/cl.h"),
    Wording("mem object allocation failure", "XPU", "CL_MEM_OBJECT_ALLOCATION_FAILURE of OpenCL; ur_result_t"),
    Wording("invalid buffer size", "MPS", "aten/src/ATen/mps/MPSAllocator.mm: larger than Metal's maxBufferLength"),
    Wording("insufficient memory", "MPS", "Metal's own description of MTLCommandBufferErrorOutOfMemory"),
    Wording("kioreturnnomemory", "MPS", "IOKit, IOReturn.h"),
    Wording("resource exhausted", "XLA", "absl::StatusCode::kResourceExhausted"),
    Wording("can't allocate memory", "CPU", "c10/core/impl/alloc_cpu.cpp, DefaultCPUAllocator"),
    Wording("cannot allocate memory", "CPU", "strerror(ENOMEM) of the C library"),
    Wording("not enough memory", "CPU, DirectML", "c10/core/impl/alloc_cpu.cpp on Windows; E_OUTOFMEMORY"),
    Wording("could not allocate", "CPU, DirectML", "c10/core/CPUAllocator.cpp; torch-directml"),
    Wording("unable to allocate", "CPU", "numpy, _ArrayMemoryError"),
    Wording("bad alloc", "CPU, XPU", "std::bad_alloc of C++; oneapi::mkl::device_bad_alloc"),
    Wording("8007000e", "DirectML", "winerror.h, E_OUTOFMEMORY"),
    Wording("failed to allocate", "ROCm, XPU", "hipMalloc in MIOpen's logs; sycl::malloc_device"),
)
# A shortage or something else, which the device alone can tell: `failures.is_shortage` asks it.
UNSURE = (
    Wording("status not initialized", "CUDA, ROCm", "EleutherAI/lm-evaluation-harness#1689, haotian-liu/LLaVA#392"),
    Wording("hipblas status alloc failed when calling hipblascreate", "ROCm", "a broken install: ROCm/TheRock#1708"),
    Wording("could not create a memory object", "CPU, XPU", "oneDNN; a bad descriptor too"),
)
KERNEL_LIMIT = "out of resource: "  # Triton on shared memory or registers; Inductor puts "OutOfMemoryError" before it
# ERROR_ARENA_TRASHED, _NOT_ENOUGH_MEMORY, _INVALID_BLOCK, _OUTOFMEMORY, _NO_SYSTEM_RESOURCES, _COMMITMENT_LIMIT and
# _NOT_ENOUGH_QUOTA of winerror.h. Their texts are in the user's language (Comfy-Org/ComfyUI#6606), and CPython makes
# EINVAL of three of them (PC/errmap.h).
WINDOWS = (7, 8, 9, 14, 1450, 1455, 1816)
NUMBER = re.compile(r"\[winerror (\d+)\]|\(os error (\d+)\)")  # CPython's and Rust's ways to write one


def words_of(error: BaseException) -> str:
    """The text of an error as the rows have it."""
    return str(error).lower().replace("_", " ").replace("`", "")


def has_row(error: BaseException, rows: Sequence[Wording]) -> bool:
    """True if ``error``, of a class that back ends raise, has the words of one of ``rows``."""
    text = words_of(error)
    raised = isinstance(error, (RuntimeError, OSError)) and KERNEL_LIMIT not in text
    return raised and any(row.text in text for row in rows)


def says_shortage(error: BaseException) -> bool:
    """True if ``error`` reports out of memory in any back end's way."""
    if isinstance(error, PackError):
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return _is_of_windows(error) or has_row(error, SHORTAGE)


def _is_of_windows(error: BaseException) -> bool:
    """True if ``error`` has one of Windows' numbers; other systems give the small ones to other errors."""
    text = words_of(error)
    for python, rust in NUMBER.findall(text):
        if int(python or rust) in WINDOWS and (python or os.strerror(int(rust)).lower() not in text):
            return True
    return getattr(error, "winerror", None) in WINDOWS
