"""The farm's nodes in a real ComfyUI, against a real Ray: its Python has Ray beside its own packages, and no anygpu."""

import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from anygpu.compat.device.facts import value_or
from anygpu.farm.cluster import LOOPBACK, QUIET, TOKEN
from anygpu.farm.render import Renderer, task_of
from anygpu.pipelines.base import Silent
from anygpu.pipelines.demo import demo_models
from anygpu.pipelines.records.job_folder import JobFolder, lines_of
from host.client import Client, Run
from host.prompts import SAVE, Graph

from host.server import Host, NoHost, Server, find_host, free_port

pytestmark = [pytest.mark.farm, pytest.mark.host]
SECONDS = 300  # for what takes a few on an idle machine
STEPS = 20  # the demo model's own, of a tenth of a second at least, each of them kept (chaos.py)
DEMO = next(iter(demo_models()))
SHAPES = "a red circle moves left on blue\na white square stays still on blue"
STEADY = Path(__file__).with_name("steady.py")


def until(what: Callable[[], Any], process: subprocess.Popen[Any] | None = None) -> Any:
    """The first true answer of ``what``; fails once ``process`` has ended or it took too long."""
    deadline = time.monotonic() + SECONDS
    while not (answer := what()):
        assert (process is None or process.poll() is None) and time.monotonic() < deadline
        time.sleep(0.1)
    return answer


@contextmanager
def running(*words: Any, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command, which ends with all that it started."""
    with log.open("ab") as output:
        process = subprocess.Popen([str(word) for word in words], stdout=output, stderr=output)
    try:
        yield process
    finally:
        started = value_or(lambda: psutil.Process(process.pid).children(recursive=True), [])
        process.terminate()
        _, left = psutil.wait_procs([*started, psutil.Process(process.pid)] if process.poll() is None else started, 10)
        for one in left:
            value_or(one.kill, None)
        process.wait()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """ComfyUI under a Python that has its packages and, behind them, ours: so it has Ray, and no installed anygpu."""
    try:
        found = find_host()
    except NoHost as reason:
        pytest.skip(str(reason))
    ask = "import sys, sysconfig, json; print(json.dumps([sys.version, sysconfig.get_paths()['purelib']]))"
    version, packages = json.loads(subprocess.check_output([found.python, "-c", ask], text=True))
    if version != sys.version:
        pytest.skip(f"no interpreter for ComfyUI and Ray at once: {version.split()[0]} there, {sys.version.split()[0]}")
    folder = tmp_path_factory.mktemp("python")
    subprocess.run([found.python, "-m", "venv", "--without-pip", folder], check=True)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "both.pth").write_text(f"{packages}\n{sysconfig.get_paths()['purelib']}\n", encoding="utf-8")
    python = folder / "bin" / "python"
    seen = "from importlib.util import find_spec as f; print(f('ray') is not None, f('anygpu') is None)"
    assert subprocess.check_output([python, "-c", seen], text=True, cwd=folder).split() == ["True", "True"]
    return Host(found.root, python)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster that was started as docs/scale.md says, with room for two workers, on loopback."""
    log, port = tmp_path_factory.mktemp("head") / "head.txt", free_port()
    sockets = tempfile.mkdtemp(prefix="ray-")  # of a path that is short enough for them
    size = (
        "--num-cpus=2", "--num-gpus=0", "--object-store-memory=80000000", "--min-worker-port=0",
        "--max-worker-port=0",
    )  # fmt: skip
    ray = Path(sys.executable).with_name("ray")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**LOOPBACK, **QUIET, TOKEN: "token", "RAY_AUTH_TOKEN": "7" * 64}.items():
            patch.setenv(name, value)
        words = ("start", "--head", f"--port={port}", "--include-dashboard=false", "--disable-usage-stats", "--block")
        with running(ray, *words, *size, f"--temp-dir={sockets}", log=log) as process:
            until(lambda: "Ray runtime started" in log.read_text(encoding="utf-8"), process)
            yield f"127.0.0.1:{port}"
    shutil.rmtree(sockets, ignore_errors=True)


@pytest.fixture(scope="module")
def farm(head: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobFolder]:
    """The folder of `anygpu-farm watch` with two workers that have the demo models and no others."""
    folder = JobFolder(tmp_path_factory.mktemp("there"))
    words = ("watch", folder.root, "--address", head, "--workers", 2, "--device", "cpu")
    log = folder.root / "watch.txt"
    with running(sys.executable, STEADY, *words, "--state", folder.root / "machine", log=log) as process:
        until(lambda: [one["state"] for one in folder.workers()] == ["idle"] * 2, process)
        yield folder


