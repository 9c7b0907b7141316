"""Exact copies between host and device: of single tensors, of small ones together, and of whole modules.
Some devices damage bf16 when they cast it: a tensor is narrowed before it is sent and widened on arrival. Whether
weights arrive faster from a mapped file is timed: on ROCm each copy from a mapped page stalled for half a second to two
(Comfy-Org/ComfyUI#15001, ROCm/ROCm#5952 and #6358)."""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints.weights import release_pages
from ..device.execution import BITS, HALVES, HOST, carried, to_host
from ..device.facts import DeviceFacts
from ..device.failures import DEVICE_ERRORS
from ..device.probe_store import ProbeStore
from ..device.timed_choice import fastest, milliseconds, stored_times
from ..errors import UnsupportedError
from .offloader import SLICE_BYTES, padded, views_of
from .parts import ProgressStage
from .statistics import MemoryStats, amount

SMALL_BYTES = 1024**2  # larger ones travel alone
STAGING_BYTES = 16 * 1024**2  # of one transfer
COPIES, SAMPLE_BYTES, REPEATS = "copies of mapped pages", 32 * 1024**2, 5
WORTH = 0.8  # views save host memory: a read replaces them only if it takes at most this share of their time
# The kinds of device whose driver copies a mapped page like any that is not locked; of other kinds that is unknown.
MAPPED = {"cpu": "host and device share the page cache", "cuda": "the driver copies mapped pages through a buffer"}
KEPT = "_anygpu_kept"  # on a module: host weights that stay in host memory while their copies are on a device


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies to a device and back for floats of ``dtype``; ``memory_stats``, if any, counts bytes and seconds."""

    device: torch.device
    dtype: torch.dtype
    memory_stats: MemoryStats | None = None

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor on the device; a floating one is cast to ``dtype`` before it leaves."""
        here = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
        with self._counted(here.nbytes):
            return copy_to_device(here, self.device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the device on the host, in its own dtype, bit for bit."""
        if tensor.device.type == HOST.type:
            return tensor
        with self._counted(tensor.nbytes):
            return to_host(tensor)

    def to_host_fp32(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the device on the host; a floating one is widened to fp32 there, after it has arrived."""
        here = self.to_host(tensor)
        return here.float() if here.is_floating_point() else here

    def _counted(self, count: int) -> AbstractContextManager[None]:
        return nullcontext() if self.memory_stats is None else self.memory_stats.moving(count)


def copy_to_device(
    source: torch.Tensor, device: torch.device, check: Callable[[], None] | None = None, staged: bool = False
) -> torch.Tensor:
    """A host tensor on ``device``, bit for bit; the host waits only if its memory is not pinned.
    ``check`` is called before each slice of a large one; ``staged`` copies slices into ordinary memory first."""
    return carried(source, lambda bits: _copy(bits, device, check, staged))


def _copy(source: torch.Tensor, device: torch.device, check: Callable[[], None] | None, staged: bool) -> torch.Tensor:
    """:func:`copy_to_device` for a tensor that :func:`carried` has made of it: 16-bit floats are integers here."""
    asynchronous = HOST.type == source.device.type != device.type and source.is_pinned()
    if not source.is_contiguous() or (source.nbytes <= SLICE_BYTES and not staged):
        if check is not None:
            check()
        return (source.clone() if staged else source).to(device, non_blocking=asynchronous)
    there, count = torch.empty_like(source, device=device), max(1, SLICE_BYTES // source.itemsize)
    for first in range(0, source.numel(), count):
        if check is not None:
            check()
        part = source.view(-1)[first : first + count]
        there.view(-1)[first : first + count].copy_(part.clone() if staged else part, non_blocking=asynchronous)
    return there


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Make ``data`` the values of a parameter or buffer that stays the same object for all who hold it.
    Assigning ``tensor.data`` fails for XLA and others: there both swap their contents, as in ``nn.Module.to``."""
    if torch._has_compatible_shallow_copy_type(tensor, data):
        tensor.data = data
        return
    other = torch.Tensor._make_subclass(type(tensor), data.data, tensor.requires_grad)
    other.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, other)


def put_back(values: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give each tensor the data paired with it again, without a copy. A pair that fails is tried again after the rest;
    a second failure is raised, and so is a first one other than a device's error, such as an interrupt."""
    failed = []
    for tensor, data in values:
        try:
            set_data(tensor, data)
        except BaseException as error:
            failed.append((tensor, data, error))
    for tensor, data, _ in failed:
        set_data(tensor, data)
    for _, _, cause in failed:
        if not isinstance(cause, DEVICE_ERRORS):
            raise cause


def transfer_for(device: torch.device, dtype: torch.dtype) -> Transfer:
    """The :class:`Transfer` to ``device`` for ``dtype``; UnsupportedError if it returns other bits than it was given.
    For a 16-bit float the device is asked, with all 65 536 patterns there and back: 128 KB, under a millisecond."""
    way = Transfer(device, dtype)
    if device.type == HOST.type or dtype not in HALVES:
        return way
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(BITS)
    numbers = ~patterns.view(dtype).isnan()  # a plain copy may write another NaN; no number depends on which
    returned = way.to_host(way.to_device(patterns.view(dtype))).view(BITS)
    if not torch.equal(returned[numbers], patterns[numbers]):
        found = f"{device} returns other bits of {str(dtype).removeprefix('torch.')} than it was given"
        fix = "Choose precision fp32 on the load node, or update this device's driver."
        raise UnsupportedError(found, expected="exact copies between host and device", fix=fix)
    return way


def casts_wrongly(device: torch.device, dtype: torch.dtype) -> bool:
    """True if ``device`` casts a 16-bit float to fp32 or back otherwise than the host: zeros on some Radeons.
    Every normal number is asked, up and down; a device may flush the tiniest ones, and may write any NaN."""
    if device.type == HOST.type or dtype not in HALVES:
        return False
    way, values = Transfer(device, dtype), torch.arange(-(2**15), 2**15, dtype=torch.int32).to(BITS).view(dtype)
    values = values[values.isfinite() & (values.abs() >= torch.finfo(dtype).tiny)]
    wide = values.float()
    up, down = to_host(way.to_device(values).float()), way.to_host(wide.to(device).to(dtype))
    return not (torch.equal(up, wide) and torch.equal(down, values))


def send_together(
    tensors: Sequence[torch.Tensor], send: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Each tensor's index and its copy on the device, out of order: ``send`` copies one tensor, and small host tensors
    of one dtype travel as one and share its storage. Peak extra host memory: one staging buffer."""
    waiting: dict[torch.dtype, list[int]] = {}
    held: dict[torch.dtype, int] = {}
    for index, tensor in enumerate(tensors):
        alone = not 0 < tensor.nbytes <= SMALL_BYTES or not tensor.is_contiguous()
        if alone or tensor.device.type != HOST.type:
            yield index, send(tensor)
            continue
        kind, size = tensor.dtype, padded(tensor)
        if held.get(kind, 0) + size > STAGING_BYTES:
            yield from _send_joined(tensors, waiting.pop(kind), send)
            held[kind] = 0
        waiting.setdefault(kind, []).append(index)
        held[kind] = held.get(kind, 0) + size
    for indices in waiting.values():
        yield from _send_joined(tensors, indices, send)


def _send_joined(
    tensors: Sequence[torch.Tensor], indices: list[int], send: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Send the tensors at ``indices``, all of one dtype, in one staging buffer; yield each index and its copy."""
    if len(indices) == 1:
        yield indices[0], send(tensors[indices[0]])
        return
    staging = torch.zeros(sum(_padded_count(tensors[index]) for index in indices), dtype=tensors[indices[0]].dtype)
    places, first = [], 0
    for index in indices:
        end = first + tensors[index].numel()
        staging[first:end].copy_(tensors[index].reshape(-1))
        places.append((index, first, end))
        first += _padded_count(tensors[index])
    there = send(staging)
    for index, begin, end in places:
        yield index, there[begin:end].view(tensors[index].shape)


def _padded_count(tensor: torch.Tensor) -> int:
    """Elements from the beginning of a tensor to where the next one may begin."""
    return padded(tensor) // tensor.itemsize


def move(
    module: nn.Module, device: torch.device, label: str, progress: Any = None,
    memory_stats: MemoryStats | None = None, *, keep: bool = False, shared: bool = False,
) -> None:  # fmt: skip
    """Move ``module`` to ``device`` tensor by tensor, reporting bytes; a cancel, obeyed between tensors and slices of a
    large one, or a failure leaves everything where it was.
    ``shared``: host and device share one memory, so an original goes as soon as its copy is there, and a cancel leaves
    everything on the host. ``keep``: host weights stay, as views of a file always do: moving back copies nothing."""
    away = [tensor for tensor in tensors_of(module) if tensor.device != device]
    if not away:
        return
    origins = {id(tensor): (tensor, tensor.data) for tensor in away}
    kept = dict(module.__dict__.get(KEPT, {}))
    total, done, copied = sum(tensor.nbytes for tensor in away), 0, 0
    check = None if progress is None else progress.check
    home = device.type == HOST.type
    moves = _host_data(module, away, check) if home else _device_copies(module, away, device, check, keep)
    started = time.perf_counter()
    try:
        with torch.inference_mode(False), torch.no_grad():
            for tensor, data, is_copy in moves:
                done += tensor.nbytes
                copied += tensor.nbytes if is_copy else 0
                set_data(tensor, data)
                if shared:
                    del origins[id(tensor)], data  # so that the original is freed
                if progress is not None:
                    progress.step(done, total, ProgressStage("moving", f"{label} {amount(done, total)}", counted=True))
                    progress.check()
    except BaseException:
        if not shared:
            module.__dict__[KEPT] = kept
        with torch.inference_mode(False), torch.no_grad():
            put_back(origins.values())
            if shared:  # back to the host, as some originals are gone
                moved = [tensor for tensor in away if tensor.device.type != HOST.type]
                for tensor, data, _ in _host_data(module, moved, None):
                    set_data(tensor, data)
        raise
    if memory_stats is not None:
        memory_stats.add(copied, time.perf_counter() - started)


def _device_copies(
    module: nn.Module, away: list[torch.Tensor], device: torch.device, check: Callable[[], None] | None, keep: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """Yield each tensor, its copy on ``device``, and True for a copy. Host weights that stay go to :data:`KEPT`."""
    views, kept = views_of(module), module.__dict__.setdefault(KEPT, {})

    def send(source: torch.Tensor) -> torch.Tensor:
        return copy_to_device(source, device, check, staged=views.staged and views.holds(source))

    sources = [tensor.data for tensor in away]
    for index, there in send_together(sources, send):
        tensor, sources[index] = away[index], there  # nothing else may hold the source any more
        kept.pop(id(tensor), None)
        is_view = views.holds(tensor)
        if keep or is_view:
            kept[id(tensor)] = tensor, tensor.data
        if is_view and not keep:
            release_pages(tensor.data)
        yield tensor, there, True


def _host_data(
    module: nn.Module, away: list[torch.Tensor], check: Callable[[], None] | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """Yield each tensor of ``away``, its bytes on the host, and whether they were copied: not what :data:`KEPT` had."""
    kept = module.__dict__.get(KEPT, {})
    kinds = {(tensor.device, tensor.dtype) for tensor in away if id(tensor) not in kept}
    ways = {kind: transfer_for(*kind) for kind in kinds}  # before any moves: a bad copy would be the only one
    for tensor in away:
        if check is not None:
            check()
        host_weight = kept.pop(id(tensor), None)
        if host_weight is not None:
            yield tensor, host_weight[1], False
        else:
            yield tensor, ways[tensor.device, tensor.dtype].to_host(tensor.data), True


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Each parameter and buffer once, those in no state dict (rotary tables) too."""
    yield from module.parameters()
    yield from module.buffers()


def on_device(module: nn.Module, device: torch.device) -> bool:
    return any(tensor.device == device for tensor in tensors_of(module))


def maps_files(facts: DeviceFacts, store: ProbeStore | None) -> bool:
    """True if large tensors that need no cast stay in their file as views: by a timing, else by :data:`MAPPED`."""
    if store is not None and store.folder is not None:
        folder, key = store.folder, f"{COPIES}, system {facts.versions.get('kernel', '')}"  # part of these drivers
        times = stored_times(key, lambda: copy_times(folder, facts.device), facts, store)
        if len(times) > 1:
            return fastest(times, "mapped", WORTH) == "mapped"
    return facts.backend in MAPPED


def copy_times(folder: Path, device: torch.device) -> dict[str, float]:
    """Milliseconds to bring 32 MiB of a file to the device: ``own``, read into memory first, and ``mapped``."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(SAMPLE_BYTES))
        file.flush()

        def own() -> None:
            memory = torch.empty(SAMPLE_BYTES, dtype=torch.uint8)
            file.seek(0)
            file.readinto(memoryview(memory.numpy()))  # type: ignore[arg-type]
            memory.to(device)

        def mapped() -> None:
            torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8).to(device)

        return milliseconds({"own": own, "mapped": mapped}, device, REPEATS)
