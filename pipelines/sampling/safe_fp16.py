"""Safe fp16 in a pipeline: how its transformer is read and rewritten, and the way back to fp32 that `auto` keeps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn

from ...compat.memory.parts import denoises
from ...compat.precision import FP32
from ...compat.transforms.fp16 import apply_fp16_safe, fp32_output_works, stored_dtype
from ...compat.transforms.order import Order, Step
from ..base import Parts, Pipeline, Progress
from ..loading.part import PartFiles, reader_of
from .loop import NotFinite

log = logging.getLogger(__name__)
Result = TypeVar("Result")
SAID = "fp16-safe gave values that are not finite: the transformer is read again and runs in fp32 from here on"


def read_narrow(files: PartFiles) -> PartFiles:
    """``files`` of a transformer with the matrices of its blocks read as fp16 and all else as fp32."""
    return replace(files, dtype=FP32, dtype_of=stored_dtype)


@dataclass(slots=True)
class SafeFp16:
    """The rewrite of one pipeline's transformer, until it is abandoned.

    Args:
        family: a family id. device: where the transformer will run; it is asked once for fp32-output products.
        active: whether the transformer is rewritten when it is next read.
    """

    family: str
    device: Any
    active: bool = True

    def step(self) -> Step:
        """The rewrite as a step of the preparation."""
        return Step(Order.PRECISION, "safe fp16", self._apply)

    def abandon(self, parts: Parts, files: PartFiles) -> None:
        """From the next reading on a transformer is fp32."""
        self.active = False
        parts.readers[files.name] = reader_of(replace(files, dtype=FP32, dtype_of=None))

    def _apply(self, part: str, module: nn.Module) -> Callable[[], None] | None:
        if not denoises(part) or not self.active:
            return None
        applied = apply_fp16_safe(module, self.family, {"fp32_output": fp32_output_works(self.device)})
        (log.warning if applied.report.left else log.info)("%s", applied.report)
        return applied.restore


def with_fallback(pipeline: Pipeline, progress: Progress, run: Callable[[], Result]) -> Result:
    """What ``run`` returns; where it finds values that are not finite and a fallback is open, that of a second run.

    ``Parts.fallbacks`` holds a fallback only where `auto` chose the precision: an explicit choice is never changed.
    """
    try:
        return run()
    except NotFinite:
        if not pipeline.parts.fallbacks:
            raise
    for part in tuple(pipeline.parts.fallbacks):
        pipeline.offloader.release(part)
        pipeline.parts.drop(part)
        pipeline.parts.fallbacks.pop(part)()
    progress.notify(SAID)
    return run()
