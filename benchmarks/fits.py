"""Which published model fits which card, by the forecast alone: ``python benchmarks/fits.py``.

Nothing is run or measured: files of the published shapes, without weights, are forecast for cards of 6 to 24 GB. Writes
``benchmarks/results/fits.csv``, from which the README has its table.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

import published  # noqa: E402
from anygpu.pipelines.forecast.memory import fastest, forecasts  # noqa: E402
from anygpu.pipelines.load import folder as loading  # noqa: E402
from anygpu.pipelines.sizes import Size  # noqa: E402
from anygpu.pipelines.vae import plan  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "fits.csv"
CARDS = (6, 8, 12, 16, 24)
RUNS = {  # the sizes of the shipped workflows
    "ltx 2B": Size(704, 480, 97, True),
    "ltx 13B": Size(704, 480, 97, True),
    "hunyuan_video": Size(848, 480, 73),
    "hunyuan_video_15": Size(848, 480, 121, True),
    "framepack": Size(640, 608, 153),
    "mochi": Size(848, 480, 85, True),
}


def rows() -> list[dict[str, Any]]:
    """One row per model and card."""
    loading._host_room = lambda _: published.HOST_BYTES  # type: ignore[attr-defined]
    plan.host_free_bytes = lambda: published.HOST_BYTES  # type: ignore[attr-defined]
    made = []
    for model, size in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            pipeline = published.on_card(published.composed(model, Path(folder)))
            for card in CARDS:
                room = published.room_of(card)
                best = fastest(forecasts(pipeline, size, room), room)
                stages = {} if best is None else {stage.name: stage for stage in best.stages}
                made.append(
                    {
                        "model": model,
                        "width": size.width,
                        "height": size.height,
                        "frames": size.frames,
                        "card_gb": card,
                        "offload": "too much" if best is None else best.mode,
                        "peak_gib": "" if best is None else f"{best.peak / 2**30:.1f}",
                        "decode": stages["decoding"].form or "whole" if stages else "",
                    }
                )
                print(made[-1], flush=True)
    return made


if __name__ == "__main__":
    table = rows()
    with OUT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
