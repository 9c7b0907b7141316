"""Causal decoders over a few latent frames at a time, exactly: each layer is given the frames it saw before.

Mochi's and HunyuanVideo 1.5's decoders look back only; HunyuanVideo's group norms and LTX-Video's convolutions do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...compat.memory.parts import Undo, full_name
from ...compat.memory.transfer import Transfer
from ...compat.transforms.compile import uncompiled
from ...compat.transforms.conv3d_methods import padded

AUTOENCODERS = "diffusers.models.autoencoders.autoencoder_kl_"
MOCHI_CONV = f"{AUTOENCODERS}cogvideox.CogVideoXCausalConv3d"
MOCHI, MOCHI_UP = f"{AUTOENCODERS}mochi.AutoencoderKLMochi", f"{AUTOENCODERS}mochi.MochiUpBlock3D"
SPATIAL_PADDING = "spatial_padding_mode"  # Lightricks' word for it, in its files and on the module
CONVS = (MOCHI_CONV, f"{AUTOENCODERS}hunyuanvideo15.HunyuanVideo15CausalConv3d")
UPSAMPLE = f"{AUTOENCODERS}hunyuanvideo15.HunyuanVideo15Upsample"
ATTENTION = f"{AUTOENCODERS}hunyuanvideo15.HunyuanVideo15AttnBlock"


@dataclass(frozen=True, slots=True)
class TilePosition:
    """The position of a piece in its plane, in cells of the piece: a core, and what is read around it."""

    rows: tuple[int, int]  # (first, end) of the core
    columns: tuple[int, int]
    halo: tuple[int, int, int, int]  # cells read above, below, left and right of it
    height: int  # of the plane
    width: int

    def read(self, plane: Tensor) -> Tensor:
        """The core of a plane (..., H, W) with what is around it."""
        above, below, left, right = self.halo
        return plane[..., self.rows[0] - above : self.rows[1] + below, self.columns[0] - left : self.columns[1] + right]

    def core(self, piece: Tensor) -> Tensor:
        """The core of ``piece`` (..., h, w), made from what :meth:`read` gave, perhaps with several pixels per cell."""
        above, below, left, _ = self.halo
        rows, columns = self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        grow = piece.shape[-2] // (rows + above + below)
        return piece[..., above * grow : (above + rows) * grow, left * grow : (left + columns) * grow]


@dataclass(slots=True)
class CausalCache:
    """Earlier frames remembered by a causal decoder, in host memory: whole planes, by layer."""

    transfer: Transfer
    # By layer, (1, C, k - 1, H, W) of each convolution, keys and values (1, 2C, T, H, W) of an attention.
    kept: dict[nn.Module, Tensor] = field(default_factory=dict)
    coming: dict[nn.Module, Tensor] = field(default_factory=dict)  # what the chunk under way leaves for the next
    frames: int = 0  # latent frames behind it
    place: TilePosition | None = None  # position of the piece that runs; None for the whole plane

    def before(self, layer: nn.Module) -> Tensor | None:
        """Last frames of a convolution's input, or an attention's keys and values, on the device; None at first."""
        kept = self.kept.get(layer)
        if kept is None:
            return None
        return self.transfer.to_device(kept if self.place is None else self.place.read(kept).contiguous())

    def remember(self, layer: nn.Module, seen: Tensor) -> None:
        """Keep ``seen`` for the next chunk; of a piece only its core: what is around belongs to others."""
        if self.place is None:
            self.coming[layer] = self.transfer.to_host(seen.contiguous())
            return
        core = self.transfer.to_host(self.place.core(seen).contiguous())
        if layer not in self.coming:
            self.coming[layer] = core.new_empty(*seen.shape[:3], self.place.height, self.place.width)
        (top, bottom), (left, right) = self.place.rows, self.place.columns
        self.coming[layer][..., top:bottom, left:right] = core

    def commit(self, frames: int) -> None:
        """After a chunk of ``frames`` latent frames: convolution inputs replace the old ones, keys and values join."""
        for layer, seen in self.coming.items():
            is_attention = full_name(layer) == ATTENTION and layer in self.kept
            self.kept[layer] = torch.cat([self.kept[layer], seen], dim=2) if is_attention else seen
        self.coming, self.frames = {}, self.frames + frames

    def abandon(self) -> None:
        """After a chunk that failed: forget its frames, so that it can be tried again from where it began."""
        self.coming, self.place = {}, None

    def cropped(self, rows: tuple[int, int], columns: tuple[int, int], height: int) -> CausalCache:
        """A copy for a part of the plane: latent ``rows`` and ``columns``, (first, end), of a plane ``height`` high."""
        kept, (top, bottom), (left, right) = {}, rows, columns
        for layer, seen in self.kept.items():
            grow = seen.shape[-2] // height
            kept[layer] = seen[..., top * grow : bottom * grow, left * grow : right * grow].clone()
        return CausalCache(self.transfer, kept, frames=self.frames)


@contextmanager
def remembering(vae: Any, past: CausalCache) -> Iterator[None]:
    """Inside the block each causal layer of the decoder of ``vae`` reads earlier frames from ``past`` and adds its own.
    Compiled blocks run uncompiled, since a graph would hold the frames of one moment. Raises ValueError for a decoder
    without causal layers, which looks ahead."""
    with Undo() as undo:
        for layer in vae.decoder.modules():
            forward = LAYERS.get(full_name(layer))
            if forward is not None:
                undo.patch(layer, partial(forward, past))
        if not undo:
            raise ValueError(f"a {type(vae).__name__} decoded in chunks of time: its decoder looks ahead")
        with uncompiled(vae.decoder):
            yield


def _conv(past: CausalCache, layer: Any, x: Tensor, conv_cache: Any = None) -> Any:
    """A causal convolution with the chunk's earlier frames ahead of ``x``; ahead of a video's first, copies of it."""
    reach = layer.conv.kernel_size[0] - 1
    if reach:
        before = past.before(layer)
        x = torch.cat([x[:, :, :1].expand(-1, -1, reach, -1, -1) if before is None else before, x], dim=2)
        past.remember(layer, x[:, :, -reach:])
    output = layer.conv(padded(x, (*layer.time_causal_padding[:4], 0, 0), layer.pad_mode))
    return (output, None) if full_name(layer) == MOCHI_CONV else output  # None: Mochi's cache


def _upsample(past: CausalCache, layer: Any, x: Tensor) -> Tensor:
    """Diffusers' forward, which keeps a video's first frame single; in a later chunk each frame becomes two."""
    if not past.frames or not layer.add_temporal_upsample:
        return type(layer).forward(layer, x)
    spread = layer._dcae_upsample_rearrange
    shortcut = spread(x, r1=2, r2=2, r3=2).repeat_interleave(repeats=layer.repeats, dim=1)
    return spread(layer.conv(x), r1=2, r2=2, r3=2) + shortcut


def _mochi_up(past: CausalCache, block: Any, x: Tensor, conv_cache: Any = None) -> Any:  # a chunk of the video
    return (type(block).forward if past.frames else mochi_up_from_the_start)(block, x, conv_cache)


def mochi_up_from_the_start(block: Any, x: Tensor, conv_cache: Any = None) -> Any:
    """Diffusers' ``MochiUpBlock3D.forward``, of whose frames for the first input frame only the last is kept. Diffusers
    drops as many frames at the very end, so that the first 11 to 15 of a video depend on ones that should not be there.
    Source: genmoai/mochi, ``DepthToSpaceTime`` in ``src/genmo/mochi_preview/vae/models.py``."""
    spread, cache = type(block).forward(block, x, conv_cache)
    return spread[:, :, block.temporal_expansion - 1 :], cache


def _attention(past: CausalCache, layer: Any, x: Tensor) -> Tensor:
    """HunyuanVideo 1.5's attention over the frames of this chunk and all before it."""
    attend = vars(layer).get("attend") or functional.scaled_dot_product_attention
    normed = layer.norm(x)
    query, current = layer.to_q(normed), torch.cat([layer.to_k(normed), layer.to_v(normed)], dim=1)
    before = past.before(layer)
    past.remember(layer, current)
    key, value = (current if before is None else torch.cat([before, current], dim=2)).chunk(2, dim=1)
    attended, frames = [], x.shape[2]
    for index in range(frames):
        seen = key.shape[2] - frames + index + 1
        now = query[:, :, index : index + 1]
        attended.append(attend(_tokens(now), _tokens(key[:, :, :seen]), _tokens(value[:, :, :seen])))
    return layer.proj_out(torch.cat(attended, dim=2).squeeze(1).unflatten(1, x.shape[2:]).permute(0, 4, 1, 2, 3)) + x


def _tokens(cells: Tensor) -> Tensor:  # (1, D, T, H, W) to (1, 1, N, D)
    return cells.flatten(2).transpose(1, 2).unsqueeze(1).contiguous()


LAYERS: dict[str, Callable[..., Any]] = {  # to the forward of a layer that has the frames before it
    **dict.fromkeys(CONVS, _conv),
    UPSAMPLE: _upsample,
    MOCHI_UP: _mochi_up,
    ATTENTION: _attention,
}
