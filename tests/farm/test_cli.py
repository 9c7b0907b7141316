"""The command `anygpu-farm` where it needs no Ray."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from anygpu.compat.errors import InputError
from anygpu.farm import cli, cluster, gateway
from anygpu.farm.group import GroupRenderer
from anygpu.pipelines.records.job_folder import JobFolder
from anygpu.pipelines.records.job_lists import Batch, queue_jobs
from farm.paper import Actor, Paper


def test_cancel_ends_the_jobs_it_means_and_names_a_key_that_none_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    folder = JobFolder(tmp_path / "farm")
    first, second = queue_jobs(folder, "foxes", tmp_path / "model", Batch(["a fox"], [1, 2])).keys
    assert cli.main(["cancel", str(folder.root), first[:12]]) == 0
    assert folder.cancelled() == {first} and not capsys.readouterr().err
    assert cli.main(["cancel", str(folder.root), second[:12], "xyz"]) == 2
    assert folder.cancelled() == {first, second}
    assert "whose key begins with 'xyz'; expected the first digits of a key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "workers", "started", "asked", "group"),
    [
        ("--address auto", 3, [], {"CPU": 1, "GPU": 1}, ()),
        ("--address auto --workers 2", 2, [], {"CPU": 1, "GPU": 1}, ()),
        ("--address auto --device cpu --group 2", 1, [], {"CPU": 2}, (False, 600.0, "")),
        ("", 1, [(1, 0)], {"CPU": 1}, ()),
        ("--local 2 --state mine", 2, [(2, 0)], {"CPU": 1}, ()),
        ("--group 3 --patience 7", 1, [(3, 0)], {"CPU": 3}, (False, 7.0, "lo")),
        ("--local 5 --group 2 --branches", 2, [(5, 0)], {"CPU": 2}, (True, 600.0, "lo")),
    ],
)
def test_as_many_workers_are_started_as_are_asked_for_or_as_there_are_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, workers: int, started: Any, asked: Any, group: Any
) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(cluster, "connect", lambda _address: Paper(GPU=3.0))
    monkeypatch.setattr(cluster, "start_here", lambda *count: calls.append(count) or Paper(CPU=8.0))
    monkeypatch.setattr(cli, "signal", SimpleNamespace(signal=lambda *_: None, SIGTERM=0, default_int_handler=None))
    monkeypatch.setattr("anygpu.farm.group.loopback_name", lambda: "lo")
    rooms, leaders = SimpleNamespace(placement_group=lambda bundles, strategy: bundles), list[Any]()
    monkeypatch.setitem(sys.modules, "ray.util", rooms)  # type: ignore[arg-type]
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=leaders.append)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)  # type: ignore[arg-type]
    driver = cli._driver(JobFolder(tmp_path), cli._parser().parse_args(["run", str(tmp_path), *words.split()]))
    assert (len(driver.workers), calls, driver.asked) == (workers, started, asked)
    renderer = driver.workers[0].actor.worker.renderer
    assert getattr(renderer, "renderer", renderer).state.is_absolute(), "one folder's name on each machine"
    assert isinstance(renderer, GroupRenderer) == bool(group)
    if group:
        assert (renderer.halves, renderer.patience, renderer.loopback) == group
        assert renderer.placement == [{"CPU": 1}] * renderer.size
        assert leaders == [renderer.placement] * workers, "none gets jobs before there is room for its ranks"


@pytest.mark.parametrize("words", ["--local -1", "--address auto --workers -2"])
def test_fewer_workers_than_none_are_refused(tmp_path: Path, words: str) -> None:
    with pytest.raises(InputError, match="expected a number of workers"):
        cli._driver(JobFolder(tmp_path), cli._parser().parse_args(["run", str(tmp_path), *words.split()]))


@pytest.mark.parametrize(
    "words", ["--meshes . --width 64", "--meshes . --negative fog", "--adapter a.safetensors", "--image-encoder dino"]
)
def test_what_would_do_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert cli.main(["queue", str(tmp_path), "--model", "m", *words.split()]) == 2
    assert "expected flags of one kind of job" in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["--local 2", "--group 2"])
def test_no_worker_waits_for_a_gpu_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr(cli, "default_device", lambda: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(cli, "device_count", lambda: 1)
    monkeypatch.setattr(cluster, "start_here", lambda *_: pytest.fail("Ray was started"))
    with pytest.raises(InputError, match=rf"{asked} on a machine with 1 GPU;"):
        cli._driver(JobFolder(tmp_path), cli._parser().parse_args(["run", str(tmp_path), *asked.split()]))


def test_a_job_has_what_its_command_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "words.txt").write_text("a fox\n", encoding="utf-8-sig")  # as Notepad saves it
    (tmp_path / "latin.txt").write_bytes(b"a f\xf6x")
    words = f"--model {tmp_path}/model --prompts {tmp_path}/words.txt --seeds 4,7 --negative fog --width 96 --steps 3"
    more = "--cfg 2.5 --seconds 5 --precision bf16 --weights int8"
    assert cli.main(["queue", str(tmp_path / "farm"), *words.split(), *more.split()]) == 0
    (path,) = JobFolder(tmp_path / "farm").job_files()
    jobs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    size = {"width": 96, "height": 0, "frames": 0, "steps": 3, "cfg": 2.5}
    assert [job["settings"] for job in jobs] == [{**size, "seed": seed} for seed in (4, 7)]
    assert [jobs[0][name] for name in ("prompt", "load", "framepack")] == [
        {"text": "a fox", "negative": "fog"}, {"precision": "bf16", "weights": "int8"}, {"clip_seconds": 5.0},
    ]  # fmt: skip
    for name in ("", "--name jobs", "--name foxes"):  # a list that waits is replaced by its name alone
        assert cli.main(["queue", str(tmp_path / "farm"), *words.split(), *name.split()]) == 0
    assert {path.stem for path in JobFolder(tmp_path / "farm").job_files()} == {"jobs", "jobs-2", "foxes"}
    for name in ("latin.txt", "missing.txt"):
        assert cli.main(["queue", str(tmp_path), "--model", "x", "--prompts", str(tmp_path / name)]) == 2
        assert f"{name}' (" in capsys.readouterr().err


def test_the_gateway_keeps_small_inputs_and_shows_what_workers_do_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Paper()
    states = {"busy": {"key": "a" * 64, "finished": 1}, "free": {"key": "", "finished": 2}, "ill": {"key": ""}}
    actors = {name: Actor(ray, SimpleNamespace(state=lambda now=now: now)) for name, now in states.items()}
    actors["other"] = SimpleNamespace()  # as the gateway itself, which has no state
    ray.get_actor = lambda name, namespace: actors[name] if name in actors else [].index(name)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    monkeypatch.setattr("anygpu.pipelines.records.job_folder.MOST_INPUT_BYTES", 3)
    folder, door = JobFolder(tmp_path), gateway.Gateway(str(tmp_path))
    with pytest.raises(ValueError, match="an input of 4 bytes"):
        door.put_input(b"four", ".png")
    assert (folder.root / door.put_input(b"red", ".png")).read_bytes() == b"red"
    was = {"busy": "idle", "free": "rendering", "ill": "broken", "gone": "idle", "other": "idle"}
    folder.write_workers("driver", [{"worker": name, "state": state} for name, state in was.items()])
    shown = {one["worker"]: (one["state"], one["job"]) for one in door.standing([])["workers"]}
    assert shown == {"busy": ("rendering", "a" * 64), "free": ("idle", ""), "ill": ("broken", "")}
