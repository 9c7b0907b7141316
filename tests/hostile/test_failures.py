"""Shortage of memory in each back end's own words is shortage; other failures are not."""

import errno
from pathlib import Path

import pytest
import torch
from anygpu.compat.checkpoints.headers import unreadable
from anygpu.compat.device import failures
from anygpu.compat.device.failures import KERNEL, MEMORY, NEARLY_FULL, failure_kind
from anygpu.compat.device.shortage import SHORTAGE, UNSURE
from anygpu.compat.errors import UnsupportedError, parts_of
from safetensors import SafetensorError

from hostile.words import MESSAGES

# What sounds like it, and is a kernel that cannot run here, or a device that failed.
KERNELS = (
    "out of resource: shared memory, Required: 163840, Hardware limit: 101376. Reducing block sizes may help.",
    "No valid triton configs. OutOfResources: out of resource: shared memory, Required: 163840",
    "No valid triton configs. OutOfMemoryError: out of resource: triton_mm Required: 264224 Hardware limit: 232448",
    "CUDA error: an illegal memory access was encountered",
    "HIP error: hipErrorIllegalAddress",
    "CUDA error: operation not permitted when stream is capturing",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
    "cudaErrorLaunchOutOfResources: too many resources requested for launch",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`",
    "cuDNN error: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED",
    "Bad address (os error 14)",
    "Exec format error (os error 8)",
)
NOT_INITIALIZED = (
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "HIP error: HIPBLAS_STATUS_NOT_INITIALIZED when calling `hipblasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
)
CREATE = "HIP error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"


@pytest.mark.parametrize("message", MESSAGES)
def test_shortage_in_the_words_of_a_back_end(message: str) -> None:
    for kind in (RuntimeError, torch.OutOfMemoryError, torch.AcceleratorError, OSError, MemoryError):
        assert failure_kind(kind(message)) == MEMORY, kind


@pytest.mark.parametrize("message", KERNELS)
def test_what_sounds_like_a_shortage_is_a_kernel(message: str) -> None:
    assert failure_kind(RuntimeError(message)) == KERNEL


@pytest.mark.parametrize("number", [7, 8, 9, 14, 1450, 1455, 1816])
def test_windows_has_numbers_of_its_own(number: int) -> None:
    error = OSError(errno.EINVAL, "语言")
    assert failure_kind(error) == ""
    error.winerror = number  # type: ignore[attr-defined]
    assert failure_kind(error) == MEMORY
    for kind in (OSError, RuntimeError, ImportError, SafetensorError):
        assert failure_kind(kind(f"[WinError {number}] 语言")) == MEMORY, kind
        assert failure_kind(kind(f"语言 (os error {number})")) == MEMORY, kind


@pytest.mark.parametrize(
    ("free", "fault", "full"),
    [(NEARLY_FULL - 1, "", True), (NEARLY_FULL, "", False), (0, "an illegal memory access", False)],
)
def test_unsure_words_ask_the_device(monkeypatch: pytest.MonkeyPatch, free: int, fault: str, full: bool) -> None:
    monkeypatch.setattr(failures, "accelerators", lambda _: (torch.device("cuda", 0), torch.device("cuda", 1)))
    monkeypatch.setattr(failures, "device_fault", lambda device: fault if device.index == 1 else "")
    monkeypatch.setattr(failures, "free_bytes", lambda device: free if device.index == 1 else 2 * NEARLY_FULL)
    for message in (*NOT_INITIALIZED, CREATE):
        assert failure_kind(RuntimeError(message)) == (MEMORY if full else KERNEL), message


def test_unsure_words_decide_where_no_device_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "accelerators", lambda _: (torch.device("cuda", 0),))
    monkeypatch.setattr(failures, "device_fault", lambda _: "")
    monkeypatch.setattr(failures, "free_bytes", lambda _: None)
    assert failure_kind(RuntimeError(CREATE)) == MEMORY
    assert {failure_kind(RuntimeError(message)) for message in NOT_INITIALIZED} == {KERNEL}


@pytest.mark.parametrize(("free", "kind"), [(NEARLY_FULL - 1, MEMORY), (NEARLY_FULL, KERNEL)])
def test_onednn_is_asked_of_the_host(monkeypatch: pytest.MonkeyPatch, free: int, kind: str) -> None:
    monkeypatch.setattr(failures, "default_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(failures, "free_bytes", lambda _: free)
    assert failure_kind(RuntimeError("could not create a memory object")) == kind


def test_a_file_for_which_there_is_no_memory_is_not_blamed(tmp_path: Path) -> None:
    error = unreadable(tmp_path, OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert failure_kind(error) == MEMORY and {"found", "expected", "fix"} == parts_of(str(error)).keys()
    assert failure_kind(unreadable(tmp_path, OSError(errno.EACCES, "Permission denied"))) == ""


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
        (TypeError("Cannot convert a MPS Tensor to float64 dtype"), KERNEL),
        (TypeError("forward() got an unexpected keyword argument"), ""),
        (OSError(errno.ENOENT, "x"), ""),
        (ValueError("out of memory"), ""),
    ],
)
def test_other_failures(error: BaseException, kind: str) -> None:
    assert failure_kind(error) == kind


def test_each_wording_is_needed_and_sourced() -> None:
    for row in (*SHORTAGE, *UNSURE):
        assert "_" not in row.text and row.text == row.text.lower() and row.backend and row.source
        assert row in UNSURE or not any(other.text in row.text for other in SHORTAGE if other is not row), row.text
