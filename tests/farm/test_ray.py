"""Ray on this machine: what listens, who is let in, and whose error an error is."""

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from anygpu.compat.errors import InputError
from anygpu.farm import cluster
from anygpu.farm.driver import Driver, WorkerHandle
from anygpu.farm.gateway import open_gateway
from anygpu.farm.schedule import Task
from anygpu.pipelines.records.job_folder import JobFolder

pytestmark = pytest.mark.farm
KEY, NOW = "{:064x}", "now"


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray with room for two workers, as ``anygpu-farm run --local 2`` starts it."""
    before = dict(os.environ)
    os.environ["RAY_ADDRESS"] = "127.0.0.1:9"  # some other cluster's, which does not matter here
    started = cluster.start_here(2, 0)
    del os.environ["RAY_ADDRESS"]
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import tests
    yield started
    started.shutdown()
    os.environ.clear()
    os.environ.update(before)


@dataclass
class Play:
    """Does what a line says in place of rendering: ``ok``, ``lack``, ``full``, ``die``, ``bad`` or ``long``.

    ``lack`` and ``full`` are said by the first process that gets such a line, and by no other.

    Args:
        root: with a file that names the folder of the jobs, another one for each test.
    """

    root: Path
    device: Any = None

    @property
    def folder(self) -> Path:
        """Of the jobs."""
        return Path((self.root / NOW).read_text(encoding="utf-8"))

    def render(self, line: str, progress: Any) -> dict[str, Any]:
        """What the line says."""
        from anygpu.compat.errors import CheckpointError, InputError  # whose __module__ is not where they are
        from anygpu.compat.memory.parts import ProgressStage
        from anygpu.farm.worker import MACHINE, during

        what = line.split()[0]
        if what in ("lack", "full"):
            first = self.folder / what
            try:
                with first.open("x") as file:
                    file.write(str(os.getpid()))
            except FileExistsError:
                pass
            while not first.read_text():
                time.sleep(0.01)
            if first.read_text() == str(os.getpid()):
                if what == "full":
                    with during(MACHINE):
                        raise OSError(errno.ENOSPC, "No space left on device")
                raise CheckpointError("no 'fox' in /models", expected="the model", fix="Copy it there.")
        if what == "none":
            raise CheckpointError("no 'hare' in /models", expected="the model", fix="Copy it there.")
        if what == "bad":
            raise InputError("frames 7", expected="8n + 1", fix="Use 9.")
        if what == "die":
            os._exit(9)
        for step in range(1_000_000 if what == "long" else 3):
            progress.step(step, 1_000_000, ProgressStage("sampling"), lambda: torch.ones(2, 4, 4, 3))
            time.sleep(0.01)
        return {"pid": os.getpid()}


def task_of(line: str) -> Task:
    """The model is the line's first word, its key the number behind."""
    what, number = line.split()
    return Task(KEY.format(int(number)), what, 1.0, line)


def fast() -> float:
    """A clock by which rests of half a minute take a second."""
    return time.monotonic() * 30


@pytest.fixture(scope="module")
def pair(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[WorkerHandle]]]:
    """Two workers, whose processes take seconds to start, and where to name the folder of their jobs."""
    root = tmp_path_factory.mktemp("pair")
    first = Driver(ray, JobFolder(root), task_of, lambda _task: 0.0, lambda _text: None)
    first.start_workers(2, Play(root), {"num_cpus": 1})
    yield root, first.workers
    for worker in first.workers:
        ray.kill(worker.actor)


@pytest.fixture
def driver(ray: Any, pair: tuple[Path, list[WorkerHandle]], tmp_path: Path) -> Driver:
    """A driver with two workers over an empty folder, which knows nothing of what they did before."""
    root, workers = pair
    (root / NOW).write_text(str(tmp_path), encoding="utf-8")
    made = Driver(ray, JobFolder(tmp_path), task_of, lambda _task: 0.0, lambda _text: None)
    made.workers = [WorkerHandle(worker.name, worker.actor, worker.start) for worker in workers]
    for worker in made.workers:
        made._wait_for(worker)
    return made


