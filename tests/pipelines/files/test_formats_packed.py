"""Files that are smaller than their models, and models that are kept smaller than they compute."""

import hashlib
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import layouts
import pytest
import quantised
import tiny
import torch
from anygpu.compat.checkpoints import packed
from anygpu.compat.checkpoints.gguf_file import gguf_header
from anygpu.compat.checkpoints.headers import entries_and_notes
from anygpu.compat.checkpoints.unpacking import unpacked
from anygpu.compat.checkpoints.weights import described, read_sides, read_tensors
from anygpu.compat.errors import CheckpointError, InputError, PackError, UnsupportedError
from anygpu.pipelines import stages
from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
from anygpu.pipelines.files.single_file import Files
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.text import qwen, t5
from safetensors.torch import save_file

FIXTURES = Path(__file__).parents[2] / "fixtures"
FP8 = torch.float8_e4m3fn
# The largest error of one value, as a share of the largest in its row: half a step of the format.
ROUNDING = {"fp8": 2**-4, "int8": 1 / 254, "bf16": 2**-8, "fp16": 2**-11}


def parted(model: str, tiny_folder: Path) -> tuple[Path, Path]:
    """The folder of a transformer, and the pipeline that lends the rest."""
    folder = tiny.build(model, tiny_folder)
    return (
        (folder, tiny.build("hunyuan_video", tiny_folder)) if model == "framepack" else (folder / "transformer", folder)
    )


def latents(pipeline: Pipeline) -> torch.Tensor:
    prompt = stages.encode_prompt(pipeline, PromptRequest("a cat walks"), Silent())
    return stages.sample(pipeline, prompt, None, SampleSettings(64, 64, 9, steps=2, seed=3), Silent()).samples


def blocks_file(path: Path, tensors: dict[str, torch.Tensor], _way: str) -> dict[str, torch.Tensor]:
    """GGUF's blocks in a safetensors file, named as in ComfyUI-MochiWrapper's ``mz_gguf_loader.py`` or as weights."""
    import gguf

    stored, worth = {}, dict(tensors)
    for index, (name, tensor) in enumerate(tensors.items()):
        kind = gguf.GGMLQuantizationType.Q8_0 if index % 3 == 2 else gguf.GGMLQuantizationType.Q4_0
        blocks = gguf.quants.quantize(tensor.numpy(), kind) if layouts.wide(name, tensor) else None
        if blocks is not None:
            worth[name] = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
            name = name if index % 3 == 0 else name.removesuffix("weight") + f"{kind.name}_qweight"
        stored[name] = tensor.contiguous() if blocks is None else torch.from_numpy(blocks)
    assert {"Q4_0_qweight", "Q8_0_qweight"} < {name.rpartition(".")[2] for name in stored}
    assert any(tensor.dtype == torch.uint8 and name.endswith(".weight") for name, tensor in stored.items())
    save_file(stored, path)
    return worth


@pytest.mark.parametrize("name", ["x.weight", "x.Q4_0_qweight", "x.Q8_0_qweight"])
def test_rows_that_are_no_whole_blocks_of_gguf_are_refused(tmp_path, name):
    for sides in ((4, 35), (4, 0)):
        save_file({name: torch.zeros(sides, dtype=torch.uint8)}, tmp_path / "m.safetensors")
        with pytest.raises(CheckpointError, match=rf"U8 \({sides[0]}, {sides[1]}\) .* no whole blocks of Q"):
            described([tmp_path / "m.safetensors"])


def test_a_packed_vector_of_gguf_is_not_read_rather_than_damaged(tmp_path):
    layouts.gguf_file(tmp_path / "m.gguf", {"bias": torch.zeros(64)}, "Q8_0", packed=lambda *_: True)
    with pytest.raises(UnsupportedError, match="'bias'"):
        gguf_header(tmp_path / "m.gguf")


def form_of(layer: Any) -> Any:
    sides = tuple((name, (tuple(side.shape), side.dtype)) for name, side in layer.sides.items())
    stored = tuple(layer.stored.shape), layer.stored.dtype
    return layer.codec, stored, sides, layer.group, ((layer.out_features, layer.in_features), layer.dense_dtype)


