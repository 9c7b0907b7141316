"""The transformer blocks that safe fp16 knows, and their forwards with an fp32 residual stream.

Each forward is upstream's arithmetic in fewer passes over memory: norms, modulation and gated sums read and write fp32
once, and what goes into a product is written as fp16 at the end of the same pass. Attention itself is left to the
processor that is set, which finds its queries, keys and values in fp16. LTX-Video's own processor of video tokens is
replaced as well, because its rotation of queries and keys is half of all its memory traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .fp16 import HALF, Applied, Kind, Turns, full_name, narrow_rms_norm, narrowed, patch_forward, rms_norm

NARROW, WIDE, ROTATED, VALUE, FULL = Kind.NARROW, Kind.WIDE, Kind.ROTATED, Kind.VALUE, Kind.FULL
UPSTREAM = "diffusers.models.transformers."
Piece = tuple[Tensor, Tensor | None]  # scale and shift, (B, D) or (B, N, D)


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A block's new forward, what becomes of its Linears and norms, by path, and of its processors.

    Args:
        norms: RMS norms by path, and whether they give fp16. processors: attention's path to (class it must be, class
            that takes its place).
    """

    forward: Callable[..., Any]
    leaves: Mapping[str, Kind]
    norms: Mapping[str, bool] = field(default_factory=dict)
    processors: Mapping[str, tuple[str, type]] = field(default_factory=dict)

    def attach(self, block: nn.Module, applied: Applied) -> None:
        """Put it on ``block``."""
        patch_forward(block, self.forward, applied)
        for path, narrow in self.norms.items():
            norm = block.get_submodule(path) if _has(block, path) else None
            if norm is not None:
                patch_forward(norm, narrow_rms_norm if narrow else rms_norm, applied)
        for path, (stock, replacement) in self.processors.items():
            attention: Any = block.get_submodule(path)
            former = attention.processor
            if full_name(former) == UPSTREAM + stock:
                attention.set_processor(replacement())
                applied.undo.append(partial(attention.set_processor, former))


def rewrite_for(block: nn.Module) -> Rewrite | None:
    """The rewrite of exactly the class of ``block``; None for any other class, subclasses too."""
    return REWRITES.get(full_name(block).removeprefix(UPSTREAM))


def turns_for(rope: Any) -> bool:
    """Whether tables of ``rope`` are read by :class:`Rotating`, which wants them as complex numbers."""
    return full_name(rope) == f"{UPSTREAM}transformer_ltx.LTXVideoRotaryPosEmbed"


