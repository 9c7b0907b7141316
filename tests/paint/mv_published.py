"""MV-Adapter's attention written down a second time, token by token, as its published processors compute it.

Slow on purpose: lines of tokens are gathered by index, every attention is a softmax of its own, and all guidance rows
go through the UNet with the reference repeated for each view and zeros in the row without it.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

VIEWS = 6


def attention(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """(N, D) from (N, D), (M, D) and (M, D)."""
    results = []
    for q, k, v in zip(query.chunk(heads, 1), key.chunk(heads, 1), value.chunk(heads, 1), strict=True):
        results.append((q @ k.T / math.sqrt(q.shape[1])).softmax(1) @ v)
    return torch.cat(results, 1)


class Stock:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, cache=None, **_) -> Tensor:
        seen = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        pairs = zip(attn.to_q(hidden_states), attn.to_k(seen), attn.to_v(seen), strict=True)
        return attn.to_out[0](torch.stack([attention(*each, attn.heads) for each in pairs]))


class Published(nn.Module):
    """The processor of one self-attention; ``settings`` are those of the call."""

    def __init__(self, name: str, width: int, reference: bool) -> None:
        super().__init__()
        self.name, self.reference = name, reference
        for kind in ("mv", "ref")[: 1 + reference]:
            for part in "qkv":
                setattr(self, f"to_{part}_{kind}", nn.Linear(width, width, bias=False))
            setattr(self, f"to_out_{kind}", nn.ModuleList([nn.Linear(width, width)]))

    def __call__(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, cache=None, kept=None,
        mv_scale=1.0, ref_scale=1.0,
    ) -> Tensor:  # fmt: skip
        out = Stock()(attn, hidden_states)
        if cache is not None:
            cache[self.name] = hidden_states
            return out
        out = out + mv_scale * self.between(hidden_states, attn.heads)
        if self.reference:
            pairs = zip(self.to_q_ref(hidden_states), self.to_k_ref(kept[self.name]), self.to_v_ref(kept[self.name]),
                        strict=True)  # fmt: skip
            out = out + ref_scale * self.to_out_ref[0](torch.stack([attention(*each, attn.heads) for each in pairs]))
        return out

    def between(self, x: Tensor, heads: int) -> Tensor:
        g = math.isqrt(x.shape[1])
        q, k, v = (layer(x) for layer in (self.to_q_mv, self.to_k_mv, self.to_v_mv))
        sums = torch.zeros_like(q)
        for row in range(len(x) // VIEWS):
            lines = [[(view, y * g + i) for view in (0, 1, 2, 3) for i in range(g)] for y in range(g)]
            for column in range(g):  # the front's columns are counted from its other side
                sides = {0: g - 1 - column, 2: column, 4: column, 5: column}
                lines.append([(view, i * g + side) for view, side in sides.items() for i in range(g)])
            for line in lines:
                at = torch.tensor([row * VIEWS + view for view, _ in line]), torch.tensor([place for _, place in line])
                sums[at] += attention(q[at], k[at], v[at], heads)
        counts = torch.tensor([2.0, 1.0, 2.0, 1.0, 1.0, 1.0]).repeat(len(x) // VIEWS)
        return self.to_out_mv[0](sums / counts[:, None, None])


def unet_of(config: dict[str, Any], reference: bool) -> nn.Module:
    """Diffusers' UNet with the processors above."""
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel.from_config(config)
    for name, module in unet.named_modules():
        if name.endswith("attn1"):
            module.set_processor(Published(name, module.to_q.in_features, reference))
        elif name.endswith("attn2"):
            module.set_processor(Stock())
    return unet


def predicted(unet, x, time, text, added, states, reference, guided, **scales) -> Tensor:
    """The prediction of all rows, (R * V, 4, h, w).

    Args:
        x: (V, 4, h, w), the same in each row.
        text: (R, N, D), the unconditional row first; ``added`` of R rows.
        reference: clean latents (1, 4, h, w); None for tg2mv.
    """
    rows = len(text)
    last = {name: value[-1:] for name, value in added.items()}
    settings = dict(scales)
    if reference is not None:
        cache: dict[str, Tensor] = {}
        unet(reference, torch.tensor(0), text[-1:], added_cond_kwargs=last, cross_attention_kwargs={"cache": cache})
        kept = {name: seen.repeat_interleave(VIEWS, dim=0) for name, seen in cache.items()}
        if guided:
            kept = {name: torch.cat((torch.zeros_like(seen), seen)) for name, seen in kept.items()}
        settings["kept"] = kept
    return unet(
        torch.cat([x] * rows),
        time,
        torch.repeat_interleave(text, VIEWS, dim=0),
        added_cond_kwargs={name: torch.repeat_interleave(value, VIEWS, dim=0) for name, value in added.items()},
        cross_attention_kwargs=settings,
        down_intrablock_additional_residuals=[torch.cat([state] * rows) for state in states],
    ).sample