QUICK = {("mochi", "old"), ("hunyuan_video", "rows"), ("ltx", "plain"), ("hunyuan_video", "Q8_0"), ("mochi", "Q4_0")}
QUICK |= {("hunyuan_video", "w4a8 corrected")}
PACKED = [
    pytest.param(model, way, marks=[] if (model, way) in QUICK else [pytest.mark.full])
    for model in layouts.RELEASES
    for way in ("old", "rows", "plain", "Q8_0", "Q4_0", *quantised.ALL)
]
PACKED.append(pytest.param("mochi", "blocks"))


@pytest.mark.parametrize(("model", "way"), PACKED)
def test_packed_files_are_worth_what_they_say(tiny_folder, tmp_path, model, way):
    """The values of each weight are those of the file, whether its layer stays packed or is made dense."""
    folder, base = parted(model, tiny_folder)
    release = layouts.layout(layouts.RELEASES[model])
    tensors = layouts.released(layouts.tensors_of(folder), release)
    file = tmp_path / ("model.gguf" if way.startswith("Q") else "model.safetensors")
    write = quantised.file_as if way in quantised.ALL else layouts.scaled_fp8
    write = layouts.gguf_file if way.startswith("Q") else blocks_file if way == "blocks" else write
    worth = write(file, tensors, way)
    layouts.write(tmp_path / "worth.safetensors", worth, layouts.config_in(folder))
    (tmp_path / "worth.json").rename(file.with_suffix(".json"))
    shutil.copy(file.with_suffix(".json"), tmp_path / "worth.json")
    image = {"image_encoder": tiny.build("siglip", tiny_folder)} if model == "framepack" else {}
    pipelines = [
        load(LoadRequest(path, base, device="cpu", files=Files({"transformer": path}), **image))
        for path in (file, tmp_path / "worth.safetensors")
    ]
    found = [pipeline.parts["transformer"] for pipeline in pipelines]
    layers = {name: owner for name, owner in found[0].named_modules() if isinstance(owner, packed.StoredLinear)}
    assert dict(pipelines[0].weights["transformer"].forms) == Counter(map(form_of, layers.values()))
    assert len(layers) >= (1 if way == "w4a4" else 9) and not layouts.is_packed(found[1])
    plain = [owner for owner in found[0].modules() if type(owner) is torch.nn.Linear]
    assert way in quantised.ALL or not any(owner.in_features % 32 == 0 for owner in plain), (
        "what the file packed, modulations too, stays so"
    )
    dense = dict(found[1].named_modules())
    assert all(torch.equal(owner.weight, dense[name].weight) for name, owner in layers.items())
    ours, theirs = found[0].state_dict(), found[1].state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() & theirs.keys())


ENCODERS = ("mochi", "hunyuan_video", "hunyuan_video_15")  # T5, Llama with CLIP, Qwen with ByT5
QUICK_TEXT = {("mochi", "nvfp4 smoothed"), ("hunyuan_video", "int8 convrot")}


@pytest.mark.parametrize(
    ("model", "way"),
    [
        pytest.param(model, way, marks=[] if (model, way) in QUICK_TEXT else [pytest.mark.full])
        for model in ENCODERS
        for way in quantised.ALL
    ],
)
def test_packed_encoders_are_worth_what_they_say_at_the_size_of_their_file(tiny_folder, tmp_path, model, way):
    """Tables of embeddings too, of which a use unpacks the rows that it asks for."""
    folder = Path(shutil.copytree(tiny.build(model, tiny_folder), tmp_path / model))
    text = folder / "text_encoder"
    tensors = layouts.tensors_of(text)
    for file in (*text.glob("*.safetensors"), *text.glob("*.index.json")):
        file.unlink()
    worth = quantised.file_as(text / "model.safetensors", tensors, way)
    pipeline = load(LoadRequest(folder, device="cpu", precision="fp32"))
    module = pipeline.parts["text_encoder"]
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, packed.Stored)}
    file_of = {name.removeprefix("model."): values for name, values in worth.items()}
    found = {name: layer for name, layer in layers.items() if f"{name}.weight" in file_of}
    assert len(found) >= (1 if way == "w4a4" else 9)
    for name, layer in found.items():
        values = file_of[f"{name}.weight"]
        if isinstance(layer, torch.nn.Linear):
            assert torch.equal(layer.weight, values), name
        else:
            ids = torch.tensor([[3, 0], [7, 3]])
            assert torch.equal(layer(ids), values[ids]), name
    held = sum(t.nbytes for t in {id(t): t for t in (*module.parameters(), *module.buffers())}.values())
    assert held <= 1.05 * (text / "model.safetensors").stat().st_size + 8192, "norms in fp32 and buffers of its own"


