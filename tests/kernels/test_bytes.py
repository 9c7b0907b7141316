"""Bytes that a block moves, counted on meta tensors: what the benchmark counts, and how far below eager it is."""

from pathlib import Path
from typing import Any

import kernels_bytes
import pytest
import torch
from runner import known_rows

NAMES = ("LTX", "HunyuanVideo double", "HunyuanVideo single", "Mochi")


def bytes_of(call: Any) -> int:
    with torch.no_grad(), kernels_bytes.Attention(), kernels_bytes.Bytes() as count:
        call()
    return count.total


def test_each_operand_is_counted_once_and_products_and_views_are_free() -> None:
    x, row, weight = (torch.empty(shape, device="meta") for shape in ((4, 8), (1, 8), (8, 8)))
    assert bytes_of(lambda: x + row) == 4 * (32 + 8 + 32)
    assert bytes_of(lambda: x + row.expand(4, 8)) == 4 * (32 + 8 + 32)
    assert bytes_of(lambda: x.t().unflatten(1, (2, 2))) == 0
    assert bytes_of(lambda: x @ weight) == 0
    assert bytes_of(lambda: (x @ weight).addmm_(x, weight)) == 4 * (32 + 32), "what it adds to was written before"
    assert bytes_of(lambda: x.t().contiguous()) == 4 * 64
    assert bytes_of(lambda: torch.zeros_like(x).copy_(row)) == 4 * (32 + 8 + 32)
    heads = torch.empty(1, 2, 4, 8, device="meta")
    attended = torch.nn.functional.scaled_dot_product_attention
    assert bytes_of(lambda: attended(heads, heads, heads).transpose(1, 2).flatten(2)) == 0


def test_a_fused_operation_reads_and_writes_each_tensor_once() -> None:
    from anygpu.kernels.norm import normalized
    from anygpu.kernels.residual import residual_norm
    from anygpu.kernels.terms import NO_GATE, RMS, Norm

    x = torch.empty((1, 4, 8), device="meta")
    assert bytes_of(lambda: normalized(x, Norm(RMS, 1e-6), out_dtype=torch.float16)) == 32 * (4 + 2)
    assert bytes_of(lambda: residual_norm(x, x, NO_GATE, Norm(RMS, 1e-6))) == 32 * 4 * 4


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.full) for name in NAMES[1:])])
def test_memory_bound_bytes_of_a_block(name: str) -> None:
    case = next(case for case in kernels_bytes.blocks() if case.name == name)
    eager, fused = kernels_bytes.counted(case, False), kernels_bytes.counted(case, True)
    found = eager.total / fused.total
    assert found >= case.demanded, f"{found:.2f}x, {case.demanded} demanded; fused: {fused.of.most_common(6)}"


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_memory_bound_bytes_of_a_block_under_safe_fp16(name: str) -> None:
    case = next(case for case in kernels_bytes.blocks() if case.name == name)
    eager, fused = (kernels_bytes.counted(case, fused, True).total for fused in (False, True))
    assert eager >= kernels_bytes.SAFE[name] * fused


@pytest.mark.full
@pytest.mark.parametrize("index", range(4))
def test_memory_bound_bytes_of_a_decode(index: int) -> None:
    case = kernels_bytes.DECODES[index]
    (eager, frames), (fused, same) = (kernels_bytes.decoded(case, fused) for fused in (False, True))
    assert frames.shape == same.shape and eager.total >= case.demanded * fused.total, fused.of.most_common(6)


def test_the_page_shows_what_the_benchmark_wrote() -> None:
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")
    for row in known_rows("kernels_bytes"):
        shown = f"{float(row['eager_u']):.1f} u | {float(row['fused_u']):.1f} u | {float(row['ratio']):.2f}×"
        assert f"| {row['block']} | {shown} |" in page
