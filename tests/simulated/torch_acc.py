"""`torch.acc`: what torch, accelerate and diffusers expect of a device's module, after the model of `torch.cuda`."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch

from . import accelerator

_Index = int | str | torch.device | None


def _index(device: _Index) -> int:
    """The index that `device` names; without an index, the current one."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


# ---- devices -------------------------------------------------------------------------------------


def is_available() -> bool:
    return accelerator.plugged_in()


def is_initialized() -> bool:
    return True


def init() -> None:
    """Nothing is lazy here."""


def _lazy_init() -> None:
    """Nothing is lazy here."""


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return accelerator.device_count() if accelerator.plugged_in() else 0


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: _Index) -> None:
    torch.accelerator.set_device_index(_index(device))


def synchronize(device: _Index = None) -> None:
    torch.accelerator.synchronize(_index(device))


def _exchange_device(index: int) -> int:
    previous = current_device()
    if index >= 0:
        set_device(index)
    return previous


_maybe_exchange_device = _exchange_device


class device(contextlib.ContextDecorator):
    """Makes a device the current one inside a `with` block."""

    def __init__(self, device: _Index) -> None:
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *_: object) -> None:
        set_device(self.prev_idx)


def get_device_name(device: _Index = None) -> str:
    return f"Simulated accelerator {_index(device)}"


def get_device_properties(device: _Index = None) -> SimpleNamespace:
    return SimpleNamespace(name=get_device_name(device), total_memory=mem_get_info(device)[1])


def get_amp_supported_dtype() -> list[torch.dtype]:
    """CUDA refuses no dtype; Mochi opens autocast in float32."""
    return [torch.float16, torch.bfloat16, torch.float32]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


# ---- memory --------------------------------------------------------------------------------------


def empty_cache() -> None:
    """Freed bytes are never kept."""


def memory_allocated(device: _Index = None) -> int:
    return accelerator.memory(_index(device)).allocated_bytes


def max_memory_allocated(device: _Index = None) -> int:
    return accelerator.memory(_index(device)).peak_bytes


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: _Index = None) -> None:
    accelerator.reset_peak(_index(device))


def memory_stats(device: _Index = None) -> dict[str, int]:
    return torch.accelerator.memory_stats(_index(device))


_whole: dict[int, int] = {}  # bytes of devices of which this process may take a share


def mem_get_info(device: _Index = None) -> tuple[int, int]:
    """Free and total bytes, of the whole card where this process may take a share of it, as CUDA tells them."""
    found = accelerator.memory(_index(device))
    total = _whole.get(_index(device), found.capacity_bytes)
    return max(0, total - found.allocated_bytes), total


def set_per_process_memory_fraction(fraction: float, device: _Index = None) -> None:
    """The share of the device's memory that this process may take, as torch.cuda's."""
    index = _index(device)
    total = _whole.pop(index, accelerator.memory(index).capacity_bytes)
    accelerator.set_limit(int(fraction * total), index)
    if fraction < 1:
        _whole[index] = total


# ---- random numbers ------------------------------------------------------------------------------

default_generators: tuple[torch.Generator, ...] = ()  # filled by accelerator.load


def _generator(device: _Index) -> torch.Generator:
    return default_generators[_index(device)]


def manual_seed(seed: int) -> None:
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def seed() -> None:
    _generator(None).seed()


def seed_all() -> None:
    for generator in default_generators:
        generator.seed()


def initial_seed() -> int:
    return _generator(None).initial_seed()


def get_rng_state(device: _Index = None) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: _Index = None) -> None:
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# ---- streams and events: work is finished when a call returns, so these only have to exist -------


class Stream(torch.Stream):
    """A stream of the simulated accelerator."""

    def __new__(cls, device: _Index = None, priority: int = 0, **ids: int) -> Stream:
        if ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, device=torch.device("acc", _index(device)), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """An event of the current device; not a subclass, because a stream waits for torch.Event itself only."""
    return torch.Event(device=torch.device("acc", current_device()), enable_timing=enable_timing)


def current_stream(device: _Index = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: _Index = None) -> torch.Stream:
    return Stream(stream_id=0, device_index=_index(device), device_type=torch._C._autograd.DeviceType.PrivateUse1.value)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager:
    """Makes a stream the current one inside a `with` block; None changes nothing."""
    return contextlib.nullcontext() if stream is None else stream
