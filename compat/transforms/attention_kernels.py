"""Attention kernels that a user can choose: a table of what each needs, and a trial of each on this device."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from ..device.execution import current, placed, to_host
from ..device.facts import DeviceFacts, device_fault, gone, version_of
from ..device.failures import is_shortage
from ..device.quirks import within
from ..errors import MissingPackageError, PackError, UnsupportedError, first_line
from ..packages import imported
from .attention_chunks import WORKED_ON, chunked

HALF = (torch.float16, torch.bfloat16)
ANY = (torch.float32, *HALF)
BACKENDS = {f"native_{kind}": f"{kind.upper()}_ATTENTION" for kind in ("cudnn", "efficient", "flash")}
FOREIGN = "other"
TRY_TOKENS = 80  # of a trial: no multiple of a kernel's tile of 32, 64 or 128
EXACT_SHARE, LOSSY_SHARE = 16, 0.1  # errors allowed: in eps of the dtype; of 8-bit products, absolute
LOSSY = ("sage", "kitchen_int8")  # the kernels of the choice sage
SWITCHES = threading.RLock()  # of torch's kernels, which are of the process: two threads would put back each other's


@dataclass(frozen=True, slots=True)
class KernelNeed:
    """The needs of one kernel on one kind of device."""

    choice: str
    backends: tuple[str, ...]  # FOREIGN for devices of unknown kind
    capability: tuple[int, int] = (0, 0)  # 10 x the compute capability: from, and below; (0, 0) for any device
    package: str = ""  # as pip names it; empty for torch's own
    module: str = ""  # as Python imports it
    triton_below: str = ""  # the first Triton version that no longer works
    dtypes: tuple[torch.dtype, ...] = ANY
    widths: tuple[int, ...] = ()  # of heads; empty means any
    source: str = ""  # page that says so

    def place(self) -> str:
        """The devices that it runs on, in words."""
        if self.capability == (0, 0):
            return " or ".join("an AMD GPU (rocm)" if backend == "rocm" else backend for backend in self.backends)
        low, high = self.capability
        named = f"an NVIDIA GPU of sm{low}{' and newer' if high >= NEWEST else ''}"
        return f"{named} with Triton below {self.triton_below}" if self.triton_below else named


NEWEST = 1000
_SAGE: dict[str, Any] = {"package": "sageattention", "module": "sageattention", "widths": (64, 96, 128)}
_SAGE_TURING = "thu-ml/SageAttention#197, triton-lang/triton-windows#28: Triton 3.3 dropped Turing"
_KITCHEN: dict[str, Any] = {"package": "comfy-kitchen", "module": "comfy_kitchen"}
_FLASH: dict[str, Any] = {"package": "flash-attn", "module": "flash_attn", "dtypes": HALF}
_XFORMERS: dict[str, Any] = {"package": "xformers", "module": "xformers.ops"}
_FLASH_PAGE, _XFORMERS_PAGE = "Dao-AILab/flash-attention", "facebookresearch/xformers"
_AOTRITON, _SDP = "AOTriton in torch's ROCm builds", "torch SDPBackend."
NEEDS: tuple[KernelNeed, ...] = (
    KernelNeed("native_cudnn", ("cuda",), (80, NEWEST), dtypes=HALF, source=f"{_SDP}CUDNN_ATTENTION"),
    KernelNeed("native_efficient", ("cuda",), (50, NEWEST), source=f"{_SDP}EFFICIENT_ATTENTION"),
    KernelNeed("native_efficient", ("rocm",), source=_AOTRITON),
    KernelNeed("native_flash", ("cuda",), (80, NEWEST), dtypes=HALF, source=f"{_SDP}FLASH_ATTENTION"),
    KernelNeed("native_flash", ("rocm",), dtypes=HALF, source=_AOTRITON),
    KernelNeed("native_flash", ("cpu", "xpu", FOREIGN), source=f"{_SDP}FLASH_ATTENTION"),
    KernelNeed("sage", ("cuda",), (80, NEWEST), dtypes=HALF, source="thu-ml/SageAttention README", **_SAGE),
    KernelNeed("sage", ("cuda",), (75, 76), triton_below="3.3", dtypes=HALF[:1], source=_SAGE_TURING, **_SAGE),
    KernelNeed("sage", ("rocm",), dtypes=HALF, **_SAGE),
    # on AMD it ends the process of some (Comfy-Org/comfy-kitchen#110), so it is not asked there
    KernelNeed("kitchen_int8", ("cuda",), (75, NEWEST), dtypes=HALF, source="Comfy-Org/comfy-kitchen", **_KITCHEN),
    KernelNeed("flash", ("cuda",), (80, NEWEST), source=_FLASH_PAGE, **_FLASH),
    KernelNeed("flash", ("rocm",), source=_FLASH_PAGE, **_FLASH),
    KernelNeed("xformers", ("cuda",), (50, NEWEST), source=_XFORMERS_PAGE, **_XFORMERS),
    KernelNeed("xformers", ("rocm",), dtypes=HALF, source=_XFORMERS_PAGE, **_XFORMERS),
)


def require_usable(choice: str, facts: DeviceFacts, dtype: torch.dtype, head_width: int, quiet: bool = False) -> None:
    """Raise UnsupportedError or MissingPackageError unless the kernel is right here; ``quiet`` tries nothing out."""
    need, places = _row_for(choice, facts)
    if need is None:
        found = f"attention {choice!r} on {facts.name} ({facts.arch or facts.backend})"
        raise UnsupportedError(found, expected=places, fix="Choose auto.")
    _require_packages(need, facts)
    name = str(dtype).removeprefix("torch.")
    if dtype not in need.dtypes or (need.widths and head_width not in need.widths):
        dtypes = " or ".join(str(one).removeprefix("torch.") for one in need.dtypes)
        widths = f", heads of {' or '.join(map(str, need.widths))}" if need.widths else ""
        found = f"attention {choice!r} in {name} with heads of {head_width}"
        raise UnsupportedError(found, expected=f"{dtypes}{widths}", fix="Choose auto, or another precision.")
    if quiet:
        return
    try:
        error, bound = _trial_error(choice, facts.device, dtype, head_width)
    except PackError:
        raise
    except Exception as failure:  # a kernel that does not fit this device fails in as many ways as there are kernels
        if is_shortage(failure):  # which says nothing of the kernel
            raise
        if silent := device_fault(facts.device):
            raise gone(facts.device, silent, facts.name) from failure
        found = f"attention {choice!r} fails on {facts.name} ({first_line(failure)})"
        raise UnsupportedError(found, expected="a kernel that works here", fix="Choose auto.") from failure
    if not error <= bound:
        found = f"attention {choice!r} is wrong by {error:.2g} on {facts.name} in {name}"
        raise UnsupportedError(found, expected=f"at most {bound:.2g}", fix="Choose auto.")


def kernels_for(choice: str, facts: DeviceFacts, dtype: torch.dtype, head_width: int, quiet: bool = False) -> list[str]:
    """The kernels of a choice that are right on the device; where there is none, raises the first one's error."""
    usable, errors = [], []
    for kernel in LOSSY if choice == LOSSY[0] else (choice,):
        try:
            require_usable(kernel, facts, dtype, head_width, quiet)
            usable.append(kernel)
        except PackError as error:
            errors.append(error)
    if not usable:
        raise errors[0]
    return usable


