"""`anygpu render`: the output is checked before the work, and what was sampled outlives whatever fails after it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from anygpu import cli
from anygpu.compat.errors import UnsupportedError
from anygpu.pipelines import stages, tiny
from anygpu.pipelines.latents import recovery
from anygpu.pipelines.movie import read_frames, write_mp4
from safetensors.torch import load_file, save_file

LOUD = "transformer_blocks.0.ff.net.2.weight"  # loud enough, it takes the residual out of fp16's range


@pytest.fixture
def render(tiny_folder: Path, tmp_path: Path):
    """Runs the command with a tiny model and returns its exit code."""
    model = str(tiny.build("ltx", tiny_folder))
    usual = ("--model", model, "--width", "64", "--height", "64", "--frames", "9", "--steps", "2", "--device", "cpu")
    state = ("--state", str(tmp_path / "state"), "--output", str(tmp_path / "out" / "a.mp4"))
    return lambda *words: cli.main(["render", *usual, *state, *words])


def test_a_failed_decode_loses_nothing(render, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    decode = stages.decode

    def fail(*_: object, **__: object) -> None:
        raise UnsupportedError("a decoder that fails", expected="one that works", fix="Try again.")

    monkeypatch.setattr(stages, "decode", fail)
    assert render("--prompt", "a fox") == 2
    (kept,) = recovery.listing(tmp_path / "state" / "kept")
    assert f"--recover {kept.id} decodes them again" in capsys.readouterr().err
    monkeypatch.setattr(stages, "decode", decode)
    monkeypatch.setattr(stages, "sample", fail)
    assert render("--recover", kept.id) == 0
    frames, _ = read_frames(tmp_path / "out" / "a.mp4")
    assert tuple(frames.shape) == (9, 64, 64, 3)
    assert len(recovery.listing(tmp_path / "state" / "kept")) == 1


def test_an_output_that_cannot_be_written_costs_no_work(render, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli, "rendered", lambda *_: pytest.fail("worked first"))
    assert render("--prompt", "a fox", "--output", str(tmp_path)) == 2
    assert capsys.readouterr().err.startswith("anygpu: the folder")


def test_neither_a_prompt_nor_latents(render, capsys) -> None:
    assert render() == 2
    assert "no --prompt; expected a text, or --recover" in capsys.readouterr().err


def test_a_disk_that_fills_up_while_the_video_is_written(tmp_path: Path) -> None:
    """/dev/full as the folder's disk: libav's own error becomes one line, and no half of a file is left."""
    target = tmp_path / "file"
    target.touch()
    with pytest.raises(OSError, match="cannot be written") as caught:
        write_mp4(torch.zeros(2, 32, 32, 3), 8.0, target / "a.mp4")
    assert caught.value.expected == "a writable folder with room for the video"


def test_doctor_names_the_layer_keeps_what_helps_and_is_one_line_for_a_sound_model(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loud, part = tmp_path / "loud", Path("transformer", "diffusion_pytorch_model.safetensors")
    shutil.copytree(tiny.build("ltx", tiny_folder), loud)
    weights = load_file(loud / part)
    weights[LOUD] *= 5e4 / weights[LOUD].abs().max()
    save_file(weights, loud / part, {"format": "pt"})

    def doctor(model: Path, *words: str) -> tuple[int, str]:
        size = (
            "--width",
            "64",
            "--height",
            "64",
            "--frames",
            "9",
            "--steps",
            "4",
            "--device",
            "cpu",
            "--state",
            str(tmp_path),
        )
        code = cli.main(["doctor", "--model", str(model), *size, *words])
        return code, capsys.readouterr().out

    assert doctor(tiny.build("ltx", tiny_folder)) == (0, "no fault in 9 frames of 64x64\n")
    code, said = doctor(loud, "--precision", "fp16")
    assert code == 1 and f"transformer.{LOUD.removesuffix('.weight')} (Linear, fp16)" in said
    assert doctor(loud, "--precision", "fp16", "--repair", "keep") == (0, "no fault in 9 frames of 64x64\n")
