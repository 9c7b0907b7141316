"""Machines nobody here owns: injected facts, and faults on the simulated accelerator that a test switches on.

    from simulated import profiles

    with profiles.on("turing") as profile:
        loaded = load(LoadRequest(path, device=profile.facts, state=tmp_path))

`profile.facts` goes where a device goes. No code outside the tests asks which profile it is. `profile.hits[fault]`
tells how often a fault was met, so that a test can show that it was there, and `profile.stalls` counts copies to the
device from pages of a mapped file.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from anygpu.compat.device.facts import DeviceFacts, facts_for

from . import accelerator

GIBIBYTE = 1024**3
CONVOLUTIONS = ("aten::convolution*", "aten::slow_conv*", "aten::conv_depthwise3d", "aten::_convolution*")
ALLOCATING = (
    *CONVOLUTIONS, "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::_softmax", "aten::cat",
    "aten::add", "aten::mul", "aten::copy_", "aten::im2col", "aten::*replication_pad3d", "aten::*scaled_dot_product*",
    "aten::clone",
)  # fmt: skip
PADDED_PIXELS = 65536  # MPS: the smallest frame that a pad in time corrupts
RIGHT_CHANNELS = frozenset({4})  # MPS: the one channel count of our models that its contiguous Conv3d gets right
ABORT_PIXELS = 512 * 512  # gfx1151: frames of a Conv3d beyond which the process would die

WEIGHT_FILES = (".safetensors", ".gguf", ".pt", ".bin")

Fault = tuple[str, accelerator.Before | None, accelerator.After | None]


@dataclass
class Profile:
    """One machine: its facts, and what its faults have met so far."""

    name: str
    facts: DeviceFacts
    device: torch.device
    hits: dict[str, int] = field(default_factory=dict)
    stalls: int = 0

    def met(self, fault: str) -> None:
        self.hits[fault] = self.hits.get(fault, 0) + 1


# ---- faults --------------------------------------------------------------------------------------


def _tensors(values: list[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def refused(
    profile: Profile, name: str, patterns: tuple[str, ...], when: Callable[[list], bool], text: str
) -> list[Fault]:
    """Operators that raise `text` when their arguments are such."""

    def before(op: str, arguments: list) -> None:
        if when(arguments):
            profile.met(name)
            raise RuntimeError(text)

    return [(pattern, before, None) for pattern in patterns]


def spoiled(
    profile: Profile, name: str, patterns: tuple[str, ...], when: Callable[[list], bool], value: float
) -> list[Fault]:
    """Operators whose floating results become `value` when their arguments are such."""

    def after(op: str, arguments: list, results: list) -> None:
        if when(arguments):
            profile.met(name)
            for result in _tensors(results):
                if result.is_floating_point():
                    result.fill_(value)

    return [(pattern, None, after) for pattern in patterns]


def _of(dtype: torch.dtype) -> Callable[[list], bool]:
    return lambda arguments: any(tensor.dtype is dtype for tensor in _tensors(arguments))


def _in_5d(arguments: list) -> bool:
    return any(tensor.ndim == 5 for tensor in _tensors(arguments)[:2])


def _copies(
    profile: Profile, name: str, when: Callable[[torch.Tensor, torch.Tensor], bool], value: float
) -> list[Fault]:
    """Copies, the casts among them, whose target becomes `value`."""

    def after(op: str, arguments: list, results: list) -> None:
        target, source = _tensors(arguments)[:2]
        if when(target, source):
            profile.met(name)
            target.fill_(value)

    return [("aten::copy_", None, after), ("aten::_copy_from", None, after)]


def _no_bf16_convolution(profile: Profile) -> list[Fault]:
    text = "slow_conv3d_forward: GET was unable to find an engine to execute this computation in BFloat16"
    return refused(profile, "bf16 convolution", CONVOLUTIONS, _of(torch.bfloat16), text)


def _fp16_convolution_nan(profile: Profile) -> list[Fault]:
    return spoiled(profile, "fp16 convolution", CONVOLUTIONS, _of(torch.float16), math.nan)


def _no_conv3d(profile: Profile) -> list[Fault]:
    return refused(profile, "conv3d", CONVOLUTIONS, _in_5d, "failed to legalize operation: convolution of 5-D input")


def _bf16_to_fp32_zeros(profile: Profile) -> list[Fault]:
    def when(target: torch.Tensor, source: torch.Tensor) -> bool:
        return source.device.type == accelerator.NAME and (source.dtype, target.dtype) == (
            torch.bfloat16,
            torch.float32,
        )

    return _copies(profile, "bf16 to fp32", when, 0.0)


def _bf16_to_host_corrupt(profile: Profile) -> list[Fault]:
    def when(target: torch.Tensor, source: torch.Tensor) -> bool:
        leaves = source.device.type == accelerator.NAME and target.device.type == "cpu"
        return leaves and target.dtype is torch.bfloat16

    return _copies(profile, "bf16 to the host", when, 0.0)


def _large_conv3d_aborts(profile: Profile) -> list[Fault]:
    def large(arguments: list) -> bool:
        return _in_5d(arguments) and math.prod(_tensors(arguments)[0].shape[-2:]) >= ABORT_PIXELS

    return refused(profile, "large conv3d", CONVOLUTIONS, large, "Fatal Python error: Aborted (MIOpen conv3d)")


def _bf16_convolution_zeros(profile: Profile) -> list[Fault]:
    """What makes a VAE encode give zeros."""
    return spoiled(profile, "bf16 convolution", CONVOLUTIONS, _of(torch.bfloat16), 0.0)


def _mapped_copies_stall(profile: Profile) -> list[Fault]:
    def before(op: str, arguments: list) -> None:
        for tensor in _tensors(arguments):
            if tensor.device.type == "cpu" and tensor.data_ptr() and is_mapped(tensor):
                profile.stalls += 1
                profile.met("mapped copy")

    return [("aten::copy_", before, None), ("aten::_copy_from", before, None)]


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a host tensor's first byte lies in pages of a mapped weight file."""
    return file_behind(tensor).endswith(WEIGHT_FILES)


