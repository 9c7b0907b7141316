"""The load node's list is made again when a model arrives, however deep it lies."""

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import layouts
import pytest
import torch
from anygpu.compat.errors import CheckpointError
from anygpu.pipelines.files.models import part_folders
from PIL import ExifTags, Image
from safetensors.torch import save_file


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """``host/folders.py`` on a stand-in for ComfyUI's ``folder_paths``, whose models lie in ``tmp_path``."""
    paths = SimpleNamespace(
        folder_names_and_paths={"diffusers": ([str(tmp_path)], set())},
        get_folder_paths=lambda key: [str(tmp_path)],
        get_temp_directory=lambda: str(tmp_path / "temp"),
    )
    monkeypatch.setitem(sys.modules, "folder_paths", paths)
    monkeypatch.delitem(sys.modules, "anygpu.host.folders", raising=False)
    yield importlib.import_module("anygpu.host.folders")
    sys.modules.pop("anygpu.host.folders", None)


@pytest.mark.parametrize("name", ["model", "publisher/model", "disk/publisher/model"])
def test_a_download_that_was_listed_half_way_is_listed_when_it_is_whole(folders, tmp_path, name):
    folder = tmp_path / name
    (folder / "vae").mkdir(parents=True)
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.utime(path, (1, 1))  # long ago, so that the clock's resolution plays no part
    assert folders.model_choices() == list(folders.demo_models())
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "MochiPipeline"}), encoding="utf-8")
    assert folders.model_choices() == [name, *folders.demo_models()]


def test_the_demo_models_are_the_last_choices_and_found_by_name(folders):
    choices = folders.model_choices()
    assert choices[0] == "demo: LTX-Video (3 MB)" and choices == list(folders.demo_models())
    for choice in choices:
        assert (folders.model_folder(choice) / "model_index.json").is_file()


def test_a_demo_model_runs_in_the_place_of_a_published_one_of_its_family(folders, tmp_path):
    demo, hunyuan, newer, framepack, mochi = folders.demo_models()
    assert folders.stand_in_for("LTX-Video") == folders.stand_in_for("publisher/LTX-Video-0.9.5") == demo
    assert folders.stand_in_for("hunyuanvideo-community/HunyuanVideo") == hunyuan
    assert folders.stand_in_for("HunyuanVideo-I2V") == "", "it wants a picture"
    assert folders.stand_in_for("FramePack_F1_I2V_HY_20250503") == framepack
    assert folders.stand_in_for("mochi-1-preview") == mochi
    assert folders.stand_in_for("HunyuanVideo-1.5-Diffusers-480p_t2v") == newer
    assert folders.stand_in_for("HunyuanVideo-1.5-Diffusers-480p_i2v") == "", "it wants a picture"
    assert folders.stand_in_for("mine") == folders.stand_in_for(demo) == ""
    assert folders.model_folder("demo: LTX-Video (1 MB)") == folders.model_folder(demo), (
        "saved before it was trained on"
    )


FAMILIES = {  # a published name, its pipeline, another class of the family's, its demo in the list
    "LTX-Video": ("LTXPipeline", "LTXConditionPipeline", 0),
    "HunyuanVideo": ("HunyuanVideoPipeline", "HunyuanVideoImageToVideoPipeline", 1),
    "HunyuanVideo-1.5-Diffusers-480p_t2v": ("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline", 2),
    "mochi-1-preview": ("MochiPipeline", "MochiPipeline", 4),
}


@pytest.mark.parametrize("name, demo", [("HunyuanVideo-I2V", 1), ("HunyuanVideo-1.5-Diffusers-480p_i2v", 2)])
def test_a_demo_that_takes_no_picture_is_named_with_the_template_that_it_runs(folders, name, demo):
    with pytest.raises(CheckpointError) as caught:
        folders.model_folder(name)
    drawn = list(folders.demo_models())[demo]
    assert f"{drawn!r} in the text-to-video template runs at once" in caught.value.fix


@pytest.mark.parametrize("text", ["", "<!DOCTYPE html><html>", '{"_class_name": "WanPipeline"}'])
def test_a_listed_folder_that_is_broken_is_read_and_its_error_said(folders, tmp_path, recorded, text):
    (tmp_path / "LTX-Video").mkdir()
    (tmp_path / "LTX-Video" / "model_index.json").write_text(text, encoding="utf-8")
    assert "LTX-Video" in folders.model_choices() and folders.stand_in_for("LTX-Video") == ""
    with pytest.raises(CheckpointError, match="WanPipeline" if "Wan" in text else "cannot be read"):
        part_folders(folders.model_folder("LTX-Video"), {}, (), recorded())


