"""The interpreter's arithmetic against numbers that can be worked out, and the faults that it must find."""

import numpy as np
import pytest

from machine_code import arithmetic
from machine_code.interpreter import Deadlock, Launch
from machine_code.memory import GlobalMemory, MemoryFault, Race
from machine_code.program import contracted, parsed

pytestmark = pytest.mark.machine
BASE = 4096
HEAD = """.visible .entry k(
	.param .u64 .ptr .global .align 1 k_param_0
)
.reqntid 64
{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<9>;
	ld.param.b64 	%rd1, [k_param_0];
	mov.u32 	%r1, %tid.x;
	shl.b32 	%r2, %r1, 2;
	mul.wide.u32 	%rd2, %r1, 4;
	add.s64 	%rd3, %rd1, %rd2;
"""
MIRROR = """	st.shared.b32 	[%r2], %r1;
	bar.sync 	0;
	xor.b32 	%r3, %r2, 252;
	ld.shared.b32 	%r4, [%r3];
	st.global.b32 	[%rd3], %r4;
	ret;
}"""  # lane i takes the number of lane 63 - i


def result(body: str, size: int = 256, seed: int | None = None, fuse: bool = False) -> np.ndarray:
    """The 32-bit words that a kernel with 64 lanes and 256 bytes of shared memory leaves."""
    data = np.zeros(size, np.uint8)
    program = parsed(HEAD + body)
    order = None if seed is None else np.random.default_rng(seed)
    launch = Launch(contracted(program) if fuse else program, [BASE], 1, 256, GlobalMemory([(BASE, data)]), order)
    launch.run()
    return data.view(np.uint32)


def test_lanes_exchange_through_shared_memory_in_any_order() -> None:
    for seed in (None, 0, 1, 2):
        assert result(MIRROR, seed=seed).tolist() == list(range(63, -1, -1))


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_missing_barrier_is_a_race(seed: int | None) -> None:
    with pytest.raises(Race):
        result(MIRROR.replace("\tbar.sync 	0;\n", ""), seed=seed)


def test_two_warps_that_write_one_byte_are_a_race() -> None:
    with pytest.raises(Race, match="same byte"):
        result("\tmov.b32 %r3, 0;\n\tst.shared.b32 [%r3], %r1;\n\tret;\n}")


def test_an_access_outside_is_an_error() -> None:
    with pytest.raises(MemoryFault, match="1 lanes access 4 bytes outside"):
        result(MIRROR, size=252)
    with pytest.raises(MemoryFault, match="shared"):
        result(MIRROR.replace("xor.b32 	%r3, %r2, 252", "add.s32 %r3, %r2, 4"))
    with pytest.raises(MemoryFault, match="multiple"):
        result(MIRROR.replace("xor.b32 	%r3, %r2, 252", "add.s32 %r3, %r2, 2"))


def test_a_barrier_that_some_lanes_never_reach_is_an_error() -> None:
    with pytest.raises(Deadlock):
        result("	setp.lt.s32 %p1, %r1, 7;\n	@%p1 ret;\n" + MIRROR)


def test_shared_memory_that_nobody_wrote_is_nan() -> None:
    words = result("	ld.shared.b32 	%r4, [%r2];\n	st.global.b32 	[%rd3], %r4;\n	ret;\n}")
    assert np.isnan(words.view(np.float32)).all()


def test_lanes_that_parted_meet_again() -> None:
    body = """	setp.lt.s32 %p1, %r1, 5;
	mov.b32 %r5, 7;
	@%p1 bra $L__1;
	mov.b32 %r5, 9;
$L__1:
	shfl.sync.bfly.b32 %r6, %r5, 1, 31, -1;
	st.global.b32 [%rd3], %r6;
	ret;
}"""
    assert result(body)[:8].tolist() == [7, 7, 7, 7, 9, 7, 9, 9]


def test_a_product_and_a_sum_are_fused_only_where_both_may_be() -> None:
    body = """	mov.b32 %r3, 0f3F800001;
	mul.f32 %r4, %r3, %r3;
	add.f32 %r5, %r4, 0fBF800002;
	st.global.b32 [%rd3], %r5;
	ret;
}"""
    assert result(body).view(np.float32)[0] == 0
    assert result(body, fuse=True).view(np.float32)[0] == 2.0**-46
    for exact in (body.replace("mul.f32", "mul.rn.f32"), body.replace("add.f32", "add.rn.f32")):
        assert result(exact, fuse=True).view(np.float32)[0] == 0


