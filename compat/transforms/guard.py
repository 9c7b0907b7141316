"""A guard inside the run: the first use of each operation, dtype and size class on a device is computed again for 64
rows on the host, in fp64, from the operands as the device holds them. A dispatch mode looks on in forwards of new
shapes. A miss is said once, replaced from then on by the first right one of ``PATHS``, and kept with the probes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only, tree_structure, tree_unflatten

from ...kernels.library import FAULTS, NAMESPACE
from ..device.execution import HOST, placed, to_host
from ..device.facts import DeviceFacts, value_or
from ..device.failures import is_shortage
from ..device.probe_store import IN_RUNS, ProbeStore
from ..device.quirks import policy_for
from ..device.rates import work_of
from ..errors import UnsupportedError, first_line
from ..memory.parts import Undo
from .attention_chunks import chunked
from .order import Back, Order, Step
from .plain_calls import PlainCalls, plain_calls

log = logging.getLogger(__name__)

AROUND = "_anygpu_around"  # on a VAE: the block for a decode that calls none of its children's forwards
ROWS, WHOLE = 64, 2**22  # of a sample; values of a group that can only be computed as a whole
OWN_WORK = 10  # operations of the host, about, for each value of one of our operations
SHARE, SECONDS = 0.01, 0.5  # of the work so far, and of each forward: what is left waits for the next one
# An entry y may be off by a|y| + b s, where s is the product of its operands' norms, or the largest value that it is
# made of: a and b by dtype. fp32 may be TF32; sums in 16 bits may be rounded between blocks.
BOUNDS = {torch.float32: (2**-10, 2**-10), torch.float16: (2**-9, 2**-8), torch.bfloat16: (2**-6, 2**-7)}
Sample = tuple[Tensor, Tensor, Tensor, int]  # values found, and exact in fp64; their s; how many operations that took
# From an operation's arguments by name and its first result (all results, for our operations) to a sample of values;
# None where a sample cannot be computed.
Check = Callable[[Mapping[str, Any], Any], "Sample | None"]


def _some(count: int) -> Tensor:
    """Indices of at most 64 of ``count`` rows: the ends, both sides of powers of two from 2^15 on, others evenly."""
    edges = [side for power in range(15, count.bit_length()) for side in (2**power - 1, 2**power) if side < count]
    left = min(count, ROWS - len(edges))
    return torch.tensor(sorted({*edges, *(step * (count - 1) // max(1, left - 1) for step in range(left))}))


def _exact(tensor: Tensor) -> Tensor:
    """``tensor`` on the host in fp64."""
    return to_host(tensor).double()


def _picked(tensor: Tensor, some: Tensor, axes: int | None = None) -> Tensor:
    """The entries of ``tensor`` at ``some`` flat indices of its first ``axes`` axes (None: all), on the host, fp64."""
    return _exact(tensor[tuple(each.to(tensor.device) for each in torch.unravel_index(some, tensor.shape[:axes]))])


def _product(given: Mapping[str, Any], result: Tensor) -> Sample:
    """64 rows and columns of a matrix product, with its bias; of a batch, of its last product."""
    first = next(name for name in ("mat1", "batch1", "input", "self") if name in given)
    a, b = given[first], given.get("mat2", given.get("batch2"))
    if b is None:  # linear, where it is an operation of its own
        b, bias = given["weight"].t(), given.get("bias")
    else:
        bias = None if first == "self" else given.get("self")  # addmm and baddbmm add it; mm and bmm multiply it
        a, b, result = (each[-1] if each.ndim == 3 else each for each in (a, b, result))
    rows, columns = _some(a.shape[:-1].numel()), _some(b.shape[1])
    left, right = _picked(a, rows, -1), _picked(b.t(), columns, 1)
    exact, beta = given.get("alpha", 1) * (left @ right.T), given.get("beta", 1)
    if bias is not None and beta:  # where it is 0 torch ignores the bias, which may be NaN
        bias = (bias[-1] if bias.ndim == 3 else bias).expand(result.shape)
        exact += beta * _picked(bias, rows, -1)[:, columns]
    return _picked(result, rows, -1)[:, columns], exact, _norms(left, right, exact), 2 * ROWS * ROWS * a.shape[-1]


def _norms(left: Tensor, right: Tensor, exact: Tensor) -> Tensor:
    """The s of a product's entries: norms of the left rows times norms of the right rows, and the entries' size."""
    return torch.outer(left.norm(dim=1), right.norm(dim=1)) + exact.abs()


def _attention(given: Mapping[str, Any], result: Tensor) -> Sample | None:
    """An attention at 64 queries of the last head of the last sample."""
    q, k, v = (given[name][-1, -1] for name in ("query", "key", "value"))
    rows, scale = _some(q.shape[0]), given.get("scale") or q.shape[-1] ** -0.5
    keys, values = _exact(k), _exact(v)
    scores, mask = _picked(q, rows, 1) @ keys.T * scale, given.get("attn_mask", given.get("attn_bias"))
    if mask is not None:
        scores += _picked(mask.expand(*given["query"].shape[:3], len(keys))[-1, -1], rows, 1)
    if given.get("is_causal"):
        scores.masked_fill_(torch.arange(len(keys)) > rows[:, None], -math.inf)
    exact = torch.softmax(scores, -1) @ values
    return _picked(result[-1, -1], rows, 1), exact, values.abs().max(), 4 * ROWS * k.numel()


def _convolution(given: Mapping[str, Any], result: Tensor) -> Sample | None:
    """64 pixels and channels, as a product of patches and filters; None if transposed, grouped or without a batch."""
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    if given.get("transposed") or given.get("groups", 1) != 1 or x.ndim != weight.ndim:
        return None
    some, channels = _some(result.numel() // result.shape[1]), _some(weight.shape[0])
    sample, *place = torch.unravel_index(some, (result.shape[0], *result.shape[2:]))
    taps = torch.unravel_index(torch.arange(weight[0, 0].numel()), weight.shape[2:])
    valid, spots = torch.ones(len(some), len(taps[0]), dtype=torch.bool), []
    steps = ([*given[name]] * (len(place) // len(given[name])) for name in ("stride", "padding", "dilation"))
    for at, tap, extent, stride, padding, dilation in zip(place, taps, x.shape[2:], *steps, strict=True):
        spot = at[:, None] * stride - padding + tap * dilation
        valid &= (spot >= 0) & (spot < extent)
        spots.append(spot.clamp(0, extent - 1).to(x.device))
    patches = _exact(x.movedim(1, -1)[(sample[:, None].to(x.device), *spots)]) * valid[..., None]
    filters = _picked(weight, channels, 1).flatten(2).movedim(1, 2)  # (O, taps, C)
    left, right = patches.flatten(1), filters.flatten(1)
    exact = left @ right.T + (0 if bias is None else _picked(bias, channels))
    found = _picked(result.movedim(1, -1), some, -1)[:, channels]
    return found, exact, _norms(left, right, exact), 2 * ROWS * ROWS * left.shape[1]


def _norm(given: Mapping[str, Any], result: Tensor) -> Sample | None:
    """64 rows of a layer or RMS norm, or the last group of a group norm; None where that group is too large."""
    x, weight, bias = given["input"], given.get("weight"), given.get("bias")
    eps = torch.finfo(torch.float32).eps if given.get("eps") is None else given["eps"]
    if groups := given.get("group"):  # the last group of the last sample
        channels, places = x.shape[1] // groups, x[0, 0].numel()
        if channels * places > WHOLE:
            return None
        found, values = (_exact(each.view(x.shape)[-1, -channels:]).reshape(1, -1) for each in (result, x))
        terms = [each if each is None else each[-channels:, None].expand(channels, places) for each in (weight, bias)]
    else:
        axes, terms = -len(given["normalized_shape"]), [weight, bias]
        rows = _some(x.shape[:axes].numel())
        found, values = (_picked(each, rows, axes).flatten(1) for each in (result, x))
    mean = 0 * values[:, :1] if "rms" in str(given["function"]) else values.mean(1, keepdim=True)
    scale = ((values - mean).square().mean(1, keepdim=True) + eps).rsqrt()
    weight, bias = (each if each is None else _exact(each).flatten() for each in terms)
    gain = scale if weight is None else scale * weight
    exact = (values - mean) * gain + (0 if bias is None else bias)
    rounded = (mean * gain).abs().max()  # torch's CUDA kernel rounds the mean of a group to the input's dtype
    return found, exact, exact.abs().max() + rounded, 4 * values.numel()


def _copy(given: Mapping[str, Any], result: Tensor) -> Sample | None:
    """Runs of 64 values all over a copy, exact unless the dtype changes; None if broadcast, non-blocking or scalar."""
    source, count = given.get("src", given.get("self")), result.numel()
    if source.shape != result.shape or given.get("non_blocking") or not result.ndim:
        return None
    some = (_some(max(1, count - ROWS + 1))[:, None] + torch.arange(min(ROWS, count))).flatten()
    found, exact = (_picked(each, some) for each in (result, source))
    exact = exact.to(result.dtype).double()
    if source.dtype is result.dtype:
        found = found.where(found == exact, math.nan)  # even a single NaN counts as wrong
    return found, exact, exact.new_tensor(1e-30), 2 * len(some)  # so small an s leaves only the relative bound


def _joined(given: Mapping[str, Any], result: Tensor) -> Sample | None:
    """One sample of the :func:`_copy` of each tensor that torch.cat put into ``result``, where there is one."""
    dim, sides = given.get("dim", 0), [each for each in given["tensors"] if each.numel()]
    parts = torch.split(result, [side.shape[dim] for side in sides], dim)
    pairs = [_copy({"src": side}, part) for side, part in zip(sides, parts, strict=True)]
    found, exact = (torch.cat([pair[:2][n] for pair in pairs if pair is not None]) for n in (0, 1))
    return found, exact, exact.new_tensor(1e-30), 2 * len(found)


def _gelu(given: Mapping[str, Any], result: Tensor) -> Sample | None:
    """:func:`_product` of our ``linear_gelu``, with GELU."""
    found, exact, size, count = _product({"input": given["x"], **given}, result)
    return found, nn.functional.gelu(exact, approximate="tanh"), size, count


def _own(given: Mapping[str, Any], results: Any) -> Sample | None:
    """One of our operations, cut to 64 tokens, or for a clip (5 axes) to its last group or row, against the same
    operation on the host, in fp64. None where the cut results have more than ``WHOLE`` values."""
    function, first = given["function"], given["args"][0]
    operands = {each.name: given[each.name] for each in function._schema.arguments}
    cut = _some_tokens if first.ndim < 5 else _last_of_clip
    cut_operands, cut_results = cut(operands, [each for each in tree_leaves(results) if each.numel()])
    if sum(each.numel() for each in cut_results) > WHOLE:
        return None
    found = [*map(_exact, cut_results)]
    computed = tree_leaves(function(*tree_map_only(Tensor, _exact, [*cut_operands.values()])))
    exact = [each.double() for each in computed if each.numel()]
    if "room" in operands and len(found) > 1:  # scaled SwiGLU: its last result is the power of two that divided a row
        ratio = found.pop() / exact.pop()  # at the edge of two powers either is right: taken out, and others are NaN
        found[0] *= ratio.where((ratio >= 0.5) & (ratio <= 2), math.nan)
    size = torch.cat([each.abs().amax().expand(each.numel()) for each in exact])
    values, exact_values = (torch.cat([each.flatten() for each in side]) for side in (found, exact))
    return values, exact_values, size, OWN_WORK * size.numel()


def _some_tokens(operands: dict[str, Any], results: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
    """Operands and results cut to at most 64 tokens; text behind them in a result is cut at the same indices, and
    operands without these tokens stay whole. ``split`` and ``gate_split`` count the picked ones among the first."""
    first, k, text = next(iter(operands.values())), operands.get("k"), operands.get("text_q")
    token_axis, text_tokens = min(1, first.ndim - 2), 0 if text is None else text.shape[1]
    tokens = first.shape[token_axis] if k is None else min(first.shape[1], k.shape[1])
    rows = _some(tokens)

    def at_rows(each: Tensor) -> Tensor:
        axis = each.ndim - first.ndim + token_axis  # aligned at the last axis; a tensor with fewer has no tokens
        if axis < 0 or (k is None and each.shape[axis] != tokens):
            return each
        return each.index_select(axis, rows[rows < each.shape[axis]].to(each.device))

    cut = tree_map_only(Tensor, at_rows, operands)
    cut |= {key: int((rows < operands[key]).sum()) for key in ("split", "gate_split") if operands.get(key)}
    parts = (each.split([each.shape[1] - text_tokens, text_tokens], 1) for each in results)
    return cut, [torch.cat([*map(at_rows, each)], 1) for each in parts]


def _last_of_clip(operands: dict[str, Any], results: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
    """Operands and result cut to the last sample, and in it to values that share their statistics: for a group norm the
    last group, in all frames or, if ``per_frame``, the last one; for a norm of each pixel the last frame's last row."""
    x, (left, right, top, bottom, front, back) = operands["x"], operands["pad"]
    groups, every = operands.get("groups"), slice(None)
    every_frame, every_row = not (groups is None or operands["per_frame"]), groups is not None
    channels = slice(-(x.shape[1] // groups), None) if groups else every

    def part(below: int, behind: int) -> tuple[slice, ...]:  # with so many padded rows and frames
        frames = every if every_frame else slice(-1 - behind, None)
        return slice(-1, None), channels, frames, every if every_row else slice(-1 - below, None)

    cuts = {5: part(0, 0), 2: (slice(-1, None),), 1: (channels,)}  # of x, a row per sample, a value per channel
    cut = tree_map_only(Tensor, lambda each: each[cuts[each.ndim]], operands)
    cut["pad"] = (left, right, top if every_row else 0, bottom, front if every_frame else 0, back)
    return cut | ({"groups": 1} if groups else {}), [results[0][part(bottom, back)]]


CHECKS: dict[str, Check] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "linear", "_int_mm"), _product),
    **{f"_scaled_dot_product_{kind}": _attention for kind in (
        "flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable",
        "attention_math_for_mps", "flash_attention_for_cpu",
    )},
    "convolution": _convolution,
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "_fused_rms_norm"), _norm),
    **dict.fromkeys(("_to_copy", "copy_", "clone"), _copy),
    "cat": _joined, "linear_gelu": _gelu,
}  # fmt: skip


