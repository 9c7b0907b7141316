"""The page's table of published times is that of the rows, and the rows' forecasts are those of the code."""

from statistics import quantiles

import field
import pytest
from runner import DOCS

KEPT = [row for row in field.known_rows(field.FIELD) if row["ratio"] not in ("", "nan")]


@pytest.mark.parametrize("split", ["fit", "sealed"])
def test_the_page_has_the_spread_of_the_rows_and_exact_runs_hold(split):
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    own = [row for row in KEPT if row["split"] == split]
    exact = [float(row["ratio"]) for row in own if field.recipe_known(row)]
    for name, ratios in ((split, [float(row["ratio"]) for row in own]), (f"{split}, exact run of known recipe", exact)):
        assert f"| {' | '.join((name, *field.spread(ratios)))} |" in page
    first, _, third = quantiles(exact, n=4, method="inclusive")
    assert 0.85 <= first <= third <= 1.2 and 0.5 <= min(exact) <= max(exact) <= 2.0


@pytest.mark.full
def test_the_forecasts_of_the_rows_are_those_of_the_code():
    found = {row["id"]: float(row["forecast"]) for row in field.rows(sealed=True) if row["ratio"] not in ("", "nan")}
    assert found == pytest.approx({row["id"]: float(row["forecast"]) for row in KEPT}, rel=0.01)
