"""What ways to share a device cost inside a real ComfyUI, simulated: ``python benchmarks/memory_host.py``.

Ours under ComfyUI's memory manager at shares of the full offloader, whole parts moved by hand as other packs do it, and
diffusers' own offload; the same heavy LTX-Video run twice. Rows go to ``results/memory_host.csv``, and the table of
`docs/memory.md` is written anew.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from memory import PAGE, ROOT, megabytes, written
from table import append, machine

sys.path.insert(0, str(ROOT / "tests"))

from host.inside.asking import Inside

from host.server import NoHost, environment, find_host

SHARES = (1.0, 0.6, 0.4, 0.25, 0.15)
COLUMNS = {
    "peak_bytes": "Peak MB",
    "first_to_device_bytes": "To the device MB, first run",
    "again_to_device_bytes": "Second run",
    "to_host_bytes": "To the host MB, both",
    "kept_bytes": "Kept on the device MB",
    "known_bytes": "Of that, known to ComfyUI",
}


def measured(folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """Bytes of the full offloader, and a row per way.

    Raises:
        NoHost: no ComfyUI on this machine. SystemExit: its process cannot play the simulated device.
    """
    worker = Inside(find_host(), folder, environment())
    try:
        if worker.reason:
            sys.exit(worker.reason)
        found = worker.play("ways", "compared", shares=list(SHARES))
    finally:
        worker.close()
    where = {**machine(), "torch": found["torch"], "comfyui": found["comfyui"]}
    rows = [{**where, "full_residency_bytes": found["full"], **row} for row in found["rows"]]
    return found["full"], rows


def main() -> None:
    """Measure, append the rows, and write the page."""
    folder = ROOT / ".build" / "memory"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        full, rows = measured(folder)
    except NoHost as reason:
        sys.exit(f"{PAGE.name} keeps its table of ComfyUI: {reason}")
    append("memory_host", rows)
    print(f"full residency {megabytes(full)} MB")
    written(
        "host",
        ["Way", *COLUMNS.values()],
        [[row["way"], *(megabytes(row[name]) for name in COLUMNS)] for row in rows],
    )


if __name__ == "__main__":
    main()
