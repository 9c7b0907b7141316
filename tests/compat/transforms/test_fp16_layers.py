"""Safe fp16 beside a LoRA: what peft adds to attention's values is divided as they are."""

from typing import Any

import pytest
import torch
from anygpu.compat.memory.parts import Undo
from anygpu.compat.transforms import fp16_layers
from anygpu.compat.transforms.fp16_layers import HALF, SCALE, SETTINGS, LayerSettings
from torch import nn


def adapted(kind: str, size: float, values: Any = None, bias: bool = False) -> tuple[nn.Module, torch.Tensor]:
    """A peft layer around a Linear of attention's values or their projection, and an input of this size."""
    import peft

    torch.manual_seed(0)
    holder = nn.Sequential(nn.Linear(32, 32))
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0"], init_lora_weights=False, lora_bias=bias)
    peft.inject_adapter_in_model(config, holder, adapter_name="lora_0")
    layer = holder[0]
    base = layer.base_layer
    base.weight.data, base.bias.data = base.weight.data.to(HALF), base.bias.data.to(HALF)
    reach = max(1.0, float(torch.linalg.vector_norm(base.weight.float(), dim=1).max()))
    setattr(base, SETTINGS, LayerSettings(False, reach, False, values))
    undo = Undo()
    undo.patch(base, fp16_layers.value_linear if kind == "value" else fp16_layers.fp32_linear)
    undo.patch(layer, getattr(fp16_layers, f"adapted_{kind}"))
    return layer, torch.randn(2, 5, 32) * size


@pytest.mark.parametrize("size", [1.0, 1e5])
@pytest.mark.parametrize("active", [True, False])
@torch.no_grad()
def test_values_and_what_a_lora_adds_share_one_divisor(size: float, active: bool) -> None:
    layer, x = adapted("value", size)
    layer.enable_adapters(active)
    wide, base = x.double(), layer.base_layer
    expected = wide @ base.weight.double().t() + base.bias.double()
    if active:
        expected += wide @ layer.lora_A["lora_0"].weight.double().t() @ layer.lora_B["lora_0"].weight.double().t() * 2
    found = layer(x)
    scale = base.__dict__[SCALE]
    assert found.dtype is HALF and bool(found.isfinite().all())
    assert float(scale) > 1 or size == 1.0, "the divisor does nothing"
    error = (found.double() * scale - expected).norm() / expected.norm()
    assert float(error) < 4 * torch.finfo(HALF).eps, "two roundings of operands and one of the result"


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_what_a_lora_adds_to_the_projection_of_divided_values_is_multiplied_back(leaves: bool, bias: bool) -> None:
    """By the block's sum, or here where a step cache calls the attention."""
    values = nn.Identity()
    layer, x = adapted("out", 1.0, values, bias)
    whole = adapted("out", 1.0, bias=bias)[0](4 * x)
    values.__dict__[SCALE], getattr(layer.base_layer, SETTINGS).leaves = torch.tensor(4.0), leaves
    torch.testing.assert_close(layer(x.to(HALF)) * (4 if leaves else 1), whole, rtol=2e-3, atol=2e-3)
