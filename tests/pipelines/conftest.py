"""What the tests of pipelines share: modules without memory, which get no first values."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def no_values_without_memory() -> Iterator[None]:
    """On ``meta`` torch draws first values in Python, operation by operation, and keeps none."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("kaiming_uniform_", "uniform_", "normal_"):
            own = getattr(torch.nn.init, name)

            def drawn(tensor: torch.Tensor, *given: Any, _own: Any = own, **more: Any) -> torch.Tensor:
                return tensor if tensor.is_meta else _own(tensor, *given, **more)

            patch.setattr(torch.nn.init, name, drawn)
        yield
