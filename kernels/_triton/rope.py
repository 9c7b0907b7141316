"""The launch of :mod:`..rope`: a row is a head of a token, or a whole token. One program takes the same rows of queries
and keys in every sample, so that the tables, in fp32 and thus more bytes than a 16-bit row, are read once. Whole rows
are read and then split into pairs: reading every other feature would load two bytes at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..terms import Pair, Tables
from .norm import standardized
from .rounding import rounded, upcast
from .rows import block_for, empty, steps

# Few registers are left beside a row and its tables: with 8, ptxas takes 32 registers for full occupancy and spills.
PER_THREAD = 16


@triton.jit
def rotate_rows(
    x, out, weight, sample, row, count, heads, width, eps, x_b, x_n, x_h, out_n, offset,
    cos, sin, TURN: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Norm rows of one sample, rotate them if TURN, and store them ``offset`` tokens further on in ``out``."""
    column = tl.arange(0, COLUMNS)
    within = column < width
    inside = (row < count)[:, None] & within[None, :]
    token, head = row // heads, row % heads
    at = (sample * x_b + token * x_n + head * x_h)[:, None] + column[None, :]
    y = standardized(upcast(tl.load(x + at, mask=inside, other=0.0)), inside, width, eps, "rms")
    if weight is not None:
        y = y * upcast(tl.load(weight + column, mask=within, other=0.0))[None, :]
    if TURN:
        even, odd = tl.split(tl.reshape(y, (ROWS, COLUMNS // 2, 2)))
        y = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (ROWS, COLUMNS))
    at = ((sample * out_n + offset + token) * heads + head)[:, None] * width + column[None, :]
    tl.store(out + at, rounded(y, out.dtype.element_ty), mask=inside)


@triton.jit
def qk_norm_rope_kernel(
    q, k, q_out, k_out, q_weight, k_weight, cos, sin, text_q, text_k, text_q_weight, text_k_weight,
    batch, heads, width, eps, video_blocks, q_rows, k_rows, q_n, k_n, rotary_tokens, cos_b, cos_n, cos_h,
    text_q_rows, text_k_rows, q_b, q_t, q_h, k_b, k_t, k_h, text_q_b, text_q_t, text_q_h, text_k_b, text_k_t, text_k_h,
    TURN: tl.constexpr, SHARED: tl.constexpr, TEXT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of queries and keys of every sample: of the video in the first ``video_blocks`` programs, then of the
    text, which is stored behind the video and not rotated. SHARED: all samples have the same rotary tables."""
    block = tl.program_id(0)
    if block < video_blocks:
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        half = tl.arange(0, COLUMNS // 2)
        at = ((row // heads) * cos_n + (row % heads) * cos_h)[:, None] + half[None, :]
        tabled = (row // heads < rotary_tokens)[:, None] & (half < width // 2)[None, :]
        c, s = 1.0, 0.0  # cosine and sine of no rotation
        if TURN and SHARED:
            c = upcast(tl.load(cos + at, mask=tabled, other=1.0))
            s = upcast(tl.load(sin + at, mask=tabled, other=0.0))
        for sample in range(batch):
            at_sample = tl.cast(sample, tl.int64)
            if TURN and not SHARED:
                c = upcast(tl.load(cos + at_sample * cos_b + at, mask=tabled, other=1.0))
                s = upcast(tl.load(sin + at_sample * cos_b + at, mask=tabled, other=0.0))
            rotate_rows(
                q, q_out, q_weight, at_sample, row, q_rows, heads, width, eps, q_b, q_t, q_h, q_n, 0,
                c, s, TURN, COLUMNS, ROWS,
            )  # fmt: skip
            rotate_rows(
                k, k_out, k_weight, at_sample, row, k_rows, heads, width, eps, k_b, k_t, k_h, k_n, 0,
                c, s, TURN, COLUMNS, ROWS,
            )  # fmt: skip
    else:
        if TEXT:
            row = ((block - video_blocks) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
            for sample in range(batch):
                at_sample = tl.cast(sample, tl.int64)
                rotate_rows(
                    text_q, q_out, text_q_weight, at_sample, row, text_q_rows, heads, width, eps,
                    text_q_b, text_q_t, text_q_h, q_n, q_rows // heads, 1.0, 0.0, False, COLUMNS, ROWS,
                )  # fmt: skip
                rotate_rows(
                    text_k, k_out, text_k_weight, at_sample, row, text_k_rows, heads, width, eps,
                    text_k_b, text_k_t, text_k_h, k_n, k_rows // heads, 1.0, 0.0, False, COLUMNS, ROWS,
                )  # fmt: skip


def qk_norm_rope(
    pair: Pair, tables: Tables | None, eps: float, text: Pair | None, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """The operation ``qk_norm_rope`` on a device, or interpreted."""
    q, k, text_q, text_k = pair.q, pair.k, None if text is None else text.q, None if text is None else text.k
    q_tokens = q.shape[1] + (0 if text_q is None else text_q.shape[1])
    k_tokens = k.shape[1] + (0 if text_k is None else text_k.shape[1])
    q_out = empty(q, (q.shape[0], q_tokens, *q.shape[2:]), out_dtype)
    k_out = empty(k, (k.shape[0], k_tokens, *k.shape[2:]), out_dtype)
    if not q_out.numel() and not k_out.numel():
        return q_out, k_out
    cos, sin = (None, None) if tables is None else (_table(tables.cos, q.ndim), _table(tables.sin, q.ndim))
    q, k, text_q, text_k = (None if x is None else _heads(x) for x in (q, k, text_q, text_k))
    batch, _, heads, width = q.shape
    columns, block, warps = block_for(q, width, PER_THREAD)
    text_rows, video_blocks = max(_rows(text_q), _rows(text_k)), triton.cdiv(max(_rows(q), _rows(k)), block)
    if cos is not None and sin is not None and cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    rotary_tokens, cos_b, cos_n, cos_h = (0, 0, 0, 0) if cos is None else (cos.shape[1], *steps(cos))
    qk_norm_rope_kernel[(video_blocks + triton.cdiv(text_rows, block),)](
        q, k, q_out, k_out, pair.q_weight, pair.k_weight, cos, sin,
        text_q, text_k, None if text is None else text.q_weight, None if text is None else text.k_weight,
        batch, heads, width, eps, video_blocks, _rows(q), _rows(k), q_tokens, k_tokens,
        rotary_tokens, cos_b, cos_n, cos_h, _rows(text_q), _rows(text_k),
        *_steps(q), *_steps(k), *_steps(text_q), *_steps(text_k),
        TURN=cos is not None, SHARED=cos_b == 0, TEXT=text_rows > 0, COLUMNS=columns, ROWS=block,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return q_out, k_out


def _heads(x: Tensor) -> Tensor:
    """``x`` as (B, N, H, W) with adjacent features; a whole token is one head."""
    x = x if x.ndim == 4 else x.unsqueeze(2)
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(x: Tensor | None) -> int:
    """The number of rows of a sample: tokens times heads, 0 for None."""
    return 0 if x is None else x.shape[1] * x.shape[2]


def _steps(x: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2))


def _table(table: Tensor, dimensions: int) -> Tensor:
    """A rotary table as (B | 1, N, H | 1, W / 2), with adjacent features."""
    table = table if dimensions == 4 else table.unsqueeze(-2)
    table = table if table.ndim == 4 else table.unsqueeze(0)
    return table if table.stride(-1) == 1 else table.contiguous()
