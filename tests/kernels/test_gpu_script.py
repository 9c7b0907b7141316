"""The script that times operations on a GPU: it skips cleanly without one, and its forms agree where they can run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels_gpu.py"
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def said(*options: str, script: Path = SCRIPT) -> str:
    command = [sys.executable, str(script), *options]
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


@pytest.mark.full
def test_whole_models_run_in_every_form() -> None:
    lines = said("--dry", script=SCRIPT.with_name("models_gpu.py")).splitlines()
    cases = ("LTX-Video step", "Mochi step", "HunyuanVideo step", "LTX-Video decode")
    for case in cases:
        rows = [line for line in lines if line.startswith(f"{case}, ")]
        assert [line.split(", ")[1].split(":")[0] for line in rows] == ["neither", "kernels", "compile", "both"]
        assert all(
            float(line.rsplit(", ", 1)[1].removesuffix(" dB")) > 30 for line in rows
        )  # bf16 through a few blocks
    assert sum(line.startswith("HunyuanVideo attention, ") for line in lines) == 2
