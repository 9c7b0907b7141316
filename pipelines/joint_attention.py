"""HunyuanVideo 1.5's joint attention of video and text without its mask, for calls in which every token is valid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def unmasked(transformer: Any) -> Iterator[None]:
    """Within the block, joint attention runs without its mask, which is exact when every token is valid.

    Upstream builds it in every block as bool (1, 1, N, N): 2.4 GB a copy at 480p, 12 GB at 720p, for 121 frames.
    Only the stock processor is replaced, and put back afterwards.
    """
    from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0 as Stock

    attentions = [block.attn for block in transformer.transformer_blocks if type(block.attn.processor) is Stock]
    stock = [attention.processor for attention in attentions]
    try:
        for attention, processor in zip(attentions, stock, strict=True):
            attention.set_processor(Unmasked(processor._attention_backend, processor._parallel_config))
        yield
    finally:
        for attention, processor in zip(attentions, stock, strict=True):
            attention.set_processor(processor)


class Unmasked:
    """Attention over video and text tokens together, all of them valid.

    Args:
        backend, parallel_config: what diffusers' attention dispatcher takes.
    """

    def __init__(self, backend: Any = None, parallel_config: Any = None) -> None:
        self._attention_backend, self._parallel_config = backend, parallel_config

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Video and text tokens (B, N, D) after attention; the mask is not read."""
        from diffusers.models import attention_dispatch, embeddings

        # Upstream annotates both as narrower than what it passes them.
        attend: Any = attention_dispatch.dispatch_attention_fn
        rotated: Any = embeddings.apply_rotary_emb

        def heads(layer: Any, tokens: torch.Tensor, norm: Any = None) -> torch.Tensor:
            found: torch.Tensor = layer(tokens).unflatten(2, (attn.heads, -1))
            return found if norm is None else norm(found)

        def placed(tokens: torch.Tensor) -> torch.Tensor:
            return tokens if image_rotary_emb is None else rotated(tokens, image_rotary_emb, sequence_dim=1)

        video = (
            placed(heads(attn.to_q, hidden_states, attn.norm_q)),
            placed(heads(attn.to_k, hidden_states, attn.norm_k)),
            heads(attn.to_v, hidden_states),
        )
        text = (
            heads(attn.add_q_proj, encoder_hidden_states, attn.norm_added_q),
            heads(attn.add_k_proj, encoder_hidden_states, attn.norm_added_k),
            heads(attn.add_v_proj, encoder_hidden_states),
        )
        query, key, value = (torch.cat(pair, dim=1) for pair in zip(video, text, strict=True))
        joint = attend(query, key, value, backend=self._attention_backend, parallel_config=self._parallel_config)
        joint = joint.flatten(2).to(hidden_states.dtype)
        seen, read = joint.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](seen)), attn.to_add_out(read)
