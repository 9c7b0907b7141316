"""Safe fp16: finite where plain fp16 is not, ten times closer to fp64 than bf16, and reversible."""

import copy
import importlib
import importlib.util
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from anygpu.compat.checkpoints.packed import StoredLinear, pack, packable, rounded
from anygpu.compat.device.execution import checked_layers
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.precision import PRECISION, SAFE, precision_for
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.transforms import fp16_layers
from anygpu.compat.transforms.fp16 import LAYERS_OF, SAFE_OPS, apply_fp16_safe, fp32_output_works, stored_dtype
from anygpu.compat.transforms.fp16_layers import HALF, SCALE, SETTINGS, LayerKind, row_scales
from anygpu.compat.transforms.products import multiply_as_stored
from anygpu.pipelines.registry import FAMILIES
from torch import nn

WIDTH, HEADS, HEAD, TOKENS, TEXT, FIRST = 128, 2, 64, 64, 20, 16
SINK = 4e6  # the largest residual seen in a published model is 4.3e6
OUTPUTS = ("to_out.0.weight", "net.2.weight", "proj_out.weight", "to_add_out.weight")
GATES = 10.0


@dataclass(frozen=True)
class Case:
    """A block class of a family, and where its residual stream is bounded by a norm on each branch."""

    family: str
    cls: str
    build: Callable[[Any], nn.Module]
    more: Callable[[Any], dict[str, Any]]
    text: int = WIDTH
    temb: tuple[int, ...] = (1, WIDTH)
    bounded: bool = False


