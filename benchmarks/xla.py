"""Tiny models on torch_xla's own CPU device against the CPU: the same latents and frames behind a lazy backend.

It needs PJRT_DEVICE=CPU and torch_xla of torch's version, such as 2.9.0, which is not a dependency of this pack. The
device refuses ``parameter.data = ...``, so that weights get there another way. A minute or more each: XLA compiles
every shape.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec

from runner import Case, Row
from simulated.test_families import CASES as CASES_OF_RUNS
from simulated.test_families import rendered
from times import opened


def rows(models: tuple[str, ...], offload: str) -> Iterator[Row]:
    """A row per model."""
    import torch_xla

    for name in models:
        case = CASES_OF_RUNS[name]
        here = rendered(opened(name, precision="fp32"), case)
        started = time.perf_counter()
        there = rendered(opened(name, precision="fp32", offload=offload, device=str(torch_xla.device())), case)
        seconds = time.perf_counter() - started
        apart = [float((one - other).abs().max()) for one, other in zip(here, there, strict=True)]
        yield {
            "torch_xla": torch_xla.__version__,
            "model": name,
            "offload": offload,
            "latents apart": f"{apart[0]:.1e}",
            "frames apart": f"{apart[1]:.1e}",
            "seconds": round(seconds, 1),
        }


def lacks() -> str:
    """The reason why nothing can be compared here, or nothing."""
    return "" if find_spec("torch_xla") else "torch_xla is not installed"


CASES = [Case("xla", rows, {"models": ("mochi",), "offload": "model"}, "xla", lacks=lacks)]
