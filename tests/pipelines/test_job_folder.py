"""Folders, files and lists of jobs that anyone may have written: whole files only, and nothing but keys names one."""

import json
import os
from pathlib import Path

import pytest
import torch
from anygpu.compat.errors import CheckpointError, InputError
from anygpu.compat.records import json_in
from anygpu.paint.jobs import paint_jobs
from anygpu.paint.sampling.painting import PaintSettings
from anygpu.pipelines.records import job_folder, job_lists
from anygpu.pipelines.records.job import Content, job_in
from anygpu.pipelines.records.job_folder import JobFolder, each_line, inside, lines_of
from anygpu.pipelines.records.job_lists import Batch, files_in, prompts_in, queue_jobs, seeds_in
from anygpu.pipelines.records.places import Places
from PIL import Image

KEY = "0123456789abcdef" * 4


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    made = JobFolder(tmp_path / "farm")
    made.inputs.mkdir(parents=True)
    (made.inputs / "red.png").write_bytes(b"pixels")
    return made


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c", " — 狐 "])
def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path, separator: str) -> None:
    (tmp_path / "model").mkdir()
    folder = JobFolder(tmp_path)
    assert folder.job_files() == []
    jobs = queue_jobs(folder, "foxes", tmp_path / "model", Batch([f"a{separator}fox"], [1, 2]))
    assert lines_of(tmp_path / "foxes.jsonl") == list(jobs.lines) and not list(tmp_path.glob(".*"))
    assert folder.job_files() == [tmp_path / "foxes.jsonl"]
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
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    reasons = {"pipe": "a pipe", "folder": "Is a directory", "many": "more than 5 lines", "binary": "one job per line"}
    with (tmp_path / "holes.jsonl").open("wb") as file:
        file.truncate(2**40)
    reasons["holes"] = "lines or 6400 bytes"
    for name, why in reasons.items():
        with pytest.raises(CheckpointError, match=why):
            lines_of(tmp_path / f"{name}.jsonl")
    with pytest.raises(CheckpointError, match="Write several files"):
        lines_of(tmp_path / "many.jsonl")
    with pytest.raises(CheckpointError, match="is a pipe"):
        Places().picture(tmp_path / "pipe.jsonl")
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
    (folder.inputs / "loop.png").symlink_to(folder.inputs / "loop.png")
    os.mkfifo(folder.inputs / "pipe.png")
    assert folder.input_file("inputs/red.png").read_bytes() == b"pixels"
    names = [str(tmp_path / "secret.png"), "../secret.png", "beside.png", "inputs/../beside.png", "inputs/script.py"]
    names += ["inputs/link.png", "inputs/pipe.png", "inputs/none.png", "inputs", "\\\\host\\a.png", "inputs/\0.png"]
    names += ["inputs/loop.png", "inputs/\ud83e.png"]
    for name in names:
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
    with pytest.raises(InputError, match="at most 100 characters and 200 bytes"):
        JobFolder(tmp_path).write_jobs("\u72d0" * 90, [])


@pytest.mark.parametrize(
    "name", ["", "../up", "a/b", ".hidden", "-a", "a\0b", "x" * 101, "CON", "nul .x", "Com1", "COM¹"]
)
def test_a_name_cannot_lead_elsewhere_nor_be_a_device(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="expected a letter, digit or _, then letters, digits, spaces"):
        JobFolder(tmp_path).write_jobs(name, ["{}"])


