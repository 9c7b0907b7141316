"""The attention of diffusers' transformers and VAEs, rewritten to call the pipeline's own and to need no mask.
Upstream's processors pass masks for padding (HunyuanVideo 1.5 one of N x N: 12 GiB a copy at 720p), which no flash
kernel takes. Padding is at the end of each row, so leaving it out gives the same; only stock processors are replaced.
In HunyuanVideo's VAEs a frame sees those before it: a call per frame needs no mask (4.9 GB for 480p in 121 frames)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..device.execution import to_host

Attend = Callable[..., torch.Tensor]
Lengths = tuple["int | torch.Tensor", ...]  # a tensor SHIFT longer than the number it stands for: dynamic in a graph
SHIFT = 2  # torch specialises a graph for the lengths 0 and 1
TEXT, MASK = "encoder_hidden_states", "encoder_attention_mask"


@dataclass
class Padding:
    """The numbers of padding tokens at the end of each batch row, in the call that runs; None: only a mask tells."""

    text: Lengths | None = None  # of the text alone: refiners, cross attention
    joint: Lengths | None = None  # of video and text together
    traced: bool = False  # blocks are compiled: a number is a constant of the graph, a tensor's length can vary

    def lengths(self, counts: tuple[int, ...]) -> Lengths:
        """``counts`` as :func:`by_rows` reads them: as they are, or for compiled blocks as tensors ``SHIFT`` longer."""
        if not self.traced or len(counts) < 2:  # a row alone is cropped to its tokens: 0, but for padding inside
            return counts
        from torch._dynamo import maybe_mark_dynamic

        lengths = tuple(torch.empty(1).expand(count + SHIFT) for count in counts)  # of no memory
        for length in lengths:
            maybe_mark_dynamic(length, 0)
        return lengths


def by_rows(
    attend: Attend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, padding: Lengths, queries_too: bool
) -> torch.Tensor:
    """Attention (B, H, N, D) without a mask, in which each row leaves out its last ``padding`` keys, and with
    ``queries_too`` as many queries, whose results are zeros."""
    if any(isinstance(count, torch.Tensor) for count in padding):
        return _by_traced_rows(attend, query, key, value, padding)
    if not any(padding):
        return attend(query, key, value)
    result = query.new_zeros(*query.shape[:-1], value.shape[-1])
    for row, count in enumerate(padding):
        keys = slice(0, key.shape[2] - count)
        queries = slice(0, query.shape[2] - (count if queries_too else 0))
        one = slice(row, row + 1)
        result[one, :, queries] = attend(query[one, :, queries], key[one, :, keys], value[one, :, keys])
    return result


def _by_traced_rows(
    attend: Attend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, padding: Lengths
) -> torch.Tensor:
    """:func:`by_rows` in a graph that holds for any padding: no length is compared with another, which would bind it.
    Padded queries are computed too: nobody reads their results."""
    rows = []
    for row, length in enumerate(padding):
        count = length if isinstance(length, int) else length.shape[0] - SHIFT
        keys, values = (t.narrow(0, row, 1).narrow(2, 0, t.shape[2] - count) for t in (key, value))
        rows.append(attend(query.narrow(0, row, 1), keys, values))
    return torch.cat(rows)


class Processor:
    """An attention processor in the place of a stock one; ``attend`` takes q, k, v (B, H, N, D) and maybe a mask."""

    def __init__(
        self, attend: Attend = functional.scaled_dot_product_attention, padding: Padding | None = None
    ) -> None:
        self.attend, self.padding = attend, padding or Padding()

    def by_text_rows(self, query: Any, key: Any, value: Any, mask: Any, queries_too: bool = False) -> torch.Tensor:
        """Attention (B, H, N, D) without the padded text keys at the end of each row, and with ``queries_too`` without
        padded queries, whose results nobody reads; by ``mask`` where the padding is not known."""
        if self.padding.text is None:
            return self.attend(query, key, value, mask)
        return by_rows(self.attend, query, key, value, self.padding.text, queries_too)

    @staticmethod
    def projected(attn: Any, attention: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Tokens (B, N, D) of attention's result (B, H, N, D), in the dtype of ``like``, through ``to_out``."""
        return attn.to_out[1](attn.to_out[0](attention.transpose(1, 2).flatten(2).to(like.dtype)))

    @staticmethod
    def replaces(owner: Any) -> bool:
        """True if ``owner`` has none of the extras of diffusers' ``Attention`` that these processors leave out."""
        extras = ("spatial_norm", "group_norm", "norm_cross", "residual_connection")
        factor = getattr(owner, "rescale_output_factor", 1.0)
        return factor == 1.0 and not any(getattr(owner, extra, None) for extra in extras)