def comfyui(host: Host, base: Path, tiny_folder: Path) -> Iterator[Server]:
    server = Server(host, base, tiny_folder)
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def server(head: str, host: Host, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Server]:
    """ComfyUI on the same machine, with the cluster's token."""
    for server in comfyui(host, tmp_path_factory.mktemp("comfyui"), tiny_folder):
        listed(server, head)
        yield server


def queued(graph: Graph, name: str, **inputs: Any) -> str:
    given = {"model": DEMO, "prompts": SHAPES, "seeds": "3", "steps": STEPS, **inputs}
    return graph.add("AnyGPUQueueJobs", folder="output/farm", name=name, width=0, height=0, frames=0, **given)


def listed(server: Server, *addresses: str) -> None:
    """Have the owner of the machine list addresses."""
    path = server.base / "user" / "anygpu" / "farm_addresses.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{address}\n" for address in addresses), encoding="utf-8")


def sent(address: str, name: str, **inputs: Any) -> tuple[Graph, str]:
    """Queue Jobs, AnyGPU Farm and Save Video; and the id of AnyGPU Farm."""
    graph = Graph()
    there = graph.add("AnyGPUFarm", jobs=graph.link(queued(graph, name, **inputs)), address=address)
    graph.add(SAVE, video=graph.link(there), filename_prefix=name, format="auto", codec="auto")
    graph.add("PreviewAny", source=graph.link(there, 2))
    return graph, there


def list_of(farm: JobFolder, name: str) -> Path:
    """The one file of jobs that the gateway has of the list ``name``."""
    (path,) = farm.root.glob(f"{name}-*.jsonl")
    return path


def workers() -> list[psutil.Process]:
    """The workers' processes: Ray names each after its class and the call that it was in last."""
    own = psutil.Process().children(recursive=True)
    return [one for one in own if " ".join(value_or(one.cmdline, [])).startswith("ray::Worker")]


def test_jobs_come_back_although_a_worker_is_killed(head: str, farm: JobFolder, server: Server, tmp_path: Path) -> None:
    graph, there = sent(head, "killed", seeds="3, 5")
    killed: list[int] = []

    def kill(_node: str, run: Run) -> bool:
        shown = run.texts[-1][1] if run.texts else ""
        if not killed and shown.count(", sampling ") == 2 and len(list(farm.state.rglob("[!.]*.safetensors"))) == 2:
            victim = workers()[0]
            killed.append(victim.pid)
            victim.kill()
        return False

    run = Client(server.url).run(graph.prompt, kill, timeout=SECONDS)
    assert run.ending == "execution_success" and killed, run.message
    assert sum(record["filename"].endswith(".mp4") for record in run.files()) == 4
    shown = run.texts_of(there)
    lines = {line for text in shown for line in text.splitlines() if ": rendering; " in line and ", sampling " in line}
    assert len({line.split()[0] for line in lines}) == 2, f"both workers say what they do: {shown}"
    assert shown[-1].startswith("4 of 4 done") and "1 death" in shown[-1] and ": rendering" not in shown[-1]
    assert run.previews, "pictures of what is rendered"
    resumed = (farm.root / "resumed.txt").read_text(encoding="utf-8").splitlines()
    assert resumed and all("goes on after" in line for line in resumed)
    alone = Renderer(tmp_path, (), tmp_path / "state", "cpu")
    here = JobFolder(server.base / "output" / "farm")
    for line in lines_of(here.root / "killed.jsonl"):
        record = alone.render(line, Silent())
        key = record["file"].removesuffix(".mp4")
        far = json.loads((farm.results / f"{key}.json").read_text(encoding="utf-8"))
        assert far["pixels_sha256"] == record["pixels_sha256"]
        assert (here.results / f"{key}.mp4").read_bytes() == (farm.results / f"{key}.mp4").read_bytes()


def test_cancel_ends_the_jobs(head: str, farm: JobFolder, server: Server) -> None:
    graph, there = sent(head, "cancelled", seeds="11-13")

    def sampling(_node: str, run: Run) -> bool:
        return ", sampling " in "".join(run.texts_of(there))

    run = Client(server.url).run(graph.prompt, sampling, SECONDS)
    assert run.ending == "execution_interrupted"
    count, failed = len(lines_of(list_of(farm, "cancelled"))), farm.root / "failed"
    until(lambda: failed.is_dir() and len(list(failed.iterdir())) == count == 6)
    assert {farm.failure(path.stem) for path in failed.iterdir()} == {"cancelled"}, "none was rendered to its end"