def test_nothing_listens_beyond_loopback(ray: Any, driver: Driver) -> None:
    driver.add([f"ok {number}" for number in range(4)], again=True)
    assert driver.run().done == 4
    me = psutil.Process()
    sockets = [
        (process.name(), connection.laddr.ip)
        for process in (me, *me.children(recursive=True))
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(sockets) >= 6, "gcs, raylet, agents, driver and workers were looked at"
    assert {address.removeprefix("::ffff:") for _, address in sockets} == {"127.0.0.1"}, sockets


def test_who_has_no_token_is_not_let_in(ray: Any) -> None:
    address = ray.get_runtime_context().gcs_address
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    program = f"import ray; ray.init({address!r}); print('in')"
    strangers = [  # each waits 20 s for an answer
        subprocess.Popen([sys.executable, "-c", program], env=environment | mode, stdout=subprocess.PIPE, text=True)
        for mode in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64})
    ]
    for stranger in strangers:
        said, _ = stranger.communicate(timeout=200)
        assert stranger.returncode != 0 and "in" not in said.split(), said


class Torn(Play):
    """A renderer that a process cannot take in, as where a package is missing or of another version."""

    def __reduce__(self) -> Any:
        def missing(*_: Any) -> None:
            raise ModuleNotFoundError("No module named 'anygpu'")

        return missing, ()


def test_a_process_that_cannot_begin_is_given_up_and_named(ray: Any, tmp_path: Path) -> None:
    broken = Driver(ray, JobFolder(tmp_path), task_of, lambda _task: 0.0, lambda _text: None, fast)
    broken.start_workers(1, Torn(tmp_path), {"num_cpus": 0})
    broken.add(["ok 1"], again=True)
    tally = broken.run()
    assert (tally.done, tally.deaths) == (0, 0)
    assert "No module named 'anygpu'" in tally.failed[KEY.format(1)]


def test_a_model_that_one_worker_lacks_is_its_error_alone(driver: Driver) -> None:
    driver.add([f"lack {number}" for number in range(4)] + [f"ok {number}" for number in range(10, 14)], again=True)
    tally = driver.run()
    assert (tally.done, tally.failed) == (8, {})
    (error,) = [worker.error for worker in driver.workers if worker.error]
    assert "no 'fox' in /models" in error
    shown = driver.folder.workers()
    assert [bool(state["error"]) for state in shown].count(True) == 1 and sum(state["finished"] for state in shown) == 8


def test_a_full_disk_takes_one_worker_out_until_it_has_proved_itself(driver: Driver) -> None:
    driver.add([f"full {number}" for number in range(4)], again=True)
    tally = driver.run()
    assert (tally.done, tally.failed) == (4, {})
    (error,) = [worker.error for worker in driver.workers if worker.error]
    assert "No space left" in error and not any(worker.broken for worker in driver.workers), "it has proved itself"


def test_what_nobody_can_do_says_why_and_the_job_s_own_error_is_the_job_s(driver: Driver) -> None:
    driver.add(["none 1", "bad 2", "ok 3"], again=True)
    tally = driver.run()
    assert tally.done == 1 and set(tally.failed) == {KEY.format(1), KEY.format(2)}
    assert "no 'hare' in /models" in driver.folder.failure(KEY.format(1))
    assert driver.folder.failure(KEY.format(2)).startswith("frames 7; expected 8n + 1")


