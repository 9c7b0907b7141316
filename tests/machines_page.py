"""Makes the tables of docs/machines.md of the files in benchmarks/machines, which people shared: machines and proofs.

A new one: save the file of an issue there, under a name of its own, and run ``python tests/machines_page.py``. It
refuses a file that AnyGPU did not write, or that somebody edited. Machines are never averaged: of one device with one
driver and torch the newest proof stands.
"""

from collections.abc import Iterable
from pathlib import Path

from anygpu.compat.errors import InputError
from anygpu.compat.proof import HEAD as PROOF
from anygpu.compat.proof import Figure, Proof, proof_in
from anygpu.compat.records import FIX, json_in, parse, shown
from anygpu.pipelines.records.machines import HEAD as KEY
from anygpu.pipelines.records.machines import VERSION, SharedMachine, short

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "benchmarks" / "machines"
PAGE = ROOT / "docs" / "machines.md"
COMPARED = ("of the bound", "of the largest", "eps")  # units of errors
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
    texts = [path.read_bytes() for path in sorted(FILES.glob("*.json"))]
    proofs = [text for text in texts if PROOF.encode() in text[:200]]
    machines = [machine_in(text) for text in texts if text not in proofs]
    return page_of(machines) + proofs_of(map(proof_in, proofs))


def proofs_of(proofs: Iterable[Proof]) -> str:
    """A table for each device: what was measured in each part, beside what is modelled; of what was compared, how much
    was right."""
    newest: dict[tuple[str, ...], Proof] = {}
    for one in sorted(proofs, key=lambda one: one.date):
        newest[one.device, one.driver, one.versions.get("torch", "")] = one
    lines = ["", "## Proofs", ""]
    for one in sorted(newest.values(), key=lambda one: (one.backend, one.device, one.date)):
        versions = ", ".join(f"{name} {one.versions[name]}" for name in ("torch", "triton") if name in one.versions)
        about = ", ".join(filter(None, (one.driver and f"driver {one.driver}", versions, one.date)))
        lines += [f"### {' '.join(one.device.split())}", "", f"{about}. Measured; in brackets what is modelled.", ""]
        lines += ["| Part | Compared | Figures |", "| --- " * 3 + "|"]
        for part in one.parts:
            compared = [each for each in part.figures if each.unit in COMPARED or each.fault]
            wrong = [f"{each.what}: {each.fault}" for each in compared if each.fault]
            right = f"{len(compared) - len(wrong)} of {len(compared)} right" if compared else "-"
            timed = [told(each) for each in part.figures if each not in compared and part.name != "probes"]
            if compared or timed:
                lines.append(row_of(part.name, "; ".join([right, *wrong]), "; ".join(timed) or "-"))
        lines.append("")
    return "\n".join(lines if newest else [*lines, "None was shared yet.", ""])


def told(figure: Figure) -> str:
    """One figure with its unit."""
    modelled = "" if figure.modelled is None else f" ({short_of(figure.modelled)})"
    return f"{figure.what}: {short_of(figure.measured)}{modelled} {figure.unit}"


def short_of(value: float | None) -> str:
    """Three digits of a number."""
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


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
