"""Memory runs out at a random forward: the run goes on or says what to lower, and the next run equals the first.

Every wording in every class is used in turn, and every pipeline.

Run: python tests/runs/shortages.py [--count 300] [--seed 0]
"""

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

from runs.subjects import Raising, Subject, arguments_of, forwards, subjects

NEAR = 2e-2  # frames in 0..1: another way to decode, such as tiles, shows seams
WORDS = [(kind, (text,)) for kind in (RuntimeError, torch.OutOfMemoryError) for text in MESSAGES]
WORDS += [(MemoryError, ()), (OSError, (errno.ENOMEM, "Cannot allocate memory"))]


def outcome_of(subject: Subject, wanted: torch.Tensor, raising: Raising) -> str:
    """``survived`` or ``explained``, or what went wrong."""
    with raising:
        try:
            near = (subject.run(Silent()) - wanted).abs().max() <= NEAR
            outcome = "survived" if near else "wrong"
        except Exception as raised:
            told = isinstance(raised, PackError) or {"expected", "fix"} <= parts_of(str(raised)).keys()
            outcome = "explained" if told else f"raw {type(raised).__name__}"
    return outcome if torch.equal(subject.run(Silent()), wanted) else f"{outcome}, the next run differs"


def main() -> int:
    """Inject ``--count`` shortages; 1 where one was neither survived nor explained, or a later run differs."""
    arguments = arguments_of(__doc__, 300)
    rng, counts, words = random.Random(arguments.seed), Counter[str](), list(WORDS)
    rng.shuffle(words)
    with tempfile.TemporaryDirectory() as folder:
        runs = list(subjects(Path(folder)).items())
        known = [(subject.run(Silent()), forwards(subject)) for _, subject in runs]
        for index in range(arguments.count):
            (name, subject), (wanted, total) = runs[index % len(runs)], known[index % len(runs)]
            kind, text = words[index % len(words)]
            at = rng.randint(1, total)
            raising = Raising(subject, at, kind(*text))
            outcome = outcome_of(subject, wanted, raising)
            counts[f"{name}, {raising.part}: {outcome}"] += 1
            if outcome not in ("survived", "explained"):
                print(f"{index}: {name}, {kind.__name__}{text} before forward {at} of {total}: {outcome}", flush=True)
    for line, count in sorted(counts.items()):
        print(f"{line}: {count}")
    ways = Counter(line.rpartition(": ")[2] for line in counts.elements())
    print(f"{ways.total()} shortages in {min(len(words), ways.total())} words: {dict(ways)}")
    return 1 if ways.keys() - {"survived", "explained"} else 0


if __name__ == "__main__":
    sys.exit(main())
