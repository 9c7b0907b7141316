"""The way through each VAE's decoder, layer by layer, for a decode that streams.

What is local (norms per voxel, convolutions) is called as upstream's own module, with as many cells around a tile as
its convolutions reach. Only blocks whose group norms see the whole plane, and attention, are opened.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.errors import UnsupportedError
from ...compat.memory.hooks import own_tensors
from ...compat.transforms.attention_processors import full_name
from .chunked import AUTOENCODERS
from .layerwise import Sheet, Stream, attended

Walk = Callable[[Stream, Any, Sheet, Any], Sheet]


def streamed(stream: Stream, vae: Any, latents: Tensor, time: Tensor | None = None) -> Tensor:
    """The decoder's frames (1, 3, F, H, W), on the host, of latents (1, C, T, h, w) there.

    Args:
        time: the timestep of a VAE that takes one, on the device.

    Raises:
        UnsupportedError: a decoder that draws noise while it runs.
    """
    if unstreamable(vae):
        raise UnsupportedError(
            f"method streaming for this {type(vae).__name__}, which {unstreamable(vae)}",
            expected="a decoder whose layers depend on their input alone",
            fix="Choose method auto or tiled on the decode node.",
        )
    with ExitStack() as stack:
        stack.enter_context(own_tensors(vae.decoder))
        return WALKS[full_name(vae)](stream, vae, Sheet(latents.to(stream.way.dtype)), time).plane


def unstreamable(vae: Any) -> str:
    """Why the decoder of ``vae`` cannot be streamed; empty where it can."""
    if full_name(vae) not in WALKS:
        return "has layers that no walk knows"
    if any(getattr(block, "per_channel_scale1", None) is not None for block in vae.decoder.modules()):
        return "draws new noise in each call of a layer"
    return ""


def _hunyuan(stream: Stream, vae: Any, latents: Sheet, _: Any) -> Sheet:
    """HunyuanVideo and FramePack.

    Source: diffusers ``HunyuanVideoDecoder3D.forward`` and the blocks it calls.
    """
    decoder = vae.decoder
    stream.groups, stream.per_frame = decoder.conv_norm_out.num_groups, False
    x = stream.walk(lambda z: decoder.conv_in(vae.post_quant_conv(z)), latents, halo=1)
    first, *rest = decoder.mid_block.resnets
    x = _group_normed(stream, first, first.norm1, first.norm2, x)
    for attn, resnet in zip(decoder.mid_block.attentions, rest, strict=True):
        x = x if attn is None else _cells(stream, attn, x)
        x = _group_normed(stream, resnet, resnet.norm1, resnet.norm2, x)
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            x = _group_normed(stream, resnet, resnet.norm1, resnet.norm2, x)
        for up in block.upsamplers or ():
            x = stream.walk(up, x, halo=1, grow=int(up.upsample_factor[1]))
    moments = x.moments

    def last(tile: Tensor) -> Tensor:
        result: Tensor = decoder.conv_out(decoder.conv_act(stream.normed(decoder.conv_norm_out, tile, moments)))
        return result

    return stream.walk(last, x, halo=1)


def _mochi(stream: Stream, vae: Any, latents: Sheet, _: Any) -> Sheet:
    """Mochi, with the frames that its decoder makes in front of the first.

    Source: diffusers ``MochiDecoder3D.forward`` and the blocks it calls.
    """
    decoder = vae.decoder
    stream.groups, stream.per_frame = decoder.block_in.resnets[0].norm1.norm_layer.num_groups, True

    def through(resnets: Any, x: Sheet) -> Sheet:
        for resnet in resnets:
            x = _group_normed(stream, resnet, resnet.norm1.norm_layer, resnet.norm2.norm_layer, x)
        return x

    x = through(decoder.block_in.resnets, stream.walk(decoder.conv_in, latents))
    for block in decoder.up_blocks:
        x = stream.walk(_unfolding(block), through(block.resnets, x), grow=block.spatial_expansion)
    x = through(decoder.block_out.resnets, x)
    return stream.walk(
        lambda tile: decoder.proj_out(decoder.nonlinearity(tile).permute(0, 2, 3, 4, 1)).permute(0, 4, 1, 2, 3), x
    )


def _hunyuan15(stream: Stream, vae: Any, latents: Sheet, _: Any) -> Sheet:
    """HunyuanVideo 1.5, whose norms are per voxel.

    Source: diffusers ``HunyuanVideo15Decoder3D.forward``.
    """
    decoder = vae.decoder
    x = stream.walk(lambda z: decoder.conv_in(z) + z.repeat_interleave(decoder.repeat, dim=1), latents, halo=1)
    first, *rest = decoder.mid_block.resnets
    x = stream.walk(first, x, halo=2)
    for attn, resnet in zip(decoder.mid_block.attentions, rest, strict=True):
        x = stream.walk(resnet, x if attn is None else _voxels(stream, attn, x), halo=2)
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            x = stream.walk(resnet, x, halo=2)
        for up in block.upsamplers or ():
            x = stream.walk(up, x, halo=1, grow=2)
    return stream.walk(lambda tile: decoder.conv_out(decoder.conv_act(decoder.norm_out(tile))), x, halo=1)


def _ltx(stream: Stream, vae: Any, latents: Sheet, time: Tensor | None) -> Sheet:
    """LTX-Video: each residual block is local, and a timestep, where there is one, is the same everywhere.

    Source: diffusers ``LTXVideoDecoder3d.forward`` and the blocks it calls.
    """
    decoder = vae.decoder
    if decoder.timestep_scale_multiplier is not None and time is not None:
        time = time * decoder.timestep_scale_multiplier

    def through(resnets: Any, x: Sheet, embedded: Any) -> Sheet:
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
            shift, scale = (
                embedded.unflatten(1, (2, -1)) + decoder.scale_shift_table[None, ..., None, None, None]
            ).unbind(dim=1)
            tile = tile * (1 + scale) + shift
        return _patches(decoder.conv_out(decoder.conv_act(tile)), decoder.patch_size_t, decoder.patch_size)

    return stream.walk(last, x, halo=1, grow=decoder.patch_size)


def _group_normed(stream: Stream, block: Any, norm1: nn.Module, norm2: nn.Module, x: Sheet) -> Sheet:
    """A residual block of two group norms and two convolutions."""

    def first(tile: Tensor) -> Tensor:
        return _only(block.conv1(block.nonlinearity(stream.normed(norm1, tile, x.moments))))

    hidden = stream.walk(first, x, halo=1)
    shortcut = getattr(block, "conv_shortcut", None)

    def second(tile: Tensor, beside: Tensor) -> Tensor:
        found = _only(block.conv2(block.nonlinearity(stream.normed(norm2, tile, hidden.moments))))
        return found + (beside if shortcut is None else shortcut(beside))

    return stream.walk(second, hidden, x, halo=1)


def _cells(stream: Stream, attn: Any, x: Sheet) -> Sheet:
    """HunyuanVideo's attention: keys and values of the whole plane first, then the queries of each tile."""

    def tokens(tile: Tensor) -> Tensor:
        normed = tile if attn.group_norm is None else stream.normed(attn.group_norm, tile, x.moments)
        return normed.permute(0, 2, 3, 4, 1)

    def keys(tile: Tensor) -> Tensor:
        seen = tokens(tile)
        return torch.cat([attn.to_k(seen), attn.to_v(seen)], dim=-1).permute(0, 4, 1, 2, 3)

    planes = stream.walk(keys, x).plane

    def one(tile: Tensor) -> Tensor:
        found = attended(stream, attn.to_q(tokens(tile)).permute(0, 4, 1, 2, 3), planes, 0, attn.heads)
        found = attn.to_out[1](attn.to_out[0](found.permute(0, 2, 3, 4, 1))).permute(0, 4, 1, 2, 3)
        result: Tensor = (found + tile if attn.residual_connection else found) / attn.rescale_output_factor
        return result

    return stream.walk(one, x)


