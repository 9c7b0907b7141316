"""What AnyGPU Doctor costs while nothing is wrong: ``python benchmarks/watching.py``.

Core's Wan at the width of its 1.3B release, with two blocks and 192 tokens, in a real ComfyUI on one thread: steps with
and without the doctor in turn, in one run, and what the doctor does by itself. A published step has more blocks and
tokens, of which the doctor sees none: it looks at the output. A row goes to ``results/watching.csv``.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from table import append, machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from host.inside.asking import Inside

from host.server import NoHost, environment, find_host

ROOT, REPEATS = Path(__file__).resolve().parents[1], 10


def main() -> None:
    """Measure, and append the row."""
    folder = ROOT / ".build" / "watching"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        worker = Inside(find_host(), folder, environment())
    except NoHost as reason:
        print(f"skipped: {reason}")
        return
    try:
        if worker.reason:
            print(f"skipped: {worker.reason}")
            return
        found = worker.play("doctor", "timed", repeats=REPEATS)
    finally:
        worker.close()
    plain, watched = (statistics.median(found[name]) for name in ("plain", "watched"))
    row = {
        **machine(),
        "torch": found["torch"],
        "comfyui": found["comfyui"],
        "repeats": REPEATS,
        "plain_ms": round(plain, 1),
        "watched_ms": round(watched, 1),
        "ratio": round(watched / plain, 4),
        "doctor_alone_ms": round(found["alone"], 3),
        "share_of_a_step": round(found["alone"] / plain, 5),
    }
    append("watching", [row])


if __name__ == "__main__":
    main()