def file_behind(tensor: torch.Tensor) -> str:
    """The file in whose mapped pages a host tensor's first byte lies; empty for ordinary memory."""
    address = tensor.data_ptr()
    with Path("/proc/self/maps").open(encoding="utf-8") as table:
        for line in table:
            span, _, _, _, inode, *path = line.split(maxsplit=5)
            first, last = (int(end, 16) for end in span.split("-"))
            if first <= address < last:
                return path[0].strip() if inode != "0" and path else ""
    return ""


def _no_float64(profile: Profile) -> list[Fault]:
    text = "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64"
    if profile.facts.backend == "xpu":
        text = "Required aspect fp64 is not supported on the device"
    return refused(
        profile, "float64", ("aten::*copy*", "aten::mul", "aten::add", "aten::fill_"), _wants(torch.float64), text
    )


def _no_float8(profile: Profile) -> list[Fault]:
    text = "Trying to convert Float8_e4m3fn to the MPS backend but it does not have support for that dtype"
    return refused(profile, "float8", ("aten::*copy*",), _wants("torch.float8"), text)


def _wants(dtype: object) -> Callable[[list], bool]:
    """True of a tensor on the device whose dtype's name begins so."""

    def wants(arguments: list) -> bool:
        there = (t for t in _tensors(arguments) if t.device.type == accelerator.NAME)
        return any(str(t.dtype).startswith(str(dtype)) for t in there)

    return wants


def _contiguous_conv3d_wrong(profile: Profile) -> list[Fault]:
    def after(op: str, arguments: list, results: list) -> None:
        x = _tensors(arguments)[0]
        if not _in_5d(arguments) or x.shape[1] in RIGHT_CHANNELS:
            return
        if x.is_contiguous(memory_format=torch.channels_last_3d) and not x.is_contiguous():
            return
        profile.met("contiguous conv3d")
        for result in _tensors(results):
            result.mul_(0.5)

    return [(pattern, None, after) for pattern in CONVOLUTIONS]


