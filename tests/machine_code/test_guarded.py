"""Kernels that reach beyond their tensors, with plain loads and stores in a child process."""

import ctypes

import pytest
import torch

from machine_code.guarded import Guarded, Pages, in_child
from machine_code.memory import MemoryFault

pytestmark = pytest.mark.machine
SIZES = (16, 256, 4096, 5008)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("past", [0, 1])
def test_the_byte_after_a_tensor_is_no_memory(size: int, past: int) -> None:
    pages = Pages(size)
    read = lambda: ctypes.string_at(pages.address + size - 1 + past, 1)  # noqa: E731
    if not past:
        assert in_child(read) == b"\xff"
        return
    with pytest.raises(MemoryFault):
        in_child(read)


@pytest.mark.parametrize(("every", "beside"), [(0, 14), (0, -2), (1, 2)])
def test_a_write_beside_or_between_elements_is_found(every: int, beside: int) -> None:
    """A tensor of seven halves ends two bytes before an unreadable page; every other column belongs to nobody."""
    guarded = Guarded(torch.arange(14, dtype=torch.float16)[:: 1 + every][:7])
    in_child(lambda: ctypes.memset(guarded.pages.address + beside, 0, 2))
    with pytest.raises(MemoryFault, match="beside"):
        guarded.bring_back()


def test_what_a_child_writes_comes_back_and_the_rest_stays() -> None:
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    rows = whole[:, 1].unsqueeze(1).expand(3, 5)  # five columns share one
    guarded = Guarded(rows)
    in_child(lambda: ctypes.memset(guarded.pages.address + 16, 0, 4))
    guarded.bring_back()
    assert whole[:, 1].tolist() == [1, 0, 9] and whole[:, 0].tolist() == [0, 4, 8]


def test_what_a_child_raises_is_raised_here() -> None:
    with pytest.raises(ZeroDivisionError):
        in_child(lambda: 1 // 0)
