"""Settings to lower when painting runs out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..compat.device.failures import is_shortage
from ..compat.errors import remember


@contextmanager
def explained(what: str, device: object, fix: str) -> Iterator[None]:
    """Around a stage: an error that says that memory ran out, in whatever back end's words, says what to lower.

    Args:
        what: was being done, such as ``painting 6 views of 512 pixels``.
        fix: one sentence.
    """
    try:
        yield
    except Exception as error:
        if not is_shortage(error):
            raise
        found, expected = f"out of memory while {what} on {device}", "more free memory on this device"
        text = f"{found}; expected {expected}. {fix}\n{' '.join(str(error).split())}"
        # ComfyUI unloads all models where it sees this class, so that the next try has more room.
        raise torch.OutOfMemoryError(remember(text, found, expected, fix)) from error
