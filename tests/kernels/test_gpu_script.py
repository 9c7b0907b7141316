"""The script that times operations on a GPU: it skips cleanly without one, and its forms agree where they can run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels_gpu.py"
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def said(*options: str) -> str:
    command = [sys.executable, str(SCRIPT), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | NO_GPU, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.full
def test_without_a_gpu_it_says_why_and_writes_nothing() -> None:
    results = SCRIPT.parent / "results" / "kernels_gpu.csv"
    before = results.read_bytes() if results.exists() else b""
    assert said().startswith("skipped: no NVIDIA or AMD GPU")
    assert (results.read_bytes() if results.exists() else b"") == before


@pytest.mark.full
def test_every_case_runs_with_every_form_that_a_cpu_has() -> None:
    lines = said("--dry", "--dtypes", "bf16").splitlines()
    cases = {line.split(", bf16, ")[0] for line in lines if ", bf16, eager: " in line}
    assert len(cases) == 13
    for case in cases:
        assert any(line.startswith(f"{case}, bf16, anygpu: ") and "error above" not in line for line in lines)