@pytest.mark.parametrize("model", ["mochi", pytest.param("hunyuan_video", marks=pytest.mark.full)])
@pytest.mark.parametrize("way", ["rows", pytest.param("Q8_0", marks=pytest.mark.full)])
def test_a_packed_file_samples_the_latents_of_its_values(tiny_folder, tmp_path, model, way):
    folder, base = parted(model, tiny_folder)
    tensors = layouts.released(layouts.tensors_of(folder), layouts.layout(layouts.RELEASES[model]))
    file = tmp_path / ("model.gguf" if way.startswith("Q") else "model.safetensors")
    worth = layouts.gguf_file(file, tensors, way) if way.startswith("Q") else layouts.scaled_fp8(file, tensors, way)
    layouts.write(tmp_path / "worth.safetensors", worth, layouts.config_in(folder))
    shutil.copy(tmp_path / "worth.json", file.with_suffix(".json"))
    first, second = (
        latents(load(LoadRequest(path, base, device="cpu", files=Files({"transformer": path}))))
        for path in (file, tmp_path / "worth.safetensors")
    )
    assert torch.equal(first, second)


def test_a_scale_that_fits_no_weight_is_refused(tiny_folder, tmp_path):
    folder, base = parted("mochi", tiny_folder)
    tensors = layouts.released(layouts.tensors_of(folder), layouts.layout(layouts.RELEASES["mochi"]))
    layouts.scaled_fp8(tmp_path / "model.safetensors", tensors, "old")
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "model.safetensors")
    stored["blocks.0.attn.proj_x.scale_weight"] = torch.ones(3)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"fits no weight 'blocks\.0\.attn\.proj_x\.weight'"):
        load(LoadRequest(tmp_path, base, device="cpu", files=Files({"transformer": tmp_path / "model.safetensors"})))


@pytest.mark.parametrize("order", [{}, {"swapped": True}, {"heads": 5}], ids=str)
@pytest.mark.parametrize("name", ["plain", "nested"])
def test_nf4_is_worth_what_bitsandbytes_makes_of_it(name, order):
    """Its own fp32 values, as a hash in the file; also of some rows, in another order."""
    file = FIXTURES / "nf4.safetensors"
    whole = described([file])[f"{name}.weight"]
    values = read_tensors({name: whole}, torch.float32, lambda _: None)[name]
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == entries_and_notes(file)[1][name]
    part = replace(whole.rows(20, 40), **order)
    stored = read_tensors({name: part}, None, lambda _: None)[name]
    found = unpacked(part.codec, stored, read_sides(part), part.group, torch.float32)
    plain = values[20:60]
    if "swapped" in order:
        plain = torch.cat(plain.chunk(2)[::-1])
    if "heads" in order:
        plain = plain.view(5, 4, 2, -1).transpose(1, 2).flatten(0, 2)
    assert stored.shape[1] * 2 == whole.shape[1] and torch.equal(found, plain)


def marked(text: str) -> dict[str, torch.Tensor]:
    return {"x.comfy_quant": torch.tensor(list(text.encode()), dtype=torch.uint8)}


