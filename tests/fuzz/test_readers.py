"""What the fuzzer found stays found; in the full run it searches on for ten minutes (FUZZ_SECONDS changes that)."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.target import read_all

CORPUS = Path(__file__).resolve().parents[1] / "fixtures" / "fuzz"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("file", sorted(CORPUS.iterdir()), ids=lambda file: file.name)
def test_the_corpus_reads_or_is_refused(file, tmp_path):
    read_all(file.read_bytes(), tmp_path)


@pytest.mark.full
def test_nothing_new_is_found(tmp_path):
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("the fuzzer atheris is not installed")
    corpus, seconds = tmp_path / "corpus", int(os.environ.get("FUZZ_SECONDS", "600"))
    shutil.copytree(CORPUS, corpus)
    script = Path(__file__).with_name("readers.py")
    options = [f"-max_total_time={seconds}", "-max_len=4096", "-timeout=60"]
    ended = subprocess.run(
        [sys.executable, script, corpus, *options], cwd=tmp_path, capture_output=True, text=True, timeout=seconds + 240
    )
    findings = [file.name for file in tmp_path.glob("*-*") if file.is_file()]
    assert not findings and "Done" in ended.stderr, ended.stderr[-3000:]
