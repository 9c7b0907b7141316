"""Calls of attention with finite operands of every size and shape that went wrong once, and kernels in emulation."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

HALF, FULL = torch.float16, torch.float32
SHAPE = (1, 2, 70, 64)
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or SHAPE), generator=torch.Generator().manual_seed(seed))


def exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    query, key, value = (each.double() for each in (query, key, value))
    mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    return functional.scaled_dot_product_attention(query, key, value, mask)


def scores_before_the_scale(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """As core's basic and split attention: raw scores in the operands' dtype."""
    scores = (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    return _masked(scores, mask).softmax(-1).to(value.dtype) @ value


def scaled_scores(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """As core's sub_quad with all keys at once, and torch's math under core's flag."""
    scores = ((query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)).to(query.dtype)
    return _masked(scores, mask).softmax(-1) @ value


def sums_of_64_keys_in_fp16(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """As SageAttention's Triton kernel: exponents of the running maximum, products with values summed in fp16."""
    scores = _masked(query.float() @ key.float().transpose(-1, -2) * query.shape[-1] ** -0.5, mask)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    sums = [(w.to(HALF) @ v).float() for w, v in zip(weights.split(64, -1), value.split(64, -2), strict=True)]
    return sum(sums[1:], sums[0]) / weights.sum(-1, keepdim=True)


def in_8_bits(values: Tensor, axis: int) -> Tensor:
    """Values as int8 holds them, with a scale for each line along an axis."""
    scale = values.float().abs().amax(axis, keepdim=True).clamp(min=1e-30) / 127
    return (values.float() / scale).round() * scale


def sage(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """As SageAttention's Triton kernel with its int8 queries and keys, a scale for each 64 of them."""
    query, key = (torch.cat([in_8_bits(part.flatten(-2), -1).view_as(part) for part in each.split(64, -2)], -2)
                  for each in (query, key))  # fmt: skip
    return sums_of_64_keys_in_fp16(query, key, value.to(HALF), mask)


def all_in_int8(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """As a kernel with int8 for all operands: queries, keys and weights by row, values by channel."""
    query, key, value = in_8_bits(query, -1), in_8_bits(key, -1), in_8_bits(value, -2)
    scores = _masked(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5, mask)
    return in_8_bits(scores.softmax(-1), -1) @ value


def fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, mask)


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask.to(scores.dtype)


def crafted() -> Iterator[tuple[str, Tensor, Tensor, Tensor, Tensor | None]]:
    """Finite operands of every size and shape that went wrong once, or might."""
    one = torch.zeros(SHAPE)
    query, key, value = drawn(1), drawn(2), drawn(3)
    yield "usual", query, key, value, None
    big_q, big_k = one.clone(), one.clone()
    big_q[..., 0], big_k[..., 0] = 65600.0, 16450.0
    yield "one channel beyond 2^30", big_q, big_k, value, None
    apart_q, apart_k = one.clone(), one.clone()
    apart_q[..., 0], apart_k[..., 1] = 7e4, 7e4
    apart_q[0, 0, 3, 2], apart_k[0, 0, 5, 2] = 1.0, 8.0
    yield "maxima in different channels", apart_q, apart_k, value, None
    cancelled_q, cancelled_k = query.clone(), key.clone()
    cancelled_q[..., :2], cancelled_k[..., 0], cancelled_k[..., 1] = 1e5, 1e5, -1e5
    yield "terms that cancel", cancelled_q, cancelled_k, value, None
    yield "no queries", one, key * 1e10, value, None
    yield "no keys", query * 1e10, one, value, None
    yield "raw scores beyond fp16", query.abs() * 40, key.abs() * 40, value, None
    yield "one head larger", query * torch.tensor([1.0, 1e6]).view(1, 2, 1, 1), key, value, None
    for q, k, v in ((1e-4, 1e4, 1.0), (1e4, 1e-4, 1e4), (1e-25, 1e15, 1e-30), (1e4, 1e4, 1e4), (3.0, 3.0, 1e30)):
        yield f"q x {q}, k x {k}, v x {v}", query * q, key * k, value * v, None
    spread = value.clone()
    spread[..., 0, :] *= 1e12  # of a key that is hidden
    seen = torch.ones(1, 1, 1, 70, dtype=torch.bool)
    seen[..., 0] = False
    yield "a large value behind a mask", query, key, spread, seen
    hidden = torch.zeros(1, 1, 70, 70).masked_fill_(torch.ones(70, 70).triu_(1).bool(), torch.finfo(FULL).min)
    yield "a causal mask of the least number", query, key, value, hidden
    yield "a row that sees no key", query, key, value, torch.full((1, 1, 70, 70), torch.finfo(FULL).min)
    yield "a large bias", query, key, value, 3000.3 + drawn(4, 1, 2, 70, 70)
    yield "a bias beyond fp16", query, key, value, 1e5 + 5 * drawn(4, 1, 2, 70, 70)
    yield "a small bias", query, key, value, drawn(4, 1, 2, 70, 70)
