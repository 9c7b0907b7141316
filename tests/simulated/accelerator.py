"""A simulated accelerator: torch devices "acc:0" and "acc:1" on a machine without a GPU.

The bytes live in host memory and every operator runs the CPU's own kernel, so results equal the CPU's bit for bit. What
a GPU would refuse is refused: tensors of two devices in one operator, a generator of another device, more bytes than
the device has. Memory and copies are counted. Differences from hardware, on purpose:

- noise drawn on the device differs from the CPU's for the same seed, as it does on every GPU;
- work is finished when a call returns, so a missing synchronisation goes unnoticed, but under `simulated.clock`;
- bytes that a kernel uses only while it runs are not counted.

Torch cannot forget a device, so `torch.accelerator.current_accelerator()` names "acc" for the rest of the process.
Outside `fresh()` it is a machine with the plug-in installed and no card in it: `torch.accelerator.is_available()` is
False and the device count 0. On a machine with a GPU the name stays taken all the same: tests of a real device need a
process of their own. Tests take the simulated one so:

    from simulated import accelerator

    @pytest.fixture
    def acc():
        if reason := accelerator.reason():
            pytest.skip(reason)
        with accelerator.fresh() as device:
            yield device"""

import contextlib
import ctypes
import fnmatch
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import library

NAME = "acc"
DEFAULT_SEED = 67280421310721  # torch's own
reason = library.reason


@dataclass(frozen=True)
class Memory:
    """One device's bytes: allocated now, the highest they have been, the limit; requests granted and refused."""

    allocated_bytes: int
    peak_bytes: int
    capacity_bytes: int
    allocations: int
    refusals: int


@dataclass(frozen=True)
class Traffic:
    """Copies since the last reset: from host to device, from device to host (`.item()` is one), from other devices.

    Bytes are those of the copy's target, as on hardware: a copy that also casts does so before the bytes travel."""

    to_device_bytes: int
    to_device_copies: int
    to_host_bytes: int
    to_host_copies: int
    peer_bytes: int
    peer_copies: int


Before = Callable[[str, list], None]
After = Callable[[str, list, list], None]


@dataclass
class Hook:
    """A behaviour attached to operators; `hits` counts how often one of them ran."""

    pattern: str
    before: Before | None
    after: After | None
    names: frozenset[str]
    hits: int = field(default=0)


_hooks: list[Hook] = []
_handle: ctypes.CDLL | None = None
_plugged_in = False
_connection: torch.library.Library | None = None


# ---- loading -------------------------------------------------------------------------------------


def available() -> bool:
    """Whether `load` can work here; `reason` says why not."""
    return not reason()


def load(cache: Path = library.DEFAULT_CACHE) -> torch.device:
    """Registers the devices with torch and returns the first; compiles the library when `cache` has none.

    Calling it again only plugs the devices in again.

    Raises:
        library.BuildError: the compiler refused the sources.
        RuntimeError: another plug-in device is registered in this process.
    """
    global _handle, _connection, _plugged_in
    _plugged_in = True
    if _handle is None:
        path = library.built(cache)
        torch.utils.rename_privateuse1_backend(NAME)
        _handle = library.opened(path)
        from . import torch_acc

        torch._register_device_module(NAME, torch_acc)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        _handle.acc_hand_out_default_generators(1)
        torch_acc.default_generators = tuple(torch.Generator(f"{NAME}:{index}") for index in range(device_count()))
        _handle.acc_hand_out_default_generators(0)
        _connection = torch.library.Library("simulated", "IMPL")
        _connection.impl("before", _before, "CompositeExplicitAutograd")
        _connection.impl("after", _after, "CompositeExplicitAutograd")
    return torch.device(NAME, 0)


@contextlib.contextmanager
def fresh() -> Iterator[torch.device]:
    """Plugs the devices in for a block and lends the first.

    Limits, hooks, counters, seeds and the current device are as new before and after; tensors that live on are kept."""
    global _plugged_in
    device = load()
    _renew()
    try:
        yield device
    finally:
        _plugged_in = False
        _renew()


