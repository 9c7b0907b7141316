"""LoHa, LoKr, DoRA, whole differences and alphas from metadata: what core adds for each of them, in both modes."""

import copy
import json
import math
import re
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import layouts
import pytest
import quantised
import tiny
import torch
from anygpu.compat.checkpoints.packed import StoredLinear, unpack
from anygpu.compat.errors import CheckpointError, UnsupportedError
from anygpu.pipelines.base import Silent
from anygpu.pipelines.files import lora_kinds
from anygpu.pipelines.files.lora_keys import matched
from anygpu.pipelines.files.lora_kinds import DOWN, UP
from anygpu.pipelines.load import lora
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.requests import LORA_MODES, Files, LoadRequest
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE, RANK = Path("some_lora.safetensors"), 2
HUNYUAN = FAMILIES["hunyuan_video"]
LAYERS = {**{f"transformer_blocks.0.attn.{n}": (6, 6) for n in ("to_q", "to_k", "to_v")}, "x_embedder.proj": (6, 33)}
FUSED = "double_blocks.0.img_attn_qkv"  # of the release: three layers in one


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape))).float()


def loha(base: str, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
    a1, b1, a2, b2 = drawn(rows, RANK), drawn(RANK, columns), drawn(rows, RANK, seed=1), drawn(RANK, columns, seed=1)
    names = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    return dict(zip((f"{base}.{n}" for n in names), (a1, b1, a2, b2), strict=True)), (a1 @ b1) * (a2 @ b2)


def lokr(base: str, rows: int, columns: int, low: bool) -> tuple[dict[str, Tensor], Tensor]:
    first = drawn(2, 3)
    if not low:
        second = drawn(rows // 2, columns // 3)
        return {f"{base}.lokr_w1": first, f"{base}.lokr_w2": second}, torch.kron(first, second)
    a, b = drawn(rows // 2, RANK), drawn(RANK, columns // 3)
    return {f"{base}.lokr_w1": first, f"{base}.lokr_w2_a": a, f"{base}.lokr_w2_b": b}, torch.kron(first, a @ b)


def difference(base: str, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
    whole = drawn(rows, columns)
    return {f"{base}.diff": whole}, whole


KINDS = {
    "LoHa": loha,
    "LoKr": lambda *size: lokr(*size, low=False),
    "LoKr of low rank": lambda *size: lokr(*size, low=True),
    "difference": difference,
}


@pytest.mark.parametrize(
    "base", ["diffusion_model.transformer_blocks.0.attn.to_k", f"lora_unet_{FUSED.replace('.', '_')}"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_the_product_of_its_formula(kind: str, base: str) -> None:
    """Small integers, so the rewritten product is the very same."""
    tensors, whole = KINDS[kind](base, 18 if "qkv" in base else 6, 6)
    match = matched(FILE, {name: tuple(t.shape) for name, t in tensors.items()}, LAYERS, HUNYUAN)
    assert not match.unmatched and len(match.pairs) == (3 if "qkv" in base else 1)
    shares = [pair.delta(tensors) for pair in match.pairs.values()]
    assert torch.equal(torch.cat([share.up @ share.down for share in shares]), whole)


def test_keys_of_genmos_trainer_have_no_weight_at_their_end() -> None:
    base = "transformer_blocks.0.attn.to_q"
    tensors = {f"{base}.lora_A": drawn(RANK, 6), f"{base}.lora_B": drawn(6, RANK)}
    match = matched(FILE, {name: tuple(t.shape) for name, t in tensors.items()}, LAYERS, HUNYUAN)
    assert list(match.pairs) == [base] and not match.unmatched


def test_a_lora_of_a_narrower_input_acts_on_its_channels() -> None:
    """Of text to video, on the wider input of image to video: the noise comes first."""
    tensors = {"img_in.proj.lora_A.weight": drawn(RANK, 16), "img_in.proj.lora_B.weight": drawn(6, RANK)}
    (pair,) = matched(FILE, {name: tuple(t.shape) for name, t in tensors.items()}, LAYERS, HUNYUAN).pairs.values()
    share = pair.delta(tensors)
    assert torch.equal(share.down[:, :16], tensors["img_in.proj.lora_A.weight"]) and not share.down[:, 16:].any()
    wider = {"img_in.proj.lora_A.weight": (RANK, 34), "img_in.proj.lora_B.weight": (6, RANK)}
    rest = {"double_blocks.0.img_attn_qkv.diff": (18, 6)}
    assert matched(FILE, {**wider, **rest}, LAYERS, HUNYUAN).unmatched == sorted(wider)


@pytest.fixture(scope="module")
def made(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A tiny HunyuanVideo whose weights a LoRA file changes: what becomes of them, and what a layer returns."""
    request = LoadRequest(tiny.build("hunyuan_video", tiny_folder), device="cpu", precision="fp32")
    folder, pipeline = tmp_path_factory.mktemp("kinds"), load(request)

    def outputs(tensors: dict[str, Tensor], layer: str, strength: float, mode: str, notes: Any = None) -> Tensor:
        path = folder / "adapter_model.safetensors"  # beside which peft's configuration counts
        save_file({name: t.contiguous() for name, t in tensors.items()}, path, notes or {})
        pipe = lora.with_lora(pipeline, path, strength, "", mode, Silent())
        with pipe.offloader.hold("transformer") as module, torch.no_grad():
            inner = module.get_submodule(layer)
            return inner(torch.eye(inner.in_features))

    return SimpleNamespace(pipeline=pipeline, outputs=outputs, folder=folder)


LAYER = "transformer_blocks.0.attn.to_q"
NEAR = dict(atol=1e-5, rtol=1e-5)


def weight_and_bias(made: Any) -> tuple[Tensor, Tensor]:
    """Of the pipeline without a LoRA."""
    with made.pipeline.offloader.hold("transformer") as module:
        layer = module.get_submodule(LAYER)
        return layer.weight.detach().clone(), layer.bias.detach().clone()


@pytest.mark.parametrize("mode", LORA_MODES)
def test_differences_of_weight_and_bias_are_added(made: Any, mode: str) -> None:
    weight, bias = weight_and_bias(made)
    tensors = {f"{LAYER}.diff": torch.randn(weight.shape) * 0.1, f"{LAYER}.diff_b": torch.randn(bias.shape)}
    found = made.outputs(tensors, LAYER, 0.5, mode)
    expected = (weight + 0.5 * tensors[f"{LAYER}.diff"]).T + bias + 0.5 * tensors[f"{LAYER}.diff_b"]
    torch.testing.assert_close(found, expected, **NEAR)
    assert torch.equal(weight_and_bias(made)[0], weight) and torch.equal(weight_and_bias(made)[1], bias)


@pytest.mark.parametrize("mode", LORA_MODES)
def test_a_bias_of_pefts_adapter_is_scaled_as_peft_scales_it(made: Any, mode: str) -> None:
    """Beside peft's own layer, merged, whose alpha is 8 of rank 4."""
    from peft import LoraConfig, get_peft_model

    weight, bias = weight_and_bias(made)
    layer = torch.nn.Linear(*weight.shape[::-1])
    layer.weight.data, layer.bias.data = weight.clone(), bias.clone()
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["0"], lora_bias=True)
    model = get_peft_model(torch.nn.Sequential(layer), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    state = {
        name.split(".default")[0] + name.split(".default")[1]: p.detach()
        for name, p in model.named_parameters()
        if "lora_" in name
    }
    own = f"base_model.model.{LAYER}"
    names = {f"{own}.{name.partition('.0.')[2]}": tensor.clone() for name, tensor in state.items()}
    assert f"{own}.lora_B.bias" in names and len(names) == 3
    merged = model.merge_and_unload()[0]
    with torch.no_grad():
        expected = merged(torch.eye(merged.in_features))
    (made.folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_bias": True})
    )
    try:
        torch.testing.assert_close(made.outputs(names, LAYER, 1.0, mode), expected, **NEAR)
        half = made.outputs(names, LAYER, 0.5, mode)
        other = {name.removeprefix("base_model.model."): tensor for name, tensor in names.items()}
        plain = made.outputs(other, LAYER, 1.0, mode)  # of another file in the folder: its alpha is its rank
    finally:
        (made.folder / "adapter_config.json").unlink()
    torch.testing.assert_close(half, (expected + weight.T + bias) / 2, **NEAR)
    torch.testing.assert_close(plain, half, **NEAR)
    assert torch.equal(weight_and_bias(made)[0], weight) and torch.equal(weight_and_bias(made)[1], bias)


def test_a_bias_of_pefts_adapter_is_cut_with_its_layer_and_named_where_it_has_no_place() -> None:
    base = "double_blocks.0.img_attn_qkv"
    tensors = {f"{base}.lora_A.weight": drawn(RANK, 6), f"{base}.lora_B.weight": drawn(18, RANK)}
    tensors[f"{base}.lora_B.bias"] = torch.arange(18.0)
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    shares = [pair.delta(tensors, 0.5).bias for pair in matched(FILE, shapes, LAYERS, HUNYUAN).pairs.values()]
    assert torch.equal(torch.cat([share for share in shares if share is not None]), torch.arange(18.0) / 2)
    bare = matched(FILE, shapes, LAYERS, HUNYUAN, biased=())
    assert bare.unmatched == [f"{base}.lora_B.bias"] and not any(pair.has_bias for pair in bare.pairs.values())
    with pytest.raises(CheckpointError, match="none of 3 keys"):
        matched(FILE, {**shapes, f"{base}.lora_B.bias": (17,)}, LAYERS, HUNYUAN)


@pytest.mark.parametrize("mode", LORA_MODES)
def test_a_bias_beside_a_lora_is_not_scaled_by_its_alpha(made: Any, mode: str) -> None:
    weight, bias = weight_and_bias(made)
    down, up, more = torch.randn(4, weight.shape[1]), torch.randn(weight.shape[0], 4) * 0.1, torch.randn(bias.shape)
    names = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(8.0), "diff_b": more}
    found = made.outputs({f"{LAYER}.{name}": t for name, t in names.items()}, LAYER, 0.5, mode)
    torch.testing.assert_close(found, (weight + 0.5 * 2 * up @ down).T + bias + 0.5 * more, **NEAR)


@pytest.mark.parametrize("mode", LORA_MODES)
def test_dora_sets_the_lengths_of_rows_as_core_does(made: Any, mode: str) -> None:
    weight, bias = weight_and_bias(made)
    down, up = torch.randn(4, weight.shape[1]), torch.randn(weight.shape[0], 4) * 0.1
    length = torch.rand(weight.shape[0], 1) + 0.5
    names = {"lora_down.weight": down, "lora_up.weight": up, "dora_scale": length}
    found = made.outputs({f"{LAYER}.{name}": t for name, t in names.items()}, LAYER, 0.5, mode)
    changed = (weight + up @ down) * length / weight.norm(dim=1, keepdim=True)
    torch.testing.assert_close(found, (weight + 0.5 * (changed - weight)).T + bias, **NEAR)
    assert torch.equal(weight_and_bias(made)[0], weight)


def test_a_dora_counts_what_stands_before_it(made: Any) -> None:
    """Also where the LoRA before it computes beside the weights of other layers."""
    weight, bias = weight_and_bias(made)
    plain, dora = ([torch.randn(4, weight.shape[1]), torch.randn(weight.shape[0], 4) * 0.1] for _ in range(2))
    length = torch.rand(weight.shape[0], 1) + 0.5
    pipe = made.pipeline
    for name, (down, up), more in (("a", plain, {}), ("b", dora, {f"{LAYER}.dora_scale": length})):
        own = {f"{LAYER}.lora_down.weight": down, f"{LAYER}.lora_up.weight": up, **more}
        save_file(own, path := made.folder / f"{name}.safetensors")
        pipe = lora.with_lora(pipe, path, 1.0, "", "separate", Silent())
    before = weight + plain[1] @ plain[0]
    expected = (before + dora[1] @ dora[0]) * length / before.norm(dim=1, keepdim=True)
    with pipe.offloader.hold("transformer") as module, torch.no_grad():
        found = module.get_submodule(LAYER)(torch.eye(weight.shape[1]))
    torch.testing.assert_close(found, expected.T + bias, **NEAR)


@pytest.mark.parametrize("mode", LORA_MODES)
@pytest.mark.parametrize("kind", ["lengths of peft", "lengths of inputs", "LoKr"])
def test_a_convolution_takes_dora_and_lokr(made: Any, kind: str, mode: str) -> None:
    """Lengths of the outputs as peft lays them, or of the input channels; a Kronecker product with windows."""
    name, path = "x_embedder.proj", made.folder / "convolution.safetensors"
    with made.pipeline.offloader.hold("transformer") as module:
        plain = copy.deepcopy(module.get_submodule(name))
    weight = plain.weight.detach()
    ones, (rows, inside) = (1,) * (weight.ndim - 2), weight.shape[:2]
    tensors = {"lora_A.weight": torch.randn(2, *weight.shape[1:]), "lora_B.weight": torch.randn(rows, 2, *ones)}
    expected = weight + torch.einsum("or...,ri...->oi...", tensors["lora_B.weight"], tensors["lora_A.weight"])
    apart = tuple(range(2, weight.ndim))
    if kind == "lengths of peft":
        length = tensors["lora_magnitude_vector"] = torch.rand(1, rows, *ones) + 0.5
        expected = expected * length.transpose(0, 1) / expected.square().sum((1, *apart), True).sqrt()
    elif kind == "lengths of inputs":
        length = tensors["dora_scale"] = torch.rand(1, inside, *ones) + 0.5
        expected = expected * length / expected.square().sum((0, *apart), True).sqrt()
    else:
        tensors = {"lokr_w1": torch.randn(4, 2), "lokr_w2": torch.randn(rows // 4, inside // 2, *weight.shape[2:])}
        expected = weight + torch.kron(tensors["lokr_w1"].reshape(4, 2, *ones), tensors["lokr_w2"])
    save_file({f"{name}.{key}": tensor for key, tensor in tensors.items()}, path)
    changed = lora.with_lora(made.pipeline, path, 1.0, "", mode, Silent())
    picture = torch.randn(1, inside, 2, 4, 4)
    with changed.offloader.hold("transformer") as module, torch.no_grad():
        plain.weight.data = expected
        torch.testing.assert_close(module.get_submodule(name)(picture), plain(picture), **NEAR)


def test_lengths_of_another_layer_are_named() -> None:
    base = "transformer_blocks.0.attn.to_q"
    tensors = {f"{base}.lora_A.weight": (2, 6), f"{base}.lora_B.weight": (6, 2)}
    with pytest.raises(CheckpointError, match="none of 3 keys"):
        matched(FILE, tensors | {f"{base}.dora_scale": (5, 1)}, LAYERS, HUNYUAN)
    assert matched(FILE, tensors | {f"{base}.dora_scale": (6, 1)}, LAYERS, HUNYUAN).pairs
    fused = {f"{FUSED}.lora_A.weight": (2, 6), f"{FUSED}.lora_B.weight": (18, 2), f"{FUSED}.dora_scale": (1, 6)}
    found = matched(FILE, tensors | fused, LAYERS, HUNYUAN)  # of the columns of all that is one weight there
    assert found.unmatched == sorted(fused) and list(found.pairs) == [base]


@pytest.mark.parametrize(
    ("noted", "scale"),
    [
        ({"transformer.r": 4, "transformer.lora_alpha": 8}, 2.0),
        ({"transformer.r": 4, "transformer.lora_alpha": 8, "transformer.use_rslora": True}, 4.0),
        ({"transformer.r": 4, "transformer.lora_alpha": 8, "transformer.alpha_pattern": {"attn.to_q": 2}}, 0.5),
        ({"text_encoder.lora_alpha": 8}, 1.0),
        *(({"transformer.r": 4, "transformer.lora_alpha": number}, 1.0) for number in (math.nan, 10**400)),
        ({}, 1.0),
    ],
)
def test_alpha_in_diffusers_metadata_counts(made: Any, noted: dict[str, Any], scale: float) -> None:
    weight, bias = weight_and_bias(made)
    down, up = torch.randn(4, weight.shape[1]), torch.randn(weight.shape[0], 4) * 0.1
    tensors = {f"transformer.{LAYER}.lora_A.weight": down, f"transformer.{LAYER}.lora_B.weight": up}
    notes = {"lora_adapter_metadata": json.dumps(noted)} if noted else None
    found = made.outputs(tensors, LAYER, 1.0, "merged", notes)
    torch.testing.assert_close(found, (weight + scale * up @ down).T + bias, **NEAR)


def test_alphas_of_genmos_trainer_are_in_its_own_notes(tiny_folder: Path, tmp_path: Path) -> None:
    """Source: genmoai/mochi ``demos/fine_tuner/train.py`` and ``src/genmo/mochi_preview/pipelines.py``."""
    pipeline = load(LoadRequest(tiny.build("mochi", tiny_folder), device="cpu", precision="fp32"))
    width, base = tiny.matrices_of(pipeline)["transformer_blocks.0.attn1.to_q"][0], "blocks.0.attn"
    sizes = {"qkv_x": 3 * width, "proj_x": width}
    factors = {f"{base}.{name}.lora_A": torch.ones(4, width) for name in sizes}
    factors |= {f"{base}.{name}.lora_B": torch.ones(rows, 4) for name, rows in sizes.items()}
    own = {f"{layer}_lora_{name}": value for layer, name, value in (
        ("qkv_proj", "rank", 4), ("qkv_proj", "alpha", 8), ("out_proj", "rank", 4), ("out_proj", "alpha", 2.0),
    )}  # fmt: skip
    save_file(factors, path := tmp_path / "model_2000.lora.safetensors", {"kwargs": json.dumps(own)})
    (added,) = lora.on(lora.with_lora(pipeline, path, 1.0, "", "separate", Silent()))
    scales = {name.rpartition("attn1.")[2]: scale for name, scale in added.scales.items()}
    assert scales == {"to_q": 2.0, "to_k": 2.0, "to_v": 2.0, "to_out.0": 0.5}


@pytest.mark.parametrize("more", [{}, {"transformer.r": "four"}])
def test_a_strangers_notes_on_another_method_need_no_rank(made: Any, more: dict[str, Any]) -> None:
    rows, columns = weight_and_bias(made)[0].shape
    factors = {"lokr_w1": torch.ones(2, 2), "lokr_w2": torch.ones(rows // 2, columns // 2)}
    tensors = {f"{LAYER}.{name}": factor for name, factor in factors.items()}
    noted = {"transformer.lora_alpha": 8, "transformer.peft_type": "LOKR", **more}
    assert made.outputs(tensors, LAYER, 1.0, "merged", {"lora_adapter_metadata": json.dumps(noted)}).isfinite().all()


ENDLESS = [{end: 2} for end in ("(t+)+", "(t|tt)*q", "t*r*a*q", ".*.*q", "t?t?q", "(t|tt)(t|tt)")]
ENDLESS += [{f"b{index}+": 2 for index in range(9)}]


NO_NUMBERS = [{"to_q": number} for number in ("two", 10**400, math.inf, 1e10)]


@pytest.mark.parametrize("pattern", [["to_q"], {"(": 2}, *NO_NUMBERS, *ENDLESS], ids=lambda given: str(given)[:40])
def test_alphas_that_cannot_be_understood_are_one_line(made: Any, pattern: Any) -> None:
    notes = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 8, "transformer.alpha_pattern": pattern})}
    rows, columns = weight_and_bias(made)[0].shape
    sides = {"A": torch.ones(4, columns), "B": torch.ones(rows, 4)}
    tensors = {f"transformer.{LAYER}.lora_{side}.weight": factor for side, factor in sides.items()}
    with pytest.raises(CheckpointError, match="alpha_pattern"):
        made.outputs(tensors, LAYER, 1.0, "merged", notes)


def test_merging_asks_for_room_on_the_host(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the layers that get new weights; the old ones are kept for the undo."""
    rows, columns = weight_and_bias(made)[0].shape
    tensors = {f"{LAYER}.lora_A.weight": drawn(2, columns), f"{LAYER}.lora_B.weight": drawn(rows, 2)}
    monkeypatch.setattr(lora, "swap_free_bytes", lambda: 0)
    for more in (0, -1):
        monkeypatch.setattr(lora, "host_free_bytes", lambda more=more: 4 * rows * columns + more)
        made.outputs(tensors, LAYER, 1.0, "separate")
        with pytest.raises(UnsupportedError, match="Set mode to separate") if more else nullcontext():
            made.outputs(tensors, LAYER, 1.0, "merged")


def test_patterns_of_layers_match_as_in_peft_and_end_at_once() -> None:
    rows = {"0.attn.to_q": 1.0, r"blocks\.\d+\.attn\.to_(k|v)": 2.0, r"^blocks\.[1-3]\..*out$": 3.0, "attn.to_k": 4.0}
    alphas = lora.Alphas(rows)
    for name in (f"blocks.{index}.{end}" for index in (0, 2, 12) for end in ("attn.to_q", "attn.to_k", "ff.out", "x")):
        wanted = next((value for key, value in rows.items() if re.fullmatch(rf"(.*\.)?({key})", name)), 9.0)
        assert alphas.of([name], 9.0) == wanted, name
    whole = lora.Alphas(
        {f"^blocks.{index}.attn.to_q": float(index) for index in range(300)}
    )  # as diffusers writes them
    assert [whole.of([f"{start}blocks.12.attn.to_q"], 9.0) for start in ("", "x.")] == [12.0, 9.0]
    worst = lora.Alphas({rf"1.*{index}x(q|v)": 1.0 for index in range(8)})
    started = time.monotonic()
    assert worst.of(["1." * 64] * 100, 9.0) == 9.0 and time.monotonic() - started < 5


@pytest.mark.parametrize("start", ["True", "gaussian", "orthogonal", "mica", "pissa", "olora"])
def test_the_starts_that_are_read_leave_the_model_as_peft_has_it(start: str) -> None:
    """peft's own layers: a start that is refused changes the weights that it is put beside."""
    import peft

    torch.manual_seed(0)
    host = torch.nn.Sequential(torch.nn.Linear(8, 8))
    before = host[0].weight.detach().clone()
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights={"True": True}.get(start, start))
    after = peft.get_peft_model(host, config).get_submodule("base_model.model.0.base_layer").weight
    assert torch.equal(before, after) == (start in lora.STARTS)


@pytest.mark.parametrize(
    ("method", "trained"),
    [
        ("Lora", {"lora_alpha": 16}),
        ("Lora", {"lora_alpha": 16, "use_rslora": True}),
        ("Lora", {"lora_alpha": 16, "fan_in_fan_out": True}),  # means nothing to peft for a Linear
        ("Lora", {"lora_alpha": 16, "alpha_pattern": {"attn.to_q": 2}, "rank_pattern": {"attn.to_q": 3}}),
        ("Lora", {"lora_alpha": 16, "alpha_pattern": {"to_k": 2}}),
        ("Lora", {"lora_alpha": 16, "use_dora": True}),
        ("Lora", {"lora_alpha": 4, "use_dora": True, "alpha_pattern": {r"blocks\.0\.attn\.to_q": 8}}),
        ("LoHa", {"alpha": 16}),
        ("LoHa", {"alpha": 16, "alpha_pattern": {"to_q": 2}}),
        ("LoKr", {"alpha": 16}),  # its matrices are whole and show no rank
        ("LoKr", {"alpha": 16, "rank_pattern": {"to_q": 5}}),
        ("LoKr", {"alpha": 16, "rank_pattern": {"to_q": 1}, "decompose_both": True}),
    ],
    ids=str,
)
def test_a_folder_that_peft_saved_acts_as_peft_merges_it(made: Any, method: str, trained: dict[str, Any]) -> None:
    import peft

    weight, bias = weight_and_bias(made)
    host = torch.nn.Module()
    host.transformer_blocks = torch.nn.ModuleList([torch.nn.ModuleDict({"attn": torch.nn.ModuleDict()})])
    host.transformer_blocks[0]["attn"]["to_q"] = layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data, layer.bias.data = weight.clone(), bias.clone()
    initial = {"init_lora_weights" if method == "Lora" else "init_weights": False}
    config = getattr(peft, f"{method}Config")(r=4, target_modules=["to_q"], **initial, **trained)
    adapted = peft.get_peft_model(host, config)
    adapted.save_pretrained(made.folder)
    tensors = load_file(made.folder / "adapter_model.safetensors")
    for name in list(tensors):  # as a training leaves them
        if "magnitude" in name:
            tensors[name] *= 1.3
            adapted.get_submodule(f"base_model.model.{LAYER}").lora_magnitude_vector["default"].weight.data *= 1.3
    expected = adapted.merge_and_unload().transformer_blocks[0]["attn"]["to_q"].weight.detach()
    written = made.folder / "adapter_config.json"
    try:
        found = made.outputs(tensors, LAYER, 1.0, "merged")
        raw = (("_A.", "_A.default."), ("_B.", "_B.default."), ("_vector", "_vector.default.weight"))  # as in training
        for old, new in raw:
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        assert torch.equal(made.outputs(tensors, LAYER, 1.0, "merged"), found)
        written.write_text(written.read_text().replace('"peft_type": "LO', '"peft_type": "ADALO'))
        with pytest.raises(UnsupportedError, match=r"'ADALO(RA|HA|KR)'; expected LORA, LOHA, LOKR"):
            made.outputs(tensors, LAYER, 1.0, "merged")
        made.outputs({name.removeprefix("base_model.model."): t for name, t in tensors.items()}, LAYER, 1.0, "merged")
        written.write_text(
            written.read_text().replace('"ADALO', '"LO').replace('lora_weights": false', 'lora_weights": "pissa"')
        )
        if method == "Lora":  # begins with a part of the weights, which the rest of the model then lacks
            with pytest.raises(UnsupportedError, match="init_lora_weights 'pissa'; expected True, False, gaussian"):
                made.outputs(tensors, LAYER, 1.0, "merged")
        written.write_text(written.read_text().replace('"peft_type": "LO', '"peft_type": "ADALO'))
        with pytest.raises(UnsupportedError, match="'ADALO"):  # named before its keys are, which no kind here has
            made.outputs({f"base_model.model.{LAYER}.oft_R.weight": torch.ones(2, 3)}, LAYER, 1.0, "merged")
    finally:
        written.unlink()
    torch.testing.assert_close(found, expected.T + bias, atol=1e-6, rtol=1e-5)
    assert (expected - weight).abs().max() > 1e-3


PACKED = ("int8 convrot", "nvfp4", "fp8", "w4a8", "mxfp8", "gguf")


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way == "nvfp4" else [pytest.mark.full]) for way in PACKED]
)
def test_kinds_that_need_the_weight_act_on_what_packed_layers_are_worth(
    way: str, tiny_folder: Path, tmp_path: Path, recorded: Any
) -> None:
    """DoRA, OFT, BOFT and GLoRA: those layers alone become dense, and are packed as before without it."""
    folder, file = tiny.build("mochi", tiny_folder), tmp_path / "mochi.safetensors"
    tensors = layouts.tensors_of(folder / "transformer")
    if way == "gguf":  # its blocks of Q4_0
        kind = gguf.GGMLQuantizationType.Q4_0
        blocks = [
            name for name, each in tensors.items() if name.endswith(".weight") and each.shape[1:].numel() % 32 == 0
        ]
        blocks = [name for name in blocks if tensors[name].ndim == 2]
        packs = {name: torch.from_numpy(gguf.quants.quantize(tensors[name].numpy(), kind)) for name in blocks}
        save_file({**tensors, **packs}, file)
    else:
        quantised.file_as(file, tensors, way)
    layouts.write(tmp_path / "config.safetensors", {}, layouts.config_in(folder / "transformer"))
    (tmp_path / "config.json").rename(tmp_path / "mochi.json")
    request = LoadRequest(file, base=folder, device="cpu", precision="fp32", files=Files({"transformer": file}))
    pipeline, plain, progress = load(request), load(request), recorded()
    module, other = pipeline.parts["transformer"], plain.parts["transformer"]
    layers = {name: each for name, each in module.named_modules() if isinstance(each, StoredLinear) and each.codec}
    for name in layers:
        unpack(other.get_submodule(name))
    names = [f"transformer_blocks.0.attn1.{name}" for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj")]
    (rows, columns), draws = layers[names[0]].weight.shape, torch.Generator().manual_seed(1)
    own = {  # the first four of these are of the weight
        "dora_scale": (rows, 1), "lora_A.weight": (2, columns), "lora_B.weight": (rows, 2),
    }  # fmt: skip
    changes = [own, {"oft_blocks": (4, rows // 4, rows // 4)}, {"oft_blocks": (2, rows // 4, 4, 4)}]
    changes += [
        {"a1.weight": (columns, 2), "a2.weight": (2, columns), "b1.weight": (rows, 2), "b2.weight": (2, columns)}
    ]
    changes += [{name: shape for name, shape in own.items() if name != "dora_scale"}]
    tensors = {f"{name}.{key}": torch.rand(shape, generator=draws) / 9
               for name, change in zip(names, changes, strict=True) for key, shape in change.items()}  # fmt: skip
    save_file(tensors, tmp_path / "style.safetensors")
    stored = {name: (each.stored.data_ptr(), each.weight.tolist()) for name, each in layers.items()}
    with_it = lora.with_lora(pipeline, tmp_path / "style.safetensors", 0.5, "", "separate", progress)
    merged = lora.with_lora(plain, tmp_path / "style.safetensors", 0.5, "", "separate", Silent())
    assert any("4 packed layers of transformer are dense now" in line for line in progress.said)
    packed, loose = pipeline.weights["transformer"], with_it.weights["transformer"]
    assert 0 < loose.total - packed.total < 4 * sum(layers[name].weight.numel() for name in names[:4])
    assert sum(dict(packed.forms).values()) - sum(dict(loose.forms).values()) == 4
    again = lora.with_lora(with_it, tmp_path / "style.safetensors", 0.2, "", "separate", Silent())
    assert again.weights == with_it.weights, "they are unpacked once"
    with with_it.offloader.hold("transformer") as found, merged.offloader.hold("transformer") as wanted:
        for name in names[:4]:
            before, after = layers[name], found.get_submodule(name)
            assert torch.equal(after.weight, wanted.get_submodule(name).weight) and not isinstance(before, StoredLinear)
        packs = {name for name, each in found.named_modules() if isinstance(each, StoredLinear) and each.codec}
        assert {name.removesuffix(".base_layer") for name in packs} == layers.keys() - set(names[:4])
    with pipeline.offloader.hold("transformer"):
        assert {name: (each.stored.data_ptr(), each.weight.tolist()) for name, each in layers.items()} == stored


@pytest.mark.parametrize("shapes", [((4,), (3, 4)), ((4, 3), (3,)), ((), ())])
def test_factors_with_one_side_are_no_pair(shapes: tuple[tuple[int, ...], ...]) -> None:
    assert lora_kinds.size_of({DOWN: "a", UP: "b"}, dict(zip("ab", shapes, strict=True))) is None


@pytest.mark.parametrize(
    "shapes",
    [
        {DOWN: (4, 64), lora_kinds.BIAS: (64,)},  # half a LoRA is no bias alone
        {DOWN: (4, 64), UP: (64, 4), lora_kinds.BIAS: (1,)},  # which would be added to every row
        dict(zip(lora_kinds.HADA, ((8, 4), (4, 16), (8, 4), (3, 16)), strict=True)),
        dict(zip(lora_kinds.KRON[1:4], ((2, 4), (3, 2), (4, 4)), strict=True)),
    ],
)
def test_factors_that_do_not_fit_each_other_are_no_kind(shapes: dict[str, tuple[int, ...]]) -> None:
    assert lora_kinds.size_of({role: role for role in shapes}, shapes) is None


def test_a_whole_side_of_a_kronecker_product_comes_before_its_factors() -> None:
    first, second, stray = drawn(2, 3), drawn(4, 5), drawn(2, 5)
    own = {lora_kinds.KRON[0]: first, lora_kinds.KRON[3]: second, lora_kinds.KRON[5]: stray}
    assert lora_kinds.size_of({role: role for role in own}, {role: tuple(own[role].shape) for role in own}) == (
        8,
        15,
        0,
    )
    down, up = lora_kinds._lokr(own, SimpleNamespace(cut=lambda whole: whole))
    torch.testing.assert_close(up @ down, torch.kron(first, second))


def rotation(blocks: Tensor) -> Tensor:
    """The orthogonal matrix of one block. Source: LyCORIS, ``docs/Algo-Details.md``."""
    skew, one = (blocks - blocks.T).double(), torch.eye(len(blocks), dtype=torch.float64)
    return (one + skew) @ torch.linalg.inv(one - skew)


@pytest.mark.parametrize("mode", LORA_MODES)
def test_oft_turns_blocks_of_rows(made: Any, mode: str) -> None:
    weight, bias = weight_and_bias(made)
    blocks, size = torch.randn(4, len(weight) // 4, len(weight) // 4) * 0.1, len(weight) // 4
    longer = torch.rand(len(weight), 1) + 0.5
    turned = torch.cat([rotation(b).T @ w.double() for b, w in zip(blocks, weight.split(size), strict=True)])
    changed = (turned * longer).float()
    found = made.outputs({f"{LAYER}.oft_blocks": blocks, f"{LAYER}.rescale": longer}, LAYER, 0.5, mode)
    torch.testing.assert_close(found, (weight + 0.5 * (changed - weight)).T + bias, **NEAR)
    assert torch.equal(weight_and_bias(made)[0], weight)


def test_boft_turns_rows_that_lie_ever_further_apart(made: Any) -> None:
    weight, bias = weight_and_bias(made)
    rows = len(weight)
    blocks = torch.randn(2, rows // 4, 4, 4) * 0.1
    changed = weight.double()
    for stage, apart in enumerate((2, 4)):
        after = changed.clone()
        for index, block in enumerate(blocks[stage]):
            start = index * 4 // (2 * apart) * 2 * apart  # of a pair of halves, and of this block inside it
            first = start + (index * 4 - start) // 2
            chosen = [first, first + apart, first + 1, first + 1 + apart]
            after[chosen] = rotation(block) @ changed[chosen]
        changed = after
    found = made.outputs({f"{LAYER}.oft_blocks": blocks}, LAYER, 1.0, "merged")
    torch.testing.assert_close(found, changed.float().T + bias, **NEAR)


@pytest.mark.parametrize("older", [False, True])
def test_glora_multiplies_the_weight_and_adds(made: Any, older: bool) -> None:
    weight, bias = weight_and_bias(made)
    out, columns = weight.shape
    a1, a2, b1, b2 = (torch.randn(*size) * 0.1 for size in ((columns, 3), (3, columns), (out, 3), (3, columns)))
    changed = weight + 2 * (weight @ a1 @ a2 + b1 @ b2)
    names = ("a2", "a1", "b2", "b1") if older else ("a1", "a2", "b1", "b2")
    tensors = {f"{LAYER}.{name}.weight": t for name, t in zip(names, (a1, a2, b1, b2), strict=True)}
    found = made.outputs({**tensors, f"{LAYER}.alpha": torch.tensor(6.0)}, LAYER, 1.0, "separate")
    torch.testing.assert_close(found, changed.T + bias, **NEAR)


def test_kinds_that_need_the_weight_see_rows_as_the_release_has_them(made: Any) -> None:
    """The release's last modulation is diffusers' norm_out.linear, whose halves of rows change places."""
    base, layer = "lycoris_final_layer_adaLN_modulation_1", "norm_out.linear"
    with made.pipeline.offloader.hold("transformer") as module:
        inner = module.get_submodule(layer)
        weight, bias = (torch.cat(each.detach().chunk(2)[::-1]) for each in (inner.weight, inner.bias))
    size = len(weight) // 4
    blocks = torch.randn(4, size, size) * 0.1
    turned = torch.cat([rotation(b).T @ w.double() for b, w in zip(blocks, weight.split(size), strict=True)])
    found = made.outputs({f"{base}.oft_blocks": blocks}, layer, 1.0, "merged")
    expected = turned.float().T + bias
    torch.testing.assert_close(found, torch.cat(expected.chunk(2, 1)[::-1], 1), **NEAR)


def test_rotations_of_several_layers_at_once_are_named_and_left() -> None:
    tensors = {f"{FUSED}.oft_blocks": (3, 6, 6), f"{LAYER}.diff": (6, 6)}
    assert matched(FILE, tensors, LAYERS, HUNYUAN).unmatched == [f"{FUSED}.oft_blocks"]


NORMS = {  # a norm of each model, its name in the original release, and whether it has a bias
    "hunyuan_video": ("transformer_blocks.0.attn.norm_q", "double_blocks_0_img_attn_q_norm", False),
    "hunyuan_video_15": ("image_embedder.norm_in", "vision_in_proj_0", True),
    "ltx": ("transformer_blocks.0.attn1.norm_k", "transformer_blocks_0_attn1_k_norm", False),
    "mochi": ("transformer_blocks.0.attn1.norm_added_q", "blocks_0_attn_q_norm_y", False),
}


QUICK = (("hunyuan_video", "separate"), ("hunyuan_video_15", "merged"))


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        pytest.param(family, mode, marks=[] if (family, mode) in QUICK else [pytest.mark.full])
        for family in NORMS
        for mode in LORA_MODES
    ],
)
def test_differences_of_norms_are_in_their_weights(family: str, mode: str, tiny_folder: Path, tmp_path: Path) -> None:
    """LyCORIS' ``w_norm`` and ``b_norm``, and ``diff``: all times the strength, no alpha. Beside a LoRA of a matrix."""
    ours, release, biased = NORMS[family]
    pipeline = load(LoadRequest(tiny.build(family, tiny_folder), device="cpu", precision="fp32"))
    name, shape = next((n, s) for n, s in tiny.matrices_of(pipeline).items() if len(s) == 2)
    for spelled, end in ((f"lycoris_{release}", "w_norm"), (f"diffusion_model.{ours}", "diff")):
        with pipeline.offloader.hold("transformer") as module:
            before = {key: tensor.detach().clone() for key, tensor in module.state_dict().items()}
        tensors = {f"{spelled}.{end}": torch.randn(before[f"{ours}.weight"].shape)}
        if biased:
            bias = "b_norm" if end == "w_norm" else "diff_b"
            tensors[f"{spelled}.{bias}"] = torch.randn(before[f"{ours}.bias"].shape)
        factors = {f"{name}.lora_A.weight": torch.randn(2, shape[1]), f"{name}.lora_B.weight": torch.randn(shape[0], 2)}
        save_file({**tensors, **factors}, tmp_path / "norm.safetensors")
        pipe = lora.with_lora(pipeline, tmp_path / "norm.safetensors", -0.5, "", mode, Silent())
        assert set(lora.on(pipe)[0].pairs) == {ours, name}
        with pipe.offloader.hold("transformer") as module:
            norm = module.get_submodule(ours)
            for owned, added in zip(("weight", "bias"), tensors.values(), strict=False):
                expected = before[f"{ours}.{owned}"] - 0.5 * added
                torch.testing.assert_close(getattr(norm, owned).detach(), expected, atol=1e-6, rtol=0)
        with pipeline.offloader.hold("transformer") as module:
            assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())


def test_norms_beside_packed_weights_take_their_differences(tiny_folder: Path, tmp_path: Path, recorded: Any) -> None:
    request = LoadRequest(tiny.build("hunyuan_video", tiny_folder), device="cpu", precision="fp32", weights="int8")
    pipeline: Pipeline = load(request)
    norm, progress = NORMS["hunyuan_video"][0], recorded()
    with pipeline.offloader.hold("transformer") as module:
        before = module.get_submodule(norm).weight.detach().clone()
    save_file({f"{norm}.w_norm": torch.ones(before.shape)}, tmp_path / "norm.safetensors")
    pipe = lora.with_lora(pipeline, tmp_path / "norm.safetensors", 1.0, "", "separate", progress)
    with pipe.offloader.hold("transformer") as module:
        assert torch.equal(module.get_submodule(norm).weight, before + 1)
    assert not any("left out" in line for line in progress.said)


def test_a_merged_lora_of_fp8_layers_is_forecast_as_dense(tmp_path: Path, tiny_folder: Path, recorded) -> None:
    source, folder = tiny.build("hunyuan_video", tiny_folder), tmp_path / "model"
    shutil.copytree(source, folder)
    for file in (folder / "transformer").glob("*.safetensors"):
        save_file({name: each.to(torch.float8_e4m3fn) if ".attn.to_" in name and each.ndim == 2 else each
                   for name, each in load_file(file).items()}, file)  # fmt: skip
    pipeline, progress = load(LoadRequest(folder, device="cpu", precision="fp32")), recorded()
    sizes = {name: each.weight.shape for name, each in pipeline.parts["transformer"].named_modules()
             if isinstance(each, StoredLinear)}  # fmt: skip
    pairs = {f"transformer.{name}.lora_{side}.weight": torch.rand(shape) / 99 for name, (rows, columns) in sizes.items()
             for side, shape in (("A", (2, columns)), ("B", (rows, 2)))}  # fmt: skip
    save_file(pairs, tmp_path / "style.safetensors")
    merged = lora.with_lora(pipeline, tmp_path / "style.safetensors", 1.0, "", "merged", progress)
    with merged.offloader.hold("transformer") as module:
        held = sum(each.numel() * each.itemsize for each in [*module.parameters(), *module.buffers()])
    assert sizes and merged.weights["transformer"].total == held
    assert any(f"{len(sizes)} packed layers of transformer are dense now" in line for line in progress.said)
