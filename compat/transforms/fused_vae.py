"""The residual blocks and the ends of video decoders on fused operations: norm, SiLU and padding in one pass each.
The operation writes the padding of a causal convolution too, in the layout that the plain convolution inside it reads,
and this one is called; a causal convolution with another forward, as in a decode in chunks, is called as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.group_norm import group_norm_silu_pad, rms_silu_pad
from ...kernels.library import AUTO
from ...kernels.terms import LAYOUTS, NO_MODULATION, NO_PAD, RMS, GroupNorm, Modulation, Norm
from ..memory.hooks import own_tensors, weights_on
from ..memory.parts import full_name
from .blocks import norm_of
from .conv3d import AUTOENCODERS, causal_edges
from .conv3d_methods import Conv3dMethod
from .fused import FusionPoints, is_rms_norm, other_forward
from .fused_attention import FORM

CONTIGUOUS, CHANNELS_LAST, FRAMES_FIRST = LAYOUTS
HUNYUAN, HUNYUAN15 = f"{AUTOENCODERS}hunyuan_video.", f"{AUTOENCODERS}hunyuanvideo15."
LTX, MOCHI = f"{AUTOENCODERS}ltx.", f"{AUTOENCODERS}mochi."
GROUP_NORM, FRAME_NORM = "torch.nn.modules.normalization.GroupNorm", f"{MOCHI}MochiChunkedGroupNorm3D"
VOXEL_NORM, LTX_CONV = f"{HUNYUAN15}HunyuanVideo15RMS_norm", f"{LTX}LTXVideoCausalConv3d"
REPLICATING: tuple[str, ...] = (f"{HUNYUAN}HunyuanVideoCausalConv3d", f"{HUNYUAN15}HunyuanVideo15CausalConv3d")
REPLICATING += (f"{AUTOENCODERS}cogvideox.CogVideoXCausalConv3d",)
FUSION_POINT = "norm, SiLU and padding"
LEAST_NORM = 1e-12  # a voxel's length below which upstream's F.normalize divides by this instead
READS: Mapping[Conv3dMethod, str] = {Conv3dMethod.CHANNELS_LAST: CHANNELS_LAST, Conv3dMethod.FRAMES: FRAMES_FIRST}


@dataclass(frozen=True, slots=True)
class VaeFusion:
    """The rewrite of the modules of one class."""

    forward: Callable[..., Any]  # takes the place of the module's own
    points: tuple[tuple[str, str], ...]  # the paths of a norm and of the convolution that reads it
    activation: str  # path of the SiLU


def fuse_vae(vae: nn.Module, form: str = AUTO) -> FusionPoints:
    """Rewrite decoder modules of ``vae`` in place, after its convolutions, before offload; notes why others stay."""
    fused = FusionPoints(form)
    decoder: Any = vae.decoder
    for module in decoder.modules():
        fusion = FUSIONS.get(full_name(module))
        if fusion is None:
            continue
        if reason := _unfit(module, fusion):
            fused.leave(reason, len(fusion.points))
        else:
            fused.patch(module, fusion.forward)
            fused.points[FUSION_POINT] += len(fusion.points)
    return fused


def _unfit(module: Any, fusion: VaeFusion) -> str:
    """The reason why ``module`` cannot be rewritten as ``fusion`` says; empty where it can."""
    if reason := other_forward(module, fusion.forward):
        return reason
    activation = getattr(module, fusion.activation)
    if type(activation) is not nn.SiLU:
        return f"{fusion.activation} is a {type(activation).__name__}"
    if getattr(getattr(module, "dropout", None), "p", 0.0) and module.training:
        return "it uses dropout"
    for norm_name, conv_name in fusion.points:
        norm, conv = getattr(module, norm_name), getattr(module, conv_name)
        if not _known_norm(norm):
            return f"{norm_name} is a {type(norm).__name__}"
        replicates = full_name(conv) in REPLICATING and conv.pad_mode == "replicate"
        if not replicates and full_name(conv) != LTX_CONV:  # LTX-Video's always replicates
            return f"{conv_name} is a {type(conv).__name__} that pads {getattr(conv, 'pad_mode', 'otherwise')}"
    return ""


def _known_norm(norm: Any) -> bool:
    """True for an RMS, group or Mochi norm, and a voxel norm (HunyuanVideo 1.5) over axis 1 without bias."""
    if full_name(norm) == VOXEL_NORM:
        return bool(norm.channel_first) and not isinstance(norm.bias, Tensor)
    return is_rms_norm(norm) or full_name(norm.norm_layer if full_name(norm) == FRAME_NORM else norm) == GROUP_NORM


def block(module: Any, hidden_states: Tensor) -> Tensor:
    """Upstream's residual blocks of HunyuanVideo, FramePack and HunyuanVideo 1.5."""
    hidden = _convolved_twice(module, hidden_states)
    shortcut = module.conv_shortcut
    return hidden + (hidden_states if shortcut is None else shortcut(hidden_states))