def test_a_job_is_done_with_its_record_and_not_with_its_file(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    folder.results.mkdir()
    (folder.results / f"{KEY}.mp4").write_bytes(b"video")
    assert not folder.is_done(KEY) and folder.result(KEY) is None and folder.done_keys() == set()
    folder.fail(KEY, "no\nroom")
    assert folder.failure(KEY) == "no room"
    (folder.state / KEY).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as full:
        full.setattr(Path, "write_bytes", lambda *_, **__: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(CheckpointError):
            folder.finish(KEY, {"seconds": 1})
    assert (folder.state / KEY).is_dir(), "the job goes on from its steps"
    folder.finish(KEY, {"seconds": 1})
    assert not (folder.state / KEY).exists()
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
    (folder.root / "workers" / "four.json").write_text('[{"state": "idle"}, {"worker": 4}]', encoding="utf-8")
    assert [state["worker"] for state in folder.workers()] == ["one-0", "two-0", "two-1"]
    folder.write_workers("farm", [{"worker": "one-0", "done": 1}])  # as a ComfyUI does that shares the folder
    assert [state for state in folder.workers() if state["worker"] == "one-0"] == [{"worker": "one-0", "done": 1}]
    assert len(folder.workers()) == 3


def test_a_result_has_a_name_for_people_that_every_disk_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = JobFolder(tmp_path)
    folder.results.mkdir()
    (folder.results / "key.mp4").write_bytes(b"a video")
    for _ in range(2):
        folder.show("key.mp4", 'A fox: "why?" 狐 7 0123abcd.mp4')
    (shown,) = (folder.root / "named").iterdir()
    assert shown.name == "A_fox_why_狐_7_0123abcd.mp4" and shown.samefile(folder.results / "key.mp4")
    folder.show("gone.mp4", "gone")

    def refused(*_: object) -> None:
        raise OSError("one name for each file here")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    folder.show("key.mp4", "another.mp4")
    assert len(list((folder.root / "named").iterdir())) == 1


def test_a_driver_that_is_silent_for_a_minute_is_shown_no_more(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    for driver in ("ended", "late"):
        folder.write_workers(driver, [{"worker": driver}])
    now = (folder.root / "workers" / "late.json").stat().st_mtime
    os.utime(folder.root / "workers" / "ended.json", (now - 70, now - 70))
    os.utime(folder.root / "workers" / "late.json", (now - 30, now - 30))
    folder.write_workers("new", [{"worker": "new"}])
    assert [state["worker"] for state in folder.workers()] == ["late", "new"]


def test_seeds_are_numbers_and_ranges_each_once() -> None:
    assert seeds_in("0-3, 42\n7 2") == [0, 1, 2, 3, 42, 7]
    assert seeds_in(str(2**64 - 1)) == [2**64 - 1]


@pytest.mark.parametrize("text", ["", "5-2", "-1", "a", "1.5", "0-1000000", "0-999999 1000000-1999999 2", str(2**64)])
def test_what_is_no_list_of_seeds_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"expected numbers and ranges.* at most 1,000,000 seeds"):
        seeds_in(text)


def test_prompts_are_lines_without_comments() -> None:
    assert prompts_in(" a fox\n\n# not this\na hare ") == ["a fox", "a hare"]
    with pytest.raises(InputError, match="no prompts"):
        prompts_in("# only this\n")


def test_every_prompt_seed_and_picture_is_a_job_that_needs_no_path_of_here(tmp_path: Path) -> None:
    model, here = tmp_path / "here" / "models" / "mine", tmp_path / "here" / "pictures"
    model.mkdir(parents=True)
    (model / "model_index.json").write_text("{}", encoding="utf-8")
    here.mkdir()
    for name, colour in (("b.png", "red"), ("a.PNG", "blue")):
        Image.new("RGB", (8, 8), colour).save(here / name)
    pictures = files_in(here)
    assert [path.name for path in pictures] == ["a.PNG", "b.png"]
    folder = JobFolder(tmp_path / "shared")
    batch = Batch(["a fox", "a hare"], [1, 2, 3], pictures, settings={"width": 64, "steps": 4})
    jobs = queue_jobs(folder, "foxes", model, batch, "publisher/mine")
    assert len(jobs.keys) == len(set(jobs.keys)) == 12
    lines = lines_of(folder.root / "foxes.jsonl")
    assert not [line for line in lines if str(tmp_path) in line], "no path of this machine"
    read = [job_in(json_in(line, "a line")) for line in lines]
    assert [job.key for job in read] == list(jobs.keys)
    assert {(job.prompt.text, job.settings.seed) for job in read} == {(p, s) for p in batch.prompts for s in (1, 2, 3)}
    first, _ = Places(files=(folder.root,)).frames(read[0].pictures[0].file)
    assert torch.equal(first[0, 0, 0], torch.tensor([0.0, 0.0, 1.0])), "found in the folder by its content"


def test_queueing_again_asks_again_for_what_failed_and_keeps_what_is_done(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    folder, batch = JobFolder(tmp_path / "farm"), Batch(["a fox"], [1, 2])
    done, failed = queue_jobs(folder, "one", model, batch).keys
    folder.finish(done, {})
    folder.fail(failed, "no room")
    assert queue_jobs(folder, "two", model, batch).keys == (done, failed)
    assert folder.is_done(done) and folder.failure(failed) == ""


def test_a_name_is_refused_before_notes_on_jobs_are_taken_back(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "farm")
    (tmp_path / "model").mkdir()
    jobs = queue_jobs(folder, "foxes", tmp_path / "model", Batch(["a fox"], [1]))
    folder.cancel(jobs.keys)
    with pytest.raises(InputError, match="the name 'fox/1' for jobs"):
        queue_jobs(folder, "fox/1", tmp_path / "model", Batch(["a fox"], [1]))
    assert folder.cancelled() == set(jobs.keys)


def test_seeds_and_meshes_beyond_the_most_of_a_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="at most 1,000,000 seeds"):
        seeds_in("0-999999, 1000000-1000000")
    assert len(seeds_in("0-999998, 1000000")) == 10**6
    monkeypatch.setattr(job_lists, "MOST_JOBS", 3)
    (tmp_path / "takes.glb").mkdir()
    for name in ("a.glb", "b.glb"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in files_in(tmp_path, "meshes", [".glb"])] == ["a.glb", "b.glb"], "a folder is no file"
    others = {"variant": "tg2mv"}
    with pytest.raises(InputError, match="4 jobs; expected 3 at most"):
        paint_jobs(Content("model"), tmp_path, tmp_path, [1, 2], PaintSettings(), str, **others)
    others |= {"adapter": Content("adapter"), "delight": Content("delight")}
    with pytest.raises(InputError, match="delight beside MV-Adapter"):
        paint_jobs(Content("model"), tmp_path, tmp_path, [1], PaintSettings(), str, **others)
