"""The size of a clone and of the registry's archive."""

import hashlib
import io
import subprocess
import zipfile
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CLONE_BYTES, ARCHIVE_BYTES, TWICE_BYTES = 45 * 2**20, 17_700_000, 20_000


@pytest.fixture(scope="module")
def tracked():
    """The files of a clone."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a clone")
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_a_clone_is_small_and_has_no_large_file_twice(tracked):
    assert sum(file.stat().st_size for file in tracked) <= CLONE_BYTES
    same = defaultdict(list)
    for file in tracked:
        if file.stat().st_size > TWICE_BYTES:
            same[hashlib.sha256(file.read_bytes()).digest()].append(file.relative_to(ROOT).as_posix())
    assert [names for names in same.values() if len(names) > 1] == []


def test_the_archive_is_small(tracked):
    lines = (ROOT / ".comfyignore").read_text(encoding="utf-8").split()
    left_out = tuple(line for line in lines if line.endswith("/"))
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in tracked:
            name = file.relative_to(ROOT).as_posix()
            if not name.startswith(left_out):
                archive.write(file, name)
    assert len(content.getvalue()) <= ARCHIVE_BYTES
