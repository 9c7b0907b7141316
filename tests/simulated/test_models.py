"""Real diffusers transformers and every offload that diffusers and accelerate have, on the simulated accelerator."""

import pytest
import torch

from simulated import accelerator

accelerate = pytest.importorskip("accelerate")
diffusers = pytest.importorskip("diffusers")


def _mochi():
    return diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16,
        in_channels=12, text_embed_dim=16, time_embed_dim=4, max_sequence_length=16,
    )  # fmt: skip


def _mochi_inputs():
    return {
        "hidden_states": torch.randn(1, 12, 2, 8, 8),
        "encoder_hidden_states": torch.randn(1, 16, 16),
        "timestep": torch.tensor([500.0]),
        "encoder_attention_mask": (torch.arange(16) < 9)[None],
    }


def _case(dtype=torch.float32):
    """A model on the CPU, its inputs and its output there."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, inputs = _mochi(), _mochi_inputs()
    model = model.eval().requires_grad_(False)
    for parameter in model.parameters():  # `.to(dtype)` warns about modules that diffusers keeps in float32
        parameter.data = parameter.data.to(dtype)
    inputs = {
        name: value.to(dtype) if value.is_floating_point() and name != "timestep" else value
        for name, value in inputs.items()
    }
    return model, inputs, _output(model, inputs, "cpu")


def _output(model, inputs, device):
    with torch.no_grad():
        return model(**{name: value.to(device) for name, value in inputs.items()}, return_dict=False)[0]


@pytest.fixture(autouse=True)
def _accelerator_first(acc):
    """Loads the device before any model is built, as a program on a GPU machine does."""


pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_transformer_equals_cpu_bit_for_bit(acc, dtype):
    model, inputs, expected = _case(dtype)
    model.to(acc)
    found = _output(model, inputs, acc)
    assert found.device == acc and torch.equal(found.cpu(), expected)
    with torch.inference_mode():
        assert torch.equal(_output(model, inputs, acc).cpu(), expected)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        _output(model, inputs, "cpu")


@pytest.mark.parametrize(
    "options",
    [
        {"offload_type": "leaf_level"},
        {"offload_type": "block_level", "num_blocks_per_group": 1},
        {"offload_type": "leaf_level", "use_stream": True},
        {"offload_type": "leaf_level", "use_stream": True, "record_stream": True},
        {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True, "low_cpu_mem_usage": True},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_group_offload(acc, options):
    model, inputs, expected = _case()
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    model.enable_group_offload(onload_device=acc, offload_device=torch.device("cpu"), **options)
    for _ in range(2):
        accelerator.reset_traffic()
        assert torch.equal(_output(model, inputs, acc).cpu(), expected)
        copied = accelerator.traffic()
        assert copied.to_device_bytes >= weight_bytes
        assert (copied.to_host_bytes >= weight_bytes) == ("use_stream" not in options)
    assert accelerator.memory().allocated_bytes < weight_bytes / 10
    if options == {"offload_type": "leaf_level"}:  # one layer at a time; prefetching holds a second one
        assert accelerator.memory().peak_bytes < weight_bytes


def test_offloads_of_accelerate(acc):
    model, inputs, expected = _case()
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    accelerate.cpu_offload(model, execution_device=acc)
    for _ in range(2):
        accelerator.reset_traffic()
        assert torch.equal(_output(model, inputs, acc).cpu(), expected)
        assert accelerator.traffic().to_device_bytes >= weight_bytes
    assert next(model.parameters()).device.type == "meta"
    assert accelerator.memory().peak_bytes < weight_bytes
    model, hook = accelerate.cpu_offload_with_hook(_case()[0], execution_device=acc)
    for _ in range(2):
        assert torch.equal(_output(model, inputs, acc).cpu(), expected)
        assert next(model.parameters()).device == acc
    hook.offload()
    assert next(model.parameters()).device.type == "cpu" and accelerator.memory().peak_bytes > weight_bytes


def test_model_larger_than_the_device(acc):
    model, inputs, expected = _case()
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with accelerator.limit(weight_bytes * 9 // 10):
        with pytest.raises(torch.OutOfMemoryError):
            model.to(acc)
        model.to("cpu")
        model.enable_group_offload(onload_device=acc, offload_type="leaf_level")
        assert torch.equal(_output(model, inputs, acc).cpu(), expected)
