"""Core's attention calls: with fp16 operands where those are near enough and torch has a fused kernel for them, since
core's own functions build scores in that dtype; in exact chunks where torch has no kernel."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import comfy.ldm.modules.attention as core_attention
import torch
from comfy.ldm.modules.attention import attention_pytorch
from torch import Tensor, nn

from ...compat.device.execution import add_hook
from ...compat.repairs import other_attention_asked
from ...compat.transforms.attention import MATH_COPIES, Attention, fused_kernel
from ...compat.transforms.attention_chunks import chunked, score_bytes
from ...compat.transforms.fp16_layers import FULL, HALF, LIMIT, MOST_VALUE, Fp16Operands, fp16_operands, scales_for
from .layers import Counts

OVERRIDE = "optimized_attention_override"  # core's one slot for another attention
INNER = "_inside_attn_wrapper"  # core's argument that marks a call inside another
BUILDS_SCORES = ("attention_pytorch", "attention_basic", "attention_split", "attention_sub_quad")
"""Core's attention functions that build score matrices, or may: the rest are kernels of packages."""
MISSES_KERNELS = BUILDS_SCORES[1:]  # also where torch has a kernel: on Radeons that are not in core's list
SUMS_IN_FP16 = ("attention_sage", "attention3_sage")  # 64 values at a time, on some cards
WIDE_SUMS = ("attention_flash", "attention_xformers")
INT8 = "attention_comfy_kitchen_int8"  # takes fp32 of any size, in containers too
FUSED, EXACT, BY_INT8 = "by torch's fused kernel", "exact in fp32", "by comfy-kitchen's int8 kernel"
ASKED = "comfy_attention"  # attribute of newer core's layers: the attention that the model's file asks for


@dataclass(slots=True)
class Preference:
    """The attention function that the file of a model asks for in the layer that is running; None for none."""

    function: Callable[..., Tensor] | None = None

    @contextmanager
    def followed(self, network: nn.Module) -> Iterator[None]:
        """For the block, note the running layer's function: newer core drops it where there is an override."""

        def enter(layer: Any, *_: Any) -> None:
            self.function = layer.comfy_attention.function

        def leave(*_: Any) -> None:
            self.function = None

        asking = [each for each in network.modules() if getattr(getattr(each, ASKED, None), "function", None)]
        with ExitStack() as stack:
            for layer in asking:
                stack.enter_context(add_hook(layer, enter, before=True))
                stack.enter_context(add_hook(layer, leave, always_call=True))
            yield