def turns(name: str, *shape: int) -> Callable[[Any], dict[str, Any]]:
    """Rotation tables in diffusers' format: cos and sin, each value twice in a row unless they are for halves."""

    def made(random: Any) -> dict[str, Any]:
        angles = random(*shape[:-1], shape[-1] // 2).float()
        if name != "halves":
            angles = angles.repeat_interleave(2, -1)
        return {"image_rotary_emb" if name == "halves" else name: (angles.cos().double(), angles.sin().double())}

    return made


def replaced(name: str) -> Callable[[Any], dict[str, Any]]:
    table = turns(name, TOKENS, HEAD)
    return lambda random: table(random) | {"token_replace_emb": random(1, WIDTH), "num_tokens": FIRST}


def all_valid(name: str, table: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    return lambda random: table(random) | {name: torch.ones(1, TEXT, dtype=torch.bool)}


def joint(cls: Any) -> nn.Module:
    return cls(HEADS, HEAD, mlp_ratio=4.0)


HV, HV15, LTX, MOCHI = (f"transformer_{name}" for name in ("hunyuan_video", "hunyuan_video15", "ltx", "mochi"))
CASES = {
    "ltx": Case(
        "ltx", f"{LTX}.LTXVideoTransformerBlock", lambda cls: cls(WIDTH, HEADS, HEAD, WIDTH),
        turns("image_rotary_emb", 1, TOKENS, WIDTH), temb=(1, 1, 6 * WIDTH),
    ),
    "hunyuan_video": Case(
        "hunyuan_video", f"{HV}.HunyuanVideoTransformerBlock", joint, turns("freqs_cis", TOKENS, HEAD)
    ),
    "framepack": Case(
        "framepack", f"{HV}.HunyuanVideoSingleTransformerBlock", joint, turns("image_rotary_emb", TOKENS, HEAD)
    ),
    "hunyuan_video, image": Case(
        "hunyuan_video", f"{HV}.HunyuanVideoTokenReplaceTransformerBlock", joint, replaced("freqs_cis")
    ),
    "hunyuan_video, image, single": Case(
        "hunyuan_video", f"{HV}.HunyuanVideoTokenReplaceSingleTransformerBlock", joint, replaced("image_rotary_emb")
    ),
    "hunyuan_video_15": Case(
        "hunyuan_video_15",
        f"{HV15}.HunyuanVideo15TransformerBlock",
        joint,
        all_valid("attention_mask", turns("freqs_cis", TOKENS, HEAD)),
    ),
    "mochi": Case(
        "mochi", f"{MOCHI}.MochiTransformerBlock", lambda cls: cls(WIDTH, HEADS, HEAD, WIDTH // 2),
        all_valid("encoder_attention_mask", turns("halves", TOKENS, HEADS, HEAD)), text=WIDTH // 2, bounded=True,
    ),
    "mochi, last": Case(
        "mochi",
        f"{MOCHI}.MochiTransformerBlock",
        lambda cls: cls(WIDTH, HEADS, HEAD, WIDTH // 2, context_pre_only=True),
        all_valid("encoder_attention_mask", turns("halves", TOKENS, HEADS, HEAD)),
        text=WIDTH // 2,
        bounded=True,
    ),
}  # fmt: skip


def class_of(name: str) -> Any:
    module, _, cls = name.rpartition(".")
    return getattr(importlib.import_module(f"diffusers.models.transformers.{module}"), cls)


def published(tensor: torch.Tensor) -> torch.Tensor:
    """In fp64, with the bits of bf16, as checkpoints have them: no format has to round weights."""
    return tensor.to(torch.bfloat16).double()


def block_of(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    """A block with random weights in fp64, and inputs for it."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return published(torch.randn(*shape, generator=generator, dtype=torch.float64))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = case.build(class_of(case.cls)).double().eval().requires_grad_(False)
    for tensor in block.parameters():
        tensor.data = published(tensor.data)
    return block, {
        "hidden_states": random(1, TOKENS, WIDTH),
        "encoder_hidden_states": random(1, TEXT, case.text),
        "temb": random(*case.temb),
        **case.more(random),
    }


class Model(nn.Module):
    """As much of a transformer as the rewrite looks at."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(blocks)
        self.proj_out = nn.Linear(4, 4)


def ran(block: nn.Module, inputs: dict[str, Any], dtype: torch.dtype) -> list[torch.Tensor]:
    """The outputs of ``block`` in fp64, from inputs in ``dtype``; rotation tables are fp32 for every format."""

    def cast(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(t.to(torch.promote_types(dtype, torch.float32)) for t in value)
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    with torch.no_grad():
        found = block(**{name: cast(value) for name, value in inputs.items()})
    return [tensor.double() for tensor in (found if isinstance(found, tuple) else (found,))]


def safe(block: nn.Module, fp32_output: bool = False) -> nn.Module:
    model = Model(copy.deepcopy(block).float())
    report = apply_fp16_safe(model, "any", fp32_output)
    assert report.rewritten["blocks"] == 1 and not report.left
    return model.transformer_blocks[0]


@pytest.fixture(params=[False, True], ids=["scaled", "fp32 output"])
def fp32_output(request, monkeypatch) -> bool:
    """Both ways to a product in fp32; a CPU has no GEMM that widens, so its arithmetic stands in for one."""

    def product(x: Any, weight: Any, bias: Any = None, total: Any = None) -> torch.Tensor:
        assert x.dtype is weight.dtype is HALF
        y = x.float() @ weight.float().t()
        y = y if total is None else y * total
        return y if bias is None else y + bias

    monkeypatch.setattr(fp16_layers, "fp32_product", product)
    return request.param


def sunk(case: Case, by: str) -> bool:
    """Whether some input channels are sinks: where norms bound every branch, nothing else can grow."""
    return by == "sinks" or (by == "branches" and case.bounded)


def grown(case: Case, block: nn.Module, inputs: dict[str, Any], by: str) -> None:
    """Make the residual stream reach 4e6: by sinks in what comes in, or by what the block's own branches add."""
    if sunk(case, by):
        inputs["hidden_states"][:, ::7, 5] = SINK
        inputs["hidden_states"][:, 3::11, 100] = -SINK
    if by == "branches":
        for name, tensor in block.named_parameters():
            if name.endswith(OUTPUTS):
                tensor.data *= 2.0**19
            if name == "scale_shift_table":
                tensor.data[[2, 5]] += GATES
            if name.endswith(("norm.linear.bias", "norm1.linear.bias")) and not case.bounded:
                parts = tensor.data.view(-1, WIDTH)
                parts[2::3] += GATES


def distance(found: list[torch.Tensor], expected: list[torch.Tensor], kept: list[torch.Tensor]) -> list[float]:
    """Relative L2 error of each output over the values that ``kept`` marks."""
    return [float((f[k] - e[k]).norm() / e[k].norm()) for f, e, k in zip(found, expected, kept, strict=True)]


@pytest.mark.full
@pytest.mark.parametrize("growth", ["", "sinks", "branches"])
@pytest.mark.parametrize("name", CASES)
def test_finite_at_4e6_and_a_tenth_of_the_error_of_bf16(name, growth, fp32_output):
    case = CASES[name]
    block, inputs = block_of(case)
    grown(case, block, inputs, growth)
    expected = ran(block, inputs, torch.float64)
    found = ran(safe(block, fp32_output), inputs, torch.float32)
    rounded = ran(copy.deepcopy(block).bfloat16(), inputs, torch.bfloat16)
    assert all(tensor.isfinite().all() for tensor in found)
    if growth:
        assert max(float(tensor.abs().max()) for tensor in expected) >= SINK * 0.99
        plain = ran(copy.deepcopy(block).half(), inputs, HALF)
        assert not all(tensor.isfinite().all() for tensor in plain), "plain fp16 would have done"
    # A sink passes through every format almost exactly, and would hide the error of everything else in the norm.
    ordinary = [e.abs() < SINK / 10 if sunk(case, growth) else e.abs() >= 0 for e in expected]
    for ours, bf16 in zip(distance(found, expected, ordinary), distance(rounded, expected, ordinary), strict=True):
        if bf16 > 0:  # Mochi's last block returns its text as it came
            assert ours <= bf16 / 10, f"{ours:.1e} against {bf16:.1e}"


def test_every_known_class_is_tested_and_every_family_has_one():
    assert {case.cls for case in CASES.values()} == set(LAYERS_OF)
    assert len({case.family for case in CASES.values()}) == 5


@pytest.mark.parametrize("largest", [1e-3, 1.0, 3e4, 4e6, 1e15])
@pytest.mark.parametrize("reach", [1.0, 37.0, 5e4])
def test_scales_are_powers_of_two_that_bound_every_partial_sum(largest, reach):
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(1)) * largest * torch.logspace(-9, 0, 64)[:, None]
    scale = row_scales(x, reach)
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all() and (scale >= 1).all()
    bound = (x / scale).double().norm(dim=-1, keepdim=True) * reach
    assert (bound <= fp16_layers.LIMIT).all()
    assert ((scale == 1) | (bound >= fp16_layers.LIMIT / 4)).all(), "divided by more than it takes"


@pytest.mark.parametrize("kind", [LayerKind.WIDE, LayerKind.FULL])
def test_small_integers_come_out_exactly(kind, fp32_output):
    leaf = nn.Linear(32, 24)
    leaf.weight.data, leaf.bias.data = (torch.randint(-4, 5, shape).float() for shape in ((24, 32), (24,)))
    x = torch.randint(-4, 5, (2, 5, 32)).float()
    expected = nn.functional.linear(x, leaf.weight, leaf.bias)
    leaf.weight.data = leaf.weight.data.half()
    setattr(leaf, SETTINGS, fp16_layers.LayerSettings(fp32_output, 1.0))
    with torch.no_grad():
        for given in (x, x.half()):
            assert torch.equal(fp16_layers.FORWARD_OF[kind](leaf, given), expected)


def test_values_of_unbounded_text_share_one_power_of_two_that_the_output_gives_back():
    case = CASES["ltx"]
    block, inputs = block_of(case)
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"] * 2e5
    expected = ran(block, inputs, torch.float64)
    rewritten = safe(block)
    found = ran(rewritten, inputs, torch.float32)
    assert float(inputs["encoder_hidden_states"].abs().max()) > torch.finfo(HALF).max
    assert distance(found, expected, [e.abs() >= 0 for e in expected])[0] < 4 * torch.finfo(HALF).eps
    assert not any(SCALE in module.__dict__ for module in rewritten.modules()), "a scale outlived the call"


def test_the_power_of_two_of_a_call_that_was_cancelled_is_multiplied_into_no_later_one():
    block, inputs = block_of(CASES["ltx"])
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"] * 2e5
    rewritten = safe(block)
    (expected,) = ran(rewritten, inputs, torch.float32)
    attention = rewritten.attn2
    with pytest.raises(KeyboardInterrupt), checked_layers(attention.to_out[1], cancelled):
        ran(rewritten, inputs, torch.float32)
    attention.forward = attention.forward  # as a step cache does, which may repeat the result
    (found,) = ran(rewritten, inputs, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def cancelled() -> None:
    raise KeyboardInterrupt


def packed_model(case: Case, choice: str) -> tuple[Model, Model, dict[str, Any]]:
    """A model whose layers are packed, modulations too; one of the same values; and inputs."""
    block, inputs = block_of(case)
    model, worth = (Model(copy.deepcopy(block).float()) for _ in range(2))
    for name, layer in packable(model, exact=True).items():
        pack(layer, dtype=HALF, **rounded(layer.weight.detach(), choice))
        worth.get_submodule(name).weight.data = layer.dense(HALF).float()
    return model, worth, inputs


@pytest.mark.parametrize("choice", ["int8", "fp8"])
@pytest.mark.parametrize("name", CASES)
def test_packed_layers_give_the_bits_of_their_values_and_stay_packed(name, choice, fp32_output):
    case = CASES[name]
    model, worth, inputs = packed_model(case, choice)
    stored = {path: layer.stored for path, layer in model.named_modules() if isinstance(layer, StoredLinear)}
    reports = [apply_fp16_safe(each, "any", fp32_output) for each in (model, worth)]
    assert reports[0].rewritten == reports[1].rewritten and not reports[0].left
    found, expected = (ran(each.transformer_blocks[0], inputs, torch.float32) for each in (model, worth))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert len(stored) > 5
    assert all(model.get_submodule(path).stored is rows for path, rows in stored.items())
    assert model.proj_out.weight.dtype is torch.float32, "outside the blocks all is fp32"
    reports[0].restore()
    assert {model.get_submodule(path).weight.dtype for path in stored} == {HALF}


def test_a_packed_block_that_stays_in_fp32_makes_its_weights_dense_in_fp32():
    model, _, inputs = packed_model(CASES["ltx"], "int8")
    block, layer = model.transformer_blocks[0], model.transformer_blocks[0].ff.net[2]
    block.attn1.to_q.__class__ = type("Adapted", (StoredLinear,), {})
    assert apply_fp16_safe(model, "ltx").left == {"attn1.to_q is a Adapted": 1}
    assert layer.stored.dtype is torch.int8 and layer.weight.dtype is torch.float32
    assert all(tensor.isfinite().all() for tensor in ran(block, inputs, torch.float32))


@pytest.mark.parametrize("growth", ["", "sinks"])
@pytest.mark.parametrize("name", CASES)
def test_stored_products_around_an_fp32_residual_are_finite_and_near(name, growth, fp32_output):
    """All packed layers multiply as stored but modulations and those with a power of two in their result."""
    case = CASES[name]
    model, _, inputs = packed_model(case, "int8")
    grown(case, model.transformer_blocks[0], inputs, growth)
    apply_fp16_safe(model, "any", fp32_output)
    expected = ran(model.transformer_blocks[0], inputs, torch.float32)
    count, _ = multiply_as_stored(model, ("int8",))
    found = ran(model.transformer_blocks[0], inputs, torch.float32)
    ordinary = [e.abs() < SINK / 10 for e in expected]
    assert max(distance(found, expected, ordinary)) < 0.03 and not torch.equal(found[0], expected[0])
    without = [path for path, kind in LAYERS_OF[case.cls].items() if kind in (LayerKind.FULL, LayerKind.VALUE)]
    without += ["attn2.to_out.0", *(["attn2.to_q"] if fp32_output else [])]
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, StoredLinear)}
    own = [path for path, layer in layers.items() if "multiply" in layer.__dict__]
    assert own == [path for path in layers if path.removeprefix("transformer_blocks.0.") not in without]
    assert count == len(own) > 4


class Other(class_of(f"{LTX}.LTXVideoTransformerBlock")):
    """A subclass, whose forward may be anything."""


class Adapted(nn.Linear):
    """A leaf that adds something of its own."""


def test_a_residual_that_the_sum_has_divided_is_not_divided_again_where_a_repair_widens_it():
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 32), torch.randn(1, 8, 64) * 3e4
    layer.__dict__[SETTINGS] = fp16_layers.LayerSettings(True, 1.0, residual=True)
    wanted = layer(x).detach()
    with mock.patch.object(
        fp16_layers, "fp32_product", lambda x, weight, bias, total: x.float() @ weight.float().T * total + bias.float()
    ):
        for divided, given in ((False, x), (True, x / 256), (True, (x / 256).half())):
            layer.__dict__[SETTINGS].divided = divided
            assert torch.allclose(
                fp16_layers.fp32_linear(layer, given), wanted, rtol=0, atol=2e-3 * float(wanted.abs().max())
            )


def test_a_layer_that_a_repair_replaced_is_called():
    layer = nn.Linear(4, 4)
    layer.forward = types.MethodType(fp16_layers.fp32_linear, layer)
    assert SAFE_OPS.is_plain(layer)
    layer.forward = lambda x: x
    assert not SAFE_OPS.is_plain(layer)


def test_a_packed_layer_is_asked_without_zeros_for_any_number_of_axes():
    torch.manual_seed(0)
    weight, bias = torch.randn(32, 64) / 8, torch.randn(32)

    def scaled(x):  # as a kernel that divides by each row's maximum
        scale = x.abs().amax(-1, keepdim=True)
        return ((x / scale).float() @ weight.T * scale.float() + bias).half()

    asked, x = fp16_layers.AskedLinear(scaled), torch.randn(2, 7, 64) * 1e5
    assert asked.is_product(x)
    for given in (x, x[0]):
        found, wanted = asked(given), given @ weight.T + bias
        assert found.shape == wanted.shape and (found - wanted).norm() < 1e-2 * wanted.norm()
    unbuilt = fp16_layers.AskedLinear(lambda x: x.no_such_attribute)
    assert not unbuilt.is_product(x)


def test_what_is_not_exactly_known_is_left_in_fp32_and_counted():
    known, inputs = block_of(CASES["ltx"])
    unknown, adapted = (copy.deepcopy(known).float() for _ in range(2))
    unknown.__class__ = Other
    adapted.ff.net[2].__class__ = Adapted
    expected = ran(copy.deepcopy(known).float(), inputs, torch.float32)[0]
    model = Model(known.half(), unknown, adapted)
    report = apply_fp16_safe(model, "ltx")
    assert report.rewritten["blocks"] == 1
    assert report.left == {f"{__name__}.Other is not a known class": 1, "ff.net.2 is a Adapted": 1}
    assert "2 left" not in str(report) and "1 left in fp32: ff.net.2 is a Adapted" in str(report)
    for block in (unknown, adapted):
        assert {p.dtype for p in block.parameters()} == {torch.float32}
        assert torch.equal(ran(block, inputs, torch.float32)[0], expected)
    assert model.proj_out.weight.dtype is torch.float32


@pytest.mark.parametrize("name", CASES)
def test_restore_gives_back_everything(name):
    block, inputs = block_of(CASES[name])
    model = Model(block).to(torch.bfloat16)
    before = ran(block, inputs, torch.bfloat16)
    attributes = {key: dict(module.__dict__) for key, module in model.named_modules()}
    processors = [getattr(module, "processor", None) for module in model.modules()]
    applied = apply_fp16_safe(model, "any")
    assert {p.dtype for p in model.parameters()} == {torch.float32, HALF}
    ran(block, inputs, torch.float32)
    applied.restore()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(
        after is former
        for after, former in zip(
            [getattr(module, "processor", None) for module in model.modules()], processors, strict=True
        )
    )
    assert {key: module.__dict__.keys() for key, module in model.named_modules()} == {
        key: kept.keys() for key, kept in attributes.items()
    }
    for after, former in zip(ran(block, inputs, torch.bfloat16), before, strict=True):
        torch.testing.assert_close(after, former, atol=1e-2, rtol=2**-7)


def test_a_second_rewrite_and_one_under_a_offloader_are_refused():
    model = Model(block_of(CASES["ltx"])[0].float())
    apply_fp16_safe(model, "ltx")
    with pytest.raises(UnsupportedError, match="that has it already"):
        apply_fp16_safe(model, "ltx")
    hooked = Model(block_of(CASES["ltx"])[0].float())
    hooked.proj_out._hf_hook = object()
    with pytest.raises(UnsupportedError, match="that an offloader already moves"):
        apply_fp16_safe(hooked, "ltx")


def test_matrices_of_blocks_are_read_as_fp16_and_all_else_as_fp32():
    assert stored_dtype("transformer_blocks.3.ff.net.2.weight", (8, 8)) is HALF
    assert stored_dtype("single_transformer_blocks.0.proj_out.weight", (8, 8)) is HALF
    for name, shape in (
        ("proj_out.weight", (8, 8)),
        ("transformer_blocks.0.attn1.norm_q.weight", (8,)),
        ("transformer_blocks.0.scale_shift_table", (6, 8)),
        ("context_embedder.proj_in.weight", (8, 8)),
    ):
        assert stored_dtype(name, shape) is torch.float32


def test_a_cpu_has_no_product_that_widens():
    assert not fp32_output_works(torch.device("cpu"))


@pytest.mark.parametrize("family", ["ltx", "hunyuan_video_15", "mochi"])
def test_no_t5_is_put_into_fp16(family):
    model = FAMILIES[family].rewrites.precision
    assert not model.half_text
    assert all(row.text is not HALF for row in (*PRECISION.values(), *model.rows.values()))
    turing = replace(facts_for("cpu"), backend="cuda", arch="sm75", arch_class="cuda-old")
    for choice in ("auto", SAFE):
        chosen = precision_for(model, turing, choice)
        assert chosen.safe and chosen.text is torch.float32 and chosen.residual is torch.float32
