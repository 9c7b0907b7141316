"""MV-Adapter on a user's checkpoint: single files and folders, what is refused, LoRAs, dtypes, memory."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from anygpu.compat.errors import CheckpointError, InputError
from anygpu.paint.adapter_loading import AdapterRequest, load_adapter
from anygpu.paint.choices import demo_adapter
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.networks.stable_diffusion import base_in, unet_config
from anygpu.paint.networks.weights import Weights
from safetensors.torch import load_file, save_file

from paint import mv_stored

BASES = ("sdxl", "sd21")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {base: mv_stored.folder(base, tmp_path_factory.mktemp(base)) for base in BASES}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return {base: mv_stored.single_file(base, tmp_path_factory.mktemp(base) / f"{base}.safetensors") for base in BASES}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {key: mv_stored.adapter_file(*key, root) for key in mv_stored.FILES}


def loaded(model, adapter, **chosen):
    return load_adapter(AdapterRequest(model, adapter, device="cpu", **chosen))


@pytest.mark.full
@pytest.mark.parametrize("base", BASES)
def test_a_single_file_and_a_folder_are_one_checkpoint(folders, files, adapters, base):
    found = [loaded(model, adapters["ig2mv", base]) for model in (files[base], folders[base])]
    assert [each.family for each in found] == ["mv_adapter"] * 2 and found[0].variant == "ig2mv"
    assert found[0].latent_scale == mv_stored.SCALES[base]
    assert found[0].latent_format == {"sdxl": "SDXL", "sd21": "SD15"}[base]
    for part in found[1].parts.readers:
        one, other = (each.parts.read(part).state_dict() for each in found)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
        total = sum(tensor.nbytes for tensor in one.values())
        assert found[0].weights[part].total == found[1].weights[part].total == total, part
    layers = mv_stored.adapter_tensors("ig2mv", base)
    unet = found[0].parts.read("unet").state_dict()
    assert all(torch.equal(unet[name], tensor) for name, tensor in layers.items() if ".processor." in name)
    stock = mv_stored.parts(base)["unet"].state_dict()
    assert all(torch.equal(unet[name], tensor) for name, tensor in stock.items())


@pytest.mark.parametrize("base", ["sdxl", pytest.param("sd21", marks=pytest.mark.full)])
def test_what_the_host_has_loaded_is_that_file_and_is_copied(files, adapters, base):
    names = {"sdxl": ("clip_l", "clip_g"), "sd21": ("clip_h",)}[base]
    held = {
        name: tensor
        for name, tensor in mv_stored.original(base).items()
        if name.split(".")[0] in ("model", "first_stage_model")
    }
    for part, name in zip(("text_encoder", "text_encoder_2"), names, strict=False):
        state = mv_stored.parts(base)[part].state_dict()
        if base == "sd21":  # which core has with the last layer
            last = {name: tensor for name, tensor in state.items() if ".layers.1." in name}
            state |= {name.replace(".layers.1.", ".layers.2."): torch.zeros_like(each) for name, each in last.items()}
        state = {"text_projection.weight": torch.zeros(64, 64), **state}
        held |= {f"{name}.transformer.{key}": tensor for key, tensor in state.items()} | {
            f"{name}.logit_scale": torch.ones(())
        }
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
    given = Weights(
        Path("mine.safetensors"), shapes, None, sum(each.nbytes for each in held.values()), held.__getitem__
    )
    found = [loaded(model, adapters["tg2mv", base]) for model in (given, files[base])]
    assert "model and vae of this node are not read" in " ".join(map(str, found[0].decisions))
    for part in found[1].parts.readers:
        one, other = (each.parts.read(part).state_dict() for each in found)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one), part
        assert found[0].weights[part] == found[1].weights[part], part
    places = {tensor.untyped_storage().data_ptr() for tensor in held.values()}
    mine = [tensor for part in found[0].parts.values() for tensor in part.state_dict().values()]
    assert mine and not places & {tensor.untyped_storage().data_ptr() for tensor in mine}


@pytest.mark.parametrize("base", BASES)
def test_the_configuration_is_read_off_the_shapes(base):
    wanted = mv_stored.unet_config(base)
    shapes = {name: tuple(tensor.shape) for name, tensor in mv_stored.parts(base)["unet"].state_dict().items()}
    assert unet_config(shapes) == wanted


@pytest.mark.full
def test_each_part_is_said_to_have_the_bytes_that_are_read_of_it(files, adapters, pbr_folder, monkeypatch):
    sizes, read = {}, {}

    def counted(part, total, _progress):
        sizes[part], read[part] = total, []
        return read[part].append

    monkeypatch.setattr("anygpu.paint.loading.reading_of", counted)
    hunyuan = load_paint(PaintRequest(pbr_folder, device="cpu"))
    for pipeline in (loaded(files["sdxl"], adapters["ig2mv", "sdxl"]), hunyuan):
        for part in pipeline.parts.readers:
            pipeline.parts.read(part)
        assert {"unet", "vae"} < sizes.keys() and sizes == {part: sum(counts) for part, counts in read.items()}
        sizes.clear(), read.clear()


def changed(base, change):
    """Tensors of a single file with another shape or name."""
    tensors = {name: torch.empty(tensor.shape) for name, tensor in mv_stored.original(base).items()}
    change(tensors)
    return tensors


def inpainting(tensors):
    tensors["model.diffusion_model.input_blocks.0.0.weight"] = torch.empty(64, 9, 3, 3)


def edm(tensors):
    tensors["edm_mean"] = torch.empty(1)


def sd15(tensors):
    for name in [name for name in tensors if name.endswith((".proj_in.weight", ".proj_out.weight"))]:
        if ".model." in name or name.startswith("model."):
            tensors[name] = tensors[name][:, :, None, None].contiguous()


def unclip(tensors):
    refiner(tensors, 1536)


def refiner(tensors, width=2560):
    tensors["model.diffusion_model.label_emb.0.0.weight"] = torch.empty(256, width)
    for leaf in ("0.0.bias", "0.2.weight", "0.2.bias"):
        tensors[f"model.diffusion_model.label_emb.{leaf}"] = torch.empty(256)


def without_vae(tensors):
    for name in [name for name in tensors if name.startswith("first_stage_model.")]:
        del tensors[name]


def flat_vae(tensors):
    tensors["first_stage_model.decoder.conv_in.weight"] = torch.empty(64)


def video(tensors):
    tensors.clear()
    tensors["transformer_blocks.0.attn1.to_q.weight"] = torch.empty(4, 4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        ("sdxl", inpainting, "is an inpainting checkpoint"),
        ("sdxl", edm, "is an EDM checkpoint"),
        ("sd21", sd15, r"is Stable Diffusion 1\.5"),
        ("sd21", refiner, "is the refiner of Stable Diffusion XL"),
        ("sd21", unclip, "is an unCLIP checkpoint of Stable Diffusion 2.1"),
        ("sdxl", without_vae, "no vae of sdxl in"),
        ("sdxl", flat_vae, "a vae of 0 latent channels in"),
        ("sdxl", video, "is no Stable Diffusion checkpoint"),
    ],
)
def test_another_checkpoint_is_refused_by_name(tmp_path, base, change, message):
    path = tmp_path / "base.safetensors"
    save_file(changed(base, change), path)
    with pytest.raises(CheckpointError, match=message) as caught:
        base_in(path)
    assert len(str(caught.value).splitlines()) == 1 and "base.safetensors" in str(caught.value)


def test_a_checkpoint_without_a_vae_takes_the_chosen_one(folders, adapters, tmp_path):
    save_file({k: v.contiguous() for k, v in changed("sdxl", without_vae).items()}, tmp_path / "base.safetensors")
    (tmp_path / "folder").mkdir()
    for part in folders["sdxl"].iterdir():
        if part.name != "vae":
            (tmp_path / "folder" / part.name).symlink_to(part)
    for place in (tmp_path / "base.safetensors", tmp_path / "folder"):
        with pytest.raises(CheckpointError):
            base_in(place)
        pipeline = loaded(place, adapters["ig2mv", "sdxl"], vae=folders["sdxl"] / "vae")
        assert pipeline.parts.read("vae").config["latent_channels"] == 4


def test_a_folder_of_an_edm_model_is_refused(folders, adapters, tmp_path):
    for part in folders["sdxl"].iterdir():
        (tmp_path / part.name).symlink_to(part)
    (tmp_path / "scheduler").unlink()
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": "EDMEulerScheduler"}))
    with pytest.raises(CheckpointError, match="is an EDM checkpoint"):
        loaded(tmp_path, adapters["ig2mv", "sdxl"])
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps({"prediction_type": "sample"}))
    with pytest.raises(CheckpointError, match="predicts 'sample'; expected epsilon or v_prediction"):
        loaded(tmp_path, adapters["ig2mv", "sdxl"])


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        ("conv_in", (64,), "whose UNet takes 0 channels"),
        ("add_embedding.linear_1", (64,), "is another UNet"),
        ("down_blocks.0.resnets.0.conv1", (), "conv1.weight' of the UNet in"),
    ],
)
def test_a_folder_whose_layers_lack_axes_is_refused(folders, adapters, tmp_path, layer, shape, message):
    for part in folders["sdxl"].iterdir():
        (tmp_path / part.name).symlink_to(part)
    (tmp_path / "unet").unlink()
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").symlink_to(folders["sdxl"] / "unet" / "config.json")
    tensors = load_file(folders["sdxl"] / "unet" / "diffusion_pytorch_model.safetensors")
    tensors[f"{layer}.weight"] = torch.zeros(shape)
    save_file(tensors, tmp_path / "unet" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        loaded(tmp_path, adapters["ig2mv", "sdxl"])


def test_an_adapter_for_the_other_base_and_a_truncated_one_are_refused(files, adapters, tmp_path):
    with pytest.raises(CheckpointError, match="is made for sd21, and the checkpoint is sdxl"):
        loaded(files["sdxl"], adapters["ig2mv", "sd21"])
    demo = next(iter(demo_adapter()[1].values()))
    for base in BASES:
        missing = rf"a checkpoint of {base}; expected mvadapter_ig2mv_{base}\.safetensors.* in models/diffusion_models"
        with pytest.raises(CheckpointError, match=missing):
            loaded(files[base], demo)
    tensors = load_file(adapters["tg2mv", "sdxl"])
    name = next(name for name in tensors if name.endswith("to_out_mv.0.bias"))
    del tensors[name]
    save_file(tensors, tmp_path / "mvadapter_tg2mv_sdxl.safetensors")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        loaded(files["sdxl"], tmp_path / "mvadapter_tg2mv_sdxl.safetensors")
    save_file({**tensors, "adapter.conv_in.weight": torch.zeros(64)}, tmp_path / "flat.safetensors")
    with pytest.raises(CheckpointError, match=r"'flat\.safetensors' holds no MV-Adapter"):
        loaded(files["sdxl"], tmp_path / "flat.safetensors")
    with pytest.raises(InputError, match="adapter variant 'i2mv'"):
        loaded(files["sdxl"], adapters["tg2mv", "sdxl"], variant="i2mv")


def test_a_checkpoint_of_velocities_is_known_and_said(adapters, tmp_path):
    path = mv_stored.single_file("sdxl", tmp_path / "v.safetensors", v_pred=torch.zeros(1))
    pipeline = loaded(path, adapters["tg2mv", "sdxl"])
    assert pipeline.configs["adapter"]["prediction_type"] == "v_prediction"
    assert any("velocities" in str(decision) for decision in pipeline.decisions)
    tensors = mv_stored.original("sd21")
    name = "model.diffusion_model.output_blocks.11.1.transformer_blocks.0.norm1.bias"
    for factor, prediction in ((1.0, "epsilon"), (5.0, "v_prediction")):
        save_file(
            {**{k: v.contiguous() for k, v in tensors.items()}, name: tensors[name] * factor},
            tmp_path / "2.safetensors",
        )
        assert base_in(tmp_path / "2.safetensors").prediction == prediction


@pytest.mark.full
@pytest.mark.parametrize("kohya", [True, False])
def test_a_lora_of_the_base_is_merged(files, adapters, tmp_path, kohya):
    pytest.importorskip("peft")
    place, delta, text_delta = mv_stored.lora_file(tmp_path / "lora.safetensors", kohya)
    plain = loaded(files["sdxl"], adapters["ig2mv", "sdxl"])
    pipeline = loaded(files["sdxl"], adapters["ig2mv", "sdxl"], lora=tmp_path / "lora.safetensors", lora_strength=0.7)
    before, after = (each.parts.read("unet").state_dict() for each in (plain, pipeline))
    assert before.keys() == after.keys()
    found = after[f"{place}.weight"] - before[f"{place}.weight"]
    assert torch.allclose(found, 0.7 * delta, atol=1e-5) and delta.abs().max() > 0.1
    assert all(torch.equal(before[name], after[name]) for name in before if name != f"{place}.weight")
    if kohya:
        before, after = (each.parts.read("text_encoder").state_dict() for each in (plain, pipeline))
        name = next(name for name in before if name.endswith("layers.0.self_attn.q_proj.weight"))
        assert torch.allclose(after[name] - before[name], 0.7 * text_delta, atol=1e-5)


def test_a_lora_of_another_model_is_refused(files, adapters, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    for name, message in (("wide", "no LoRA for the unet of sdxl"), ("video", "no LoRA for the unet of sdxl")):
        path = tmp_path / f"{name}.safetensors"
        if name == "wide":
            mv_stored.lora_file(path, True, width=32)
        else:
            save_file({"transformer.blocks.0.to_q.lora_A.weight": torch.zeros(4, 4)}, path)
        pipeline = loaded(files["sdxl"], adapters["ig2mv", "sdxl"], lora=path)
        with pytest.raises(CheckpointError, match=message) as caught:
            pipeline.parts.read("unet")
        assert len(str(caught.value).splitlines()) == 1
    short = Mock(side_effect=RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    monkeypatch.setattr("diffusers.loaders.StableDiffusionXLLoraLoaderMixin.lora_state_dict", short)
    with pytest.raises(RuntimeError, match=r"^DefaultCPUAllocator"):
        pipeline.parts.read("unet")


def test_sdxl_s_own_vae_is_never_fp16_and_a_fixed_one_may_be(acc, files, folders, adapters, tmp_path):
    own = load_adapter(AdapterRequest(files["sdxl"], adapters["ig2mv", "sdxl"], device=acc, precision="fp16"))
    assert own.precision.vae is torch.float32 and "fp16 overflows" in own.precision.why
    fixed = tmp_path / "vae"
    fixed.mkdir()
    config = {**json.loads((folders["sdxl"] / "vae" / "config.json").read_text()), "force_upcast": False}
    (fixed / "config.json").write_text(json.dumps(config))
    weights = folders["sdxl"] / "vae" / "diffusion_pytorch_model.safetensors"
    (fixed / "diffusion_pytorch_model.safetensors").symlink_to(weights)
    request = AdapterRequest(files["sdxl"], adapters["ig2mv", "sdxl"], device=acc, precision="fp16", vae=fixed)
    assert load_adapter(request).precision.vae is torch.float16


def test_an_old_configuration_of_a_vae_has_the_usual_scale(folders, adapters):
    pipeline = loaded(folders["sd21"], adapters["tg2mv", "sd21"])
    without = {name: value for name, value in pipeline.configs["vae"].items() if name != "scaling_factor"}
    assert replace(pipeline, configs={**pipeline.configs, "vae": without}).latent_scale == 0.18215


def test_an_adapter_for_pictures_partly_hidden_is_cautioned(files, adapters, tmp_path):
    partial = tmp_path / "mvadapter_ig2mv_partial_sdxl.safetensors"
    partial.symlink_to(adapters["ig2mv", "sdxl"])
    cautions = [
        [each for each in loaded(files["sdxl"], one).decisions if each.alarming]
        for one in (partial, adapters["ig2mv", "sdxl"])
    ]
    assert "of which a part is hidden" in cautions[0][0].verdict and not cautions[1]
