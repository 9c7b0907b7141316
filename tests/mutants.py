"""Plant small faults in each room and count those that the nearest tests see: ``python tests/mutants.py`` (make
test-mutants), by default 60 in each room, always the same ones.

A fault is planted in a copy of the tree, and the test files nearest to it run there: the one with its name, those that
import its file, those one import away. A row a fault goes to ``benchmarks/results/mutants.csv``; a fault with a row is
not run again. ``--report`` prints the score of each room and the faults that nobody saw.
"""

from __future__ import annotations

import argparse
import ast
import csv
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "mutants.csv"
COPY = ROOT / ".build" / "mutants" / "anygpu"
ROOMS = ("nodes", "host", "compat", "kernels", "pipelines", "paint", "farm")
HOST_ONLY = ("host", "browser", "runs", "published", "tiny", "fixtures", "golden")
NEAREST, SECONDS, SEED = 5, 120, 33
MARKS = "not full and not farm and not host and not browser and not machine"
COLUMNS = ("room", "file", "line", "kind", "before", "after", "verdict", "seen_by", "seconds")
SWAPS: dict[type, type] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
}  # fmt: skip
INTERPRETED = "test_interpreted.py"  # runs scripts that import the Triton kernels
QUIET = ("log.", "logging.", "warnings.", "gc.")  # what is called for a person or for speed alone


