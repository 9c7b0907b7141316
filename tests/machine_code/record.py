"""Writes ``benchmarks/results/machine_code.csv``: a row for each operation, target and dtype, executed without a GPU.

python tests/machine_code/record.py [target ...]
"""

import datetime
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent / "benchmarks")]

import runner  # noqa: E402 - after its folder
import torch  # noqa: E402

from machine_code import amd  # noqa: E402
from machine_code.launches import NVIDIA, TARGETS, Execution, compiled_for, executed  # noqa: E402


def rows(target: str) -> Iterator[runner.Row]:
    """The rows of one target: instructions are those executed, each once for all lanes that reach it together: on
    NVIDIA those of many blocks, on AMD those of a wave."""
    import triton
    from anygpu.kernels.library import TRITON
    from anygpu.kernels.self_tests import self_tests

    before = 0
    with compiled_for(target), executed(Execution()) as how:
        for cell in self_tests(torch.device("cpu"), TRITON):
            yield {
                "operation": cell.name, "target": target, "dtype": str(cell.dtype).removeprefix("torch."),
                "error": f"{cell.error:.2e}", "allowed": f"{cell.bound:.2e}", "instructions": how.instructions - before,
                "verdict": "ok" if cell.right else cell.fault or "wrong",
                "date": datetime.date.today().isoformat(), "triton": triton.__version__,
            }  # fmt: skip
            before = how.instructions


def main() -> int:
    """Write the table; 1 if a row is wrong."""
    try:
        import triton  # noqa: F401
    except ImportError:
        print("Triton is not installed, so nothing can be compiled: no row is written")
        return 0
    targets = [target for target in TARGETS if target in (sys.argv[1:] or TARGETS)]
    if reason := amd.lacks():
        print(f"AMD's targets keep their rows: {reason}")
        targets = [target for target in targets if target in NVIDIA]
    found = [row for target in targets for row in rows(target)]
    kept = [row for row in runner.known_rows("machine_code") if row["target"] not in targets]
    runner.append("machine_code", sorted(kept + found, key=lambda row: TARGETS.index(row["target"])), "w")
    wrong = [row for row in found if row["verdict"] != "ok"]
    print(f"{len(found)} rows, {len(wrong)} of them wrong", *wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
