"""Whose error an error is: of one job, of a model on one machine, or of a machine, by Ray on paper and its clock."""

import contextlib
import errno
import itertools
import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from anygpu.compat.errors import CheckpointError, InputError, MissingPackageError, UnsupportedError
from anygpu.compat.output_check import NotFinite
from anygpu.farm import cluster, render, worker
from anygpu.farm.driver import Driver
from anygpu.farm.gateway import Gateway
from anygpu.farm.render import Renderer
from anygpu.farm.schedule import Task
from anygpu.farm.worker import CANCELLED, MACHINE, MODEL, Outcome, RenderCancelled, during
from anygpu.paint.jobs import PaintJob
from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
from anygpu.pipelines.records.job import Content, Result, VideoJob
from anygpu.pipelines.records.job_folder import JobFolder, lines_of
from anygpu.pipelines.records.places import Places
from farm.paper import Died, Paper, RayActorError

FIX = {"expected": "another", "fix": "Change it."}
POISONS: dict[str, tuple[str, Callable[[str], BaseException]]] = {
    "a missing picture": ("", lambda text: CheckpointError(text, **FIX)),
    "a damaged picture": ("", lambda text: OSError(errno.EIO, text)),
    "a name too long": ("", lambda text: OSError(errno.ENAMETOOLONG, text)),
    "no right to read": ("", lambda text: PermissionError(errno.EACCES, text)),
    "a stale handle": ("", lambda text: OSError(errno.ESTALE, text)),
    "a value": ("", lambda text: InputError(text, **FIX)),
    "a size that the model lacks": ("", lambda text: UnsupportedError(text, **FIX)),
    "too large to encode": ("", lambda text: torch.OutOfMemoryError(text)),
    "too large to decode": ("", lambda text: MemoryError(text)),
    "a text": ("", lambda text: UnicodeDecodeError("utf-8", b"\xff", 0, 1, text)),
    "a kernel": ("", lambda text: RuntimeError(text)),
    "a bug": ("", lambda text: KeyError(text)),
    "depth": ("", lambda text: RecursionError(text)),
    "death": ("", lambda text: Died(text)),
    "a LoRA": (MODEL, lambda text: CheckpointError(text, **FIX)),
    "a load input": (MODEL, lambda text: InputError(text, **FIX)),
    "an encoder": (MODEL, lambda text: MissingPackageError(text, **FIX)),
    "too large to load": (MODEL, lambda text: torch.OutOfMemoryError(text)),
    "a disk that it fills": (MACHINE, lambda text: OSError(errno.ENOSPC, text)),
    "a result that cannot be written": (MACHINE, lambda text: CheckpointError(text, **FIX)),
}


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _file: None)


class Plays:
    """Renders a line by failing as it says, or as the machines do now."""

    def __init__(self, folder: Path, fault: Callable[[], None] = lambda: None) -> None:
        self.folder, self.fault, self.device = folder, fault, "cpu"

    def render(self, line: str, progress: Any) -> dict[str, Any]:
        self.fault()
        job = json.loads(line)
        phase, error = POISONS.get(job["poison"], ("", None))
        if error is not None:
            with during(phase or worker.JOB):
                raise error(f"{job['poison']} in {job['number']}")
        return {}


def line_of(number: int, models: int = 5, poison: str = "") -> str:
    return json.dumps({"number": number, "model": f"model {number % models}", "poison": poison})


def task_of(line: str) -> Task:
    job = json.loads(line)
    return Task(f"{job['number']:064x}", job["model"], 1.0, line)


def driver_on(
    ray: Paper, folder: Path, count: int, fault: Callable[[], None] = lambda: None
) -> tuple[Driver, list[str]]:
    said: list[str] = []
    driver = Driver(ray, JobFolder(folder), task_of, lambda _task: 0.0, said.append, ray.clock, ray.sleep)
    driver.start_workers(count, Plays(folder, fault), {"num_cpus": 1})
    return driver, said


