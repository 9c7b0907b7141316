"""Core's attention calls: in fp16 under safe fp16, and in exact chunks where torch would build all scores at once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.ops
import torch
from torch import Tensor

from ...compat.repairs import other_attention_asked
from ...compat.transforms.attention import MATH_COPIES, Attention, fused_kernel
from ...compat.transforms.attention_chunks import chunked, score_bytes
from ...compat.transforms.fp16_layers import EXPONENT, FULL, HALF, LIMIT

OVERRIDE = "optimized_attention_override"  # core's one slot for another attention
BUILDS_SCORES = ("attention_pytorch", "attention_basic", "attention_split", "attention_sub_quad")
"""Core's attention functions that build score matrices, or may: the rest are kernels of packages."""

LEAST = torch.finfo(HALF).min


@dataclass(frozen=True, slots=True)
class AttentionOverride:
    """What core calls in the place of its attention function.

    Args:
        attention: computes where torch has no fused kernel.
        safe: whether fp32 operands go to a kernel as fp16.
        before: the override that another node has set, which then is the kernel.
    """

    attention: Attention
    safe: bool
    before: Callable[..., Tensor] | None = None

    def __call__(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """What ``func`` returns for core's arguments: q, k, v, heads, and the rest by name or in its order."""
        if isinstance(func, functools.partial):  # a text encoder's layer hands what it was given to the next
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        kernel = func if self.before is None else functools.partial(self.before, func)
        query, key, value = args[:3]
        if type(query) is not Tensor or query.requires_grad:
            return kernel(*args, **kwargs)
        named = dict(zip(_names(func)[3:], args[3:], strict=False)) | kwargs
        foreign = self.before is not None or func.__name__ not in BUILDS_SCORES
        safe = self.safe and query.dtype is FULL
        if foreign and not safe:
            return kernel(*args, **kwargs)
        if foreign or torch.compiler.is_compiling():
            return self._in_fp16(kernel, query, key, value, named) if safe else kernel(*args, **kwargs)
        call = Heads.of(query, key, value, named)
        if call.has_kernel(HALF if safe else query.dtype, self.attention):
            return self._in_fp16(kernel, query, key, value, named) if safe else kernel(*args, **kwargs)
        small = MATH_COPIES * score_bytes(call.query, call.key) <= self.attention.budget_bytes
        if small and not safe and query.dtype not in self.attention.avoided:
            return kernel(*args, **kwargs)
        queries = call.query if call.gain == 1.0 else call.query * call.gain
        return call.merged(self.attention(queries, call.key, call.value, call.mask))

    def _in_fp16(
        self, kernel: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, named: dict[str, Any]
    ) -> Tensor:
        """``kernel`` on fp16 operands, and its result in fp32."""
        query, key = balance(query, key)
        value, scale = scale_values(value)
        mask = named.get("mask")
        named = named | ({"mask": narrow_mask(mask)} if isinstance(mask, Tensor) else {})
        heads = named.pop("heads")
        return kernel(query, key, value, heads, **named).to(FULL) * scale


@dataclass(frozen=True, slots=True)
class AttentionOnRequest:
    """Exact attention in fp32 for layers under a repair that asks for it, whichever kernel core has; else core's own.

    Args:
        before: as in :class:`AttentionOverride`.
    """

    before: Callable[..., Tensor] | None = None

    def __call__(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """What ``func`` returns for core's arguments."""
        if not other_attention_asked():
            kernel = func if self.before is None else functools.partial(self.before, func)
            return kernel(*args, **kwargs)
        call = Heads.of(*args[:3], dict(zip(_names(func)[3:], args[3:], strict=False)) | kwargs)
        return call.merged(chunked(call.query.float() * call.gain, call.key, call.value, call.mask)).to(args[2].dtype)


def with_override(
    make: Callable[[Callable[..., Tensor] | None], Callable[..., Tensor]], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of core's call of a network with another attention in a copy of its options.

    Args:
        make: the attention, from the one that another node has set or None.
    """
    given, named = list(args), dict(kwargs)
    place = next((index for index, value in enumerate(given) if _is_options(value)), None)
    known = given[place] if place is not None else named.get("transformer_options", {})
    changed = {**known, OVERRIDE: make(known.get(OVERRIDE))}
    if place is None:
        named["transformer_options"] = changed
    else:
        given[place] = changed
    return given, named


def _is_options(value: Any) -> bool:
    """Whether an argument is core's options: the only dictionary with the wrappers in it."""
    return isinstance(value, dict) and "wrappers" in value


@dataclass(frozen=True, slots=True)
class Heads:
    """The operands of one call as (B, H, N, D), and how its result is laid out.

    Args:
        mask: broadcast to (B, H, N, M), or None.
        gain: what queries are multiplied by for another scale than usual.
        split: whether the caller wants (B, H, N, D) back instead of (B, N, H * D).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    gain: float
    split: bool

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, named: dict[str, Any]) -> Heads:
        """The operands that core gave as (B, N, H * D), or as (B, H, N, D) with ``skip_reshape``."""
        heads = named["heads"]
        if not named.get("skip_reshape"):
            width = query.shape[-1] // heads
            apart = (tensor.flatten(2).unflatten(-1, (-1, width)) for tensor in (query, key, value))
            query, key, value = (tensor.transpose(1, 2) for tensor in apart)
        if key.shape[1] != query.shape[1]:
            key, value = comfy.ops.repeat_kv_for_gqa(key, value, query.shape[1], 1)
        mask, scale = named.get("mask"), named.get("scale")
        if isinstance(mask, Tensor):
            mask = mask[None] if mask.ndim == 2 else mask
            mask = mask[:, None] if mask.ndim == 3 else mask
        gain = 1.0 if scale is None else scale * query.shape[-1] ** 0.5
        return cls(query, key, value, mask, gain, bool(named.get("skip_output_reshape")))

    def has_kernel(self, dtype: torch.dtype, attention: Attention) -> bool:
        """Whether torch has a right and fused kernel for these operands in ``dtype``; nothing is cast to ask."""
        if dtype in attention.avoided:
            return False
        mask = self.mask
        if mask is not None and mask.dtype != dtype and mask.is_floating_point():
            mask = torch.empty_like(mask, dtype=dtype)
        return bool(fused_kernel(*(_like(each, dtype) for each in (self.query, self.key, self.value)), mask))

    def merged(self, result: Tensor) -> Tensor:
        """The result in the caller's layout."""
        return result if self.split else result.transpose(1, 2).flatten(2)


def balance(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys in fp16 whose products are as before: the power of two that evens them out is exact.

    Either could overflow only where scores are beyond 4e9, which softmax turns into 0 and 1 anyway.
    """
    least = torch.finfo(FULL).tiny
    high, low = (tensor.abs().amax().clamp_(min=least) for tensor in (query, key))
    scale = _power_of_two((high / low).sqrt_())
    return (query / scale).to(HALF), (key * scale).to(HALF)


def scale_values(value: Tensor) -> tuple[Tensor, Tensor]:
    """Values in fp16, divided by one power of two of at least 1 where they would not fit, and that power."""
    scale = _power_of_two(value.abs().amax() * (2.0 / LIMIT)).clamp_(min=1.0)
    return (value / scale).to(HALF), scale


def narrow_mask(mask: Tensor) -> Tensor:
    """A mask for fp16 operands: what hides a key stays finite, so that a row with no key is not NaN."""
    return mask.clamp(min=LEAST).to(HALF) if mask.is_floating_point() else mask


def _power_of_two(x: Tensor) -> Tensor:
    """The next lower power of two, by the exponent bits alone: exact on every device."""
    return (x.view(torch.int32) & EXPONENT).view(FULL)


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What looks like ``tensor`` in ``dtype`` to torch's choice of a kernel, and takes no memory."""
    return tensor.new_empty((1, 1, 1, tensor.shape[-1]), dtype=dtype).expand(tensor.shape)


@functools.cache
def _names(func: Callable[..., Tensor]) -> tuple[str, ...]:
    """The names of the arguments of core's function, whose order has changed before."""
    return tuple(inspect.signature(func).parameters)
