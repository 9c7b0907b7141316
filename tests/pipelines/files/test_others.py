"""Files that are close to a model: what is too much is left out and said, another model is named with what runs it."""

import json
from pathlib import Path
from typing import Any

import diffusers
import layouts
import published
import pytest
import torch
from anygpu.compat.checkpoints.weights import read_tensors
from anygpu.compat.errors import CheckpointError
from anygpu.pipelines.family import OtherModel
from anygpu.pipelines.files.evidence import _fits
from anygpu.pipelines.files.formats import config_of, contents, entries_in
from anygpu.pipelines.files.single_file import Files, family_in
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.requests import LoadRequest
from safetensors.torch import load_file, save_file

COMFY = "model.diffusion_model."


@pytest.mark.parametrize(
    ("model", "title", "prefix"),
    [
        *(("ltx-2", "LTX-2", ""), ("wan", "Wan", "")),
        *(
            pytest.param(name, title, COMFY, marks=pytest.mark.full)
            for name, title in (("ltx-2", "LTX-2"), ("wan", "Wan"))
        ),
    ],
)
def test_another_model_is_named_with_what_runs_it(tmp_path: Path, model: str, title: str, prefix: str) -> None:
    file = published.sparse(tmp_path / "x.safetensors", published.under(prefix, published.shapes(model)))
    with pytest.raises(CheckpointError) as caught:
        family_in(file)
        config_of(contents(file)[0])
    assert f"holds {title}; expected" in str(caught.value) and "AnyGPU Fit" in str(caught.value)


@pytest.mark.parametrize(
    ("model", "title", "runs", "more"),
    [
        ("hunyuan_video", "HunyuanCustom Edit", "Wan2GP", "bg_in.proj.weight bg_in.proj.bias bg_proj.weight"),
        ("hunyuan_video", "HunyuanCustom with audio", "Wan2GP", "audio_proj.norm.weight audio_models.0.proj.weight"),
        (
            *("hunyuan_video", "HunyuanCustom with audio", "Wan2GP"),
            " ".join(f"{name}.{index}.proj.weight" for name in ("audio_proj", "audio_models") for index in range(12)),
        ),
        (
            *("hunyuan_video", "HunyuanVideo-Avatar", "Wan2GP"),
            "ref_in.proj.weight audio_proj.norm.weight audio_adapter_blocks.0.to_q.weight",
        ),
        (
            *("hunyuan_video i2v 33", "Hunyuan-GameCraft", "Tencent's own code"),
            "camera_net.scale camera_net.encode_first.0.weight camera_net.camera_in.proj.weight",
        ),
        ("hunyuan_video", "DisCa's restricted", "Tencent's own", "time_r_in.mlp.0.weight time_r_in.mlp.2.weight"),
        (
            *("hunyuan_video", "Matrix-Game", "Skywork's own code"),
            " ".join(f"double_blocks.{index}.action_model.keyboard_embed.in_layer.weight" for index in range(20)),
        ),
        ("hunyuan_video_15", "HY-WorldPlay", "Tencent's own", "action_in.mlp.0.weight action_in.mlp.2.weight"),
        ("hunyuan_video_15 meanflow", "OmniWeaving", "Tencent's own", "mm_in.linear_1.weight mm_in.linear_2.weight"),
        (
            *("ltx 2B", "VACE for LTX-Video", "its own code"),
            " ".join(f"transformer_context_blocks.{index}.proj.weight" for index in range(17))
            + " patchify_context_proj.weight",
        ),
    ],
)
def test_a_few_tensors_beside_a_models_name_another_task(
    tmp_path: Path, model: str, title: str, runs: str, more: str
) -> None:
    """As few as are otherwise left out, and more."""
    tensors = published.shapes(model) | dict.fromkeys(more.split(), (4, 4))
    file = published.sparse(tmp_path / "x.safetensors", tensors)
    with pytest.raises(CheckpointError, match=f"holds {title} .*Use {runs}"):
        config_of(contents(file)[0])


@pytest.mark.parametrize(("cls", "title"), [("LTX2Pipeline", "LTX-2"), ("WanPipeline", "Wan")])
def test_another_models_folder_is_named_with_what_runs_its_single_file(tmp_path: Path, cls: str, title: str) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": cls}))
    with pytest.raises(CheckpointError, match=f"which is {title}; .*Use its single file with ComfyUI's own"):
        load(LoadRequest(tmp_path, device="cpu"))