@pytest.mark.parametrize("order", ["poison first", "any order"])
def test_poisoned_jobs_fail_alone_each_with_its_own_reason(tmp_path: Path, order: str) -> None:
    ways = list(POISONS)
    lines = [line_of(number, 3, ways[number % 20] if number < 40 else "") for number in range(200)]
    if order == "any order":
        random.Random(1).shuffle(lines)
    driver, said = driver_on(Paper(CPU=4.0), tmp_path, 4)
    driver.add(lines, again=True)
    tally = driver.run()
    assert (tally.done, len(tally.failed)) == (160, 40)
    for number in range(40):
        text = tally.failed[f"{number:064x}"]
        if POISONS[ways[number % 20]][0] != MODEL:  # where only such jobs are left, it may be the machine
            assert JobFolder(tmp_path).failure(f"{number:064x}") == text
        if ways[number % 20] == "death":
            assert "3 workers died at this job" in text
            assert sum(line.endswith(" died; the job goes on") for line in said if line[:12] == f"{number:064x}"[:12])
        elif POISONS[ways[number % 20]][0] == MACHINE:
            assert text.startswith("3 times a machine failed at it that was sound right after: ")
        else:
            assert text.count(f"{ways[number % 20]} in {number}") == 1, text


def test_broken_values_are_not_the_jobs() -> None:
    assert worker.outcome_of(NotFinite("NaN", **FIX), "cpu").status == worker.REFUSED, "another machine may do it"


def faults(now: Callable[[], float], patch: pytest.MonkeyPatch) -> dict[str, Callable[[], None]]:
    """What machines may have for a minute, as their renders meet it."""

    def ill(phase: str, error: Exception) -> Callable[[], None]:
        def raised() -> None:
            if now() < 60:
                with during(phase):
                    raise error

        return raised

    full = OSError(errno.ENOSPC, "No space left on device")
    lost = RuntimeError("CUDA error: unspecified launch failure")
    return {
        "disk full": ill(MACHINE, full),
        "folder read-only": ill(MACHINE, InputError("the folder", **FIX)),
        "models unreadable": ill(MODEL, CheckpointError("no models", **FIX)),
        "device lost": ill(worker.JOB, lost),
    }


@pytest.mark.parametrize("fault", ["disk full", "folder read-only", "models unreadable", "device lost"])
def test_what_ails_a_machine_for_a_minute_costs_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    ray = Paper(CPU=4.0)
    ill = faults(ray.clock, monkeypatch)[fault]
    sound = worker.device_fault
    if fault == "device lost":
        monkeypatch.setattr(worker, "device_fault", lambda device: "lost" if ray.now < 60 else sound(device))
    elif fault != "models unreadable":
        writable = worker.require_writable
        monkeypatch.setattr(worker, "require_writable", lambda *given: (ill(), writable(*given)))
    driver, _ = driver_on(ray, tmp_path, 4, ill)
    driver.add([line_of(number) for number in range(40)], again=True)
    tally = driver.run()
    assert (tally.done, tally.failed) == (40, {})
    assert not (tmp_path / "failed").exists() and 60 < ray.now < 120
    assert not any(one.broken for one in driver.workers)
    assert (ray.kills > 0) == (fault != "models unreadable"), "a process whose proof fails is replaced"


def test_a_run_tires_of_a_model_that_no_machine_has_and_leaves_no_note(tmp_path: Path) -> None:
    ray, lacks = Paper(CPU=2.0), CheckpointError("no 'fox' in /models", **FIX)

    def fault() -> None:
        with during(MODEL):
            raise lacks

    driver, said = driver_on(ray, tmp_path, 2, fault)
    driver.add([line_of(1)], again=True)
    tally = driver.run()
    assert "no 'fox' in /models" in tally.failed[f"{1:064x}"] and 90 <= ray.now < 100
    assert said[-1].startswith("000000000000 waits for a machine that can do it: no 'fox' in /models")
    assert not (tmp_path / "failed").exists(), "the job is sound"


