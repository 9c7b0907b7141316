"""Every prompt with every seed and every picture becomes a job that other machines understand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from anygpu.compat.errors import InputError
from anygpu.compat.records import json_in
from anygpu.pipelines.records.job import job_in
from anygpu.pipelines.records.job_folder import JobFolder, lines_of
from anygpu.pipelines.records.job_lists import Batch, pictures_in, prompts_in, queue_jobs, seeds_in
from anygpu.pipelines.records.places import Places
from PIL import Image


def test_seeds_are_numbers_and_ranges_each_once() -> None:
    assert seeds_in("0-3, 42\n7 2") == [0, 1, 2, 3, 42, 7]
    assert seeds_in(str(2**64 - 1)) == [2**64 - 1]


@pytest.mark.parametrize("text", ["", "5-2", "-1", "a", "1.5", "0-99999999999", str(2**64)])
def test_what_is_no_list_of_seeds_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected numbers and ranges"):
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
    pictures = pictures_in(here)
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