def _voxels(stream: Stream, attn: Any, x: Sheet) -> Sheet:
    """HunyuanVideo 1.5's attention, in which frames of earlier chunks are seen too."""

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
        result: Tensor = attn.proj_out(attended(stream, attn.to_q(attn.norm(tile)), planes, before, 1)) + tile
        return result

    return stream.walk(one, x)


def _unfolding(block: Any) -> Callable[[Tensor], Tensor]:
    """The second half of Mochi's up block: a projection whose channels become pixels and frames."""
    time, side = block.temporal_expansion, block.spatial_expansion

    def run(tile: Tensor) -> Tensor:
        spread = block.proj(tile.permute(0, 2, 3, 4, 1)).unflatten(-1, (-1, time, side, side))
        # B T H W C t h w -> B C (T t) (H h) (W w)
        found = spread.permute(0, 4, 1, 5, 2, 6, 3, 7)
        return found.flatten(6, 7).flatten(4, 5).flatten(2, 3)

    return run


def _patches(tile: Tensor, time: int, side: int) -> Tensor:
    """LTX-Video's last channels as pixels; within a patch columns come before rows."""
    spread = tile.unflatten(1, (-1, time, side, side))  # B C t w h T H W
    return spread.permute(0, 1, 5, 2, 6, 4, 7, 3).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def _embedded(owner: Any, time: Tensor | None, stream: Stream) -> Tensor | None:
    """The timestep as channels (1, D, 1, 1, 1); None where ``owner`` embeds none."""
    if owner.time_embedder is None or time is None:
        return None
    found: Tensor = owner.time_embedder(
        timestep=time.flatten(), resolution=None, aspect_ratio=None, batch_size=1, hidden_dtype=stream.way.dtype
    )
    return found.view(1, -1, 1, 1, 1)


def _only(result: Any) -> Tensor:
    """What a convolution returns without the cache that Mochi's returns beside it."""
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found


WALKS: dict[str, Walk] = {
    f"{AUTOENCODERS}hunyuan_video.AutoencoderKLHunyuanVideo": _hunyuan,
    f"{AUTOENCODERS}hunyuanvideo15.AutoencoderKLHunyuanVideo15": _hunyuan15,
    f"{AUTOENCODERS}ltx.AutoencoderKLLTXVideo": _ltx,
    f"{AUTOENCODERS}mochi.AutoencoderKLMochi": _mochi,
}
