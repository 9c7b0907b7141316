"""Every operation of ``kernels/``, compiled for every kind of NVIDIA GPU and executed without one.

The sizes and the bounds are those of ``kernels/self_tests.py``: many instructions, few shapes.
"""

import re
from collections.abc import Callable

import pytest
import torch

from machine_code.launches import TARGETS, Execution, compiled_for, executed
from machine_code.memory import MemoryFault, Race

pytestmark = pytest.mark.machine
pytest.importorskip("triton", reason="lacks what this test executes: triton")

from anygpu.kernels.library import TRITON  # noqa: E402
from anygpu.kernels.self_tests import SelfTest, self_tests  # noqa: E402

CPU = torch.device("cpu")
ROUNDED_TWICE = ("residual_norm",)  # its norm reads a sum that was rounded before
HALF = 0.5 * 17 / 16  # eps of a result that is rounded once, and a little for the sums before
ORDERS = (0, 1)  # seeds
BARRIER = re.compile(r"bar\.sync\s+0;")


def found(how: Execution, only: str = "") -> list[SelfTest]:
    with executed(how):
        return [*self_tests(CPU, TRITON, only)]


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return request.param


def test_every_operation_is_right(target: str) -> None:
    """With and without fused products: ptxas may choose."""
    with compiled_for(target):
        for contract in (False, True):
            cells = found(Execution(contract=contract))
            assert len(cells) == 27
            assert not [str(cell) for cell in cells if not (cell.launched and cell.right)]
            assert not [str(cell) for cell in cells if not rounded_once(cell)]


def rounded_once(cell: SelfTest) -> bool:
    """True where a 16-bit result is as near as rounding to nearest brings it; the pack's bound allows twice that."""
    narrow = cell.dtype != torch.float32 and cell.name not in ROUNDED_TWICE
    return not narrow or cell.error <= HALF * torch.finfo(cell.dtype).eps


def test_whole_warps_in_random_order_leave_the_same_bits(target: str) -> None:
    with compiled_for(target):
        in_step, *others = (Execution(), *(Execution(seed=seed) for seed in ORDERS))
        for how in (in_step, *others):
            assert all(cell.right for cell in found(how))
        assert all(how.results == in_step.results for how in others)


# ---- planted faults -----------------------------------------------------------------------------------------


def replacing(old: str, new: str) -> Callable[[str], str]:
    def mutated(text: str) -> str:
        return re.sub(old, new, text)

    return mutated


def test_a_wrong_mask_is_found(target: str) -> None:
    with compiled_for(target):
        cells = found(Execution(mutate=replacing(r"setp\.lt\.s32", "setp.le.s32")), "gelu_tanh")
    assert [cell.fault.partition(":")[0] for cell in cells] == [MemoryFault.__name__] * 3


@pytest.mark.parametrize("target", ["sm_80", "sm_90"], indirect=True)
def test_a_wrong_rounding_is_found(target: str) -> None:
    """Before sm_80 the rounding is made of integers. Half an eps of the largest value hides it in other operations."""
    with compiled_for(target):
        for operation in ("normalized", "gated_residual", "gelu_tanh"):
            cells = found(Execution(mutate=replacing(r"cvt\.rn\.bf16", "cvt.rz.bf16")), operation)
            assert [rounded_once(cell) for cell in cells] == [True, True, False], operation


def without_barrier(number: int) -> Callable[[str], str]:
    def mutated(text: str) -> str:
        place = [*BARRIER.finditer(text)][number : number + 1]
        return text[: place[0].start()] + text[place[0].end() :] if place else text

    return mutated


def test_each_barrier_is_needed_and_missed(target: str) -> None:
    """The kernels of these operations share memory between warps; the others have no barrier."""
    with compiled_for(target):
        for operation in ("qk_norm_rope", "geglu", "swiglu"):
            whole = Execution()
            assert all(cell.right for cell in found(whole, operation))
            barriers = [len(BARRIER.findall(text)) for text in whole.kernels]  # one kernel for each dtype
            assert min(barriers) > 0, operation
            for number in range(max(barriers)):
                cells = found(Execution(mutate=without_barrier(number)), operation)
                raced = [Race.__name__ in cell.fault for cell in cells]
                assert raced == [count > number for count in barriers], (operation, number)
