"""What a group refuses before any process of Ray starts, and how its ranks end; needs no Ray."""

import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.memory.parts import ProgressStage, Silent
from anygpu.compat.ranks import Group, Ranks
from anygpu.farm import cli, group
from anygpu.farm.group import AgreedWatch, GroupRenderer, Rank, _require_alike
from anygpu.farm.render import Renderer, task_of
from anygpu.farm.worker import (
    BROKEN,
    CANCELLED,
    LOST,
    MACHINE,
    REFUSED,
    Ended,
    Outcome,
    RenderCancelled,
    Worker,
    phase_of,
)
from anygpu.paint.jobs import PaintJob
from anygpu.pipelines.records.job import Content
from farm.paper import Call, OutOfMemoryError, Paper, RayActorError


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


def test_a_rank_tells_its_record_or_how_it_ended_and_how_far_it_is() -> None:
    def render(line: str, watch: AgreedWatch) -> dict[str, str]:
        watch.notify("a note")
        watch.step(1, 2, ProgressStage("sampling"))
        return {"line": line}

    rank = Rank(SimpleNamespace(render=render, device="cpu"), 0, 1, False, 9.0)  # type: ignore[arg-type]
    rank._group = Group(Ranks(), None)
    assert rank.render("a") == {"line": "a"}
    assert rank.state() == {"done": 1, "total": 2, "stage": ProgressStage("sampling"), "notes": ["a note"]}
    rank.renderer.render = lambda line, watch: [rank.cancel(), render(line, watch)]  # type: ignore[method-assign]
    assert rank.render("b") == Outcome(CANCELLED, "cancelled")
    rank.renderer.render = lambda line, watch: [][0]  # type: ignore[method-assign]
    assert rank.render("c") == Outcome(REFUSED, "IndexError: list index out of range")


class PaperRank:
    """A rank that has taken three of eight steps."""

    device, cancelled = "GPU", 0

    def __init__(self, _renderer: Any, rank: int, *_how: Any) -> None:
        self.rank = rank

    def join(self, meeting: str, _loopback: str) -> dict[str, Any]:
        assert Path(meeting).parent.is_dir()
        device = f"{self.device}{self.rank * (self.device == 'unlike')}"
        return {"device": device, "torch": "2", "anygpu": "1", "host": "here", "pid": self.rank}

    def state(self) -> dict[str, Any]:
        return {"done": 3, "total": 8, "stage": ProgressStage("sampling"), "notes": ["tiles"]}

    def preview(self) -> list[list[list[int]]]:
        return [[[255, 0, 51]]]

    def cancel(self) -> None:
        PaperRank.cancelled += 1


@pytest.fixture
def formed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Paper, GroupRenderer]:
    """A group of two on Ray's paper, not formed yet."""
    ray, strategies = Paper(CPU=2.0), SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)  # type: ignore[arg-type]
    monkeypatch.setattr(group, "Rank", PaperRank)
    monkeypatch.setattr(group, "time", SimpleNamespace(monotonic=ray.clock))
    monkeypatch.setattr(PaperRank, "cancelled", 0)
    return ray, GroupRenderer(Renderer(tmp_path, (), tmp_path, "cpu"), 2, {"num_cpus": 1}, None, patience=9.0)


def test_a_group_gives_its_leaders_record_and_passes_on_how_far_it_is(
    formed: Any, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, renderer = formed
    renderer._form(Silent())
    progress = recorded()
    assert renderer._result([Call("record", True), Call("other", True)], progress) == "record"
    assert (progress.steps, progress.said, ray.kills) == ([(3, 8, "sampling")], ["tiles"], 0)
    assert torch.allclose(progress.previews[0], torch.tensor([[[[1.0, 0.0, 0.2]]]]))
    renderer._give_up()
    monkeypatch.setattr(PaperRank, "device", "unlike")
    with pytest.raises(UnsupportedError, match="expected alike devices"):
        renderer._form(Silent())
    assert ray.kills == 4 and not renderer._ranks


def test_a_folder_in_which_ranks_cannot_meet_is_no_fault_of_the_job(formed: Any, tmp_path: Path) -> None:
    (tmp_path / group.MEETINGS).write_text("no folder", encoding="utf-8")
    with pytest.raises(FileExistsError) as refused:
        formed[1]._form(Silent())
    assert phase_of(refused.value) == MACHINE


LEFT = Outcome(LOST, "left alone")


@pytest.mark.parametrize(
    ("answers", "status", "text", "kills"),
    [
        ((LEFT, Outcome(REFUSED, "no such size")), REFUSED, "no such size", 0),
        ((Outcome(REFUSED, "no such size"), Outcome(REFUSED, "too")), REFUSED, "no such size", 0),
        ((Outcome(BROKEN, "no room"), LEFT), BROKEN, "no room", 2),
        ((LEFT, None), LOST, "rank 1 of 2 (here, process 1) hangs: no answer to the others for 9 s", 2),
        ((OutOfMemoryError(), None), LOST, "process 0) died, and rank 1 of 2 (here, process 1) did not end", 2),
        ((Outcome(REFUSED, "no such size"), RayActorError()), LOST, "rank 1 of 2 (here, process 1) died; expected", 2),
    ],
)
def test_a_group_ends_with_the_cause(formed: Any, answers: Any, status: str, text: str, kills: int) -> None:
    ray, renderer = formed
    renderer._form(Silent())
    with pytest.raises(Ended) as ended:
        renderer._result([Call(each, each is not None) for each in answers], Silent())
    assert (ended.value.outcome.status, ray.kills) == (status, kills) and text in ended.value.outcome.text


@pytest.mark.parametrize(("answered", "kills"), [(True, 0), (False, 2)])
def test_a_cancel_reaches_every_rank_and_ends_those_that_are_late(formed: Any, answered: bool, kills: int) -> None:
    ray, renderer = formed
    progress = Silent()
    progress.check = lambda: (_ for _ in ()).throw(RenderCancelled)  # type: ignore[method-assign]
    with pytest.raises(RenderCancelled):  # of ranks that do not come up
        renderer._form(progress)
    assert (ray.kills, renderer._ranks) == (2, [])
    ray.kills = 0
    renderer._form(Silent())
    with pytest.raises(RenderCancelled):
        renderer._result([Call("record", True), Call("other", answered)], progress)
    assert (PaperRank.cancelled, ray.kills) == (2, kills)
