"""A cancel at a random moment, by the clock: obeyed within a second, and the next run is bit for bit the same.

Run: python tests/runs/cancels.py [--count 100] [--seed 0]
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from anygpu.pipelines.base import Silent

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runs.subjects import arguments_of, subjects

LIMIT_SECONDS = 1.0


class Cancelled(BaseException):
    """As ComfyUI's interrupt."""


class Cancelling(Silent):
    """Cancels ``seconds`` from now."""

    def __init__(self, seconds: float) -> None:
        self.at, self.stage = time.monotonic() + seconds, ""

    def check(self) -> None:
        if time.monotonic() >= self.at:
            raise Cancelled

    def step(self, done: int, total: int, stage: str, preview: Any = None) -> None:
        self.stage = str(stage)
        self.check()


def main() -> int:
    """Cancel ``--count`` runs; 1 where one took longer than a second, or a later run differs."""
    arguments = arguments_of(__doc__, 100)
    rng, slow, waited, different, ended = random.Random(arguments.seed), 0, [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        runs = [(name, subject.run, *timed(subject.run)) for name, subject in subjects(Path(folder)).items()]
        while len(waited) < arguments.count:
            name, run, wanted, length = runs[(len(waited) + ended) % len(runs)]
            progress = Cancelling(rng.random() * length)
            try:
                run(progress)
                ended += 1
                continue
            except Cancelled:
                waited.append(time.monotonic() - progress.at)
            if waited[-1] > LIMIT_SECONDS:
                slow += 1
                print(f"{name}: {waited[-1]:.2f} s after {progress.stage}")
            different += not torch.equal(run(Silent()), wanted)
    waited.sort()
    middle, longest = waited[len(waited) // 2], waited[-1]
    print(f"{len(waited)} cancels, {ended} runs ended first: median {middle:.3f} s, longest {longest:.3f} s")
    print(f"{slow} above {LIMIT_SECONDS:g} s, {different} later runs differ")
    return 1 if slow or different else 0


def timed(run: Callable[[Any], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """The result of a second run, and its seconds."""
    run(Silent())
    started = time.monotonic()
    return run(Silent()), time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