def _renew() -> None:
    for name in ("unpacking", "gguf_blocks"):  # which keep a device's tables: a few kilobytes each
        if (module := sys.modules.get(f"anygpu.compat.checkpoints.{name}")) is not None:
            module._table.cache_clear()
    if any(memory(index).allocated_bytes for index in range(device_count())):
        gc.collect()
    _hooks.clear()
    _watch()
    take_waits()
    _loaded().acc_cap_buffers(ctypes.c_int64(0), 0)
    _loaded().acc_word_shortage(b"")
    _loaded().acc_refuse_set_data(0)
    _loaded().acc_zero_copies(0)
    torch.accelerator.set_device_index(0)
    torch.acc.manual_seed_all(DEFAULT_SEED)
    for index in range(device_count()):
        set_limit(None, index)
        _loaded().acc_refuse(index, ctypes.c_int64(0))
        torch.accelerator.reset_accumulated_memory_stats(index)
        reset_peak(index)
        reset_traffic(index)
    if "diffusers.utils.torch_utils" in sys.modules:  # it asks torch once per process and keeps the answer
        sys.modules["diffusers.utils.torch_utils"].TorchDeviceBackend._detect_device_type.cache_clear()


def plugged_in() -> bool:
    """Whether torch is told that there are devices."""
    return _plugged_in


def device_count() -> int:
    """How many devices there are, plugged in or not."""
    return _loaded().acc_device_count()


def _loaded() -> ctypes.CDLL:
    if _handle is None:
        raise RuntimeError("the simulated accelerator is not loaded: call accelerator.load() first")
    return _handle


# ---- memory and copies ---------------------------------------------------------------------------


def memory(index: int = 0) -> Memory:
    """What device `index` holds now, has held at most, and may hold."""
    return Memory(*_ledger(index)[:5])


def traffic(index: int = 0) -> Traffic:
    """What was copied to and from device `index` since the last reset."""
    return Traffic(*_ledger(index)[5:])


def reset_peak(index: int = 0) -> None:
    """The peak becomes what is allocated now."""
    torch.accelerator.reset_peak_memory_stats(_existing(index))


def reset_traffic(index: int = 0) -> None:
    _loaded().acc_reset_traffic(_existing(index))


def set_limit(total_bytes: int | None, index: int = 0) -> None:
    """From now on device `index` raises torch.OutOfMemoryError above `total_bytes`; None lifts the limit."""
    _loaded().acc_set_capacity(_existing(index), ctypes.c_int64(-1 if total_bytes is None else total_bytes))


@contextlib.contextmanager
def limit(total_bytes: int, index: int = 0) -> Iterator[None]:
    """`set_limit` for the length of a block; afterwards the former limit holds again."""
    former = memory(index).capacity_bytes
    set_limit(total_bytes, index)
    try:
        yield
    finally:
        set_limit(former, index)


@contextlib.contextmanager
def refusal(count: int, index: int = 0) -> Iterator[None]:
    """Device `index` refuses its `count`-th request for memory from here on, once, whatever is free."""
    _loaded().acc_refuse(_existing(index), ctypes.c_int64(count))
    try:
        yield
    finally:
        _loaded().acc_refuse(index, ctypes.c_int64(0))


@contextlib.contextmanager
def buffer_cap(total_bytes: int, ends_process: bool = False) -> Iterator[None]:
    """No request above `total_bytes` is granted, whatever is free; it is refused as Metal does, or the process ends."""
    _loaded().acc_cap_buffers(ctypes.c_int64(total_bytes), int(ends_process))
    try:
        yield
    finally:
        _loaded().acc_cap_buffers(ctypes.c_int64(0), 0)


@contextlib.contextmanager
def shortage_called(words: str) -> Iterator[None]:
    """A shortage is a plain RuntimeError with these words, as most back ends have it."""
    _loaded().acc_word_shortage(words.encode())
    try:
        yield
    finally:
        _loaded().acc_word_shortage(b"")


@contextlib.contextmanager
def without_set_data() -> Iterator[None]:
    """`parameter.data = ...` across devices raises, as behind torch_xla."""
    _loaded().acc_refuse_set_data(1)
    try:
        yield
    finally:
        _loaded().acc_refuse_set_data(0)