def _sliced_weight_crashes(profile: Profile) -> list[Fault]:
    def sliced(arguments: list) -> bool:
        weights = [t for t in _tensors(arguments)[1:2] if t.ndim == 5]
        plain = (torch.contiguous_format, torch.channels_last_3d)
        return any(not any(w.is_contiguous(memory_format=layout) for layout in plain) for w in weights)

    return refused(profile, "sliced weight", CONVOLUTIONS, sliced, "Segmentation fault (oneDNN conv3d, strided weight)")


def _fp16_range(profile: Profile) -> list[Fault]:
    """What a real GPU does by itself and the CPU's kernels do too: beyond 65504 is infinite. Counted, not changed."""

    def after(op: str, arguments: list, results: list) -> None:
        for result in _tensors(results):
            if result.dtype is torch.float16 and not bool(result.float().isfinite().all()):
                profile.met("fp16 overflow")

    return [("aten::addmm", None, after), ("aten::mm", None, after), ("aten::add", None, after)]


def _capped(profile: Profile, allocation_bytes: int) -> list[Fault]:
    """A device that refuses any one buffer above `allocation_bytes`, whatever is free: results are measured."""

    def after(op: str, arguments: list, results: list) -> None:
        for result in _tensors(results):
            if result.untyped_storage().nbytes() > allocation_bytes:
                profile.met("allocation")
                raise torch.OutOfMemoryError(f"XPU out of memory: one allocation above {allocation_bytes} bytes")

    return [(pattern, None, after) for pattern in ALLOCATING]


