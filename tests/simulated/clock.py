"""A clock for the simulated accelerator: what a run would take at published rates, and what its streams waited for.

Each operation costs its stream the larger of its arithmetic and its bytes, and a launch; each copy its bytes over the
link. A copy that the host waits for holds up the host, and with it all that is launched later. Nothing is measured:
every figure is modelled.

With values, the order of streams is checked too: memory that is used before the stream that wrote it is known to be
done, memory given up while another stream still uses it, and locked host memory that is written while a copy out of it
is on its way all raise. Without values (`values=False`) large tensors on the device are never computed, so that models
of published size run in seconds; tensors below :data:`SMALL_BYTES` are, since shapes depend on them.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from anygpu.compat.device.rates import Rates, work_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from . import accelerator

SMALL_BYTES = 2**17  # all patterns of 16 bits, which are sent to see how a device copies
STREAMS = 64


@dataclass(frozen=True)
class Times:
    """Modelled seconds of one device since the clock began.

    Args:
        elapsed: until host and device are done. computing: of operations. copying: of copies to the device, on whatever
            stream. waited_for_copies: the computation for other streams. waited_for_host: for the host, which waits
            for copies itself where they are not asynchronous.
    """

    elapsed: float
    computing: float
    copying: float
    waited_for_copies: float
    waited_for_host: float

    def __sub__(self, other: Times) -> Times:
        return Times(*(getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def bound(self) -> float:
        """What the slower of link and device must take."""
        return max(self.computing, self.copying)


class Clock(TorchDispatchMode):
    """The clock of the device ``index``, while it is entered.

    Args:
        rates: of the device.
        values: whether operations are computed.
    """

    def __init__(self, rates: Rates, values: bool = True, index: int = 0) -> None:
        super().__init__()
        self.rates, self.values, self.index = rates, values, index
        self.computing = self.copying = 0.0
        self.device = torch.device(accelerator.NAME, index)
        self._leaving: list[tuple[int, float]] = []  # locked memory from which a copy is on its way, and its end

    def times(self) -> Times:
        """So far, after everything that was launched."""
        library, entries = accelerator._loaded(), (ctypes.c_double * 4)()
        ids = (ctypes.c_int64 * STREAMS)()
        count = library.acc_streams(self.index, ids, STREAMS)
        elapsed, waits = _host_seconds(), (0.0, 0.0)
        for number in ids[:count]:
            library.acc_read_stream(self.index, ctypes.c_int64(number), entries)
            elapsed = max(elapsed, entries[0])
            if number == 0:
                waits = entries[2], entries[3]
        return Times(elapsed, self.computing, self.copying, *waits)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        name = function.__name__.partition(".")[0]
        if name in ("copy_", "_to_copy") and self._crosses(name, args, kwargs):
            return self._copy(function, args, kwargs)
        if name == "_local_scalar_dense" and tensors[0].device == self.device:
            self._spend(tensors[0].itemsize / self.rates.link, True)
        if not any(tensor.device == self.device for tensor in tensors):
            if name == "copy_":
                self._require_left(args[0])
                if not self.values and args[0].nbytes > SMALL_BYTES:
                    return args[0]
            return function(*args, **kwargs)
        large = any(tensor.nbytes > SMALL_BYTES for tensor in tensors)
        result = (
            function(*args, **kwargs)
            if self.values or function.is_view or not large
            else self._outline(function, args, kwargs)
        )
        flops, count = work_of(function, args, kwargs, result)
        if flops or count:
            dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
            self.spend_work(flops, count, dtype)
        return result

    def spend_work(self, flops: float, count: int, dtype: torch.dtype) -> None:
        """An operation on the current stream: the larger of its arithmetic and its bytes, and the launch."""
        rates = self.rates
        self.computing += self._spend(max(flops / rates.flops(dtype), count / rates.memory) + rates.launch)

    def _crosses(self, name: str, args: Any, kwargs: Any) -> bool:
        target = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or args[0].device)
        source = args[1].device if name == "copy_" else args[0].device
        return self.device in (target, source) and target.type != source.type

    def _copy(self, function: Any, args: Any, kwargs: Any) -> Any:
        """A copy between host and device, for which the host waits unless it is asynchronous from locked memory."""
        source = args[1] if function.__name__.startswith("copy_") else args[0]
        arrives = source.device.type == "cpu"
        behind = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2])) and arrives and source.is_pinned()
        if self.values or source.nbytes <= SMALL_BYTES:
            result = function(*args, **kwargs)
        elif function.__name__.startswith("copy_"):
            result = args[0]
        else:
            result = torch.empty_like(source, dtype=kwargs.get("dtype"), device=kwargs.get("device"))
        seconds = self._spend(self.rates.copy_seconds(result.nbytes), not behind)
        self.copying += seconds if arrives else 0.0
        if behind:
            end = _stream_end(self.device)
            self._leaving.append((source.untyped_storage().data_ptr(), end))
        return result

    def _require_left(self, target: torch.Tensor) -> None:
        """Raise where a copy out of the locked memory ``target`` may not have ended, as far as the host knows."""
        now = _host_seconds()
        self._leaving = [(place, end) for place, end in self._leaving if end > now]
        if any(place == target.untyped_storage().data_ptr() for place, _ in self._leaving):
            raise RuntimeError("locked host memory is written while a copy out of it is on its way")

    def _outline(self, function: Any, args: Any, kwargs: Any) -> Any:
        """The results of an operation without their values."""
        known: dict[int, torch.Tensor] = {}
        if function is torch.ops.aten.index.Tensor:  # how many a mask selects, only its values tell; masks are small
            rows = [i if i is None or i.dtype is not torch.bool else i.nonzero().unbind(1) for i in args[1]]
            args = (args[0], [i for row in rows for i in (row if isinstance(row, tuple) else (row,))])

        def on_meta(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                known[id(value)] = value.to("meta") if value.device.type != "meta" else value
                return known[id(value)]
            return torch.device("meta") if isinstance(value, torch.device) else value

        given, named = tree_map(on_meta, (args, kwargs))
        there = function(*given, **named)
        originals = {
            id(meta): leaf
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and (meta := known.get(id(leaf))) is not None
        }

        def on_device(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in originals:
                return originals[id(value)]
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.device)

        return tree_map(on_device, there)

    def _spend(self, seconds: float, blocking: bool = False) -> float:
        accelerator._loaded().acc_spend(self.index, ctypes.c_double(seconds), int(blocking))
        return seconds


@contextlib.contextmanager
def clocked(rates: Rates, values: bool = True, index: int = 0, kind: type[Clock] = Clock) -> Iterator[Any]:
    """The device ``index`` at these rates for the length of a block; the order of both devices is checked."""
    library = accelerator._loaded()
    library.acc_host_seconds.restype = ctypes.c_double
    library.acc_clock(1)
    try:
        with kind(rates, values, index) as clock:
            yield clock
    finally:
        library.acc_clock(0)


def _host_seconds() -> float:
    return float(accelerator._loaded().acc_host_seconds())


def _stream_end(device: torch.device) -> float:
    entries = (ctypes.c_double * 4)()
    stream = torch.accelerator.current_stream(device).stream_id
    accelerator._loaded().acc_read_stream(device.index, ctypes.c_int64(stream), entries)
    return float(entries[0])
