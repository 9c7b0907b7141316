"""The forwards of transformer blocks, and their attention, on fused operations.

Each forward is upstream's arithmetic with a norm and its modulation, a gated sum and the norm that reads it, and the
norms and rotation of queries and keys in one pass each. Linears, attention and feed-forward stay modules that are
called, so that LoRA, quantisation, step caches and offloaders act as before; a norm's weight is borrowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.activation import swiglu
from ...kernels.norm import normalized
from ...kernels.residual import gated_residual, residual_norm
from ...kernels.rope import qk_norm_rope
from ...kernels.terms import LAYER, NO_GATE, RMS, Gate, Modulation, Norm, Pair, Tables
from ..memory.hooks import weights_on
from .attention_processors import Attend, Cross, Joint, Padding, across

FORM = "_anygpu_kernels"  # on a rewritten block: which form of an operation it runs


def ltx_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    encoder_attention_mask: Tensor | None = None,
) -> Tensor:
    """Upstream ``LTXVideoTransformerBlock.forward``."""
    form, table = getattr(block, FORM), block.scale_shift_table
    rows = temb.reshape(hidden_states.shape[0], temb.size(1), table.shape[0], -1)
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = (table.to(temb.device) + rows).unbind(dim=2)
    with norm_of(block.norm1, hidden_states) as norm:
        normed = normalized(hidden_states, norm, Modulation(scale, shift), form=form)
    branch = block.attn1(hidden_states=normed, encoder_hidden_states=None, image_rotary_emb=image_rotary_emb)
    x = gated_residual(hidden_states, branch, Gate(gate), form=form)
    branch = block.attn2(
        x,
        encoder_hidden_states=encoder_hidden_states,
        image_rotary_emb=None,
        attention_mask=encoder_attention_mask,
    )
    with norm_of(block.norm2, x) as norm:
        x, normed = residual_norm(x, branch, NO_GATE, norm, Modulation(scale_mlp, shift_mlp), form=form)
    return gated_residual(x, block.ff(normed), Gate(gate_mlp), form=form)


def joint_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    freqs_cis: Any = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Upstream's two-stream blocks of HunyuanVideo, FramePack and HunyuanVideo 1.5."""
    return _joint(block, hidden_states, encoder_hidden_states, temb, attention_mask, freqs_cis)


def replacing_joint_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    freqs_cis: Any = None,
    token_replace_emb: Tensor | None = None,
    num_tokens: int = 0,
) -> tuple[Tensor, Tensor]:
    """The two-stream block of HunyuanVideo that gives its first tokens a modulation of their own."""
    first = (token_replace_emb, num_tokens)
    return _joint(block, hidden_states, encoder_hidden_states, temb, attention_mask, freqs_cis, first)


def single_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Upstream's one-stream blocks of HunyuanVideo and FramePack."""
    return _single(block, hidden_states, encoder_hidden_states, temb, attention_mask, image_rotary_emb)


def replacing_single_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    token_replace_emb: Tensor | None = None,
    num_tokens: int = 0,
) -> tuple[Tensor, Tensor]:
    """The one-stream block of HunyuanVideo that gives its first tokens a modulation of their own."""
    first = (token_replace_emb, num_tokens)
    return _single(block, hidden_states, encoder_hidden_states, temb, attention_mask, image_rotary_emb, first)