def words(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint32)


def test_fma_rounds_once() -> None:
    """1 + 2^-23 + 2^-24 - 2^-60 lies below the middle of two numbers; in fp64 it is the middle itself."""
    a, b, c = (np.array([x], np.float32) for x in (2.0**-24 * (1 + 2.0**-18), 1 - 2.0**-18, 1 + 2.0**-23))
    assert arithmetic.fma(a, b, c)[0] == c[0]
    assert (a.astype(np.float64) * b + c).astype(np.float32)[0] == np.float32(1 + 2.0**-22)  # what rounding twice gives
    half, one, low = (np.array([x], np.float32) for x in (1 + 2.0**-12, 1, -(2.0**-11)))
    assert arithmetic.fma(half, half, low)[0] == one[0]  # 1 + 2^-24, a tie: to even


def test_bf16_is_rounded_to_nearest_and_ties_to_even() -> None:
    bits = words(0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0x7FC00001, 0xBF80FFFF)
    assert arithmetic.bf16_from(bits.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FFF, 0xBF81]
    assert arithmetic.bf16_from(bits.view(np.float32), to_nearest=False)[5] == 0xBF80


def test_bits() -> None:
    assert arithmetic.permuted(words(0x80112233), words(0x44556677), words(0x4B03)).tolist() == [0x77FF3380]
    assert arithmetic.field_of(words(0xABCD), words(4), words(8)).tolist() == [0xBC]
    assert arithmetic.field_of(words(8).view(np.int32), words(3), words(1)).tolist() == [-1]
    assert arithmetic.shifted(words(1, 1), words(31, 32), left=True).tolist() == [1 << 31, 0]
    assert arithmetic.shifted(words(1 << 31).view(np.int32), words(40), left=False).tolist() == [-1]
    assert [part.tolist() for part in arithmetic.divided(np.int32([-7, 7]), np.int32([2, -2]))] == [[-3, -3], [-1, 1]]
    assert arithmetic.packed(np.float32([2]), np.float32([1]), "f16x2", "rn").tolist() == [0x40003C00]


def test_comparisons_with_nan() -> None:
    nan, one = np.float32([np.nan]), np.float32([1])
    found = [bool(arithmetic.compared(name, nan, one)[0]) for name in ("lt", "ge", "ne", "ltu", "geu", "nan", "num")]
    assert found == [False, False, False, True, True, True, False]


def test_subnormal_numbers_are_flushed_to_zeros_of_their_sign() -> None:
    found = arithmetic.flushed(np.float32([1e-40, -1e-40, 1e-30]))
    assert found.tolist() == np.float32([0.0, -0.0, 1e-30]).tolist() and np.signbit(found).tolist() == [0, 1, 0]


def test_an_approximation_moves_by_at_most_two_ulp_and_always_the_same() -> None:
    x = np.random.default_rng(0).random(4096, np.float32) + np.float32(0.5)
    moved = arithmetic.approximated(np.sqrt(x.astype(np.float64)), x)
    steps = moved.view(np.int32) - np.sqrt(x.astype(np.float64)).astype(np.float32).view(np.int32)
    assert sorted(set(steps.tolist())) == [-2, -1, 0, 1, 2]
    assert np.array_equal(moved, arithmetic.approximated(np.sqrt(x.astype(np.float64)), x))


STORES = ("st.shared.b32 [%r2], %r3;", "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r4], {%r3};")


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_moves(store: str, transposed: bool) -> None:
    """stmatrix stores as st does where lane l has word l; ldmatrix reads that, or takes both halves from two rows."""
    trans = ".trans" if transposed else ""
    body = f"""	and.b32 %r3, %r1, 31;
	setp.gt.s32 %p1, %r1, 31;
	@%p1 ret;
	and.b32 %r4, %r3, 7;
	shl.b32 %r4, %r4, 4;
	{store}
	ldmatrix.sync.aligned.m8n8.x1{trans}.shared.b16 {{%r5}}, [%r4];
	st.global.b32 [%rd3], %r5;
	ret;
}}"""
    matrix = np.zeros((8, 8), np.uint16)
    matrix[:, ::2] = np.arange(32).reshape(8, 4)  # lane l stored l in elements 2 (l % 4) and 0 behind it, of row l // 4
    expected = np.ascontiguousarray(matrix.T if transposed else matrix).reshape(-1).view(np.uint32)
    assert np.array_equal(result(body)[:32], expected)