def test_a_cancel_reaches_the_worker_of_a_job_and_drops_those_that_wait(tmp_path: Path) -> None:
    driver, _ = driver_on(Paper(CPU=2.0), tmp_path, 2)
    driver.add([line_of(1), line_of(2), line_of(3)], again=True)
    ended: list[str] = []
    first, keys = driver.workers[0], [f"{number:064x}" for number in (1, 2)]
    first.task, first.actor = driver.schedule.take(first.name, 0.0), SimpleNamespace(cancel=SimpleNamespace())
    first.actor.cancel.remote = ended.append
    driver.folder.cancel(keys)
    driver._cancel()
    assert ended == [first.task.key] and driver.tally.failed == dict.fromkeys({*keys} - {*ended}, worker.CANCELLED)
    assert len(driver.schedule) == 1


def test_rests_double_to_ten_minutes_and_end_with_a_success(tmp_path: Path) -> None:
    ray, tries = Paper(CPU=1.0), list[float]()

    def fault() -> None:
        tries.append(ray.now)
        if len(tries) < 10:
            with during(MODEL):
                raise CheckpointError("no models", **FIX)

    driver, _ = driver_on(ray, tmp_path, 1, fault)
    driver.watching, driver.sleep = True, lambda _seconds: ray.sleep(10)
    driver.add([line_of(1)], again=True)
    while not driver.tally.done:
        driver.turn()
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert [gap // 30 * 30 for gap in gaps] == [30, 60, 120, 240, 480, 600, 600, 600, 600]
    assert driver.schedule.refusals(driver.workers[0].name, "model 1") == 0


def test_a_job_at_which_a_sound_machine_fails_is_done_by_another_that_is_free(tmp_path: Path) -> None:
    def full() -> None:
        with during(MACHINE):
            raise OSError(errno.ENOSPC, "No space left on device")

    driver, _ = driver_on(Paper(CPU=2.0), tmp_path, 2)
    driver.workers[0].actor.worker.renderer = Plays(tmp_path, full)
    driver.add([line_of(number) for number in range(4)], again=True)
    tally = driver.run()
    assert (tally.done, tally.failed) == (4, {})


@pytest.mark.parametrize(
    ("name", "bad", "until", "error", "actors"),
    [
        ("token", False, 20, "without token mode", 1),
        ("cannot_start", RayActorError("No module named 'anygpu'"), 50, "No module named 'anygpu'", 2),
        ("cannot_start", RuntimeError("no such driver"), 50, "no such driver", 2),
    ],
)
def test_a_worker_that_cannot_work_gets_nothing_and_is_started_again(
    tmp_path: Path, name: str, bad: Any, until: int, error: str, actors: int
) -> None:
    """Without a token, and given up by Ray; it ends nothing, and is told once."""
    ray = Paper(CPU=2.0)
    setattr(ray, name, bad)
    driver, said = driver_on(ray, tmp_path, 1)
    driver.add([line_of(1)], again=True)
    while ray.now < until:
        driver.turn()
    assert driver.tally.done == 0 and error in driver.workers[0].error and (len(said), ray.actors) == (1, actors)
    assert ray.kills == actors, "else it keeps its name from its successor"
    setattr(ray, name, not bad)
    assert driver.run().done == 1


@pytest.mark.parametrize("grows", [False, True])
def test_a_cluster_without_devices_is_told_within_five_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows: bool
) -> None:
    ray = Paper()
    monkeypatch.setattr(cluster, "autoscales", lambda _ray: grows)
    monkeypatch.setattr("anygpu.farm.driver.autoscales", lambda _ray: grows)
    driver, said = driver_on(ray, tmp_path, 1)
    driver.asked = {"CPU": 1, "GPU": 1}
    driver.watching = True
    while ray.now < 5:
        driver.turn()
    (line,) = said
    assert "0 CPU and 0 GPU for workers that ask for 1 CPU and 1 GPU" in line
    assert "--device cpu" in line and "ray start --num-gpus=N" in line
    assert [state["error"] for state in JobFolder(tmp_path).workers()] == [line]
    while ray.now < 200:
        driver.turn()
    assert len(said) == (4 if grows else 1)
    driver.watching = False
    driver.add([line_of(1)], again=True)
    if not grows:
        with pytest.raises(UnsupportedError, match="--device cpu"):
            driver.run()


