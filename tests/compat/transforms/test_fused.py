"""Fused blocks: every site of every published model, never further from fp64 than upstream, and put back as it was."""

import copy
import errno
import importlib
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from anygpu.compat.checkpoints.packed import StoredLinear, pack, rounded
from anygpu.compat.device.execution import checked_layers
from anygpu.compat.device.facts import facts_for
from anygpu.compat.device.probe_store import ProbeStore
from anygpu.compat.memory.hooks import GroupHooks
from anygpu.compat.memory.statistics import MemoryStats
from anygpu.compat.transforms import blocks, fp16, fp16_layers, fused, fused_attention
from anygpu.compat.transforms.fused import FUSIONS, fuse
from anygpu.compat.transforms.order import replace_attention
from anygpu.kernels import library, product
from anygpu.kernels.product import linear_gelu_reference
from anygpu.kernels.self_tests import BLOCK_OPERATIONS, SelfTest
from anygpu.pipelines.registry import FAMILIES
from compat.transforms.test_attention_processors import inputs_of
from compat.transforms.test_fp16 import CASES, Model, block_of, ran
from tiny.recipes import TINY
from tiny.weights import randomise
from torch import nn
from torch.nn import functional

REFERENCE = "reference"
SDPA = functional.scaled_dot_product_attention
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NO_WORSE = 1 + 1 / (64 * 128) ** 0.5  # two draws of as many rounding errors differ by that much in length
FULL_SIZE = {  # classes, whose defaults are the published configurations: (family, sites)
    "transformer_ltx.LTXVideoTransformer3DModel": ("ltx", 28 * 6),
    "transformer_hunyuan_video.HunyuanVideoTransformer3DModel": ("hunyuan_video", 20 * 7 + 40 * 3),
    "transformer_hunyuan_video_framepack.HunyuanVideoFramepackTransformer3DModel": ("framepack", 20 * 7 + 40 * 3),
    "transformer_hunyuan_video15.HunyuanVideo15Transformer3DModel": ("hunyuan_video_15", 54 * 7),
    "transformer_mochi.MochiTransformer3DModel": ("mochi", 47 * 9 + 6),
}


def class_of(name: str) -> Any:
    module, _, cls = name.rpartition(".")
    return getattr(importlib.import_module(f"diffusers.models.transformers.{module}"), cls)


def tiny(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        module = TINY[name].parts["." if name == "framepack" else "transformer"].make()
    randomise(module, 0)
    return module.eval().requires_grad_(False)


QUICK = "transformer_ltx"  # the others take a second each to build


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n.startswith(QUICK) else [pytest.mark.full]) for n in FULL_SIZE]
)
def test_every_site_of_a_published_model_is_fused(name):
    family, points = FULL_SIZE[name]
    with torch.device("meta"):
        model = class_of(name)()
    before = {id(p) for p in model.parameters()}
    found = fuse(model, REFERENCE)
    assert found.points.total() == points and not found.left
    assert dict(found.points) == fused.published_fusion_points(FAMILIES[family].rewrites.published_blocks)
    assert str(found) == f"{points} of {points} fusion points (reference)"
    assert {id(p) for p in model.parameters()} == before, "weights were copied"


def require_no_further_from_fp64(name: str, given: list[torch.Tensor] | None = None) -> None:
    """A fused block is as near to fp64 as upstream's; ``given`` gets the results of products that end in GELU."""
    block, inputs = block_of(CASES[name])
    truth = ran(block, inputs, torch.float64)
    for dtype in DTYPES:
        model = Model(copy.deepcopy(block).to(dtype))
        taken_off = replace_attention(model, SDPA)
        stock = ran(model.transformer_blocks[0], inputs, dtype)
        taken_off()
        done = fuse(model, REFERENCE, epilogue=given is not None)
        assert done.points and bool(done.gelus) == (given is not None and not name.startswith("mochi"))
        replace_attention(model, SDPA)
        before = len(given or ())
        ours = ran(model.transformer_blocks[0], inputs, dtype)
        assert len(given or ()) - before == done.gelus
        for found, former, expected in zip(ours, stock, truth, strict=True):
            assert (found - expected).norm() <= NO_WORSE * (former - expected).norm(), dtype


@pytest.mark.parametrize("name", CASES)
def test_no_block_is_further_from_fp64_than_upstream(name):
    require_no_further_from_fp64(name)