def mochi_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    encoder_attention_mask: Tensor,
    image_rotary_emb: Any = None,
) -> tuple[Tensor, Tensor]:
    """Upstream ``MochiTransformerBlock.forward``: norms before and after each branch, gates through tanh."""
    form, read = getattr(block, FORM), block.norm1_context
    scale, gate, scale_mlp, gate_mlp = _rows(block.norm1, temb, 4)
    normed = normalized(hidden_states, _plain(block.norm1), Modulation(scale), form=form)
    if block.context_pre_only:
        text = [read.linear_1(read.silu(temb).to(encoder_hidden_states.dtype)).unsqueeze(1)]
        text_norm = _plain(read.norm)
    else:
        text = _rows(read, temb, 4)
        text_norm = _plain(read)
    branch, text_branch = block.attn1(
        hidden_states=normed,
        encoder_hidden_states=normalized(encoder_hidden_states, text_norm, Modulation(text[0]), form=form),
        image_rotary_emb=image_rotary_emb,
        attention_mask=encoder_attention_mask,
    )
    first, last = Gate(gate, True, _plain(block.norm2).eps), Gate(gate_mlp, True, _plain(block.norm4).eps)
    x, normed = residual_norm(hidden_states, branch, first, _plain(block.norm3), Modulation(scale_mlp), form=form)
    x = gated_residual(x, block.ff(normed), last, form=form)
    if block.context_pre_only:
        return x, encoder_hidden_states
    first = Gate(text[1], True, _plain(block.norm2_context).eps)
    last = Gate(text[3], True, _plain(block.norm4_context).eps)
    inner = _plain(block.norm3_context)
    y, normed = residual_norm(encoder_hidden_states, text_branch, first, inner, Modulation(text[2]), form=form)
    return x, gated_residual(y, block.ff_context(normed), last, form=form)


def gated_feed(gated: Any, hidden_states: Tensor) -> Tensor:
    """Upstream ``SwiGLU.forward``."""
    return swiglu(gated.proj(hidden_states), form=getattr(gated, FORM))


class Fused:
    """What the fused processors share: the form of their operations, and no mask where padding is known.

    Args:
        form: one of ``kernels.library.FORMS``. attend, padding: set by ``attention_processors.attended``.
        narrow: whether queries and keys go to attention in fp16 whatever they come in, as safe fp16 wants it.
    """

    def __init__(
        self,
        form: str,
        attend: Attend = functional.scaled_dot_product_attention,
        padding: Padding | None = None,
        narrow: bool = False,
    ) -> None:
        self.form, self.attend, self.padding = form, attend, padding or Padding()
        self.out_dtype = torch.float16 if narrow else None


class FusedCross(Fused, Cross):  # type: ignore[misc]
    """LTX-Video: queries and keys are normed across heads."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Tensor:
        """Tokens (B, N, D) after attention."""
        text = encoder_hidden_states
        seen = hidden_states if text is None else text
        query, key, value = attn.to_q(hidden_states), attn.to_k(seen), attn.to_v(seen)
        with norm_of(attn.norm_q, query) as norm, norm_of(attn.norm_k, key) as other:
            pair = Pair(query, key, norm.weight, other.weight)
            tables = half(image_rotary_emb, query.shape[-1])
            query, key = qk_norm_rope(pair, tables, norm.eps, out_dtype=self.out_dtype, form=self.form)
        query, key, value = (t.unflatten(2, (attn.heads, -1)).transpose(1, 2) for t in (query, key, value))
        found = across(self.attend, self.padding, query, key, value, None if text is None else attention_mask)
        result: Tensor = attn.to_out[1](attn.to_out[0](found.transpose(1, 2).flatten(2).to(query.dtype)))
        return result


class FusedJoint(Fused, Joint):  # type: ignore[misc]
    """HunyuanVideo, FramePack, HunyuanVideo 1.5 and Mochi: queries and keys are normed per head.

    Tokens that follow those of the rotary tables are text, which is not turned.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """Video tokens and text tokens (B, N, D) after attention; one tensor where they came as one."""
        text = encoder_hidden_states
        if text is not None and getattr(attn, "add_q_proj", None) is None:  # one stream that is handed over in two
            found, count = torch.cat([hidden_states, text], dim=1), hidden_states.shape[1]
            found = self(attn, found, None, attention_mask, image_rotary_emb)
            return found.split([count, found.shape[1] - count], dim=1)
        query, key = (_heads(attn, leaf(hidden_states)) for leaf in (attn.to_q, attn.to_k))
        value = _heads(attn, attn.to_v(hidden_states) if text is None else _values(attn, hidden_states, text))
        tables = half(image_rotary_emb, query.shape[-1], per_head=True)
        with norm_of(attn.norm_q, query) as norm, norm_of(attn.norm_k, key) as other:
            pair = Pair(query, key, norm.weight, other.weight)
            if text is None:
                query, key = qk_norm_rope(pair, tables, norm.eps, out_dtype=self.out_dtype, form=self.form)
            else:
                query, key = self._with_text(attn, pair, tables, norm.eps, text)
        given = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        if text is None:
            found = self._attended(*given, attention_mask)
            return found.transpose(1, 2).flatten(2).to(query.dtype)
        video, read = (part.to(query.dtype) for part in self._apart(*given, attention_mask, hidden_states.shape[1]))
        video = attn.to_out[1](attn.to_out[0](video))
        return video, attn.to_add_out(read) if getattr(attn, "to_add_out", None) is not None else read

    def _apart(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, count: int
    ) -> tuple[Tensor, Tensor]:
        """Results (B, n, D) of the first ``count`` tokens and of the text; ``to_out`` would copy what has gaps."""
        padding = self.padding.joint
        if padding is None or not all(isinstance(number, int) for number in padding) or not any(padding):
            found = self._attended(query, key, value, mask).transpose(1, 2).flatten(2)
            first, last = found.split([count, found.shape[1] - count], dim=1)
            return first.contiguous(), last
        video, read = [], []
        for row, padded in enumerate(padding):
            one, valid = slice(row, row + 1), slice(0, key.shape[2] - int(padded))
            found = self.attend(query[one, :, valid], key[one, :, valid], value[one, :, valid])
            found = found.transpose(1, 2).flatten(2)
            video.append(found[:, :count])
            read.append(functional.pad(found[:, count:], (0, 0, 0, int(padded))))
        return torch.cat(video), torch.cat(read)

    def _with_text(
        self, attn: Any, pair: Pair, tables: Tables | None, eps: float, text: Tensor
    ) -> tuple[Tensor, Tensor]:
        query, key = _heads(attn, attn.add_q_proj(text)), _heads(attn, attn.add_k_proj(text))
        with norm_of(attn.norm_added_q, query) as norm, norm_of(attn.norm_added_k, key) as other:
            text_pair = Pair(query, key, norm.weight, other.weight)
            return qk_norm_rope(pair, tables, eps, text_pair, self.out_dtype, self.form)


