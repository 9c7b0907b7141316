"""Workers, drivers and machines are killed at random moments: every job is done once, bit for bit as in one process."""

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from anygpu.compat.device.facts import value_or
from anygpu.pipelines.records.job_folder import JobFolder

pytestmark = pytest.mark.farm
JOBS, KILLS, SEED = 16, 30, 11
KINDS = {"worker": 20, "driver": 6, "node": 4}
HERE = Path(__file__).parent


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A head that runs nothing and two nodes with room for one worker each, on loopback, with a token."""
    from anygpu.farm.cluster import LOOPBACK, QUIET, TOKEN

    for name, value in {**LOOPBACK, **QUIET, TOKEN: "token", "RAY_AUTH_TOKEN": "6" * 64}.items():
        monkeypatch.setenv(name, value)
    from ray._private.authentication_test_utils import reset_auth_token_state
    from ray.cluster_utils import Cluster

    reset_auth_token_state()  # a process keeps the token of the first cluster that it speaks to
    # A node counts as dead after seconds, not after the minute that suits a network; one that is only busy does not.
    system = {"health_check_period_ms": 500, "health_check_timeout_ms": 10_000, "health_check_failure_threshold": 6}
    started = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": system}
    )
    nodes = [started.add_node(num_cpus=1, object_store_memory=80_000_000) for _ in range(2)]
    yield started, nodes
    started.shutdown()
    reset_auth_token_state()


def rendering() -> list[psutil.Process]:
    """The processes of this test that render now: Ray names a process after the call that it is in."""
    own = psutil.Process().children(recursive=True)
    return [one for one in own if "ray::Worker.run" in " ".join(value_or(one.cmdline, []))]


def last_step(folder: JobFolder) -> float:
    """When a step was last kept, by any worker."""
    kept = [path for path in folder.state.rglob("*.safetensors") if path.name[0] != "."]
    return max((value_or(lambda path=path: path.stat().st_mtime, 0.0) for path in kept), default=0.0)


def test_every_job_is_done_once_and_bit_equal_whoever_dies(cluster: Any, tiny_folder: Path, tmp_path: Path) -> None:
    import tiny
    from anygpu.farm.render import Renderer, task_of
    from anygpu.pipelines.base import Silent
    from anygpu.pipelines.records.job_lists import Batch, queue_jobs

    ray_cluster, nodes = cluster
    size = {"width": 64, "height": 64, "frames": 9, "steps": 40}
    schedulers = [{**size, "scheduler": name} for name in ("auto", "unipc")]
    model = tiny.build("ltx", tiny_folder)
    lists = [
        queue_jobs(JobFolder(tmp_path / "farm"), f"{n}", model, Batch(["a fox"], range(JOBS // 2), settings=settings))
        for n, settings in enumerate(schedulers)
    ]
    folder, keys = lists[0].folder, [key for jobs in lists for key in jobs.keys]
    assert len(set(keys)) == JOBS

    words = [sys.executable, str(HERE / "chaos.py"), str(folder.root), str(tiny_folder), ray_cluster.address]
    output = (tmp_path / "driver.txt").open("a")

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(words, stdout=output, stderr=output)

    rng, killed, before = random.Random(SEED), Counter(), 0.0
    plan = [kind for kind, count in KINDS.items() for _ in range(count)]
    rng.shuffle(plan)
    driver = start()
    try:
        while driver.poll() is None:
            busy = rendering()
            if not plan or not busy or last_step(folder) <= before:  # else nothing would ever be done
                time.sleep(0.2)
                continue
            time.sleep(rng.uniform(0.0, 2.0))  # anywhere in a step, a decode, a write, or in the other's load
            before = last_step(folder)
            kind = plan.pop()
            killed[kind] += 1
            if kind == "worker":
                victim = rng.choice(busy)
                if victim.is_running():
                    victim.kill()
            elif kind == "driver":
                driver.send_signal(signal.SIGKILL)
                driver.wait()
                driver = start()
            else:
                ray_cluster.remove_node(nodes.pop(0), allow_graceful=False)
                nodes.append(ray_cluster.add_node(num_cpus=1, object_store_memory=80_000_000))
    finally:
        driver.kill()
    text = (tmp_path / "driver.txt").read_text()
    assert driver.returncode == 0, text[-3000:]
    assert killed == KINDS, f"all jobs were done after {killed}: give them more steps"
    resumed = (folder.root / "resumed.txt").read_text(encoding="utf-8").splitlines()
    assert len(resumed) >= JOBS // 2, "jobs go on from their steps"

    assert sorted(path.stem for path in folder.results.glob("*.json")) == sorted(keys)
    assert sorted(path.stem for path in folder.results.glob("*.mp4")) == sorted(keys), "nothing half done is left"
    assert not list(folder.state.glob("*")), "no steps of finished jobs are left"
    local = JobFolder(tmp_path / "local")
    renderer = Renderer(local.root, (tiny_folder,), tmp_path / "state", "cpu")
    for line in (line for jobs in lists for line in jobs.lines):
        record, key = renderer.render(line, Silent()), task_of(line).key
        far = json.loads((folder.results / f"{key}.json").read_text(encoding="utf-8"))
        assert far["pixels_sha256"] == record["pixels_sha256"]
    print(f"{dict(killed)} killed, {len(resumed)} times a job went on from a step")
