"""Makes the tables of docs/machines.md of the files in benchmarks/machines, which people shared.

A new machine: save the file of an issue there, under a name of its own, and run ``python tests/machines_page.py``. It
refuses a file that AnyGPU did not write, or that somebody edited.
"""

from collections.abc import Iterable
from pathlib import Path

from anygpu.compat.errors import InputError
from anygpu.compat.records import FIX, json_in, parse, shown
from anygpu.pipelines.records.machines import HEAD as KEY
from anygpu.pipelines.records.machines import VERSION, SharedMachine, short

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "benchmarks" / "machines"
PAGE = ROOT / "docs" / "machines.md"
MOST_BYTES = 256 * 1024


def machine_in(text: str | bytes) -> SharedMachine:
    """The machine that a shared file describes.

    Raises:
        InputError: no such file, a newer version, an unknown field, a value of a wrong type, or more than one shares.
    """
    if len(text) > MOST_BYTES:
        raise InputError(
            f"a machine of {len(text)} bytes", expected=f"at most {MOST_BYTES}", fix="Write the file again."
        )
    record = json_in(text, "the machine")
    if not isinstance(record, dict) or type(record.get(KEY)) is not int or record[KEY] < 1:
        raise InputError(
            f"{shown(record)} instead of a machine", expected=f'an object with "{KEY}": {VERSION}', fix=FIX
        )
    if record[KEY] > VERSION:
        raise InputError(
            f"a machine of version {record[KEY]}", expected=f"version {VERSION} or older", fix="Update AnyGPU."
        )
    plainly = {name: value for name, value in record.items() if name != KEY}
    if short(plainly) != plainly:
        raise InputError(
            "a machine with longer texts or lists than AnyGPU writes", expected="a file that was not edited", fix=FIX
        )
    return parse(SharedMachine, plainly, "the machine")


def page() -> str:
    """The tables of the page, of all files."""
    return page_of(machine_in(path.read_bytes()) for path in sorted(FILES.glob("*.json")))


def page_of(machines: Iterable[SharedMachine]) -> str:
    """The tables of ``docs/machines.md``, one row per machine and per run."""
    rows = sorted(machines, key=lambda one: (one.backend, one.device, one.memory_gb))
    lines = ["| Device | Backend | Memory | Driver | torch | Probes | LTX-Video runs in |", "| --- " * 7 + "|"]
    runs = ["| Device | Pipeline | Stage | Offload | Seconds | Peak, GB | Moved, GB |", "| --- " * 7 + "|"]
    for one in rows:
        statuses = [answer.status for answer in one.answers]
        probes = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        cells = (one.device, f"{one.backend} {one.arch}".strip(), f"{one.memory_gb:g} GB", one.driver or "-")
        more = (one.versions.get("torch", "-"), probes or "-", next(iter(one.precision.values()), "-"))
        lines.append(row_of(*cells, *more))
        for run in one.runs:
            figures = f"{run.seconds:g}", f"{run.peak_gb or '-'}", f"{run.moved_gb or '-'}"
            runs.append(row_of(one.device, run.pipeline, run.stage, run.mode, *figures))
    return "\n".join([*lines, "", "## Runs", "", *(runs if len(runs) > 2 else ["None was shared yet."])]) + "\n"


def row_of(*cells: str) -> str:
    """A row of a table; what somebody else wrote cannot leave its cell."""
    escaped = (" ".join(cell.split()).replace("|", "\\|").replace("<", "&lt;") for cell in cells)
    return f"| {' | '.join(escaped)} |"


if __name__ == "__main__":
    prose = PAGE.read_text(encoding="utf-8").partition("| Device | Backend |")[0]
    PAGE.write_text(prose + page(), encoding="utf-8")
