"""Previews by a family's tiny decoder for ComfyUI's ``taesd``, which lacks Mochi's and scales HunyuanVideo's twice."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import comfy.model_management
import latent_preview
import torch

from ..compat.device.facts import facts_for
from ..compat.device.failures import DEVICE_ERRORS
from ..compat.device.precision import precision_for
from ..compat.errors import PackError
from ..pipelines.registry import FAMILIES
from ..pipelines.vae.draft import Network, preview, tiny_decoder
from .families import latent_format_of
from .folders import TINY_DECODER_KEYS, roots

TAESD = "taesd"


class TinyPreviewer:
    """Previewer as core's own, of the first frame of an estimate; silent once the device has failed at it."""

    def __init__(self, network: Network, device: torch.device, dtype: torch.dtype) -> None:
        self.network, self.device, self.dtype, self.works = network, device, dtype, True

    def decode_latent_to_preview_image(self, _format: str, estimate: torch.Tensor) -> tuple[str, Any, int] | None:
        """Format, picture and the largest size that it is sent in; None where there is none."""
        try:
            frame = preview(self.network, estimate, self.device, self.dtype) if self.works else None
        except DEVICE_ERRORS:  # a picture of a run must not end it
            self.works, frame = False, None
        if frame is None:
            return None
        return "JPEG", latent_preview.preview_to_image(frame, do_scale=False), latent_preview.MAX_PREVIEW_RESOLUTION


def previewer_for(family: str | None) -> Any:
    """The previewer of a family's estimates, as ComfyUI's settings have it; None where previews are off."""
    latent_format, device = latent_format_of(family), comfy.model_management.get_torch_device()
    method = getattr(getattr(latent_preview, "args", None), "preview_method", None)
    if family in FAMILIES and str(getattr(method, "value", method)) == TAESD:
        spec = FAMILIES[family]
        with suppress(PackError):  # none is published, or none is here: core's own
            dtype = precision_for(spec.rewrites.precision, facts_for(device)).vae
            return TinyPreviewer(tiny_decoder(spec, roots(TINY_DECODER_KEYS))[1], device, dtype)
    return None if latent_format is None else latent_preview.get_previewer(device, latent_format)