@contextlib.contextmanager
def zeroed_copies(dtype: torch.dtype, to_host: bool = True, to_device: bool = False) -> Iterator[Callable[[], int]]:
    """Copies of ``dtype``, bf16 or fp16, between host and device arrive as zeros, whatever asked for them.

    A copy that also casts counts where either end has the dtype, and `.item()` is a copy. Integers arrive.

    Yields:
        How many copies were zeroed so far."""
    kinds = {torch.bfloat16: 1, torch.float16: 2}[dtype] | 4 * to_host | 8 * to_device
    library = _loaded()
    library.acc_zeroed_copies.restype = ctypes.c_int64
    library.acc_zero_copies(kinds)
    try:
        yield library.acc_zeroed_copies
    finally:
        library.acc_zero_copies(0)


def take_waits() -> list[tuple[int, int]]:
    """(device of the stream that waits, device of the stream it waits for), in order, since the last call."""
    pairs = (ctypes.c_int64 * 20_000)()
    count = _loaded().acc_take_waits(pairs, 10_000)
    return [(pairs[2 * index], pairs[2 * index + 1]) for index in range(min(count, 10_000))]


def host_bytes() -> int:
    """Bytes of host memory that tensors hold, each storage once; where memory is shared they are the device's too.

    Views of mapped files count as well, although the system may take their pages back."""
    storages = {}
    for thing in gc.get_objects():
        if not isinstance(thing, torch.Tensor) or isinstance(thing, FakeTensor):
            continue
        if thing.device.type == "cpu" and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _existing(index: int) -> int:
    if not 0 <= index < device_count():
        raise IndexError(f"found device index {index}; expected 0 to {device_count() - 1}")
    return index


def _ledger(index: int) -> list[int]:
    entries = (ctypes.c_int64 * 11)()
    _loaded().acc_read(_existing(index), entries)
    return list(entries)


# ---- hooks: what a faulty device would do differently --------------------------------------------


@contextlib.contextmanager
def hook(pattern: str, before: Before | None = None, after: After | None = None) -> Iterator[Hook]:
    """Calls Python around every matching operator that runs on the device, for the length of a block.

    Operators that only make or relabel memory (empty, empty_strided, set_) run unseen, as do those that torch splits
    into others before a device is asked: a linear layer arrives as addmm, a cast as copy_. Hooks do not see operators
    that a hook runs itself.

    Args:
        pattern: operator names without overload, as in fnmatch: "aten::convolution*", "aten::copy_".
        before: called with (name, arguments); what it raises is the operator's failure.
        after: called with (name, arguments, results); may change the results' values in place.

    Yields:
        The Hook; its `hits` tells whether anything matched while it was attached.
    """
    names = _operators(pattern)
    if not names:
        raise ValueError(f"found no operator named {pattern!r}; expected a name such as 'aten::convolution'")
    attached = Hook(pattern, before, after, names)
    _hooks.append(attached)
    _watch()
    try:
        yield attached
    finally:
        if attached in _hooks:  # unless `fresh` was faster
            _hooks.remove(attached)
        _watch()


@functools.cache
def _operators(pattern: str) -> frozenset[str]:
    """Names of torch's own operators that match; a process does not get more of them."""
    known = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return frozenset(fnmatch.filter(known, pattern))


def _watch() -> None:
    """Tells the library which operators to report, so that all others pay one flag test."""
    before = {name for attached in _hooks if attached.before for name in attached.names}
    after = {name for attached in _hooks if attached.after or not attached.before for name in attached.names}
    _loaded().acc_watch("\n".join(sorted(before)).encode(), "\n".join(sorted(after)).encode())


def _before(op: str, arguments: list) -> None:
    for attached in [attached for attached in _hooks if attached.before and op in attached.names]:
        attached.hits += 1
        attached.before(op, arguments)


def _after(op: str, arguments: list, results: list) -> None:
    for attached in [attached for attached in _hooks if op in attached.names]:
        if not attached.before:
            attached.hits += 1
        if attached.after:
            attached.after(op, arguments, results)
