"""The forwards of transformer blocks, one for each kind, for every residual dtype and with or without fused operations.
Linears, attention and feed-forward stay modules that are called, so that LoRA, quantisation, step caches and offloaders
act as before; a norm's weight is read through the offloader in force."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.norm import normalized
from ...kernels.product import linear_gelu
from ...kernels.residual import gated_residual, residual_norm
from ...kernels.terms import LAYER, NO_GATE, RMS, Gate, Modulation, Norm
from ..checkpoints.packed import StoredLinear
from ..memory.hooks import is_hooked_by_others, weights_on

TRANSFORMERS = "diffusers.models.transformers."
OPS = "_anygpu_ops"  # on a rewritten block: its BlockOps
WHOLE = "_anygpu_whole"  # on the video and text that a block returns: the tensor of both, for the next block to read


@dataclass(frozen=True, slots=True)
class BlockOps:
    """The norms and sums of a block."""

    form: str = ""  # one of ``kernels.library.FORMS``; empty for torch's own operations, on an fp32 residual
    operand_dtype: torch.dtype | None = None  # of a norm's result, which matmuls read; None for the residual's
    epilogue: bool = False  # a matmul adds its bias and applies GELU before it writes

    def normalized(self, x: Tensor, norm: Norm, modulation: Modulation) -> Tensor:
        """``norm(x) * (1 + scale) + shift`` in the operands' dtype; ``x`` (B, N, D)."""
        if self.form:
            return normalized(x, norm, modulation, self.operand_dtype, form=self.form)
        return _modulated(_standardized(x, norm), modulation, self.operand_dtype or x.dtype)

    def added(self, x: Tensor, branch: Tensor, gate: Gate = NO_GATE) -> Tensor:
        """``x + gate * branch`` in the dtype of ``x``; both (B, N, D)."""
        return gated_residual(x, branch, gate, form=self.form) if self.form else _added(x, branch, gate)

    def added_normalized(
        self, x: Tensor, branch: Tensor, gate: Gate, norm: Norm, modulation: Modulation
    ) -> tuple[Tensor, Tensor]:
        """The sum that :meth:`added` returns, and what :meth:`normalized` makes of it."""
        if self.form:
            return residual_norm(x, branch, gate, norm, modulation, self.operand_dtype, form=self.form)
        x = _added(x, branch, gate)
        return x, self.normalized(x, norm, modulation)

    def added_read(self, x: Tensor, branch: Tensor, gate: Gate, layer: Any) -> tuple[Tensor, Tensor]:
        """:meth:`added`, and the sum as ``layer`` reads it."""
        x = self.added(x, branch, gate)
        return x, x

    def attended(self, attention: Any, x: Tensor, **named: Any) -> tuple[Tensor, Tensor | None]:
        """The branch of ``attention``, and the factor that its :class:`Gate` has to apply; here always None."""
        return attention(x, **named), None

    def fed(self, feed: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The branch of a gated ``feed``, and the factor that its :class:`Gate` has to apply; here always None."""
        return feed(x), None

    def is_plain(self, layer: Any) -> bool:
        """True where the weights of ``layer`` may be multiplied without calling it."""
        return is_plain_linear(layer)

    def summed(self, x: Tensor, weight: Tensor, bias: Tensor, other: Tensor, columns: Tensor) -> Tensor:
        """``x @ weight.T + bias + other @ columns.T``; ``x`` and ``other`` are (B, N, features)."""
        y = functional.linear(x, weight, bias)
        y.flatten(0, 1).addmm_(other.flatten(0, 1), columns.t())
        return y


def ltx_block(
    block: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, image_rotary_emb: Any = None,
    encoder_attention_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Upstream ``LTXVideoTransformerBlock.forward``."""
    ops, table, mask = getattr(block, OPS), block.scale_shift_table, encoder_attention_mask
    rows = temb.reshape(hidden_states.shape[0], temb.size(1), table.shape[0], -1)
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = (table.to(temb.device) + rows).unbind(dim=2)
    with norm_of(block.norm1, hidden_states) as norm:
        normed = ops.normalized(hidden_states, norm, Modulation(scale, shift))
    branch = block.attn1(hidden_states=normed, encoder_hidden_states=None, image_rotary_emb=image_rotary_emb)
    # The cross attention reads the residual itself, which no norm has bounded.
    x, read = ops.added_read(hidden_states, branch, Gate(gate), block.attn2.to_q)
    if mask is not None and mask.is_floating_point() and ops.operand_dtype is not None:
        mask = mask.to(ops.operand_dtype)  # torch's attention takes a float mask in the dtype of the query alone
    named = {"encoder_hidden_states": encoder_hidden_states, "image_rotary_emb": None, "attention_mask": mask}
    branch, factor = ops.attended(block.attn2, read, **named)
    with norm_of(block.norm2, x) as norm:
        x, normed = ops.added_normalized(x, branch, Gate(factor=factor), norm, Modulation(scale_mlp, shift_mlp))
    return ops.added(x, block.ff(normed), Gate(gate_mlp))


def joint_block(
    block: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor,
    attention_mask: Tensor | None = None, freqs_cis: Any = None, token_replace_emb: Tensor | None = None,
    num_tokens: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Upstream's two-stream blocks of HunyuanVideo, FramePack and HunyuanVideo 1.5.
    With ``token_replace_emb`` (B, D) the first ``num_tokens`` have a modulation of their own."""
    ops, x, y = getattr(block, OPS), hidden_states, encoder_hidden_states
    first = token_replace_emb if num_tokens else None
    split = 0 if first is None else num_tokens
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = _rows(block.norm1, temb, 6, first)
    text = _rows(block.norm1_context, temb, 6)
    branch, text_branch = block.attn(
        hidden_states=ops.normalized(x, _layer_norm(block.norm1.norm), Modulation(scale, shift, split)),
        encoder_hidden_states=ops.normalized(y, _layer_norm(block.norm1_context.norm), Modulation(text[1], text[0])),
        attention_mask=attention_mask, image_rotary_emb=freqs_cis,
    )  # fmt: skip
    modulation = Modulation(scale_mlp, shift_mlp, split)
    x, normed = ops.added_normalized(x, branch, Gate(gate, split=split), _layer_norm(block.norm2), modulation)
    modulation = Modulation(text[4], text[3])
    y, read = ops.added_normalized(y, text_branch, Gate(text[2]), _layer_norm(block.norm2_context), modulation)
    x = ops.added(x, block.ff(normed), Gate(gate_mlp, split=split))
    return x, ops.added(y, block.ff_context(read), Gate(text[5]))


def single_block(
    block: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor,
    attention_mask: Tensor | None = None, image_rotary_emb: Any = None, token_replace_emb: Tensor | None = None,
    num_tokens: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Upstream's one-stream blocks of HunyuanVideo and FramePack; ``num_tokens`` as in :func:`joint_block`."""
    ops, first, count = getattr(block, OPS), token_replace_emb if num_tokens else None, hidden_states.shape[1]
    split = 0 if first is None else num_tokens
    x: Any = getattr(hidden_states, WHOLE, encoder_hidden_states)  # video and text, as the block before left them
    if torch.compiler.is_compiling() or getattr(encoder_hidden_states, WHOLE, None) is not x:
        x = torch.cat([hidden_states, encoder_hidden_states], dim=1)
    shift, scale, gate = _rows(block.norm, temb, 3, first)
    normed = ops.normalized(x, _layer_norm(block.norm.norm), Modulation(scale, shift, split))
    named = {"attention_mask": attention_mask, "image_rotary_emb": image_rotary_emb}
    if ops.form:
        attention = block.attn(hidden_states=normed, encoder_hidden_states=None, **named)
    else:  # upstream's processors rotate only what comes apart from the text
        streams = normed.split([count, x.shape[1] - count], dim=1)
        attention = torch.cat(block.attn(hidden_states=streams[0], encoder_hidden_states=streams[1], **named), dim=1)
    x = ops.added(x, _projected(block, attention, normed), Gate(gate, split=split))
    video, text = x.split([count, x.shape[1] - count], dim=1)
    if not torch.compiler.is_compiling():
        video._anygpu_whole = text._anygpu_whole = x  # type: ignore[attr-defined]
    return video, text


def mochi_block(
    block: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, encoder_attention_mask: Tensor,
    image_rotary_emb: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Upstream ``MochiTransformerBlock.forward``: norms before and after each branch, gates through tanh."""
    ops, text_norm, text = getattr(block, OPS), block.norm1_context, encoder_hidden_states
    scale, gate, scale_mlp, gate_mlp = _rows(block.norm1, temb, 4)
    normed = ops.normalized(hidden_states, _rms_norm(block.norm1), Modulation(scale))
    if block.context_pre_only:  # the last block, whose text is read and not changed
        text_scale = text_norm.linear_1(text_norm.silu(temb).to(text.dtype)).unsqueeze(1)
        text_norm = text_norm.norm
    else:
        text_scale, text_gate, text_scale_mlp, text_gate_mlp = _rows(text_norm, temb, 4)
    named = {"image_rotary_emb": image_rotary_emb, "attention_mask": encoder_attention_mask}
    text_normed = ops.normalized(text, _rms_norm(text_norm), Modulation(text_scale))
    branch, text_branch = block.attn1(hidden_states=normed, encoder_hidden_states=text_normed, **named)
    gated = _tanh_gate(gate, block.norm2)
    x, normed = ops.added_normalized(hidden_states, branch, gated, _rms_norm(block.norm3), Modulation(scale_mlp))
    branch, factor = ops.fed(block.ff, normed)
    x = ops.added(x, branch, _tanh_gate(gate_mlp, block.norm4, factor))
    if block.context_pre_only:
        return x, text
    gated, inner = _tanh_gate(text_gate, block.norm2_context), _rms_norm(block.norm3_context)
    text, normed = ops.added_normalized(text, text_branch, gated, inner, Modulation(text_scale_mlp))
    branch, factor = ops.fed(block.ff_context, normed)
    return x, ops.added(text, branch, _tanh_gate(text_gate_mlp, block.norm4_context, factor))


@contextmanager
def norm_of(norm: Any, x: Tensor) -> Iterator[Norm]:
    """An RMS norm as the operations take it, its weight read through the offloader in force."""
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    if getattr(norm, "weight", None) is None:
        yield Norm(RMS, eps)
        return
    like = x if norm.weight.dtype is x.dtype else x.new_empty(0, dtype=norm.weight.dtype)  # read as it is kept
    with weights_on(norm, like=like) as (weight, _):
        # A host streams weights through one buffer for each of its streams, and more norms than that are read at once.
        yield Norm(RMS, eps, weight if weight is norm.weight else weight.clone())


def _standardized(x: Tensor, norm: Norm) -> Tensor:
    """``norm`` of ``x`` by torch's own operations; an RMS norm is in fp32."""
    if norm.kind == LAYER:
        return functional.layer_norm(x, x.shape[-1:], None, None, norm.eps)
    return functional.rms_norm(x.float(), x.shape[-1:], None if norm.weight is None else norm.weight.float(), norm.eps)


def _modulated(x: Tensor, modulation: Modulation, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """``x * (1 + scale) + shift``, computed in fp32 and written as ``dtype``, into ``out`` if given, in one pass."""
    out, scale, shift = torch.empty_like(x, dtype=dtype) if out is None else out, modulation.scale, modulation.shift
    if scale is None:
        return out.copy_(x)
    if not modulation.split:
        return torch.mul(x, 1 + scale, out=out) if shift is None else torch.addcmul(shift, x, 1 + scale, out=out)
    for tokens, row in _spans(modulation.split):
        own = Modulation(scale[:, row], None if shift is None else shift[:, row])
        _modulated(x[:, tokens], own, dtype, out[:, tokens])
    return out


def _added(x: Tensor, branch: Tensor, gate: Gate) -> Tensor:
    """``x + gate * branch`` by torch's own operations, as :class:`Gate` defines it."""
    if gate.norm_eps is not None:
        branch = functional.rms_norm(branch.float(), branch.shape[-1:], None, gate.norm_eps)
    if gate.values is None:
        return x + branch if gate.factor is None else torch.addcmul(x, branch, gate.factor)
    values = torch.tanh(gate.values) if gate.tanh else gate.values
    if not gate.split:
        return torch.addcmul(x, branch, values)
    out = torch.empty_like(x)
    for tokens, row in _spans(gate.split):
        torch.addcmul(x[:, tokens], branch[:, tokens], values[:, row], out=out[:, tokens])
    return out


def _spans(split: int) -> tuple[tuple[slice, slice], ...]:
    """Slices of tokens with the row of modulation that each takes: the first ``split`` row 0, the others row 1."""
    return (slice(0, split), slice(0, 1)), (slice(split, None), slice(1, 2))


def is_ours(layer: Any, forward: Callable[..., Any] | None) -> bool:
    """True where ``layer`` has no forward of its own but ``forward``, which a rewrite gave it."""
    own = layer.__dict__.get("forward")
    return own is None or (forward is not None and getattr(own, "__func__", None) is forward)


def is_plain_linear(layer: Any, forward: Callable[..., Any] | None = None) -> bool:
    """True where ``layer`` may be replaced by a matmul with the weights that ``weights_on`` yields: a Linear with a
    bias, packed, streamed or not, without hooks of others, and without a forward (except ours) or matmul of its own."""
    known = type(layer) in (nn.Linear, StoredLinear) or (isinstance(layer, nn.Linear) and hasattr(layer, "weights_on"))
    plain = is_ours(layer, forward) and "multiply" not in layer.__dict__
    return known and plain and layer.bias is not None and not is_hooked_by_others(layer)


def _projected(block: Any, attention: Tensor, normed: Tensor) -> Tensor:
    """``proj_out`` of the concatenation of ``attention`` and the activated ``proj_mlp`` of ``normed``; (B, N, D) each.
    A matmul with GELU in its epilogue cannot write into part of a tensor, so that each of the two is multiplied by its
    own columns of ``proj_out`` instead, and the products are added."""
    ops, mlp, out = getattr(block, OPS), block.proj_mlp, block.proj_out
    if not (ops.epilogue and is_plain_linear(mlp) and ops.is_plain(out)):
        return out(_joined(attention, block.act_mlp, mlp(normed)))
    with weights_on(mlp, like=normed) as (weight, bias):
        hidden = linear_gelu(normed, weight, bias, form=ops.form)
    with weights_on(out, like=hidden) as (weight, bias):
        for_attention, for_hidden = weight.split([attention.shape[-1], hidden.shape[-1]], dim=1)
        return ops.summed(hidden, for_hidden, bias, attention, for_attention)


def _joined(attention: Tensor, activation: Any, hidden: Tensor) -> Tensor:
    """``attention`` and the activated ``hidden``, joined; tanh GELU writes into the result, as compilers do anyway."""
    known = getattr(activation, "approximate", "") == "tanh" and hidden.dtype is attention.dtype
    if torch.compiler.is_compiling() or not known:
        return torch.cat([attention, activation(hidden)], dim=2)
    width = attention.shape[-1]
    joined = attention.new_empty(*attention.shape[:-1], width + hidden.shape[-1])
    joined[..., :width] = attention
    torch.ops.aten.gelu.out(hidden, approximate="tanh", out=joined[..., width:])
    return joined


def _rows(norm: Any, temb: Tensor, count: int, first: Tensor | None = None) -> list[Tensor]:
    """``norm``'s modulation by ``temb`` (B, D), in ``count`` parts (B, 1, D); (B, 2, D) if preceded by ``first``'s."""
    rows = norm.linear(norm.silu(temb)).unsqueeze(1)
    if first is not None:
        rows = torch.cat([norm.linear(norm.silu(first)).unsqueeze(1), rows], dim=1)
    return list(rows.chunk(count, dim=-1))


def _layer_norm(norm: Any) -> Norm:
    return Norm(LAYER, norm.eps)


def _rms_norm(norm: Any) -> Norm:
    return Norm(RMS, norm.norm.eps)


def _tanh_gate(values: Tensor, norm: Any, factor: Tensor | None = None) -> Gate:
    """Mochi's gate: ``tanh(values)`` times the RMS norm, without weight, of the branch."""
    return Gate(values, tanh=True, norm_eps=norm.norm.eps, factor=factor)


FORWARDS: Mapping[str, Callable[..., Any]] = {  # upstream's class, below TRANSFORMERS
    "transformer_ltx.LTXVideoTransformerBlock": ltx_block,
    "transformer_hunyuan_video.HunyuanVideoTransformerBlock": joint_block,
    "transformer_hunyuan_video.HunyuanVideoSingleTransformerBlock": single_block,
    "transformer_hunyuan_video.HunyuanVideoTokenReplaceTransformerBlock": joint_block,
    "transformer_hunyuan_video.HunyuanVideoTokenReplaceSingleTransformerBlock": single_block,
    "transformer_hunyuan_video15.HunyuanVideo15TransformerBlock": joint_block,
    "transformer_mochi.MochiTransformerBlock": mochi_block,
}