@pytest.mark.parametrize("name", ["ltx", "hunyuan_video", "mochi"])
def test_restore_gives_back_the_very_objects(name):
    model = tiny(name)

    def state() -> list[Any]:
        return [(id(m), vars(m).get("forward"), id(getattr(m, "processor", None))) for m in model.modules()] + [
            (key, id(tensor)) for key, tensor in model.state_dict(keep_vars=True).items()
        ]

    before = state()
    found = fuse(model, REFERENCE)
    assert state() != before
    found.restore()
    assert state() == before
    assert not any(hasattr(m, fused_attention.FORM) for m in model.modules())
    again = fuse(model, REFERENCE)
    assert again.points == found.points and again.points


def test_an_unknown_subclass_is_left_alone_and_counted():
    model = tiny("ltx")
    known = type(model.transformer_blocks[0])
    model.transformer_blocks[1].__class__ = type("Changed", (known,), {})
    found = fuse(model, REFERENCE)
    assert found.points.total() == 6
    assert list(found.left.values()) == [1] and "Changed is not a known class" in next(iter(found.left))
    assert "forward" not in vars(model.transformer_blocks[1])
    assert "forward" not in vars(model.rope), "blocks that were left read upstream's tables"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: setattr(b.attn1, "processor", object()), "attn1 has a object"),
        (lambda b: setattr(b, "norm1", nn.LayerNorm(32)), "norm1 is a LayerNorm"),
        (lambda b: setattr(b.attn1, "norm_q", nn.RMSNorm(32, eps=1e-3)), "differ in eps"),
        (lambda b: setattr(b, "forward", b.forward), "its forward has already been replaced"),
    ],
)
def test_what_the_rewrite_was_not_written_for_is_left_with_the_reason(change, reason):
    model = tiny("ltx")
    change(model.transformer_blocks[0])
    found = fuse(model, REFERENCE)
    assert found.points.total() == 6 and found.left_points == 6
    assert reason in next(iter(found.left)) and "6 of 12 fusion points" in str(found)


def test_another_signature_is_left(monkeypatch):
    model = tiny("ltx")
    cls = type(model.transformer_blocks[0])
    monkeypatch.setattr(cls, "forward", lambda self, hidden_states, more: hidden_states)
    assert "its forward takes (hidden_states, more)" in next(iter(fuse(model, REFERENCE).left))


