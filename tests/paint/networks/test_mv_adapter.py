"""MV-Adapter's layers against a second writing of its published processors, on tiny random weights in fp32."""

from functools import cache

import pytest
import torch
from anygpu.compat.errors import CheckpointError
from anygpu.paint.networks.layers import Dtypes
from anygpu.paint.networks.mv_adapter import (
    AdapterInputs,
    encoder_for,
    forward,
    looked_at,
    require_tensors,
    set_dtypes,
    set_kernel,
    unet_for,
    variant_of,
)
from anygpu.paint.networks.published import stored_dtype

from paint import mv_published, mv_stored

TOLERANCE = 1e-5
SIDE = {"sdxl": 8, "sd21": 8}  # of the latents


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def inputs(base: str, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    side, width = SIDE[base], mv_stored.unet_config(base)["cross_attention_dim"]
    given = {
        "x": torch.randn(6, 4, side, side, generator=generator),
        "reference": torch.randn(1, 4, side, side, generator=generator),
        "text": torch.randn(rows, 7, width, generator=generator),
        "maps": torch.rand(6, 6, 8 * side, 8 * side, generator=generator),
        "pooled": torch.randn(rows, mv_stored.POOLED, generator=generator),
    }
    return given


def added(base: str, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if base == "sd21":
        return {}
    ids = torch.tensor([[768.0, 768, 0, 0, 768, 768]]).expand(len(given["text"]), -1)
    return {"text_embeds": given["pooled"], "time_ids": ids}


def predicted(made, variant, base, given, guided, **scales):
    unet, more = made["unet"], added(base, given)
    states = made["adapter"](given["maps"])
    last = {name: value[-1:] for name, value in more.items()}
    kept = looked_at(unet, given["reference"], given["text"][-1:], last) if variant == "ig2mv" else {}
    rows = (False, True) if guided else (True,)
    run = AdapterInputs(kept, rows, scales.get("ref_scale", 1.0), scales.get("mv_scale", 1.0))
    x = torch.cat([given["x"]] * len(rows))
    return forward(unet, x, torch.tensor([431.0]), given["text"], more, run, states)


def oracle(made, variant, base, given, guided, **scales):
    unet = mv_published.unet_of(mv_stored.unet_config(base), variant == "ig2mv").eval()
    unet.load_state_dict(made["unet"].state_dict())
    reference = given["reference"] if variant == "ig2mv" else None
    states = made["adapter"](given["maps"])
    more = added(base, given)
    time = torch.tensor(431.0)
    return mv_published.predicted(unet, given["x"], time, given["text"], more, states, reference, guided, **scales)


SCALES = {"ref_scale": 0.6, "mv_scale": 1.3}


@pytest.mark.parametrize(
    ("base", "variant", "guided", "scales"),
    [
        ("sdxl", "ig2mv", True, SCALES),
        ("sd21", "ig2mv", False, {}),
        ("sd21", "tg2mv", True, {}),
        *(
            pytest.param(*given, marks=pytest.mark.full)
            for given in (
                ("sdxl", "ig2mv", True, {}),
                ("sd21", "ig2mv", True, {}),
                ("sd21", "ig2mv", True, SCALES),
                ("sdxl", "ig2mv", False, {}),
                ("sdxl", "tg2mv", True, {}),
            )
        ),
    ],
)
def test_six_views_equal_the_published_processors(base, variant, guided, scales):
    made, given = mv_stored.adapter_parts(variant, base), inputs(base, 1 + guided)
    found = predicted(made, variant, base, given, guided, **scales)
    wanted = oracle(made, variant, base, given, guided, **scales)
    assert found.shape == (6 * (1 + guided), 4, SIDE[base], SIDE[base]) and wanted.abs().max() > 0.5
    assert (found - wanted).abs().max() <= TOLERANCE * max(1, float(wanted.abs().max()))
    for name in ("ref_scale", "mv_scale"):
        if name == "mv_scale" or variant == "ig2mv":
            other = predicted(made, variant, base, given, guided, **{**scales, name: 0.0})
            assert (other - found).abs().max() > 0.01, f"{name} is seen"


def test_the_row_without_a_reference_gets_the_bias_of_the_output_projection():
    made, given = mv_stored.adapter_parts("ig2mv", "sdxl"), inputs("sdxl", 2)
    before = predicted(made, "ig2mv", "sdxl", given, True)
    for name, parameter in made["unet"].named_parameters():
        if name.endswith("to_out_ref.0.bias"):
            parameter.zero_()
    after = predicted(made, "ig2mv", "sdxl", given, True)
    assert (before[:6] - after[:6]).abs().max() > 0.01


@pytest.mark.full
def test_the_maps_reach_every_level():
    made, given = mv_stored.adapter_parts("tg2mv", "sdxl"), inputs("sdxl", 1)
    states = made["adapter"](given["maps"])
    assert [tuple(state.shape[1:]) for state in states] == [(64, 4, 4), (64, 4, 4), (128, 2, 2), (128, 2, 2)]
    text, more, run, time = given["text"], added("sdxl", given), AdapterInputs(), torch.tensor([431.0])
    whole = forward(made["unet"], given["x"], time, text, more, run, states)
    for index in range(4):
        without = [torch.zeros_like(state) if at == index else state for at, state in enumerate(states)]
        assert (forward(made["unet"], given["x"], time, text, more, run, without) - whole).abs().max() > 1e-3


def test_fp16_operands_around_an_fp32_stream():
    made, given = mv_stored.adapter_parts("ig2mv", "sdxl"), inputs("sdxl", 2)
    wanted = predicted(made, "ig2mv", "sdxl", given, True)
    dtypes = Dtypes(torch.float16, torch.float32)
    for module in made.values():
        for name, parameter in module.named_parameters():
            parameter.data = parameter.data.to(stored_dtype(name, dtypes))
        set_dtypes(module, dtypes)
    seen = []

    def attend(query, key, value):
        seen.append({query.dtype, key.dtype, value.dtype})
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    set_kernel(made["unet"], attend)
    mixed = []

    def strict(leaf, args):  # a GPU's kernels take one dtype, where a CPU's take several
        if args[0].dtype is not leaf.weight.dtype:
            mixed.append((type(leaf).__name__, args[0].dtype))

    for leaf in (leaf for module in made.values() for leaf in module.modules() if hasattr(leaf, "weight")):
        leaf.register_forward_pre_hook(strict)
    found = predicted(made, "ig2mv", "sdxl", given, True)
    assert not mixed
    assert found.dtype is torch.float32 and all(dtypes == {torch.float16} for dtypes in seen)
    assert (found - wanted).abs().max() < 0.02 * wanted.abs().max()


PUBLISHED = {  # tensors and parameters of the adapter: counted by others from the published files
    ("ig2mv", "sdxl"): (738, 900.6e6),
    ("tg2mv", "sdxl"): (388, 490.9e6),
    ("ig2mv", "sd21"): (198, 177.1e6),
    ("tg2mv", "sd21"): (118, 127.5e6),
}


@pytest.mark.parametrize(
    ("variant", "base"), [pytest.param(*key, marks=[pytest.mark.full] * (key[0] == "tg2mv")) for key in PUBLISHED]
)
def test_names_and_sizes_are_those_of_the_published_files(variant, base):
    config = mv_stored.full_size(base)
    with torch.device("meta"):
        unet, encoder = unet_for(config, variant), encoder_for(base, config["block_out_channels"])
    tensors = {name: each for name, each in unet.state_dict().items() if ".processor." in name} | encoder.state_dict()
    assert (len(tensors), round(sum(each.numel() for each in tensors.values()) / 1e5)) == (
        PUBLISHED[variant, base][0],
        round(PUBLISHED[variant, base][1] / 1e5),
    )
    stock = [name for name in unet.state_dict() if ".processor." not in name]
    assert len(stock) == (1680 if base == "sdxl" else 686)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes["adapter.conv_in.weight"] == (320, 1536 if base == "sdxl" else 384, 3, 3)
    require_tensors(shapes, unet, encoder, "file")


@cache
def shapes_of(variant="ig2mv", base="sdxl"):
    return {name: tuple(tensor.shape) for name, tensor in mv_stored.adapter_tensors(variant, base).items()}


@pytest.mark.parametrize("variant", ["ig2mv", "tg2mv"])
def test_an_adapter_is_known_by_its_tensors_and_its_name(variant):
    shapes = shapes_of(variant)
    assert variant_of(shapes, "sdxl", f"MVAdapter_{variant}_sdxl.safetensors", declared="") == variant
    assert variant_of(shapes, "sdxl", "renamed.safetensors", declared=variant) == variant


@pytest.mark.parametrize(
    ("name", "base", "declared", "change", "message"),
    [
        ("mvadapter_i2mv_sdxl.safetensors", "sdxl", "", None, "may be i2mv, which is made for camera rays"),
        (
            "mvadapter_t2mv_sdxl.safetensors",
            "sdxl",
            "",
            "tg2mv",
            "may be t2mv, which is made for",
        ),
        ("MVAdapter_i2mv_mine.safetensors", "sdxl", "ig2mv", None, "may be i2mv, .* and no i2mv in its name"),
        ("mine.safetensors", "sdxl", "tg2mv", None, "declared as tg2mv has the layers of ig2mv"),
        ("mvadapter_ig2mv_sdxl.safetensors", "sd21", "", None, "is made for sdxl, and the checkpoint is sd21"),
        ("other.safetensors", "sdxl", "", {"a": (1,)}, "'other.safetensors' holds no MV-Adapter"),
    ],
)
def test_another_file_is_refused_by_name(name, base, declared, change, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        variant_of(change if isinstance(change, dict) else shapes_of(change or "ig2mv"), base, name, declared)
    assert len(str(caught.value).splitlines()) == 1


def test_a_truncated_or_foreign_file_is_refused_by_its_first_wrong_tensor():
    made, shapes = mv_stored.adapter_parts("ig2mv", "sdxl"), shapes_of()
    require_tensors(shapes, made["unet"], made["adapter"], "file")
    name = next(name for name in shapes if name.endswith("to_q_mv.weight"))
    rest = {key: shape for key, shape in shapes.items() if key != name}
    for wrong, given in (
        (name, rest),
        ("zz.weight", {**shapes, "zz.weight": (1,)}),
        (name, {**shapes, name: (32, 64)}),
    ):
        with pytest.raises(CheckpointError, match=wrong.replace(".", r"\.")):
            require_tensors(given, made["unet"], made["adapter"], "file")
