"""The factors of the forecasts are those that the measured rows give: nobody has copied or changed a number."""

import memory
import pytest
from anygpu.pipelines.registry import FAMILIES


def row(stage: str, measured: float, first: float, second: float = 0) -> dict[str, object]:
    terms = {"measured_bytes": measured, "first_term_bytes": first, "second_term_bytes": second}
    return {"family": "ltx", "stage": stage, **terms}


def test_the_factors_are_those_of_the_last_rows():
    factors = memory.factors(memory.last_rows())
    assert factors.keys() == FAMILIES.keys()
    for name, family in FAMILIES.items():
        spec = (family.folder / "spec.py").read_text(encoding="utf-8")
        assert "FIT = family.FitFactors(" in spec and spec == memory.written(spec, factors[name]), name


def test_rows_that_follow_a_formula_give_its_factors():
    rows = [row("sampling", 14 * a + 3 * b, a, b) for a, b in ((100, 10), (50, 40), (900, 20))]
    rows += [row("text", 4 * a, a) for a in (10, 30)]
    rows += [row("decoding", (4 * a + memory.PLAIN["ltx"] * b), a, b) for a, b in ((8, 1), (90, 5))]
    rows += [row("streaming", measured, 10) for measured in (80, 93)]
    expected = {"tokens": 14, "latents": 3, "text": 4, "plain": memory.PLAIN["ltx"], "pixels": 4, "streamed": 9.3}
    assert memory.factors(rows)["ltx"] == pytest.approx(expected)


def test_no_factor_is_below_nought():
    rows = [row("sampling", measured, a, b) for measured, a, b in ((100, 10, 1), (100, 10, 5))]
    assert memory.factors(rows)["ltx"]["latents"] == 0.0
