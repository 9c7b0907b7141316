"""Stable Diffusion 2's UNet in plain torch, with the attention kernel and the dtypes as settings.

Submodules are named as in the published weights, and layers called as modules, so that any offloader may hold them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...compat.transforms.attention import Attention as Kernel

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
LAYER_EPSILON, WRAPPER_EPSILON = 1e-5, 1e-6
FREQUENCY_BASE = 10000.0
FED_TOKENS = 16384  # fill any GPU; all views at once would take more memory than everything else


@dataclass(slots=True)
class Dtypes:
    """In which dtypes one network computes; shared by its modules and set once, before it runs."""

    compute: torch.dtype | None = None  # operands of products, convolutions and attention; None leaves what comes in
    residual: torch.dtype | None = None  # stream between the blocks, norms and their weights; None: likewise

    def narrow(self, x: Tensor) -> Tensor:  # as an operand
        return x if self.compute is None else x.to(self.compute)

    def wide(self, x: Tensor) -> Tensor:  # as part of the residual stream
        return x if self.residual is None else x.to(self.residual)


class MultiHeadAttention(nn.Module):
    """Multi-head attention with projections; ``attend`` is the kernel and may be replaced."""

    def __init__(self, width: int, heads: int, seen_width: int | None = None) -> None:  # None: ``width``
        super().__init__()
        self.heads = heads
        self.attend: Attend = Kernel()
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(seen_width or width, width, bias=False)
        self.to_v = nn.Linear(seen_width or width, width, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def forward(self, x: Tensor, seen: Tensor | None = None, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """(B, N, D): attention of ``x`` (B, N, D) to ``seen`` (B, M, D'), by default itself. ``rotary``, for M = N,
        turns queries and keys: cosines and sines (B or 1, N, D / heads), fp32, each value twice."""
        seen = x if seen is None else seen
        query, key, value = (split(y, self.heads) for y in (self.to_q(x), self.to_k(seen), self.to_v(seen)))
        if rotary is not None:
            query, key = apply_rotary(query, rotary), apply_rotary(key, rotary)
        return self.to_out[0](joined(self.attend(query, key, value)))


def split(x: Tensor, heads: int) -> Tensor:
    """(B, heads, N, D) from (B, N, heads * D)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """(B, N, heads * D) from (B, heads, N, D)."""
    return x.transpose(1, 2).flatten(2)


def apply_rotary(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """``x`` (B, heads, N, D) with adjacent pairs of features rotated by the tables ``rotary``, computed in fp32."""
    cosines, sines = (table.unsqueeze(1) for table in rotary)
    wide = x.float()
    across = torch.stack((-wide[..., 1::2], wide[..., 0::2]), dim=-1).flatten(-2)
    return (wide * cosines + across * sines).to(x.dtype)


class GatedProjection(nn.Module):
    """value * gelu(gate), both from one Linear, value first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 8 * width)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, dim=-1)
        return value * functional.gelu(gate)


class FeedForward(nn.Module):
    """The layer's two Linears; place 1 is upstream's dropout, which keeps the names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.ModuleList([GatedProjection(width), nn.Identity(), nn.Linear(4 * width, width)])

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) from (B, N, D), as many samples at a time as have :data:`FED_TOKENS` tokens, at least one: the
        first Linear makes each token eight times as wide."""
        rows = max(1, FED_TOKENS // x.shape[1])
        if x.shape[0] <= rows:
            return self.net[2](self.net[0](x))
        fed = torch.empty_like(x)
        for part, out in zip(x.split(rows), fed.split(rows), strict=True):
            out.copy_(self.net[2](self.net[0](part)))
        return fed


class Layer(nn.Module):
    """A stock transformer layer: attention to itself, to the text, feed-forward, each after its own norm.

    ``normed`` and ``asked`` are the inputs of the attentions, ``fed`` what the feed-forward adds."""

    def __init__(self, width: int, heads: int, text_width: int, dtypes: Dtypes) -> None:
        super().__init__()
        self.dtypes = dtypes
        self.norm1 = nn.LayerNorm(width, eps=LAYER_EPSILON)
        self.attn1 = MultiHeadAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=LAYER_EPSILON)
        self.attn2 = MultiHeadAttention(width, heads, text_width)
        self.norm3 = nn.LayerNorm(width, eps=LAYER_EPSILON)
        self.ff = FeedForward(width)

    def forward(self, h: Tensor, text: Tensor, _run: object = None) -> Tensor:
        h = h + self.attn1(self.normed(h))
        h = h + self.attn2(self.asked(h), text)
        return h + self.fed(h)

    def normed(self, h: Tensor) -> Tensor:
        return self.dtypes.narrow(self.norm1(h))

    def asked(self, h: Tensor) -> Tensor:
        return self.dtypes.narrow(self.norm2(h))

    def fed(self, h: Tensor) -> Tensor:
        return self.ff(self.dtypes.narrow(self.norm3(h)))


class Transformer(nn.Module):
    """One layer over the pixels of a feature map, with projections around it."""

    def __init__(self, width: int, groups: int, layer: nn.Module, dtypes: Dtypes) -> None:
        super().__init__()
        self.dtypes = dtypes
        self.norm = nn.GroupNorm(groups, width, eps=WRAPPER_EPSILON)
        self.proj_in = nn.Linear(width, width)
        self.transformer_blocks = nn.ModuleList([layer])
        self.proj_out = nn.Linear(width, width)

    def forward(self, x: Tensor, text: Tensor, run: object = None) -> Tensor:  # (B, C, H, W); ``run`` is the layer's
        rows, columns = x.shape[-2:]
        tokens = self.dtypes.narrow(self.norm(x)).flatten(2).transpose(1, 2)
        tokens = self.dtypes.wide(self.proj_in(tokens))
        for layer in self.transformer_blocks:
            tokens = layer(tokens, text, run)
        tokens = self.proj_out(self.dtypes.narrow(tokens))
        return x + tokens.transpose(1, 2).unflatten(2, (rows, columns))


class Residual(nn.Module):
    """Two convolutions with the time added between them, beside a shortcut."""

    def __init__(self, width: int, out_width: int, time_width: int, groups: int, dtypes: Dtypes) -> None:
        super().__init__()
        self.dtypes = dtypes
        self.norm1 = nn.GroupNorm(groups, width, eps=LAYER_EPSILON)
        self.conv1 = nn.Conv2d(width, out_width, 3, padding=1)
        self.time_emb_proj = nn.Linear(time_width, out_width)
        self.norm2 = nn.GroupNorm(groups, out_width, eps=LAYER_EPSILON)
        self.conv2 = nn.Conv2d(out_width, out_width, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(width, out_width, 1) if width != out_width else None

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """(B, C', H, W) from (B, C, H, W) and the time embedding (B, E), silu already applied."""
        narrow, wide = self.dtypes.narrow, self.dtypes.wide
        h = self.conv1(narrow(functional.silu(self.norm1(x))))
        h = wide(h) + wide(self.time_emb_proj(time))[:, :, None, None]
        h = self.conv2(narrow(functional.silu(self.norm2(h))))
        return (x if self.conv_shortcut is None else wide(self.conv_shortcut(narrow(x)))) + h


class Resampled(nn.Module):
    """Half the size by a strided convolution, or twice by repetition and a convolution."""

    def __init__(self, width: int, up: bool, dtypes: Dtypes) -> None:
        super().__init__()
        self.dtypes, self.up = dtypes, up
        self.conv = nn.Conv2d(width, width, 3, stride=1 if up else 2, padding=1)

    def forward(self, x: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """(B, C, H', W') from (B, C, H, W); ``size`` is (H', W') of an ``up`` that is not by two."""
        x = self.dtypes.narrow(x)
        if self.up:
            x = functional.interpolate(x, size=size or (2 * x.shape[-2], 2 * x.shape[-1]), mode="nearest")
        return self.dtypes.wide(self.conv(x))


class TimeEmbedding(nn.Module):
    """The timestep as cosines and sines, through two Linears."""

    def __init__(self, waves: int, width: int, dtypes: Dtypes) -> None:
        super().__init__()
        self.dtypes, self.waves = dtypes, waves
        self.linear_1 = nn.Linear(waves, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, timestep: Tensor) -> Tensor:  # (B, width) from (B,)
        half = self.waves // 2
        steps = torch.arange(half, dtype=torch.float32, device=timestep.device)
        angles = timestep.float()[:, None] * torch.exp(-math.log(FREQUENCY_BASE) / half * steps)[None]
        waves = self.dtypes.narrow(torch.cat((angles.cos(), angles.sin()), dim=-1))
        return self.linear_2(functional.silu(self.linear_1(waves)))
