"""What the pack adds to ComfyUI's start: ComfyUI's own import times, with the pack attached, several starts.

The first start after an installation also compiles the pack's modules to bytecode; it has a column of its own.

    python benchmarks/startup.py             # appends a row to benchmarks/results/startup.csv

Needs a real ComfyUI (COMFYUI_PATH, else ~/comfy/ComfyUI); says so where there is none.
"""

from __future__ import annotations

import datetime
import re
import statistics
import sys
import tempfile
from pathlib import Path

from table import append

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent / "tests")  # the folder of the package `host`, as pytest has it

from host.server import NoHost, Server, find_host, tiny_home  # noqa: E402

STARTS, ALLOWED_SECONDS = 3, 0.3
IMPORT_TIME = re.compile(r"([\d.]+) seconds.*anygpu")


def start_seconds(attach: bool, folder: Path) -> tuple[float, float]:
    """Seconds until ComfyUI answered, and those that it gives for importing the pack.

    Args:
        folder: the base directory and the compiled modules. Every start takes the same one: bytecode is found again
            by the path of its source, and the pack's is inside.
    """
    server = Server(find_host(), folder / "base", tiny_home(), attach=attach, bytecode=folder / "bytecode")
    try:
        server.start()
        found = IMPORT_TIME.search(server.log)
        return server.start_seconds, float(found.group(1)) if found else 0.0
    finally:
        server.stop()


def main() -> None:
    """Measure, print, and append the row."""
    try:
        host = find_host()
    except NoHost as reason:
        print(f"skipped: {reason}")
        return
    with tempfile.TemporaryDirectory(prefix="anygpu-start-") as made:
        folder = Path(made)
        start_seconds(False, folder)  # ComfyUI's own bytecode, and the page cache
        _, first = start_seconds(True, folder)
        pairs = [(start_seconds(True, folder), start_seconds(False, folder)[0]) for _ in range(STARTS)]
    row = {
        "date": datetime.date.today().isoformat(),
        "comfyui": (host.root / "comfyui_version.py").read_text().split('"')[-2],
        "start_with_s": round(statistics.median(own for (own, _), _ in pairs), 2),
        "start_without_s": round(statistics.median(bare for _, bare in pairs), 2),
        "import_s": statistics.median(seconds for (_, seconds), _ in pairs),
        "first_import_s": first,
        "allowed_s": ALLOWED_SECONDS,
    }
    append("startup", [row])


if __name__ == "__main__":
    main()
