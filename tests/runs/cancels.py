"""A cancel at a random moment, by the clock: obeyed within a second, and the next run is bit for bit the same.

The second is one of the processor, as it is by the clock on a machine that does nothing else.

Run: python tests/runs/cancels.py [--count 100] [--seed 0]
"""

import random
import sys
import tempfile
import threading
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
        self.stage = ""
        self.asked: tuple[float, float] | None = None
        self.timer = threading.Timer(seconds, self.ask)
        self.timer.start()

    def ask(self) -> None:
        self.asked = time.monotonic(), time.process_time()

    def check(self) -> None:
        if self.asked is not None:
            raise Cancelled

    def waited(self) -> tuple[float, float]:
        """Seconds since it was asked, by the clock and of the processor."""
        assert self.asked is not None
        return time.monotonic() - self.asked[0], time.process_time() - self.asked[1]

    def step(self, done: int, total: int, stage: Any, preview: Any = None) -> None:
        self.stage = str(stage)
        self.check()


def main() -> int:
    """Cancel ``--count`` runs; 1 where one took longer than a second, or a later run differs."""
    arguments = arguments_of(__doc__, 100)
    rng, waited, different, ended = random.Random(arguments.seed), list[tuple[float, float]](), 0, 0
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
                waited.append(progress.waited())
            finally:
                progress.timer.cancel()
            if waited[-1][0] > LIMIT_SECONDS:
                print(f"{name}: {waited[-1][0]:.2f} s, of which {waited[-1][1]:.2f} s it computed, {progress.stage}")
            different += not torch.equal(run(Silent()), wanted)
    print(f"{len(waited)} cancels, {ended} runs ended first, {different} later runs differ")
    slow = 0
    for what, seconds in zip(("by the clock", "of the processor"), map(sorted, zip(*waited, strict=True)), strict=True):
        slow = sum(each > LIMIT_SECONDS for each in seconds)
        print(f"{what}: median {seconds[len(seconds) // 2]:.3f} s, longest {seconds[-1]:.3f} s, {slow} above a second")
    return 1 if slow or different else 0


def timed(run: Callable[[Any], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """The result of a second run, and its seconds."""
    run(Silent())
    started = time.monotonic()
    return run(Silent()), time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
