"""The command answers at once where it can, and its demo checks what it shows."""

import argparse
import json
import re
import shutil
import subprocess
import sys

import pytest
import tiny
import torch
from anygpu import cli
from anygpu.cli import main, run_command
from anygpu.compat.checkpoints.packed import as_in_files, pack
from anygpu.compat.checkpoints.unpacking import SCALED
from anygpu.compat.errors import sentence
from anygpu.paint import choices
from anygpu.pipelines import demo
from anygpu.pipelines.demo import drawing
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import Files, LoadRequest
from comfy_kitchen.tensor import AsymW4A8Int8Layout, TensorWiseINT8Layout
from safetensors.torch import load_file
from schemas import SNAPSHOT

PROGRAM = """
import sys
from anygpu.cli import main
try:
    main(["--help"])
except SystemExit as end:
    print(end.code, "torch" in sys.modules, "diffusers" in sys.modules, file=sys.stderr)
"""


def test_the_help_imports_no_torch():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert ran.stderr.split() == ["0", "False", "False"], ran.stderr
    assert "render one clip" in ran.stdout


def test_piped_progress_is_silent(capsys):
    from anygpu.cli import Printed
    from anygpu.compat.memory.parts import ProgressStage

    progress = Printed()
    for done in range(1, 4):
        progress.step(done, 3, ProgressStage("sampling"))
    progress.notify("rounded")
    assert capsys.readouterr().err == "rounded\n"


def test_a_bar_that_another_stage_interrupts_leaves_no_line(monkeypatch, capsys):
    from anygpu.cli import Printed
    from anygpu.compat.memory.parts import ProgressStage

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = Printed()
    for done in range(1, 4):
        progress.step(5, 9, ProgressStage("moving", "vae 5 of 9 GB", counted=True))
        progress.step(done, 3, ProgressStage("sampling"))
    assert capsys.readouterr().err.count("\n") == 1


def test_a_shortage_that_was_explained_is_one_line_and_another_error_is_not(capsys):
    def run(_, text=""):
        raise torch.OutOfMemoryError(text or f"{explained}\nCUDA out of memory")

    explained = sentence("sampling ran out of memory", "20 GB", "Lower frames.")
    assert run_command(argparse.Namespace(run=run), "anygpu", "") == 2
    assert capsys.readouterr().err == "anygpu: sampling ran out of memory; expected 20 GB. Lower frames.\n"
    with pytest.raises(RuntimeError, match="a fault"):
        run_command(argparse.Namespace(run=lambda _: run(_, "a fault")), "anygpu", "")


def test_a_video_of_one_colour_is_a_fault(monkeypatch, capsys):
    for fault, frames in (("no fault", torch.rand(9, 32, 64, 3)), ("one colour", torch.full((9, 32, 64, 3), 0.5))):
        monkeypatch.setattr("anygpu.cli.rendered", lambda *_, frames=frames: argparse.Namespace(frames=frames))
        assert main(["doctor", "--model", "a"]) == (fault != "no fault")
        assert capsys.readouterr().out == f"{fault} in 9 frames of 64x32\n"


@pytest.mark.parametrize("name, kind", [("a.mp4", "pipelines"), ("A.GLB", "paint")])
def test_a_replay_runs_over_every_card_by_the_reader_of_its_kind(name, kind, monkeypatch, tmp_path):
    def replay(path, machine, progress):
        assert set(machine.cards) == {torch.device("cpu", 0), torch.device("cpu", 1)}
        assert tmp_path in machine.places.models and {tmp_path, path.parent} <= set(machine.places.files)
        return argparse.Namespace(rendered=argparse.Namespace(write=lambda output: output), text=str, same=True)

    monkeypatch.setattr(f"anygpu.{kind}.jobs.replay", replay)
    monkeypatch.setattr("anygpu.compat.device.facts.accelerators", lambda _: [torch.device("cpu", n) for n in (0, 1)])
    assert main(["replay", str(tmp_path / "b" / name), "--search", str(tmp_path), "--state", str(tmp_path)]) == 0


