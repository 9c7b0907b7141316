"""Core's own classes, tiny, through core's guider, fitted to machines without fast bf16."""

from __future__ import annotations

import pytest

from host.inside.asking import Inside

pytestmark = pytest.mark.host
full = pytest.mark.full

NEAR = 2e-3  # relative to core's fp32: the rounding of fp16 operands
USUAL = ("LTXV", "LTX-2", "Wan 2.2", "MiniMax H3", "Mochi", "SD3")
OTHERS = (
    "Wan 2.1", "HunyuanVideo", "HunyuanVideo 1.5", "Kandinsky 5", "Cosmos", "Cosmos Predict2", "Flux", "Qwen-Image",
    "Z-Image", "Lumina 2", "Hunyuan3D 2",
)  # fmt: skip


@pytest.mark.parametrize("name", [*USUAL, *(pytest.param(name, marks=full) for name in OTHERS)])
def test_safe_fp16_is_near_fp32_where_plain_fp16_is_not(inside: Inside, name: str) -> None:
    found = inside.play("core_fit", "near_fp32", name=name)
    assert found["plain"] > 10 * NEAR, "the residual does not leave fp16's range: the test tests nothing"
    assert found["safe"] <= NEAR
    assert found["restored"] and not found["traces"], "something of ours stayed on core's modules"
    assert found["said"][0].startswith("precision fp16-safe: auto: core would compute in fp32")
