"""Coverage-guided fuzzing of the readers: whatever a file holds, they return or raise one of our errors.

Run: python tests/fuzz/readers.py [corpus folder] [libFuzzer options such as -max_total_time=600]
A finding is written as crash-<hash>; put a small one into tests/fixtures/fuzz when it is fixed.
"""

import sys
import tempfile
import warnings
from pathlib import Path

import atheris

HERE = Path(__file__).resolve().parent
with atheris.instrument_imports(
    include=[
        "anygpu.compat.checkpoints.headers",
        "anygpu.compat.checkpoints.gguf_file",
        "anygpu.compat.checkpoints.headers",
    ]
):
    sys.path.insert(0, str(HERE))
    from target import read_all

warnings.simplefilter("ignore")  # of numpy, on scales that are not numbers
MEMORY = Path("/dev/shm")

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        atheris.Setup(sys.argv, lambda data: read_all(data, Path(folder)))
        atheris.Fuzz()
