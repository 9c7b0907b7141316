"""The folder through which jobs and results pass: whole files only, and nothing but keys names one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from anygpu.compat.errors import CheckpointError, InputError
from anygpu.pipelines.records.job_folder import JobFolder, lines_of

KEY = "0123456789abcdef" * 4


def test_jobs_come_back_as_they_were_written(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "farm")
    assert folder.job_files() == []
    lines = ['{"a": 1}', '{"text": "ein Fuchs — 狐"}']
    path = folder.write_jobs("foxes", lines)
    assert folder.job_files() == [path]
    assert lines_of(path) == lines
    assert not list(folder.root.glob(".*")), "nothing half written is left"


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a\0b", "x" * 101])
def test_a_name_cannot_lead_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="expected letters, digits"):
        JobFolder(tmp_path).write_jobs(name, ["{}"])


def test_a_job_is_done_with_its_record_and_not_with_its_file(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    folder.results.mkdir()
    (folder.results / f"{KEY}.mp4").write_bytes(b"video")
    assert not folder.is_done(KEY) and folder.result(KEY) is None and folder.done_keys() == set()
    folder.fail(KEY, "no\nroom")
    assert folder.failure(KEY) == "no room"
    folder.finish(KEY, {"seconds": 1})
    assert folder.result(KEY) == folder.results / f"{KEY}.mp4" and folder.done_keys() == {KEY}
    assert folder.failure(KEY) == "", "what is done has not failed"


def test_what_a_dead_worker_left_half_written_goes_with_the_job(tmp_path: Path) -> None:
    folder, key, other = JobFolder(tmp_path), "ab" * 32, "cd" * 32
    folder.results.mkdir(parents=True, exist_ok=True)
    left = [folder.results / f".{name}.mp4.03f263c4.mp4" for name in (key, other)]
    for path in left:
        path.write_bytes(b"half")
    folder.finish(key, {})
    assert [path.exists() for path in left] == [False, True] and folder.is_done(key)


def test_a_cancel_is_a_file_until_the_job_is_asked_for_again(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    folder.cancel([KEY, "../../etc/passwd"])
    assert folder.cancelled() == {KEY}
    folder.fail(KEY, "cancelled")
    folder.ask_again([KEY])
    assert folder.cancelled() == set() and folder.failure(KEY) == ""


def test_an_input_is_kept_once_and_by_its_content(tmp_path: Path) -> None:
    picture = tmp_path / "Fox Picture.PNG"
    picture.write_bytes(b"pixels")
    folder = JobFolder(tmp_path / "farm")
    name = folder.add_input(picture)
    assert name == folder.add_content(b"pixels", ".png") and name.startswith("inputs/") and name.endswith(".png")
    assert (folder.root / name).read_bytes() == b"pixels" and len(list(folder.inputs.iterdir())) == 1


def test_the_workers_of_several_drivers_are_shown_together_and_damage_is_passed_over(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    assert folder.workers() == []
    folder.write_workers("one", [{"worker": "one-0"}])
    folder.write_workers("two", [{"worker": "two-0"}, {"worker": "two-1"}])
    (folder.root / "workers" / "three.json").write_text("{", encoding="utf-8")
    assert [state["worker"] for state in folder.workers()] == ["one-0", "two-0", "two-1"]


def test_a_driver_that_is_silent_for_a_minute_is_shown_no_more(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    for driver in ("ended", "late"):
        folder.write_workers(driver, [{"worker": driver}])
    now = (folder.root / "workers" / "late.json").stat().st_mtime
    os.utime(folder.root / "workers" / "ended.json", (now - 70, now - 70))
    os.utime(folder.root / "workers" / "late.json", (now - 30, now - 30))
    folder.write_workers("new", [{"worker": "new"}])
    assert [state["worker"] for state in folder.workers()] == ["late", "new"]


def test_a_job_file_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="one job per line"):
        lines_of(tmp_path / "a.jsonl")
