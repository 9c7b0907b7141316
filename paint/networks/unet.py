"""Stable Diffusion 2's UNet around any kind of transformer layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...compat.errors import CheckpointError
from .layers import Attend, Dtypes, Layer, MultiHeadAttention, Resampled, Residual, TimeEmbedding, Transformer

Wrap = Callable[[str, Layer, int, int], nn.Module]  # (name, stock layer, width, heads) -> layer
Size = tuple[int, ...] | None
CROSS = "CrossAttn"
REQUIRED: dict[str, Any] = {  # what the published configurations say; a network with another value is another network
    "act_fn": "silu", "use_linear_projection": True, "flip_sin_to_cos": True, "freq_shift": 0, "norm_eps": 1e-5,
    "dual_cross_attention": False, "only_cross_attention": False, "center_input_sample": False,
    "downsample_padding": 1, "mid_block_scale_factor": 1,
}  # fmt: skip
STABLE_DIFFUSION_2: dict[str, Any] = {  # for single files, which come without their config.json
    "in_channels": 4, "out_channels": 4, "block_out_channels": [320, 640, 1280, 1280], "layers_per_block": 2,
    "cross_attention_dim": 1024, "attention_head_dim": [5, 10, 20, 20], "norm_num_groups": 32,
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class UNetShape:
    in_channels: int
    out_channels: int
    widths: tuple[int, ...]
    heads: tuple[int, ...]
    attending_down: tuple[bool, ...]  # which levels have transformers, in the order of the forward
    attending_up: tuple[bool, ...]
    depth: int  # residual blocks of a level on the way down
    text_width: int
    time_width: int
    groups: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> UNetShape:
        """The shape in a ``config.json``; raises CheckpointError for another kind of UNet, or a damaged one."""
        for name, value in REQUIRED.items():
            if config.get(name, value) != value:
                found = f"{name} {config[name]!r} in the configuration of the UNet"
                raise CheckpointError(found, expected=f"{value!r}", fix="Choose a folder of this node's models.")
        try:
            widths = tuple(config["block_out_channels"])
            heads = config["attention_head_dim"]
            return cls(
                in_channels=int(config["in_channels"]),
                out_channels=int(config["out_channels"]),
                widths=widths,
                heads=tuple(heads) if not isinstance(heads, int) else (heads,) * len(widths),
                attending_down=tuple(kind.startswith(CROSS) for kind in config["down_block_types"]),
                attending_up=tuple(kind.startswith(CROSS) for kind in config["up_block_types"]),
                depth=int(config["layers_per_block"]),
                text_width=int(config["cross_attention_dim"]),
                time_width=int(config.get("time_embedding_dim") or 4 * widths[0]),
                groups=int(config["norm_num_groups"]),
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            found = f"a UNet whose sizes in config.json cannot be read ({type(error).__name__}: {error})"
            raise CheckpointError(found, expected="those of this model", fix="Download that file again.") from error


class Block(nn.Module):
    """Residual blocks of one level, each with its transformer where the level attends, then a change of size."""

    resnets: nn.ModuleList
    attentions: nn.ModuleList
    downsamplers: nn.ModuleList
    upsamplers: nn.ModuleList

    def __init__(self, residuals: list[Residual], attentions: list[Transformer], sampler: Resampled | None) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(residuals)
        if attentions:
            self.attentions = nn.ModuleList(attentions)
        if sampler is not None:
            setattr(self, "upsamplers" if sampler.up else "downsamplers", nn.ModuleList([sampler]))

    def once(self, index: int, x: Tensor, time: Tensor, text: Tensor, run: object) -> Tensor:
        x = self.resnets[index](x, time)
        return self.attentions[index](x, text, run) if hasattr(self, "attentions") else x


class DownBlock(Block):
    def forward(self, x: Tensor, time: Tensor, text: Tensor, run: object = None) -> list[Tensor]:
        """The feature map after each residual block, then, but at the deepest level, the downsampled one."""
        kept = []
        for index in range(len(self.resnets)):
            x = self.once(index, x, time, text, run)
            kept.append(x)
        return [*kept, self.downsamplers[0](x)] if hasattr(self, "downsamplers") else kept


class UpBlock(Block):
    def forward(self, x: Tensor, kept: list[Tensor], time: Tensor, text: Tensor, run: object, size: Size) -> Tensor:
        """The feature map after the level, upsampled to (H, W) ``size``; pops its shortcuts off the end of ``kept``."""
        for index in range(len(self.resnets)):
            x = self.once(index, torch.cat((x, kept.pop()), dim=1), time, text, run)
        return self.upsamplers[0](x, size) if hasattr(self, "upsamplers") else x


class MiddleBlock(Block):
    def forward(self, x: Tensor, time: Tensor, text: Tensor, run: object = None) -> Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x, time), text, run), time)


class UNet(nn.Module):
    """A UNet of stock layers, or of what ``wrap`` makes of each.

    ``wrap`` gets name, stock layer, width and heads; names are as ``down_0_0_0`` (block, attention, layer)."""

    def __init__(self, shape: UNetShape, wrap: Wrap | None, dtypes: Dtypes | None) -> None:
        super().__init__()
        self.shape, self.wrap, self.dtypes = shape, wrap, dtypes or Dtypes()
        widths = shape.widths
        self.conv_in = nn.Conv2d(shape.in_channels, widths[0], 3, padding=1)
        self.time_embedding = TimeEmbedding(widths[0], shape.time_width, self.dtypes)
        self.down_blocks = nn.ModuleList(self._level(level, up=False) for level in range(len(widths)))
        middle = [self._residual(widths[-1], widths[-1]) for _ in range(2)]
        self.mid_block = MiddleBlock(middle, [self._transformer("mid_0", widths[-1], shape.heads[-1])], None)
        self.up_blocks = nn.ModuleList(self._level(level, up=True) for level in range(len(widths)))
        self.conv_norm_out = nn.GroupNorm(shape.groups, widths[0], eps=1e-5)
        self.conv_out = nn.Conv2d(widths[0], shape.out_channels, 3, padding=1)

    def forward(
        self, x: Tensor, timestep: Tensor, text: Tensor, run: object = None, labels: Tensor | None = None
    ) -> Tensor:
        """The prediction (B, out_channels, H, W) from ``x`` (B, in_channels, H, W) at ``timestep`` (B,) or (1,).

        ``text`` (B', N, D) and ``run`` go to the layers; ``labels`` (B, E) are added to the time embedding."""
        x = functional.silu(self.conv_norm_out(self.features(x, timestep, text, run, labels)))
        return self.conv_out(self.dtypes.narrow(x))

    def features(self, x: Tensor, timestep: Tensor, text: Tensor, run: object, labels: Tensor | None = None) -> Tensor:
        """The feature map (B, C, H, W) that the last norm takes."""
        time = self.time_embedding(timestep)
        time = functional.silu(time if labels is None else time + labels.to(time.dtype))
        x, text = self.dtypes.wide(self.conv_in(self.dtypes.narrow(x))), self.dtypes.narrow(text)
        kept = [x]
        for block in self.down_blocks:
            kept += block(kept[-1], time, text, run)
        x = self.mid_block(kept[-1], time, text, run)
        for block in self.up_blocks:
            left = len(kept) - self.shape.depth - 1  # shortcuts after this block; the last has the next one's size
            x = block(x, kept, time, text, run, tuple(kept[left - 1].shape[-2:]) if left else None)
        return x

    def _residual(self, width: int, out_width: int) -> Residual:
        return Residual(width, out_width, self.shape.time_width, groups=self.shape.groups, dtypes=self.dtypes)

    def _transformer(self, name: str, width: int, heads: int) -> Transformer:
        layer = Layer(width, heads, self.shape.text_width, self.dtypes)
        made = layer if self.wrap is None else self.wrap(f"{name}_0", layer, width, heads)
        return Transformer(width, self.shape.groups, made, self.dtypes)

    def _level(self, level: int, up: bool) -> Block:
        """The blocks of one level; on the way up level 0 is the deepest."""
        shape, order = self.shape, -1 if up else 1
        widths, heads = shape.widths[::order], shape.heads[::order]
        attending, depth = (shape.attending_up, shape.depth + 1) if up else (shape.attending_down, shape.depth)
        width, before, after = widths[level], widths[max(level - 1, 0)], widths[min(level + 1, len(widths) - 1)]
        shortcuts = [0] * depth if not up else [*[width] * (depth - 1), after]  # the last is of the next level
        residuals = [
            self._residual((width if index else before) + shortcut, width) for index, shortcut in enumerate(shortcuts)
        ]
        names = [f"{'up' if up else 'down'}_{level}_{index}" for index in range(depth if attending[level] else 0)]
        attentions = [self._transformer(name, width, heads[level]) for name in names]
        sampler = None if level == len(widths) - 1 else Resampled(width, up, self.dtypes)
        return (UpBlock if up else DownBlock)(residuals, attentions, sampler)


def set_attention(network: nn.Module, attend: Attend) -> None:
    for module in network.modules():
        if isinstance(module, MultiHeadAttention):
            module.attend = attend
