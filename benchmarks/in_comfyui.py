"""Costs inside a real ComfyUI (COMFYUI_PATH, else ~/comfy/ComfyUI), on one thread.

`watching`: what AnyGPU Doctor costs while nothing is wrong. Core's Wan at the width of its 1.3B release, with two
blocks and 192 tokens: steps with and without the doctor in turn, and the doctor by itself. A published step has more
blocks and tokens, of which the doctor sees none: it looks at the output.

`memory_host`: ways to share a device, simulated. Ours under ComfyUI's memory manager at shares of the full offloader,
whole parts moved by hand as other packs do it, and diffusers' own offload; the same heavy LTX-Video run twice.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from memory import megabytes
from runner import SCRATCH, Case, Row, write_table

SHARES = (1.0, 0.6, 0.4, 0.25, 0.15)
COLUMNS = {
    "peak_bytes": "Peak MB",
    "first_to_device_bytes": "To the device MB, first run",
    "again_to_device_bytes": "Second run",
    "to_host_bytes": "To the host MB, both",
    "kept_bytes": "Kept on the device MB",
    "known_bytes": "Of that, known to ComfyUI",
}


def no_host() -> str:
    """The reason why no ComfyUI can be started, or nothing."""
    from host.server import NoHost, find_host

    try:
        find_host()
    except NoHost as reason:
        return str(reason)
    return ""


def played(script: str, act: str, **options: Any) -> dict[str, Any]:
    """The result of a scene of tests/host/inside in a ComfyUI.

    Raises:
        SystemExit: its process cannot play the scene.
    """
    from host.inside.asking import Inside

    from host.server import environment, find_host

    worker = Inside(find_host(), SCRATCH, environment())
    try:
        if worker.reason:
            raise SystemExit(worker.reason)
        result: dict[str, Any] = worker.play(script, act, **options)
        return result
    finally:
        worker.close()


def watching_rows(repeats: int) -> Iterator[Row]:
    """One row: a step with and without the doctor."""
    result = played("doctor", "timed", repeats=repeats)
    plain, watched = (statistics.median(result[name]) for name in ("plain", "watched"))
    yield {
        "torch": result["torch"],
        "comfyui": result["comfyui"],
        "repeats": repeats,
        "plain_ms": round(plain, 1),
        "watched_ms": round(watched, 1),
        "ratio": round(watched / plain, 4),
        "doctor_alone_ms": round(result["alone"], 3),
        "share_of_a_step": round(result["alone"] / plain, 5),
    }


def memory_rows() -> Iterator[Row]:
    """A row per way."""
    result = played("ways", "compared", shares=list(SHARES))
    known = {"torch": result["torch"], "comfyui": result["comfyui"], "full_residency_bytes": result["full"]}
    yield from (known | row for row in result["rows"])


def memory_page(rows: list[Row]) -> None:
    """Write the table of docs/memory.md."""
    cells = [[row["way"], *(megabytes(row[name]) for name in COLUMNS)] for row in rows]
    write_table("memory.md", "host", ["Way", *COLUMNS.values()], cells)


CASES = [
    Case("watching", watching_rows, {"repeats": 10}, "watching", lacks=no_host),
    Case("memory_host", memory_rows, {}, "memory_host", page=memory_page, lacks=no_host),
]
