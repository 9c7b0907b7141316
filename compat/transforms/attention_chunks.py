"""Exact attention in parts that fit a budget of memory, for devices and dtypes without a fused kernel."""

from __future__ import annotations

import math
from itertools import product

import torch
from torch.nn import functional

from ..device.facts import MEBIBYTE
from .conv3d_methods import exact

UNKNOWN_BUDGET = 256 * MEBIBYTE
SCORE_BYTES = 4  # scores are fp32 here, and in torch's math too unless a program allows it reduced precision
WORKED_ON = torch.float32
SUMMED_KEYS = 16384  # of one product with the values: from 32,767 on M1 and M2 add memory beyond them (pytorch#195163)


def score_bytes(query: torch.Tensor, key: torch.Tensor) -> int:
    """Bytes of the whole score matrix of one call, which a fused kernel never builds."""
    return math.prod(query.shape[:-1]) * key.shape[-2] * SCORE_BYTES


def fp32_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, budget_bytes: int) -> torch.Tensor:
    """Attention of 16-bit operands by torch's fused fp32 kernel, where there is none for them: bf16 before sm80.
    Nothing is lost: each value is exact in fp32. As many heads are cast at a time as ``budget_bytes`` hold."""
    result = torch.empty_like(query)
    per_head = 2 * query.shape[0] * (query.shape[2] + key.shape[2]) * query.shape[3] * WORKED_ON.itemsize
    step = min(query.shape[1], max(1, budget_bytes // per_head))
    for first in range(0, query.shape[1], step):
        part = slice(first, first + step)
        # No names for the casts: they would be alive while those of the next heads are made.
        result[:, part] = functional.scaled_dot_product_attention(
            query[:, part].to(WORKED_ON), key[:, part].to(WORKED_ON), value[:, part].to(WORKED_ON)
        ).to(query.dtype)
    return result


def chunked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None, causal: bool = False,
    budget_bytes: int = UNKNOWN_BUDGET,
) -> torch.Tensor:  # fmt: skip
    """Exact attention in fp32, some queries at a time, with whole rows of scores: sums are those of torch's math.
    Arguments are those of :class:`Attention`; ``budget_bytes`` is the peak extra memory, unless one head's keys and
    values in fp32, or the scores of one query, take more. A query that sees no key gets zeros, as in torch's math.
    Only matrix products and elementwise operations are needed."""
    size = chunk_size(query, key, value, mask, causal, budget_bytes)
    result = query.new_empty(*query.shape[:-1], value.shape[-1])
    if mask is not None:
        mask = mask.expand(*query.shape[:-1], key.shape[-2])  # a view: no copy is made until a chunk is taken
    with exact(query.device):
        for rows, heads in product(_parts(query.shape[0], size[0]), _parts(query.shape[1], size[1])):
            keys, values = key[rows, heads].to(WORKED_ON).transpose(-1, -2), value[rows, heads].to(WORKED_ON)
            for queries in _parts(query.shape[2], size[2]):
                own_mask = None if mask is None else mask[rows, heads, queries]
                result[rows, heads, queries] = _chunk(
                    query[rows, heads, queries], keys, values, own_mask, queries.start if causal else None
                )
            del keys, values  # before those of the next head are cast
    return result


def chunk_size(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool,
    budget_bytes: int,
) -> tuple[int, int, int]:  # fmt: skip
    """The batch rows, heads and queries of :func:`chunked` at a time: of whole rows, else heads, else one head."""
    batch, heads, count, width = query.shape
    keys = key.shape[-2]
    # Besides the scores: the queries in fp32, twice as they are scaled, the result, and the masks.
    per_query = SCORE_BYTES * (keys + 2 * width + 2 * value.shape[-1] + 2)
    per_query += keys * (0 if mask is None else 2 * SCORE_BYTES) + keys * (2 if causal else 0)
    cast_bytes = SCORE_BYTES * keys * (width + value.shape[-1])  # of a head's keys and values, which have to be there
    queries = _even(count, max(budget_bytes - cast_bytes, budget_bytes // 8) // per_query)
    if queries < count:
        return 1, 1, queries
    head_bytes = cast_bytes + count * per_query
    at_once = _even(heads, budget_bytes // head_bytes)
    return (1 if at_once < heads else _even(batch, budget_bytes // (heads * head_bytes))), at_once, count


def _even(count: int, most: int) -> int:
    """The size of the fewest nearly equal parts of ``count`` that have at most ``most`` each; at least 1."""
    if count <= most or count == 0:
        return max(count, 1)
    return math.ceil(count / math.ceil(count / max(most, 1)))


def _parts(count: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def _chunk(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, first: int | None
) -> torch.Tensor:
    """Attention of some queries over all keys (B, H, D, M), in fp32; ``first`` is the first one's index, if causal.
    A function of its own, so that its scores are freed before the next chunk's are made."""
    scores = torch.matmul(query.to(WORKED_ON) * query.shape[-1] ** -0.5, keys)
    _hide(scores, mask, first)
    # In place, so that one copy of the scores is alive. A row of -inf alone must not become NaN.
    scores.sub_(scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(WORKED_ON).min)).exp_()
    total = scores.sum(-1, keepdim=True).clamp_(min=1.0)  # the largest score gives 1; no score gives 0
    parts = zip(scores.split(SUMMED_KEYS, -1), values.split(SUMMED_KEYS, -2), strict=True)
    result = torch.matmul(*next(parts))
    for part in parts:
        result += torch.matmul(*part)
    return result.div_(total)


def _hide(scores: torch.Tensor, mask: torch.Tensor | None, first: int | None) -> None:
    """Apply ``mask`` to ``scores`` (B, H, N, M) in place, and the causal one of queries from index ``first`` on."""
    if mask is not None and mask.dtype == torch.bool:
        scores.masked_fill_(mask.logical_not(), -math.inf)
    elif mask is not None:
        scores.add_(mask)
    if first is not None:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1 + first)
        scores.masked_fill_(later, -math.inf)
