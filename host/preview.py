"""Pictures of results under a node, in ComfyUI's temporary folder, and previews by a family's tiny decoder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import comfy.model_management
import latent_preview
import torch
from torch.nn import functional

from ..compat.device.facts import facts_for
from ..compat.device.failures import DEVICE_ERRORS
from ..compat.device.precision import precision_for
from ..compat.errors import PackError
from ..pipelines.registry import FAMILIES
from ..pipelines.vae.draft import Network, preview, tiny_decoder
from .api import io, ui
from .families import latent_format_of
from .folders import TINY_DECODER_KEYS, roots

MOST_FRAMES, CLIP_PIXELS, SHEET_PIXELS = 48, 320, 1024
QUALITY, FASTEST = 70, 0  # of WebP: percent, and the method that compresses least
TAESD = "taesd"


def clips(films: Sequence[torch.Tensor], fps: float, cls: Any) -> Any:
    """Previews of clips (F, H, W, 3) in 0..1, all of one size: WebP of at most 48 frames and 320 pixels, or stills."""
    stride = math.ceil(len(films[0]) / MOST_FRAMES)
    small = [_at_most(frames[::stride], CLIP_PIXELS) for frames in films]
    if len(small[0]) == 1:
        return ui.PreviewImage(torch.cat(small), cls=cls)
    speed = max(1.0, fps / stride)
    save, place = ui.ImageSaveHelper.save_animated_webp, io.FolderType.temp
    saved = [save(frames, "anygpu_clip", place, cls, speed, False, QUALITY, FASTEST) for frames in small]  # lossy
    return ui.SavedImages(saved, is_animated=True)


def sheet(pictures: torch.Tensor, cls: Any) -> Any:
    return ui.PreviewImage(sheet_of(_at_most(pictures, SHEET_PIXELS // math.ceil(math.sqrt(len(pictures))))), cls=cls)


def sheet_of(pictures: torch.Tensor) -> torch.Tensor:
    """Pictures (B, H, W, C) as one (1, rows * H, columns * W, C), row by row; empty places are 0."""
    count, height, width, channels = pictures.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    empty = pictures.new_zeros(rows * columns - count, height, width, channels)
    table = torch.cat((pictures, empty)).reshape(rows, columns, height, width, channels)
    return table.permute(0, 2, 1, 3, 4).reshape(1, rows * height, columns * width, channels)


def _at_most(pictures: torch.Tensor, pixels: int) -> torch.Tensor:
    """Pictures (B, H, W, C) whose longer side is at most ``pixels``; smaller ones are returned as they are."""
    longer = max(pictures.shape[1:3])
    if longer <= pixels:
        return pictures
    size = [max(1, round(side * pixels / longer)) for side in pictures.shape[1:3]]
    return functional.interpolate(pictures.movedim(-1, 1), size=size, mode="area").movedim(1, -1)


class TinyPreviewer:
    """A previewer like core's, by the family's tiny decoder; gives no pictures once the device has failed."""

    def __init__(self, network: Network, device: torch.device, dtype: torch.dtype) -> None:
        self.network, self.device, self.dtype, self.works = network, device, dtype, True

    def decode_latent_to_preview_image(self, _format: str, estimate: torch.Tensor) -> tuple[str, Any, int] | None:
        try:
            frame = preview(self.network, estimate, self.device, self.dtype) if self.works else None
        except DEVICE_ERRORS:  # a failed preview must not end the run
            self.works, frame = False, None
        if frame is None:
            return None
        return "JPEG", latent_preview.preview_to_image(frame, do_scale=False), latent_preview.MAX_PREVIEW_RESOLUTION


def preview_method() -> str:
    """ComfyUI's setting: ``none``, ``auto``, ``latent2rgb`` or ``taesd``."""
    method = getattr(getattr(latent_preview, "args", None), "preview_method", None)
    return str(getattr(method, "value", method))


def previewer_for(family: str | None) -> Any:
    """The previewer of a family's latents that ComfyUI's settings ask for; None if they are off or it is unknown."""
    latent_format, device = latent_format_of(family), comfy.model_management.get_torch_device()
    if family in FAMILIES and preview_method() == TAESD:
        spec = FAMILIES[family]
        with suppress(PackError):  # no tiny decoder is published or installed: core's own previewer
            dtype = precision_for(spec.rewrites.precision, facts_for(device)).vae
            return TinyPreviewer(tiny_decoder(spec, roots(TINY_DECODER_KEYS))[1], device, dtype)
    return None if latent_format is None else latent_preview.get_previewer(device, latent_format)


def rough_previewer(latent_format: Any) -> Any:
    """Core's latent2rgb previewer for a latent format, whatever ComfyUI's settings; None for one without factors."""
    factors = getattr(latent_format, "latent_rgb_factors", None)
    return factors and latent_preview.Latent2RGBPreviewer(factors, latent_format.latent_rgb_factors_bias)
