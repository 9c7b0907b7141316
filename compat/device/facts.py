"""Facts about the device that computes. The only file that calls vendors' APIs."""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import platform
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, cast

import torch

from ..errors import UnsupportedError, first_line
from .shortage import says_shortage

log = logging.getLogger(__name__)
Value = TypeVar("Value")

MEBIBYTE, GIBIBYTE = 1024**2, 1024**3
PLENTY = 1 << 62  # bytes of host memory where the amount is unknown: nothing is refused for it
MOST_BYTES = 1 << 50  # that a device is believed to have
MOST_DEVICES = 128  # torch keeps the index of a device in a signed byte
VENDORS = ("cpu", "cuda", "rocm", "xpu", "mps", "xla")  # backends that this pack knows the facts of
CLOCKED = ("cuda", "xpu", "mps")  # torch device types on which a short timing tells kernels apart
PCI = "/sys/bus/pci/devices"
INTEGRATED = re.compile(r"Iris|UHD|HD Graphics|Arc\(TM\) (Graphics|(Pro )?\w+ GPU)|^Intel\(R\) Graphics$")
CLOCKS = ("multi_processor_count", "clock_rate", "memory_clock_rate", "memory_bus_width")
KERNEL_FILES = dict(cuda="/sys/module/nvidia/version", rocm="/sys/module/amdgpu/version", xpu="/sys/module/xe/version")
NVML = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
OWN_CGROUPS = "/proc/self/cgroup"  # a row each: number, controllers (none in version 2), path
CGROUPS = (  # controller, root, and the files of limit and use: version 2, then version 1
    ("", "/sys/fs/cgroup", "memory.max", "memory.current"),
    ("memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
HELD: dict[tuple[int, str], tuple[int, bool]] = {}  # of `execution.held`: number of open blocks, the value before them
KITCHEN = "comfy-kitchen"
TRITONS = ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu")


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device as plain values, so that a test can stand in any machine without owning it."""

    device: torch.device
    backend: str  # ``cuda``, ``rocm``, ``xpu``, ``mps``, ``cpu``, ``xla``, or what a plug-in calls itself
    arch: str  # ``sm75``, ``gfx1151``; empty where the vendor has none
    arch_class: str  # the key of the precision table
    name: str
    total_bytes: int
    torch_version: str
    unified: bool = False  # host and device share one memory
    driver: str = ""
    torch_build: str = ""  # torch's commit
    compiled: tuple[str, ...] = ()  # architectures that torch has kernels for; empty where it does not tell
    emulated: tuple[str, ...] = ()  # dtypes that the device computes with, slowly, without units for them
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)  # what quirks ask for
    clocks: tuple[int, ...] = ()  # multiprocessors, their clock and the memory's in kHz, the memory's bits
    link: float = 0.0  # bytes per second of the PCIe link, on paper; 0 where unknown

    @property
    def foreign(self) -> bool:
        """True if the device kind is unknown: another vendor's, or an NVIDIA device whose driver does not name it."""
        return self.backend not in VENDORS or (self.backend == "cuda" and not self.arch)

    @property
    def card(self) -> str:
        """Name and memory: equal for cards that compute the same in the same time."""
        return f"{self.name}, {self.total_bytes / GIBIBYTE:.0f} GB"

    def __str__(self) -> str:
        memory = f", {self.total_bytes / GIBIBYTE:.1f} GB" if self.total_bytes else ""
        shared = " shared with the host" if self.unified and memory and self.backend != "cpu" else ""
        arch = f" ({self.arch})" if self.arch else ""
        return f"{self.name}{arch} as {self.device}{memory}{shared}, torch {self.torch_version}"


def value_or(ask: Callable[[], Value], unknown: Value) -> Value:
    """Return ``ask()``, or ``unknown`` if it raises: a driver, psutil or a plug-in may raise anything."""
    try:
        return ask()
    except Exception as error:
        log.debug("AnyGPU: no answer from the system: %s", first_line(error))
        return unknown


def default_device() -> torch.device:
    """The accelerator that torch reports, else the CPU."""

    def accelerator() -> torch.device:
        current = torch.accelerator.current_accelerator(check_available=True)
        if current is None:
            return torch.device("cpu")
        return torch.device(current.type, torch.accelerator.current_device_index())

    return value_or(accelerator, torch.device("cpu"))


def device_count() -> int:
    """Number of accelerators that torch sees: 1 if it does not say, or says more than its device index can hold."""
    count = value_or(lambda: int(torch.accelerator.device_count()), 1)
    return count if 0 <= count <= MOST_DEVICES else 1


def accelerators(device: torch.device) -> tuple[torch.device, ...]:
    """``device`` and the others of its type that torch sees, ``device`` first; alone if a CPU or without an index."""
    if device.type == "cpu" or device.index is None:
        return (device,)
    others = (torch.device(device.type, index) for index in range(device_count()) if index != device.index)
    return (device, *others) if default_device().type == device.type else (device,)


def facts_for(device: torch.device | str | DeviceFacts | None = None) -> DeviceFacts:
    """Facts about ``device`` (None: the default one; facts pass through); UnsupportedError if it does not answer."""
    if isinstance(device, DeviceFacts):
        return device
    chosen = default_device() if device is None else _parsed(device)
    makers = {"cuda": _cuda_facts, "cpu": _cpu_facts, "mps": _mps_facts, "xpu": _xpu_facts, "xla": _xla_facts}
    stated = _plain(value_or(lambda: makers.get(chosen.type, _plug_in_facts)(chosen), {}), chosen)
    system, kernel = value_or(lambda: platform.system(), ""), value_or(lambda: platform.release(), "")
    versions = {"torch": torch.__version__, "system": system, "kernel": kernel}
    versions |= {"triton": next(filter(None, map(version_of, TRITONS)), ""), KITCHEN: version_of(KITCHEN)}
    driver = stated.pop("driver", "")
    if not driver and stated["backend"] in ("cuda", "rocm", "xpu"):
        driver = _driver(stated["backend"])
    versions |= {"driver": driver, **stated.pop("versions", {})}
    return DeviceFacts(
        device=chosen, torch_version=torch.__version__, torch_build=str(torch.version.git_version or ""), driver=driver,
        versions={name: str(version) for name, version in versions.items() if version}, **stated,
    )  # fmt: skip


def flags() -> dict[str, bool]:
    """Torch's switches that change results, by name, outside blocks of ``execution.held``; probes are keyed by them."""
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul

    def lasting(owner: Any, name: str, now: bool) -> bool:
        return HELD.get((id(owner), name), (0, now))[1]

    switches: dict[str, Callable[[], Any]] = {
        "cudnn": lambda: lasting(cudnn, "enabled", cudnn.enabled),
        "cudnn.benchmark": lambda: lasting(cudnn, "benchmark", cudnn.benchmark),
        "cudnn.deterministic": lambda: cudnn.deterministic,
        "tf32": lambda: _matmul_tf32(matmul),
        "cudnn.tf32": lambda: _cudnn_tf32(cudnn),
        "fp16 sums": lambda: lasting(matmul, "allow_fp16_accumulation", matmul.allow_fp16_accumulation),
        "bf16 sums": lambda: getattr(matmul, "allow_bf16_reduced_precision_reduction", False),
    }
    return {name: bool(value_or(switch, False)) for name, switch in switches.items()}


def allocator_settings() -> str:
    """The settings of torch's allocator as the user gave them; empty where there are none, or torch does not tell."""
    return str(value_or(lambda: torch._C._accelerator_getAllocatorSettings(), ""))


def device_fault(device: torch.device) -> str:
    """The reason why ``device`` fails to compute 1 + 1; empty if it succeeds, or only lacks memory for it."""
    try:
        two = (torch.ones(1, device=device) + 1).cpu().item()
    except Exception as error:
        return "" if says_shortage(error) else first_line(error)
    return "" if two == 2.0 else f"1 + 1 gives {two}"


def gone(device: torch.device, silent: str, named: str = "") -> UnsupportedError:
    """The error for a device, by its name ``named``, that has stopped answering for the reason ``silent``."""
    found = f"the device {str(device)!r}{named and f' ({named})'} has stopped answering ({silent})"
    fix = "Restart ComfyUI. If it happens again, update the driver or choose another device."
    return UnsupportedError(found, expected="a working device", fix=fix)


def indexed(device: torch.device) -> torch.device:
    """``device`` as its tensors report it: ``mps:0`` for a bare ``mps``, which compares unequal; others unchanged."""
    return torch.device(device.type, 0) if device.type == "mps" else device


def free_bytes(device: torch.device) -> int | None:
    """Bytes free on ``device`` now; on XPU, if it does not report them, all that torch has not reserved; else None."""
    if device.type == "cpu":
        return left if (left := host_free_bytes()) < PLENTY else None
    module: Any = getattr(torch, device.type, None)
    free = value_or(lambda: _stated_free(module, device), None)
    return value_or(lambda: _unreserved(module, device), None) if free is None and device.type == "xpu" else free


def peak_bytes(device: torch.device) -> int | None:
    """Peak memory of this process on ``device`` since :func:`reset_peak`; None if unknown."""
    module: Any = getattr(torch, device.type, None)
    if device.type == "cpu" or not hasattr(module, "max_memory_allocated"):
        return None
    return value_or(lambda: int(module.max_memory_allocated(device)), None)


def reset_peak(device: torch.device) -> None:
    """Reset the peak; does nothing if the backend does not count it."""
    module: Any = getattr(torch, device.type, None)
    if device.type != "cpu" and hasattr(module, "reset_peak_memory_stats"):
        value_or(lambda: module.reset_peak_memory_stats(device), None)


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has finished, so that timings are right; a fault shows when a result is read."""
    module: Any = getattr(torch, device.type, None)
    if device.type != "cpu" and hasattr(module, "synchronize"):
        value_or(lambda: module.synchronize(*(() if device.type == "mps" else (device,))), None)  # mps takes none


def locks_host_memory(device: torch.device) -> bool:
    """True if host memory can be locked for ``device``, so that copies need no staging; tries it with one byte."""
    if device.type == "cpu" or default_device().type != device.type:
        return False
    return value_or(lambda: torch.empty(1, dtype=torch.uint8, pin_memory=True).is_pinned(), False)


def swap_free_bytes() -> int:
    """Bytes of swap space that are free; 0 where unknown, as on Windows without performance counters."""
    return value_or(lambda: _system_bytes("swap_memory", "free"), 0)


def host_free_bytes() -> int:
    """Bytes of host memory that this process may still take: the least that the system and its control groups leave."""
    free = value_or(lambda: _system_bytes("virtual_memory", "available"), PLENTY)
    groups = value_or(lambda: Path(OWN_CGROUPS).read_text(encoding="utf-8"), "")
    paths = dict(row.split(":", 2)[1:] for row in groups.splitlines() if row.count(":") > 1)  # by controller
    for controller, root, limit, used in CGROUPS:
        group = PurePosixPath(paths.get(controller, "").lstrip("/"))  # a container may not see this folder
        for folder in (Path(root, each) for each in (group, *group.parents)):
            with suppress(OSError, ValueError):  # there is no such group, or its limit is "max"
                most, taken = (int((folder / name).read_text(encoding="utf-8")) for name in (limit, used))
                free = min(free, max(0, most - taken + _reclaimable(folder)))
    return free


def _reclaimable(group: Path) -> int:
    """Bytes of a control group's file cache, which count as used but are freed on demand; 0 if unknown."""
    stat = group / "memory.stat"
    rows: dict[str, str] = value_or(lambda: dict(line.split() for line in stat.read_text("utf-8").splitlines()), {})
    return sum(int(rows.get(f"total_{kind}", rows.get(kind, 0))) for kind in ("inactive_file", "active_file"))


def empty_host_cache() -> None:
    """Return torch's cached pinned host memory to the system, for CUDA and XPU: a plug-in's allocator would crash."""
    give = getattr(torch.accelerator, "empty_host_cache", getattr(torch._C, "_host_emptyCache", None))
    if default_device().type in ("cuda", "xpu") and give is not None:
        value_or(give, None)


def empty_cache(device: torch.device) -> None:
    """Give unused cached memory to the driver, after waiting: on Arc a running chain became NaN (pytorch#197520)."""
    module: Any = getattr(torch, device.type, None)
    if device.type != "cpu" and hasattr(module, "empty_cache"):
        synchronize(device)
        value_or(module.empty_cache, None)


def _system_bytes(memory: str, amount: str) -> int:
    import psutil

    return int(getattr(getattr(psutil, memory)(), amount))


def _stated_free(module: Any, device: torch.device) -> int | None:
    free, total = (int(value) for value in module.mem_get_info(device))
    return free if 0 <= free <= total and total else None


def _unreserved(module: Any, device: torch.device) -> int:
    """All memory less what torch reserved: ComfyUI's figure for Intel, whose drivers may not tell (pytorch#159728)."""
    return int(module.get_device_properties(device).total_memory) - int(module.memory_reserved(device))


def _matmul_tf32(matmul: Any) -> bool:
    """True if fp32 matmuls may become TF32; from torch 2.9 on the old question raises once the new switch was used."""
    new = getattr(matmul, "fp32_precision", None)
    return torch.get_float32_matmul_precision() != "highest" if new is None else new not in ("none", "ieee")


def _cudnn_tf32(cudnn: Any) -> bool:
    """True if cuDNN may round fp32 convolutions to TF32; torch before 2.9 has one switch for it."""
    new = getattr(cudnn, "conv", None)
    return bool(cudnn.allow_tf32) if new is None else getattr(new, "fp32_precision", "none") not in ("none", "ieee")


def _parsed(device: torch.device | str) -> torch.device:
    """The device of that name, with its index unless ``mps``; UnsupportedError if no empty tensor can be made on it."""
    try:
        chosen = torch.device(device)
        there = torch.empty(0, device=chosen).device  # with its index
    except Exception as error:
        found = f"device {str(device)!r} does not answer ({first_line(error)})"
        expected = f"a device of this torch build, such as {default_device()}"
        fix = "Choose another device, or install the build of torch for this one."
        raise UnsupportedError(found, expected=expected, fix=fix) from error
    return chosen if chosen.type == "mps" else there  # ComfyUI compares its models' devices with a bare mps


def _plain(stated: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """``stated`` in the types and ranges that readers expect; a missing or odd value becomes its default: unknown."""
    arch, name, total, compiled = (stated.get(key) for key in ("arch", "name", "total_bytes", "compiled"))
    sound = {
        "arch": arch if isinstance(arch, str) else "",
        "name": name if isinstance(name, str) and name else str(device),
        "total_bytes": total if isinstance(total, int) and 0 <= total < MOST_BYTES else 0,
        "compiled": tuple(entry for entry in compiled or () if isinstance(entry, str)),
    }
    return {"backend": device.type, "arch_class": "other", **stated, **sound}


def _cpu_facts(device: torch.device) -> dict[str, Any]:
    return {"arch_class": "cpu", "name": "CPU", "total_bytes": _host_bytes(), "unified": True}


def _cuda_facts(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    shared = {
        "name": properties.name, "total_bytes": properties.total_memory, "compiled": tuple(torch.cuda.get_arch_list()),
        "unified": bool(getattr(properties, "is_integrated", False)), "link": value_or(lambda: _pcie(properties), 0.0),
    }  # fmt: skip
    cudnn = value_or(torch.backends.cudnn.version, 0) or 0  # raises if torch was built for another cuDNN
    if torch.version.hip:
        arch = str(getattr(properties, "gcnArchName", "")).split(":")[0]
        versions = {"rocm": torch.version.hip, "miopen": _version(cudnn, 1000)}
        return {"backend": "rocm", "arch": arch, "arch_class": "rocm", "versions": versions, **shared}
    modern = properties.major >= 8  # is_bf16_supported() proves only that such a tensor can exist (pytorch#148322)
    return {
        "arch": f"sm{properties.major}{properties.minor}", "arch_class": "cuda-sm80+" if modern else "cuda-old",
        "emulated": () if modern else ("bf16",),
        "clocks": tuple(value_or(lambda: [int(getattr(properties, name)) for name in CLOCKS], [])),
        "versions": {"cuda": torch.version.cuda, "cudnn": _version(cudnn, 100)}, **shared,
    }  # fmt: skip


def _pcie(properties: Any) -> float:
    """Bytes per second of the link of a card, by Linux: as wide as it is now, as fast as both ends can be when busy."""
    domain, bus, slot = (int(getattr(properties, f"pci_{name}_id")) for name in ("domain", "bus", "device"))
    folder = Path(PCI, f"{domain:04x}:{bus:02x}:{slot:02x}.0").resolve()  # below the port of its slot
    width = int((folder / "current_link_width").read_text(encoding="utf-8"))
    speeds = [end / "max_link_speed" for end in (folder, folder.parent)]  # such as "16.0 GT/s PCIe"
    transfers = min(float(file.read_text(encoding="utf-8").split()[0]) for file in speeds if file.is_file())
    return transfers * 1e9 / 8 * width * (128 / 130 if transfers >= 8 else 0.8)  # a bit each, from 8 on 128 in 130


def _mps_facts(device: torch.device) -> dict[str, Any]:
    name = value_or(lambda: str(torch.backends.mps.get_name()), "") or "Apple GPU"
    system = platform.mac_ver()[0]
    stated = {"arch": platform.machine(), "arch_class": "mps", "name": name, "total_bytes": _host_bytes()}
    return {**stated, "unified": True, "driver": system, "versions": {"macos": system}}


def _xpu_facts(device: torch.device) -> dict[str, Any]:
    properties = torch.xpu.get_device_properties(device)
    integrated = INTEGRATED.search(str(properties.name))  # for torch that does not tell
    return {
        "arch_class": "xpu", "name": str(properties.name), "total_bytes": int(properties.total_memory),
        "emulated": () if getattr(properties, "has_fp64", True) else ("fp64",),
        "driver": str(getattr(properties, "driver_version", "")), "compiled": tuple(torch.xpu.get_arch_list()),
        "unified": bool(getattr(properties, "is_integrated_gpu", integrated)),
    }  # fmt: skip


def _xla_facts(device: torch.device) -> dict[str, Any]:
    runtime: Any = sys.modules.get("torch_xla.runtime")
    model = cast(Any, sys.modules.get("torch_xla.core.xla_model"))
    behind = value_or(lambda: str(runtime.device_type() or ""), "")
    total = value_or(lambda: int(model.get_memory_info(device).get("bytes_limit", 0)), 0)
    stated = {"arch": behind, "arch_class": "xla", "name": f"{behind or 'device'} behind XLA", "total_bytes": total}
    return {**stated, "versions": {"xla": version_of("torch_xla")}}


def _plug_in_facts(device: torch.device) -> dict[str, Any]:
    total, name = 0, f"{device.type} device"
    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "get_device_properties"):
        properties = module.get_device_properties(device)
        total, name = int(getattr(properties, "total_memory", 0)), str(getattr(properties, "name", name))
    return {"name": name, "total_bytes": total}


def _host_bytes() -> int:
    return value_or(lambda: _system_bytes("virtual_memory", "total"), 0)


def _driver(backend: str) -> str:
    """The driver's version: of its kernel module, else by NVML, else Linux's, else the newest CUDA or HIP it runs."""
    if stated := value_or(lambda: Path(KERNEL_FILES[backend]).read_text(encoding="utf-8").strip(), ""):
        return stated
    if backend == "cuda" and (reported := value_or(_nvml_driver, "")):
        return reported
    release = value_or(lambda: str(platform.release()), "")
    if backend != "cuda" and sys.platform == "linux" and "microsoft" not in release.lower():
        return "Linux " + ".".join(release.split(".")[:2])  # amdgpu and xe change with it
    offered = value_or(lambda: int(cast(Any, torch._C)._cuda_getDriverVersion()), 0)
    return f"runtime {offered}" if offered else ""


def _nvml_driver() -> str:
    library, text = ctypes.CDLL(NVML), ctypes.create_string_buffer(80)
    if library.nvmlInit_v2():
        return ""
    try:
        return "" if library.nvmlSystemGetDriverVersion(text, len(text)) else text.value.decode()
    finally:
        library.nvmlShutdown()


def version_of(package: str) -> str:
    """The version of an installed package; empty where it is not."""
    return value_or(lambda: importlib.metadata.version(package), "")


def _version(number: int, base: int) -> str:
    """91002 as 9.10.2, and 8902, before cuDNN 9, as 8.9.2; ``base`` is 100, or MIOpen's 1000; empty for 0."""
    major = 1000 if base == 100 and number < 90_000 else base**2
    return f"{number // major}.{number % major // base}.{number % base}" if number else ""
