"""The tables of docs/core-models.md: ``python tests/host/core_page.py classes``, ``threads``, ``doctor``,
``release COMFYUI`` or ``merge PAGE ...``.

A release is run with the files that are named, or with all of :data:`SUITE`; what was not run keeps cells and day.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
PAGE = ROOT / "docs" / "core-models.md"
SUITE = {
    "Classes": "test_core_classes.py", "Fit": "test_core_fit.py", "Graphs": "test_core_fit_server.py",
    "Doctor": "test_doctor.py", "Samplers": "test_core_models.py", "Nodes": "test_core_nodes.py",
    "Counts": "test_core_counts.py", "Packed": "test_core_packed.py",
}  # fmt: skip
HEADS = {
    "classes": ("Double", "Class of core's", "Layers in safe fp16", "Attention under Fit", "Error", "Loud rows"),
    "releases": ("ComfyUI", "Commit", "Run on", *SUITE, "What failed"),
    "threads": ("Threads", "Reported", "Now", "Held by"),
    "doctor": ("Injected", "Runs", "Named and repaired", "Calls of a diagnosis, at most"),
}
DOCTORED = (
    "Wan 2.1", "LTXV", "Flux", "SD3", "HunyuanVideo", "Qwen-Image", "Lumina 2", "Z-Image", "Hunyuan3D 2", "Kandinsky 5",
)  # fmt: skip
FINITE = ("zeros", "saturation", "wrong scale", "swapped rows", "stale weights", "false attention")
NOT_FINITE = ("NaN in a weight", "infinity in a weight", "overflow", "attention of NaN", "passing NaN")
UNSAMPLED = ("RT_DETR_v4", "SAM3", "SAM31", "DepthAnything3")  # rows whose networks core's nodes call by themselves
STEADY = ["trained", "loud", "massive"]
ROWS = ["rows x16", "rows x100", "rows x1000", "rows x10000"]
NEAR = 2e-3  # relative to core's fp32: the rounding of fp16 operands


def table(name: str, page: Path = PAGE) -> list[list[str]]:
    """The cells of a table, without its head."""
    lines = page.read_text(encoding="utf-8").split(f"<!-- {name} -->")[1].split("<!-- end -->")[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]


def write(name: str, rows: Iterable[Sequence[str]], note: str = "") -> None:
    """Put a table into the page, with a line above it."""
    lines = [note, "", *(f"| {' | '.join(row)} |" for row in (HEADS[name], ["---"] * len(HEADS[name]), *rows))]
    text = PAGE.read_text(encoding="utf-8")
    made = f"<!-- {name} -->\n" + "\n".join(lines).strip() + "\n<!-- end -->"
    PAGE.write_text(re.sub(rf"<!-- {name} -->.*?<!-- end -->", lambda _: made, text, flags=re.DOTALL), encoding="utf-8")


def counts(found: dict[str, Any]) -> tuple[str, str]:
    """The cells of the layers and attention calls of one class."""
    kinds = {"own": "the network's own"}
    left = [f"{count} {kinds.get(kind, kind)}" for kind, count in sorted(found["kinds"].items()) if kind != "core"]
    left += [f"{found['fp32']} in fp32"] * bool(found["fp32"])
    left += [f"{found['before'][0]} before the call"] * bool(found["before"][0])
    calls = [f"{found['before'][1]} before the call"] * bool(found["before"][1])
    calls += [f"{found['direct']} torch's"] * bool(found["direct"])
    layers, attention = (f"{found['safe']} of {found['called']}", f"{found['attention'][0]} of {found['attention'][1]}")
    return tuple(  # type: ignore[return-value]
        f"{cell} ({', '.join(more)})" if more else cell for cell, more in ((layers, left), (attention, calls))
    )


def worst(found: dict[str, Any], scenes: Sequence[str]) -> str:
    """The largest error of some scenes, for the table."""
    finite = [found[scene]["fit"] for scene in scenes if found[scene]["finite"]]
    fault = f"{max(finite, default=0.0):.0e}".replace("e-0", "e-")
    most = [fault if max(finite) else "none"] if finite else []
    return ", ".join(most + ["core's own is not finite"] * (len(finite) < len(scenes)))


def _class(kind: str, about: dict[str, Any]) -> str:
    """A class, and how many rows of core's list it is."""
    count = list(about["classes"].values()).count(kind)
    return f"`{kind}`, {count} row{'s' if count > 1 else ''}"


def classes(inside: Any, chosen: Sequence[str]) -> None:
    """Count, measure and write the table of classes, or those of its rows that are named."""
    about = inside.play("core_sweep", "networks")
    known, rows = {row[0]: row for row in table("classes")} if chosen else {}, list[list[str]]()
    for name, kind in about["doubles"].items():
        if chosen and name not in chosen:
            rows.append([name, _class(kind, about), *known[name][2:]])
            continue
        found = inside.play("core_sweep", "reached", name=name)
        errors = inside.play("core_sweep", "errors", name=name, scenes=STEADY + ROWS, late=True)
        rows.append([name, _class(kind, about), *counts(found), worst(errors, STEADY), worst(errors, ROWS)])
        print(rows[-1], flush=True)
    for row in UNSAMPLED:
        rows.append([row, _class(about["classes"][row], about), "as loaded: called without the sampler", "", "", ""])
    write("classes", rows, f"Counted on ComfyUI {about['version']}, whose {len(about['classes'])} rows are "
          f"{len(set(about['classes'].values()))} classes.")  # fmt: skip


