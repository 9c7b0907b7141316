"""Costs inside a real ComfyUI (COMFYUI_PATH, else ~/comfy/ComfyUI), on one thread.

`memory_host`: ways to share a device, simulated. Ours under ComfyUI's memory manager at shares of the full offloader,
whole parts moved by hand as other packs do it, and diffusers' own offload; the same heavy LTX-Video run twice.
"""

from __future__ import annotations

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
    Case("memory_host", memory_rows, {}, "memory_host", page=memory_page, lacks=no_host),
]
