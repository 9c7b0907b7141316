"""Run every cell of the matrix and write docs/matrix.md: ``python tests/simulated/matrix_page.py`` (make matrix)."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "matrix.md"
CELL = re.compile(r"^(PASSED|FAILED|ERROR) .*test_cell\[(.+)\]")
MODES = ("none", "model", "group", "sequential")
HEAD = """# Every family on every simulated machine

Each cell runs prompt (and image), sampling and decode of a tiny model on the simulated accelerator with that
machine's faults switched on, in every offload mode, with precision `auto`, and is compared with fp32 on the CPU: within
1e-4 of the latents' length where the transformer computes in fp32, 2^-8 in fp16, 2^-3 in bf16. A cell names the modes
that held. Machines are in `tests/simulated/profiles.py`; `make test` runs a sample in which every pair occurs.

Commit {commit}, {date}. Made by `make matrix`.

"""


def main() -> int:
    """Run, write, and return pytest's status."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-n", "2", str(ROOT / "tests/simulated/test_matrix.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    held: dict[tuple[str, str], list[str]] = {}
    for line in done.stdout.splitlines():
        found = CELL.match(line)
        if found:
            rest, mode = found[2].rsplit("-", 1)
            family, machine = rest.split("-", 1)
            cell = held.setdefault((family, machine), [])
            if found[1] == "PASSED":
                cell.append(mode)
    if not held:
        print(done.stdout[-2000:])
        return 1
    families = list(dict.fromkeys(family for family, _ in held))
    machines = list(dict.fromkeys(machine for _, machine in held))
    rows = [f"| | {' | '.join(machines)} |", f"| --- |{' --- |' * len(machines)}"]
    for family in families:
        cells = [held.get((family, machine), []) for machine in machines]
        texts = ["all" if set(cell) == set(MODES) else ", ".join(cell) or "FAILS" for cell in cells]
        rows.append(f"| `{family}` | {' | '.join(texts)} |")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    PAGE.write_text(HEAD.format(commit=commit, date=datetime.date.today()) + "\n".join(rows) + "\n", encoding="utf-8")
    print(f"{PAGE}: {sum(map(len, held.values()))} of {len(families) * len(machines) * len(MODES)} cells held")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
