"""Cost of computing: FLOPs and bytes of each operation, counted on meta tensors, and the device's rate for each."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import first_line
from . import rates
from .execution import HOST
from .facts import CLOCKED, DeviceFacts, device_fault, empty_cache, empty_host_cache, locks_host_memory, value_or
from .failures import is_shortage
from .probe_store import ProbeStore
from .timed_choice import seconds_of

log = logging.getLogger(__name__)
FILTERS = "filters"  # the weights of a convolution, which some libraries copy into another layout at each call
META = torch.device("meta")
TIMED = ("cpu", *CLOCKED)
PROBED, PUBLISHED = "probed", "published"
LEAST_SECONDS = {"cpu": 0.02}  # of a timed call: shorter ones measure the launch
CALL_SECONDS, DEVICE_SECONDS, WARM_SECONDS = 0.005, 0.05, 0.3  # GPUs: a call, a batch, first work that raises clocks
MOST_SIDE = 8192  # of square operands
MOST_BYTES = LINK_BYTES = 1 << 28  # of the operands of a timed call, and of a timed copy over the link
BEYOND_CACHES = 8 * 96 * 2**20  # an RTX 5090 has 96 MB; a 4090 read 67 MB at 3.9 TB/s (mli/transformers-benchmarks#4)
NARROW, HEAD_WIDTH = 64, 128  # of the heads of attention: LTX-Video 2B's, and those of all other families
CONVOLVED = (1, 128, 6, 32)  # and a width: on a CPU, torch has a path of a third of the speed for less
FEW, WIDE = (1, 768, 3, 16, 1), (768, 768, 3, 3, 3)  # voxels and weights of a convolution that is nearly all weights
aten = torch.ops.aten


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def text_of(config: Mapping[str, Any]) -> str:
    """A configuration as part of a key of :func:`counted_once`."""
    return json.dumps(config, sort_keys=True, default=str)


class Work(Counter[tuple[str, int, int]]):
    """Number of runs of each operation, by its kind, its FLOPs and the bytes that it reads and writes."""

    @property
    def flops(self) -> int:
        return sum(flops * times for (_, flops, _), times in self.items())

    @property
    def bytes(self) -> int:
        return sum(moved * times for (kind, _, moved), times in self.items() if kind not in (FILTERS, rates.COPY))

    def times(self, count: int) -> Work:
        return Work({operation: times * count for operation, times in self.items()})


@dataclass(frozen=True, slots=True)
class Pace:
    """Rates of a device in one dtype, per second."""

    product: float  # FLOPs, as the next two
    convolution: float
    attention: float
    memory: float  # bytes of operations that only read and write
    launch: float  # seconds of an operation that does nothing
    source: str = PROBED
    filters: float = math.inf  # bytes of a convolution's weights, which take this time beside its FLOPs
    ahead: bool = True  # the host launches while the device computes; else a launch adds to each operation
    link: float = 0.0  # bytes from pinned memory; 0 where that was not timed
    plain_link: float = 0.0  # and from other host memory
    staged_link: float = 0.0  # and by way of pinned memory, into which the host copies what comes next

    def quicker(self, factors: Mapping[str, float]) -> Pace:
        """This pace with the kinds in ``factors``, such as ``product``, so many times as quick by a lossy form."""
        return replace(self, **{kind: getattr(self, kind) * factor for kind, factor in factors.items()})

    def seconds(self, work: Work) -> float:
        """Time of ``work``. An operation takes the longer of computing and moving; filters and copies only move.
        Launches, of all but filters, run beside that if ``ahead``, so that the longer counts, and else add to it."""
        speeds = {rates.PRODUCT: self.product, rates.CONVOLUTION: self.convolution, rates.ATTENTION: self.attention}

        def once(kind: str, flops: int, moved: int) -> float:
            if kind in (FILTERS, rates.COPY):
                return moved / (self.filters if kind == FILTERS else self.plain_link or math.inf)
            return max(flops / speeds.get(kind, self.product), moved / self.memory)

        computing = sum(times * once(*operation) for operation, times in work.items())
        launching = self.launch * sum(times for (kind, _, _), times in work.items() if kind != FILTERS)
        return max(computing, launching) if self.ahead else computing + launching


class _CountingMode(TorchDispatchMode):
    """Adds operations to ``work``; reads meta tensors' booleans as true, and their numbers as ``tokens``."""

    def __init__(self, work: Work, tokens: int) -> None:
        super().__init__()
        self.work, self.tokens = work, tokens

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of an operation, whose work is counted, and a convolution's filters beside it; views are free."""
        kwargs = kwargs or {}
        with self:  # in inference mode, as ComfyUI runs nodes, a product arrives whole: its parts are counted
            result = function.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        known, result = self._without_data(function, args)
        if known:
            return result
        result = function(*args, **kwargs)
        if _is_empty_mask(function, args):
            result.selects_none = True
        if not function.is_view:
            flops, moved = rates.work_of(function, args, kwargs, result)
            if not flops and "scaled_dot_product" in function.__name__:  # torch counts it for CUDA alone
                flops = _attention_flops(*args[:3])
            kind = _kind(function, flops)
            if moved:
                self.work[kind, int(flops), moved] += 1
            if kind == rates.CONVOLUTION:
                self.work[FILTERS, 0, args[1].nbytes] += 1
        return result

    def _without_data(self, function: Any, args: Any) -> tuple[bool, Any]:
        """True and a result as for unpadded input if an operation reads a meta tensor's data, else False and None."""
        first = args[0] if args else None
        if not isinstance(first, Tensor) or first.device != META:
            return False, None
        if function is aten._local_scalar_dense.default:
            return True, True if first.dtype is torch.bool else self.tokens
        if function is aten.nonzero.default:
            return True, first.new_empty(first.numel(), first.ndim, dtype=torch.int64)
        indices = enumerate(args[1] if function is aten.index.Tensor else ())  # by axis; None takes all of it
        given = [(axis, index) for axis, index in indices if index is not None]
        if [index.dtype for _, index in given] != [torch.bool]:
            return False, None
        ((axis, mask),) = given
        rows = 0 if hasattr(mask, "selects_none") else mask.numel()
        return True, first.new_empty(*first.shape[:axis], rows, *first.shape[axis + mask.ndim :])


