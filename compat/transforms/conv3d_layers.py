"""The classes that replace 3-D convolutions and the padding around them."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from einops import rearrange, reduce
from torch import Tensor, nn

from ..device.execution import HOST, carried, hooked_device
from ..memory.hooks import misplaced, weights_on
from .conv3d_choice import Conv3dChoice
from .conv3d_forms import Conv3dForm, Geometry, convolve, padded

logger = logging.getLogger(__name__)
AUTOENCODERS = "diffusers.models.autoencoders.autoencoder_kl_"
READ_FRAMES_FIRST = (Conv3dForm.FRAMES,)


class SwappedModule(nn.Module):
    """The mark of a swapped class."""


class SwappedConv3d(SwappedModule):
    """``nn.Conv3d`` and upstream's CogVideoXSafeConv3d, whose pieces of time every form bounds by itself."""

    conv3d_choice: Conv3dChoice
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """As the original: (B, C, T, H, W) or (C, T, H, W)."""
        choice, x = self.conv3d_choice, _aligned(input, self)
        x = x if input.dim() == 5 else x.unsqueeze(0)
        edges, mode = own_edges(self)
        if edges is not None:
            x = padded(x, edges, mode, choice.form in READ_FRAMES_FIRST)
        if self.weight.device == x.device and not hasattr(self, "weights_on"):
            out = convolve(choice.form, x, self.weight, self.bias, geometry_of(self), choice.chunk_bytes)
        else:
            with weights_on(self, like=x) as (weight, bias):
                out = convolve(choice.form, x, weight, bias, geometry_of(self), choice.chunk_bytes)
        return out if input.dim() == 5 else out.squeeze(0)


class SwappedHunyuanCausal(SwappedModule):
    """The causal convolution of HunyuanVideo and 1.5: edges in all directions, in front of time only."""

    conv: nn.Module
    time_causal_padding: tuple[int, ...]
    pad_mode: str

    def forward(self, hidden_states: Tensor) -> Tensor:
        """As the original."""
        return self.conv(padded(hidden_states, self.time_causal_padding, self.pad_mode, _reads_frames_first(self.conv)))


class SwappedCogVideoXCausal(SwappedModule):
    """The causal convolution of Mochi; with zeros for edges upstream concatenates time and keeps its cache itself."""

    conv: nn.Module
    time_causal_padding: tuple[int, ...]
    pad_mode: str

    def fake_context_parallel_forward(self, inputs: Tensor, conv_cache: Tensor | None = None) -> Tensor:
        """``inputs`` with the frames that the kernel sees before them."""
        if self.pad_mode == "replicate":
            return padded(inputs, self.time_causal_padding, self.pad_mode, _reads_frames_first(self.conv))
        return super().fake_context_parallel_forward(inputs, conv_cache)  # type: ignore[misc]