BYTES, ONES, ONE = torch.zeros(2, 32, dtype=torch.int8), torch.ones(2), torch.ones(())
NAMED = {  # what lies beside a weight of 8 bits, and the words of the error
    "svdq": ({"x.qweight": BYTES, "x.smooth_factor": ONES}, r"stored as SVDQuant \(nunchaku\); expected bf16"),
    "nunchaku": ({"x.qweight": BYTES, "x.wzeros": ONES}, "stored as AWQ as nunchaku stores it"),
    "transformers": (
        {"x.weight": BYTES.view(FP8), "x.weight_scale_inv": ONES},
        r"stored as fp8 in blocks \(transformers\)",
    ),
    "ModelOpt": (  # its rows of scales and its order of halves are others, of the same names and sizes
        {"x.weight": BYTES.view(torch.uint8), "x.weight_scale": ONES.to(FP8), "x.weight_scale_2": ONES},
        "stored as nvfp4 that no comfy_quant describes",
    ),
    "mxfp8": (
        {"x.weight": BYTES.view(FP8), "x.weight_scale": BYTES.view(torch.uint8)},
        "stored as mxfp8 that no comfy_quant describes",
    ),
    "gptq": ({"x.qweight": BYTES, "x.qzeros": ONES}, "stored as GPTQ or AutoAWQ"),
    "fp4": ({"x.weight.quant_state.bitsandbytes__fp4": ONES}, r"stored as fp4 \(bitsandbytes\)"),
    "quanto": ({"x.weight._data": BYTES, "x.weight._shift": ONES}, "stored as quanto in 4 or 2 bits"),
    "new": (marked('{"format": "nvfp3"}'), "stored as nvfp3"),
    "group": ({**marked('{"format": "convrot_w4a4"}'), "x.weight_scale": ONES}, "in groups of 256 of its 64 columns"),
    "half": ({**marked('{"format": "nvfp4"}'), "x.weight_scale_2": ONE}, "no scale for the weight"),
    "blocks": ({**marked('{"format": "int8_tensorwise"}'), "x.weight_scale": torch.ones(2, 4)}, r"of \(2, 4\) .* fits"),
}
LTX_2 = {"audio_adaln_single.linear.weight": torch.ones(2, 2), "patchify_proj.weight": torch.ones(2, 2)}


@pytest.mark.parametrize("way", NAMED)
def test_a_model_is_named_before_its_format_and_no_whole_file_is_called_cut_short(tmp_path, way):
    from anygpu.pipelines.files.formats import contents

    words = NAMED[way][1]
    tensors = {name: tensor.clone() for name, tensor in {"x.weight": BYTES, **NAMED[way][0]}.items()}
    save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(PackError, match=words) as raised:
        contents(tmp_path / "m.safetensors")
    assert "cut short" not in str(raised.value)
    save_file({**tensors, **LTX_2}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"holds LTX-2; .*AnyGPU Fit behind it"):
        contents(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    ("choice", "size"),
    [
        ("fp8", 1),
        pytest.param("int8", 1, marks=pytest.mark.full),
        pytest.param("bf16", 2, marks=pytest.mark.full),
        pytest.param("fp16", 2, marks=pytest.mark.full),
        ("as in file", 2),
    ],
)
def test_weights_are_kept_as_chosen_and_come_back(tiny_folder, tmp_path, choice, size):
    model = tiny.build("mochi", tmp_path, dtype=torch.bfloat16 if choice == "as in file" else torch.float32)
    plain = load(LoadRequest(model, device="cpu", precision="fp32"))
    kept = load(LoadRequest(model, device="cpu", precision="fp32", weights=choice, text_weights=choice))
    for part in ("transformer", "text_encoder"):
        module, dense = kept.parts[part], plain.parts[part]
        stored = [owner for owner in module.modules() if isinstance(owner, packed.StoredLinear)]
        assert stored and {owner.stored.element_size() for owner in stored} == {size}
        reference = dict(dense.named_modules())
        for name, owner in module.named_modules():
            if isinstance(owner, packed.StoredLinear):
                own = reference[name].weight
                step = own.abs().amax(1, keepdim=True) * ROUNDING.get(choice, 0.0)
                assert bool(((owner.weight - own).abs() <= step * 1.001).all()), name
    assert (
        len(kept.model.storage) == sum(decision.subject.endswith(" weights") for decision in kept.plan.decisions) == 2
    )
    modules = kept.parts["transformer"].named_modules()
    values = {name: owner.weight for name, owner in modules if isinstance(owner, packed.StoredLinear)}
    if choice == "as in file":  # read so, not made so: there is nothing to take back, and never was a dense copy
        for part in ("transformer", "text_encoder"):
            kept.parts.undo.pop(part)()
            assert layouts.is_packed(kept.parts[part]), part
        return
    kept.parts.undo.pop("transformer")()
    back = dict(kept.parts["transformer"].named_modules())
    assert not layouts.is_packed(kept.parts["transformer"])
    assert all(torch.equal(back[name].weight, value) for name, value in values.items())