def mochi_block(module: Any, inputs: Tensor, conv_cache: Any = None) -> tuple[Tensor, dict[str, None]]:
    """Upstream ``MochiResnetBlock3D.forward``, whose convolutions keep no cache where they replicate edges."""
    return _convolved_twice(module, inputs) + inputs, {"conv1": None, "conv2": None}


def ltx_block(module: Any, inputs: Tensor, temb: Any = None, generator: Any = None) -> Tensor:
    """Upstream ``LTXVideoResnetBlock3d.forward``, with its timestep and its noise."""
    form, first, second = getattr(module, FORM), NO_MODULATION, NO_MODULATION
    if module.scale_shift_table is not None:
        first, second = _modulations(temb, module.scale_shift_table, 2)
    hidden = _convolved(module.conv1, inputs, module.norm1, form, first)
    hidden = _noisy(hidden, module.per_channel_scale1, generator)
    hidden = _convolved(module.conv2, hidden, module.norm2, form, second)
    hidden = _noisy(hidden, module.per_channel_scale2, generator)
    if module.norm3 is not None:
        inputs = module.norm3(inputs.movedim(1, -1)).movedim(-1, 1)
    return hidden + (inputs if module.conv_shortcut is None else module.conv_shortcut(inputs))


def hunyuan_decoder(decoder: Any, hidden_states: Tensor) -> Tensor:
    """Upstream ``HunyuanVideoDecoder3D.forward`` and ``HunyuanVideo15Decoder3D.forward``."""
    hidden = decoder.conv_in(hidden_states)
    if full_name(decoder).startswith(HUNYUAN15):
        hidden = hidden + hidden_states.repeat_interleave(repeats=decoder.repeat, dim=1)
    for part in (decoder.mid_block, *decoder.up_blocks):
        hidden = part(hidden)
    norm = decoder.norm_out if full_name(decoder).startswith(HUNYUAN15) else decoder.conv_norm_out
    return _convolved(decoder.conv_out, hidden, norm, getattr(decoder, FORM))


def ltx_decoder(decoder: Any, hidden_states: Tensor, temb: Any = None) -> Tensor:
    """Upstream ``LTXVideoDecoder3d.forward``."""
    if decoder.timestep_scale_multiplier is not None:
        temb = temb * decoder.timestep_scale_multiplier
    hidden = decoder.mid_block(decoder.conv_in(hidden_states), temb)
    for up in decoder.up_blocks:
        hidden = up(hidden, temb)
    modulation = NO_MODULATION
    if decoder.time_embedder is not None:
        named = {"resolution": None, "aspect_ratio": None, "batch_size": hidden.shape[0], "hidden_dtype": hidden.dtype}
        rows = decoder.time_embedder(timestep=temb.flatten(), **named)
        (modulation,) = _modulations(rows, decoder.scale_shift_table, 1)
    hidden = _convolved(decoder.conv_out, hidden, decoder.norm_out, getattr(decoder, FORM), modulation)
    side = decoder.patch_size
    spread = hidden.unflatten(1, (-1, decoder.patch_size_t, side, side))  # B C t w h T H W: columns before rows
    return spread.permute(0, 1, 5, 2, 6, 4, 7, 3).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def _convolved(conv: Any, x: Tensor, norm: Any, form: str, modulation: Modulation = NO_MODULATION) -> Tensor:
    """``conv`` of ``x`` after ``norm``, ``modulation`` (of an RMS norm alone) and SiLU. For a stock causal ``conv`` the
    operation pads, and the convolution inside is called; one with another forward is called itself, and pads."""
    is_stock = "forward" not in vars(conv)
    pad = causal_edges(conv) if is_stock else NO_PAD
    layout = _layout(conv.conv, x)
    with _norm_terms(norm, x) as terms:
        if isinstance(terms, GroupNorm):
            ready = group_norm_silu_pad(x, terms, pad, layout=layout, form=form)
        else:
            ready = rms_silu_pad(x, terms, modulation, pad, layout=layout, form=form)
    result = (conv.conv if is_stock else conv)(ready)
    return result[0] if isinstance(result, tuple) else result


