"""What calling a fused operation costs beside torch.library.custom_op, with the same empty implementation behind both.

    OMP_NUM_THREADS=1 python benchmarks/dispatch.py     # appends a row to benchmarks/results/dispatch.csv

A direct call's own cost is taken off; best of several, in one run.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import torch
from anygpu.kernels import library
from table import append, machine
from torch import Tensor

CALLS, REPEATS = 500, 15


def cost(call: Callable[[], object]) -> float:
    """Seconds of a call, at best."""
    return min(timeit.repeat(call, number=CALLS, repeat=REPEATS)) / CALLS


def main() -> None:
    """Measure, print, and append the row."""
    torch.set_num_threads(1)
    x = torch.zeros(4)

    def same(x: Tensor, out_dtype: torch.dtype | None) -> Tensor:
        return x.new_empty(x.shape)

    ours = library.operation("dispatch_timing(Tensor x, ScalarType? out_dtype) -> Tensor", same, same)
    theirs = torch.library.custom_op(
        "anygpu_timing::same", same, mutates_args=(), schema="(Tensor x, ScalarType? out_dtype) -> Tensor"
    )

    def chosen(x: Tensor) -> Any:
        return ours(x, None) if not library.launches(x) else None

    direct = cost(lambda: same(x, None))
    own, custom = cost(lambda: chosen(x)) - direct, cost(lambda: theirs(x, None)) - direct
    row = {"ours_us": round(1e6 * own, 2), "custom_op_us": round(1e6 * custom, 2), "ratio": round(own / custom, 2)}
    append("dispatch", [{**machine(), **row}])


if __name__ == "__main__":
    main()
