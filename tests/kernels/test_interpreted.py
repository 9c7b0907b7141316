"""The launches in Triton's interpreter, in a process of their own: Triton decides at import whether it interprets."""

import re
from pathlib import Path

import forked
import pytest

CHECKS = Path(__file__).parent / "interpreted"
PYTEST = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
QUICK = (
    "rounded or fp32_residual or two_halves or far_from_zero or tables_shared or another_length or modulation "
    "or (error and (rms-dtype2 or layer-dtype2 or head-dtype2 or gated-dtype2 or swiglu-dtype0)) "
    "or (clips and contiguous-neither)"
)


def interpreted(*options: str) -> str:
    """What pytest says about the checks, run with the interpreter on."""
    pytest.importorskip("triton", reason="lacks what this pack requires: triton")
    words = ["-q", "-p", "no:cacheprovider", *options, *CHECKS.glob("*.py")]
    variables = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = forked.run(PYTEST, *words, folder=CHECKS.parent, variables=variables, anew=["triton"])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_rounding_and_one_case_of_each_row_kernel() -> None:
    assert int(re.findall(r"(\d+) passed", interpreted("-k", QUICK))[0]) >= 14


@pytest.mark.full
def test_every_case() -> None:
    assert int(re.findall(r"(\d+) passed", interpreted())[0]) >= 60
