"""What the tests of pipelines share."""

import pytest
from anygpu.compat.device import work
from anygpu.compat.device.work import Pace


@pytest.fixture(autouse=True)
def paced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of this machine that nobody timed, which takes two seconds in each new folder: see test_work.py."""
    monkeypatch.setattr(work, "measured_pace", lambda *_, **__: Pace(2e10, 1e10, 1e10, 1e10, 1e-6))
