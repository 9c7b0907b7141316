"""Ours beside others with the same weights: steps, decodes, and reading of files; one thread, processor time.

Under the interpreter of a real ComfyUI (COMFYUI_PATH, else ~/comfy/ComfyUI), which plays tests/host/inside/peers.py.
Published widths, one block of each kind, random weights, fp32 but for one decoder, text that is encoded already. Core
reads the weights from one file in the names of their release. Reading copies each tensor once, from the page cache.

All ways run in turn in one process, in a new order each round. A ratio is the median of the rounds' ratios; low to high
holds that median with 95 %, by order statistics, whatever the distribution. Where 1 is outside, the difference is
beyond noise. Each way's peak of resident memory is taken in a process of its own, weights and mapped files included.
Results that differ fail, whatever their times.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from runner import HERE, ROOT, Row

AGREE = {"fp32": 1e-3, "bf16": 0.05}  # largest difference, of the span of what is expected; of files none
CHILD = f"""
import sys
from pathlib import Path
sys.path[:1] = sys.argv[1], *{[str(ROOT / "tests"), str(HERE)]!r}
from comfy.cli_args import args
args.use_pytorch_cross_attention = True  # as core does on every GPU
from host.inside import worker
worker.start(Path(sys.argv[1]))
from host.inside import peers
peers.tell(sys.argv[2])
"""


def peer_rows(**options: Any) -> Iterator[Row]:
    """A row per family, stage, text and peer, then per file and reader."""
    from host.inside.worker import ANSWER

    from host.server import find_host

    host = find_host()
    command = [str(host.python), "-c", CHILD, str(host.root), json.dumps(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if line.startswith(ANSWER):
                yield from rows_of(**json.loads(line.removeprefix(ANSWER)))
    if process.returncode:
        raise SystemExit(f"ComfyUI's process ended with {process.returncode}")


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Bounds of the median with 95 %, or the ends of fewer than six ratios."""
    ordered, count = sorted(ratios), len(ratios)
    below = [sum(math.comb(count, n) for n in range(cut + 1)) / 2**count for cut in range(count // 2)]
    cut = max((cut for cut, share in enumerate(below) if 2 * share <= 0.05), default=0)
    return ordered[cut], ordered[-1 - cut]


def rows_of(
    asked: Row, pairs: int, peaks: dict[str, int], apart: dict[str, float], seconds: dict[str, Any], versions: Row
) -> Iterator[Row]:
    """A row per way but ours."""
    ours = seconds.pop("ours")
    text = "" if "tokens" not in asked else f"{asked['tokens']} tokens{', padded' if 'padded' in asked else ''}"
    for way, theirs in seconds.items():
        ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
        low, high = interval(ratios)
        yield {
            "family": asked["family"], "stage": asked["stage"], "text": text,
            "size": "x".join(map(str, asked.get("size", ()))), "precision": asked["precision"],
            "peer": f"{way} {versions[way]}".strip(), "pairs": pairs,
            "peer_s": round(statistics.median(theirs), 4), "ours_s": round(statistics.median(ours), 4),
            "ratio": round(statistics.median(ratios), 3), "low": round(low, 3), "high": round(high, 3),
            "verdict": "differs" if not apart.get(way, 0.0) <= AGREE.get(asked["precision"], 0.0)
            else "slower" if low > 1 else "faster" if high < 1 else "",
            "difference": f"{apart[way]:.1e}" if way in apart else "", "peer_peak_mb": round(peaks[way] / 1e6),
            "ours_peak_mb": round(peaks["ours"] / 1e6),
        }  # fmt: skip


def fails(row: Row) -> bool:
    """Tell whether a result is another, or a step slower than core's beyond noise."""
    slower = row["verdict"] == "slower" and row["stage"] == "sampling" and row["peer"].startswith("core")
    return slower or row["verdict"] == "differs"