def hostile(folder: Path) -> list[str]:
    """Names of files and folders that look like jobs, or notes, and are not."""
    (folder / "utf16.jsonl").write_text(line_of(900), encoding="utf-16")
    (folder / "folder.jsonl").mkdir()
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    (folder / "deep.jsonl").write_text("[" * 100_000 + "\n")
    (folder / "gone.jsonl").symlink_to(folder / "nowhere")
    with (folder / "sparse.jsonl").open("wb") as file:
        file.truncate(100_000_000)
    return ["utf16", "folder", "pipe", "latin", "deep", "sparse"]


def test_a_bad_file_is_set_aside_by_name_and_said_once(tmp_path: Path) -> None:
    names = hostile(tmp_path)
    failed = tmp_path / "failed"
    failed.mkdir()
    (failed / f"{7:064x}.txt").write_bytes(b"\xff\xfe no")
    (failed / f"{8:064x}.txt").mkdir()
    JobFolder(tmp_path).write_jobs("sound", [line_of(number) for number in range(20)])
    driver, said = driver_on(ray := Paper(CPU=2.0), tmp_path, 2)
    driver.watching = True
    while ray.now < 60:
        driver.turn()
    assert driver.tally.done == 19, "and one whose note says that it failed before"
    for name in names:
        assert len([text for text in said if f"{name}.jsonl" in text]) == 1, (name, said)
    (tmp_path / "latin.jsonl").write_text(line_of(99) + "\n")
    while ray.now < 70:
        driver.turn()
    assert driver.tally.done == 20


def test_each_line_that_is_not_a_job_counts(tmp_path: Path) -> None:
    driver, said = driver_on(Paper(CPU=1.0), tmp_path, 1)
    driver.add(["{}" + " " * 70] * 5, again=True)
    assert len(driver.tally.failed) == 5 and "5 lines are not jobs, the first: '{}   " in said[-1]


def test_a_share_that_is_gone_for_a_while_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Paper(CPU=1.0)
    driver, said = driver_on(ray, tmp_path, 1)
    driver.add([line_of(number, poison="a value" if number < 3 else "") for number in range(9)], again=True)
    writes = JobFolder.fail, JobFolder.write_workers

    def gone(*_given: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    for name in ("fail", "write_workers", "cancelled"):
        monkeypatch.setattr(JobFolder, name, gone)
    while len(driver.tally.failed) < 3 or driver.tally.done < 6:
        driver._careful_turn()
    assert len([text for text in said if "Stale" in text and "failed" not in text]) <= 3, "once for each thing"
    assert not (tmp_path / "failed").exists()
    monkeypatch.setattr(JobFolder, "fail", writes[0])
    monkeypatch.setattr(JobFolder, "write_workers", writes[1])
    monkeypatch.setattr(JobFolder, "cancelled", lambda _folder: set())
    driver.run()
    assert len(list((tmp_path / "failed").iterdir())) == 3


@pytest.mark.parametrize("lines", [0, 1])
def test_a_job_file_that_is_refused_for_a_moment_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int
) -> None:
    """Refused when it is opened, or after its first line."""
    driver, said = driver_on(ray := Paper(CPU=1.0), tmp_path, 1)
    JobFolder(tmp_path).write_jobs("foxes", [line_of(1), line_of(2), line_of(1)])
    driver.watching, opened = True, Path.open

    def refused(path: Path, *given: Any, **options: Any) -> Any:
        if path.suffix != ".jsonl" or ray.now >= 5:
            return opened(path, *given, **options)
        if not lines:
            raise OSError(errno.EIO, "Input/output error")
        first = [f"{line_of(1)}\n".encode()]

        def readline(_size: int) -> bytes:
            if not first:
                raise OSError(errno.EIO, "Input/output error")
            return first.pop()

        return contextlib.nullcontext(SimpleNamespace(readline=readline))

    monkeypatch.setattr(Path, "open", refused)
    while ray.now < 9:
        driver.turn()
    assert driver.tally.done == 2 and sum("foxes.jsonl" in text for text in said) == 1


