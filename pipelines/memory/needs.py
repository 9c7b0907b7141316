"""What a part needs on the device beside its weights, for whoever holds it: the estimates, with their margin."""

from __future__ import annotations

from ..base import Pipeline, SampleSettings
from .estimates import MARGIN, Size, sampling_bytes, text_bytes


def beside_transformer(pipeline: Pipeline, settings: SampleSettings, window: int = 9) -> int:
    """Bytes of one forward at this size.

    Args:
        window: latent frames of one section of FramePack.
    """
    size = Size(settings.width, settings.height, settings.frames, settings.cfg > 1.0, window)
    return int(MARGIN * sampling_bytes(pipeline, size))


def beside_text(pipeline: Pipeline, part: str) -> int:
    """Bytes of one forward of a text encoder."""
    return int(MARGIN * text_bytes(pipeline, part))
