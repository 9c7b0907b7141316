"""Safe fp16 beside a LoRA: what peft adds to attention's values is divided as they are."""

import pytest
import torch
from anygpu.compat.memory.parts import Undo
from anygpu.compat.transforms.fp16_layers import HALF, SCALE, SETTINGS, LayerSettings, adapted_value, value_linear
from torch import nn


def adapted(features: int, size: float) -> tuple[nn.Module, torch.Tensor]:
    """A peft layer around a Linear of attention's values, and an input whose product is far beyond fp16."""
    import peft

    torch.manual_seed(0)
    holder = nn.Sequential(nn.Linear(features, features))
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, holder, adapter_name="lora_0")
    layer = holder[0]
    base = layer.base_layer
    base.weight.data, base.bias.data = base.weight.data.to(HALF), base.bias.data.to(HALF)
    reach = max(1.0, float(torch.linalg.vector_norm(base.weight.float(), dim=1).max()))
    setattr(base, SETTINGS, LayerSettings(False, reach, False, None))
    undo = Undo()
    undo.patch(base, value_linear)
    undo.patch(layer, adapted_value)
    return layer, torch.randn(2, 5, features) * size


@pytest.mark.parametrize("size", [1.0, 1e5])
@pytest.mark.parametrize("active", [True, False])
@torch.no_grad()
def test_values_and_what_a_lora_adds_share_one_divisor(size: float, active: bool) -> None:
    layer, x = adapted(32, size)
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
