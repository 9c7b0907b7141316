"""The preview of painted views under a node, and views kept until they are baked."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import comfy.latent_formats
import comfy.model_management
import latent_preview
import torch

from ..compat.device.execution import to_host
from ..pipelines.latents import recovery
from ..pipelines.latents.recovery import Sampled
from .folders import saved_folder
from .progress import NodeProgress

if TYPE_CHECKING:  # painting is read when it is used, not at ComfyUI's start
    from ..paint.sampling.painting import Painted

PREVIEW_SIZE = 768


class PaintProgress(NodeProgress):
    """A node's progress whose previews are the views beside one another."""

    def _picture(self, preview: Callable[[], torch.Tensor]) -> Any:
        """The views as one row, or None when previews are off or there is nothing to see yet."""
        from PIL import Image

        device = comfy.model_management.get_torch_device()
        if latent_preview.get_previewer(device, comfy.latent_formats.SD15()) is None:
            return None
        views = list(preview())
        if not views:
            return None
        row = to_host(torch.cat(views, dim=1).clamp(0, 1).mul(255).to(torch.uint8)).numpy()
        picture = Image.fromarray(row)
        return ("JPEG", picture.resize((picture.width * 4, picture.height * 4)), PREVIEW_SIZE)

    def sampled(self, latents: torch.Tensor, family: str, seed: int, latent_format: str) -> None:
        """Save what was sampled, (B, 4, h, w), before it is decoded; ``latent_format`` names core's class."""
        height, width = (side * 8 for side in latents.shape[-2:])
        kept = Sampled([latents], family, seed, len(latents), height=height, width=width, latent_format=latent_format)
        recovery.save_plain_recovery(saved_folder(), kept, self.notify)


def saved_views(painted: Painted) -> AbstractContextManager[None]:
    """:func:`texturing.saved_views` in a folder beside the saved latents."""
    from ..paint import texturing

    folder = saved_folder() / f"views-{uuid.uuid4().hex[:8]}"
    return texturing.saved_views(painted, folder, folder.relative_to(saved_folder().parent.parent).as_posix())
