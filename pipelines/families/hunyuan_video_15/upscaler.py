"""Latents of HunyuanVideo 1.5 at the size of 720p or 1080p, which its super-resolution then samples anew.

Source: Tencent-Hunyuan/HunyuanVideo-1.5 60783e7 ``hunyuan_video_sr_pipeline.py`` and ``modules/upsample.py``; single
files as ComfyUI 0.33 ``LatentUpscaleModelLoader`` takes them, in the same names. Neither network changes a size.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....compat.checkpoints.headers import TensorEntry
from ....compat.errors import CheckpointError
from ...base import Latents, Progress
from ...files.formats import entries_in
from ...latents.upscaler import upscaled
from ...pipeline import Pipeline
from ...settings import FIRST_SIZE, SECOND_PASS
from .spec import CHANNELS, LARGE, SMALL, SPATIAL_RATIO

EXAMPLE = "hunyuanvideo15_latent_upsampler_1080p.safetensors or upsampler/720p_sr_distilled"
PAGE = "https://huggingface.co/Comfy-Org/HunyuanVideo_1.5_repackaged"


def upscaler_in(path: Path) -> tuple[int, list[int], dict[str, TensorEntry]]:
    """The side of the square of as many pixels as it enlarges to, the widths of its blocks, and its tensors.
    CheckpointError for another model."""
    entries = {name.replace("nin_shortcut.conv.", "nin_shortcut."): entry for name, entry in entries_in(path).items()}
    shapes = {name.replace("nin_shortcut", "conv_shortcut"): entry for name, entry in entries.items()}
    for side, first, block in ((SMALL, "in_conv", "blocks.{}.block.0"), (LARGE, "conv_in", "up.{}.block.0.conv1")):
        entry, widths = shapes.get(f"{first}.conv.weight"), list[int]()
        while (of_block := shapes.get(f"{block.format(len(widths))}.conv.weight")) is not None and of_block.shape:
            widths.append(of_block.shape[0])
        if entry is not None and len(entry.shape) == 5 and entry.shape[1] == CHANNELS and widths:
            return side, widths, shapes
    raise CheckpointError(
        f"{str(path)!r} holds no latent upscaler of HunyuanVideo 1.5",
        expected=f"such as {EXAMPLE}",
        fix=f"Download it from {PAGE}.",
    )


def upscale(pipeline: Pipeline, latents: Latents, path: Path, progress: Progress) -> Latents:
    """``latents`` at Tencent's size for 720p or 1080p, whichever the file is for, marked for the super-resolution."""
    side, widths, entries = upscaler_in(path)
    width, height = _target(latents.width, latents.height, side)
    cells = (height // SPATIAL_RATIO, width // SPATIAL_RATIO)
    scale = float(pipeline.configs["vae"]["scaling_factor"])
    low = functional.interpolate(latents.samples[0].float().transpose(0, 1) * scale, size=cells, mode="bilinear")
    build = partial(_To720p if side == SMALL else _To1080p, widths)
    high = upscaled(pipeline, low.transpose(0, 1)[None], build, entries, max(widths), torch.float32, progress) / scale
    marked = {SECOND_PASS: True, FIRST_SIZE: [latents.width, latents.height]}
    return replace(latents, samples=high, width=width, height=height, extra={**latents.extra, **marked})


def _target(width: int, height: int, side: int) -> tuple[int, int]:
    """Width and height in pixels of the size of ``side`` squared whose shape is nearest, of two as near the first."""
    from diffusers.pipelines.hunyuan_video1_5.image_processor import generate_crop_size_list

    sizes: list[tuple[int, int]] = generate_crop_size_list(side, SPATIAL_RATIO)
    return min(sizes, key=lambda size: abs(size[0] / size[1] - width / height))


class _Residual(nn.Module):
    """The residual block of the 720p network."""

    def __init__(self, width: int) -> None:
        from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15CausalConv3d as Conv

        super().__init__()
        self.block = nn.Sequential(Conv(width, width), nn.SiLU(), Conv(width, width), nn.SiLU(), Conv(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


class _To720p(nn.Module):
    """The network of the 720p file."""

    def __init__(self, widths: list[int]) -> None:
        from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15CausalConv3d as Conv

        super().__init__()
        self.in_conv = Conv(CHANNELS, widths[0])
        self.blocks = nn.Sequential(*map(_Residual, widths))
        self.out_conv = Conv(widths[-1], CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_conv(self.blocks(self.in_conv(x)))


class _To1080p(nn.Module):
    """The network of the 1080p file: three residual blocks of each width, as in the VAE."""

    def __init__(self, widths: list[int]) -> None:
        from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as vae

        super().__init__()
        self.conv_in = vae.HunyuanVideo15CausalConv3d(CHANNELS, widths[0])
        self.up = nn.ModuleList()
        for before, width in zip((widths[0], *widths), widths, strict=False):
            level = nn.Module()
            level.block = nn.Sequential(*(vae.HunyuanVideo15ResnetBlock(w, width) for w in (before, width, width)))
            self.up.append(level)
        self.norm_out = vae.HunyuanVideo15RMS_norm(widths[-1], images=False)
        self.conv_out = vae.HunyuanVideo15CausalConv3d(widths[-1], CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x) + x.repeat_interleave(self.conv_in.conv.out_channels // CHANNELS, dim=1)
        for level in self.up:
            x = level.get_submodule("block")(x)
        return self.conv_out(functional.silu(self.norm_out(x)))
