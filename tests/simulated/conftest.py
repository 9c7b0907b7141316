"""The fixture that this folder's tests share."""

from __future__ import annotations

import pytest

from simulated import accelerator


@pytest.fixture
def acc():
    """The first simulated device, with counters at zero."""
    if reason := accelerator.reason():
        pytest.skip(reason)
    with accelerator.fresh() as device:
        yield device
