"""Plant small faults in each room and count those that the nearest tests see: ``python tests/mutants.py`` (make
test-mutants), by default 60 in each room, always the same ones.

First every fast test runs once, and the lines of ours that it runs are kept. A fault is planted in a copy of the tree,
and the tests that run its line run there, those of the nearest files first. Where none does, as when a module is
imported, those that run the lines that read its name; else the files with its name and those that import it. A row
a fault goes to ``benchmarks/results/mutants.csv``; a fault with a row runs again only with ``--again``, if it was not
seen. One that changes nothing is called ``equivalent`` there by hand, with the reason. ``--report`` prints the score
of each room and the faults that nobody saw.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import csv
import hashlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from py_compile import PycInvalidationMode
from types import FrameType
from typing import Any, NamedTuple

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "mutants.csv"
COPY = ROOT / ".build" / "mutants" / "anygpu"
COVERAGE = COPY.parent / "coverage.pickle"
ROOMS = ("nodes", "host", "compat", "kernels", "pipelines", "paint", "farm")
HOST_ONLY = ("host", "browser", "runs", "published", "tiny", "fixtures", "golden")
NEAREST, SEED = 5, 33
MEASURED_SECONDS, ALONE = 10, 6  # of the processor: tests for a fault, and what they may need beside their own
MARKS = "not full and not farm and not host and not browser and not machine"
COLUMNS = ("room", "file", "line", "kind", "before", "after", "verdict", "seen_by")
KEY = ("file", "kind", "before", "after")
SWAPS: dict[type, type] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
}  # fmt: skip
ELSEWHERE = ("test_wheel.py", "test_archive.py")  # which run ours in other processes
INTERPRETED = "test_interpreted.py"  # runs scripts that import the Triton kernels
QUIET = ("log.", "logging.", "warnings.", "gc.")  # what is called for a person or for speed alone
TELLING = re.compile(
    r"(.*\.)?(say|notify|print|write_line|debug|info|warning|warn|collect)"
)  # whose arguments are words
WAITING = re.compile(r"(.*\.)?(sleep|wait|token_hex|manual_seed)")  # whose numbers are a pace, a length or a seed
GUARDS = ("strict", "exc_info", "stacklevel", "flush", "daemon")  # arguments that change no result
NEVER_EQUAL = re.compile(r"\bclock\(|monotonic|perf_counter|time\.time\(|seconds\b|\d\.\d|\de-|[^/]/[^/]|random", re.I)


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
        if isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) and not NEVER_EQUAL.search(ast.unparse(node)):
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
    """The nodes below ``node`` that change a result: no annotation, no words of an error or a message, no guard, no
    pace of a loop that polls, no random name's length, no digits of ``round``, nothing for the type checker alone."""
    if isinstance(node, (ast.Raise, ast.JoinedStr)) or (isinstance(node, ast.keyword) and node.arg in GUARDS):
        return
    if isinstance(node, ast.Call) and (TELLING.fullmatch(ast.unparse(node.func)) or _is_pace(node)):
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "round":
        node = ast.Expr(node.args[0])  # and not its digits
    polls = isinstance(node, ast.While) and any(map(_is_pace, node.body))
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or (polls and name == "test"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and "TYPE_CHECKING" not in ast.unparse(getattr(child, "test", ast.Pass())):
                yield child
                yield from seen_nodes(child)


def _is_pace(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and bool(WAITING.fullmatch(ast.unparse(call.func)))


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
    """The first ``count`` faults of a room in an order by their hash, which a change elsewhere leaves as it is; each
    file counts by the faults it can have."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / room).rglob("*.py"))
    faults = {fault.key: fault for file in files for fault in faults_in(file)}
    return [faults[key] for key in sorted(faults, key=lambda key: hashlib.sha256(f"{SEED}{key}".encode()).digest())][
        :count
    ]


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


def nearness(file: str) -> dict[str, int]:
    """How near each test file is to a file of ours, above 0: by name, by what it imports, and one import away."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    sources = (path for room in ROOMS for path in (ROOT / room).rglob("*.py") if module in modules_of(path))
    users = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources}
    inside = file.startswith(("nodes/", "host/"))
    scores = {}
    for path in test_files():
        imported, parts = modules_of(path), path.relative_to(ROOT / "tests").parts
        names = (f"test_{Path(file).stem}", f"test_{Path(file).parts[0]}")
        mirrored = path.stem in names and parts[:-1] == Path(file).parts[: len(parts) - 1]
        through = inside and "small_comfyui" in imported
        runs = 8 * (path.name == INTERPRETED and "_triton" in file)
        score = runs + 8 * mirrored + 4 * (module in imported or through) + 2 * bool(users & imported)
        scores[str(path.relative_to(ROOT))] = score + (parts[0] == Path(file).parts[0])
    return {name: score for name, score in scores.items() if score}


class Measured(NamedTuple):
    """What one test ran: the processor's seconds, and of each file of ours a number whose bit n stands for line n."""

    seconds: float
    lines: dict[str, int]

    def runs(self, lines: dict[str, int]) -> bool:
        return any(self.lines.get(file, 0) & wanted for file, wanted in lines.items())


class Tracing:
    """Pytest's plugin that measures every test."""

    def __init__(self) -> None:
        self.tests: dict[str, Measured] = {}
        self.failed: set[str] = set()  # in a copy that is no repository
        self.ours = {str(path): str(path.relative_to(COPY)) for room in ROOMS for path in (COPY / room).rglob("*.py")}
        self.lines: dict[str, set[int]] = {}

    def enter(self, frame: FrameType, event: str, given: Any) -> Callable[..., Any] | None:
        lines = self.lines.get(frame.f_code.co_filename)
        if lines is None or frame.f_code.co_name == "<module>":  # which runs in whatever test is first
            return None

        def at(frame: FrameType, event: str, given: Any) -> Callable[..., Any]:
            lines.add(frame.f_lineno)
            return at

        return at

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped:
            self.failed.add(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.lines = {file: set() for file in self.ours}
        started = time.process_time()
        threading.settrace(self.enter)
        sys.settrace(self.enter)
        done = yield
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        ran = {self.ours[file]: sum(1 << line for line in lines) for file, lines in self.lines.items() if lines}
        self.tests[item.nodeid] = Measured(time.process_time() - started, ran)
        return done


def coverage() -> dict[str, Measured]:
    """Each test and what it ran; a test file is run again when its text, or a file of ours that it ran, is another."""
    paths = (path for path in (ROOT / "tests").rglob("test_*.py") if path.name not in ELSEWHERE)
    files = {str(path.relative_to(ROOT)) for path in paths}
    found: dict[str, tuple[str, dict[str, Measured]]] = pickle.loads(_bytes(COVERAGE)) if COVERAGE.is_file() else {}
    found = {name: row for name, row in found.items() if name in files and row[0] == digest_of(name, row[1])}
    for folder in sorted({str(Path(name).parent) for name in files - set(found)}):
        new = [name for name in sorted(files - set(found)) if str(Path(name).parent) == folder]
        found |= forked(lambda new=new: measured(new), seconds=3600)[1]
        COVERAGE.write_bytes(pickle.dumps(found))
        print(f"measured {len(new)} files of {folder}", flush=True)
    compileall.compile_dir(COPY, quiet=2, force=True, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    return {test: row for _, tests in found.values() for test, row in tests.items()}


def digest_of(name: str, tests: dict[str, Measured]) -> str:
    ran = sorted({file for row in tests.values() for file in row.lines})
    return hashlib.sha256(b"".join(_bytes(ROOT / file) for file in (name, *ran) if (ROOT / file).is_file())).hexdigest()


def measured(files: list[str]) -> dict[str, tuple[str, dict[str, Measured]]]:
    """Run test files once, traced."""
    plugin = Tracing()
    pytest.main(["-q", "--tb=line", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", MARKS, *files], plugins=[plugin])
    of: dict[str, dict[str, Measured]] = {name: {} for name in files}
    for test, row in plugin.tests.items():
        if test not in plugin.failed:
            of[test.partition("::")[0]][test] = row
    return {name: (digest_of(name, tests), tests) for name, tests in of.items()}


def readers(fault: Fault) -> dict[str, int]:
    """The lines of ours that read the name to which a module or class gives the value with the fault."""
    tree = ast.parse((ROOT / fault.file).read_text(encoding="utf-8"))
    holders = [node for node in ast.walk(tree) if _first(node) <= fault.line <= getattr(node, "end_lineno", 0)]
    words = [node.arg for node in holders if isinstance(node, ast.keyword) and node.arg]
    for node in holders:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            words += [ast.unparse(target) for target in targets]
    if not words:
        return {}
    word, found = re.compile(rf"\b{re.escape(words[-1])}\b"), {}
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        text = path.read_text(encoding="utf-8").splitlines()
        found[str(path.relative_to(ROOT))] = sum(
            1 << number for number, line in enumerate(text, 1) if word.search(line)
        )
    return {file: lines for file, lines in found.items() if lines}


def is_default(fault: Fault) -> bool:
    """Whether a fault is in the head of a function."""
    functions = (node for node in ast.walk(ast.parse(_bytes(ROOT / fault.file))) if isinstance(node, ast.FunctionDef))
    return any(each.lineno <= fault.line < each.body[0].lineno for each in functions)


def _first(node: ast.AST) -> float:
    return getattr(node, "lineno", float("inf"))


def nearest(fault: Fault, tests: dict[str, Measured]) -> list[str]:
    """The tests nearest to a fault, the nearest first."""
    near = nearness(fault.file)
    running = [test for test, row in tests.items() if row.runs({fault.file: 1 << fault.line})]
    running = [] if is_default(fault) else running  # which a test may look at without a call
    if not running and (named := readers(fault)):
        running = [test for test, row in tests.items() if row.runs(named)]
    running.sort(key=lambda test: (-near.get(test.partition("::")[0], 0), tests[test].seconds))
    spent, chosen_ones = 0.0, []
    for test in running:
        if spent + tests[test].seconds <= MEASURED_SECONDS or not chosen_ones:
            spent += tests[test].seconds
            chosen_ones.append(test)
    untraced = [name for name in near if name.endswith(INTERPRETED) and "_triton" in fault.file]
    return untraced + chosen_ones or sorted(near, key=lambda name: -near[name])[:NEAREST]


def copied() -> None:
    """Make the copy of the tree what the tree is; what is built, such as tiny checkpoints, is shared with it."""
    COPY.mkdir(parents=True, exist_ok=True)
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and not ((COPY / name).is_file() and _bytes(COPY / name) == _bytes(ROOT / name)):
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, COPY / name)
    if not (COPY / ".build").exists():
        (COPY / ".build").symlink_to(ROOT / ".build", target_is_directory=True)


def _bytes(path: Path) -> bytes:
    return path.read_bytes()


def forked(work: Callable[[], Any], seconds: float) -> tuple[str, Any, bool]:
    """(what was printed, what comes back, whether it never ended) of work in the copy, done by a fork, which need not
    import torch anew. After ``seconds`` of the processor it never will; what only waits has ten times as long."""
    printed, answer = COPY.parent / "printed", COPY.parent / "answer"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        os.setsid()
        with printed.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(COPY)
        os.environ["PYTHONPATH"] = str(COPY.parent)
        sys.path[0] = str(COPY.parent)  # which was the tree's own tests/
        answer.write_bytes(pickle.dumps(work()))
        sys.stdout.flush()
        os._exit(0)
    until, endless = time.monotonic() + 10 * seconds, False
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until or sum(psutil.Process(child).cpu_times()[:2]) > seconds:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            endless = True
            break
        time.sleep(0.05)
    return printed.read_text(errors="replace"), pickle.loads(_bytes(answer)) if answer.is_file() else None, endless


def run(tests: list[str], seconds: float) -> str:
    """The first test that fails in the copy, ``endless`` if one does not end; empty for none."""
    command = ["-x", "-q", "--tb=no", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", MARKS, *tests]
    printed, status, endless = forked(lambda: int(pytest.main(command)), seconds)
    reported = (line for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR ")))
    failed = (line.partition(" ")[2].partition(" - ")[0] for line in reported)
    return "endless" if endless else next(failed, tests[0]) if status != 0 else ""


@cache
def passes(test: str) -> bool:
    return run([test], ALONE) == ""


def judged(fault: Fault, tests: dict[str, Measured]) -> tuple[str, str]:
    """(killed, survived, no tests or unjudged; the test that saw it) of a fault that is planted meanwhile."""
    near, target = nearest(fault, tests), COPY / fault.file
    if not near:
        return "no tests", ""
    raw = (ROOT / fault.file).read_bytes()
    target.write_bytes(raw[: fault.start] + fault.after.encode() + raw[fault.end :])
    seconds = ALONE + sum(1.5 * tests[test].seconds if test in tests else ALONE for test in near)
    try:
        seen = run(near, seconds)
    finally:
        target.write_bytes(raw)
    if not seen:
        return "survived", ""
    sound = run(near, seconds) == "" if seen == "endless" else seen in tests or passes(seen)
    return "killed" if sound else "unjudged", seen  # else it fails, or a busy machine ends it, without the fault too


def known() -> dict[tuple[str, ...], dict[str, str]]:
    if not RESULTS.is_file():
        return {}
    with RESULTS.open(newline="", encoding="utf-8") as rows:
        return {tuple(row[name] for name in KEY): row for row in csv.DictReader(rows)}


def planted() -> dict[tuple[str, ...], dict[str, str]]:
    """The rows whose fault can still be planted, at its line of today."""
    lines = {fault.key: fault.line for room in ROOMS for fault in chosen(room, 10**6)}
    return {key: {**row, "line": str(lines[key])} for key, row in known().items() if key in lines}


def save(rows: dict[tuple[str, ...], dict[str, str]]) -> None:
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows.values())


def report() -> None:
    """Print the score of each room, and what was seen by nobody."""
    rows = list(known().values())
    for row in rows:
        if row["verdict"] != "killed":
            print(
                f"{row['verdict']}: {row['file']}:{row['line']} {row['before']!r} -> {row['after']!r} {row['seen_by']}"
            )
    for room in ROOMS:
        counts = Counter(row["verdict"] for row in rows if row["room"] == room)
        judged_ones = counts["killed"] + counts["survived"] + counts["no tests"]
        share = counts["killed"] / judged_ones if judged_ones else 0
        rest = f"{counts['unjudged']} unjudged, {counts['equivalent']} equivalent"
        print(f"{room}: {counts['killed']} of {judged_ones} killed ({share:.0%}), {rest}")


def main() -> None:
    """Plant what has no row yet, a room after the other in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rooms", nargs="*", default=ROOMS)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--again", action="store_true", help="run what was not seen again")
    parser.add_argument("--report", action="store_true", help="only print what is known")
    given = parser.parse_args()
    if given.report:
        return report()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import peft  # noqa: F401
    from diffusers import HunyuanVideoPipeline, LTXPipeline, MochiPipeline  # noqa: F401

    copied()
    save(planted())
    tests = coverage()
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    faults, open_ones = {room: chosen(room, given.count) for room in given.rooms}, ("killed", "equivalent")
    for room, fault in ((room, faults[room][index]) for index in range(given.count) for room in faults):
        rows = known()
        if fault.key in rows and not (given.again and rows[fault.key]["verdict"] not in open_ones):
            continue
        verdict, seen_by = judged(fault, tests)
        told = (room, fault.file, fault.line, fault.kind, fault.before, fault.after, verdict, seen_by)
        save(rows | {fault.key: dict(zip(COLUMNS, map(str, told), strict=True))})
        print(f"{verdict}: {fault.file}:{fault.line} {fault.before!r} -> {fault.after!r} {seen_by}", flush=True)
    report()


if __name__ == "__main__":
    main()