@pytest.mark.parametrize("error", [Died(), OSError(errno.ENOSPC, "full")], ids=["the share", "Ray"])
def test_what_fails_as_a_worker_does_costs_no_job(tmp_path: Path, error: BaseException) -> None:
    errors, ray = iter([error]), Paper(CPU=1.0)

    def fault() -> None:
        for one in errors:
            with during(MACHINE):
                raise one

    def stale(*_given: Any) -> None:
        vars(driver.workers[0].actor).pop("prove", None)
        raise OSError(errno.ESTALE, "Stale file handle")

    driver, _ = driver_on(ray, tmp_path, 1, fault)
    driver.reached, driver.workers[0].actor.prove = stale, SimpleNamespace(remote=stale)
    driver.add([line_of(1)], again=True)
    while ray.now < 300 and (driver.schedule or driver.workers[0].task or driver.workers[0].held):
        driver._careful_turn()
    assert driver.tally.done == 1


def test_what_the_folder_does_not_take_is_said_once_for_each_reason(tmp_path: Path) -> None:
    driver, said = driver_on(Paper(CPU=1.0), tmp_path, 1)

    def fails(error: OSError) -> None:
        raise error

    for error in (OSError("full"), OSError("full"), OSError("gone")):
        driver._try("the notes", lambda error=error: fails(error))
    assert said == ["the notes: OSError: full", "the notes: OSError: gone"]


def test_a_turn_that_fails_is_waited_for_longer_each_time_and_only_the_owner_ends_it(tmp_path: Path) -> None:
    ray, pauses = Paper(CPU=1.0), list[float]()
    driver, said = driver_on(ray, tmp_path, 1)

    def fails() -> None:
        raise ZeroDivisionError("a bug")

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 12:
            raise KeyboardInterrupt

    driver.turn, driver.sleep = fails, sleep  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        driver.watch()
    assert pauses == sorted(pauses) and pauses[0] == 1.0 and pauses[-1] == 60.0 and "a bug" in said[0]


@pytest.mark.parametrize("failure", [RenderCancelled(), CheckpointError("damaged", **FIX)], ids=["cancel", "damaged"])
def test_a_pair_of_models_is_kept_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    loaded: list[Any] = []

    def load(request: Any, _progress: Any) -> Any:
        loaded.append(SimpleNamespace(model=request.model.name, parts=SimpleNamespace(readers={})))
        if len(loaded) == 2:
            raise failure
        return loaded[-1]

    monkeypatch.setattr("anygpu.paint.jobs.load_paint", load)
    monkeypatch.setattr(Places, "model", lambda _places, item, *_: Path(item.name))
    seen: list[Any] = []

    def rendered(_job: Any, _machine: Any, _progress: Any, models: Any) -> Result:
        seen.extend(models)
        return Result(torch.zeros(1), ".glb", lambda path: None)

    monkeypatch.setitem(render.KINDS, "paint", replace(render.KINDS["paint"], render=rendered))
    item = {name: Content(name, name) for name in ("model", "mesh", "picture", "delight")}
    line, renderer = json.dumps(PaintJob(**item).record()), Renderer(tmp_path, (), tmp_path)
    with pytest.raises(type(failure)):
        renderer.render(line, Silent())
    renderer.render(line, Silent())
    renderer.render(line, Silent())
    assert [one.model for one in seen] == ["model", "delight"] * 2 and len(loaded) == 4
    on_group = replace(render.KINDS["paint"], split=lambda one, group: (one.model, group.leads))
    monkeypatch.setitem(render.KINDS, "paint", on_group)
    follower = Renderer(tmp_path, (), tmp_path, group=SimpleNamespace(leads=False))  # type: ignore[arg-type]
    assert follower.render(line, Silent())["file"] == "" and seen[4:] == [("model", False), ("delight", False)]