class Fault(NamedTuple):
    """One change of the source: the text from ``start`` to ``end``, in characters of the file, becomes ``after``."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    @property
    def key(self) -> tuple[str, ...]:
        return self.file, self.kind, self.before, self.after


def changed(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """(kind, the node to replace, what it becomes) of each change that can be made at ``node``."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        other = ast.Compare(node.left, [SWAPS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
        yield "comparison", node, other
        if isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE)):
            edge = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}[type(node.ops[0])]()
            yield "off by one", node, ast.Compare(node.left, [edge, *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield "and, or", node, ast.BoolOp(SWAPS[type(node.op)](), node.values)
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS and not isinstance(node.left, ast.Constant):
        yield "arithmetic", node, ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node, node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", node, ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield "constant", node, ast.Constant(node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield "condition", node, ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "return early", node, ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Expr) and not ast.unparse(node.value).startswith((*QUIET, "'", '"', "yield")):
        yield "left out", node, ast.Pass()


def seen_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below ``node`` that run: no annotation, no text of an error, nothing for the type checker alone."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, (ast.Raise, ast.JoinedStr)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and "TYPE_CHECKING" not in ast.unparse(getattr(child, "test", ast.Pass())):
                yield child
                yield from seen_nodes(child)


def faults_in(file: str) -> list[Fault]:
    """Every fault that can be planted in a file of ours."""
    text = (ROOT / file).read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw, found = text.encode(), []
    for node in seen_nodes(ast.parse(text)):
        for kind, old, new in changed(node):
            start, end = (starts[row - 1] + column for row, column in _place(old))
            after = ast.unparse(ast.fix_missing_locations(new))
            after = f"({after})" if isinstance(new, ast.expr) and not isinstance(new, ast.Constant) else after
            found.append(Fault(file, old.lineno, kind, start, end, raw[start:end].decode(), after))  # type: ignore[attr-defined]
    return found


def _place(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]


def chosen(room: str, count: int) -> list[Fault]:
    """The first ``count`` faults of a room in an order that stays: each file counts by the faults it can have."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / room).rglob("*.py"))
    faults = [fault for file in files for fault in faults_in(file)]
    random.Random(f"{SEED} {room}").shuffle(faults)
    return faults[:count]


@cache
def modules_of(path: Path) -> frozenset[str]:
    """The modules of ours that a file imports, or names as ``anygpu.…``, without that."""
    own = path.relative_to(ROOT).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            package = ".".join(own[: len(own) - node.level]) if node.level and own[0] != "tests" else ""
            base = ".".join(filter(None, (package, node.module)))
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("anygpu."):
            found.add(node.value)
    return frozenset(name.removeprefix("anygpu.") for name in found)


@cache
def test_files() -> list[Path]:
    tests = (ROOT / "tests").rglob("test_*.py")
    return sorted(path for path in tests if path.relative_to(ROOT / "tests").parts[0] not in HOST_ONLY)


def nearest(file: str) -> list[str]:
    """The test files nearest to a file of ours, the nearest first."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    sources = (path for room in ROOMS for path in (ROOT / room).rglob("*.py") if module in modules_of(path))
    users = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources}
    inside = file.startswith(("nodes/", "host/"))
    ranked = []
    for path in test_files():
        imported, parts = modules_of(path), path.relative_to(ROOT / "tests").parts
        mirrored = path.stem == f"test_{Path(file).stem}" and parts[:-1] == Path(file).parts[: len(parts) - 1]
        through = inside and "small_comfyui" in imported
        runs = 8 * (path.name == INTERPRETED and "_triton" in file)
        score = runs + 8 * mirrored + 4 * (module in imported or through) + 2 * bool(users & imported)
        score += parts[0] == Path(file).parts[0]
        if score:
            ranked.append((-score, len(imported), str(path.relative_to(ROOT))))
    return [name for _, _, name in sorted(ranked)[:NEAREST]]


def copied() -> None:
    """Make the copy of the tree what the tree is; what is built, such as tiny checkpoints, is shared with it."""
    COPY.mkdir(parents=True, exist_ok=True)
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        (COPY / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy2(ROOT / name, COPY / name)
    if not (COPY / ".build").exists():
        (COPY / ".build").symlink_to(ROOT / ".build", target_is_directory=True)


def run(*tests: str) -> str | None:
    """The first test that fails in the copy; empty for none, None where time ran out."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:xdist", "-m", MARKS, *tests]
    variables = {**os.environ, "PYTHONPATH": str(COPY.parent), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=COPY, env=variables, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return None
    told = (line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR ")))
    failed = (line.partition(" ")[2].partition(" - ")[0] for line in told)
    return next(failed, tests[0]) if done.returncode else ""


@cache
def passes(test: str) -> bool:
    return run(test) == ""


def judged(fault: Fault) -> tuple[str, str]:
    """(killed, survived, time, no tests or unjudged; the test that saw it) of a fault that is planted meanwhile."""
    tests, target = nearest(fault.file), COPY / fault.file
    if not tests:
        return "no tests", ""
    raw = (ROOT / fault.file).read_bytes()
    target.write_bytes(raw[: fault.start] + fault.after.encode() + raw[fault.end :])
    try:
        seen = run(*tests)
    finally:
        target.write_bytes(raw)
    if not seen:
        return ("time" if seen is None else "survived"), ""
    return ("killed" if passes(seen) else "unjudged"), seen  # else that test fails without the fault too


def known() -> dict[tuple[str, ...], dict[str, str]]:
    if not RESULTS.is_file():
        return {}
    with RESULTS.open(newline="", encoding="utf-8") as rows:
        return {tuple(row[name] for name in ("file", "kind", "before", "after")): row for row in csv.DictReader(rows)}


def report() -> None:
    """Print the score of each room, and what was seen by nobody."""
    rows = list(known().values())
    for room in ROOMS:
        counts = Counter(row["verdict"] for row in rows if row["room"] == room)
        judged_ones = counts["killed"] + counts["survived"] + counts["no tests"]
        share = counts["killed"] / judged_ones if judged_ones else 0
        print(f"{room}: {counts['killed']} of {judged_ones} killed ({share:.0%}), {counts['time']} out of time")
    for row in rows:
        if row["verdict"] != "killed":
            print(f"{row['verdict']}: {row['file']}:{row['line']} {row['before']!r} -> {row['after']!r}")


def main() -> None:
    """Plant what has no row yet, a room after the other in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rooms", nargs="*", default=ROOMS)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--report", action="store_true", help="only print what is known")
    given = parser.parse_args()
    faults = {room: chosen(room, given.count) for room in ([] if given.report else given.rooms)}
    copied()
    for room, fault in ((room, faults[room][index]) for index in range(given.count) for room in faults):
        if fault.key in known():
            continue
        started, is_new = time.monotonic(), not RESULTS.is_file()
        verdict, seen_by = judged(fault)
        told = (room, fault.file, fault.line, fault.kind, fault.before, fault.after, verdict, seen_by)
        with RESULTS.open("a", newline="", encoding="utf-8") as rows:
            table = csv.writer(rows)
            table.writerows([COLUMNS] * is_new + [(*told, round(time.monotonic() - started, 1))])
        print(f"{verdict}: {fault.file}:{fault.line} {fault.before!r} -> {fault.after!r} {seen_by}", flush=True)
    report()


if __name__ == "__main__":
    main()