def modulated(x: Tensor, scale: Tensor, shift: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """``x * (1 + scale) + shift``, reckoned in fp32 and written as fp16, in one pass."""
    out = torch.empty_like(x, dtype=HALF) if out is None else out
    return torch.mul(x, 1 + scale, out=out) if shift is None else torch.addcmul(shift, x, 1 + scale, out=out)


def modulated_apart(x: Tensor, rest: Piece, first: Piece | None, count: int) -> Tensor:
    """:func:`modulated`, with modulation of its own for the first ``count`` tokens where ``first`` is given."""
    if first is None:
        return modulated(x, *rest)
    out = torch.empty_like(x, dtype=HALF)
    modulated(x[:, :count], *first, out=out[:, :count])
    modulated(x[:, count:], *rest, out=out[:, count:])
    return out


def added(x: Tensor, branch: Tensor, gate: Tensor, first: Tensor | None = None, count: int = 0) -> Tensor:
    """``x + gate * branch`` in fp32, with a gate of their own for the first ``count`` tokens."""
    if first is None:
        return torch.addcmul(x, branch, gate)
    out = torch.empty_like(x)
    torch.addcmul(x[:, :count], branch[:, :count], first, out=out[:, :count])
    torch.addcmul(x[:, count:], branch[:, count:], gate, out=out[:, count:])
    return out


def fed_forward(feed: Any, x: Tensor) -> Tensor:
    """A FeedForward's output in fp32 from fp16; a gated product leaves fp16's range, so it is made in fp32."""
    widen = getattr(feed.net[0], "activation", None)
    if widen is None or type(feed.net[0]).__name__ != "SwiGLU":
        hidden = feed.net[0](x)
    else:
        value, gate = feed.net[0].proj(x).chunk(2, dim=-1)
        hidden = functional.silu(gate.float(), inplace=True).mul_(value)
    for module in feed.net[1:]:
        hidden = module(hidden)
    return hidden


# ---- LTX-Video ---------------------------------------------------------------------------------------------


def ltx_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    encoder_attention_mask: Tensor | None = None,
) -> Tensor:
    """Upstream ``LTXVideoTransformerBlock.forward``; fp32 in and out."""
    table = block.scale_shift_table
    rows = temb.reshape(hidden_states.shape[0], temb.size(1), table.shape[0], -1)
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = (table[None, None].to(temb.device) + rows).unbind(dim=2)
    branch = block.attn1(
        hidden_states=modulated(block.norm1(hidden_states), scale, shift), image_rotary_emb=image_rotary_emb
    )
    x = torch.addcmul(hidden_states, branch, gate)
    mask = encoder_attention_mask
    # This attention is fed from the residual itself, which no norm has bounded.
    x = x.add_(
        block.attn2(
            x,
            encoder_hidden_states=encoder_hidden_states,
            attention_mask=mask if mask is None or not mask.is_floating_point() else mask.to(HALF),
        )
    )
    return torch.addcmul(x, fed_forward(block.ff, modulated(block.norm2(x), scale_mlp, shift_mlp)), gate_mlp)


class Rotating:
    """LTX-Video's attention of video tokens among themselves: queries and keys are normalised and turned in fp32.

    Args:
        attend: from query, key and value (B, H, N, D) to the attended values; a choice of attention replaces it.
    """

    def __init__(self, attend: Callable[..., Tensor] = functional.scaled_dot_product_attention) -> None:
        self.attend = attend

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Tensor:
        """Tokens (B, N, D), fp32, after attention, from fp16 ones."""
        turns = image_rotary_emb if isinstance(image_rotary_emb, Turns) else Turns(image_rotary_emb)
        query = rotated(attn.norm_q(attn.to_q(hidden_states), narrow=False), turns.pairs())
        key = rotated(attn.norm_k(attn.to_k(hidden_states), narrow=False), turns.pairs())
        heads = (t.unflatten(2, (attn.heads, -1)).transpose(1, 2) for t in (query, key, attn.to_v(hidden_states)))
        found: Tensor = attn.to_out[1](attn.to_out[0](self.attend(*heads).transpose(1, 2).flatten(2)))
        return found


def rotated(x: Tensor, pairs: Tensor) -> Tensor:
    """``x`` (B, N, D), fp32, which is overwritten, with each pair of features turned; fp16."""
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(pairs)
    return narrowed(x)


# ---- HunyuanVideo, FramePack, HunyuanVideo 1.5 -------------------------------------------------------------


def joint_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    freqs_cis: Any = None,
    token_replace_emb: Tensor | None = None,
    num_tokens: int = 0,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Upstream's two-stream blocks of HunyuanVideo and 1.5; with ``REPLACES`` the one that replaces tokens."""
    own, read = block.norm1, block.norm1_context
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = _parts(own, temb, 6)
    first = [None] * 6 if token_replace_emb is None else _parts(own, token_replace_emb, 6)
    text = _parts(read, temb, 6)
    branch, text_branch = block.attn(
        hidden_states=modulated_apart(own.norm(hidden_states), (scale, shift), _piece(first[1], first[0]), num_tokens),
        encoder_hidden_states=modulated(read.norm(encoder_hidden_states), text[1], text[0]),
        attention_mask=attention_mask,
        image_rotary_emb=freqs_cis,
    )
    x = added(hidden_states, branch, gate, first[2], num_tokens)
    y = torch.addcmul(encoder_hidden_states, text_branch, text[2])
    normed = modulated_apart(block.norm2(x), (scale_mlp, shift_mlp), _piece(first[4], first[3]), num_tokens)
    x = added(x, fed_forward(block.ff, normed), gate_mlp, first[5], num_tokens)
    normed = modulated(block.norm2_context(y), text[4], text[3])
    return x, torch.addcmul(y, fed_forward(block.ff_context, normed), text[5])


