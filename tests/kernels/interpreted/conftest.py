"""A launch that fails fails its check, which would else be of the reference."""

from collections.abc import Iterator

import pytest
from anygpu.kernels.library import failures_raise


@pytest.fixture(autouse=True)
def launched() -> Iterator[None]:
    with failures_raise():
        yield
