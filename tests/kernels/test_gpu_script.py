"""The cases that time kernels and models on a GPU: they skip without one, and their forms agree where they can run."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from runner import HERE, RESULTS

NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def said(*words: str) -> str:
    command = [sys.executable, str(HERE / "runner.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | NO_GPU, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def rows(*words: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said(*words).splitlines() if line.startswith("{")]


@pytest.mark.full
def test_without_a_gpu_they_say_why_and_write_nothing() -> None:
    before = sorted((path.name, path.stat().st_mtime_ns) for path in RESULTS.iterdir())
    assert said("models_gpu", "--write").startswith("skipped: no NVIDIA or AMD GPU")
    assert sorted((path.name, path.stat().st_mtime_ns) for path in RESULTS.iterdir()) == before


@pytest.mark.full
def test_whole_models_run_in_every_form() -> None:
    found = rows("models_gpu", "--dry")
    for case in ("LTX-Video step", "Mochi step", "HunyuanVideo step", "LTX-Video decode"):
        mine = [row for row in found if row["case"] == case]
        assert [row["form"] for row in mine] == ["neither", "kernels", "compile", "both"]
        assert all(row["psnr_db"] > 30 for row in mine)  # bf16 through a few blocks
    assert sum(row["case"] == "HunyuanVideo attention" for row in found) == 2
