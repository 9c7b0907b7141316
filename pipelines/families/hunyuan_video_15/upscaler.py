"""Latents of HunyuanVideo 1.5 at the size of 720p or 1080p, which its super-resolution then samples anew.

Source: Tencent-Hunyuan/HunyuanVideo-1.5 60783e7 ``hunyuan_video_sr_pipeline.py`` and ``modules/upsample.py``; single
files as ComfyUI 0.33 ``LatentUpscaleModelLoader`` takes them, in the same names. Neither network changes a size."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
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

# Names in the files, each with that of our layer.
NAMES = {"in_conv": "conv_in", "out_conv": "conv_out", "blocks.": "up.", "nin_shortcut": "conv_shortcut"}
FIRST = re.compile(r"up\.(\d{1,3})\.block\.0(?:\.conv1)?\.conv\.weight")


def entries_of(path: Path) -> dict[str, TensorEntry]:
    """The tensors of either upscaler by one set of names; CheckpointError for another model."""
    entries = entries_in(path)
    for theirs, ours in NAMES.items():
        entries = {name.replace(theirs, ours, 1): entry for name, entry in entries.items()}
    first = entries.get("conv_in.conv.weight")
    if first is None or len(first.shape) != 5 or first.shape[1] != CHANNELS or not _widths(entries):
        found = f"{str(path)!r} holds no latent upscaler of HunyuanVideo 1.5"
        expected = "such as hunyuanvideo15_latent_upsampler_1080p.safetensors or upsampler/720p_sr_distilled"
        fix = "Download it from https://huggingface.co/Comfy-Org/HunyuanVideo_1.5_repackaged."
        raise CheckpointError(found, expected=expected, fix=fix)
    return entries


def _widths(entries: dict[str, TensorEntry]) -> list[int]:
    """Channels of each level, by its first convolution."""
    found = (FIRST.fullmatch(name) for name in entries)
    rows = {int(match[1]): entries[match[0]].shape[:1] for match in found if match}
    return [rows[level][0] for level in range(len(rows)) if rows.get(level)]


def enlarged(latents: Latents, path: Path) -> Latents:
    """``latents`` with the size and marks of :func:`upscale`, but their own samples."""
    width, height = _target(latents.width, latents.height, LARGE if "norm_out.gamma" in entries_of(path) else SMALL)
    marked = {SECOND_PASS: True, FIRST_SIZE: [latents.width, latents.height]}
    return replace(latents, width=width, height=height, extra={**latents.extra, **marked})


def upscale(pipeline: Pipeline, latents: Latents, path: Path, progress: Progress) -> Latents:
    """``latents`` at Tencent's size for 720p or 1080p, whichever the file is for, marked for the super-resolution."""
    entries = entries_of(path)
    widths, large, made = _widths(entries), "norm_out.gamma" in entries, enlarged(latents, path)
    cells = (made.height // SPATIAL_RATIO, made.width // SPATIAL_RATIO)
    scale = float(pipeline.configs["vae"]["scaling_factor"])
    low = functional.interpolate(latents.samples[0].float().transpose(0, 1) * scale, size=cells, mode="bilinear")
    build = partial(_Network, widths, large)
    high = upscaled(pipeline, low.transpose(0, 1)[None], build, entries, max(widths), torch.float32, progress) / scale
    return replace(made, samples=high)


def _target(width: int, height: int, side: int) -> tuple[int, int]:
    """Width and height in pixels of Tencent's size of the area ``side``**2 with the nearest aspect ratio."""
    from diffusers.pipelines.hunyuan_video1_5.image_processor import generate_crop_size_list

    sizes: list[tuple[int, int]] = generate_crop_size_list(side, SPATIAL_RATIO)
    return min(sizes, key=lambda size: abs(size[0] / size[1] - width / height))


class _Network(nn.Module):
    """The upscaler to 720p, of residual blocks of one width; or the ``large`` one, of the VAE's blocks."""

    def __init__(self, widths: list[int], large: bool) -> None:
        from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as vae

        super().__init__()
        conv, block, self.large = vae.HunyuanVideo15CausalConv3d, vae.HunyuanVideo15ResnetBlock, large
        self.conv_in, self.conv_out = conv(CHANNELS, widths[0]), conv(widths[-1], CHANNELS)
        self.up = nn.ModuleList(nn.Module() for _ in widths)
        for level, (before, width) in zip(self.up, pairwise((widths[0], *widths)), strict=True):
            if large:
                layers: list[nn.Module] = [block(before, width), block(width, width), block(width, width)]
            else:
                layers = [conv(before, width), nn.SiLU(), conv(width, width), nn.SiLU(), conv(width, width)]
            level.block = nn.Sequential(*layers)
        self.norm_out = vae.HunyuanVideo15RMS_norm(widths[-1], images=False) if large else None

    def forward(self, x: Tensor) -> Tensor:
        """(1, 32, T, H, W) from the same; the large network's blocks add their input themselves."""
        shortcut = x.repeat_interleave(self.conv_in.conv.out_channels // CHANNELS, dim=1) if self.large else 0
        x = self.conv_in(x) + shortcut
        for level in self.up:
            x = level.get_submodule("block")(x) + (0 if self.large else x)
        return self.conv_out(x if self.norm_out is None else functional.silu(self.norm_out(x)))