def reason_against(choice: str, facts: DeviceFacts) -> str:
    """The reason why a kernel cannot run on this device, without trying it; empty for none, and for such as auto."""
    need, places = _row_for(choice, facts)
    if need is None:
        return f"needs {places}" if places else ""
    return f"needs the package {need.package}" if need.package and not version_of(need.package) else ""


def _row_for(choice: str, facts: DeviceFacts) -> tuple[KernelNeed | None, str]:
    """The row of :data:`NEEDS` for a kernel on this device, None for none; and the devices it runs on, in words."""
    rows = [need for need in NEEDS if need.choice == choice]
    places = " or ".join(dict.fromkeys(need.place() for need in rows))
    return next((need for need in rows if _runs_on(need, facts)), None), places


def _runs_on(need: KernelNeed, facts: DeviceFacts) -> bool:
    """True where ``need`` is for the device of ``facts``, whose ``arch`` is such as sm_90 on NVIDIA."""
    if facts.backend not in need.backends and not (FOREIGN in need.backends and facts.foreign):
        return False
    low, high = need.capability
    match = re.fullmatch(r"sm_?(\d+)a?", facts.arch)
    return need.capability == (0, 0) or low <= (int(match[1]) if match else 0) < high


def _require_packages(need: KernelNeed, facts: DeviceFacts) -> None:
    """Raise MissingPackageError unless the package and the Triton that ``need`` names are installed and load."""
    if not need.package:
        return
    if not version_of(need.package):
        found, where = f"attention {need.choice!r} without the package {need.package!r}", "that runs ComfyUI or anygpu"
        fix = f"Install it into the Python {where}, following its instructions for {facts.name}, or choose auto."
        raise MissingPackageError(found, expected=f"{need.package}, which runs it", fix=fix)
    triton = next(filter(None, map(version_of, ("triton", "triton-windows"))), "")
    if need.triton_below and not (triton and within(triton, "", need.triton_below)):
        found = f"attention {need.choice!r} on {facts.name} ({facts.arch}) with Triton {triton or 'missing'}"
        expected = f"Triton below {need.triton_below}, the last that runs on {facts.arch}"
        raise MissingPackageError(found, expected=expected, fix="Install that Triton, or choose auto.")
    imported(need.module)