def plain_joint_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    freqs_cis: Any = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """:func:`joint_block` for the classes that, as upstream, overlook the arguments of token replacement."""
    return joint_block(block, hidden_states, encoder_hidden_states, temb, attention_mask, freqs_cis)


def single_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    token_replace_emb: Tensor | None = None,
    num_tokens: int = 0,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Upstream's one-stream blocks of HunyuanVideo."""
    count = hidden_states.shape[1]
    x = torch.cat([hidden_states, encoder_hidden_states], dim=1)
    shift, scale, gate = _parts(block.norm, temb, 3)
    first = [None] * 3 if token_replace_emb is None else _parts(block.norm, token_replace_emb, 3)
    normed = modulated_apart(block.norm.norm(x), (scale, shift), _piece(first[1], first[0]), num_tokens)
    mlp = block.act_mlp(block.proj_mlp(normed))
    found = block.attn(
        hidden_states=normed[:, :count],
        encoder_hidden_states=normed[:, count:],
        attention_mask=attention_mask,
        image_rotary_emb=image_rotary_emb,
    )
    branch = block.proj_out(torch.cat([torch.cat(found, dim=1), mlp], dim=2))
    x = added(x, branch, gate, first[2], num_tokens)
    return x[:, :count], x[:, count:]


def plain_single_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """:func:`single_block` for the class that, as upstream, overlooks the arguments of token replacement."""
    return single_block(block, hidden_states, encoder_hidden_states, temb, attention_mask, image_rotary_emb)


# ---- Mochi -------------------------------------------------------------------------------------------------


def mochi_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    encoder_attention_mask: Tensor,
    image_rotary_emb: Any = None,
) -> tuple[Tensor, Tensor]:
    """Upstream ``MochiTransformerBlock.forward``."""
    scale, gate, scale_mlp, gate_mlp = _parts(block.norm1, temb, 4)
    read = block.norm1_context
    if block.context_pre_only:
        text = [read.linear_1(read.silu(temb)).unsqueeze(1)]
        normed = modulated(read.norm.norm(encoder_hidden_states), text[0])
    else:
        text = _parts(read, temb, 4)
        normed = modulated(read.norm(encoder_hidden_states), text[0])
    branch, text_branch = block.attn1(
        hidden_states=modulated(block.norm1.norm(hidden_states), scale),
        encoder_hidden_states=normed,
        image_rotary_emb=image_rotary_emb,
        attention_mask=encoder_attention_mask,
    )
    x = torch.addcmul(hidden_states, block.norm2.norm(branch), torch.tanh(gate))
    branch = fed_forward(block.ff, modulated(block.norm3.norm(x), scale_mlp))
    x = torch.addcmul(x, block.norm4.norm(branch), torch.tanh(gate_mlp))
    if block.context_pre_only:
        return x, encoder_hidden_states
    y = torch.addcmul(encoder_hidden_states, block.norm2_context.norm(text_branch), torch.tanh(text[1]))
    branch = fed_forward(block.ff_context, modulated(block.norm3_context.norm(y), text[2]))
    return x, torch.addcmul(y, block.norm4_context.norm(branch), torch.tanh(text[3]))