class JointProcessor(Processor):
    """Video and text tokens together: HunyuanVideo and FramePack, both kinds of block, HunyuanVideo 1.5, Mochi."""

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None, image_rotary_emb: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Video and text (B, N, C) after ``attn``'s output layers; without text the video before them, and None."""
        text = encoder_hidden_states
        separate = getattr(attn, "add_q_proj", None) is not None and text is not None  # text has its own projections
        tokens = hidden_states if separate or text is None else torch.cat([hidden_states, text], dim=1)
        rotary_tokens = tokens.shape[1] if separate or text is None else hidden_states.shape[1]

        def with_rotary(heads: torch.Tensor) -> torch.Tensor:  # rotates the video's tokens, which come first
            if image_rotary_emb is None:
                return heads
            video = self.rotary(heads[:, :rotary_tokens], image_rotary_emb)
            return video if rotary_tokens == heads.shape[1] else torch.cat([video, heads[:, rotary_tokens:]], dim=1)

        query = with_rotary(heads_of(attn, attn.to_q, tokens, attn.norm_q))
        key = with_rotary(heads_of(attn, attn.to_k, tokens, attn.norm_k))
        value = heads_of(attn, attn.to_v, tokens)
        if separate:
            query = torch.cat([query, heads_of(attn, attn.add_q_proj, text, attn.norm_added_q)], dim=1)
            key = torch.cat([key, heads_of(attn, attn.add_k_proj, text, attn.norm_added_k)], dim=1)
            value = torch.cat([value, heads_of(attn, attn.add_v_proj, text)], dim=1)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        attention = self._attend_joint(query, key, value, attention_mask)
        attention = attention.transpose(1, 2).flatten(2).to(query.dtype)
        if text is None:
            return attention, None
        video, text_tokens = attention.split([hidden_states.shape[1], text.shape[1]], dim=1)
        if getattr(attn, "to_out", None) is not None:
            video = attn.to_out[1](attn.to_out[0](video))
        if getattr(attn, "to_add_out", None) is not None:
            text_tokens = attn.to_add_out(text_tokens)
        return video, text_tokens

    @staticmethod
    def rotary(tokens: torch.Tensor, table: Any) -> torch.Tensor:
        """``tokens`` (B, N, H, D) rotated by upstream's (cos, sin)."""
        from diffusers.models.embeddings import apply_rotary_emb  # torch 2.11 traces no import from a lazy package

        apply: Any = apply_rotary_emb  # upstream annotates it as narrower than what it passes
        return apply(tokens, table, sequence_dim=1)

    def _attend_joint(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention (B, H, N, D) of video and text together; by ``mask`` where the padding is not known."""
        if self.padding.joint is not None:
            return by_rows(self.attend, query, key, value, self.padding.joint, queries_too=True)
        if mask is not None and mask.ndim == 2:  # of the text alone: the video before it is valid
            mask = torch.cat([mask.new_ones(mask.shape[0], key.shape[2] - mask.shape[1]), mask], dim=1).bool()
            mask = mask.unsqueeze(1).unsqueeze(1)
        return self.attend(query, key, value, mask)


class MochiProcessor(JointProcessor):
    """Mochi, whose stock processor calls torch by itself, sample by sample, whatever was chosen."""

    @staticmethod
    def rotary(tokens: torch.Tensor, table: Any) -> torch.Tensor:
        """``tokens`` (B, N, H, D) rotated by (cos, sin). Source: a local function in ``MochiAttnProcessor2_0``."""
        cos, sin = table
        even, odd = tokens[..., 0::2].float(), tokens[..., 1::2].float()
        pair = ((even * cos - odd * sin).to(tokens.dtype), (even * sin + odd * cos).to(tokens.dtype))
        return torch.stack(pair, dim=-1).flatten(-2)


class CrossProcessor(Processor):
    """LTX-Video: video tokens among themselves, and video to text, whose mask is a float added to the scores."""

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None, image_rotary_emb: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        seen = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        tokens = (*self.queries_and_keys(attn, hidden_states, seen, image_rotary_emb), attn.to_v(seen))
        query, key, value = (each.unflatten(2, (attn.heads, -1)).transpose(1, 2) for each in tokens)
        if encoder_hidden_states is None or attention_mask is None:  # upstream's video has no mask over itself
            return self.projected(attn, self.attend(query, key, value), query)
        # Leaving masked keys out is exact: beside a score that counts, the -10000 of the mask gives a weight of 0.
        mask = attention_mask.unsqueeze(1).to(query.dtype)
        return self.projected(attn, self.by_text_rows(query, key, value, mask), query)

    def queries_and_keys(
        self, attn: Any, tokens: torch.Tensor, seen: torch.Tensor, rotary: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries of ``tokens`` and the keys of ``seen``, (B, N, D) each, normed across heads and rotated."""
        from diffusers.models.transformers.transformer_ltx import apply_rotary_emb

        query, key = attn.norm_q(attn.to_q(tokens)), attn.norm_k(attn.to_k(seen))
        return (query, key) if rotary is None else (apply_rotary_emb(query, rotary), apply_rotary_emb(key, rotary))


class RefinerProcessor(Processor):
    """The token refiners of HunyuanVideo, FramePack and HunyuanVideo 1.5: text tokens among themselves."""

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None, temb: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        seen = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query = heads_of(attn, attn.to_q, hidden_states, attn.norm_q).transpose(1, 2)
        key = heads_of(attn, attn.to_k, seen, attn.norm_k).transpose(1, 2)
        value = heads_of(attn, attn.to_v, seen).transpose(1, 2)
        return self.projected(attn, self.by_text_rows(query, key, value, attention_mask, queries_too=True), query)


def _pool(attend: Attend, padding: Padding) -> Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Mochi's pooling of its text: the mean token attends to itself and all tokens (``MochiAttentionPool.forward``)."""
    processor = Processor(attend, padding)

    def forward(pool: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([pool.pool_tokens(x, mask, keepdim=True), x], dim=1)
        width = tokens.shape[-1] // pool.num_attention_heads
        query = pool.to_q(tokens[:, :1]).unflatten(2, (-1, width)).transpose(1, 2)
        key, value = pool.to_kv(tokens).unflatten(2, (2, -1, width)).permute(2, 0, 3, 1, 4)
        seen = functional.pad(mask.bool(), (1, 0), value=True)[:, None, None]
        return pool.to_out(processor.by_text_rows(query, key, value, seen).flatten(1))

    return forward


def causal_by_frames(
    attend: Attend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, frames: int
) -> torch.Tensor:
    """Attention (B, H, N, D) in which the tokens of a frame see their own frame and all frames before it."""
    size = query.shape[2] // frames
    ends = range(size, query.shape[2] + 1, size)
    return torch.cat([attend(query[:, :, end - size : end], key[:, :, :end], value[:, :, :end]) for end in ends], dim=2)


def _mid_block(attend: Attend, _: Padding) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """HunyuanVideo's and FramePack's middle block (``HunyuanVideoMidBlock3D.forward`` with ``AttnProcessor2_0``)."""

    def forward(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = block.resnets[0](hidden_states)
        for attn, resnet in zip(block.attentions, block.resnets[1:], strict=True):
            if attn is not None:
                grid = hidden_states.shape[2:]
                tokens = hidden_states.permute(0, 2, 3, 4, 1).flatten(1, 3)
                tokens = _residual_attention(attn, attend, tokens, grid[0])
                hidden_states = tokens.unflatten(1, grid).permute(0, 4, 1, 2, 3)
            hidden_states = resnet(hidden_states)
        return hidden_states

    return forward


def _residual_attention(attn: Any, attend: Attend, tokens: torch.Tensor, frames: int) -> torch.Tensor:
    """Causal attention over ``tokens`` (B, N, C), with its norm, projections and residual (``AttnProcessor2_0``)."""
    residual = tokens
    if attn.group_norm is not None:
        tokens = attn.group_norm(tokens.transpose(1, 2)).transpose(1, 2)
    query, key, value = (heads_of(attn, layer, tokens).transpose(1, 2) for layer in (attn.to_q, attn.to_k, attn.to_v))
    attention = causal_by_frames(attend, query, key, value, frames).transpose(1, 2).flatten(2)
    tokens = attn.to_out[1](attn.to_out[0](attention))
    return (tokens + residual if attn.residual_connection else tokens) / attn.rescale_output_factor


def _attention_block(attend: Attend, _: Padding) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """HunyuanVideo 1.5's attention block, whose projections are convolutions (``HunyuanVideo15AttnBlock.forward``)."""

    def forward(block: Any, x: torch.Tensor) -> torch.Tensor:
        normed = block.norm(x)
        projected = (layer(normed) for layer in (block.to_q, block.to_k, block.to_v))
        query, key, value = (each.flatten(2).transpose(1, 2).unsqueeze(1).contiguous() for each in projected)
        attention = causal_by_frames(attend, query, key, value, x.shape[2]).squeeze(1)
        return block.proj_out(attention.unflatten(1, x.shape[2:]).permute(0, 4, 1, 2, 3)) + x

    return forward


class MochiVaeProcessor(Processor):
    """Mochi's VAE: each cell over time, the batch being the cells of a frame (``MochiVaeAttnProcessor2_0``)."""

    @staticmethod
    def replaces(owner: Any) -> bool:
        return True

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        seen = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if hidden_states.shape[1] == 1:  # one frame sees itself alone
            attention = attn.to_v(hidden_states)
        else:
            query = heads_of(attn, attn.to_q, hidden_states, attn.norm_q).transpose(1, 2)
            key = heads_of(attn, attn.to_k, seen, attn.norm_k).transpose(1, 2)
            value = heads_of(attn, attn.to_v, seen).transpose(1, 2)
            mask = attention_mask if attention_mask is None or attention_mask.ndim == 4 else attention_mask.unsqueeze(1)
            attention = self.attend(query, key, value, mask, causal=attn.is_causal)
            attention = attention.transpose(1, 2).flatten(2).to(query.dtype)
        attention = attn.to_out[1](attn.to_out[0](attention))
        result: torch.Tensor = attention + hidden_states if attn.residual_connection else attention
        return result / attn.rescale_output_factor


MODELS = "diffusers.models"
PROCESSORS: Mapping[str, type[Processor]] = {  # stock class -> ours; subclasses are left alone
    f"{MODELS}.transformers.transformer_hunyuan_video.HunyuanVideoAttnProcessor2_0": JointProcessor,
    f"{MODELS}.transformers.transformer_hunyuan_video15.HunyuanVideo15AttnProcessor2_0": JointProcessor,
    f"{MODELS}.transformers.transformer_ltx.LTXVideoAttnProcessor": CrossProcessor,
    f"{MODELS}.attention_processor.MochiAttnProcessor2_0": MochiProcessor,
    f"{MODELS}.attention_processor.AttnProcessor2_0": RefinerProcessor,
    f"{MODELS}.attention_processor.MochiVaeAttnProcessor2_0": MochiVaeProcessor,
}
BLOCKS: Mapping[str, Callable[[Attend, Padding], Callable[..., torch.Tensor]]] = {  # stock class -> our forward
    f"{MODELS}.embeddings.MochiAttentionPool": _pool,
    f"{MODELS}.autoencoders.autoencoder_kl_hunyuan_video.HunyuanVideoMidBlock3D": _mid_block,
    f"{MODELS}.autoencoders.autoencoder_kl_hunyuanvideo15.HunyuanVideo15AttnBlock": _attention_block,
}


def heads_of(attn: Any, layer: Any, tokens: torch.Tensor | None, norm: Any = None) -> torch.Tensor:
    """The projection ``layer`` of ``tokens`` (B, N, C) in heads, (B, N, H, D), and their ``norm`` if there is one."""
    heads: torch.Tensor = layer(tokens).unflatten(2, (attn.heads, -1))
    return heads if norm is None else norm(heads)


def valid_counts(mask: torch.Tensor) -> tuple[list[int], bool]:
    """Valid tokens in each row of a mask (B, N), and True if they come first and every row has some; reads it once."""
    valid = mask.bool()
    counts = valid.sum(1)
    first = torch.arange(valid.shape[1], device=valid.device) < counts[:, None]
    *lengths, come_first = to_host(torch.cat([counts, (first == valid).all()[None]])).tolist()
    return lengths, bool(come_first) and all(lengths)


def cropping(crop: Callable[[dict[str, Any], Padding], None], padding: Padding) -> Callable[..., Any]:
    """A pre-hook that names all arguments and has ``crop`` cut the padding that rows share and set ``padding``."""

    def before(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        if arguments:
            bound = inspect.signature(type(module).forward).bind_partial(module, *arguments).arguments
            named = {name: value for name, value in bound.items() if value is not module} | named
        padding.text = padding.joint = None
        named = dict(named)
        crop(named, padding)
        return (), named

    return before


def _crop_text(named: dict[str, Any], padding: Padding) -> None:
    """Crop text and mask in ``named`` arguments to the longest row and set ``padding``, if padding comes last."""
    mask = named.get(MASK)
    counts, known = valid_counts(mask) if isinstance(mask, torch.Tensor) and mask.ndim == 2 else ([], False)
    if not known:
        return
    most = max(counts)
    named[TEXT], named[MASK] = named[TEXT][:, :most], named[MASK][:, :most]
    padding.text = padding.joint = padding.lengths(tuple(most - count for count in counts))


def _crop_texts(named: dict[str, Any], padding: Padding) -> None:
    """:func:`_crop_text` for HunyuanVideo 1.5: Qwen's text, ByT5's quotations and a picture, whose valid tokens
    upstream puts first. As upstream, a picture whose states are all zero is none. Does nothing unless all are given."""
    pairs = ((TEXT, MASK), (f"{TEXT}_2", f"{MASK}_2"))
    texts: list[Any] = [named.get(mask) for _, mask in pairs]
    picture: Any = named.get("image_embeds")
    if not all(isinstance(given, torch.Tensor) for given in (picture, *texts)):
        return
    if not picture.any():
        named["image_embeds"] = picture = picture[:, :0]
    pictured = picture.shape[1]
    total = [pictured] * picture.shape[0]  # valid tokens of each row
    for (name, mask), valid in zip(pairs, texts, strict=True):
        counts, known = valid_counts(valid)
        most = max(counts) if known or not any(counts) else valid.shape[1]
        named[name], named[mask] = named[name][:, :most], valid[:, :most]
        total = [sum(pair) for pair in zip(total, counts, strict=True)]
        if name == TEXT and known:
            padding.text = padding.lengths(tuple(most - count for count in counts))
    width = pictured + sum(named[name].shape[1] for name, _ in pairs)
    padding.joint = padding.lengths(tuple(width - count for count in total))


CROPPED: Mapping[str, Callable[[dict[str, Any], Padding], None]] = {  # transformer class -> what leaves its padding out
    "HunyuanVideoTransformer3DModel": _crop_text,
    "HunyuanVideoFramepackTransformer3DModel": _crop_text,
    "HunyuanVideo15Transformer3DModel": _crop_texts,
    "MochiTransformer3DModel": _crop_text,
    "LTXVideoTransformer3DModel": _crop_text,
}