@dataclass(slots=True)
class AttentionOverride:
    """The attention that core calls in the place of its own function."""

    attention: Attention  # computes where torch has no fused kernel
    safe: bool  # whether fp32 operands go to a kernel as fp16, where that is near to fp32
    before: Callable[..., Tensor] | None = None  # the override that another node has set, which then is the kernel
    counts: Counts | None = None
    preference: Preference = field(default_factory=Preference)  # the kernel that the running layer prefers
    refused: Callable[[], None] | None = None  # called where operands stay fp32
    exact: bool = False  # whether fp32 operands stay fp32; of text encoders that shows at their first layer

    @torch.compiler.disable  # which kernel computes, and in which dtype, is decided by the operands of each call
    def __call__(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Core's attention call, counted, by the layer's preference or ``func``; mixed dtypes are upcast to fp32."""
        if isinstance(func, functools.partial):  # this override, which a text encoder's layer passed on
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        kwargs.pop("preferred_attention", None)  # known by :class:`Preference`
        with self.counts.inside_attention() if self.counts is not None else nullcontext():
            if len({each.dtype for each in args[:3]}) > 1:  # some layers of a block in fp16, some not
                args = (*(each.to(FULL) for each in args[:3]), *args[3:])
            return self._computed(self.preference.function or func, *args, **kwargs)

    @property
    def container_function(self) -> Callable[..., Tensor]:
        """The int8 kernel for operands in containers; for other kernels AttributeError, at which core unpacks them."""
        asked = self.before or self.preference.function or core_attention.optimized_attention
        if self.exact or not _is_int8(asked):
            raise AttributeError("container_function")
        return functools.partial(self._packed, asked.container_function)  # type: ignore[attr-defined]

    def _packed(self, kernel: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        self._note(BY_INT8)
        return kernel(*args, **kwargs)

    def _computed(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """The result of the first kernel that suits these operands: int8, another package's or node's, torch's fused,
        core's own where its scores are small; else of the exact attention."""
        if _is_int8(self.before or func) and not self.exact:
            self._note(BY_INT8)
            return func(*args, **kwargs) if self.before is None else self.before(func, *args, **kwargs)
        query = args[0]
        plain = type(query) is Tensor and not query.requires_grad
        foreign = self.before is not None or _name(func) not in BUILDS_SCORES
        safe = self.safe and plain and query.dtype is FULL
        kernel = func if self.before is None else functools.partial(self.before, self._without_fp16_scores(func, safe))
        if not plain or (foreign and not safe):
            self._note(f"by {_name(kernel)}")
            return _with_small_values(kernel, *args, **kwargs)
        named = _named(func, args, kwargs)
        call = Heads.of(*args[:3], named)
        small = MATH_COPIES * score_bytes(call.query, call.key) <= self.attention.budget_bytes  # that core would build
        if safe:
            if (result := self._in_fp16(kernel, foreign, call, named)) is not None:
                return result
        elif call.has_kernel(query.dtype, self.attention):
            self._note(FUSED)
            return attention_pytorch(*args, **kwargs)  # type: ignore[no-any-return]
        elif query.dtype is not HALF and small and not self.attention.avoids(query.dtype, call.query.shape[-1]):
            self._note(f"by {_name(kernel)}")
            return kernel(*args, **kwargs)
        self._note(EXACT)
        return call.exact(self.attention)

    def _in_fp16(
        self, kernel: Callable[..., Tensor], foreign: bool, call: Heads, named: dict[str, Any]
    ) -> Tensor | None:
        """The fp32 result of a ``foreign`` kernel, else torch's, on fp16 operands. None if torch has no kernel for
        them, or if they are too inexact, which calls ``refused``."""
        if not foreign and not call.has_kernel(HALF, self.attention):
            return None
        operands = None if self.exact else fp16_operands(call.query, call.key, call.value, call.mask, call.gain)
        if operands is None:
            if self.refused is not None:
                self.refused()
            return None
        self._note(f"{f'by {_name(kernel)}' if foreign else FUSED} in fp16")
        return _by_other(kernel, call, operands, named) if foreign else _by_torch(call, operands, named)

    def _without_fp16_scores(self, func: Callable[..., Tensor], safe: bool) -> Callable[..., Tensor]:
        """``func`` for another node's attention to call; a fused or exact kernel if it would build scores in fp16."""
        if not safe or _name(func) not in BUILDS_SCORES:
            return func

        @functools.wraps(func)
        def computed(*args: Any, **kwargs: Any) -> Tensor:
            call = Heads.of(*args[:3], _named(func, args, kwargs))
            if call.has_kernel(args[0].dtype, self.attention):
                return attention_pytorch(*args, **kwargs)  # type: ignore[no-any-return]
            return call.exact(self.attention).to(args[0].dtype)

        return computed

    def _note(self, way: str) -> None:
        if self.counts is not None:
            self.counts.ways[way] += 1


def _with_small_values(kernel: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The result of a package's kernel; if it sums in fp16, with 16-bit values scaled so that sums hold them."""
    value = args[2]
    plain = type(value) is Tensor and value.dtype.itemsize == 2 and not value.requires_grad
    if not plain or _name(kernel) in WIDE_SUMS:
        return kernel(*args, **kwargs)
    scale = scales_for(value.abs().amax().float(), LIMIT / MOST_VALUE).to(value.dtype)
    return kernel(*args[:2], value / scale, *args[3:], **kwargs) * scale


def _is_int8(kernel: Any) -> bool:
    packed = getattr(kernel, "container_function", None)
    return _name(kernel) == INT8 or (packed is not None and packed is getattr(core_attention, INT8).container_function)


def _by_torch(call: Heads, operands: Fp16Operands, named: dict[str, Any]) -> Tensor:
    """The fp32 result of torch's kernel, by core's function for it, on fp16 operands."""
    more = {INNER: True} | ({} if named.get("scale") is None else {"scale": named["scale"]})
    query, key, value, heads = operands.query, operands.key, operands.value, call.query.shape[1]
    # core returns many rows as (B, N, H * D), whatever skip_output_reshape asks
    result = attention_pytorch(query, key, value, heads, mask=operands.mask, skip_reshape=True, **more)
    return call.merged(result.unflatten(-1, (heads, -1)).transpose(1, 2).to(FULL) * operands.scale)


def _by_other(kernel: Callable[..., Tensor], call: Heads, operands: Fp16Operands, named: dict[str, Any]) -> Tensor:
    """The fp32 result of another package's or node's ``kernel`` on fp16 operands, in the layout that core asked for."""
    query, key, value = operands.query, operands.key, operands.value
    if not named.get("skip_reshape"):
        query, key, value = (each.transpose(1, 2).flatten(2) for each in (query, key, value))
    mask = named.get("mask")
    named = named | ({"mask": operands.mask.reshape(mask.shape)} if isinstance(mask, Tensor) else {})
    named = named | ({"enable_gqa": False} if "enable_gqa" in named else {})  # keys are repeated by now
    result = kernel(query, key, value, named.pop("heads"), **named)
    heads = result if call.split else result.unflatten(-1, (call.query.shape[1], -1)).transpose(1, 2)
    return call.merged(heads.to(FULL) * operands.scale)


@dataclass(frozen=True, slots=True)
class AttentionOnRequest:
    """Exact attention in fp32 for layers under a repair that asks for it, whichever kernel core has; else core's."""

    before: Callable[..., Tensor] | None = None

    def __call__(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if not other_attention_asked():
            kernel = func if self.before is None else functools.partial(self.before, func)
            return kernel(*args, **kwargs)
        call = Heads.of(*args[:3], _named(func, args, kwargs))
        return call.merged(chunked(call.query.float() * call.gain, call.key, call.value, call.mask)).to(args[2].dtype)


def compute_next(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Have core's EasyCache compute the next call: it repeats a step, and the cache would count it as another one."""
    for options in (*args, *kwargs.values()):
        if isinstance(options, dict) and (cache := options.get("easycache")) is not None:
            cache.relative_transformation_rate = None


def rewinding(args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], None]:
    """A function to call before these arguments are computed again: caches of core's SamplerARVideo end as now."""
    states = [each["ar_state"] for each in (*args, *kwargs.values()) if isinstance(each, dict) and "ar_state" in each]
    ends = [(cache, cache["end"]) for state in states for cache in state["kv_caches"]]
    return lambda: [cache.update(end=end) for cache, end in ends] and None


def with_override(
    make: Callable[[Callable[..., Tensor] | None], Callable[..., Tensor]], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Core's arguments for a network with the attention override that ``make`` builds from the present one or None."""

    def changed(value: Any, name: str = "") -> Any:  # passed by position, they are known by their wrappers
        ours = isinstance(value, dict) and (name == "transformer_options" or "wrappers" in value)
        return {**value, OVERRIDE: make(value.get(OVERRIDE))} if ours else value

    return [*map(changed, args)], {name: changed(value, name) for name, value in kwargs.items()}


@dataclass(frozen=True, slots=True)
class Heads:
    """The operands of one call as (B, H, N, D)."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None  # of four dimensions that broadcast to (B, H, N, M)
    gain: float  # factor of the queries, 1 for the usual scale of 1 / sqrt(D)
    split: bool  # whether the caller wants (B, H, N, D) back instead of (B, N, H * D)

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, named: dict[str, Any]) -> Heads:
        """Core's operands (B, N, H * D), or with ``skip_reshape`` (B, H, N, D); repeats grouped keys and values."""
        if not named.get("skip_reshape"):
            width = query.shape[-1] // named["heads"]
            # core takes keys and values as (B, N, H, D) too
            by_head = (tensor.flatten(2).unflatten(-1, (-1, width)) for tensor in (query, key, value))
            query, key, value = (tensor.transpose(1, 2) for tensor in by_head)
        if key.shape[1] != query.shape[1]:
            key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
        mask, scale = named.get("mask"), named.get("scale")
        if isinstance(mask, Tensor):
            mask = mask[None] if mask.ndim == 2 else mask
            mask = mask[:, None] if mask.ndim == 3 else mask
        gain = 1.0 if scale is None else scale * query.shape[-1] ** 0.5
        return cls(query, key, value, mask, gain, bool(named.get("skip_output_reshape")))

    def has_kernel(self, dtype: torch.dtype, attention: Attention) -> bool:
        """True if torch has a fused kernel that is right for these operands in ``dtype``; asks with empty ones."""
        if attention.avoids(dtype, self.query.shape[-1]):
            return False
        mask = self.mask
        if mask is not None and mask.dtype != dtype and mask.is_floating_point():
            mask = mask.new_empty((1, 1, 1, mask.shape[-1]), dtype=dtype).expand(mask.shape)
        operands = (self.query, self.key, self.value)
        like = (each.new_empty((1, 1, 1, each.shape[-1]), dtype=dtype).expand(each.shape) for each in operands)
        return bool(fused_kernel(*like, mask))

    def exact(self, attention: Attention) -> Tensor:
        """The result of our own ``attention``, in the caller's layout."""
        query, key, value, mask = self.query, self.key, self.value, self.mask
        if mask is not None and mask.is_floating_point():
            mask = mask.to(query.dtype)
        return self.merged(attention(query if self.gain == 1.0 else query * self.gain, key, value, mask))

    def merged(self, result: Tensor) -> Tensor:
        return result if self.split else result.transpose(1, 2).flatten(2)


def _named(func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of core's function after q, k and v, by name: the order of its arguments has changed before."""
    return dict(zip(_names(func)[3:], args[3:], strict=False)) | kwargs


@functools.cache
def _names(func: Callable[..., Tensor]) -> tuple[str, ...]:
    return tuple(inspect.signature(func).parameters)


def _name(kernel: Callable[..., Tensor]) -> str:
    return str(getattr(kernel, "__name__", "another node's attention"))
