"""Facts about the device that computes: the only file that asks a vendor's API."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import UnsupportedError

GIBIBYTE = 1024**3


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device as plain values, so that a test can stand in any machine without owning it.

    ``arch_class`` is the key of the precision table: ``cpu``, ``cuda-sm80+``, ``cuda-old``, ``rocm``, ``xpu``,
    ``mps`` or ``other``.
    """

    device: torch.device
    backend: str
    arch: str
    arch_class: str
    name: str
    total_bytes: int
    torch_version: str

    def __str__(self) -> str:
        memory = f", {self.total_bytes / GIBIBYTE:.1f} GB" if self.total_bytes else ""
        arch = f" ({self.arch})" if self.arch else ""
        return f"{self.name}{arch} as {self.device}{memory}, torch {self.torch_version}"


def default_device() -> torch.device:
    """The accelerator that torch reports, else the CPU."""
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None:
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def facts_for(device: torch.device | str | None = None) -> DeviceFacts:
    """Facts about ``device``, or about the default device.

    Raises:
        UnsupportedError: torch does not know the device or cannot reach it.
    """
    chosen = default_device() if device is None else _parsed(device)
    if chosen.type == "cuda":
        return _cuda_facts(chosen)
    if chosen.type == "cpu":
        return DeviceFacts(chosen, "cpu", "", "cpu", "CPU", _host_bytes(), torch.__version__)
    if chosen.type == "mps":
        return DeviceFacts(chosen, "mps", "", "mps", "Apple GPU", _host_bytes(), torch.__version__)
    total, name = 0, f"{chosen.type} device"
    module = getattr(torch, chosen.type, None)
    if hasattr(module, "get_device_properties"):
        properties = module.get_device_properties(chosen)
        total, name = int(getattr(properties, "total_memory", 0)), str(getattr(properties, "name", name))
    arch_class = chosen.type if chosen.type == "xpu" else "other"
    return DeviceFacts(chosen, chosen.type, "", arch_class, name, total, torch.__version__)


def free_bytes(device: torch.device) -> int | None:
    """Bytes free on ``device`` now, or None where the backend does not tell."""
    if device.type == "cpu":
        import psutil

        return int(psutil.virtual_memory().available)
    module = getattr(torch, device.type, None)
    if hasattr(module, "mem_get_info"):
        return int(module.mem_get_info(device)[0])
    return None


def empty_cache(device: torch.device) -> None:
    """Give unused cached memory of an accelerator back to its driver; nothing to do on the CPU."""
    module = getattr(torch, device.type, None)
    if device.type != "cpu" and hasattr(module, "empty_cache"):
        module.empty_cache()


def _parsed(device: torch.device | str) -> torch.device:
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnsupportedError(
            f"device {str(device)!r} does not answer ({reason})",
            expected=f"a device of this torch build, such as {default_device()}",
            fix="Choose another device, or install the torch build made for this one.",
        ) from error
    return chosen


def _cuda_facts(device: torch.device) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        arch = str(getattr(properties, "gcnArchName", "")).split(":")[0]
        return DeviceFacts(device, "rocm", arch, "rocm", properties.name, properties.total_memory, torch.__version__)
    arch_class = "cuda-sm80+" if properties.major >= 8 else "cuda-old"
    arch = f"sm{properties.major}{properties.minor}"
    return DeviceFacts(device, "cuda", arch, arch_class, properties.name, properties.total_memory, torch.__version__)


def _host_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)
