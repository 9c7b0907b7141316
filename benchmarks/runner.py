"""The runner of all benchmarks, and what they share: timing in turn, tables.

    python benchmarks/runner.py                  # lists the cases
    python benchmarks/runner.py CASE [--write]   # prints a case's rows; --write also writes results/ and the docs

A case is a function that yields rows, in another file of this folder, and what ``cases.json`` says of it. Rows are
appended to ``results/<table>.csv``, so that each figure keeps its machine and date; the tables of counts, which any
machine repeats, are rewritten.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import json
import math
import platform
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT, RESULTS, DOCS = HERE.parent, HERE / "results", HERE.parent / "docs"
SCRATCH = ROOT / ".build" / "benchmarks"  # of tiny models, which are built once
for folder in (HERE, ROOT / "tests"):  # tests/ has the tiny checkpoints, the simulated device and a ComfyUI to run
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
Row = dict[str, Any]


def machine() -> Row:
    """The columns that most tables begin with: date, device and torch."""
    return {"date": datetime.date.today().isoformat(), "device": device_name(), "torch": torch.__version__}


def device_name() -> str:
    """The name of this machine's CPU with the number of threads."""
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def always() -> str:
    """No reason against running a case."""
    return ""


@dataclass(frozen=True)
class Case:
    """A benchmark.

    Args:
        rows: yields rows; ``options`` are its arguments.
        options: options of the command line, with defaults: a bool is a flag, a tuple takes several values.
        table: the CSV under results; empty: the case is only printed. replaces: whether a run rewrites it.
        about: makes the columns before each row. page: writes the docs from all rows of the run.
        lacks: the reason why this machine cannot run the case, or nothing. fails: whether a row misses its target.
        threads: of torch; 0 leaves them as they are.
    """

    rows: Callable[..., Iterable[Row]]
    options: Mapping[str, Any] = field(default_factory=dict)
    table: str = ""
    replaces: bool = False
    about: Callable[[], Row] = machine
    page: Callable[[list[Row]], object] | None = None
    lacks: Callable[[], str] = always
    fails: Callable[[Row], bool] = lambda row: False
    threads: int = 1

    def run(self, options: Mapping[str, Any], write: bool) -> list[Row]:
        """The rows, printed and written as they come."""
        if self.threads:
            torch.set_num_threads(self.threads)
        SCRATCH.mkdir(parents=True, exist_ok=True)
        rows = []
        for row in self.rows(**options):
            rows.append(self.about() | row)
            print(json.dumps(rows[-1], default=str), flush=True)
            if write and self.table and not self.replaces:
                append(self.table, [rows[-1]])
        if write and self.replaces:
            append(self.table, rows, "w")
        if write and self.page is not None:
            self.page(rows)
        return rows


def append(table: str, rows: list[Row], mode: str = "a") -> None:
    """Append ``rows`` to a table, made with a header where it does not exist; mode "w" rewrites it.

    Raises:
        ValueError: the columns differ from those of the file.
    """
    path = RESULTS / f"{table}.csv"
    if mode == "a" and path.exists() and (columns := list(known_rows(table)[0])) != list(rows[0]):
        raise ValueError(f"{path.name} has the columns {columns}; expected {list(rows[0])}: rename the old file")
    ends = "\n" if path.exists() and b"\r" not in path.read_bytes() else "\r\n"  # as the file has them
    with path.open(mode, newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator=ends)
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


def known_rows(table: str) -> list[dict[str, str]]:
    """The rows of a table."""
    path = RESULTS / f"{table}.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_table(page: str, mark: str, head: Iterable[str], rows: Iterable[Iterable[Any]], end: str = "end") -> None:
    """Put a Markdown table between two comments of a page: ``<!-- mark -->`` and ``<!-- end -->``."""
    lines = [f"| {' | '.join(cells)} |" for cells in ([*head], *([str(cell) for cell in row] for row in rows))]
    lines.insert(1, "|" + " --- |" * (lines[0].count("|") - 1))
    path, marks = DOCS / page, re.compile(rf"(<!-- {re.escape(mark)} -->\n).*?(<!-- {end} -->)", re.DOTALL)
    text = path.read_text(encoding="utf-8")
    if not marks.search(text):
        raise ValueError(f"no place for the table {mark!r} in {page}")
    path.write_text(marks.sub(lambda found: found[1] + "\n".join(lines) + "\n" + found[2], text), encoding="utf-8")


@dataclass(frozen=True)
class Table:
    """A table of a page under docs/, with the row's key of each head, or a format of the row's values; bytes are shown
    as MB, no tile as nothing."""

    page: str
    mark: str
    columns: Mapping[str, str]
    end: str = "end"

    def __call__(self, rows: Iterable[Row]) -> None:
        cells = ([shown(key, row) for key in self.columns.values()] for row in rows)
        write_table(self.page, self.mark, self.columns, cells, self.end)


def shown(key: str, row: Row) -> str:
    """The cell of a row under ``key``, by the unit in its name, or of a format in braces."""
    if "{" in key:
        return key.format_map(row)
    if key.endswith("_bytes"):
        return f"{row[key] / 1e6:.1f}"
    if key == "tile" and not row[key]:
        return ""
    return f"`{row[key]}`" if key == "family" else str(row[key])