def test_norms_of_every_class_with_and_without_weight():
    from diffusers.models.normalization import MochiRMSNorm, RMSNorm

    block, inputs = block_of(CASES["ltx"])
    kinds = [nn.RMSNorm(128, eps=1e-5), RMSNorm(128, 1e-5), MochiRMSNorm(128, 1e-5), RMSNorm(128, 1e-5, False)]
    for norm in kinds:
        changed = copy.deepcopy(block)
        for name in ("norm_q", "norm_k"):
            made = copy.deepcopy(norm).double()
            if made.weight is not None:
                made.weight.data = torch.linspace(0.5, 2, 128, dtype=torch.float64)
            setattr(changed.attn1, name, made)
        expected = ran(changed, inputs, torch.float64)
        found = fuse(Model(changed), REFERENCE)
        assert found.points.total() == 6, found
        for ours, theirs in zip(ran(changed, inputs, torch.float64), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # upstream norms in fp32


def test_gelu_is_not_geglu():
    model = tiny("hunyuan_video")
    single = model.single_transformer_blocks[0]
    single.act_mlp = nn.GELU()
    found = fuse(model, REFERENCE)
    assert any("act_mlp is a GELU" in reason for reason in found.left)


def test_every_known_class_exists_upstream_with_its_arguments():
    for name in FUSIONS:
        module, _, cls = name.removeprefix(fused.TRANSFORMERS).partition(".")
        assert class_of(f"{module}.{cls}") is not None


OPERATIONS = {  # kind of site to the operation that a graph has for it
    fused.MODULATED: "normalized",
    fused.QK_ROTARY: "qk_norm_rope",
    fused.SUMMED: "gated_residual",
    fused.SUM_NORM: "residual_norm",
    fused.GATED: "swiglu",
}


def test_norms_that_a_host_streams_through_one_buffer_are_read_at_once():
    """ComfyUI has one buffer for each of its streams, two by default; fused attention reads four norms at once."""
    buffer = torch.empty(8)

    class Streamed(nn.RMSNorm):
        @contextmanager
        def weights_on(self, like):
            yield buffer.copy_(self.weight), None

    first, second = (Streamed(8) for _ in range(2))
    nn.init.constant_(second.weight, 2.0)
    x = torch.ones(1, 1, 8)
    with torch.no_grad(), blocks.norm_of(first, x) as one, blocks.norm_of(second, x) as other:
        assert torch.equal(one.weight, first.weight) and torch.equal(other.weight, second.weight)


# ---- GELU at the end of a product ---------------------------------------------------------------------------------


def fused_gelu(x, weight, bias, form="auto"):
    """The product as a library's epilogue computes it: summed, biased and activated in fp32, rounded once."""
    return functional.gelu(functional.linear(x.float(), weight.float(), bias.float()), approximate="tanh").to(x.dtype)


@pytest.fixture
def epilogue(monkeypatch) -> list[torch.Tensor]:
    """A library whose products end in GELU; the results it gave."""
    given: list[torch.Tensor] = []

    def product(x, weight, bias, form="auto"):
        given.append(fused_gelu(x, weight, bias) if x.dtype.itemsize < 4 else linear_gelu_reference(x, weight, bias))
        return given[-1]

    for module in (blocks, fused_attention):
        monkeypatch.setattr(module, "linear_gelu", product)
    return given


@pytest.mark.parametrize(
    "name", [n if n in ("ltx", "framepack") else pytest.param(n, marks=pytest.mark.full) for n in CASES]
)
def test_with_gelu_in_the_product_no_block_is_further_from_fp64_than_upstream(name, epilogue):
    require_no_further_from_fp64(name, epilogue)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (lambda leaf: None, True),
        (lambda leaf: leaf.register_forward_hook(lambda *_: None), False),
        (lambda leaf: leaf.register_forward_pre_hook(lambda *_: None), False),
        (lambda leaf: setattr(leaf, "forward", leaf.forward), False),
        (lambda leaf: setattr(leaf, "bias", None), False),
        (lambda leaf: setattr(leaf, "__class__", type("Other", (nn.Linear,), {})), False),
    ],
)
def test_a_linear_that_somebody_changed_is_called_and_its_gelu_follows(change, kept, epilogue):
    block, inputs = block_of(CASES["ltx"])
    change(block.ff.net[0].proj)
    expected = ran(block, inputs, torch.float64)
    fuse(Model(block), REFERENCE, epilogue=True)
    (result,) = ran(block, inputs, torch.float64)
    assert len(epilogue) == kept
    torch.testing.assert_close(result, expected[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("by_block", [True, False], ids=["group", "sequential"])
def test_our_own_hooks_bring_the_weights_of_a_product_with_gelu(by_block, epilogue):
    """So a part that streams gives what it gives at rest, bit for bit."""
    block, inputs = block_of(CASES["framepack"])
    model = Model(block.to(torch.bfloat16))
    fuse(model, REFERENCE, epilogue=True)
    expected = ran(block, inputs, torch.bfloat16)
    hooks = GroupHooks(model, torch.device("cpu"), by_block, MemoryStats())
    try:
        result = ran(block, inputs, torch.bfloat16)
    finally:
        hooks.remove()
    assert len(epilogue) == 2 and all(map(torch.equal, result, expected))


@pytest.mark.parametrize("name", ["ltx", "hunyuan_video"])
def test_a_sampling_that_can_be_cancelled_in_each_layer_computes_the_products_that_were_counted(
    name, epilogue, monkeypatch
):
    model, checks, written = tiny(name), [], []
    found, write = fuse(model, REFERENCE, epilogue=True), fused_attention._write
    replace_attention(model, SDPA)
    monkeypatch.setattr(fused_attention, "_write", lambda *given: (written.append(1), write(*given))[1])
    with torch.no_grad():
        expected, places = model(**inputs_of(name, (9, 9)))[0], len(written)
        epilogue.clear()
        with checked_layers(model, lambda: checks.append(1)):
            result = model(**inputs_of(name, (9, 9)))[0]
    assert torch.equal(result, expected) and checks
    assert len(epilogue) == found.gelus > 0 and len(written) == 2 * places


@pytest.mark.parametrize("choice", ["int8", "fp8"])
def test_a_packed_linear_is_made_dense_once_for_its_product(choice, epilogue, monkeypatch):
    block, inputs = block_of(CASES["framepack"])
    block = block.float()
    packed_leaves = [block.proj_mlp, block.proj_out]
    for leaf in packed_leaves:
        pack(leaf, dtype=torch.float32, **rounded(leaf.weight.detach(), choice))
    expected = ran(block, inputs, torch.float32)
    model = Model(block)
    fuse(model, REFERENCE, epilogue=True)
    times, dense = [], StoredLinear.dense
    monkeypatch.setattr(StoredLinear, "dense", lambda leaf, dtype: (times.append(leaf), dense(leaf, dtype))[1])
    replace_attention(model, SDPA)
    for result, former in zip(ran(block, inputs, torch.float32), expected, strict=True):
        torch.testing.assert_close(result, former, rtol=1e-4, atol=1e-5)
    assert len(epilogue) == 1 and times == packed_leaves


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_probe_of_gelu_in_a_product_wants_the_tanh_form(dtype, monkeypatch):
    """torch's own library on a CPU has the form with erf under the same name."""
    cpu = torch.device("cpu")
    with pytest.raises(RuntimeError, match="not on 'cpu'"):
        fused.gelu_fault(dtype, cpu)
    monkeypatch.setattr(library, "LAUNCHED_ON", "cpu")
    monkeypatch.setattr(fused, "linear_gelu", product._launch)
    assert "GELU with tanh is off by" in fused.gelu_fault(dtype, cpu)
    monkeypatch.setattr(fused, "linear_gelu", fused_gelu)
    assert not fused.gelu_fault(dtype, cpu)
    monkeypatch.setattr(fused, "linear_gelu", lambda x, weight, bias: fused_gelu(x, weight, 0 * bias))
    assert fused.gelu_fault(dtype, cpu), "without a bias"
    monkeypatch.setattr(fused, "linear_gelu", lambda *given: fused_gelu(*given) * float("nan"))
    assert fused.gelu_fault(dtype, cpu)


def on_cuda(block: nn.Module) -> None:
    """Weights as tensors of a GPU that is not there; inside a fake mode only."""
    for module in block.modules():
        for name, tensor in list(module.named_parameters(recurse=False)):
            empty = torch.empty(tensor.shape, dtype=torch.bfloat16, device="cuda")
            setattr(module, name, nn.Parameter(empty, requires_grad=False))


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("ltx", "hunyuan_video") else [pytest.mark.full]) for n in CASES]
)
def test_a_block_on_a_gpu_is_one_graph_with_an_operation_per_site(name):
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch._dynamo.reset()
    block, inputs = block_of(CASES[name])
    seen: list[Any] = []

    def compiler(graph: Any, _inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    def fake(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(torch.empty(t.shape, device="cuda") for t in value)
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty(
            value.shape, dtype=torch.bfloat16 if value.is_floating_point() else value.dtype, device="cuda"
        )

    with FakeTensorMode(), torch.no_grad():
        on_cuda(block)
        model = Model(block)
        found = fuse(model, epilogue=True)
        # No SDPA: without a GPU torch has no kernel to ask about. Its place is taken by sums of the same shape.
        replace_attention(model, lambda q, k, v, mask=None: q + (k * v).mean(2, keepdim=True))
        torch.compile(block.forward, fullgraph=True, backend=compiler)(**{n: fake(v) for n, v in inputs.items()})
    torch._dynamo.reset()
    assert len(seen) == 1, "the graph was broken"
    ours = [str(node.target) for node in seen[0].graph.nodes if "anygpu" in str(node.target)]
    for kind, operation in OPERATIONS.items():
        assert sum(operation in target for target in ours) == found.points[kind], (kind, ours)
    assert sum("linear_gelu" in target for target in ours) == found.gelus
    assert len(ours) == found.points.total() + found.gelus


def _both(name: str, change: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A tiny transformer's output after ``change``, plain and fused, and the sites that were fused."""
    outputs, points = [], 0
    for kernels in (False, True):
        model = tiny(name)
        change(model)
        if kernels:
            points = fuse(model, REFERENCE).points.total()
        replace_attention(model, SDPA)
        with torch.no_grad():
            outputs.append(model(**inputs_of(name, (9, 9)))[0])
    return outputs[0], outputs[1], points


def with_lora(model: nn.Module) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    leaves = ["to_q", "to_k", "to_out.0", "add_q_proj", "net.0.proj", "proj_mlp", "norm1.linear"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inject_adapter_in_model(LoraConfig(r=2, target_modules=leaves, init_lora_weights=False), model)


def in_fp8(model: Any) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


@pytest.mark.parametrize("change", [with_lora, in_fp8])
@pytest.mark.parametrize(
    "name", ["ltx", *(pytest.param(n, marks=pytest.mark.full) for n in ("hunyuan_video", "mochi"))]
)
def test_loras_and_quantised_weights_act_as_before(name, change):
    untouched, _, _ = _both(name, lambda model: None)
    expected, found, points = _both(name, change)
    assert points and (expected - untouched).abs().max() > 1e-3, "the change did nothing"
    # The same sums in another order, through a few blocks; values are around 1.
    torch.testing.assert_close(found, expected, atol=256 * torch.finfo(torch.float32).eps, rtol=1e-5)


DRAWS = 5
SAME_ERROR = (
    1.02  # errors of fp16 products alone differ by 1.2 % from one draw of tokens to the next: 3.7 of it in 5 draws
)


@pytest.mark.parametrize("fp32_output", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", [n if n == "ltx" else pytest.param(n, marks=pytest.mark.full) for n in CASES])
def test_under_safe_fp16_every_point_is_fused_and_no_error_grows(name, fp32_output, monkeypatch):
    if fp32_output:  # no CPU has such products: the same in fp32
        monkeypatch.setattr(fp16_layers, "fp32_product", fp32_product)
    block, inputs = block_of(CASES[name])
    drawn = [inputs, *(redrawn(inputs, seed) for seed in range(DRAWS - 1))]
    truth = [ran(block, each, torch.float64) for each in drawn]
    model = Model(copy.deepcopy(block).float())
    fp16.apply_fp16_safe(model, "any", fp32_output)
    taken_off = replace_attention(model, SDPA)
    stock = [ran(model.transformer_blocks[0], each, torch.float32) for each in drawn]
    taken_off()
    found = fuse(model, REFERENCE, epilogue=True)
    assert found.points == fused.points_of(block, FUSIONS[fused.full_name(block)]) and not found.left
    alone = hasattr(block, "act_mlp")  # whose product is one with that after it only where both come out in fp32
    assert found.gelus == (fp32_output if alone else {"ltx": 1, "mochi": 0}.get(name.partition(",")[0], 2))
    taken_off = replace_attention(model, SDPA)
    ours = [ran(model.transformer_blocks[0], each, torch.float32) for each in drawn]
    for output in range(len(truth[0])):
        new, former = (errors(runs, truth, output) for runs in (ours, stock))
        assert new <= SAME_ERROR * former, (new / former, output)
    taken_off()
    found.restore()
    replace_attention(model, SDPA)
    again = ran(model.transformer_blocks[0], inputs, torch.float32)
    assert all(torch.equal(one, former) for one, former in zip(again, stock[0], strict=True))


@pytest.mark.parametrize("fp32_output", [False, True])
@pytest.mark.parametrize("name", ["ltx", "mochi"])
def test_under_safe_fp16_a_sum_multiplies_in_what_its_branch_was_divided_by(name, fp32_output, monkeypatch):
    """Attention to loud text and gated products beyond fp16: bare, with a LoRA on the last layer, and repeated."""
    from peft import LoraConfig, inject_adapter_in_model

    monkeypatch.setattr(fp16_layers, "fp32_product", fp32_product)
    block, inputs = block_of(CASES[name])
    last = "attn2.to_out.0" if name == "ltx" else "ff.net.2"
    if name == "ltx":
        inputs["encoder_hidden_states"] *= 2e5
    else:
        block.ff.net[0].proj.weight *= 256
    model = Model(copy.deepcopy(block).float())
    fp16.apply_fp16_safe(model, "any", fp32_output)
    fuse(model, REFERENCE)
    replace_attention(model, SDPA)
    ours, factors = model.transformer_blocks[0], list[Any]()
    gate = blocks.Gate
    monkeypatch.setattr(blocks, "Gate", lambda *args, **more: factors.append(more.get("factor")) or gate(*args, **more))

    def require_right() -> None:
        factors.clear()
        truth, found = ran(block, inputs, torch.float64)[0], ran(ours, inputs, torch.float32)[0]
        assert (found - truth).norm() < 4 * torch.finfo(torch.float16).eps * truth.norm()
        assert not any(fp16_layers.SCALE in module.__dict__ for module in ours.modules()), "a scale outlived the call"

    require_right()
    assert any(each is not None and each.max() > 1 for each in factors)
    if name == "ltx":  # as a step cache does it
        attend, results = ours.attn2.forward, list[torch.Tensor]()
        with pytest.MonkeyPatch.context() as cached:
            cached.setattr(ours.attn2, "forward", lambda *a, **n: results.append(attend(*a, **n)) or results[0])
            require_right()
            require_right()
        assert len(results) == 2 and all(each is None for each in factors)
        ours.attn2.__dict__.pop("forward", None)
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=2, target_modules=[last], init_lora_weights=False), ours)
    adapted = ours.get_submodule(last)
    weights = [getattr(adapted, side)["default"].weight for side in ("lora_B", "lora_A")]
    block.get_submodule(last).weight.data += weights[0].double() @ weights[1].double()
    require_right()


def test_streams_that_a_block_split_are_not_joined_again(monkeypatch):
    block, inputs = block_of(CASES["framepack"])
    model, joined, cat = Model(block.float()), list[int](), torch.cat
    fuse(model, REFERENCE)
    replace_attention(model, SDPA)
    given = {n: torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.float, v) for n, v in inputs.items()}
    streams = block(**given)
    monkeypatch.setattr(torch, "cat", lambda *args, **named: joined.append(1) or cat(*args, **named))
    results, counts = [], []
    for both in (streams, [each.clone() for each in streams], (streams[0], streams[1].clone())):
        results.append(block(**given | dict(zip(("hidden_states", "encoder_hidden_states"), both, strict=True))))
        counts.append(len(joined) - sum(counts))
    assert counts[1:] == [counts[0] + 1] * 2
    assert all(map(torch.equal, results[0], results[1])) and all(map(torch.equal, results[0], results[2]))


def test_under_safe_fp16_an_attention_of_another_kind_is_left_with_the_reason():
    model = tiny("ltx")
    fp16.apply_fp16_safe(model, "any")
    model.transformer_blocks[0].attn1.processor = object()
    found = fuse(model, REFERENCE)
    assert found.points.total() == 6 and found.left == {"attn1 has a object": 1} and found.left_points == 6


def redrawn(inputs: dict[str, Any], seed: int) -> dict[str, Any]:
    """The inputs with other tokens, of the same size."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(name: str, value: Any) -> Any:
        if name not in ("hidden_states", "encoder_hidden_states"):
            return value
        return torch.randn(value.shape, generator=generator, dtype=value.dtype) * value.std()

    return {name: tokens(name, value) for name, value in inputs.items()}


def errors(runs: list[list[torch.Tensor]], truth: list[list[torch.Tensor]], output: int) -> float:
    """The length of one output's error over all draws."""
    return (
        sum(float((run[output] - right[output]).square().sum()) for run, right in zip(runs, truth, strict=True)) ** 0.5
    )


def fp32_product(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, total: Any = None) -> torch.Tensor:
    found = functional.linear(x.float(), weight.float()) * (1.0 if total is None else total)
    return found if bias is None else found + bias.float()


def test_an_operation_that_is_wrong_here_is_left_to_its_reference_alone_and_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    full: list[Exception] = []

    def tests(_device: Any, _form: str, operations: Any, dtypes: Any) -> Any:
        for cause in full:
            yield SelfTest("swiglu", dtypes[0], launched=False, error=1.0, bound=0, milliseconds=0, cause=cause)
            return
        asked.append((operations, dtypes))
        for name, error in (("normalized", 0.0), ("swiglu", 1.0)):
            yield SelfTest(name, dtypes[0], launched=True, error=error, bound=1e-3, milliseconds=1.0)

    monkeypatch.setattr(fused, "self_tests", tests)
    monkeypatch.setattr(fused, "FAULTS", {})
    store = ProbeStore(facts_for("cpu"))
    passing = (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB"), OSError(errno.ENOSPC, "full"))
    for full[:] in ([passing[0]], [passing[1]], [], []):
        fused.leave_wrong(torch.device("cpu"), torch.float16, store, of_vae=False)
    fault = "swiglu float16: WRONG (kernel, error 1.0e+00, allowed 1.0e-03)"
    wrong = {("swiglu", torch.device("cpu"), dtype): fault for dtype in (torch.float16, torch.float32)}
    assert wrong == fused.FAULTS
    assert asked == [(BLOCK_OPERATIONS, (torch.float16,))]