def test_a_cluster_that_does_not_tell_what_it_has_is_waited_for() -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("the head is gone")

    told = SimpleNamespace(cluster_resources=fails, experimental=SimpleNamespace())
    assert cluster.lacking(told, {"GPU": 1}) is None and cluster.autoscales(told) is False
    told.cluster_resources = lambda: {"CPU": 4.0}
    assert "a cluster with 0 GPU for workers that ask for 1 GPU" in str(cluster.lacking(told, {"GPU": 1}))


@pytest.mark.parametrize(
    ("kinds", "report", "grows"),
    [
        ([0, 3], None, True),
        ([0], {"cpu.small": 1}, False),
        (None, {"node_10.0.0.5": 1}, False),
        (None, {"node_10.0.0.5": 1, "cpu.small": 1}, True),
        (None, None, False),
    ],
)
def test_a_cluster_grows_by_its_settings_or_where_its_machines_have_a_kind(
    monkeypatch: pytest.MonkeyPatch, kinds: list[int] | None, report: dict[str, int] | None, grows: bool
) -> None:
    config = kinds and SimpleNamespace(node_group_configs=[SimpleNamespace(max_count=count) for count in kinds])
    state = SimpleNamespace(state=SimpleNamespace(get_cluster_config=lambda: config))
    monkeypatch.setitem(sys.modules, "ray._private.state", state)  # type: ignore[arg-type]
    status = report and json.dumps({"autoscaler_report": {"active_nodes": report}})
    store = SimpleNamespace(_internal_kv_get=lambda _key: status)
    assert cluster.autoscales(SimpleNamespace(experimental=SimpleNamespace(internal_kv=store))) is grows


@pytest.mark.parametrize("vendor", ["cuda", "xpu", "privateuseone"])
@pytest.mark.parametrize(
    ("seen", "given", "own"),
    [(2, ["1"], 1), (2, ["0"], 0), (1, ["1"], None), (2, [], None), (2, ["GPU-5"], None), (4, ["3", "1"], 3)],
)
def test_a_worker_computes_on_the_device_that_ray_gave_it(
    monkeypatch: pytest.MonkeyPatch, vendor: str, seen: int, given: list[str], own: int | None
) -> None:
    """Whether the vendor's variable hides the others, as for CUDA and ROCm, or nothing does."""
    monkeypatch.setattr(worker, "default_device", lambda: torch.device(vendor, 0))
    monkeypatch.setattr(worker, "device_count", lambda: seen)
    monkeypatch.setattr(worker, "own_devices", lambda: given)
    renderer = SimpleNamespace(device=None)
    worker.bind(renderer)
    assert renderer.device == (None if own is None else torch.device(vendor, own))
    chosen = SimpleNamespace(device="cpu")
    worker.bind(chosen)
    assert chosen.device == "cpu"