class SwappedLTXCausal(SwappedModule):
    """The convolution of LTX-Video: edges of time repeated in front, or on both sides; zeros by the leaf."""

    conv: nn.Module
    kernel_size: tuple[int, int, int]
    is_causal: bool

    def forward(self, hidden_states: Tensor) -> Tensor:
        """As the original."""
        taps = self.kernel_size[0]
        before, after = (taps - 1, 0) if self.is_causal else ((taps - 1) // 2,) * 2
        edges = (0, 0, 0, 0, before, after)
        return self.conv(padded(hidden_states, edges, "replicate", _reads_frames_first(self.conv)))


class SwappedHistoryPatchEmbed(SwappedModule):
    """FramePack's three embeddings of clean latents; the coarser two repeat edges up to a whole patch."""

    proj: nn.Module
    proj_2x: nn.Module
    proj_4x: nn.Module

    def forward(
        self,
        latents_clean: Tensor | None = None,
        latents_clean_2x: Tensor | None = None,
        latents_clean_4x: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """As the original: (B, N, D) each."""
        return (
            None if latents_clean is None else _tokens(self.proj(latents_clean)),
            None if latents_clean_2x is None else _tokens(self.proj_2x(_to_multiple(latents_clean_2x, (2, 4, 4)))),
            None if latents_clean_4x is None else _tokens(self.proj_4x(_to_multiple(latents_clean_4x, (4, 8, 8)))),
        )


# Exact classes only: a subclass may pad elsewhere. HunyuanVideoPatchEmbed, HunyuanVideo15PatchEmbed and the original
# FramePack's HunyuanVideoPatchEmbedForCleanLatents do nothing but call their nn.Conv3d, which is swapped where it is.
SWAPS: dict[str, type[SwappedModule]] = {
    "torch.nn.modules.conv.Conv3d": SwappedConv3d,
    f"{AUTOENCODERS}cogvideox.CogVideoXSafeConv3d": SwappedConv3d,
    f"{AUTOENCODERS}cogvideox.CogVideoXCausalConv3d": SwappedCogVideoXCausal,
    f"{AUTOENCODERS}hunyuan_video.HunyuanVideoCausalConv3d": SwappedHunyuanCausal,
    f"{AUTOENCODERS}hunyuanvideo15.HunyuanVideo15CausalConv3d": SwappedHunyuanCausal,
    f"{AUTOENCODERS}ltx.LTXVideoCausalConv3d": SwappedLTXCausal,
    "diffusers.models.transformers.transformer_hunyuan_video_framepack.HunyuanVideoHistoryPatchEmbed": (
        SwappedHistoryPatchEmbed
    ),
}


def swap_of(module: nn.Module) -> type[SwappedModule] | None:
    """What takes a module of exactly this class over, or None."""
    return SWAPS.get(f"{type(module).__module__}.{type(module).__qualname__}")


def swapped_class(original: Any) -> type[nn.Module]:
    """``original`` with the forward of its rewrite, under its own name, which offload plans go by."""
    return _subclass(original)


@functools.cache
def _subclass(original: Any) -> type[nn.Module]:
    rewrite = SWAPS[f"{original.__module__}.{original.__qualname__}"]
    return type(original.__name__, (rewrite, original), {"__doc__": rewrite.__doc__, "__module__": original.__module__})


def geometry_of(leaf: Any) -> Geometry:
    """How an ``nn.Conv3d`` walks; no padding where it pads with something else than as many zeros on both sides."""
    plain = leaf.padding_mode == "zeros" and not isinstance(leaf.padding, str)
    return Geometry(leaf.stride, leaf.padding if plain else (0, 0, 0), leaf.dilation, leaf.groups)


def own_edges(leaf: Any) -> tuple[tuple[int, ...] | None, str]:
    """What ``leaf`` pads with besides as many zeros on both sides: (edges as in ``F.pad``, mode)."""
    if leaf.padding_mode == "zeros" and not isinstance(leaf.padding, str):
        return None, ""
    mode = "constant" if leaf.padding_mode == "zeros" else leaf.padding_mode
    return tuple(leaf._reversed_padding_repeated_twice), mode


def _aligned(x: Tensor, leaf: SwappedConv3d) -> Tensor:
    """``x`` on the device where ``leaf`` executes.

    Raises:
        UnsupportedError: ``x`` is on an accelerator, and the weight is a host weight copy in host memory or on meta.
    """
    if x.device == leaf.weight.device:
        return x
    device = hooked_device(leaf) or leaf.weight.device
    if x.device == device or hasattr(leaf, "weights_on"):
        return x
    if device.type in (HOST.type, torch.device("meta").type):
        raise misplaced(leaf, x)
    if not leaf.__dict__.get("conv3d_told"):
        logger.warning("%s It is moved there now.", misplaced(leaf, x))
        leaf.__dict__["conv3d_told"] = True
    return carried(x, lambda bits: bits.to(device))


def _reads_frames_first(leaf: nn.Module) -> bool:
    choice = getattr(leaf, "conv3d_choice", None)
    return choice is not None and choice.form in READ_FRAMES_FIRST


def history_tables(
    tables: tuple[Tensor, Tensor], height: int, width: int, patch: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """FramePack's rotary tables of one history, one row per patch, by concatenation and means.

    The original pads and pools in 5-D (``HunyuanVideoFramepackTransformer3DModel._pad_rotary_emb``), which some devices
    lack and others get wrong.

    Args:
        tables: cosines and sines, (T * H * W, D) each.
        height, width: H and W.
        patch: (time, rows, columns).
    """

    def per_patch(table: Tensor) -> Tensor:
        whole = _to_multiple(rearrange(table, "(t h w) d -> 1 d t h w", h=height, w=width), patch)
        sizes = dict(zip(("pt", "ph", "pw"), patch, strict=True))
        return reduce(whole, "1 d (t pt) (h ph) (w pw) -> (t h w) d", "mean", **sizes)

    cosines, sines = tables
    return per_patch(cosines), per_patch(sines)


def _to_multiple(x: Tensor, patch: tuple[int, int, int]) -> Tensor:
    time, height, width = (-extent % step for extent, step in zip(x.shape[2:], patch, strict=True))
    return padded(x, (0, width, 0, height, 0, time), "replicate")


def _tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)
