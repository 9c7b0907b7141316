"""Kernels compiled for GPUs that are not there; the whole table is ``benchmarks/results/kernels_build.csv``."""

import json
import os
import subprocess
import sys

import pytest
from runner import HERE


def test_one_kernel_for_turing_and_cdna() -> None:
    pytest.importorskip("triton", reason="lacks what this pack requires: triton")
    import kernels_build

    turing, cdna = (kernels_build.built(target, ["bf16"], ["residual_norm ltx"]) for target in ("sm_75", "gfx90a"))
    assert [row["verdict"] for row in (*turing, *cdna)] == ["ok", "ok"]
    assert turing[0]["disassembled"] and turing[0]["load_bits"] == turing[0]["store_bits"] == 128
    assert cdna[0]["load_bits"] >= 64 and cdna[0]["registers"] > 0


@pytest.mark.full
def test_all_kernels_for_all_targets() -> None:
    pytest.importorskip("triton", reason="lacks what this pack requires: triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "runner.py"), "kernels_build"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) >= 400 and len({row["target"] for row in rows}) == 16
    assert {row["verdict"] for row in rows} == {"ok"}
