"""Products of 8-bit weights as stored: near the unpacked ones, only where chosen, only where the device has them."""

from dataclasses import replace

import pytest
import tiny
import torch
from anygpu.compat.checkpoints.packed import EIGHT, StoredLinear, pack, rounded
from anygpu.compat.device.facts import facts_for
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.transforms import products
from anygpu.compat.transforms.products import PRODUCTS, formats_on, multiply_as_stored, require_stored_matmuls
from anygpu.pipelines import stages
from anygpu.pipelines.base import PromptRequest, SampleSettings
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.speed import Speed, SpeedRequest
from torch import nn

CPU = facts_for("cpu")
TURING, ADA = (replace(CPU, backend="cuda", arch=arch) for arch in ("sm75", "sm89"))
STEP = {"int8": 1 / 254, "fp8": 2**-4}  # of the largest value: half a step of the format


@pytest.fixture
def layer():
    torch.manual_seed(0)

    def made(choice: str, rows: int = 48, columns: int = 64) -> nn.Linear:
        linear = nn.Linear(columns, rows).requires_grad_(False)
        pack(linear, dtype=torch.float32, **rounded(linear.weight, choice))
        return linear

    return made


@pytest.mark.parametrize("choice", EIGHT)
def test_it_differs_from_the_exact_product_by_the_rounding_of_its_input(layer, choice):
    linear, x = layer(choice), torch.randn(2, 20, 64)
    exact = linear(x)
    count, undo = multiply_as_stored(linear, tuple(PRODUCTS))
    found = linear(x)
    bound = STEP[choice] * x.abs().amax(-1, keepdim=True) * linear.weight.abs().sum(1)
    assert count == 1 and found.shape == exact.shape and not torch.equal(found, exact)
    assert bool(((found - exact).abs() <= bound * 1.001 + 1e-6).all())
    undo()
    assert torch.equal(linear(x), exact)


LOUD = [
    pytest.param(choice, most, by, dtype, marks=[] if (choice, by) == ("int8_convrot", quick) else [pytest.mark.full])
    for dtype, quick in ((torch.float32, ""), (torch.bfloat16, "kitchen"), (torch.float16, "torch"))
    for choice, most in (("int8_convrot", 0.013), ("w4a8", 0.08))
    for by in ("kitchen", "torch")
    if (choice, by) != ("w4a8", "torch")
]


@pytest.mark.parametrize(("choice", "most", "by", "dtype"), LOUD)
def test_loud_channels_cost_a_rotated_layer_nothing(monkeypatch, choice, most, by, dtype):
    """Against the weights before they were rounded; comfy-kitchen's own dispatch gives the same."""
    torch.manual_seed(0)
    linear = nn.Linear(1024, 256).requires_grad_(False)
    quiet = torch.randn(64, 1024)
    loud = quiet.clone()
    loud[:, ::200] *= 40
    exact = [linear(x) for x in (quiet, loud)]
    pack(linear, dtype=dtype, **rounded(linear.weight, choice))
    if by == "torch":
        monkeypatch.setattr(products, "kitchen", lambda: None)
    multiplied, _ = multiply_as_stored(linear, tuple(PRODUCTS))
    assert multiplied
    found = [linear(x.to(dtype)).float() for x in (quiet, loud)]
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    assert max(errors) <= most and errors[1] <= 1.1 * errors[0]
    if by == "kitchen" and dtype is not torch.float16:
        assert torch.equal(linear(quiet.to(dtype)), by_layout(linear, quiet.to(dtype)))


def by_layout(linear: StoredLinear, x: torch.Tensor) -> torch.Tensor:
    """The product as ComfyUI computes it: comfy-kitchen's tensor in torch's own linear."""
    import comfy_kitchen.tensor as ck

    common = {"orig_dtype": x.dtype, "orig_shape": (256, 1024), "convrot_groupsize": linear.group}
    if linear.codec == "scaled":
        name, params = "TensorWiseINT8Layout", {"scale": linear.scale, "convrot": True}
    else:
        name, params = "AsymW4A8Int8Layout", {"scale": linear.s_rel.view(torch.float8_e4m3fn)}
        params |= {"s_channel": linear.s_channel[:, 0], "codebook": linear.codebook[0]}
    weight = ck.QuantizedTensor(linear.stored.data, name, getattr(ck, name).Params(**params, **common))
    return nn.functional.linear(x, weight, linear.bias.to(x.dtype))


@pytest.mark.parametrize(("rows", "tokens"), [(48, 16), (40, 20)])
def test_few_tokens_and_odd_sides_compute_as_always(layer, rows, tokens):
    linear, x = layer("int8", rows), torch.randn(1, tokens, 64)
    exact = linear(x)
    multiply_as_stored(linear, tuple(PRODUCTS))
    assert torch.equal(linear(x), exact)


def test_the_device_decides_which_formats_it_multiplies(monkeypatch):
    assert formats_on(TURING) == (), "torch's own int8 product is wrong there for some shapes"
    monkeypatch.setattr("anygpu.compat.device.packed_paths.kitchen_backend", lambda *_: ("cuda", ""))
    assert formats_on(TURING) == ("int8",), "and not W4A8: comfy-kitchen has no kernel for it there"
    assert formats_on(replace(TURING, name="NVIDIA GeForce GTX 1660 Ti")) == ()
    assert formats_on(ADA) == ("int8", "fp8", "w4a8")
    monkeypatch.setattr(products, "kitchen", lambda: None)
    assert formats_on(ADA) == ("int8", "fp8"), "torch multiplies no W4A8"
    for facts in (CPU, replace(ADA, backend="rocm", arch="gfx1100"), replace(ADA, arch="sm70"), replace(ADA, arch="")):
        with pytest.raises(UnsupportedError, match=r"stored_products on cpu: .* expected an NVIDIA GPU"):
            require_stored_matmuls(facts)


@pytest.mark.parametrize(("weights", "count"), [("int8", 2), ("auto", 2), ("fp8", 1)])
def test_a_sampling_has_it_and_says_so(tiny_folder, recorded, monkeypatch, weights, count):
    folder, prompt = tiny.build("ltx", tiny_folder), PromptRequest("a fox")
    with pytest.raises(UnsupportedError, match="stored_products on cpu"):
        load(LoadRequest(folder, device="cpu", speed=SpeedRequest(stored_products=True)))
    monkeypatch.setattr("anygpu.pipelines.speed.require_stored_matmuls", lambda facts: tuple(PRODUCTS)[:count])
    found = []
    for chosen in (False, True):
        request = LoadRequest(folder, device="cpu", weights=weights, speed=SpeedRequest(stored_products=chosen))
        pipeline, progress = load(request), recorded()
        embeds = stages.encode_prompt(pipeline, prompt, progress)
        found.append(stages.sample(pipeline, embeds, None, SampleSettings(128, 96, 17, steps=2), progress).samples)
    assert isinstance(pipeline.plan.speed, Speed)
    layers = sum(isinstance(one, StoredLinear) for one in pipeline.parts["transformer"].modules())
    if weights != "int8":
        assert torch.equal(*found)
        kinds = " or ".join(("int8", "fp8")[:count])
        assert f"no effect: no transformer weight is {kinds}, which this device multiplies" in progress.said[-1]
    else:
        assert any(f", {layers} layers multiplied as stored" in line for line in progress.said)
        assert not torch.equal(*found)
