"""Where each token of a view lies on the object: voxel indices from position maps, and the rotary tables of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

THETA = 10000.0
LEVELS = 4
VOXELS_PER_CELL = 8  # at the first level, for each row of latents
LEAST_SHARE = 16  # a cell needs this part of its pixels on the object


def voxel_indices(position_maps: Tensor, rows: int) -> dict[int, Tensor]:
    """Voxel of each token, (1, N, 3), int64, by the number N of tokens of all views together.

    Upstream edits the map in place, so from the second level on background counts as an object at position 0. The
    weights were trained with it.

    Args:
        position_maps: (V, 3, H, W) in 0..1, background exactly 1. rows: height of the latents.
    """
    maps = position_maps.to(torch.float16)
    on_object = (maps != 1).all(dim=1, keepdim=True)
    maps = torch.where(on_object, maps, torch.zeros_like(maps))
    found = {}
    for level in range(LEVELS):
        height = rows >> level
        if height < 1 or maps.shape[-2] % height:
            break
        side = maps.shape[-2] // height
        pixels, count = cells(maps, side), cells(on_object, side).sum(-1)
        # Sums in fp32, since a device's fp16 sums differ; mean and index in fp16, as upstream rounds them.
        mean = (pixels.float().sum(-1) / count.clamp(min=1)).to(torch.float16)
        mean = torch.where(count < side**2 // LEAST_SHARE, torch.zeros_like(mean), mean).clamp(0, 1)
        voxels = (mean * (VOXELS_PER_CELL * height - 1)).round()
        tokens = voxels.permute(0, 2, 3, 1).reshape(1, -1, 3).long()
        found[tokens.shape[1]] = tokens
        on_object = torch.ones_like(on_object)
    return found


def cells(maps: Tensor, side: int) -> Tensor:
    """(V, C, H / side, W / side, side * side) from (V, C, H, W): the pixels of each cell."""
    return maps.unfold(2, side, side).unfold(3, side, side).flatten(-2)


def rotary_tables(voxels: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (1, N, D), fp32, each value twice, for voxels (1, N, 3) and head width D, divisible by 8.

    x and y get three eighths of the features each, z a quarter.
    """
    angles = []
    for axis, share in enumerate((3, 3, 2)):
        size = width * share // 8
        frequencies = THETA ** -(torch.arange(0, size, 2, dtype=torch.float32, device=voxels.device) / size)
        angles.append(voxels[..., axis, None].float() * frequencies)
    joined = torch.cat(angles, dim=-1).repeat_interleave(2, dim=-1)
    return joined.cos(), joined.sin()


def rotary_by_tokens(position_maps: Tensor, rows: int, widths: Mapping[int, int]) -> dict[int, tuple[Tensor, Tensor]]:
    """The tables of every level, by the number of tokens of all views together.

    Args:
        position_maps: (V, 3, H, W). rows: height of the latents. widths: level to head width.
    """
    found = {}
    for level, (tokens, voxels) in enumerate(voxel_indices(position_maps, rows).items()):
        if level in widths:
            found[tokens] = rotary_tables(voxels, widths[level])
    return found