def doctor(inside: Any) -> None:
    """Inject faults, a third of them finite, run sound models, and write the table of both."""
    rows, most = list[tuple[str, ...]](), 0
    for faults, count in ((FINITE, 168), (NOT_FINITE, 335)):
        found = inside.play("doctor_faults", "many", names=list(DOCTORED), faults=list(faults), count=count)
        for fault in faults:
            rows.append((fault, str(found["tried"][fault]), str(found["right"][fault]), ""))
        most = max(most, found["runs"])
    tried, right = (sum(int(row[place]) for row in rows) for place in (1, 2))
    clean = inside.play("doctor_faults", "clean", names=list(DOCTORED), count=200)
    rows.append(("**all**", str(tried), f"{right} ({right / tried:.0%})", str(most)))
    rows.append(("nothing", str(clean["runs"]), f"{len(clean['said'])} alarms, {len(clean['changed'])} changed", ""))
    write("doctor", rows, f"On ComfyUI {inside.play('core_sweep', 'networks')['version']}, {datetime.date.today()}.")


def release(checkout: Path, columns: Sequence[str]) -> int:
    """Run files of :data:`SUITE` against a checkout of ComfyUI, write its row, and return pytest's status."""
    from host.server import find_host

    os.environ["COMFYUI_PATH"] = str(checkout)
    find_host()  # which says what is missing: every test would be skipped
    version = re.search(r'"(.+)"', (checkout / "comfyui_version.py").read_text(encoding="utf-8"))
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=checkout, capture_output=True, text=True)
    name, today = version[1] if version else "?", datetime.date.today().isoformat()
    rows = [row for row in table("releases") if row[:2] != [name, commit.stdout.strip()]]
    known = [row for row in table("releases") if row not in rows] or [[""] * len(HEADS["releases"])]
    row = dict(zip(HEADS["releases"], known[0], strict=True))
    oldest = today if {*columns} == {*SUITE} else row["Run on"] or today  # no cell is older
    row |= {"ComfyUI": name, "Commit": commit.stdout.strip(), "Run on": oldest}
    failed = [line for line in row["What failed"].split("; ") if line and line.split(":")[0] not in columns]
    status = 0
    for column in columns:
        cases, code = _run(ROOT / "tests/host" / SUITE[column])
        bad = [case.get("name", "") for case in cases if {"failure", "error"} & {each.tag for each in case}]
        kinds = Counter(each.get("type", "") for case in cases for each in case.iter("skipped"))
        wanted = kinds.pop("pytest.xfail", 0)
        counted = {"": len(cases) - len(bad) - wanted - kinds.total(), " wanted": wanted, " skipped": kinds.total()}
        counted[" failed"] = len(bad)
        row[column] = ", ".join(f"{count}{what}" for what, count in counted.items() if count or not what)
        failed += [f"{column}: {each.replace('|', '/')}" for each in bad]
        status = status or code
    row["What failed"] = "; ".join(failed)
    releases([*rows, [row[head] for head in HEADS["releases"]]])
    return status


def releases(rows: Iterable[Sequence[str]]) -> None:
    """Write the table of releases, the oldest first."""
    write("releases", sorted(rows, key=lambda row: ([int(part) for part in re.findall(r"\d+", row[0])], row[2])))


def _run(file: Path) -> tuple[list[ElementTree.Element], int]:
    """The test cases of a file and pytest's status."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not full", f"--junitxml={report}", str(file)]
        done = subprocess.run(command, cwd=ROOT)
        return list(ElementTree.parse(report).iter("testcase")) if report.is_file() else [], done.returncode


def main(asked: Sequence[str]) -> int:
    """Write the table that was asked for."""
    if asked[0] == "merge":  # the rows of pages that several machines wrote
        found = [row for page in (PAGE, *map(Path, asked[1:])) for row in table("releases", page)]
        releases({tuple(row[:2]): row for row in found}.values())
        return 0
    if asked[0] == "release":
        return release(Path(asked[1]).expanduser().resolve(), asked[2:] or list(SUITE))
    if asked[0] == "threads":
        from host.core_threads import THREADS

        write("threads", ([each.numbers, each.reported, each.now, f"`{each.test}`"] for each in THREADS))
        return 0
    from host.inside.asking import Inside
    from host.server import environment, find_host

    with tempfile.TemporaryDirectory() as folder:
        inside = Inside(find_host(), Path(folder), environment())
        doctor(inside) if asked[0] == "doctor" else classes(inside, asked[1:])
        inside.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