@contextlib.contextmanager
def _time_pad_corrupts(profile: Profile) -> Iterator[None]:
    """Torch takes `F.pad` apart before a device sees it, so the operator itself gets a faulty kernel for the block."""

    def padded(x: torch.Tensor, pad: list[int], value: float = 0) -> torch.Tensor:
        pairs = [(0, 0)] * (x.ndim - len(pad) // 2) + list(zip(pad[-2::-2], pad[::-2], strict=True))
        sizes = [size + before + after for size, (before, after) in zip(x.shape, pairs, strict=True)]
        result = x.new_full(sizes, value)
        result[tuple(slice(before, before + size) for size, (before, _) in zip(x.shape, pairs, strict=True))] = x
        if x.ndim == 5 and any(pairs[2]) and x.shape[-1] * x.shape[-2] >= PADDED_PIXELS:
            profile.met("time pad")
            result.fill_(math.nan if x.dtype is torch.float16 else 0.0)
        return result

    library = torch.library.Library("aten", "IMPL")
    library.impl("constant_pad_nd", padded, "PrivateUse1")
    try:
        yield
    finally:
        library._destroy()


# ---- machines ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """How a profile is made: its facts without the device, its faults (hooks and blocks), its largest allocation."""

    facts: dict[str, Any]
    faults: tuple[Callable[[Profile], list[Fault]], ...] = ()
    blocks: tuple[Callable[[Profile], contextlib.AbstractContextManager[None]], ...] = ()
    allocation_bytes: int = 0


def _nvidia(name: str, arch: str, **more: Any) -> dict[str, Any]:
    old = int(arch[2:]) < 80
    versions = {"torch": "2.11.0", "cuda": "12.8", "cudnn": "9.19.0", "system": "Linux", "driver": "570.124"}
    return {
        "backend": "cuda", "arch": arch, "arch_class": "cuda-old" if old else "cuda-sm80+", "name": name,
        "total_bytes": 8 * GIBIBYTE, "driver": "570.124", "compiled": ("sm_75", "sm_80", "sm_86", "sm_90"),
        "emulated": ("bf16",) if old else (), "versions": versions, **more,
    }  # fmt: skip


def _radeon(name: str, arch: str, rocm: str = "7.2", **more: Any) -> dict[str, Any]:
    versions = {"torch": "2.11.0", "rocm": rocm, "miopen": "3.5.1", "system": "Linux", "kernel": "7.0.12"}
    return {
        "backend": "rocm", "arch": arch, "arch_class": "rocm", "name": name, "total_bytes": 16 * GIBIBYTE,
        "compiled": (arch,), "versions": versions, **more,
    }  # fmt: skip


MACHINES: dict[str, Machine] = {
    "turing": Machine(_nvidia("NVIDIA GeForce RTX 2080 Ti", "sm75"), (_no_bf16_convolution, _fp16_range)),
    "gtx16xx": Machine(_nvidia("NVIDIA GeForce GTX 1660", "sm75"), (_no_bf16_convolution, _fp16_convolution_nan)),
    "no-conv3d": Machine(
        {"backend": "acc", "arch": "", "arch_class": "other", "name": "a device without Conv3d"}, (_no_conv3d,)
    ),
    "gfx1151": Machine(
        _radeon("AMD Radeon 8060S", "gfx1151", unified=True, total_bytes=64 * GIBIBYTE),
        (
            _bf16_to_fp32_zeros, _bf16_to_host_corrupt, _bf16_convolution_zeros, _large_conv3d_aborts,
            _mapped_copies_stall,
        ),
    ),
    "gfx1201": Machine(_radeon("AMD Radeon RX 9070 XT", "gfx1201"), (_mapped_copies_stall,)),
    "mps-like": Machine(
        {
            "backend": "mps", "arch": "arm64", "arch_class": "mps", "name": "Apple GPU", "unified": True,
            "total_bytes": 16 * GIBIBYTE, "versions": {"torch": "2.13.0", "macos": "15.4", "system": "Darwin"},
        },
        (_no_float64, _no_float8, _contiguous_conv3d_wrong),
        (_time_pad_corrupts,),
    ),
    "xpu-like": Machine(
        {
            "backend": "xpu", "arch": "", "arch_class": "xpu", "name": "Intel Arc A770", "total_bytes": 16 * GIBIBYTE,
            "versions": {"torch": "2.11.0", "system": "Windows"},
        },
        (_sliced_weight_crashes, _no_float64),
        allocation_bytes=4 * GIBIBYTE,
    ),
}  # fmt: skip
PROFILES = tuple(MACHINES)


def facts_of(name: str, device: torch.device | str = "cpu") -> DeviceFacts:
    """The facts of a profile, on any device: no fault is switched on."""
    bare = facts_for("cpu")
    plain = {
        "total_bytes": 8 * GIBIBYTE,
        "unified": False,
        "driver": "",
        "versions": {"torch": "2.11.0", "system": "Linux"},
    }
    given = {**plain, **MACHINES[name].facts, "device": torch.device(device)}
    return replace(bare, **given, torch_version=given["versions"]["torch"])


@contextlib.contextmanager
def on(name: str, without: tuple[str, ...] = (), allocation_bytes: int = 0) -> Iterator[Profile]:
    """The simulated accelerator as one of :data:`PROFILES`, for the length of a block.

    Args:
        without: names of faults to leave out, such as `_bf16_to_fp32_zeros`.
        allocation_bytes: replaces the machine's largest allocation, so that a small test can meet it.
    """
    machine = MACHINES[name]
    with accelerator.fresh() as device, contextlib.ExitStack() as faults:
        profile = Profile(name, facts_of(name, device), device)
        hooks = [hook for fault in machine.faults if fault.__name__ not in without for hook in fault(profile)]
        cap = allocation_bytes or machine.allocation_bytes
        for pattern, before, after in hooks + (_capped(profile, cap) if cap else []):
            with contextlib.suppress(ValueError):  # an operator that this torch does not have
                faults.enter_context(accelerator.hook(pattern, before, after))
        for block in machine.blocks:
            if block.__name__ not in without:
                faults.enter_context(block(profile))
        yield profile
