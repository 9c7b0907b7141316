"""A decoder layer by layer over tiles, exactly: what it computes is the whole, in a fraction of the device's memory.

Activations live in host memory as planes. A layer reads a tile with as many cells around it as its kernel sees, and
writes the tile's core into the next plane; group norms get their moments from sums gathered while it was written."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.device.facts import empty_cache
from ...compat.device.failures import DEVICE_ERRORS, is_shortage
from ...compat.errors import UnsupportedError
from ...compat.memory.hooks import own_tensors, weights_on
from ...compat.memory.parts import full_name
from ...compat.memory.transfer import Transfer
from ...compat.transforms.guard import AROUND
from .chunked import AUTOENCODERS, CausalCache, TilePosition

Region = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Activation:
    """One activation in host memory, and what a group norm needs to know of it."""

    plane: Tensor  # (1, C, T, H, W)
    mean: Tensor | None = None  # of each group of channels, (T or 1, G), fp64, on the host; None if not asked for
    variance: Tensor | None = None


@dataclass(slots=True)
class Stream:
    """The walk of one decoder over planes; ``smaller`` returns the next smaller tile's side after a shortage, or 0."""

    transfer: Transfer
    tile: int  # pixels of the last layer, one of :data:`~.plan.SIDES`
    pixel_elements: int  # of the last layer per pixel, of all frames; tiles of other layers hold as many elements
    past: CausalCache | None = None  # what a causal decoder remembers; None where the piece is all of time
    smaller: Callable[[int], int] = lambda tile: 0
    check: Callable[[], None] = lambda: None
    groups: int = 0  # of the decoder's group norms
    per_frame: bool = False  # whether a norm is of each frame for itself

    def each(self, starts: range) -> Iterable[int]:
        """The starts of an attention's blocks of keys; a forecast overrides this to count equal blocks once."""
        return starts

    def walk(self, run: Callable[..., Tensor], *sources: Activation, halo: int = 0, grow: int = 1) -> Activation:
        """Apply ``run`` to the planes of ``sources``, tile by tile. Of tiles (1, C, T, h, w) on the device it makes (1,
        C2, T2, h * grow, w * grow) there, and must see ``halo`` cells around a tile for the core to be right. After a
        shortage of memory the tiles are smaller; it is raised where no smaller ones are left."""
        planes = [source.plane for source in sources]
        height, width = planes[0].shape[-2:]
        pending: list[Region] = [(0, height, 0, width)]
        plane: Tensor | None = None
        count, mean, squares = 0, torch.zeros(()), torch.zeros(())
        while pending:
            region, failed = pending.pop(), False
            side = self._side(planes[0], grow)
            if max(region[1] - region[0], region[3] - region[2]) > side:
                pending += reversed(self.parted(region, side))
                continue
            self.check()
            place = place_of(region, halo, height, width)
            try:
                core, moments = self._piece(run, planes, place)
            except DEVICE_ERRORS as error:
                if not is_shortage(error):
                    raise
                after = self.smaller(self.tile)
                if not after:
                    raise
                failed, self.tile = True, after
            if failed:  # outside the block, whose error holds the tensors of the failed tile
                gc.collect()
                empty_cache(self.transfer.device)
                pending.append(region)
                continue
            if moments is not None:
                count, mean, squares = merge_moments((count, mean, squares), moments)
            if plane is None:
                plane = core.new_empty(*core.shape[:3], height * grow, width * grow)
            top, bottom, left, right = (edge * grow for edge in region)
            plane[..., top:bottom, left:right] = core
        assert plane is not None, "an empty plane"
        return Activation(plane, mean, squares / count) if count else Activation(plane)

    def group_norm(self, norm: nn.Module, tile: Tensor, source: Activation) -> Tensor:
        """``tile`` of ``source`` through ``norm`` with the moments of the whole plane, rounded to its dtype once."""
        if source.mean is None or source.variance is None:
            raise ValueError("a group norm over a plane whose moments were not gathered")
        mean, per_group = source.mean, tile.shape[1] // source.mean.shape[1]
        scale = torch.rsqrt(source.variance + norm.eps)  # type: ignore[operator]

        def spread(values: Tensor) -> Tensor:
            columns = values.float().to(tile.device).repeat_interleave(per_group, dim=1)
            return columns.transpose(0, 1)[None, :, :, None, None]

        with weights_on(norm, like=tile) as (weight, bias):
            column = (1, -1, 1, 1, 1)
            weights = weight.float().view(column)
            factor = spread(scale) * weights
            offset = (0.0 if bias is None else bias.float().view(column)) - spread(mean * scale) * weights
            return torch.addcmul(offset, tile.float(), factor).to(tile.dtype)

    def parted(self, region: Region, side: int) -> list[Region]:
        """The parts of a region to compute; a forecast overrides this to count equal parts once."""
        return parted(region, side)

    def _piece(self, run: Callable[..., Tensor], planes: list[Tensor], place: TilePosition) -> Piece:
        """The core of ``run`` on the tiles at ``place``, on the host, and its moments; tells ``past`` the place."""
        if self.past is not None:
            self.past.place = place
        tiles = [self.transfer.to_device(place.read(plane).contiguous()) for plane in planes]
        piece = place.core(run(*tiles)).contiguous()
        return self.transfer.to_host(piece), self._moments(piece)

    def _moments(self, piece: Tensor) -> Moments | None:
        """The moments of a piece's groups, summed in fp32 on the device, on the host in fp64; None if no norm asks."""
        if not self.groups or piece.shape[1] % self.groups:
            return None
        rows = piece[0].unflatten(0, (self.groups, -1)).permute(2, 0, 1, 3, 4)  # T, G, C / G, h, w
        rows = rows.flatten(2) if self.per_frame else rows.transpose(0, 1).flatten(1).unsqueeze(0)
        count, means, squares = rows.shape[-1], [], []
        for frame in rows.unbind(0):  # one frame widened at a time
            wide = frame.float()
            means.append(wide.mean(-1))
            squares.append((wide - means[-1][:, None]).square_().sum(-1))
        mean, distances = (self.transfer.to_host(torch.stack(each)).double() for each in (means, squares))
        return count, mean, distances

    def _side(self, plane: Tensor, grow: int) -> int:
        """Cells per side of a tile of ``plane`` that holds as many elements as the last layer's does."""
        per_cell = plane.shape[1] * plane.shape[2] * grow * grow
        return max(1, math.isqrt(max(1, self.pixel_elements * self.tile**2 // per_cell)))


Moments = tuple[int, Tensor, Tensor]  # values per group, their mean, their squared distances from it
Piece = tuple[Tensor, Moments | None]  # a tile of the next plane, on the host


def merge_moments(before: Moments, piece: Moments) -> Moments:
    """The moments of two pieces together, in fp64. Source: Chan, Golub, LeVeque (1983), Computing the Variance."""
    (count, mean, squares), (more, own_mean, own_squares) = before, piece
    total, delta = count + more, own_mean - mean
    return total, mean + delta * (more / total), squares + own_squares + delta**2 * (count * more / total)


def place_of(region: Region, halo: int, height: int, width: int) -> TilePosition:
    """``region`` of a plane with ``halo`` cells around it, as far as there are any."""
    top, bottom, left, right = region
    around = min(halo, top), min(halo, height - bottom), min(halo, left), min(halo, width - right)
    return TilePosition(rows=(top, bottom), columns=(left, right), halo=around, height=height, width=width)


def parted(region: Region, side: int) -> list[Region]:
    """``region`` in even parts of at most ``side`` cells in each direction."""

    def even(first: int, end: int) -> list[tuple[int, int]]:
        count = -(-(end - first) // side)
        return list(pairwise(first + (end - first) * index // count for index in range(count + 1)))

    top, bottom, left, right = region
    return [(a, b, c, d) for a, b in even(top, bottom) for c, d in even(left, right)]


def attended(stream: Stream, query: Tensor, planes: Tensor, frames_before: int, heads: int) -> Tensor:
    """Frame-causal attention in fp32 of a tile's queries over keys and values on the host, by blockwise online softmax.
    ``query`` is (1, C, T, h, w) on the device, and so is the result, in its dtype; ``planes`` are the keys and values,
    (1, 2C, frames_before + T, H, W), on the host."""
    frames, cells = query.shape[2], query.shape[3] * query.shape[4]
    split = query[0].unflatten(0, (heads, -1)).permute(2, 0, 3, 4, 1).flatten(2, 3)  # T, heads, n, D
    split = split.float() * split.shape[-1] ** -0.5
    total = torch.zeros_like(split)
    weight = split.new_zeros(*split.shape[:3], 1)
    top = torch.full_like(weight, -math.inf)
    block = max(1, stream.pixel_elements * stream.tile**2 // (4 * max(1, frames * heads * cells)))
    for frame in range(planes.shape[2]):
        first = max(0, frame - frames_before)  # the earliest of our frames that sees this one
        seen = planes[0, :, frame].flatten(1)
        for start in stream.each(range(0, seen.shape[1], block)):
            stream.check()
            key, value = stream.transfer.to_device(seen[:, start : start + block].contiguous()).float().chunk(2)
            key, value = key.unflatten(0, (heads, -1)), value.unflatten(0, (heads, -1)).transpose(1, 2)
            scores = torch.matmul(split[first:], key)
            peak = torch.maximum(top[first:], scores.amax(-1, keepdim=True))
            fade = torch.exp(top[first:] - peak)
            scores = scores.sub_(peak).exp_()
            total[first:] = total[first:] * fade + torch.matmul(scores, value)
            weight[first:] = weight[first:] * fade + scores.sum(-1, keepdim=True)
            top[first:] = peak
    total = (total / weight).unflatten(2, query.shape[3:]).permute(1, 4, 0, 2, 3).flatten(0, 1)
    return total.unsqueeze(0).to(query.dtype)


def streamed(stream: Stream, vae: Any, latents: Tensor, time: Tensor | None = None) -> Tensor:
    """The decoder's frames (1, 3, F, H, W), on the host, of latents (1, C, T, h, w) there; ``time``: the timestep of a
    VAE that takes one, on the device. Raises UnsupportedError for a decoder that cannot be streamed."""
    known = full_name(vae) in STREAMED
    if not known or any(getattr(block, "per_channel_scale1", None) is not None for block in vae.decoder.modules()):
        why = "draws new noise in its layers" if known else "has unknown layers"
        found = f"method streaming for this {type(vae).__name__}, which {why}"
        fix = "Choose method auto or tiled on the decode node."
        raise UnsupportedError(found, expected="a decoder whose layers depend only on their input", fix=fix)
    guarded = getattr(vae, AROUND, nullcontext)  # by guard_step: no forward of the VAE itself is called here
    with own_tensors(vae.decoder), guarded((vae, latents.shape, stream.transfer.dtype)):
        return STREAMED[full_name(vae)](stream, vae, Activation(latents.to(stream.transfer.dtype)), time).plane


def _hunyuan(stream: Stream, vae: Any, latents: Activation, _: Any) -> Activation:
    """HunyuanVideo and FramePack. Source: diffusers ``HunyuanVideoDecoder3D.forward`` and the blocks it calls."""
    decoder = vae.decoder
    stream.groups, stream.per_frame = decoder.conv_norm_out.num_groups, False
    x = stream.walk(lambda z: decoder.conv_in(vae.post_quant_conv(z)), latents, halo=1)
    x = _blocks(stream, decoder, x, _group_normed, _cell_attn, lambda up: int(up.upsample_factor[1]))

    def last(tile: Tensor) -> Tensor:
        return decoder.conv_out(decoder.conv_act(stream.group_norm(decoder.conv_norm_out, tile, x)))

    return stream.walk(last, x, halo=1)


Block = Callable[[Stream, Any, Activation], Activation]


def _blocks(
    stream: Stream, decoder: Any, x: Activation, resnet: Block, attend: Block, grow: Callable[[Any], int]
) -> Activation:
    """The middle block and the up blocks of HunyuanVideo's decoders; ``resnet`` and ``attend`` run one block each,
    ``grow`` gives an upsampler's factor."""
    first, *rest = decoder.mid_block.resnets
    x = resnet(stream, first, x)
    for attn, block in zip(decoder.mid_block.attentions, rest, strict=True):
        x = resnet(stream, block, x if attn is None else attend(stream, attn, x))
    for up_block in decoder.up_blocks:
        for block in up_block.resnets:
            x = resnet(stream, block, x)
        for up in up_block.upsamplers or ():
            x = stream.walk(up, x, halo=1, grow=grow(up))
    return x


def _mochi(stream: Stream, vae: Any, latents: Activation, _: Any) -> Activation:
    """Mochi, whose first frame becomes one. Source: diffusers ``MochiDecoder3D.forward``; Genmo for dropped frames."""
    decoder = vae.decoder
    stream.groups, stream.per_frame = next(m.num_groups for m in decoder.modules() if isinstance(m, nn.GroupNorm)), True

    def through(resnets: Any, x: Activation) -> Activation:
        for resnet in resnets:
            x = _group_normed(stream, resnet, x)
        return x

    first = stream.past is None or not stream.past.frames
    x = through(decoder.block_in.resnets, stream.walk(decoder.conv_in, latents))
    for block in decoder.up_blocks:
        x = stream.walk(_unfolding(block, first), through(block.resnets, x), grow=block.spatial_expansion)
    x = through(decoder.block_out.resnets, x)
    return stream.walk(
        lambda tile: decoder.proj_out(decoder.nonlinearity(tile).permute(0, 2, 3, 4, 1)).permute(0, 4, 1, 2, 3), x
    )


def _hunyuan15(stream: Stream, vae: Any, latents: Activation, _: Any) -> Activation:
    """HunyuanVideo 1.5, whose norms are per voxel. Source: diffusers ``HunyuanVideo15Decoder3D.forward``."""
    decoder = vae.decoder
    x = stream.walk(lambda z: decoder.conv_in(z) + z.repeat_interleave(decoder.repeat, dim=1), latents, halo=1)
    x = _blocks(stream, decoder, x, lambda stream, block, x: stream.walk(block, x, halo=2), _voxel_attn, lambda up: 2)
    return stream.walk(lambda tile: decoder.conv_out(decoder.conv_act(decoder.norm_out(tile))), x, halo=1)


def _ltx(stream: Stream, vae: Any, latents: Activation, time: Tensor | None) -> Activation:
    """LTX-Video: each residual block is local, and a timestep, where there is one, is the same everywhere."""
    decoder = vae.decoder
    if decoder.timestep_scale_multiplier is not None and time is not None:
        time = time * decoder.timestep_scale_multiplier

    def through(resnets: Any, x: Activation, embedded: Any) -> Activation:
        for resnet in resnets:
            x = stream.walk(lambda tile, resnet=resnet: resnet(tile, embedded, None), x, halo=2)
        return x

    x = stream.walk(decoder.conv_in, latents, halo=1)
    x = through(decoder.mid_block.resnets, x, _embedded(decoder.mid_block, time, stream))
    for block in decoder.up_blocks:
        x = x if block.conv_in is None else through([block.conv_in], x, time)
        embedded = _embedded(block, time, stream)
        for up in block.upsamplers or ():
            x = stream.walk(up, x, halo=1, grow=up.stride[1])
        x = through(block.resnets, x, embedded)
    embedded = _embedded(decoder, time, stream)

    def last(tile: Tensor) -> Tensor:
        tile = decoder.norm_out(tile.movedim(1, -1)).movedim(-1, 1)
        if embedded is not None:
            table = decoder.scale_shift_table[None, ..., None, None, None]
            shift, scale = (embedded.unflatten(1, (2, -1)) + table).unbind(dim=1)
            tile = tile * (1 + scale) + shift
        return _patches(decoder.conv_out(decoder.conv_act(tile)), decoder.patch_size_t, decoder.patch_size)

    return stream.walk(last, x, halo=1, grow=decoder.patch_size)


def _group_normed(stream: Stream, block: Any, x: Activation) -> Activation:
    """A residual block of HunyuanVideo or Mochi in two walks, each with the moments of its group norm."""
    norm1, norm2 = (getattr(norm, "norm_layer", norm) for norm in (block.norm1, block.norm2))  # Mochi wraps them

    def first(tile: Tensor) -> Tensor:
        return _only(block.conv1(block.nonlinearity(stream.group_norm(norm1, tile, x))))

    hidden = stream.walk(first, x, halo=1)
    shortcut = getattr(block, "conv_shortcut", None)

    def second(tile: Tensor, skip: Tensor) -> Tensor:
        residual = _only(block.conv2(block.nonlinearity(stream.group_norm(norm2, tile, hidden))))
        return residual + (skip if shortcut is None else shortcut(skip))

    return stream.walk(second, hidden, x, halo=1)


def _cell_attn(stream: Stream, attn: Any, x: Activation) -> Activation:
    """HunyuanVideo's attention: keys and values of the whole plane first, then the queries of each tile."""

    def tokens(tile: Tensor) -> Tensor:
        return (tile if attn.group_norm is None else stream.group_norm(attn.group_norm, tile, x)).permute(0, 2, 3, 4, 1)

    def keys(tile: Tensor) -> Tensor:
        seen = tokens(tile)
        return torch.cat([attn.to_k(seen), attn.to_v(seen)], dim=-1).permute(0, 4, 1, 2, 3)

    planes = stream.walk(keys, x).plane

    def one(tile: Tensor) -> Tensor:
        seen = attended(stream, attn.to_q(tokens(tile)).permute(0, 4, 1, 2, 3), planes, 0, attn.heads)
        seen = attn.to_out[1](attn.to_out[0](seen.permute(0, 2, 3, 4, 1))).permute(0, 4, 1, 2, 3)
        return (seen + tile if attn.residual_connection else seen) / attn.rescale_output_factor

    return stream.walk(one, x)


def _voxel_attn(stream: Stream, attn: Any, x: Activation) -> Activation:
    """HunyuanVideo 1.5's attention: keys and values of the plane, left for the next chunk if there is a ``past``, and
    of earlier frames; then the tiles' queries."""

    def keys(tile: Tensor) -> Tensor:
        normed = attn.norm(tile)
        return torch.cat([attn.to_k(normed), attn.to_v(normed)], dim=1)

    planes, before, past = stream.walk(keys, x).plane, 0, stream.past
    if past is not None:
        past.coming[attn] = planes
        if attn in past.kept:
            before = past.kept[attn].shape[2]
            planes = torch.cat([past.kept[attn], planes], dim=2)

    def one(tile: Tensor) -> Tensor:
        return attn.proj_out(attended(stream, attn.to_q(attn.norm(tile)), planes, before, 1)) + tile

    return stream.walk(one, x)


def _unfolding(block: Any, first: bool) -> Callable[[Tensor], Tensor]:
    """The end of Mochi's up block: a projection, and channels spread over time, rows and columns. ``first``: the plane
    begins with the video's first frame, of which one frame is kept."""
    time, side = block.temporal_expansion, block.spatial_expansion

    def run(tile: Tensor) -> Tensor:
        spread = block.proj(tile.permute(0, 2, 3, 4, 1)).unflatten(-1, (-1, time, side, side))
        # B T H W C t h w -> B C (T t) (H h) (W w)
        video = spread.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)
        return video[:, :, time - 1 :] if first else video

    return run


def _patches(tile: Tensor, time: int, side: int) -> Tensor:
    """LTX-Video's last channels as pixels; within a patch columns come before rows."""
    spread = tile.unflatten(1, (-1, time, side, side))  # B C t w h T H W
    return spread.permute(0, 1, 5, 2, 6, 4, 7, 3).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def _embedded(owner: Any, time: Tensor | None, stream: Stream) -> Tensor | None:
    """The timestep as channels (1, D, 1, 1, 1); None where ``owner`` embeds none."""
    if owner.time_embedder is None or time is None:
        return None
    embedded: Tensor = owner.time_embedder(
        timestep=time.flatten(), resolution=None, aspect_ratio=None, batch_size=1, hidden_dtype=stream.transfer.dtype
    )
    return embedded.view(1, -1, 1, 1, 1)


def _only(result: Any) -> Tensor:
    """``result`` without the cache that Mochi's convolutions return beside it."""
    return result[0] if isinstance(result, tuple) else result


STREAMED: dict[str, Callable[[Stream, Any, Activation, Any], Activation]] = {
    f"{AUTOENCODERS}hunyuan_video.AutoencoderKLHunyuanVideo": _hunyuan,
    f"{AUTOENCODERS}hunyuanvideo15.AutoencoderKLHunyuanVideo15": _hunyuan15,
    f"{AUTOENCODERS}ltx.AutoencoderKLLTXVideo": _ltx,
    f"{AUTOENCODERS}mochi.AutoencoderKLMochi": _mochi,
}