def _values(attn: Any, tokens: Tensor, text: Tensor) -> Tensor:
    """Values (B, N + M, D) of both streams; written where they belong, where both leaves are nothing but products."""
    leaves = (attn.to_v, attn.add_v_proj)
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not all(map(_bare, leaves)):
        return torch.cat([leaf(x) for leaf, x in zip(leaves, (tokens, text), strict=True)], dim=1)
    count = tokens.shape[1]
    joined = tokens.new_empty(tokens.shape[0], count + text.shape[1], leaves[0].out_features)
    for leaf, x, part in zip(leaves, (tokens, text), (joined[:, :count], joined[:, count:]), strict=True):
        with weights_on(leaf, like=x) as (weight, bias):
            for row, out in zip(x, part, strict=True):
                if bias is None:
                    torch.mm(row, weight.t(), out=out)
                else:
                    torch.addmm(bias, row, weight.t(), out=out)
    return joined


def _bare(leaf: Any) -> bool:
    """Whether ``leaf`` is a Linear that nobody hooked, wrapped or patched."""
    hooked = leaf._forward_hooks or leaf._forward_pre_hooks or "forward" in vars(leaf)
    return type(leaf) is nn.Linear and not hooked


def half_rope(rope: Any, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """The tables of ``rope`` with one value for each pair of features, made once for all blocks.

    LTX-Video repeats them for each sample; without coordinates of their own the samples share the first one's.
    """
    cos, sin = type(rope).forward(rope, *args, **named)
    if cos.ndim == 3 and (named.get("video_coords") if len(args) < 6 else args[5]) is None:
        cos, sin = cos[:1], sin[:1]
    return _every_other(cos).contiguous(), _every_other(sin).contiguous()


def half(emb: Any, width: int, per_head: bool = False) -> Tables | None:
    """Rotary tables as the operations take them, from upstream's (cos, sin), of the full width or of half of it.

    Args:
        width: of what is turned. per_head: tables (N, W) serve every head.
    """
    if emb is None:
        return None
    cos, sin = (_every_other(table) if table.shape[-1] == width else table for table in emb)
    if per_head and cos.ndim == 2:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return Tables(cos, sin)


@contextmanager
def norm_of(norm: Any, x: Tensor) -> Iterator[Norm]:
    """``norm`` as the operations take it, its weight borrowed from whoever holds it."""
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    if getattr(norm, "weight", None) is None:
        yield Norm(RMS, eps)
        return
    like = x if norm.weight.dtype is x.dtype else x.new_empty(0, dtype=norm.weight.dtype)  # read as it is kept
    with weights_on(norm, like=like) as (weight, _):
        yield Norm(RMS, eps, weight)


def _joint(
    block: Any, x: Tensor, y: Tensor, temb: Tensor, mask: Tensor | None, emb: Any, first: tuple[Any, int] = (None, 0)
) -> tuple[Tensor, Tensor]:
    form, split = getattr(block, FORM), first[1] if first[0] is not None else 0
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = _rows(block.norm1, temb, 6, first[0])
    text = _rows(block.norm1_context, temb, 6)
    branch, text_branch = block.attn(
        hidden_states=normalized(x, _layer(block.norm1.norm), Modulation(scale, shift, split), form=form),
        encoder_hidden_states=normalized(y, _layer(block.norm1_context.norm), Modulation(text[1], text[0]), form=form),
        attention_mask=mask,
        image_rotary_emb=emb,
    )
    inner, other = _layer(block.norm2), _layer(block.norm2_context)
    opened = Gate(gate, split=split)
    x, normed = residual_norm(x, branch, opened, inner, Modulation(scale_mlp, shift_mlp, split), form=form)
    y, read = residual_norm(y, text_branch, Gate(text[2]), other, Modulation(text[4], text[3]), form=form)
    x = gated_residual(x, block.ff(normed), Gate(gate_mlp, split=split), form=form)
    return x, gated_residual(y, block.ff_context(read), Gate(text[5]), form=form)


def _single(
    block: Any, x: Tensor, y: Tensor, temb: Tensor, mask: Tensor | None, emb: Any, first: tuple[Any, int] = (None, 0)
) -> tuple[Tensor, Tensor]:
    form, split, count = getattr(block, FORM), first[1] if first[0] is not None else 0, x.shape[1]
    x = torch.cat([x, y], dim=1)
    shift, scale, gate = _rows(block.norm, temb, 3, first[0])
    normed = normalized(x, _layer(block.norm.norm), Modulation(scale, shift, split), form=form)
    found = block.attn(hidden_states=normed, encoder_hidden_states=None, attention_mask=mask, image_rotary_emb=emb)
    branch = block.proj_out(_beside(found, block.act_mlp, block.proj_mlp(normed)))
    x = gated_residual(x, branch, Gate(gate, split=split), form=form)
    video, text = x.split([count, x.shape[1] - count], dim=1)
    return video, text


def _beside(found: Tensor, activation: Any, hidden: Tensor) -> Tensor:
    """Attention's result and the activated ``hidden`` side by side, as ``proj_out`` reads them.

    The activation writes where it belongs instead of being copied there; a compiler does the same by itself.
    """
    if torch.compiler.is_compiling():
        return torch.cat([found, activation(hidden)], dim=2)
    width = found.shape[-1]
    joined = found.new_empty(*found.shape[:-1], width + hidden.shape[-1])
    joined[..., :width] = found
    torch.ops.aten.gelu.out(hidden, approximate="tanh", out=joined[..., width:])
    return joined


def _rows(norm: Any, temb: Tensor, count: int, first: Tensor | None = None) -> list[Tensor]:
    """The modulation that ``norm`` makes of ``temb`` (B, D), in ``count`` parts (B, 1, D); (B, 2, D) with ``first``."""
    rows = norm.linear(norm.silu(temb)).unsqueeze(1)
    if first is not None:
        rows = torch.cat([norm.linear(norm.silu(first)).unsqueeze(1), rows], dim=1)
    return list(rows.chunk(count, dim=-1))


def _every_other(table: Tensor) -> Tensor:
    return table.unflatten(-1, (-1, 2)).select(-1, 0)


def _layer(norm: Any) -> Norm:
    return Norm(LAYER, norm.eps)


def _plain(norm: Any) -> Norm:
    """One of Mochi's norms, which keep an RMS norm without weight inside."""
    return Norm(RMS, norm.norm.eps)


def _heads(attn: Any, tokens: Tensor) -> Tensor:
    return tokens.unflatten(2, (attn.heads, -1))
