"""What every test shares: one thread, tiny checkpoints built once, and a progress that remembers."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The root's own kernels/ and nodes/ would hide the PyPI package `kernels` and ComfyUI's `nodes`.
sys.path[:] = [entry for entry in sys.path if Path(entry or Path.cwd()).resolve() != ROOT]
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small tensors run slower on many threads, and two workers share two cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    """Where tiny checkpoints are built once: ``tiny.build(name, tiny_folder)`` returns at once the second time."""
    digest = hashlib.sha256()
    for source in sorted((ROOT / "pipelines" / "tiny").glob("*.py")):
        digest.update(source.read_bytes())
    for package in ("diffusers", "transformers", "torch"):  # each version may save in a layout of its own
        digest.update(version(package).encode())
    folder = ROOT / ".build" / f"tiny-{digest.hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


LISTED_SKIPS = (  # what a machine may lack; anything else that is skipped fails the run
    "no ComfyUI in",
    "no interpreter for",
    "lacks what this pack requires",
    "needs a C++ compiler",
    "needs torch 2.9 or newer",
    "the fuzzer atheris is not installed",
)
_unlisted: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember each skip whose reason is not listed."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(listed in reason for listed in LISTED_SKIPS):
            _unlisted.append(f"{report.nodeid}: {reason}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run in which something unlisted was skipped has failed."""
    if _unlisted and session.exitstatus == 0:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was skipped without being listed."""
    for line in _unlisted:
        terminalreporter.write_line(f"skipped without being listed in tests/conftest.py: {line}", red=True)


class Recorded:
    """A progress that keeps what it was told, and cancels when ``cancel_at`` says so.

    Args:
        cancel_at: from (done, stage) to whether the user cancels at that moment.
    """

    class Cancelled(BaseException):
        """What a cancel raises here; ComfyUI's is a BaseException too."""

    def __init__(self, cancel_at: Callable[[int, str], bool] | None = None) -> None:
        self.steps: list[tuple[int, int, str]] = []
        self.said: list[str] = []
        self.previews: list[object] = []
        self.checks = 0
        self.cancel_at = cancel_at

    def step(self, done: int, total: int, stage: str, preview: Callable[[], object] | None = None) -> None:
        self.steps.append((done, total, stage))
        if preview is not None:
            self.previews.append(preview())
        if self.cancel_at is not None and self.cancel_at(done, stage):
            raise self.Cancelled

    def check(self) -> None:
        self.checks += 1

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def recorded() -> type[Recorded]:
    """The class :class:`Recorded`, to make one with or without a cancel."""
    return Recorded