def _trial_error(choice: str, device: torch.device, dtype: torch.dtype, head_width: int) -> tuple[float, float]:
    """The largest error of a kernel on small random operands, and the largest that is allowed."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, TRY_TOKENS, head_width, generator=generator).to(dtype) for _ in range(3))
    with current(device):  # some kernels launch on the current one, and SageAttention's changes it
        result = to_host(EXPLICIT[choice](*placed([query, key, value], device))).to(WORKED_ON)
    # The reference is the host's: a device with a broken kernel may have broken products too.
    error = float((result - chunked(query, key, value).to(WORKED_ON)).abs().max())
    # Values are normal numbers in sums whose weights add up to 1: a few eps of the largest; 8-bit products: a tenth.
    return error, LOSSY_SHARE if choice in LOSSY else EXACT_SHARE * torch.finfo(dtype).eps


def _by_package(module: str, name: str, *operands: torch.Tensor) -> torch.Tensor:
    """Attention (B, H, N, D) by a package's function ``name``, which takes and returns (B, N, H, D)."""
    result: torch.Tensor = getattr(imported(module), name)(*(tensor.transpose(1, 2) for tensor in operands))
    return result.transpose(1, 2)


def _by_torch(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Torch's attention by one of its kernels, the SDPBackend of that name; others are allowed again afterwards."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    alone = nullcontext() if torch.compiler.is_compiling() else SWITCHES
    with alone, sdpa_kernel([getattr(SDPBackend, backend)]):
        return functional.scaled_dot_product_attention(q, k, v)


EXPLICIT: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {  # (B, H, N, D) each
    **{name: partial(_by_torch, backend) for name, backend in BACKENDS.items()},
    "sage": lambda *operands: imported("sageattention").sageattn(*operands, tensor_layout="HND", is_causal=False),
    "kitchen_int8": lambda *operands: imported("comfy_kitchen").int8_attention(*operands),
    "flash": partial(_by_package, "flash_attn", "flash_attn_func"),
    "xformers": partial(_by_package, "xformers.ops", "memory_efficient_attention"),
}
