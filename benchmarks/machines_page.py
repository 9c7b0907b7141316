"""Makes docs/machines.md of the files in benchmarks/machines, which people shared.

    python benchmarks/machines_page.py

A new machine: save the file of an issue there, under a name of its own, and run this. It refuses a file that AnyGPU
did not write, or that somebody edited.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "benchmarks" / "machines"
PAGE = ROOT / "docs" / "machines.md"
HEAD = """# Machines

Machines that AnyGPU was really run on, as their owners shared them. The button *Share this machine* in the AnyGPU tab
and `anygpu report --share` write such a file: device, driver, versions, the answers of the short tests, what `auto`
decides, and what the last runs cost. Both show the file before they write it, leave out paths and names, and send
nothing; paste it into an [issue](https://github.com/anygpu/anygpu/issues/new?template=hardware.yml) if you like.

This page is made from [benchmarks/machines](../benchmarks/machines) by `python benchmarks/machines_page.py`.

"""


def page() -> str:
    """The whole page."""
    from anygpu.pipelines.machines import page_of, read_machine

    return HEAD + page_of(read_machine(path) for path in sorted(FILES.glob("*.json")))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.exit(0)
