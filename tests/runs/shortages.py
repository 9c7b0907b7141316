"""Memory runs out at a random forward: the run goes on or says what to lower, and the next run equals the first.

Run: python tests/runs/shortages.py [--count 300] [--seed 0]
"""

from __future__ import annotations

import errno
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from anygpu.compat.errors import PackError, parts_of
from anygpu.pipelines.base import Silent

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hostile.test_failures import MESSAGES

from runs.subjects import NAMES, arguments_of, forwards, raising, subject

NEAR = 2e-2  # frames in 0..1: another way to decode, such as tiles, shows seams
CLASSES = (RuntimeError, torch.OutOfMemoryError)


def injected(rng: random.Random) -> BaseException:
    """An error as a back end raises it."""
    if rng.random() < 0.1:
        return rng.choice((MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")))
    return rng.choice(CLASSES)(rng.choice(MESSAGES))


def main() -> int:
    """Inject ``--count`` shortages; 1 where one was neither survived nor explained, or a later run differs."""
    arguments = arguments_of(__doc__, 300)
    rng, counts, failed = random.Random(arguments.seed), Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            run = subject(name, Path(folder))
            wanted, total = run(Silent()), forwards(run)
            for index in range(arguments.count // len(NAMES)):
                error, at = injected(rng), rng.randint(1, total)
                handle = raising(at, error)
                try:
                    found = run(Silent())
                    outcome = "survived" if (found - wanted).abs().max() <= NEAR else "wrong"
                except Exception as raised:
                    told = isinstance(raised, PackError) or {"expected", "fix"} <= parts_of(str(raised)).keys()
                    outcome = "explained" if told else f"raw {type(raised).__name__}"
                finally:
                    handle.remove()
                later = "" if torch.equal(run(Silent()), wanted) else ", the next run differs"
                counts[f"{name} {outcome}{later}"] += 1
                if outcome not in ("survived", "explained") or later:
                    failed += 1
                    where = f"{type(error).__name__} {error} before forward {at} of {total}"
                    print(f"{name} {index}: {where}: {outcome}{later}")
    for text, count in sorted(counts.items()):
        print(f"{text}: {count}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