def _named(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """All arguments of a call by the names of the operation's schema."""
    return {each.name: value for each, value in zip(function._schema.arguments, args, strict=False)} | kwargs


def _with_operands(change: Callable[[Tensor], Tensor], function: Any, args: Any, kwargs: Any) -> Any:
    """``function`` of its arguments with ``change`` applied to each tensor among them."""
    args, kwargs = tree_map_only(Tensor, change, (args, kwargs))
    return function(*args, **kwargs)


def _checkable(function: Any, output: Tensor) -> bool:
    """True for a result of integers or a dtype in ``BOUNDS`` (fp64 has no reference here, fp8 rounds as it likes), if
    it has values and its call may be repeated: ``copy_``, or an operation that changes no operand."""
    bounded = output.dtype in BOUNDS or not (output.is_floating_point() or output.is_complex())
    repeatable = function.overloadpacket.__name__ == "copy_" or not function._schema.is_mutable
    return bounded and repeatable and output.numel() > 0


def _alike(found: Any, result: Any) -> list[Tensor]:
    """The tensors of ``found``, each on the device and in the dtype of the same one of ``result``."""
    both = ([each for each in tree_leaves(side) if isinstance(each, Tensor)] for side in (found, result))
    return [placed(new, old.device).to(old.dtype) for new, old in zip(*both, strict=False)]


def _reference(function: Any, args: Any, kwargs: Any) -> Any:
    """One of our operations by its reference, instead of its kernel from now on; NotImplementedError for others."""
    if function.namespace != NAMESPACE:
        raise NotImplementedError
    FAULTS.setdefault((function.overloadpacket.__name__, args[0].device, args[0].dtype), "wrong in a run")
    return function(*args, **kwargs)


def _in_chunks(function: Any, args: Any, kwargs: Any) -> Tensor:
    """An attention in fp32, some queries at a time, with the mask and the scale of this call."""
    (query, key, value), given = args[:3], _named(function, args, kwargs)
    if scale := given.get("scale"):
        query = query.float() * (scale * query.shape[-1] ** 0.5)  # `chunked` divides by the root of the width
    return chunked(query, key, value, given.get("attn_mask", given.get("attn_bias")), bool(given.get("is_causal")))


AGAIN = "contiguous operands"
PATHS: dict[str, Callable[[Any, Any, Any], Any]] = {  # what replaces a call that was wrong, the least change first
    "its reference": _reference,
    AGAIN: partial(_with_operands, Tensor.contiguous),
    "chunks of queries": _in_chunks,
    "fp32": partial(_with_operands, lambda x: x.float() if x.is_floating_point() else x),
    "the host": partial(_with_operands, to_host),
}


class Guard(TorchDispatchMode):
    """The guard of one device; ``store`` saves what it has checked, ``clock`` returns seconds."""

    def __init__(self, store: ProbeStore, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self.store, self.clock = store, clock
        self.known = _saved_paths(store)  # by size class: the path that replaces its calls; empty where they are right
        self.work, self.spent = 0, 0  # operations of the model, and of checks, in all
        self.seconds, self.waits = 0.0, False  # of this forward: time spent on checks; some are left for the next one
        self.done: set[Any] = set()  # keys of forwards without anything left to check

    @contextmanager
    def looking(self, key: Any) -> Iterator[None]:
        """The block of one forward, watched if its ``key`` is new or any operation is replaced on this device. Findings
        are saved even if the block raises; ``key`` stays new while checks are left for the next forward."""
        if key in self.done and not any(self.known.values()):
            yield
            return
        self.seconds, self.waits, before = 0.0, False, dict(self.known)
        try:
            with self:
                yield
            if not self.waits:
                self.done.add(key)
        finally:  # a forward that is cut short has checked some operations, too
            if found := dict(self.known.items() - before.items()):
                found = {**_saved_paths(self.store, fresh=True), **found}  # with those of the device's other guards
                self.store.keep(IN_RUNS, found)
                self.known |= found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # results are plain here, as GGUF's tensors expect of torch
            return self._guarded(function, types, args, kwargs or {})

    def _guarded(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call, by the path that replaces it where its size class is wrong on this device. Calls on the
        CPU or without a check just run; NotImplemented lets torch take a packed tensor's copy apart."""
        name = function.overloadpacket.__name__
        check = CHECKS.get(name, _own if function.namespace == NAMESPACE else None)
        if check is _copy and any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # its parts come here: the values of a packed tensor depend on the dtype asked for
        if check is None and torch.is_inference_mode_enabled():
            with self:  # torch takes it apart before it asks a device, but not here
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = function(*args, **kwargs)
        output = next((each for each in tree_leaves(result) if isinstance(each, Tensor)), None)
        if output is None or output.device.type in ("cpu", "meta"):
            return result
        flops, moved = value_or(partial(work_of, function, args, kwargs, result), (0.0, 0))
        self.work += int(flops or moved) if name != "linear" else 2 * output.numel() * args[0].shape[-1]
        if check is None or not _checkable(function, output):
            return result
        path = self._path(check, function, args, kwargs, result)
        if not path:
            return result
        right = _alike(PATHS[path](function, args, kwargs), result)
        if name == "copy_":
            return output.view(right[0].shape).copy_(right[0])
        if check is not _own:  # the others are for a backward pass
            right = [right[0], *tree_leaves(result)[1:]]
        return tree_unflatten(right, tree_structure(result))

    def _path(self, check: Check, function: Any, args: Any, kwargs: Any, result: Any) -> str:
        """The path that replaces a call, empty for none; a new size class is checked, later if checks took too much."""
        key = _size_class(function.overloadpacket.__name__, args, tree_leaves(result)[0])
        if (known := self.known.get(key)) is not None:
            return known
        if self.seconds > SECONDS or self.spent > SHARE * self.work:
            self.waits = True
            return ""
        started = self.clock()
        given = {"function": function, "args": args, "kwargs": kwargs} | _named(function, args, kwargs)
        try:
            return self._checked(check, given, result, key)
        finally:
            self.seconds += self.clock() - started

    def _checked(self, check: Check, given: Mapping[str, Any], result: Any, key: str) -> str:
        """Check a call; note its path and return it: empty if right or not possible to check (noted unless memory is
        short), ``AGAIN``, noted as right, if right when repeated. UnsupportedError where every path is wrong."""
        function, args, kwargs = given["function"], given["args"], given["kwargs"]

        def wrong(result: Any) -> int:
            """The number of wrong values in a sample of ``result``; 0 without a sample, or for a single finite one."""
            outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
            output = outputs[0]
            sample = check(given, result if check is _own else output)
            if sample is None:
                return 0
            found, exact, size, work = sample
            self.spent += work
            a, b = max(BOUNDS.get(each.dtype, (0.0, 0.0)) for each in outputs)
            # Nothing is asked of values that the dtype cannot hold.
            fits = exact.abs() <= (torch.finfo(output.dtype).max if output.dtype in BOUNDS else math.inf)
            bad = ~((found - exact).abs() <= a * exact.abs() + b * size) & fits
            count = int(bad.sum())
            return count if count > 1 or found[bad].isnan().any() else 0

        try:
            if not (count := wrong(result)):
                self.known[key] = ""
                return ""
            if not function._schema.is_mutable and not wrong(function(*args, **kwargs)):
                log.warning("AnyGPU: %s was wrong once and then right: this device is unstable", key)
                self.known[key] = ""
                return AGAIN
        except Exception as error:
            log.debug("%s cannot be checked: %s", key, first_line(error))
            if is_shortage(error):  # another time
                self.waits = True
            else:
                self.known[key] = ""
            return ""
        for path, run in PATHS.items():
            try:
                if not wrong(tuple(_alike(run(function, args, kwargs), result))):
                    message = "AnyGPU: %s is wrong on this device (%d values of a sample): %s from now on"
                    log.warning(message, key, count, path)
                    self.known[key] = path
                    return path
            except Exception as error:
                log.debug("%s by %s: %s", key, path, first_line(error))
        found = f"{key} is wrong on this device, however it is computed"
        fix = "Update the driver and torch, or choose another device."
        raise UnsupportedError(found, expected="a device that computes right", fix=fix)


def _saved_paths(store: ProbeStore, fresh: bool = False) -> dict[str, str]:
    """The path of each size class that earlier runs checked, without paths that this version does not know."""
    saved = store.recall(IN_RUNS, fresh)
    return {key: path for key, path in saved.items() if path in ("", *PATHS)} if isinstance(saved, dict) else {}


def _size_class(name: str, args: Any, output: Tensor) -> str:
    """A key for calls that take the same kernel: operation; attention's head width; a convolution's stride, padding,
    dilation and groups; an "on" per True argument, as causal; dtype; of the first four tensors each the bit lengths of
    its sides, its last side modulo 8, and "c" where it is contiguous."""
    operands = [each for each in tree_leaves(args) if isinstance(each, Tensor)][:4]
    sizes = ["x".join(str(side.bit_length()) for side in each.shape) for each in operands]
    layouts = [f"{each.shape[-1] % 8 if each.ndim else 0}{'c' if each.is_contiguous() else '-'}" for each in operands]
    forms: list[Any] = []
    if "attention" in name:
        forms = [args[0].shape[-1:]]
    elif name == "convolution":
        forms = [*args[3:6], args[8:]]  # stride, padding and dilation; groups
    key = name + "".join(f" {'x'.join(map(str, form))}" for form in forms) + " on" * sum(each is True for each in args)
    key += " scaled" if name == "swiglu" and args[1] is not None else ""
    return f"{key} {str(output.dtype).removeprefix('torch.')} 2^({', '.join(sizes)}) {''.join(layouts)}"


def guard_of(store: ProbeStore | None, device: torch.device) -> Guard | None:
    """A guard of ``device``; None without a store that may run checks, and on a CPU, which is the reference itself."""
    return None if store is None or store.quiet or device.type == HOST.type else Guard(store)


def guard_step(store: ProbeStore | None, facts: DeviceFacts) -> Step:
    """The step that puts a guard and plain calls, where the device needs either, around a part's forward, or around the
    forwards of a VAE's children, and leaves the block at ``AROUND`` for decodes that call none of them."""
    inside = partial(around, guard_of(store, facts.device), plain_calls(policy_for(facts)))

    def apply(part: str, module: nn.Module) -> Back | None:
        if inside.args == (None, None):
            return None
        undo = Undo()
        if part == "vae":
            undo.set(module, AROUND, inside)
        for each in module.children() if part == "vae" else [module]:
            undo.set(each, "forward", forward_inside(each, inside))
        return undo.restore

    return Step(Order.GUARD, "guard", apply)


@contextmanager
def around(guard: Guard | None, calls: PlainCalls | None, key: tuple[Any, ...]) -> Iterator[None]:
    """The block of one forward, watched by ``guard`` and computed by ``calls``. ``key`` begins with the module, which
    is held weakly: another module at its address is new."""
    with calls or nullcontext(), nullcontext() if guard is None else guard.looking((ref(key[0]), *key[1:])):
        yield


def forward_inside(module: nn.Module, inside: Callable[[Any], AbstractContextManager[None]]) -> Callable[..., Any]:
    """The forward of ``module`` in the block ``inside(key)``, the key being the module, the call's shapes and dtypes
    and the module's dtype. A class's forward is looked up in each call, as hosts change classes. No hooks: torch calls
    none after core's cancel, a BaseException."""
    own = vars(module).get("forward")

    @wraps(module.forward)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        given = tuple((each.shape, each.dtype) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        width = next((each.dtype for each in module.parameters()), None)  # a VAE is widened in place
        with inside((module, given, width)):
            return own(*args, **kwargs) if own is not None else type(module).forward(module, *args, **kwargs)

    return guarded
