"""What benchmarks/peers.py makes of the seconds of paired runs."""

import random
from typing import Any

import pytest
from peers import fails, interval, rows_of


@pytest.mark.parametrize(("count", "cut"), [(20, 5), (6, 0), (3, 0)])
def test_bounds_are_order_statistics(count: int, cut: int) -> None:
    assert interval(range(count)) == (cut, count - 1 - cut)


def test_bounds_hold_the_median_as_often_as_they_say() -> None:
    drawn = random.Random(0)
    bounds = [interval([drawn.expovariate(1.0) for _ in range(20)]) for _ in range(2000)]
    assert 0.945 < sum(low <= 0.6931 <= high for low, high in bounds) / 2000 < 0.972  # ln 2; 0.959 of all


@pytest.mark.parametrize(
    ("ours", "apart", "verdict"), [(0.9, 0.0, "faster"), (1.1, 0.0, "slower"), (None, 0.0, ""), (0.9, 0.1, "differs")]
)
def test_a_difference_beyond_noise_is_marked(ours: float | None, apart: float, verdict: str) -> None:
    steady = [ours or (0.9, 1.1)[number % 2] for number in range(20)]
    asked: dict[str, Any] = {"family": "ltx", "stage": "sampling", "precision": "fp32"}
    seconds, peaks = {"ours": steady, "core": [1.0] * 20}, {"ours": 1, "core": 1}
    (row,) = rows_of(asked, 20, peaks, {"core": apart}, seconds, {"core": "0.33.0"})
    assert (row["verdict"], row["pairs"], fails(row)) == (verdict, 20, verdict in ("slower", "differs"))
