"""What the fuzzer found stays found; in the full run it searches on for --fuzz-seconds."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.target import read_all

SCRIPT = Path(__file__).with_name("readers.py")
CORPUS = Path(__file__).resolve().parents[1] / "fixtures" / "fuzz"
FINDINGS = Path(__file__).resolve().parents[2] / ".build" / "findings"  # outlive the test's own folder


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("file", sorted(CORPUS.iterdir()), ids=lambda file: file.name)
def test_the_corpus_reads_or_is_refused(file, tmp_path):
    read_all(file.read_bytes(), tmp_path)


@pytest.mark.full
def test_nothing_new_is_found(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("the fuzzer atheris is not installed")
    seconds = int(request.config.getoption("--fuzz-seconds"))
    corpus = shutil.copytree(CORPUS, tmp_path / "corpus")
    FINDINGS.mkdir(parents=True, exist_ok=True)
    before = set(FINDINGS.iterdir())
    options = [f"-max_total_time={seconds}", "-max_len=4096", "-timeout=60", f"-artifact_prefix={FINDINGS}/"]
    command = [sys.executable, SCRIPT, corpus, *options]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=2 * seconds + 300
    )
    new = sorted(str(file) for file in set(FINDINGS.iterdir()) - before)
    # A negative status is a signal: -9 may be the system's, for want of memory. 77 is a raw error, whose traceback
    # stands before libFuzzer's "fuzz target exited".
    told = done.stdout[done.stdout.find("Uncaught Python exception") :] if new else done.stdout[-3000:]
    assert done.returncode == 0 and "Done" in done.stdout, f"status {done.returncode}, inputs kept: {new}\n{told}"
