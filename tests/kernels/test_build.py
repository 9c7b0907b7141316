"""Kernels compiled for GPUs that are not there; the whole table is ``benchmarks/results/kernels_build.csv``."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from runner import HERE


def test_one_kernel_for_turing_and_cdna(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="lacks what this pack requires: triton")
    import kernels_build

    measured, unfused = kernels_build.measured, set()

    def kept(compiled: Any, log: str, label: tuple[str, ...], seconds: float) -> Any:
        unfused.update(label[:1] if not compiled.metadata.enable_fp_fusion else ())
        return measured(compiled, log, label, seconds)

    monkeypatch.setattr(kernels_build, "measured", kept)
    cases = ["residual_norm ltx", "qk_norm_rope across", "swiglu scaled"]
    turing, cdna = (kernels_build.built(*row) for row in (("sm_75", ["bf16"], cases), ("gfx90a", ["bf16"], cases[:1])))
    assert [row["verdict"] for row in (*turing, *cdna)] == 4 * ["ok"]
    assert unfused == {*cases[:2]}, "where eager rounds each product before it is added"
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