def test_a_worker_that_is_taken_for_dead_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off and asked anew while its job goes on: two jobs would share one device and one file."""
    asked = worker.Worker(Plays(tmp_path, lambda: asked.ready()))
    monkeypatch.setattr(os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    for name in ("bind", "token_mode"):
        monkeypatch.setattr(worker, name, lambda *_: True)
    assert asked.ready()["token"]
    with pytest.raises(SystemExit):
        asked.run(task_of(line_of(1)))


def test_a_preview_has_the_whole_range_of_a_byte() -> None:
    frame = torch.tensor([0.0, 0.5, 2.0]).expand(1, 1, 1, 3)
    assert worker.pixels_of(frame).tolist() == [[[0, 128, 255]]]
    latents = torch.arange(6.0).view(1, 6, 1, 1, 1) * torch.tensor([1.0, -1.0])
    assert worker.pixels_of(latents).tolist() == [[[255, 255, 255], [0, 0, 0]]]


def test_a_refusal_names_the_versions_of_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's must be the same, whatever Ray says of it; each reason is another line."""
    monkeypatch.setenv(cluster.TOKEN, "token")
    monkeypatch.setattr(cluster, "ray_module", lambda: SimpleNamespace(__version__="2.60.0"))
    reasons, lines = ("no token", "a wrong token", "no answer within 10 s", "Version mismatch"), set[str]()
    for reason in reasons:
        monkeypatch.setattr("anygpu.compat.ray_clusters.refusal", lambda *_, reason=reason: reason)
        with pytest.raises(
            InputError, match=rf"{reason}; here Ray 2\.60\.0, Python 3\.\d+\.\d+\); expected .* same"
        ) as raised:
            cluster.connect("10.0.0.5:6379")
        lines.add(str(raised.value))
    assert len(lines) == len(reasons)


def test_ray_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_given: Any) -> None:
        raise TimeoutError("the head node did not come up\nin 30 s")

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(cluster, "ray_module", lambda: SimpleNamespace(init=init))
    with pytest.raises(
        UnsupportedError, match=r"Ray did not start here \(the head node did not come up\); expected"
    ) as raised:
        cluster.start_here(2, 0)
    assert "\n" not in str(raised.value)


def test_a_job_that_was_sent_on_several_lines_is_one_in_its_file(tmp_path: Path) -> None:
    record = VideoJob(Content("ltx", "0" * 32), PromptRequest("a\nfox"), SampleSettings(64, 64, 9)).record()
    keys = Gateway(str(tmp_path)).submit("foxes", [json.dumps(record, indent=1)])
    (written,) = tmp_path.glob("foxes-*.jsonl")
    assert [render.task_of(line).key for line in lines_of(written)] == keys


def test_two_lists_of_one_name_lose_no_job(tmp_path: Path) -> None:
    """Two people send "jobs" before the driver looks; one sends the same again."""
    jobs = [VideoJob(Content("ltx", "0" * 32), PromptRequest(text), SampleSettings(64, 64, 9)) for text in ("a", "b")]
    gateway = Gateway(str(tmp_path))
    keys = [gateway.submit("jobs", [json.dumps(job.record())]) for job in (*jobs, jobs[0])]
    files = JobFolder(tmp_path).job_files()
    written = {render.task_of(line).key for file in files for line in lines_of(file)}
    assert len(files) == 2 and written == {key for each in keys for key in each}


def test_a_job_that_is_asked_for_again_while_its_cancel_is_under_way_runs(tmp_path: Path, monkeypatch) -> None:
    key, folder, ray, calls = f"{1:064x}", JobFolder(tmp_path), Paper(CPU=1.0), []
    driver = Driver(
        ray, folder, lambda line: Task(key, "m", 1.0, line), lambda task: 0.0, [].append, ray.clock, ray.sleep
    )
    driver.watching = True
    driver.start_workers(1, SimpleNamespace(folder=tmp_path, device="cpu"), {"num_cpus": 1})
    (worker,) = driver.workers

    class Call:
        answered, answer = False, None

    def run(_task: Any) -> Call:
        calls.append(Call())
        return calls[-1]

    remote = SimpleNamespace(remote=lambda key: None)
    worker.actor = SimpleNamespace(run=SimpleNamespace(remote=run), cancel=remote, ready=worker.actor.ready)

    def turns(count: int) -> None:
        for _ in range(count):
            driver.turn()

    folder.write_jobs("jobs", ["x"])
    turns(6)
    folder.cancel([key])
    turns(3)
    folder.ask_again([key])
    folder.write_jobs("jobs", ["x"])
    turns(3)
    calls[0].answered, calls[0].answer = True, Outcome(CANCELLED, "cancelled")  # its step has ended
    turns(20)
    assert len(calls) == 2 and not folder.failure(key)