@pytest.mark.parametrize("wrong", [False, True])
def test_the_demo_draws_a_clip_checks_it_and_leaves_a_page(monkeypatch, tmp_path, capsys, wrong):
    first = dict(list(demo.demo_models().items())[:1])
    monkeypatch.setattr(demo, "demo_models", lambda: first)
    monkeypatch.setattr(choices, "demo_paint_models", dict)
    monkeypatch.setattr(choices, "demo_adapter", lambda: ({}, {}))
    if wrong:  # the model draws something else
        monkeypatch.setattr(drawing, "drawn", lambda *_: torch.rand(9, 64, 64, 3))
    assert main(["demo", "--output", str(tmp_path)]) == wrong
    assert {path.name for path in tmp_path.iterdir()} == {"ltx.mp4", "contact_sheet.png", "report.md"}
    assert ("FAILED: shows what was asked for, another prompt" in capsys.readouterr().out) == wrong
    assert "(contact_sheet.png)" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_a_place_that_takes_no_demo_is_one_line(tmp_path, capsys):
    (tmp_path / "demo").touch()
    assert main(["demo", "--output", str(tmp_path / "demo")]) == 2
    assert re.search(
        r"^anygpu: --output '.*' cannot be written .*; expected a file in a folder", capsys.readouterr().err
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_a_packed_layer_is_marked_as_what_it_is(dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(4, 2, bias=False)
    pack(layer, torch.ones(2, 4).to(dtype), torch.float32, SCALED, {"scale": torch.ones(())})
    mark = json.loads(bytes(as_in_files(torch.nn.Sequential(layer))["0.comfy_quant"].tolist()))
    assert mark["format"] == ("int8_tensorwise" if dtype is torch.int8 else str(dtype).removeprefix("torch."))


def test_a_lone_transformer_is_packed_with_parts_from_elsewhere(tiny_folder, tmp_path, capsys, quota):
    model, file = tmp_path / "a" / "FramePack", tmp_path / "packed.safetensors"
    shutil.copytree(tiny.build("framepack", tiny_folder), model)
    base, encoder = (str(tiny.build(name, tiny_folder)) for name in ("hunyuan_video", "siglip"))
    words = ["pack", "--model", str(model), "--weights", "int8_convrot", "--output"]
    assert main([*words, str(file), "--base", base, "--image-encoder", encoder]) == 0 and load_file(file)
    again = tmp_path / "again.safetensors"
    assert main([*words, str(again), "--search", str(tiny_folder)]) == 0
    assert again.read_bytes() == file.read_bytes()
    assert main([*words, str(tmp_path)]) == 2 and "anygpu: the folder" in capsys.readouterr().err
    quota()
    assert main([*words, str(file), "--base", base, "--image-encoder", encoder]) == 2
    assert re.search(r"anygpu: '.*packed.safetensors' cannot be written .*quota.*; expected", capsys.readouterr().err)


@pytest.mark.parametrize("weights", ["int8_convrot", pytest.param("w4a8", marks=pytest.mark.full)])
def test_packed_weights_are_written_once_and_read_as_they_were_rounded(tiny_folder, tmp_path, capsys, weights):
    """Their values are comfy-kitchen's of what core reads from the file."""
    folder, file = tiny.build("hunyuan_video", tiny_folder), tmp_path / "packed.safetensors"
    assert main(["pack", "--model", str(folder), "--weights", weights, "--output", str(file)]) == 0
    assert str(file) in capsys.readouterr().out
    shutil.copy(folder / "transformer" / "config.json", file.with_suffix(".json"))
    asked = {"device": "cpu", "precision": "bf16"}
    made = load(LoadRequest(folder, weights=weights, **asked)).parts["transformer"].state_dict()
    read = load(LoadRequest(file, folder, files=Files({"transformer": file}), **asked)).parts["transformer"]
    assert made.keys() == read.state_dict().keys()
    assert all(torch.equal(values.float(), made[name].float()) for name, values in read.state_dict().items())
    tensors, judged = load_file(file), 0
    for name, layer in read.named_modules():
        if f"{name}.comfy_quant" not in tensors:
            continue
        about = json.loads(bytes(tensors[f"{name}.comfy_quant"].tolist()))
        judged += about.pop("format") == ("asym_w4a8_int8" if weights == "w4a8" else "int8_tensorwise")
        found = {end: tensors.get(f"{name}.weight{end}") for end in ("", "_scale", "_s_rel", "_s_channel", "_codebook")}
        about |= {"orig_dtype": torch.float32, "orig_shape": tuple(layer.weight.shape)}
        if weights == "w4a8" and found["_scale"] is None:
            sides = {"scale": found["_s_rel"], "s_channel": found["_s_channel"], "codebook": found["_codebook"]}
            about.pop("convrot")
            values = AsymW4A8Int8Layout.dequantize(found[""], AsymW4A8Int8Layout.Params(**sides, **about))
        else:
            params = TensorWiseINT8Layout.Params(scale=found["_scale"], **about)
            values = TensorWiseINT8Layout.dequantize(found[""], params)
        assert torch.equal(layer.dense(torch.float32), values), name
    assert judged > 8


RENDERS = ("LoadPipeline", "EncodePrompt", "EncodeImage", "Sample", "SampleFramePack", "Decode")
FLAGGED = {"text": "prompt", "clip_seconds": "seconds", "section_prompts": "section_prompt", "method": "decode"}
ONLY_NODES = {  # inputs without a flag: the command's job file has them, or `render` makes the choice itself
    "LoadPipeline": {"compile_cache_size", "weights", "text_weights", "transformer_device", "text_device", "vae_device",
                     "keep_free_gb"},
    "EncodePrompt": {"max_tokens", "template", "template_crop"},
    "EncodeImage": {"frame", "strength", "previous", "clip_vision_output", "control", "prepare"},
    "Sample": {"cfg_start", "cfg_end", "sigmas", "guidance_rescale", "stg", "batch_size"},
    "SampleFramePack": {"cfg_start", "cfg_end", "order", "end_strength", "single_frame", "sigmas", "batch_size",
                        "blend_sections"},
    "Decode": {"tile_size", "tile_overlap", "frames_per_chunk", "decode_timestep", "decode_noise_scale"},
}  # fmt: skip


@pytest.mark.parametrize("node", RENDERS)
def test_an_input_has_a_flag_or_is_listed_without(node):
    parser = argparse.ArgumentParser()
    cli._render_arguments(parser)
    flags = {action.dest for action in parser._actions} | {"pipeline", "latent"}
    names = {each["name"] for each in json.loads(SNAPSHOT.read_text(encoding="utf-8"))[f"AnyGPU{node}"]["inputs"]}
    assert {name for name in names if FLAGGED.get(name, name) not in flags} == ONLY_NODES[node], "its flag, or its row"