@pytest.mark.parametrize("name", ["img_emb.proj.0.weight", "transformer_blocks.0.attn1.extra.weight"])
def test_a_tensor_too_many_is_left_out_and_said(tiny_folder: Path, tmp_path: Path, recorded: Any, name: str) -> None:
    """One that no rule knows, and one that a rule takes to a place the model lacks."""
    files, base = layouts.whole_set("ltx", tiny_folder, tmp_path), layouts.tools_only("ltx", tiny_folder, tmp_path)
    plain = load(LoadRequest(files["transformer"], base=base, device="cpu", files=Files(files)))
    theirs = plain.parts["transformer"].state_dict()
    tensors = load_file(files["transformer"])
    save_file({**tensors, name: torch.ones(2, 2)}, files["transformer"])
    progress = recorded()
    more = load(LoadRequest(files["transformer"], base=base, device="cpu", files=Files(files)), progress)
    assert any("left out" in line and name.rpartition(".")[0] in line for line in progress.said)
    ours = more.parts["transformer"].state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.full
def test_of_models_that_lack_nothing_the_one_that_leaves_out_least_is_taken(tmp_path: Path) -> None:
    """33 channels without guidance, which comes first, would leave out the guidance of the file too."""
    rows = json.loads((FAMILIES["hunyuan_video"].folder / "transformer.json").read_text())
    row = next(row for row in rows if row["name"] == "image to video, 33 channels with guidance")
    with torch.device("meta"):
        model = getattr(diffusers, row["config"]["_class_name"]).from_config(row["config"])
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    (content,) = contents(published.sparse(tmp_path / "model.safetensors", shapes | {"extra.buffer": (4,)}))
    found = config_of(content)
    assert found.name == row["name"] and len(found.unused) + len(content.unknown) == 1


@pytest.mark.full
def test_the_task_that_a_user_says_settles_no_resolution(tmp_path: Path) -> None:
    (content,) = contents(published.sparse(tmp_path / "model.safetensors", published.shapes("hunyuan_video_15")))
    found = config_of(content, "text")
    assert (found.name, found.why) == ("480p t2v", "assumed: no name around it says otherwise")


def test_many_tensors_too_many_are_another_model(tiny_folder: Path, tmp_path: Path) -> None:
    files = layouts.whole_set("ltx", tiny_folder, tmp_path)
    more = {f"control.{index}.weight": torch.ones(2, 2) for index in range(17)}
    save_file({**load_file(files["transformer"]), **more}, files["transformer"])
    with pytest.raises(CheckpointError, match="unknown tensors 'control"):
        contents(files["transformer"])


def test_tencents_scales_multiply_their_weights(tmp_path: Path) -> None:
    weight, scale = torch.randn(4, 8).to(torch.float8_e4m3fn), torch.tensor([0.5])
    file = tmp_path / "x.safetensors"
    save_file({"blocks.0.fc.weight": weight, "blocks.0.fc.fp8_scale": scale}, file)
    read = read_tensors(entries_in(file), torch.float32, lambda _: None)
    assert read.keys() == {"blocks.0.fc.weight"} and torch.equal(read["blocks.0.fc.weight"], weight.float() * 0.5)


def test_a_folder_of_tencents_is_sent_to_compose(tmp_path: Path) -> None:
    folder = tmp_path / "transformer" / "720p_i2v"
    published.sparse(folder / "diffusion_pytorch_model.safetensors", published.shapes("hunyuan_video_15"))
    (folder / "config.json").write_text(json.dumps({"_class_name": "HunyuanVideo_1_5_DiffusionTransformer"}))
    with pytest.raises(CheckpointError, match="in AnyGPU Compose Pipeline"):
        load(LoadRequest(folder, device="cpu"))


@pytest.mark.full
def test_published_sizes_are_recognised(tmp_path: Path) -> None:
    """The names and shapes of ComfyUI's own classes; FramePack's of its publisher."""
    for model, (family, name) in {
        "ltx 2B": ("ltx", "2B"),
        "ltx 13B": ("ltx", "13B"),
        "hunyuan_video": ("hunyuan_video", "text to video"),
        "hunyuan_video i2v 33": ("hunyuan_video", "image to video, 33 channels"),
        "skyreels i2v": ("hunyuan_video", "SkyReels V1 image to video"),
        "hunyuan_video_15": ("hunyuan_video_15", "480p t2v"),
        "hunyuan_video_15 meanflow": ("hunyuan_video_15", "480p i2v, few steps"),
        "framepack": ("framepack", "FramePack"),
        "mochi": ("mochi", "Mochi 1"),
    }.items():
        (content,) = contents(published.sparse(tmp_path / f"{model}.safetensors", published.shapes(model)))
        found = config_of(content)
        assert (content.kind.split("/")[0], found.unused, content.unknown) == (family, (), ())
        assert found.name == name or family in ("framepack", "mochi")


@pytest.mark.parametrize(("shape", "fits"), [((4, 7), True), ((4, 6), False), ((7,), False), ((), False)])
def test_another_model_is_told_by_its_columns(shape: tuple[int, ...], fits: bool, tmp_path: Path) -> None:
    save_file({"model.proj.weight": torch.zeros(shape)}, tmp_path / "a.safetensors")
    assert _fits(OtherModel("a model", ("proj.weight",), columns=7), entries_in(tmp_path / "a.safetensors")) is fits