def _convolved_twice(module: Any, x: Tensor) -> Tensor:
    """``x`` through both norms and convolutions of a residual block, without its shortcut."""
    form = getattr(module, FORM)
    return _convolved(module.conv2, _convolved(module.conv1, x, module.norm1, form), module.norm2, form)


def _layout(conv: Any, x: Tensor) -> str:
    """The layout that ``conv`` reads without a copy: that of its implementation, else that in which ``x`` came."""
    choice = getattr(conv, "conv3d_choice", None)
    if choice is not None:
        return READS.get(choice.form, CONTIGUOUS)
    return CHANNELS_LAST if x.stride(1) == 1 and x.shape[1] > 1 else CONTIGUOUS


@contextmanager
def _norm_terms(norm: Any, x: Tensor) -> Iterator[GroupNorm | Norm]:
    """``norm`` as the operations take it, its tensors provided by the offloader. HunyuanVideo 1.5's divides a voxel by
    its length and multiplies by the root of C: an RMS norm whose eps is the squared least length over C."""
    per_frame = full_name(norm) == FRAME_NORM
    norm = norm.norm_layer if per_frame else norm
    if full_name(norm) == GROUP_NORM and norm.weight is None:
        yield GroupNorm(norm.num_groups, norm.eps, per_frame=per_frame)
    elif full_name(norm) == GROUP_NORM:
        with weights_on(norm, like=x) as (weight, bias):
            yield GroupNorm(groups=norm.num_groups, eps=norm.eps, weight=weight, bias=bias, per_frame=per_frame)
    elif full_name(norm) == VOXEL_NORM:
        with own_tensors(norm):
            yield Norm(RMS, LEAST_NORM**2 / x.shape[1], norm.gamma.flatten())
    else:
        with norm_of(norm, x) as plain:
            yield plain


def _modulations(rows: Tensor, table: Tensor, count: int) -> list[Modulation]:
    """``count`` modulations: ``rows`` (B, 2 * count * C, 1, 1, 1) plus ``table`` (2 * count, C), shift before scale."""
    parts = (rows.flatten(1).unflatten(1, (2 * count, -1)) + table.to(rows.device)).unbind(dim=1)
    return [Modulation(parts[2 * index + 1], parts[2 * index]) for index in range(count)]


def _noisy(x: Tensor, scale: Tensor | None, generator: Any) -> Tensor:
    """``x`` (B, C, T, H, W) plus ``scale`` (C, 1, 1) times one noise (H, W) for all frames; ``x`` for no scale."""
    if scale is None:
        return x
    noise = torch.randn(x.shape[-2:], generator=generator, device=x.device, dtype=x.dtype)
    return x + (noise[None] * scale)[None, :, None, ...]


_PAIRS = (("norm1", "conv1"), ("norm2", "conv2"))
_END = (("norm_out", "conv_out"),)
FUSIONS: dict[str, VaeFusion] = {
    f"{HUNYUAN}HunyuanVideoResnetBlockCausal3D": VaeFusion(block, _PAIRS, "nonlinearity"),
    f"{HUNYUAN15}HunyuanVideo15ResnetBlock": VaeFusion(block, _PAIRS, "nonlinearity"),
    f"{MOCHI}MochiResnetBlock3D": VaeFusion(mochi_block, _PAIRS, "nonlinearity"),
    f"{LTX}LTXVideoResnetBlock3d": VaeFusion(ltx_block, _PAIRS, "nonlinearity"),
    f"{HUNYUAN}HunyuanVideoDecoder3D": VaeFusion(hunyuan_decoder, (("conv_norm_out", "conv_out"),), "conv_act"),
    f"{HUNYUAN15}HunyuanVideo15Decoder3D": VaeFusion(hunyuan_decoder, _END, "conv_act"),
    f"{LTX}LTXVideoDecoder3d": VaeFusion(ltx_decoder, _END, "conv_act"),
}
