"""What a group refuses before any process of Ray starts, and how its ranks end; needs no Ray."""

import json
import pickle
from pathlib import Path

import pytest
import ranks
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.memory.parts import ProgressStage
from anygpu.compat.ranks import Ranks
from anygpu.farm import cli
from anygpu.farm.group import AgreedWatch, GroupRenderer, _require_alike
from anygpu.farm.render import Renderer, task_of
from anygpu.farm.worker import REFUSED, RenderCancelled, Worker
from anygpu.paint.jobs import PaintJob
from anygpu.pipelines.records.job import Content


def test_unlike_ranks_are_refused() -> None:
    each = [{"device": name, "torch": "2.8", "anygpu": "1"} for name in ("RTX 4090", "RTX 4090")]
    _require_alike(each)
    with pytest.raises(UnsupportedError, match="one video on device RTX 4090 and RTX 3060; expected alike devices"):
        _require_alike([*each, {**each[0], "device": "RTX 3060"}])


@pytest.mark.parametrize("words", [["--group", "0"], ["--group", "3", "--branches"], ["--patience", "-1"]])
def test_groups_that_cannot_be_are_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n", encoding="utf-8")
    assert cli.main(["run", str(tmp_path), *words]) == 2
    assert f"{words[0]} {words[1]}" in capsys.readouterr().err


def test_a_rank_ends_at_a_step_of_the_sampling_and_nowhere_else() -> None:
    watch = AgreedWatch(Ranks())
    watch.ended.set()
    watch.check()
    watch.step(1, 2, ProgressStage("encoding", "prompt"))
    with pytest.raises(RenderCancelled):
        watch.step(1, 2, ProgressStage("sampling", "section 1 of 2", True))
    assert (watch.done, watch.total) == (1, 2)


@pytest.mark.farm
def test_a_rank_that_is_left_alone_says_so_in_one_line(tmp_path: Path) -> None:
    processes = ranks.start("lost_rank", "left_alone", 2, tmp_path)
    try:
        processes[0].communicate(timeout=ranks.SECONDS)  # the group's patience is less, torch's own is more
        hung, died = pickle.loads((tmp_path / "0.pickle").read_bytes())
    finally:
        for process in processes:
            process.kill()
    for said in (hung, died):
        assert said.startswith("an exchange between 2 devices failed on rank 0 (") and "\n" not in said
        assert "; expected an answer of every process of the group in time. Look for a process that died" in said


def test_a_mesh_is_refused_by_a_group_in_one_line(tmp_path: Path) -> None:
    item = Content("mesh", "0" * 64)
    line = json.dumps(PaintJob(item, item, item).record())
    group = GroupRenderer(Renderer(tmp_path, (), tmp_path, "cpu"), 2, {"num_cpus": 1}, None)
    outcome = Worker(group).run(task_of(line))
    assert (outcome.status, outcome.text) == (
        REFUSED,
        "a mesh to texture on 2 devices; expected a video: only videos are split over the devices of a group. Run the "
        "same folder once more without --group.",
    )
