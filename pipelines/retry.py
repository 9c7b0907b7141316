"""The answer of a stage to an error: to be run again, with more room on the device."""

from __future__ import annotations

import gc
from collections.abc import Callable

from ..compat.device.facts import empty_cache
from ..compat.device.failures import DEVICE_ERRORS, is_shortage
from .base import Progress
from .pipeline import Pipeline

GIVEN_UP = "_anygpu_given_up"  # on an error that every way on was tried for


def make_room_and_retry(
    pipeline: Pipeline,
    progress: Progress,
    parts: tuple[str, ...] = (),
    message: str = "sampling ran out of memory: continuing {}, after the last finished step",
) -> Callable[[BaseException], bool]:
    """Handler that a stage calls after an error: frees memory and returns True to try again.

    Where memory ran out, other parts leave the device, then ``parts`` come by block, then by layer, each said. When
    nothing of that is left, it is tried once more: what took the room may have been another program.

    Args:
        parts: those that come in pieces; none means the transformers.
        told: what is said, with a place for what was done.
    """
    parts = tuple(part for part in parts or pipeline.spec.transformers if part in pipeline.parts.readers)
    once_more = True

    def again(error: BaseException) -> bool:
        nonlocal once_more
        alone = pipeline.run.group is None  # else the others wait inside the step for what this rank sends
        if not alone or not parts or not is_shortage(error) or hasattr(error, GIVEN_UP):
            return False
        try:
            done = pipeline.offloader.reduce_memory(*parts)
        except DEVICE_ERRORS:  # no room for that either, and the part may have left while its inputs stayed
            done, once_more = "", False
        if not done and once_more:
            done, once_more = "once more", False
        if not done:
            setattr(error, GIVEN_UP, True)  # a stage around a step must not start again for it
            return False
        gc.collect()
        empty_cache(pipeline.offloader.device)
        progress.notify(message.format(done))
        return True

    return again
