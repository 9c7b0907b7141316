"""What is in a folder or file becomes a pipeline, or one clear line."""

import json
import os
import shutil
import zipfile
from unittest.mock import Mock

import pytest
import torch
from anygpu.compat.checkpoints.pickled import pickled_tensors
from anygpu.compat.errors import CheckpointError, InputError
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.networks.encoders import encoder
from anygpu.paint.networks.layers import MultiHeadAttention
from anygpu.paint.networks.vae import PictureAttention

from paint import stored


def load(model, **changes):
    return load_paint(PaintRequest(model, device="cpu", **changes))


@pytest.fixture
def folder(paint_folder, tmp_path):
    """A copy that a test may change, of links: unlink a file before writing it."""
    return shutil.copytree(paint_folder, tmp_path / "hunyuan3d-paint-v2-0", copy_function=os.link)


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    other = b.state_dict()
    return all(torch.equal(tensor, other[name]) for name, tensor in a.state_dict().items())


def test_kinds_and_variants_are_recognised(paint_folder, pbr_folder, delight_folder):
    found = [(one.family, one.variant) for one in map(load, (paint_folder, pbr_folder, delight_folder))]
    assert found == [("paint", "v2-0"), ("paint_pbr", "v2-1"), ("delight", "v2-0")]


def test_a_chosen_image_encoder_without_its_configuration_is_refused_as_it_is_loaded(pbr_folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load(pbr_folder, image_encoder=tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 1024}')
    stored.store({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"an image encoder of width 1024 .*; expected 1536"):
        load(pbr_folder, image_encoder=tmp_path)


def test_a_file_among_others_finds_its_own_parts_beside_it(delight_folder, tmp_path):
    own = tmp_path / "diffusion_models"
    shutil.copytree(delight_folder / "unet", own), shutil.copytree(delight_folder / "vae", own / "vae")
    (tmp_path / "vae").mkdir(), (own / "tokenizer").mkdir()
    file = own / "diffusion_pytorch_model.safetensors"
    assert load(file).tokenizers == {"text_encoder": own / "tokenizer"}
    (own / "config.json").write_text('{"dim": 5120}')  # of Wan
    with pytest.raises(CheckpointError, match="a delight UNet"):
        load(file)


@pytest.mark.full
def test_folder_unet_folder_and_file_are_one_pipeline(paint_folder):
    file = paint_folder / "unet" / "diffusion_pytorch_model.safetensors"
    parts = [load(place).parts.read("unet") for place in (paint_folder, paint_folder / "unet", file)]
    assert same(parts[0], parts[1])
    assert same(parts[0], parts[2])
    wanted = stored.weights("paint")
    assert torch.equal(parts[0].state_dict()["class_embedding.weight"], wanted["unet.class_embedding.weight"])


def test_a_bin_is_read_as_weights_alone_and_both_kinds_are_said(folder, paint_folder):
    name, tensors = "unet.class_embedding.weight", stored.weights("paint")
    changed = {**tensors, name: tensors[name] + 1}
    for other in ("diffusion_pytorch_model-00001-of-00002", "scheduler", "training_args"):  # no networks
        (folder / "unet" / f"{other}.bin").write_bytes(b"")
    plain = load(paint_folder).parts.read("unet")
    assert same(plain, load(folder).parts.read("unet"))
    stored.store(changed, folder / "unet" / "diffusion_pytorch_model.bin")
    other = load(folder)
    assert not same(plain, other.parts.read("unet")), "the .bin, as upstream's own loader"
    assert any("diffusion_pytorch_model.bin was read" in decision.verdict for decision in other.decisions)
    assert same(plain, load(folder, weights="safetensors").parts.read("unet"))


def test_a_pickle_that_was_packed_again_is_refused(tmp_path):
    made, again = tmp_path / "made.pth", tmp_path / "again.pth"
    torch.save({"a": torch.arange(2000.0)}, made)
    assert torch.equal(pickled_tensors(made)["a"], torch.arange(2000.0))
    with zipfile.ZipFile(made) as archive, zipfile.ZipFile(again, "w", zipfile.ZIP_DEFLATED) as other:
        for name in archive.namelist():
            other.writestr(name, archive.read(name))
    with pytest.raises(CheckpointError, match="compressed"):
        pickled_tensors(again)


@pytest.mark.parametrize("packed", [True, False])
def test_a_pickle_makes_nothing_but_the_tensors_in_its_file(tmp_path, packed):
    file = tmp_path / "made.pth"
    networks = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    kinds = [torch.half, torch.bfloat16, torch.bool, torch.uint8]
    for whole in (
        networks.state_dict(),
        dict(networks.named_parameters()),
        {str(k): torch.ones(2).to(k) for k in kinds},
    ):
        torch.save(whole, file, _use_new_zipfile_serialization=packed)
        read = pickled_tensors(file)
        assert all(torch.equal(read[name], whole[name]) for name in whole) and len(read) == len(whole)
    refused = {
        "calls builtins bytearray|calls __builtin__ bytearray": bytearray(8),
        "calls _codecs encode": b"abc",  # which torch would let hex double, nested, 20 times
        "calls .*_rebuild_sparse_tensor": torch.eye(2).to_sparse(),
        "calls .*_rebuild_meta_tensor_no_storage": torch.empty(9, device="meta"),
        "something beside tensors": torch.zeros(1).expand(2**40),
    }
    for match, value in refused.items():
        torch.save({"a": value}, file, _use_new_zipfile_serialization=packed)
        with pytest.raises(CheckpointError, match=match):
            pickled_tensors(file)


def test_a_pickle_that_holds_more_than_weights_is_refused(folder):
    file = folder / "unet" / "diffusion_pytorch_model.bin"
    torch.save({"unet.a": torch.zeros(1), "run": print}, file)
    with pytest.raises(CheckpointError, match="cannot be read as weights alone"):
        load(folder)
    torch.save({"step": 3}, file)
    with pytest.raises(CheckpointError, match="something beside tensors"):
        load(folder)
    file.write_bytes(b"PK not a zip")
    with pytest.raises(CheckpointError, match="cannot be read as weights alone"):
        load(folder)


def test_turbo_is_known_by_its_folder_and_its_image_prompt_is_left_out(paint_folder, tmp_path):
    folder = shutil.copytree(paint_folder, tmp_path / "hunyuan3d-paint-v2-0-turbo", copy_function=os.link)
    tensors = stored.weights("paint")
    one = "attn_refview.to_q.weight"
    layers = [name.removesuffix(one) for name in tensors if name.endswith(one)]
    extra = [f"{layer}transformer.attn2.processor.to_{part}_ip.weight" for layer in layers for part in "kv"]
    extra += [f"unet.image_proj_model.{name}" for name in ("proj.weight", "proj.bias", "norm.weight", "norm.bias")]
    tensors |= dict.fromkeys(extra, torch.zeros(1))
    stored.store(tensors, folder / "unet" / "diffusion_pytorch_model.safetensors")
    pipeline = load(folder)
    assert pipeline.variant == "turbo"
    assert any(f"{len(extra)} tensors of an unused image prompt" in decision.verdict for decision in pipeline.decisions)
    assert same(pipeline.parts.read("unet"), load(paint_folder).parts.read("unet"))
    plain, chosen = load(paint_folder), load(folder, variant="v2-0")
    assert plain.variant == chosen.variant == "v2-0"
    guesses = [[each.verdict for each in one.decisions if each.guessed] for one in (pipeline, plain, chosen)]
    assert guesses == [["turbo"], ["v2-0"], []]


def test_every_attention_calls_the_kernel_that_was_chosen(paint_folder):
    pipeline = load(paint_folder, attention="native_math")
    kernels = {
        module.attend.choice
        for part in ("unet", "reference")
        for module in pipeline.parts.read(part).modules()
        if isinstance(module, MultiHeadAttention)
    }
    assert kernels == {"native_math"}
    owners = [module for module in pipeline.parts.read("vae").modules() if hasattr(module, "to_q")]
    assert owners
    assert all(isinstance(owner.processor, PictureAttention) for owner in owners)


def test_an_older_vae_reads_the_same(folder, paint_folder):
    new = stored.weights("paint", "vae")
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    renamed = {}
    for name, tensor in new.items():
        for now, before in old.items():
            if f".{now}." in name:
                name = name.replace(f".{now}.", f".{before}.")
                tensor = tensor[:, :, None, None] if tensor.ndim == 2 else tensor
        renamed[name] = tensor
    assert set(renamed) != set(new)
    stored.store(renamed, folder / "vae" / "diffusion_pytorch_model.safetensors")
    assert same(load(paint_folder).parts.read("vae"), load(folder).parts.read("vae"))


def test_weights_are_read_when_wanted_and_part_by_part(paint_folder, recorded):
    pipeline, progress = load(paint_folder), recorded()
    assert not pipeline.parts
    with pipeline.offloader.hold("reference", 0, progress):
        pass
    assert set(pipeline.parts) == {"reference"}
    assert progress.steps[-1][2].startswith("reading reference")


@pytest.mark.full
def test_norms_are_kept_in_the_dtype_of_the_residual(paint_folder):
    state = load(paint_folder, precision="bf16").parts.read("unet").state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert load(paint_folder, precision="bf16").parts.read("vae").dtype is torch.bfloat16


def _without(part):
    return lambda folder: shutil.rmtree(folder / part)


def _config(part="unet", **changes):
    def change(folder):
        path = folder / part / "config.json"
        found = json.loads(path.read_text())
        path.unlink()
        kept = {name: value for name, value in {**found, **changes}.items() if value is not None}
        path.write_text(json.dumps(kept))

    return change


def _weights(change):
    def store(folder):
        stored.store(change(stored.weights("paint")), folder / "unet" / "diffusion_pytorch_model.safetensors")

    return store


BROKEN = {
    "no paint model in": (_without("unet"), {}),
    "no vae with a config.json": (_without("vae"), {}),
    "act_fn 'gelu' in the configuration of the UNet": (_config(act_fn="gelu"), {}),
    "sizes in config.json cannot be read .KeyError: 'norm_num_groups'": (_config(norm_num_groups=None), {}),
    "sizes in config.json cannot be read .ValueError": (_config(layers_per_block="two"), {}),
    "a vae of 16 latent channels": (_config("vae", latent_channels=16), {}),
    "'unet.down_blocks.*' of the UNet in .* is missing": (_config(layers_per_block=2), {}),
    "'unet.*' of the UNet in .*, as a paint UNet of its config.json has it": (_config(cross_attention_dim=512), {}),
    "'unet.more' of the UNet in .* is .1,.; expected no such tensor": (
        _weights(lambda w: {**w, "unet.more": torch.zeros(1)}),
        {},
    ),
    "holds no UNet of Hunyuan3D": (_weights(lambda _: {"other": torch.zeros(1)}), {}),
    "paint variant 'x'": (lambda _: None, {"variant": "x"}),
    "weights 'x'": (lambda _: None, {"weights": "x"}),
    "no .bin in": (lambda _: None, {"weights": "bin"}),
}


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_wrong_is_said_in_one_line(folder, text):
    change, request = BROKEN[text]
    change(folder)
    with pytest.raises((CheckpointError, InputError), match=text):
        load(folder, **request)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError(), CheckpointError, r"do not fit its configuration \(ValueError\)"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError, "can't allocate"),
        (InputError("a", expected="b", fix="c"), InputError, "a; expected b"),
    ],
)
def test_an_encoder_that_cannot_be_read_says_why(error, kind, text):
    unread = Mock(read=Mock(side_effect=error), shapes={}, path="model")
    small = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    with pytest.raises(kind, match=text):
        encoder("text_encoder", small, unread, torch.float32, lambda _count: None)


def test_a_vae_of_another_shape_is_refused(folder):
    stored.store({"encoder.conv_in.weight": torch.zeros(1)}, folder / "vae" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(CheckpointError, match="of the VAE in"):
        load(folder).parts.read("vae")
