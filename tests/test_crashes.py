"""A worker that crashes, leaves a fork behind or hangs ends the run that `make test` starts, which says where."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONFTEST = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
WITHOUT_TORCH = "\n\n@pytest.fixture(scope='session', autouse=True)\ndef one_thread():\n    pass\n"
CRASHES = """import ctypes, multiprocessing, time
def test_it():
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
    ctypes.string_at(0)
"""
HANGS = "import threading\ndef test_it():\n    threading.Event().wait()\n"


def options(seconds: int) -> list[str]:
    """The options that `make test` gives pytest, with another limit per test."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert 'pytest $(LIMITED) -m "not full and' in text
    lines = dict(re.findall(r"^(\w+) [?:]= (.*)$", text, re.MULTILINE)) | {"TEST_SECONDS": str(seconds)}
    return re.sub(r"\$\((\w+)\)", lambda name: lines[name[1]], lines["LIMITED"]).split()


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX limits")
def test_a_run_ends_with_its_workers(tmp_path: Path) -> None:
    for name, text in {"test_crashes": CRASHES, "test_hangs": HANGS, "conftest": CONFTEST + WITHOUT_TORCH}.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, *options(2), tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Fatal Python error: Segmentation fault" in done.stderr and "Timeout (0:00:02)!" in done.stderr, done.stderr
    for name in ("crashes", "hangs"):
        assert f"crashed while running 'test_{name}.py::test_it'" in done.stdout
