"""The causal masks that core's VAEs lost: attention over frames that, as published, sees no later frame.

Only the result of several latent frames differs; pictures are the same with and without.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...compat.transforms.attention import Attention
from .ownership import is_foreign


def lost_masks(network: nn.Module, attention: Attention) -> Iterator[tuple[nn.Module, str, Any]]:
    """(module, attribute, what it becomes) of each attention whose causal mask core lost.

    They are recognised by their projections in a network of 3-D convolutions: 1x1x1 convolutions, or one Linear for
    queries, keys and values with normalised heads.

    Source:
        Tencent-Hunyuan/HunyuanVideo and -1.5: prepare_causal_attention_mask in the middle block.
        genmoai/mochi, src/genmo/mochi_preview/vae/models.py: is_causal=True.
    """
    if not _is_3d(network):
        return
    for module in network.modules():
        if is_foreign(type(module).forward):
            continue  # another pack's attention, which may have masks of its own
        if _is_over_frames(module):
            yield module, "forward", CausalInTime(module, attention)
        elif hasattr(module, "optimized_attention") and _is_3d(getattr(module, "q", None)):
            yield module, "optimized_attention", CausalFrames(attention)


class CausalFrames:
    """Attention over the voxels of a video (B, C, T, H, W), each of which sees its own frame and those before it.

    A frame of queries at a time, so that no mask and no matrix over all voxels is built.
    """

    def __init__(self, attention: Attention) -> None:
        self.attention = attention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute the publisher's masked attention, in the layout of ``query``."""
        shape, frames = query.shape, query.shape[2]
        plane = shape[3] * shape[4]
        query, key, value = (each.flatten(2).transpose(1, 2)[:, None] for each in (query, key, value))
        parts = [
            self.attention(
                query[:, :, frame * plane : (frame + 1) * plane].contiguous(),
                key[:, :, : (frame + 1) * plane].contiguous(),
                value[:, :, : (frame + 1) * plane].contiguous(),
            )
            for frame in range(frames)
        ]
        return torch.cat(parts, dim=2)[:, 0].transpose(1, 2).reshape(shape)


class CausalInTime:
    """Attention over the frames of each place of a video (B, C, T, H, W), in which no frame sees a later one."""

    def __init__(self, module: Any, attention: Attention) -> None:
        self.module, self.attention = module, attention

    def __call__(self, x: Tensor) -> Tensor:
        """Run core's own forward, with the mask."""
        own, (batch, _, frames, height, width) = self.module, x.shape
        if frames == 1:
            return type(own).forward(own, x)
        places = x.permute(0, 3, 4, 2, 1).flatten(0, 2)
        both = own.qkv(places).unflatten(-1, (3, own.num_heads, own.head_dim))
        query, key, value = (each.transpose(1, 2) for each in both.unbind(2))
        if own.qk_norm:
            query, key = functional.normalize(query, dim=-1), functional.normalize(key, dim=-1)
        seen = self.attention(query.contiguous(), key.contiguous(), value.contiguous(), causal=True)
        out = own.out(seen.transpose(1, 2).flatten(2))
        return out.unflatten(0, (batch, height, width)).permute(0, 4, 3, 1, 2)


def _is_over_frames(module: Any) -> bool:
    """True if ``module`` has the attributes :class:`CausalInTime` computes with, and no others."""
    parts = dict(module.named_children())
    return (
        parts.keys() == {"qkv", "out"}
        and all(isinstance(part, nn.Linear) for part in parts.values())
        and {"num_heads", "head_dim", "qk_norm"} <= vars(module).keys()
        and parts["qkv"].out_features == 3 * module.num_heads * module.head_dim
    )


def _is_3d(projection: Any) -> bool:
    return any(isinstance(module, nn.Conv3d) for module in projection.modules()) if projection is not None else False