@pytest.mark.full
@pytest.mark.parametrize("choice", ["fp8", "int8", "bf16"])
@pytest.mark.parametrize("model", ["ltx", "mochi", "hunyuan_video", "hunyuan_video_15"])
def test_latents_from_small_weights_stay_near(tiny_folder, model, choice):
    folder = tiny.build(model, tiny_folder)
    exact = latents(load(LoadRequest(folder, device="cpu")))
    near = latents(load(LoadRequest(folder, device="cpu", weights=choice, text_weights=choice)))
    assert not torch.equal(exact, near)
    assert float((near - exact).abs().mean()) < 0.25 * float(exact.abs().mean())


def test_an_unknown_choice_is_refused_before_a_weight_is_read(tiny_folder):
    folder = tiny.build("mochi", tiny_folder)
    with pytest.raises(InputError, match="weights 'int3'"):
        load(LoadRequest(folder, device="cpu", weights="int3"))


WRONG = {0.0: "nothing but zeros", float("nan"): "NaN"}
QUICK_WRONG = (("0.0", torch.bfloat16), ("nan", torch.float32))


@pytest.mark.parametrize(
    ("value", "word", "dtype"),
    [
        pytest.param(value, word, dtype, marks=[] if (str(value), dtype) in QUICK_WRONG else [pytest.mark.full])
        for value, word in WRONG.items()
        for dtype in (torch.float32, torch.bfloat16, FP8)
    ],
)
def test_weights_that_cannot_be_right_are_named(tiny_folder, tmp_path, value, word, dtype):
    """Also those that stay in memory as the file has them, in 16 or 8 bits."""
    model = Path(shutil.copytree(tiny.build("mochi", tiny_folder), tmp_path / "mochi"))
    file = model / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors, name = layouts.tensors_of(file.parent), "transformer_blocks.0.attn1.to_q.weight"
    tensors[name] = torch.full_like(tensors[name], value).to(dtype)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(PackError, match=rf"{word}.* in the weight '{name}'"):
        load(LoadRequest(model, device="cpu", precision="fp32", weights="as in file")).parts["transformer"]


def test_a_weight_that_fp16_cannot_hold_leaves_all_layers_as_they_were():
    blocks = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(2))).requires_grad_(False)
    blocks[1][0].weight[0, 0] = 1e6
    before = [tensor.clone() for tensor in blocks.parameters()]
    with pytest.raises(UnsupportedError, match=r"weights of 1\.0 up to 1e\+06 as fp16; expected at most 65504"):
        packed.packed(blocks, "fp16")
    assert all(map(torch.equal, before, blocks.parameters()))


@pytest.mark.parametrize("model", ["mochi", pytest.param("hunyuan_video_15", marks=pytest.mark.full)])
def test_t5_makes_a_weight_dense_only_to_compute_with_it(tiny_folder, monkeypatch, model):
    """Its feed-forward asks for the dtype of a weight twice, and each time all of it was made.

    Mochi's T5 encodes both texts in one forward; quotes of a negative prompt do not reach HunyuanVideo 1.5's ByT5.
    """
    request = LoadRequest(tiny.build(model, tiny_folder), device="cpu", text_weights="int8")
    encoder = "text_encoder_2" if model == "hunyuan_video_15" else "text_encoder"
    made, dense = [], packed.StoredLinear.dense
    monkeypatch.setattr(packed.StoredLinear, "dense", lambda own, dtype: made.append(own) or dense(own, dtype))
    found = []
    for most in (1, 3):
        pipeline = load(request)
        layers = [owner for owner in pipeline.parts[encoder].modules() if isinstance(owner, packed.StoredLinear)]
        found.append(stages.encode_prompt(pipeline, PromptRequest('a sign that says "cat"', 'no "dog"'), Silent()))
        assert max(made.count(layer) for layer in layers) == most
        for encoding in (qwen, t5):
            monkeypatch.setattr(encoding, "without_unpacking", lambda _: nullcontext())
    for ours, theirs in zip(*((one.embeds, one.negative) for one in found), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