def test_a_model_that_the_farm_lacks_is_that_jobs_error(head: str, farm: JobFolder, server: Server) -> None:
    model = server.model("LTX-Video")
    graph, there = sent(head, "lacking", model=model, prompts="a fox", steps=1)

    def told(_node: str, run: Run) -> bool:
        return "no 'LTX-Video' in" in "".join(run.texts_of(there))

    run = Client(server.url).run(graph.prompt, told, timeout=SECONDS)
    assert run.ending == "execution_interrupted", "it waits for a machine that has the model, and says so"
    until(lambda: "cancelled" in "".join(path.read_text() for path in (farm.root / "failed").glob("*")))
    (line,) = lines_of(list_of(farm, "lacking"))
    here = JobFolder(server.base / "output" / "farm")
    here.fail(task_of(line).key, "no 'LTX-Video' in /models")
    here.write_jobs("both", [*lines_of(list_of(farm, "killed"))[:1], line])
    graph = Graph()
    back = graph.add("AnyGPUCollect", folder="output/farm", name="both", wait=True)
    graph.add(SAVE, video=graph.link(back), filename_prefix="one", format="auto", codec="auto")
    run = Client(server.url).run(graph.prompt, timeout=SECONDS)
    shown = run.texts_of(back)[-1]
    assert shown.startswith("1 of 2 done") and "no 'LTX-Video' in" in shown and len(run.files()) == 1


def test_who_cannot_get_in_reads_why_in_one_line(head: str, farm: JobFolder, server: Server) -> None:
    client = Client(server.url)
    silent = f"127.0.0.1:{free_port()}"
    wrong = {silent: "(no answer within 10 s; here Ray ", "no such": "(Invalid address format: no such"}
    listed(server, head, *wrong)
    for address, why in wrong.items():
        run = client.run(sent(address, "nobody")[0].prompt, timeout=SECONDS)
        assert run.message.startswith(f"no farm at {address!r} {why}") and "\n" not in run.message
        assert "); expected the address" in run.message


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"RAY_AUTH_TOKEN": "8" * 64},
            "no farm at {} (RPC error: InvalidAuthToken: Authentication token is missing or",
        ),
        ({"RAY_AUTH_TOKEN": None, "RAY_AUTH_TOKEN_PATH": "/no/file"}, "no farm at {} (RAY_AUTH_TOKEN_PATH is set but"),
        ({TOKEN: "disabled"}, "Ray without a token in this ComfyUI; expected RAY_AUTH_MODE=token where ComfyUI starts"),
    ],
    ids=["wrong token", "no token", "no token mode"],
)
def test_a_comfyui_without_the_token_stays_out_and_alive(
    head: str, host: Host, tmp_path: Path, tiny_folder: Path, change: dict[str, str | None], why: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in change.items():
            patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
        for stranger in comfyui(host, tmp_path, tiny_folder):
            listed(stranger, head)
            run = Client(stranger.url).run(sent(head, "stranger")[0].prompt, timeout=SECONDS)
            assert run.message.startswith(why.format(repr(head))) and "\n" not in run.message, run.message
            assert Client(stranger.url).get("/system_stats")


def test_a_folder_of_comfyuis_is_watched_and_collected(server: Server, tmp_path: Path) -> None:
    client, folder = Client(server.url), server.base / "output" / "farm"
    graph = Graph()
    back = graph.add(
        "AnyGPUCollect",
        folder="output/farm",
        name="",
        wait=True,
        jobs=graph.link(queued(graph, "by folder", seeds="21-22", steps=2)),
    )
    graph.add(SAVE, video=graph.link(back), filename_prefix="collected", format="auto", codec="auto")
    words = ("-m", "anygpu.farm.cli", "watch", folder, "--local", 1, "--device", "cpu", "--state", tmp_path / "state")
    with running(sys.executable, *words, log=tmp_path / "watch.txt"):
        run = client.run(graph.prompt, timeout=SECONDS)
    assert run.ending == "execution_success", run.message
    assert run.texts_of(back)[-1].startswith("4 of 4 done") and len(run.files()) == 4
    assert any("waiting for jobs" in text for text in run.texts_of(back))


def test_comfyui_outlives_the_cluster(head: str, farm: JobFolder, server: Server) -> None:
    """Ray by itself ends a process that it connected, a minute after the head is gone. Last: it takes the head away."""
    graph, there = sent(head, "outlived", seeds="31-33", steps=1000)
    gone: list[float] = []

    def end_head(_node: str, run: Run) -> bool:
        if not gone and ", sampling " in "".join(run.texts_of(there)):
            gone.append(time.monotonic())
            for one in psutil.Process().children(recursive=True):
                if value_or(one.name, "") == "gcs_server":
                    one.kill()
        return False

    run = Client(server.url).run(graph.prompt, end_head, timeout=SECONDS)
    assert run.message.startswith(f"the farm at {head!r} failed (") and "\n" not in run.message
    time.sleep(max(0.0, 75 - (time.monotonic() - gone[0])))
    assert Client(server.url).get("/system_stats")
