"""Memory that runs out in a step of painting: less of the network stays on the device, then settings to lower."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..compat.device.facts import empty_cache
from ..compat.device.failures import DEVICE_ERRORS, is_shortage
from ..compat.errors import remember
from ..compat.memory.offloader import Offloader


def with_room(offloader: Offloader, part: str, step: Callable[[], torch.Tensor], progress: Any) -> torch.Tensor:
    """The result of ``step``, which calls ``part``; again with less of it on the device where memory ran out.

    Raises:
        RuntimeError, MemoryError: another error, or one of memory when nothing is left to give up.
    """
    while True:
        try:
            return step()
        except DEVICE_ERRORS as error:
            if not is_shortage(error):
                raise
            failed = error.with_traceback(None)  # whose frames hold the tensors of the failed try
        done = offloader.reduce_memory(part)
        if not done:
            raise failed
        gc.collect()
        empty_cache(offloader.device)
        progress.notify(f"painting ran out of memory: continuing {done}, after the last finished step")


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
