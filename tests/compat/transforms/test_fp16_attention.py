"""Attention from fp16 operands: near to fp64 in every kernel that may compute it, or not in fp16 at all."""

import math

import pytest
import torch
from anygpu.compat.transforms.attention import Attention
from anygpu.compat.transforms.attention_chunks import chunked
from anygpu.compat.transforms.fp16_layers import MOST_VALUE, fp16_operands
from attention_cases import (
    HALF,
    Kernel,
    crafted,
    drawn,
    exact,
    fused,
    scaled_scores,
    scores_before_the_scale,
    sums_of_64_keys_in_fp16,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

NEAR = 2e-3
KERNELS: tuple[Kernel, ...] = (fused, scores_before_the_scale, scaled_scores, sums_of_64_keys_in_fp16)


@torch.no_grad()
@pytest.mark.parametrize("kernel", KERNELS)
def test_finite_operands_are_near_in_fp16_or_left_in_fp32(kernel: Kernel) -> None:
    taken = set()
    for name, query, key, value, mask in crafted():
        narrow = fp16_operands(query, key, value, mask)
        if narrow is None:
            continue
        assert all(bool(each.isfinite().all()) for each in (narrow.query, narrow.key, narrow.value)), name
        assert float(narrow.value.abs().max()) <= MOST_VALUE, name
        found = kernel(narrow.query, narrow.key, narrow.value, narrow.mask).float() * narrow.scale
        expected = exact(query, key, value, mask)
        assert float((found - expected).norm() / expected.norm()) <= NEAR, name
        taken.add(name)
    assert {"usual", "no queries", "a small bias", "a causal mask of the least number"} <= taken
    assert "q x 0.0001, k x 10000.0, v x 1.0" in taken and "q x 3.0, k x 3.0, v x 1e+30" in taken
    assert not taken & {
        "one channel beyond 2^30", "maxima in different channels", "terms that cancel", "a row that sees no key",
        "a large value behind a mask", "a large bias", "one head larger",
    }  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("size", [4.0**power for power in range(-13, 14)])
def test_no_size_of_queries_keys_and_values_is_wrong(size: float) -> None:
    """Against fp64, by whichever way is taken: the way in fp16 and the exact one meet without a gap."""
    for first, second, third in (
        (size, 1.0, 1.0),
        (size, 1 / size, 1.0),
        (size**0.5, size**0.5, size),
        (1.0, 1.0, size),
    ):
        query, key, value = drawn(1) * first, drawn(2) * second, drawn(3) * third
        narrow = fp16_operands(query, key, value)
        if narrow is None:
            found = chunked(query, key, value)
        else:
            found = scores_before_the_scale(narrow.query, narrow.key, narrow.value, None).float() * narrow.scale
        expected = exact(query, key, value, None)
        assert float((found - expected).norm() / expected.norm()) <= NEAR, (first, second, third)


def test_operands_that_are_not_finite_are_not_narrowed() -> None:
    query, key, value = drawn(1), drawn(2), drawn(3)
    for wrong in (math.nan, math.inf):
        for place in range(3):
            operands = [query.clone(), key.clone(), value.clone()]
            operands[place][0, 0, 0, 0] = wrong
            assert fp16_operands(*operands) is None


@torch.no_grad()
def test_small_calls_in_fp16_do_not_go_through_torchs_math(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which forms scores in fp16 in a process where ComfyUI allows it that reduction."""
    monkeypatch.setattr("anygpu.compat.transforms.attention.fused_kernel", lambda *_: "")
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        query, key, value = (drawn(seed).abs() * size for seed, size in ((1, 120.0), (2, 120.0), (3, 1.0)))
        with sdpa_kernel(SDPBackend.MATH):
            found = Attention()(query.to(HALF), key.to(HALF), value.to(HALF))
        expected = exact(query.to(HALF), key.to(HALF), value.to(HALF), None)
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)
    assert float((found - expected).norm() / expected.norm()) <= NEAR
