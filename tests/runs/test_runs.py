"""Short forms of the long runs; `docs/reliability.md` has the figures of the whole ones."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COUNTS = {"injections": 500, "threads": 20, "cancels": 20, "kills": 10}


@pytest.mark.full
@pytest.mark.parametrize("name", COUNTS)
def test_nothing_is_lost_and_the_next_run_is_the_same(name: str) -> None:
    command = [sys.executable, str(HERE / f"{name}.py"), "--count", str(COUNTS[name])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="LD_PRELOAD of a file for gcc")
def test_a_kill_or_a_full_disk_at_any_call_leaves_the_old_file_or_the_new_one() -> None:
    done = subprocess.run([sys.executable, str(HERE / "disks.py")], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