@dataclass
class Poisoned(Play):
    """Fails at a line whose first word begins with an x as its number says: ten ways, over all phases."""

    def render(self, line: str, progress: Any) -> dict[str, Any]:
        """What the line says."""
        from anygpu.compat.errors import CheckpointError, InputError, MissingPackageError
        from anygpu.farm.worker import JOB, MACHINE, MODEL, during

        number, words = int(line.split()[1]), {"expected": "another", "fix": "Change it."}
        text = f"poison {number}"
        ways: list[tuple[str, Exception]] = [
            (JOB, CheckpointError(text, **words)),
            (JOB, InputError(text, **words)),
            (JOB, OSError(errno.EIO, text)),
            (JOB, torch.OutOfMemoryError(text)),
            (JOB, RuntimeError(text)),
            (JOB, KeyError(text)),
            (MODEL, CheckpointError(text, **words)),
            (MODEL, MissingPackageError(text, **words)),
            (MACHINE, OSError(errno.ENOSPC, text)),
        ]
        if number < len(ways):
            with during(ways[number][0]):
                raise ways[number][1]
        if number == len(ways):
            os._exit(9)
        return {}


def test_of_200_jobs_of_which_10_are_poisoned_in_10_ways_190_are_done(ray: Any, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / NOW).write_text(str(tmp_path), encoding="utf-8")
    driver = Driver(ray, JobFolder(tmp_path), task_of, lambda _task: 0.0, lambda _text: None, fast)
    driver.start_workers(2, Poisoned(root), {"num_cpus": 0})
    driver.add([f"model{number % 2} {number}" for number in range(200)], again=True)
    tally = driver.run()
    assert tally.done == 190 and set(tally.failed) == {KEY.format(number) for number in range(10)}
    for number in range(9):
        assert f"poison {number}" in tally.failed[KEY.format(number)]
    assert "3 workers died" in tally.failed[KEY.format(9)]
    for worker in driver.workers:
        ray.kill(worker.actor)


def test_a_job_that_kills_its_workers_is_given_up_and_the_others_are_done(driver: Driver) -> None:
    driver.add(["die 1", *(f"ok {number}" for number in range(2, 6))], again=True)
    tally = driver.run()
    assert (tally.done, tally.deaths) == (4, 3)
    assert "3 workers died at this job" in tally.failed[KEY.format(1)]


def test_a_running_job_shows_itself_ends_when_asked_and_leaves_its_worker_usable(ray: Any, driver: Driver) -> None:
    gateway = open_gateway(driver)
    with pytest.raises(InputError, match="one `anygpu-farm watch` per cluster"):
        open_gateway(driver)
    driver.add(["long 1", "long 2"], again=True)
    while sum(worker.task is not None for worker in driver.workers) < 2:
        driver.turn()
    while driver.folder.workers() == [] or not all(state["job"] for state in driver.folder.workers()):
        driver.turn()
    states = ray.get(gateway.standing.remote([KEY.format(1), KEY.format(2)]))
    assert {state["stage"] for state in states["workers"]} == {"sampling"} and states["done"] == []
    picture = ray.get(gateway.preview.remote(states["workers"][0]["worker"]))
    assert picture.shape == (4, 4, 3) and (picture == 255).all()
    ray.get(gateway.cancel.remote([KEY.format(1), KEY.format(2)]))
    driver.add(["ok 3"], again=True)
    tally = driver.run()
    assert tally.failed == {KEY.format(1): "cancelled", KEY.format(2): "cancelled"} and tally.done == 1
    ray.kill(gateway)


def test_the_gateway_takes_jobs_and_files_and_no_other_names(ray: Any, driver: Driver) -> None:
    gateway = open_gateway(driver)
    name = ray.get(gateway.put_input.remote(b"pixels", ".png"))
    assert (driver.folder.root / name).read_bytes() == b"pixels"
    for call in (
        gateway.put_input.remote(b"", ".py"),
        gateway.submit.remote("../up", []),
        gateway.submit.remote("a", ["{}"]),
    ):
        with pytest.raises(ray.exceptions.RayError):
            ray.get(call)
    assert ray.get(gateway.result.remote("../../etc/passwd")) is None
    ray.kill(gateway)