def test_an_empty_folder_an_unfinished_download_and_a_single_file_are_told_apart(folders, tmp_path, tiny_folder):
    folder = tmp_path / "LTX-Video"
    folder.mkdir()

    def refused(found, fix="Download"):
        with pytest.raises(CheckpointError) as caught:
            folders.model_folder("LTX-Video")
        assert found in caught.value.found and fix in caught.value.fix, caught.value

    refused("an empty folder")
    (folder / "transformer").mkdir()
    refused("a download that has not ended")
    (folder / "some.gguf").touch()
    refused("the single file 'some.gguf'", "models/diffusion_models and choose it in AnyGPU Compose")
    norm, head = {"blocks.0.self_attn.norm_q.weight": torch.ones(2)}, {"head.modulation": torch.ones(1, 2, 2)}
    save_file(norm | head, folder / "wan.safetensors")
    refused("the single file 'wan.safetensors' of Wan", "AnyGPU Fit")
    layouts.whole_set("ltx", tiny_folder, tmp_path / "set")["transformer"].rename(folder / "ltx.safetensors")
    refused("the single file 'ltx.safetensors' of LTX-Video", "AnyGPU Compose Pipeline")


def test_a_name_is_sought_in_model_folders_alone(folders, tmp_path_factory):
    secret = tmp_path_factory.mktemp("secret") / "LTX-Video"
    secret.mkdir()
    (secret / "config.json").write_text('{"_class_name": "Secret"}', encoding="utf-8")
    outside = str(secret), os.path.relpath(secret, folders.model_roots()[0])
    for name in (*outside, f"{outside[1]}/", "x" * 9999, "x/" * 9999, "a\0b"):
        with pytest.raises(CheckpointError, match="no model '") as caught:
            folders.model_folder(name)
        assert "Secret" not in str(caught.value)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("there", ["nothing", "another family", "another variant", "SDXL", "empty", "unreadable"])
def test_whatever_else_is_installed_a_published_name_runs_or_its_error_names_the_demo(folders, tmp_path, name, there):
    pipeline, variant, place = FAMILIES[name]
    demo = list(folders.demo_models())[place]
    other = "MochiPipeline" if pipeline != "MochiPipeline" else "LTXPipeline"
    classes = {"another family": other, "another variant": variant, "SDXL": "StableDiffusionXLPipeline"}
    folder = tmp_path / (name if there == "empty" else "mine")
    if there != "nothing":
        folder.mkdir()
    if there in classes:
        (folder / "model_index.json").write_text(json.dumps({"_class_name": classes[there]}), encoding="utf-8")
    if there == "unreadable":
        (folder / "model_index.json").write_text("{", encoding="utf-8")
    if there not in ("another variant", "empty"):
        assert folders.stand_in_for(name) == demo
        return
    assert folders.stand_in_for(name) == ""
    with pytest.raises(CheckpointError) as caught:
        folders.model_folder(name)
    assert repr(demo) in caught.value.fix and ("an empty folder" in caught.value.found) is (there == "empty")


def test_a_model_of_the_published_name_wins_over_the_demo(folders, tmp_path):
    for name, (pipeline, _, _) in FAMILIES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model_index.json").write_text(json.dumps({"_class_name": pipeline}), encoding="utf-8")
    for name in FAMILIES:
        assert folders.stand_in_for(name) == "" and folders.model_folder(name) == tmp_path / name


def test_the_paint_demo_is_the_last_choice_and_stands_in_while_no_paint_model_is_installed(folders, tmp_path):
    (demo,) = folders.paint_choices()
    assert demo == "demo: Hunyuan3D paint (7 MB)" and (folders.paint_path(demo) / "unet" / "config.json").is_file()
    assert folders.paint_stand_in("hunyuan3d-paint-v2-0") == folders.paint_stand_in("a/hunyuan3d-delight-v2-0") == demo
    assert folders.paint_stand_in("hunyuan3d-paintpbr-v2-1") == demo and folders.paint_stand_in("mine") == ""
    for part in ("unet", "vae"):
        (tmp_path / "hunyuan3d-mine" / part).mkdir(parents=True)
    assert folders.paint_choices() == ["hunyuan3d-mine", demo] and folders.paint_stand_in("hunyuan3d-paint-v2-0") == ""


def test_the_small_mv_adapter_stands_in_for_ig2mv_alone_while_no_adapter_is_installed(folders, tmp_path):
    both = *folders.demo_adapter()[0], *folders.demo_adapter()[1]
    assert both == ("demo: MV-Adapter (2 MB)", "demo: ig2mv")
    assert (folders.base_path(both[0]) / "unet" / "config.json").is_file() and folders.adapter_path(both[1]).is_file()
    for name in ("mvadapter_ig2mv_sdxl.safetensors", "a/mvadapter_ig2mv_sd21.safetensors"):
        assert folders.adapter_stand_in(name) == both
    assert folders.adapter_stand_in("mvadapter_tg2mv_sdxl.safetensors") == folders.adapter_stand_in("mine") == ()
    (tmp_path / "mvadapter_tg2mv_sd21.safetensors").touch()
    assert folders.adapter_stand_in("mvadapter_ig2mv_sdxl.safetensors") == ()


