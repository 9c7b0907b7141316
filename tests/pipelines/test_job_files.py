"""Files of jobs that anyone may have written: what is read of them, and what they may name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from anygpu.compat.errors import CheckpointError, InputError
from anygpu.compat.records import json_in
from anygpu.pipelines.records import job_folder
from anygpu.pipelines.records.job import job_in
from anygpu.pipelines.records.job_folder import JobFolder, each_line, inside, lines_of
from anygpu.pipelines.records.job_lists import Batch, queue_jobs


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    made = JobFolder(tmp_path / "farm")
    made.inputs.mkdir(parents=True)
    (made.inputs / "red.png").write_bytes(b"pixels")
    return made


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c"])
def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path, separator: str) -> None:
    (tmp_path / "model").mkdir()
    folder = JobFolder(tmp_path)
    jobs = queue_jobs(folder, "foxes", tmp_path / "model", Batch([f"a{separator}fox"], [1, 2]))
    assert lines_of(tmp_path / "foxes.jsonl") == list(jobs.lines)
    assert [job_in(json.loads(line)).key for line in lines_of(tmp_path / "foxes.jsonl")] == list(jobs.keys)


def test_half_a_character_is_refused_where_jobs_are_written_and_where_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(InputError, match="half a character"):
        queue_jobs(JobFolder(tmp_path), "foxes", tmp_path / "model", Batch(["a \ud83e fox"], [1]))
    with pytest.raises(InputError, match="half characters"):
        job_in({**job(), "prompt": {"text": "a \ud83e fox"}})


def job() -> dict[str, object]:
    size = {"width": 64, "height": 64, "frames": 9}
    return {"anygpu_job": 1, "model": {"name": "m"}, "prompt": {"text": "a fox"}, "settings": size}


@pytest.mark.parametrize("number", [10**201, 2**64, -(2**63) - 1])
def test_a_number_beyond_64_bits_is_refused(number: int) -> None:
    assert job_in(job())
    with pytest.raises(InputError, match="at most 64 bits"):
        job_in({**job(), "settings": {"width": number, "height": 64, "frames": 9}})


def test_files_without_a_transformer_and_fields_that_come_twice_are_refused() -> None:
    with pytest.raises(InputError, match="one for the transformer too"):
        job_in({**job(), "files": {"vae": {"name": "v"}}})
    with pytest.raises(InputError, match="'seed' twice in a job; expected each field once"):
        json_in('{"settings": {"seed": 1, "steps": 2, "seed": 3}}', "a job")


def test_a_pipe_a_folder_and_too_many_lines_are_refused_and_a_long_line_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_folder, "MOST_BYTES", 100)
    monkeypatch.setattr(job_folder, "MOST_JOBS", 5)
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "many.jsonl").write_text("{}\n" * 6)
    for name, why in {"pipe": "a pipe", "folder": "Is a directory", "many": "more than 5 lines"}.items():
        with pytest.raises(CheckpointError, match=why):
            lines_of(tmp_path / f"{name}.jsonl")
    (tmp_path / "long.jsonl").write_bytes(b"{}\n" + b"x" * 1000 + b"\n\xff\xfe\n{}\n")
    first, long, binary, last = each_line(tmp_path / "long.jsonl")
    assert (first, last, long) == ("{}", "{}", "x" * 60)
    with pytest.raises(InputError):
        json_in(binary, "a line")


@pytest.mark.parametrize("name", ["x" * 256, "a/" + "\u00e9" * 128, "/etc/passwd", "../a", "C:\\a", "a\0b", ""])
def test_a_name_that_leads_out_or_that_no_file_can_have_is_nowhere(tmp_path: Path, name: str) -> None:
    assert inside((tmp_path,), "inputs/red.png") == [tmp_path / "inputs" / "red.png"]
    assert inside((tmp_path,), name) == []


def test_a_job_names_files_of_its_inputs_alone(folder: JobFolder, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder.root / "beside.png").write_bytes(b"beside")
    (folder.inputs / "script.py").write_bytes(b"code")
    (folder.inputs / "link.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(folder.inputs / "pipe.png")
    assert folder.input_file("inputs/red.png").read_bytes() == b"pixels"
    names = [str(tmp_path / "secret.png"), "../secret.png", "beside.png", "inputs/../beside.png", "inputs/script.py"]
    for name in [
        *names,
        "inputs/link.png",
        "inputs/pipe.png",
        "inputs/none.png",
        "inputs",
        "\\\\host\\a.png",
        "inputs/\0.png",
    ]:
        with pytest.raises(CheckpointError, match="as a file of a job"):
            folder.input_file(name)
    with (folder.inputs / "large.png").open("wb") as file:
        file.truncate(job_folder.MOST_INPUT_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"500000001 bytes in 'inputs/large.png'"):
        folder.input_file("inputs/large.png")


def test_a_folder_that_takes_no_files_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "farm").write_text("a file")
    for write in (
        lambda folder: folder.fail("0" * 64, "no"),
        lambda folder: folder.write_jobs("foxes", []),
        lambda folder: folder.add_content(b"a", ".png"),
        lambda folder: folder.finish("0" * 64, {}),
    ):
        with pytest.raises(CheckpointError, match=r"cannot be written .*; expected a folder"):
            write(JobFolder(tmp_path / "farm"))
    with pytest.raises(InputError, match="200 bytes at most"):
        JobFolder(tmp_path).write_jobs("\u72d0" * 90, [])