CLIENT = """
import json, sys, types
from pathlib import Path
stand_ins = ("folder_paths", "comfy_execution", "comfy_execution.graph_utils")
for name in (*stand_ins, "anygpu.host.api", "anygpu.host.progress"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["folder_paths"].get_user_directory = lambda: sys.argv[3]
sys.modules["comfy_execution.graph_utils"].ExecutionBlocker = None
sys.modules["anygpu.host.api"].InputImpl = None
class NodeProgress:
    lines, seen = [], set()
    def check(self): pass
    def step(self, done, total, stage, preview): self.seen |= {float(one.max()) for one in preview()}
sys.modules["anygpu.host.progress"].NodeProgress = NodeProgress
from anygpu.host.farm import jobs_named, report_of
from anygpu.host.farm import render_at
from anygpu.pipelines.records.job_folder import JobFolder
jobs = jobs_named(JobFolder(Path(sys.argv[1])), "foxes")
back = render_at(sys.argv[2], jobs, NodeProgress())
texts = [path.read_text() for path in back.files]
print(json.dumps([texts, back.failed, report_of(jobs, back, jobs.folder.workers()), sorted(NodeProgress.seen)]))
"""


@dataclass
class Copier:
    """Writes the job's prompt as its video; refuses hares."""

    folder: Path
    device: Any = None

    def render(self, line: str, progress: Any) -> dict[str, Any]:
        """The file of a job."""
        from anygpu.compat.errors import InputError
        from anygpu.compat.memory.parts import ProgressStage
        from anygpu.farm.render import job_of

        job = job_of(line)
        if "hare" in job.prompt.text:
            raise InputError("a hare", expected="a fox", fix="Use a fox.")
        for step in range(40):  # until somebody who looks has seen one
            progress.step(step, 40, ProgressStage("sampling"), lambda: torch.ones(2, 4, 4, 3))
            time.sleep(0.2)
        picture = (self.folder / job.pictures[0].file.name).read_bytes()
        path = self.folder / "results" / f"{job.key}.mp4"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{job.prompt.text}, {len(picture)} bytes")
        return {}


def test_the_node_sends_jobs_and_pictures_to_an_address_and_brings_files_and_errors_back(
    ray: Any, tmp_path: Path
) -> None:
    """As ComfyUI does it, in a process of its own."""
    from anygpu.farm import render
    from anygpu.pipelines.records.job_lists import Batch, queue_jobs
    from PIL import Image

    model, here, there = tmp_path / "model", JobFolder(tmp_path / "here"), JobFolder(tmp_path / "there")
    model.mkdir()
    there.root.mkdir()
    Image.new("RGB", (8, 8), "red").save(tmp_path / "red.png")
    queue_jobs(here, "foxes", model, Batch(["a fox", "a hare"], [1, 2], [tmp_path / "red.png"]))
    driver = Driver(ray, there, render.task_of, lambda _task: 0.0, lambda _text: None)
    driver.start_workers(2, Copier(there.root), {"num_cpus": 0})
    gateway = open_gateway(driver)
    driver.watching = True
    address, owner = ray.get_runtime_context().gcs_address, tmp_path / "user" / "anygpu"
    owner.mkdir(parents=True)
    (owner / "farm_addresses.txt").write_text(f"# of the farm\n{address}\n", encoding="utf-8")
    words = [sys.executable, "-c", CLIENT, str(here.root), address, str(owner.parent)]
    client = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while client.poll() is None:
        driver.turn()
    output, errors = client.communicate()
    assert client.returncode == 0, errors[-3000:]
    files, failed, report, seen = json.loads(output.splitlines()[-1])
    assert seen == [1.0], "what a worker showed, and nothing before"
    size = (tmp_path / "red.png").stat().st_size
    assert files == [f"a fox, {size} bytes"] * 2
    assert set(failed.values()) == {"a hare; expected a fox. Use a fox."} and len(failed) == 2
    assert report.startswith("2 of 4 done") and report.count(" finished") == 2
    ray.kill(gateway)
    for worker in driver.workers:
        ray.kill(worker.actor)


def test_a_driver_without_token_mode_does_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(InputError, match="RAY_AUTH_MODE=token on every machine"):
        cluster.connect("127.0.0.1:6379")