class _AttentionMode(TorchFunctionMode):
    """Counts each attention as one operation, as on a device; on meta tensors torch would decompose it."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._counted if function is F.scaled_dot_product_attention else function)(*args, **(kwargs or {}))

    def _counted(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Add one attention to ``work``, for which mask and scale hardly matter, and return an empty result for it."""
        shape = (*query.shape[:-1], value.shape[-1])
        if query.ndim == 4:  # laid out (B, N, heads, D) as kernels write it: joining the heads copies nothing
            result = query.new_empty(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
        else:
            result = query.new_empty(shape)
        moved = sum(tensor.nbytes for tensor in (query, key, value, result))
        self.work[rates.ATTENTION, _attention_flops(query, key, value), moved] += 1
        return result


class _Autocast(torch.autocast):
    """An autocast that does nothing for the meta device, which torch's own refuses."""

    def __init__(self, device_type: str, *arguments: Any, **options: Any) -> None:
        if device_type == META.type:
            device_type, arguments, options = "cpu", (), {"enabled": False}
        super().__init__(device_type, *arguments, **options)


KEPT = 256  # counts in memory, the newest
_counts: dict[Any, Any] = {}
_patching = threading.Lock()


@contextlib.contextmanager
def counting(tokens: int = 0) -> Iterator[Work]:
    """The work of the block, complete at its end; on meta tensors an integer that is read is ``tokens``."""
    work = Work()
    with torch.inference_mode(False), torch.no_grad(), _CountingMode(work, tokens):
        yield work


@contextlib.contextmanager
def counting_on_meta(tokens: int = 0) -> Iterator[Work]:
    """The work of the block, whose tensors are on the meta device; one thread at a time: it patches torch.autocast."""
    with _patching, counting(tokens) as work, _AttentionMode(work):
        autocast = torch.autocast
        torch.autocast = _Autocast  # type: ignore[misc]
        try:
            yield work
        finally:
            torch.autocast = autocast  # type: ignore[misc]


def counted_once(key: Any, count: Callable[[], Any]) -> Any:
    """Return ``count()``, or what it returned for the same key if that is among the newest :data:`KEPT`."""
    counted = _counts.get(key)
    if counted is None:
        counted = count()
        for oldest in list(_counts)[: max(0, len(_counts) + 1 - KEPT)]:
            _counts.pop(oldest, None)  # another thread may have
        _counts[key] = counted
    return counted


def _is_empty_mask(function: Any, args: Any) -> bool:
    """True for a meta mask that is taken to select nothing: an inverted one, as of padding, or a view of one."""
    first = args[0] if args else None
    if not isinstance(first, Tensor) or first.device != META or first.dtype is not torch.bool:
        return False
    inverted = function in (aten.bitwise_not.default, aten.logical_not.default)
    return inverted or (function.is_view and hasattr(first, "selects_none"))


def _attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """FLOPs of the products with ``key`` (..., N, D) and ``value``; the softmax is left out."""
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _kind(function: Any, flops: float) -> str:
    """The kind of an operation, such as ``rates.PRODUCT``, by its name and whether it has FLOPs."""
    name = function.overloadpacket.__name__
    if "attention" in name:
        return rates.ATTENTION
    if not flops:
        return rates.OTHER
    return rates.CONVOLUTION if "conv" in name else rates.PRODUCT


def pace_of(
    facts: DeviceFacts, store: ProbeStore | None, dtype: torch.dtype, kernel: str = "", width: int = HEAD_WIDTH
) -> Pace | None:
    """Rates of the device in ``dtype`` by a short test, saved in ``store``, else (without one or a result) by its data
    sheet; None if unknown. ``kernel`` is attention's, as ``Attention.label`` has it, ``width`` that of its heads."""
    name = str(dtype).removeprefix("torch.")
    saved, attention_ms = dict[str, Any](), dict[str, Any]()
    if store is not None and facts.device.type in TIMED:
        try:
            heads = HEAD_WIDTH if width > NARROW else NARROW

            def measured() -> dict[str, Any]:
                try:
                    return asdict(measured_pace(facts.device, dtype, width=heads))
                except Exception as error:  # a dtype that the device lacks: saved as {}, so it is logged once
                    if is_shortage(error) or device_fault(facts.device):
                        raise
                    log.warning("AnyGPU: %s cannot be timed in %s: %s", facts.name, dtype, first_line(error))
                    return {}
                finally:
                    empty_cache(facts.device)  # torch would keep most of a gigabyte

            saved = store.remember(f"rates of {name} values, heads of {heads}", measured)
            if saved and facts.device.type != "cpu":
                saved = {**saved, **(store.remember("links", lambda: _links(facts.device)) or {})}
            attention_ms = store.recall(f"attention {name} heads of {width}") or {}
        except Exception as error:  # a device may fail in any way
            log.warning("AnyGPU: %s could not be timed in %s: %s", facts.name, dtype, first_line(error))

    def saved_pace() -> Pace | None:  # from a file that anybody may have edited, so that it may raise anything
        speed_up = value_or(lambda: attention_ms["native"] / attention_ms[kernel], 1.0)
        pace = Pace(**saved).quicker({rates.ATTENTION: speed_up})
        return pace if min(pace.product, pace.convolution, pace.attention, pace.memory, pace.filters) > 0 else None

    if pace := value_or(saved_pace, None):
        return pace
    card = rates.rates_of(facts)
    if card is None:
        return None
    share = rates.GENERATIONS[card.generation].product
    # torch rounds fp32 convolutions to TF32, which runs at half the rate of bf16, on cards that have it.
    convolved = card.bf16 / 2 if dtype == torch.float32 and card.generation in rates.TF32 else card.flops(dtype)
    return Pace(
        product=card.flops(dtype) * share, convolution=convolved * share * rates.CONVOLVED_SHARE,
        attention=card.flops(dtype) * card.attention(kernel), memory=card.memory * rates.MEMORY,
        launch=rates.LAUNCH_SECONDS, source=PUBLISHED,
    )  # fmt: skip


def measured_pace(
    device: torch.device, dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter, width: int = HEAD_WIDTH
) -> Pace:
    """The pace of ``device``: times products, two convolutions, attention, a copy and launches, for about a second."""
    timer = _Timer(device, clock)

    def tensor(*shape: int) -> Tensor:  # not zeros, which an A100 multiplies at 295 TFLOPS, others at 257 (thonking.ai)
        return torch.arange(math.prod(shape), dtype=torch.float32, device=device).sin_().to(dtype).view(shape)

    def product(side: int) -> Callable[[], Any]:
        a, b = tensor(side, side), tensor(side, side)
        return lambda: a @ b

    def convolution(side: int) -> Callable[[], Any]:
        x, weight = tensor(*CONVOLVED, side // 8), tensor(128, 128, 3, 3, 3)
        return lambda: F.conv3d(x, weight, padding=(0, 1, 1))

    def attention(side: int) -> Callable[[], Any]:
        q = tensor(1, 8, side, width)
        return lambda: F.scaled_dot_product_attention(q, q, q)

    def addition(side: int) -> Callable[[], Any]:
        x = torch.zeros(12, side, side, dtype=dtype, device=device)
        return lambda: x + 1

    def weights_bound() -> Any:  # a convolution whose weights take longer than its FLOPs
        return F.conv3d(few, wide, padding=(0, 1, 1))

    small, few, wide = tensor(1), tensor(*FEW), tensor(*WIDE)
    with torch.inference_mode(False), torch.no_grad():
        if not timer.host:
            timer.warm(product(4096))
        rate = timer.rate(convolution)
        with counting() as work:
            weights_bound()
        filters_seconds = timer.seconds(weights_bound) - work.flops / rate
        return Pace(
            product=timer.rate(product), convolution=rate, attention=timer.rate(attention),
            memory=timer.rate(addition, MOST_BYTES if timer.host else BEYOND_CACHES),
            launch=timer.least(partial(_repeat, lambda: small + 1, 100)) / 100,
            filters=wide.nbytes / max(filters_seconds, 1e-9), ahead=not timer.host,
        )  # fmt: skip


def _links(device: torch.device) -> dict[str, float]:
    """Bytes per second of copies to ``device`` by field of :class:`Pace`; 0 if one fails or memory cannot be pinned."""

    def rate(pinned: bool) -> float:
        host = torch.zeros(LINK_BYTES, dtype=torch.uint8, pin_memory=pinned).fill_(1)  # zeros are one page until then
        there = torch.empty_like(host, device=device)
        return LINK_BYTES / min(seconds_of(lambda: there.copy_(host, non_blocking=pinned), device) for _ in range(2))

    pinned = value_or(partial(rate, True), 0.0) if locks_host_memory(device) else 0.0
    plain, staging = value_or(partial(rate, False), 0.0), 0.0
    if pinned:
        host, buffer = (torch.ones(LINK_BYTES, dtype=torch.uint8) for _ in range(2))
        staging = LINK_BYTES / min(seconds_of(lambda: buffer.copy_(host), HOST) for _ in range(2))
    empty_host_cache()
    return {"link": pinned, "plain_link": plain, "staged_link": min(pinned, staging)}


def _repeat(call: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        call()


@dataclass(frozen=True, slots=True)
class _Timer:
    """Times calls on ``device`` by ``clock``: on an accelerator in batches, as waiting for it takes time too."""

    device: torch.device
    clock: Callable[[], float]

    @property
    def host(self) -> bool:
        return self.device.type == "cpu"

    def warm(self, call: Callable[[], Any]) -> None:
        """Repeat ``call`` for :data:`WARM_SECONDS`, in batches of up to 64, so that the clocks have risen."""
        spent, count = 0.0, 1
        while spent < WARM_SECONDS:
            spent, count = spent + self._once(partial(_repeat, call, count)), min(2 * count, 64)

    def rate(self, make: Callable[[int], Callable[[], Any]], most: int = MOST_BYTES) -> float:
        """FLOPs per second of the call ``make(side)``, or bytes per second of a call without FLOPs.
        The side doubles, up to MOST_SIDE, until a call takes long enough, has ``most`` bytes, or memory is short."""
        side, call = 32, make(32)  # small: a CPU without fp16 units needs seconds for what a GPU does in no time
        while True:
            with counting() as work:
                call()
            seconds = self.least(call)
            slow = seconds >= LEAST_SECONDS.get(self.device.type, CALL_SECONDS)
            enough = slow and bool(work.flops or self.host)  # copies on an accelerator must also outgrow its caches
            is_last = enough or side >= MOST_SIDE or 4 * work.bytes > most  # twice the side: four times the bytes
            larger = None if is_last else self._try_call(make, 2 * side)
            if larger is None:
                return (work.flops or work.bytes) / max(seconds if self.host else self.seconds(call), 1e-9)
            side, call = 2 * side, larger

    def least(self, call: Callable[[], Any]) -> float:
        """Seconds of the quickest of three calls: the first also loads and tunes, and others may share the machine."""
        return min(self._once(call) for _ in range(3))

    def seconds(self, call: Callable[[], Any]) -> float:
        """Seconds of a call: the median of three batches of about :data:`DEVICE_SECONDS`; on a CPU :meth:`least`."""
        if self.host:
            return self.least(call)
        count = math.ceil(DEVICE_SECONDS / max(self.least(call), 1e-6))
        return median(self._once(partial(_repeat, call, count)) for _ in range(3)) / count

    def _once(self, call: Callable[[], Any]) -> float:
        return seconds_of(call, self.device, self.clock)

    def _try_call(self, make: Callable[[int], Callable[[], Any]], side: int) -> Callable[[], Any] | None:
        """The call ``make(side)``, after one run; None if memory is short for it."""
        try:
            call = make(side)
            call()
        except Exception as error:
            if not is_shortage(error):
                raise
            return None
        return call
