"""The attention and the feed-forward of transformer blocks on fused operations: norms of queries and keys and their
rotation are one pass; rotary tables are halved once for all blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.activation import swiglu
from ...kernels.product import linear_gelu
from ...kernels.rope import qk_norm_rope
from ...kernels.terms import Pair, Tables
from ..memory.hooks import is_hooked_by_others, weights_on
from .attention_processors import CrossProcessor, JointProcessor, Processor, heads_of
from .blocks import is_plain_linear, norm_of

FORM = "_anygpu_kernels"  # on a rewritten module: which form of an operation it runs


def gated_feed(gated: Any, hidden_states: Tensor) -> Tensor:
    """Upstream ``SwiGLU.forward``."""
    return swiglu(gated.proj(hidden_states), form=getattr(gated, FORM))


def gelu_feed(gated: Any, hidden_states: Tensor) -> Tensor:
    """Upstream ``GELU.forward`` of a feed-forward; a plain Linear applies GELU in the epilogue of its own matmul."""
    if not is_plain_linear(gated.proj):
        return gated.gelu(gated.proj(hidden_states))
    with weights_on(gated.proj, like=hidden_states) as (weight, bias):
        return linear_gelu(hidden_states, weight, bias, form=getattr(gated, FORM))


class FusedProcessor(Processor):
    """A processor on fused operations, set up by ``replace_attention``; ``narrow`` queries and keys are fp16."""

    def __init__(self, form: str, narrow: bool = False) -> None:
        super().__init__()
        self.form, self.out_dtype = form, torch.float16 if narrow else None


class FusedCross(FusedProcessor, CrossProcessor):
    """LTX-Video: queries and keys (B, N, D) are normed across heads and rotated in one pass."""

    def queries_and_keys(self, attn: Any, tokens: Tensor, seen: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
        """``CrossProcessor.queries_and_keys`` in one fused pass; fp16 if the processor is ``narrow``."""
        query, key = attn.to_q(tokens), attn.to_k(seen)
        with norm_of(attn.norm_q, query) as norm, norm_of(attn.norm_k, key) as other:
            pair, tables = Pair(query, key, norm.weight, other.weight), half(rotary, query.shape[-1])
            return qk_norm_rope(pair, tables, norm.eps, out_dtype=self.out_dtype, form=self.form)


class FusedJoint(FusedProcessor, JointProcessor):
    """HunyuanVideo, FramePack, HunyuanVideo 1.5, Mochi: queries and keys are normed per head, text is not rotated.
    Called without text it returns one tensor, else (video, text); only two streams pass their output layers here."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None, image_rotary_emb: Any = None,
    ) -> Any:  # fmt: skip
        text = encoder_hidden_states
        if text is not None and getattr(attn, "add_q_proj", None) is None:  # one stream that is handed over in two
            attention = self(attn, torch.cat([hidden_states, text], dim=1), None, attention_mask, image_rotary_emb)
            return attention.split([hidden_states.shape[1], text.shape[1]], dim=1)
        query, key = (heads_of(attn, layer, hidden_states) for layer in (attn.to_q, attn.to_k))
        value = attn.to_v(hidden_states) if text is None else _values(attn, hidden_states, text)
        value = value.unflatten(2, (attn.heads, -1))
        tables = half(image_rotary_emb, query.shape[-1], per_head=True)
        with norm_of(attn.norm_q, query) as norm, norm_of(attn.norm_k, key) as other:
            query, key = self._rotated(attn, Pair(query, key, norm.weight, other.weight), tables, norm.eps, text)
        given = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        if text is None:
            attention = self._attend_joint(*given, attention_mask)
            return attention.transpose(1, 2).flatten(2).to(query.dtype)
        count, video, last = hidden_states.shape[1], [], []
        for row in self._attend_rows(*given, attention_mask):
            here, beside = row.split([count, row.shape[0] - count])
            video.append(here.to(query.dtype))
            last.append(functional.pad(beside, (0, 0, 0, key.shape[1] - row.shape[0])).to(query.dtype))
        add_out = getattr(attn, "to_add_out", None)
        text = torch.stack(last) if add_out is None else _stacked(add_out, last)
        return attn.to_out[1](_stacked(attn.to_out[0], video)), text

    def _attend_rows(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Iterable[Tensor]:
        """The result of each batch row: (n, D) without its padding, if that is known as an int, else (N, D)."""
        padding = self.padding.joint
        if padding is None or not all(isinstance(number, int) for number in padding) or not any(padding):
            return self._attend_joint(query, key, value, mask).transpose(1, 2).flatten(2).unbind()
        ends = [key.shape[2] - int(padded) for padded in padding]
        rows = (tuple(each[row : row + 1, :, :end] for each in (query, key, value)) for row, end in enumerate(ends))
        return [self.attend(*row).transpose(1, 2).flatten(2)[0] for row in rows]

    def _rotated(
        self, attn: Any, pair: Pair, tables: Tables | None, eps: float, text: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys, normed and rotated; those of ``text``, if any, follow them, normed but not rotated."""
        if text is None:
            return qk_norm_rope(pair, tables, eps, out_dtype=self.out_dtype, form=self.form)
        query, key = heads_of(attn, attn.add_q_proj, text), heads_of(attn, attn.add_k_proj, text)
        with norm_of(attn.norm_added_q, query) as norm, norm_of(attn.norm_added_k, key) as other:
            text_pair = Pair(query, key, norm.weight, other.weight)
            return qk_norm_rope(pair, tables, eps, text_pair, self.out_dtype, self.form)


def _values(attn: Any, tokens: Tensor, text: Tensor) -> Tensor:
    """Values (B, N + M, D) of video and text; two bare Linears write straight into the result."""
    layers = (attn.to_v, attn.add_v_proj)
    if not all(map(_is_bare, layers)):
        return torch.cat([layer(x) for layer, x in zip(layers, (tokens, text), strict=True)], dim=1)
    count = tokens.shape[1]
    joined = tokens.new_empty(tokens.shape[0], count + text.shape[1], layers[0].out_features)
    _write(layers[0], tokens, joined[:, :count])
    _write(layers[1], text, joined[:, count:])
    return joined


def _stacked(layer: Any, rows: list[Tensor]) -> Tensor:
    """``layer`` applied to rows (N, D), stacked as (B, N, E); a bare Linear writes straight into the result."""
    if not _is_bare(layer):
        return layer(torch.stack(rows) if len(rows) > 1 else rows[0].unsqueeze(0))
    result = rows[0].new_empty(len(rows), len(rows[0]), layer.out_features)
    _write(layer, rows, result)
    return result


def _write(layer: nn.Linear, rows: Iterable[Tensor], result: Tensor) -> None:
    """Compute the product of ``layer`` with each of ``rows`` (N, D) into ``result`` (B, N, E)."""
    with weights_on(layer, like=result) as (weight, bias):
        for row, out in zip(rows, result, strict=True):
            if bias is None:
                torch.mm(row, weight.t(), out=out)
            else:
                torch.addmm(bias, row, weight.t(), out=out)


def _is_bare(layer: Any) -> bool:
    """True for a Linear without hooks or another forward, whose product can now be written into a given tensor."""
    hooked = is_hooked_by_others(layer) or "forward" in vars(layer)
    return type(layer) is nn.Linear and not (hooked or torch.is_grad_enabled() or torch.compiler.is_compiling())


def half_rope(rope: Any, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """Upstream's forward of ``rope``, called once for all blocks: (cos, sin), here with one value per pair of features.
    LTX-Video repeats them for each sample; without ``video_coords`` all samples are alike, and the first is enough."""
    cos, sin = type(rope).forward(rope, *args, **named)
    if cos.ndim == 3 and (named.get("video_coords") if len(args) < 6 else args[5]) is None:  # its sixth argument
        cos, sin = cos[:1], sin[:1]
    return _every_other(cos).contiguous(), _every_other(sin).contiguous()


def half(emb: Any, width: int, per_head: bool = False) -> Tables | None:
    """Upstream's rotary ``emb`` (cos, sin) as :class:`Tables`, a value per pair of features; None if ``emb`` is None.
    Only tables as wide as ``width``, a value per feature, are halved. ``per_head`` adds a head axis to (N, W / 2)."""
    if emb is None:
        return None
    cos, sin = (_every_other(table) if table.shape[-1] == width else table for table in emb)
    if per_head and cos.ndim == 2:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return Tables(cos, sin)


def _every_other(table: Tensor) -> Tensor:
    """(..., W / 2), a view of ``table`` (..., W), whose values come in equal pairs."""
    return table.unflatten(-1, (-1, 2)).select(-1, 0)
