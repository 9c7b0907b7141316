"""Whole families in safe fp16 on the simulated accelerator, whose fp16 overflows as any fp16 does."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import layouts
import pytest
import quantised
import tiny
import torch
from anygpu.compat.checkpoints.packed import StoredLinear
from anygpu.compat.output_check import NotFinite
from anygpu.compat.transforms.compile import CompileSettings
from anygpu.compat.transforms.fp16 import apply_fp16_safe, stored_dtype
from anygpu.compat.transforms.fp16_layers import SETTINGS
from anygpu.pipelines.base import Silent
from anygpu.pipelines.files.part import part_files
from anygpu.pipelines.files.single_file import Files
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.load.reading import reader_of
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.speed import SpeedRequest
from safetensors.torch import load_file, save_file

from simulated import accelerator
from simulated.test_families import MODES, SMALL, loaded_for, rendered

HALF = torch.finfo(torch.float16).eps
BOUND = 4 * HALF  # relative L2: the operands of some 30 products in a row are each rounded by half an eps


def cells() -> list[Any]:
    sample = {name: MODES[index % len(MODES)] for index, name in enumerate(SMALL)}
    return [
        pytest.param(name, mode, marks=[] if mode == sample[name] else [pytest.mark.full])
        for name in SMALL
        for mode in MODES
    ]


@pytest.mark.full
@pytest.mark.parametrize(("name", "offload"), cells())
def test_a_family_is_near_fp32_in_every_offload_mode_twice_in_a_row(acc, tiny_folder, on_host, name, offload):
    pipeline = loaded_for(SMALL[name], tiny_folder, "acc:0", offload, "fp16-safe")
    products: set[torch.dtype] = set()

    def seen(_: str, arguments: list) -> None:
        products.update(a.dtype for a in arguments if isinstance(a, torch.Tensor))

    with accelerator.hook("aten::*mm", seen):
        latents = rendered(pipeline, SMALL[name])[0]
    assert torch.float16 in products, "no product had fp16 operands"
    expected = on_host(name)[0]
    assert (latents - expected).norm() <= BOUND * expected.norm()
    assert torch.equal(rendered(pipeline, SMALL[name])[0], latents), "the second run differs from the first"
    transformer = pipeline.parts.read("transformer")
    assert any(hasattr(module, SETTINGS) for module in transformer.modules())


def overflowing(pipeline: Pipeline) -> None:
    """A fault that safe fp16 cannot mend: values far beyond fp16 where nothing normalised bounds them."""
    stock = pipeline.parts.readers["transformer"]

    def read(progress: Any) -> Any:
        module = stock(progress)
        with torch.no_grad():
            module.transformer_blocks[0].ff.net[0].proj.weight.fill_(6e4)
        return module

    pipeline.parts.readers["transformer"] = read


@pytest.mark.parametrize("offload", ["none", "model"])
def test_auto_falls_back_to_fp32_after_one_step_and_says_so(acc, tiny_folder, on_host, recorded, monkeypatch, offload):
    from anygpu.compat.device import precision

    row = precision.PRECISION["cuda-old"]
    monkeypatch.setitem(precision.PRECISION, "other", row)
    pipeline = loaded_for(SMALL["mochi"], tiny_folder, "acc:0", offload, "auto")
    overflowing(pipeline)
    progress = recorded()
    latents = rendered(pipeline, SMALL["mochi"], progress)[0]
    assert [text for text in progress.said if "continuing in fp32" in text]
    steps = [done for done, _, stage in progress.steps if stage == "sampling"]
    assert steps == [1, 2], "the first attempt went on after its first step"
    torch.testing.assert_close(latents, on_host("mochi")[0], atol=1e-5, rtol=1e-5)
    silent = recorded()
    assert torch.equal(rendered(pipeline, SMALL["mochi"], silent)[0], latents)
    assert not [text for text in silent.said if "fp32" in text]


def test_an_explicit_choice_is_never_changed(acc, tiny_folder):
    pipeline = loaded_for(SMALL["mochi"], tiny_folder, "acc:0", precision="fp16-safe")
    overflowing(pipeline)
    with pytest.raises(NotFinite, match=r"step 1 of 2: .* first from block 1 of \d+, .*fp16"):
        rendered(pipeline, SMALL["mochi"])


def test_weights_beyond_fp16_are_read_as_they_are(tiny_folder, tmp_path):
    folder = Path(shutil.copytree(tiny.build("mochi", tiny_folder), tmp_path / "mochi"))
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    name, weights = "transformer_blocks.0.ff.net.2.weight", load_file(file)
    weights[name][0, 0] = 1e5
    save_file(weights, file, {"format": "pt"})
    files = part_files("transformer", "diffusers", "MochiTransformer3DModel", folder / "transformer", torch.float32)
    read = reader_of(replace(files, dtype=torch.float32, dtype_of=stored_dtype))(Silent())
    dtypes = {key: tensor.dtype for key, tensor in read.state_dict().items()}
    assert dtypes[name] is torch.float32 and dtypes[name.replace("0.ff", "1.ff")] is torch.float16
    assert dtypes["proj_out.weight"] is torch.float32
    report = apply_fp16_safe(read, "mochi")
    assert report.left == {"weights of ff.net.2 do not fit into fp16": 1} and report.rewritten["blocks"] == 1
    assert float(read.transformer_blocks[0].ff.net[2].weight[0, 0]) == 1e5


def packed_folders(model: str, folder: Path, into: Path, way: str) -> tuple[Path, Path]:
    """Two copies of a tiny model: with the matrices of its transformer packed, and with what those are worth."""
    made = [Path(shutil.copytree(tiny.build(model, folder), into / name)) for name in ("packed", "worth")]
    tensors = layouts.tensors_of(made[0] / "transformer")
    for file in (file for path in made for file in (path / "transformer").glob("*.safetensors*")):
        file.unlink()
    packed, worth = (path / "transformer" / "diffusion_pytorch_model.safetensors" for path in made)
    save_file(quantised.file_as(packed, tensors, way), worth, {"format": "pt"})
    return made[0], made[1]


QUICK_PACKED = {("mochi", "int8 convrot", "group"), ("ltx", "fp8", "model"), ("hunyuan_video", "w4a8", "none")}


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "way", "offload"),
    [
        pytest.param(model, way, offload, marks=[] if (model, way, offload) in QUICK_PACKED else [pytest.mark.full])
        for model in ("ltx", "hunyuan_video", "hunyuan_video_15", "mochi")
        for way in ("fp8", "int8 convrot", "w4a8")
        for offload in MODES
    ],
)
def test_packed_weights_stay_packed_and_compute_to_the_bits_of_their_values(
    acc, tiny_folder, tmp_path, model, way, offload
):
    """In fewer bytes, held and sent: the same latents as of a file that has the values in fp32."""
    folders, latents, held = packed_folders(model, tiny_folder, tmp_path, way), [], []
    for folder in folders:
        pipeline = load(LoadRequest(folder, precision="fp16-safe", offload=offload, device=acc))
        latents.append(rendered(pipeline, SMALL[model])[0])
        transformer = pipeline.parts.read("transformer")
        held.append(sum(tensor.nbytes for tensor in (*transformer.parameters(), *transformer.buffers())))
        assert held[-1] <= pipeline.model.weights["transformer"].total <= 1.05 * held[-1]
        layers = [module for module in transformer.modules() if isinstance(module, StoredLinear)]
        assert bool(layers) is (folder is folders[0])
    assert torch.equal(*latents)
    assert held[0] < held[1]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.full
def test_packed_weights_are_part_of_one_graph(acc, tiny_folder, name):
    asked = [SpeedRequest("reference", compile) for compile in (None, CompileSettings(backend="eager"))]
    made = [
        loaded_for(SMALL[name], tiny_folder, acc, "none", "fp16-safe", weights="int8", speed=each) for each in asked
    ]
    assert torch.equal(*(rendered(pipeline, SMALL[name])[0] for pipeline in made))
    compiled = made[1].plan.speed.compiled["transformer"]
    assert compiled.graphs and not compiled.failure


@pytest.mark.full
@pytest.mark.parametrize("codec", ["Q8_0", pytest.param("Q4_0", marks=pytest.mark.full)])
def test_a_gguf_stays_packed_and_is_worth_what_its_publisher_s_package_says(acc, tiny_folder, tmp_path, codec):
    folder, file = tiny.build("mochi", tiny_folder), tmp_path / "mochi.gguf"
    worth = layouts.gguf_file(file, layouts.tensors_of(folder / "transformer"), codec)
    plain = layouts.write(tmp_path / "plain.safetensors", worth, layouts.config_in(folder / "transformer"))
    shutil.copy(plain.with_suffix(".json"), file.with_suffix(".json"))
    found = []
    for path in (file, plain):
        request = LoadRequest(path, base=folder, files=Files({"transformer": path}), precision="fp16-safe", device=acc)
        pipeline = load(request)
        found.append(rendered(pipeline, SMALL["mochi"])[0])
        assert layouts.is_packed(pipeline.parts["transformer"]) is (path is file)
    assert torch.equal(*found)
