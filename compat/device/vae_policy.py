"""Workarounds for VAEs on some devices: smaller tiles, torch's convolution switches, contiguous weights.

The rows of :mod:`.quirks` say which device needs what; this file applies and undoes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from .quirks import DevicePolicy

METHODS = ("auto", "full", "tiled", "chunked", "streaming", "cpu")
TILES = (256, 128, 64)  # pixels; upstream's own default first
LEAST_CELLS = 2  # latents across a tile
STRIDE = 0.75  # of a tile: a quarter of it is blended into the next one
LAYOUTS = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}
TILING = (
    "use_tiling",
    "tile_sample_min_height",
    "tile_sample_min_width",
    "tile_sample_stride_height",
    "tile_sample_stride_width",
    "tile_latent_min_height",
    "tile_latent_min_width",
)


@dataclass(frozen=True, slots=True)
class Form:
    """What the user asks of a decode.

    Args:
        method: one of :data:`METHODS`.
        tile: pixels of a tile, 0 for the method's own.
        overlap: pixels of it that blend into the next, -1 for a quarter.
        frames: latent frames per chunk, 0 for the method's own.
    """

    method: str = "auto"
    tile: int = 0
    overlap: int = -1
    frames: int = 0


def checked_form(form: Form, cell: int) -> Form:
    """``form``, whose values are in range for latents of ``cell`` pixels.

    Raises:
        InputError: an unknown method, or a tile, overlap or count of frames out of range.
    """
    if form.method not in METHODS:
        raise InputError(f"decode method {form.method!r}", expected=f"one of {', '.join(METHODS)}", fix="Choose auto.")
    if form.frames < 0 or form.tile < 0:
        raise InputError(
            f"tile {form.tile}, frames_per_chunk {form.frames}", expected="0 or more", fix="Choose 0 for auto."
        )
    least = LEAST_CELLS * cell
    if 0 < form.tile < least and form.method != "streaming":
        raise InputError(
            f"tile {form.tile} pixels", expected=f"0, or at least {least} pixels", fix=f"The nearest value is {least}."
        )
    most = (form.tile or TILES[0]) // 2
    if not -1 <= form.overlap <= most:
        raise InputError(
            f"overlap {form.overlap} pixels",
            expected=f"-1 for a quarter of the tile, or 0 to {most} pixels",
            fix=f"The nearest value is {min(max(form.overlap, 0), most)}.",
        )
    return form


@contextmanager
def convolution_switches(policy: DevicePolicy, library: bool = True) -> Iterator[None]:
    """Torch's switches for its convolution library (cuDNN; MIOpen on Radeon) as ``policy`` wants them, then as they
    were.

    Args:
        library: False switches the library off whatever ``policy`` says.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.enabled, cudnn.benchmark
    try:
        if not (library and policy.vae_cudnn):
            cudnn.enabled = False
        if not policy.benchmark:
            cudnn.benchmark = False
        yield
    finally:
        cudnn.enabled, cudnn.benchmark = before


@contextmanager
def tiled(vae: Any, tile: int) -> Iterator[None]:
    """``vae`` working in tiles of ``tile`` pixels, or whole for 0; its own settings come back afterwards."""
    before = {name: getattr(vae, name) for name in TILING if hasattr(vae, name)}
    ratio = int(getattr(vae, "spatial_compression_ratio", 0) or vae.config.get("spatial_compression_ratio", 8))
    # A stride that is no whole number of latents would tear the tiles apart.
    stride = max(ratio, int(tile * STRIDE) // ratio * ratio)
    sizes = {"stride": stride, "latent": tile // ratio, "sample": tile}
    wanted: dict[str, Any] = {"use_tiling": tile > 0}
    if tile:
        wanted |= {name: next(sizes[kind] for kind in sizes if kind in name) for name in TILING[1:] if name in before}
    try:
        for name, value in wanted.items():
            setattr(vae, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(vae, name, value)


def make_contiguous(module: nn.Module) -> int:
    """How many weights of ``module`` were laid out anew, so that each has one of torch's plain layouts; values stay."""
    count = 0
    with torch.inference_mode(False), torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            layouts = (torch.contiguous_format, *LAYOUTS.get(tensor.ndim, ()))
            if tensor.device.type != "meta" and not any(tensor.is_contiguous(memory_format=each) for each in layouts):
                tensor.data, count = tensor.data.contiguous(), count + 1
    return count


def largest_buffer_bytes(config: Mapping[str, Any], frames: int, height: int, width: int, itemsize: int) -> int:
    """About the largest single activation of a VAE, in bytes: twice its narrowest width at full size, padded.

    Twice, because the last upsampling comes before the channels are halved.

    Args:
        config: of the VAE.
        frames, height, width: of what goes through in one piece, in pixels.
    """
    widths = config.get("decoder_block_out_channels") or config.get("block_out_channels") or (128,)
    pixels = (frames + 2) * (height + 2) * (width + 2)
    return 2 * min(widths) * pixels // int(config.get("patch_size") or 1) ** 2 * itemsize


def limit_of(policy: DevicePolicy) -> int:
    """The largest buffer in bytes that a VAE may make or convolve; 0 for no limit."""
    return min((limit for limit in (policy.allocation_bytes, policy.conv_bytes) if limit), default=0)


def tiles_below(largest: int, ratio: int = 1) -> tuple[int, ...]:
    """The tile sizes in pixels that are smaller than ``largest`` and hold at least two latents."""
    return tuple(tile for tile in TILES if tile < largest and tile >= 2 * ratio)
