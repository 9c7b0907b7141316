"""Every operation of ``kernels/``, compiled for every kind of NVIDIA and AMD GPU and executed without one.

The sizes and the bounds are those of ``kernels/self_tests.py``.
"""

import math
import re
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch

from machine_code import amd
from machine_code.launches import NVIDIA, TARGETS, Execution, compiled_for, executed
from machine_code.memory import MemoryFault, Race

pytestmark = pytest.mark.machine
pytest.importorskip("triton", reason="lacks what this test executes: triton")

from anygpu.kernels import activation, residual  # noqa: E402
from anygpu.kernels import self_tests as subject  # noqa: E402
from anygpu.kernels.library import DTYPES, TRITON, failures_raise  # noqa: E402
from anygpu.kernels.self_tests import ALLOWED, OPERATIONS, SelfTest, self_tests  # noqa: E402
from anygpu.kernels.terms import Gate  # noqa: E402

CPU = torch.device("cpu")
ORDERS = (0, 1)  # seeds
MASK = {"sm": (r"setp\.lt\.s32", "setp.le.s32"), "gfx": ("v_cmp_gt_i32", "v_cmp_ge_i32")}
ROUNDING = {"sm": (r"cvt\.rn\.bf16", "cvt.rz.bf16"), "gfx": (r"(v_add3_u32 .*|s_movk_i32 s\d+), 0x7fff$", r"\1, 0")}
STORE = {"sm": r"^.*\bst\.global\..*$", "gfx": r"^\s*(?:buffer|global)_store_.*$"}
# On gfx12 a wave says that it is there, and waits later.
BARRIER = re.compile(r"bar\.sync\s+0;|\bs_barrier(?:_wait -1)?$", re.M)


def found(how: Execution, *operations: str, dtypes: Sequence[torch.dtype] = DTYPES) -> list[SelfTest]:
    with executed(how):
        return [*self_tests(CPU, TRITON, operations or OPERATIONS, dtypes)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run of each operation, in a single block."""
    monkeypatch.setattr(subject, "SHAPES", subject.SHAPES[:1])


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    if request.param in amd.AMD and (reason := amd.lacks()):
        pytest.skip(reason)
    return request.param


def maker(target: str) -> str:
    return "sm" if target in NVIDIA else "gfx"


def test_every_operation_is_right(target: str) -> None:
    """With and without fused products: ptxas may choose."""
    with compiled_for(target):
        for contract in (False, True) if target in NVIDIA else (False,):
            cells = found(Execution(contract=contract))
            assert len(cells) == len(OPERATIONS) * len(DTYPES)
            assert not [str(cell) for cell in cells if not (cell.launched and cell.right)]


def test_whole_warps_in_random_order_leave_the_same_bits(target: str, small: None) -> None:
    with compiled_for(target):
        in_step, *others = (Execution(), *(Execution(seed=seed) for seed in ORDERS))
        for how in (in_step, *others):
            assert all(cell.right for cell in found(how))
        assert all(how.results == in_step.results for how in others)


@pytest.mark.parametrize("target", ["sm_75", "sm_90", "gfx942", "gfx1201"], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_blocks_and_odd_widths_are_right(target: str, dtype: torch.dtype) -> None:
    """Of widths that no tile divides."""
    generator = torch.Generator().manual_seed(0)
    x, branch = (torch.randn(2, 70, 47, generator=generator).to(dtype) for _ in range(2))
    wide, gate = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((3, 2300), (2, 1, 47)))
    with compiled_for(target), executed(Execution()) as how, failures_raise():
        results = [
            (residual.gated_residual(x, branch, Gate(gate), TRITON), residual.gated_residual_reference, (x, branch)),
            (activation.swiglu(wide, form=TRITON), activation.swiglu_reference, (wide,)),
        ]
    assert len(how.kernels) == len(results)
    for result, reference, terms in results:
        gates = (Gate(gate.double()),) if len(terms) > 1 else ()
        exact = reference(*(term.double() for term in terms), *gates)
        assert subject._error(result, exact) <= ALLOWED[dtype] * torch.finfo(dtype).eps


# ---- planted faults -----------------------------------------------------------------------------------------


def replacing(old: str, new: str) -> Callable[[str], str]:
    def mutated(text: str) -> str:
        return re.sub(old, new, text, flags=re.M)

    return mutated


def test_a_wrong_mask_is_found(target: str, small: None) -> None:
    with compiled_for(target):
        cells = found(Execution(mutate=replacing(*MASK[maker(target)])), "swiglu")
    assert [cell.fault.partition(":")[0] for cell in cells] == [MemoryFault.__name__] * 3


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942", "gfx1201"], indirect=True)
def test_a_wrong_rounding_is_found(target: str, small: None) -> None:
    """Before sm_80, before gfx950 and on Radeons it is made of integers."""
    with compiled_for(target):
        for operation in OPERATIONS:
            cells = found(Execution(mutate=replacing(*ROUNDING[maker(target)])), operation)
            assert [cell.right for cell in cells] == [True, True, False], operation


@pytest.mark.parametrize("target", ["sm_80", "gfx942", "gfx1201"], indirect=True)
def test_a_result_that_nobody_writes_is_found(target: str, small: None) -> None:
    """It is NaN before."""
    with compiled_for(target):
        cells = found(Execution(mutate=replacing(STORE[maker(target)], "")), "swiglu", "residual_norm")
    assert [cell.error for cell in cells] == [math.inf] * 6 and all(cell.launched for cell in cells)


def without_barrier(number: int) -> Callable[[str], str]:
    def mutated(text: str) -> str:
        place = [*BARRIER.finditer(text)][number : number + 1]
        return text[: place[0].start()] + text[place[0].end() :] if place else text

    return mutated


def test_each_barrier_is_needed_and_missed(target: str, small: None) -> None:
    """The kernels of these operations share memory between warps; the others have no barrier."""
    with compiled_for(target):
        for operation, dtype in product(("qk_norm_rope", "swiglu"), DTYPES):
            whole = Execution()
            assert all(cell.right for cell in found(whole, operation, dtypes=(dtype,)))
            barriers = [len(BARRIER.findall(text)) for text in whole.kernels]  # two in fp16: safe fp16 has its own,
            assert max(barriers) > 0, operation  # which for so short a row of swiglu needs one warp, and no barrier
            for number in range(max(barriers)):
                (cell,) = found(Execution(mutate=without_barrier(number)), operation, dtypes=(dtype,))
                assert Race.__name__ in cell.fault, (operation, dtype, number)
