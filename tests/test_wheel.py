"""The wheel holds every file that it runs with, and what a user runs works from it alone."""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
import tiny

ROOT = Path(__file__).resolve().parent.parent
ROOMS = tuple(file.parent.name for file in ROOT.glob("*/__init__.py"))
BUILT_FROM = ("LICENSE", "README.md", "pyproject.toml", "requirements.txt", "setup.py")
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")
BUILD = """
import sys
from setuptools.build_meta import build_wheel

print(build_wheel(sys.argv[1], {"--build-option": ["--compression=stored"]}))
"""
# Every module is imported but those that need ComfyUI; then a report, a clip and a mesh are made.
RUN = """
import sys
from importlib import import_module
from pkgutil import walk_packages

import anygpu

comfyui = ("anygpu.host", "anygpu.nodes")
modules = [found.name for found in walk_packages(anygpu.__path__, "anygpu.") if not found.name.startswith(comfyui)]
for name in modules:
    import_module(name)

from anygpu import cli
from anygpu.compat.device import work
from anygpu.paint import demo
from anygpu.paint.choices import demo_paint_models
from anygpu.paint.loading import PaintRequest, load_paint

work.measured_pace = lambda *_, **__: work.Pace(2e10, 1e10, 1e10, 1e10, 1e-6)  # test_work.py times a processor
model, folder = sys.argv[1:]
assert cli.main(["report", "--device", "cpu", "--state", folder]) == 0
clip = ["--width", "64", "--height", "64", "--frames", "9", "--steps", "2", "--output", f"{folder}/clip.mp4"]
assert cli.main(["render", "--model", model, "--prompt", "a fox", "--device", "cpu", "--state", folder, *clip]) == 0
small = demo.BakeSettings(64, 128)
demo.BakeSettings = lambda *_: small
(painter,) = demo_paint_models().values()
painted = demo.painted_ring(load_paint(PaintRequest(painter, device="cpu")), demo.PAIRS[0], frames=1, steps=1)
print(anygpu.__file__, len(modules), tuple(painted.views.shape))
"""


def shipped() -> Iterator[Path]:
    """The files of the working tree that the wheel carries, relative to its root."""
    yield from (path.relative_to(ROOT) for path in ROOT.glob("*.py") if path.name != "setup.py")
    yield from (Path("pyproject.toml"), Path("requirements.txt"))
    for room in ROOMS:
        files = (path for path in (ROOT / room).rglob("*") if path.is_file())
        yield from (path.relative_to(ROOT) for path in files if "__pycache__" not in path.parts)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with the wheel of a copy of the tree, as pip unpacks it, and nothing else."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in (*BUILT_FROM, *(path.name for path in ROOT.glob("*.py"))):
        shutil.copy(ROOT / name, source)
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=IGNORED)
    done = subprocess.run([sys.executable, "-c", BUILD, target], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "would be ignored" not in done.stdout + done.stderr
    with zipfile.ZipFile(target / done.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(target)
    return target


def test_the_wheel_holds_every_file_of_every_room(installed: Path):
    found = {path.relative_to(installed / "anygpu") for path in (installed / "anygpu").rglob("*") if path.is_file()}
    assert found == set(shipped())
    assert {"compat", "farm", "host", "kernels", "nodes", "paint", "pipelines"} <= set(ROOMS)


def test_a_user_s_commands_run_from_the_wheel(installed: Path, tiny_folder: Path, tmp_path: Path):
    variables = {"PYTHONPATH": str(installed), "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = forked.run(RUN, tiny.build("ltx", tiny_folder), tmp_path, folder=tmp_path, variables=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(str(installed / "anygpu" / "__init__.py"))
    assert (tmp_path / "clip.mp4").stat().st_size