def test_without_demo_models_the_list_says_that_there_is_none(folders, monkeypatch):
    monkeypatch.setattr(folders, "demo_models", dict)
    assert folders.model_choices() == [folders.NO_MODEL]


def test_a_paint_model_is_offered_before_one_that_takes_light_away(folders, tmp_path):
    for name in ("hunyuan3d-delight-v2-0", "hunyuan3d-paint-v2-0"):
        for part in ("unet", "vae"):
            (tmp_path / name / part).mkdir(parents=True)
    (tmp_path / "Hunyuan3D").mkdir()
    (tmp_path / "Hunyuan3D" / "hunyuan3d-paint-v2-0-turbo.safetensors").touch()
    own = "Hunyuan3D/hunyuan3d-paint-v2-0-turbo.safetensors"
    assert list(folders.paint_models()) == [own, "hunyuan3d-paint-v2-0", "hunyuan3d-delight-v2-0"]


def test_nothing_is_scanned_twice_while_nothing_changes(folders, tmp_path, monkeypatch):
    scans = []
    monkeypatch.setattr(folders, "find_models", lambda roots: scans.append(roots) or [])
    for _ in range(3):
        folders.model_choices()
    assert len(scans) == 1


def test_a_cancelled_mesh_of_a_node_stays_a_cancel_where_its_file_cannot_be_removed(monkeypatch, tmp_path):
    """Windows removes no file that the cancelled reader still has open."""
    parts = {"is_link": None}, {"Types": None}
    for name, part in zip(("comfy_execution.graph_utils", "anygpu.host.api"), parts, strict=True):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**part))
    for name in ("comfy_execution", "folder_paths"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.delitem(sys.modules, "anygpu.host.meshes", raising=False)
    meshes = importlib.import_module("anygpu.host.meshes")
    monkeypatch.setitem(sys.modules, "anygpu.host.meshes", meshes)

    def refused(*_args, **_named):
        raise PermissionError("in use")

    def cancelled(_path, _check):
        monkeypatch.setattr(os, "unlink", refused)
        raise KeyboardInterrupt

    monkeypatch.setattr("anygpu.paint.geometry.mesh.load_mesh", cancelled)
    monkeypatch.setattr(meshes.tempfile, "tempdir", str(tmp_path))
    file = SimpleNamespace(format="glb", get_source=lambda: None, save_to=lambda path: Path(path).write_bytes(b"glb"))
    with pytest.raises(KeyboardInterrupt):
        meshes.mesh_of_file("", file, print)
    monkeypatch.undo()


@pytest.mark.parametrize("name", ["adapter_model.json", "adapter_config.json"])
def test_a_configuration_that_is_put_beside_a_file_changes_its_stamp(folders, tmp_path, name):
    """That of a single file and that of peft's LoRA: a node that reads it runs again."""
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    before = folders.stamp(tmp_path / "adapter_model.safetensors")
    (tmp_path / "another.json").write_text("{}")
    assert folders.stamp(tmp_path / "adapter_model.safetensors") == before
    (tmp_path / name).write_text("{}")
    assert folders.stamp(tmp_path / "adapter_model.safetensors") != before


def test_a_dangling_link_in_a_model_folder_is_passed_over_by_its_stamp(folders, tmp_path):
    weights = tmp_path / "model" / "weights.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    stamp = folders.stamp(weights.parent)
    (weights.parent / "gone.safetensors").symlink_to(tmp_path / "nowhere.safetensors")
    assert folders.stamp(weights.parent) == stamp == [(str(weights), weights.stat().st_mtime_ns, 7)]


@pytest.mark.parametrize("name", ["../secret.png", "deep/../../secret.png", "{root}/secret.png", "../input2/a.png"])
def test_no_picture_outside_comfyui_s_folders_is_opened_for_its_size(folders, tmp_path, name):
    paths = sys.modules["folder_paths"]
    paths.get_annotated_filepath = lambda name: str(tmp_path / "input" / name)  # as releases that check nothing
    paths.get_directory_by_type = lambda kind: str(tmp_path / kind)
    for folder in (tmp_path, tmp_path / "input", tmp_path / "input" / "deep", tmp_path / "input2"):
        folder.mkdir(exist_ok=True)
        for file in ("a.png", "secret.png"):
            Image.new("RGB", (8, 4)).save(folder / file)
    assert folders.picture_sides("a.png") == folders.picture_sides(f"{tmp_path}/input/a.png") == (8, 4)
    assert folders.picture_sides(name.format(root=tmp_path)) is None
    for orientation, sides in ((6, (4, 8)), (9, (8, 4))):
        (exif := Image.Exif())[ExifTags.Base.Orientation] = orientation
        Image.new("RGB", (8, 4)).save(tmp_path / "input" / "a.jpg", exif=exif)
        assert folders.picture_sides("a.jpg") == sides
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("PIL.PngImagePlugin.PngImageFile.load", lambda self: 1 / 0)
        assert folders.picture_sides("a.png") == (8, 4), "its header says it"
