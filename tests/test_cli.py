"""The command answers at once where it can, and its demo checks what it shows."""

import subprocess
import sys

import pytest
import torch
from anygpu.cli import main
from anygpu.paint import choices
from anygpu.pipelines import demo
from anygpu.pipelines.demo import drawing

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


@pytest.mark.parametrize("wrong", [False, True])
def test_the_demo_draws_a_clip_checks_it_and_leaves_a_page(monkeypatch, tmp_path, capsys, wrong):
    first = dict(list(demo.demo_models().items())[:1])
    monkeypatch.setattr(demo, "demo_models", lambda: first)
    monkeypatch.setattr(choices, "demo_paint_models", dict)
    if wrong:  # the model draws something else
        monkeypatch.setattr(drawing, "drawn", lambda *_: torch.rand(9, 64, 64, 3))
    assert main(["demo", "--output", str(tmp_path)]) == wrong
    assert {path.name for path in tmp_path.iterdir()} == {"ltx.mp4", "contact_sheet.png", "report.md"}
    assert ("FAILED: shows what was asked for, another prompt" in capsys.readouterr().out) == wrong
    assert "(contact_sheet.png)" in (tmp_path / "report.md").read_text(encoding="utf-8")