def spent(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of a call."""
    started = clock()
    call()
    return clock() - started


def processor(call: Callable[[], Any]) -> float:
    """Seconds of a call on the processor, which other programs disturb little."""
    return spent(call, time.process_time)


Measure = Callable[[Callable[[], Any]], float]


def in_turn(
    calls: Mapping[str, Callable[[], Any]], rounds: int, measure: Measure = spent, warm_up: int = 1
) -> dict[str, list[float]]:
    """Times of each call by name, all calls in a new random order each round; the first rounds are not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + warm_up):
        for name in random.sample(list(calls), len(calls)):
            seconds = measure(calls[name])
            if number >= warm_up:
                times[name].append(seconds)
    return times


def psnr(found: torch.Tensor, expected: torch.Tensor, span: float = 1.0) -> float:
    """Peak signal to noise of values with this ``span``, in dB."""
    error = float((found.double() - expected.double()).square().mean())
    return math.inf if error == 0 else 10 * math.log10(span**2 / error)


def no_triton() -> str:
    """The reason why no kernel can be compiled, or nothing."""
    from anygpu.kernels.library import HAS_TRITON

    return "" if HAS_TRITON else "Triton is not installed"


def no_gpu() -> str:
    """The reason why nothing can be timed on a GPU, or nothing."""
    return no_triton() if torch.cuda.is_available() else f"no NVIDIA or AMD GPU that torch {torch.__version__} sees"


def no_host() -> str:
    """The reason why no ComfyUI can be started, or nothing."""
    from host.server import NoHost, find_host

    try:
        find_host()
    except NoHost as reason:
        return str(reason)
    return ""


def data(name: str) -> Any:
    """What ``data.json`` has under a name: the runs, sizes and bars of one case."""
    return json.loads((HERE / "data.json").read_text(encoding="utf-8"))[name]


def default(case: str, option: str) -> Any:
    """The value of an option of a case that nobody gave."""
    files = json.loads((HERE / "cases.json").read_text(encoding="utf-8")).values()
    return next(cases[case]["options"][option] for cases in files if case in cases)


def known_cases() -> tuple[dict[str, Case], dict[str, str]]:
    """The cases by name, and by file why its cases cannot run here: a GPU machine may have no diffusers."""
    cases: dict[str, Case] = {}
    absent: dict[str, str] = {}
    for stem, given in json.loads((HERE / "cases.json").read_text(encoding="utf-8")).items():
        try:
            module = importlib.import_module(stem)
        except ImportError as error:
            absent[stem] = str(error)
            continue
        cases |= {name: case_of(module, **fields) for name, fields in given.items()}
    return cases, absent


def case_of(module: Any, options: Mapping[str, Any] | None = None, **fields: Any) -> Case:
    """A case of a file: ``fields`` of ``cases.json`` name functions there or here; ``about`` null adds no columns."""
    for name in {"rows", "about", "page", "lacks", "fails"} & fields.keys():
        value = fields[name]
        if isinstance(value, str):
            there = hasattr(module, value.partition(".")[0])
            fields[name] = attrgetter(value)(module if there else sys.modules[__name__])
        else:
            fields[name] = dict if value is None else Table(**value)
    chosen = {name: tuple(value) if isinstance(value, list) else value for name, value in (options or {}).items()}
    return Case(options=chosen, **fields)


def options_of(name: str, case: Case, words: list[str]) -> tuple[dict[str, Any], bool]:
    """The options of a case from words of the command line, and whether to write."""
    about, raw = sys.modules[case.rows.__module__].__doc__, argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"runner.py {name}", description=about, formatter_class=raw)
    parser.add_argument("--write", action="store_true", help="write results and docs, not only print")
    for option, usual in case.options.items():
        flag, kind = f"--{option.replace('_', '-')}", type(usual)
        if kind is bool:
            parser.add_argument(flag, action="store_true")
        elif kind is tuple:
            of = type(usual[0]) if usual else str
            parser.add_argument(flag, nargs="*", type=of, default=usual, metavar="", help=f"default: {usual}")
        else:
            parser.add_argument(flag, type=kind, default=usual, metavar="", help=f"default: {usual!r}")
    options = vars(parser.parse_args(words))
    write = options.pop("write")
    return options, write


def main(words: list[str]) -> int:
    """1 where a row misses its target; 0 also where the machine cannot run the case, with the reason."""
    cases, absent = known_cases()
    if not words or words[0] not in cases:
        for name, case in cases.items():
            print(f"{name:18} {' '.join(f'--{option}' for option in case.options)}")
        print(*(f"{name}.py: {why}" for name, why in absent.items()), sep="\n")
        return 2 if words else 0
    case = cases[words[0]]
    options, write = options_of(words[0], case, words[1:])
    if reason := case.lacks() if not options.get("dry") else "":
        print(f"skipped: {reason}")
        return 0
    return int(any(case.fails(row) for row in case.run(options, write and not options.get("dry"))))


if __name__ == "__main__":
    sys.exit(importlib.import_module("runner").main(sys.argv[1:]))  # the module that the cases import, not a second one
