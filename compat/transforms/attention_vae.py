"""The mid-block attention of the VAEs, rewritten to need no N x N mask.

HunyuanVideo's and HunyuanVideo 1.5's let each frame see itself and those before it. Upstream writes that into a float
mask over all pairs of latent cells (4.9 GB for 480p in 121 frames; 1.5 fills it row by row in Python). A frame's keys
are a prefix of all keys, so the same result comes from one call per frame, without a mask and with half the products.
Only exact stock classes are rewritten; weights stay in their leaf modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .attention_processors import Attend, Padding, Processor, heads_of


def causal_by_frames(
    attend: Attend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, frames: int
) -> torch.Tensor:
    """Attention (B, H, N, D) in which the tokens of a frame see those of that frame and of all before it."""
    size = query.shape[2] // frames
    parts = [
        attend(query[:, :, end - size : end], key[:, :, :end], value[:, :, :end])
        for end in range(size, query.shape[2] + 1, size)
    ]
    return torch.cat(parts, dim=2)


def _middle(attend: Attend, _: Padding) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """HunyuanVideo's and FramePack's middle block.

    Source: diffusers ``HunyuanVideoMidBlock3D.forward`` with ``AttnProcessor2_0``.
    """

    def forward(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = block.resnets[0](hidden_states)
        for attn, resnet in zip(block.attentions, block.resnets[1:], strict=True):
            if attn is not None:
                grid = hidden_states.shape[2:]
                tokens = hidden_states.permute(0, 2, 3, 4, 1).flatten(1, 3)
                tokens = _cells(attn, attend, tokens, grid[0])
                hidden_states = tokens.unflatten(1, grid).permute(0, 4, 1, 2, 3)
            hidden_states = resnet(hidden_states)
        return hidden_states

    return forward


def _cells(attn: Any, attend: Attend, tokens: torch.Tensor, frames: int) -> torch.Tensor:
    residual = tokens
    if attn.group_norm is not None:
        tokens = attn.group_norm(tokens.transpose(1, 2)).transpose(1, 2)
    query, key, value = (heads_of(attn, layer, tokens).transpose(1, 2) for layer in (attn.to_q, attn.to_k, attn.to_v))
    attention = causal_by_frames(attend, query, key, value, frames).transpose(1, 2).flatten(2)
    tokens = attn.to_out[1](attn.to_out[0](attention))
    result: torch.Tensor = (tokens + residual if attn.residual_connection else tokens) / attn.rescale_output_factor
    return result


def _block(attend: Attend, _: Padding) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """HunyuanVideo 1.5's attention block, whose projections are convolutions of size 1.

    Source: diffusers ``HunyuanVideo15AttnBlock.forward``.
    """

    def forward(block: Any, x: torch.Tensor) -> torch.Tensor:
        normed = block.norm(x)
        query, key, value = (
            layer(normed).flatten(2).transpose(1, 2).unsqueeze(1).contiguous()
            for layer in (block.to_q, block.to_k, block.to_v)
        )
        attention = causal_by_frames(attend, query, key, value, x.shape[2]).squeeze(1)
        result: torch.Tensor = block.proj_out(attention.unflatten(1, x.shape[2:]).permute(0, 4, 1, 2, 3)) + x
        return result

    return forward


class MochiVaeProcessor(Processor):
    """Mochi's VAE: each cell over time, the batch being the cells of a frame.

    Source: diffusers ``MochiVaeAttnProcessor2_0``.
    """

    @staticmethod
    def replaces(owner: Any) -> bool:
        """Always: nothing is left out."""
        return True

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tokens (B, T, D) after attention, to which they are added where the layer says so."""
        seen = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if hidden_states.shape[1] == 1:  # one frame sees itself alone
            attention = attn.to_v(hidden_states)
        else:
            query, key = heads_of(attn, attn.to_q, hidden_states), heads_of(attn, attn.to_k, seen)
            value = heads_of(attn, attn.to_v, seen).transpose(1, 2)
            query, key = query.transpose(1, 2), key.transpose(1, 2)
            query = query if attn.norm_q is None else attn.norm_q(query)
            key = key if attn.norm_k is None else attn.norm_k(key)
            mask = attention_mask if attention_mask is None or attention_mask.ndim == 4 else attention_mask.unsqueeze(1)
            attention = self.attend(query, key, value, mask, causal=attn.is_causal)
            attention = attention.transpose(1, 2).flatten(2).to(query.dtype)
        attention = attn.to_out[1](attn.to_out[0](attention))
        result: torch.Tensor = attention + hidden_states if attn.residual_connection else attention
        return result / attn.rescale_output_factor


MODELS = "diffusers.models"
PROCESSORS: Mapping[str, type[Processor]] = {  # stock class -> ours
    f"{MODELS}.attention_processor.MochiVaeAttnProcessor2_0": MochiVaeProcessor,
}
BLOCKS: Mapping[str, Callable[[Attend, Padding], Callable[..., torch.Tensor]]] = {  # stock class -> our forward
    f"{MODELS}.autoencoders.autoencoder_kl_hunyuan_video.HunyuanVideoMidBlock3D": _middle,
    f"{MODELS}.autoencoders.autoencoder_kl_hunyuanvideo15.HunyuanVideo15AttnBlock": _block,
}
