"""The command answers at once where it can: nothing heavy is imported to say what it can do."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from anygpu.cli import main
try:
    main(["--help"])
except SystemExit as end:
    print(end.code, "torch" in sys.modules, "diffusers" in sys.modules, file=sys.stderr)
"""


def test_the_help_imports_no_torch():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert ran.stderr.split() == ["0", "False", "False"], ran.stderr
    assert "render one clip" in ran.stdout


def test_piped_progress_is_silent(capsys):
    from anygpu.cli import Printed

    progress = Printed()
    for done in range(1, 4):
        progress.step(done, 3, "sampling")
    progress.notify("rounded")
    assert capsys.readouterr().err == "rounded\n"