def _parts(norm: Any, temb: Tensor, count: int) -> list[Any]:
    """The modulation that ``norm`` makes of ``temb`` (B, D), in ``count`` parts (B, 1, D), fp32."""
    return list(norm.linear(norm.silu(temb)).unsqueeze(1).chunk(count, dim=-1))


def _piece(scale: Tensor | None, shift: Tensor | None) -> Piece | None:
    return None if scale is None else (scale, shift)


def _has(block: nn.Module, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    found: Any = block
    for step in filter(None, owner.split(".")):
        found = getattr(found, step, None)
    return isinstance(getattr(found, name, None), nn.Module)


def _attention(name: str, added_too: bool = False, out: bool = True) -> dict[str, Kind]:
    paths = {f"{name}.{leaf}": NARROW for leaf in ("to_q", "to_k", "to_v")}
    if added_too:
        paths |= {f"{name}.{leaf}": NARROW for leaf in ("add_q_proj", "add_k_proj", "add_v_proj")}
        paths |= {f"{name}.to_add_out": WIDE}
    return paths | ({f"{name}.to_out.0": WIDE} if out else {})


def _feed(*names: str) -> dict[str, Kind]:
    return {path: kind for name in names for path, kind in ((f"{name}.net.0.proj", NARROW), (f"{name}.net.2", WIDE))}


def _qk(*names: str) -> dict[str, bool]:
    return {f"{name}.{norm}": True for name in names for norm in ("norm_q", "norm_k", "norm_added_q", "norm_added_k")}


_JOINT = _attention("attn", added_too=True) | _feed("ff", "ff_context")
_JOINT |= {"norm1.linear": FULL, "norm1_context.linear": FULL}
_SINGLE = _attention("attn", out=False) | {"proj_mlp": NARROW, "proj_out": WIDE, "norm.linear": FULL}
_CROSS: dict[str, Kind] = {"attn2.to_q": Kind.RESIDUAL, "attn2.to_k": WIDE, "attn2.to_v": VALUE, "attn2.to_out.0": WIDE}
_MOCHI_NORMS = (
    "norm1.norm",
    "norm1_context.norm",
    "norm1_context.norm.norm",
    "norm2.norm",
    "norm2_context.norm",
    "norm3.norm",
    "norm3_context.norm",
    "norm4.norm",
    "norm4_context.norm",
)

REWRITES: dict[str, Rewrite] = {
    "transformer_ltx.LTXVideoTransformerBlock": Rewrite(
        ltx_block,
        _attention("attn1") | {"attn1.to_q": ROTATED, "attn1.to_k": ROTATED} | _CROSS | _feed("ff"),
        _qk("attn1", "attn2") | {"norm1": False, "norm2": False},
        {"attn1": ("transformer_ltx.LTXVideoAttnProcessor", Rotating)},
    ),
    "transformer_hunyuan_video.HunyuanVideoTransformerBlock": Rewrite(plain_joint_block, _JOINT, _qk("attn")),
    "transformer_hunyuan_video.HunyuanVideoSingleTransformerBlock": Rewrite(plain_single_block, _SINGLE, _qk("attn")),
    "transformer_hunyuan_video.HunyuanVideoTokenReplaceTransformerBlock": Rewrite(joint_block, _JOINT, _qk("attn")),
    "transformer_hunyuan_video.HunyuanVideoTokenReplaceSingleTransformerBlock": Rewrite(
        single_block, _SINGLE, _qk("attn")
    ),
    "transformer_hunyuan_video15.HunyuanVideo15TransformerBlock": Rewrite(plain_joint_block, _JOINT, _qk("attn")),
    "transformer_mochi.MochiTransformerBlock": Rewrite(
        mochi_block,
        _attention("attn1", added_too=True)
        | _feed("ff", "ff_context")
        | {"norm1.linear": FULL, "norm1_context.linear": FULL, "norm1_context.linear_1": FULL},
        _qk("attn1") | {path: False for path in _MOCHI_NORMS},
    ),
}
