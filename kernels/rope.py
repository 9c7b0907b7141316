"""RMS norms of queries and keys and their rotation, in one launch, written where attention reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .library import AUTO, KernelError, launches, operation
from .norm import standardized
from .terms import RMS, Norm, Pair, Tables, upcast


def qk_norm_rope(
    pair: Pair, tables: Tables | None, eps: float, text: Pair | None = None, out_dtype: torch.dtype | None = None,
    form: str = AUTO,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Queries and keys, RMS normed per head as (B, N, H, W) or across heads as (B, N, W), then rotated in pairs of
    neighbouring features by ``tables``, unless None; in fp32, rounded once to ``out_dtype``, by default their own.
    ``text`` is normed with its own weights, not rotated, and follows the tokens of ``pair`` in the contiguous results.
    Raises KernelError for an odd width with tables, and for tables not half as wide or of more tokens than ``pair``."""
    if tables is not None:
        check_tables(pair.q, tables)
    if not launches(pair.q, form):
        return qk_norm_rope_reference(pair, tables, eps, text, out_dtype)
    rotary = (None, None) if tables is None else (tables.cos, tables.sin)
    of_text = (None, None, None, None) if text is None else (text.q, text.k, text.q_weight, text.k_weight)
    return _QK_NORM_ROPE(pair.q, pair.k, pair.q_weight, pair.k_weight, *rotary, *of_text, eps, out_dtype)


def check_tables(x: Tensor, tables: Tables) -> None:
    """Raise KernelError for an odd width of ``x``, and for tables not half as wide or of more tokens than ``x`` has."""
    width = x.shape[-1]
    if width % 2:
        raise KernelError(
            f"rotary embedding turns pairs of features, and a head here is {width} wide; expected an even width. "
            "Choose kernels 'off' for this model."
        )
    for name, table in (("cos", tables.cos), ("sin", tables.sin)):
        if table.shape[-1] != width // 2:
            raise KernelError(
                f"rotary table {name} is {table.shape[-1]} wide for a head of {width}; expected {width // 2}, one "
                "value for each pair. Take every other one of diffusers' values."
            )
    tokens = tables.cos.shape[1 - x.ndim]  # N, counted from the end, as tables may lack the batch
    if tokens > x.shape[1]:
        raise KernelError(
            f"rotary tables for {tokens} tokens, but there are {x.shape[1]}; expected tables of at most as many. "
            "Make the tables for this size of video."
        )


def qk_norm_rope_reference(
    pair: Pair, tables: Tables | None, eps: float, text: Pair | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`qk_norm_rope` in plain torch, in fp32, or in fp64 for fp64."""
    streams = [(pair, tables)] if text is None else [(pair, tables), (text, None)]  # text is not rotated
    q = [rotate(_normed(each.q, each.q_weight, eps), turn).to(out_dtype or pair.q.dtype) for each, turn in streams]
    k = [rotate(_normed(each.k, each.k_weight, eps), turn).to(out_dtype or pair.k.dtype) for each, turn in streams]
    return torch.cat(q, dim=1), torch.cat(k, dim=1)


def rotate(x: Tensor, tables: Tables | None) -> Tensor:
    """``x`` (B, N, ..., W) with each pair of neighbouring features rotated; tokens past the tables stay as they are."""
    if tables is None:
        return x
    tokens = tables.cos.shape[1 - x.ndim]  # N, counted from the end, as tables may lack the batch
    if tokens != x.shape[1]:
        return torch.cat([rotate(x[:, :tokens], tables), x[:, tokens:]], dim=1)
    cos, sin = tables.cos.to(x.dtype), tables.sin.to(x.dtype)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return standardized(upcast(x), Norm(RMS, eps, weight))


def _fake(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Empty queries and keys, with the text's tokens behind those of ``q`` and ``k``; arguments as in the schema."""
    _q_weight, _k_weight, _cos, _sin, text_q, text_k, *_, out_dtype = rest
    results = []
    for x, text in ((q, text_q), (k, text_k)):
        tokens = x.shape[1] + (0 if text is None else text.shape[1])
        results.append(x.new_empty((x.shape[0], tokens, *x.shape[2:]), dtype=out_dtype or x.dtype))
    return results[0], results[1]


def _terms(q: Tensor, k: Tensor, *rest: Any) -> tuple[Any, ...]:
    """The arguments of :func:`qk_norm_rope_reference` from those of the schema."""
    q_weight, k_weight, cos, sin, text_q, text_k, text_q_weight, text_k_weight, eps, out_dtype = rest
    tables = None if cos is None else Tables(cos, sin)
    text = None if text_q is None else Pair(text_q, text_k, text_q_weight, text_k_weight)
    return Pair(q, k, q_weight, k_weight), tables, eps, text, out_dtype


_QK_NORM_ROPE = operation(
    "qk_norm_rope(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? sin, Tensor? text_q, "
    "Tensor? text_k, Tensor? text_q_weight, Tensor? text_k_weight, float eps, ScalarType? out_dtype) "
    "-> (Tensor, Tensor)",
    _fake,
    qk_norm_rope_reference,
    _terms,
)
