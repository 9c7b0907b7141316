"""Every reader on files that are nearly right: `--fuzz-seconds` says for how long."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("structured.py")


@pytest.mark.full
def test_no_raw_error_comes_out_of_a_reader(request: pytest.FixtureRequest, tiny_folder: Path) -> None:
    seconds = request.config.getoption("--fuzz-seconds")
    command = [sys.executable, str(SCRIPT), "--seconds", str(seconds), "--tiny", str(tiny_folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=10 * seconds + 300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("0 raw errors") == done.stdout.count("raw errors") > 9
