"""`anygpu render`: the output is checked before the work, and what was sampled outlives whatever fails after it."""

import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from anygpu import cli
from anygpu.compat.errors import UnsupportedError
from anygpu.pipelines import stages
from anygpu.pipelines.demo.scenes import scene_of
from anygpu.pipelines.latents import recovery
from anygpu.pipelines.movie import read_frames, write_mp4
from anygpu.pipelines.pipeline import DEMOS
from anygpu.pipelines.records.job import read_job
from PIL import Image
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


def test_a_video_of_another_kind_than_mp4_is_refused(render, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli, "rendered", lambda *_: pytest.fail("worked first"))
    assert render("--prompt", "a fox", "--output", str(tmp_path / "fox.gif")) == 2
    assert "--output '.gif'; expected one of .mp4, .m4v. Name an MP4" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["render", "doctor"])
def test_a_trace_that_cannot_be_written_costs_no_work(command, tiny_folder: Path, tmp_path: Path, monkeypatch, capsys):
    """It is written last, where torch passes over an error: the run would have been for nothing."""
    monkeypatch.setattr("anygpu.pipelines.jobs.load_pipeline", lambda *_: pytest.fail("worked first"))
    words = [command, "--model", str(tiny.build("ltx", tiny_folder)), "--prompt", "a fox", "--state", str(tmp_path)]
    assert cli.main([*words, "--output", str(tmp_path / "a.mp4"), "--profile", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"anygpu: the folder '{tmp_path}' as --profile; expected a file")


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


@pytest.mark.skipif(sys.platform == "win32", reason="no name has a colon there")
def test_a_colon_in_a_name_is_no_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_frames(write_mp4(torch.zeros(2, 32, 32, 3), 8.0, Path("10:30.mp4")))[0].shape[0] == 2


def test_a_long_video_is_written_frame_by_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, clamp = [], torch.Tensor.clamp
    monkeypatch.setattr(torch.Tensor, "clamp", lambda own, *limits: sizes.append(own.numel()) or clamp(own, *limits))
    frames = torch.rand(5, 33, 32, 3)
    found, fps = read_frames(write_mp4(frames, 8.0, tmp_path / "a.mp4"))
    assert found.shape == (5, 32, 32, 3) and fps == 8.0 and set(sizes) == {32 * 32 * 3}


def test_a_video_is_coded_by_what_can_encode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every FFmpeg has a decoder named h264; one that is built without x264 has no encoder of it."""
    av, names, path = pytest.importorskip("av"), {"mpeg4": "mpeg4"}, tmp_path / "a.mp4"
    monkeypatch.setattr(av, "Codec", partial(lambda codec, name, mode: codec(names.get(name, "none"), mode), av.Codec))
    with av.open(str(write_mp4(torch.zeros(2, 32, 32, 3), 8.0, path))) as container:
        assert container.streams.video[0].codec_context.name == names.pop("mpeg4")
    with pytest.raises(UnsupportedError, match="no MP4 encoder"):
        write_mp4(torch.zeros(2, 32, 32, 3), 8.0, path)


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
            "--width", "64", "--height", "64", "--frames", "9", "--steps", "2", "--device", "cpu", "--state",
            str(tmp_path),
        )  # fmt: skip
        code = cli.main(["doctor", "--model", str(model), *size, *words])
        return code, capsys.readouterr().out

    assert doctor(tiny.build("ltx", tiny_folder)) == (0, "no fault in 9 frames of 64x64\n")
    code, said = doctor(loud, "--precision", "fp16")
    assert code == 1 and f"transformer.{LOUD.removesuffix('.weight')} (Linear, fp16)" in said
    assert (
        "Run again with --repair keep, or add --precision fp16-safe or fp32." in said and "on the load node" not in said
    )
    assert doctor(loud, "--precision", "fp16", "--repair", "keep") == (0, "no fault in 9 frames of 64x64\n")


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    Image.effect_noise((300, 200), 90).convert("RGB").save(path)
    return path


NAMED = ["demo: FramePack", "demo: FramePack (1 MB)", str(DEMOS / "framepack")]


@pytest.mark.parametrize("command", ["render", "doctor"])
@pytest.mark.parametrize("named", NAMED)
def test_a_job_names_a_demo_model_by_its_choice_or_its_folder(named: str, command: str, tmp_path: Path) -> None:
    target = tmp_path / "job.json"
    assert cli.main([command, "--model", named, "--prompt", "a fox", "--save-job", str(target)]) == 0
    job = read_job(target)
    assert (job.family, job.model.name) == ("framepack", "framepack") and job.model.content


def test_a_job_that_exceeds_a_quota_is_one_line(tmp_path: Path, quota, capsys) -> None:
    quota()
    words = ["render", "--model", NAMED[0], "--prompt", "a fox", "--save-job", str(tmp_path / "job.json")]
    assert cli.main(words) == 2 and not list(tmp_path.iterdir())
    assert "job.json' cannot be written (" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("named", NAMED)
def test_a_demo_model_is_planned_as_it_is_run(named: str, photo: Path, tmp_path: Path, capsys) -> None:
    given = ("--model", named, "--image", str(photo), "--device", "cpu", "--state", str(tmp_path))
    assert cli.main(["render", *given, "--plan"]) == 0
    assert "FramePack 64x64, 9 frames, with true guidance: " in capsys.readouterr().out


@pytest.mark.full
def test_a_demo_model_draws_at_its_own_size_whatever_is_asked(photo: Path, tmp_path: Path, capsys) -> None:
    """By its choice, by its folder, and in a job. Frames are compared as the checker reads them: convolutions are
    chosen by their times, and another one rounds otherwise."""
    job = tmp_path / "job.json"
    asked = ("--prompt", "a red fox", "--seed", "3")
    larger = ("--width", "704", "--height", "480", "--frames", "97", "--steps", "40")
    assert cli.main(["render", "--model", "demo: LTX-Video", *asked, *larger, "--save-job", str(job)]) == 0
    ways = (
        ("--model", "demo: LTX-Video", *asked, *larger),
        ("--model", str(DEMOS / "ltx"), *asked),
        ("--job", str(job)),
    )
    seen = []
    for way in ways:
        here = tmp_path / str(len(seen))
        state = ("--device", "cpu", "--state", str(here), "--output", str(here / "a.mp4"))
        assert cli.main(["render", *way, *state]) == 0
        seen.append(read_frames(here / "a.mp4")[0])
        said = [line for line in capsys.readouterr().err.splitlines() if "it does not know fox" in line]
        assert len(said) == 1 and ("width 704 -> 64" in said[0]) == (str(DEMOS / "ltx") not in way)
    assert {tuple(frames.shape) for frames in seen} == {(9, 64, 64, 3)}
    assert {scene_of(frames).caption for frames in seen} == {"a red circle moves left on blue"}


@pytest.mark.full
def test_a_picture_is_planned_at_the_size_it_is_encoded_at(tiny_folder: Path, photo: Path, tmp_path, capsys) -> None:
    for provider in ("hunyuan_video", "siglip"):
        tiny.build(provider, tiny_folder)
    given = ("--model", str(tiny.build("framepack", tiny_folder)), "--search", str(tiny_folder), "--image", str(photo))
    assert cli.main(["render", *given, "--plan", "--device", "cpu", "--state", str(tmp_path), "--seconds", "1.13"]) == 0
    assert "FramePack 768x512, 37 frames: " in capsys.readouterr().out
