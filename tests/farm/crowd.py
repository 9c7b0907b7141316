"""A thousand jobs, 5 % of them poisoned in 20 ways, on real Ray, while workers, drivers and nodes are killed at random.

Run: python tests/farm/crowd.py [--jobs 1000] [--workers 4] [--kills 20] [--seed 0]     (make crowd JOBS=)
A job draws its pixels from its number, so that thousands fit; ``test_chaos.py`` kills real renders. Ends with 1 where a
sound job is not done once and bit-equal, a poisoned one has not its own line, `watch` ends, or memory grows.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch
from anygpu.compat.device.facts import value_or
from anygpu.farm import cluster
from anygpu.farm.driver import Driver
from anygpu.farm.worker import JOB, MODEL, during
from anygpu.pipelines.records.job_folder import JobFolder
from farm.paper import Died
from farm.test_driver import POISONS, task_of

TESTS = str(Path(__file__).resolve().parents[1])
KINDS = {"worker": 0.7, "driver": 0.2, "node": 0.1}
GROWTH_MB = 64.0  # of the driver, from its first jobs to its last
FASTER = 30  # times that the clock of rests runs


@dataclass
class Drawn:
    """Renders a line by pixels of its number; fails where it says how."""

    folder: Path
    device: Any = "cpu"

    def render(self, line: str, progress: Any) -> dict[str, Any]:
        """The record of the job."""
        job = json.loads(line)
        phase, error = POISONS.get(job["poison"], ("", None))
        if error is not None:
            with during(phase or JOB):
                raised = error(f"{job['poison']} in {job['number']}")
                if isinstance(raised, Died):
                    os._exit(9)
                raise raised
        time.sleep(0.05)
        with (self.folder / "renders.txt").open("a", encoding="utf-8") as file:
            file.write(f"{job['number']}\n")
        return {"pixels_sha256": pixels_of(job["number"])}


def pixels_of(number: int) -> str:
    """The hash of what job ``number`` draws."""
    pixels = torch.rand(9, 64, 64, 3, generator=torch.Generator().manual_seed(number))
    return hashlib.sha256(pixels.numpy().tobytes()).hexdigest()


def line_of(number: int, poison: str) -> str:
    """A job's line."""
    return json.dumps({"number": number, "model": f"model {number % 5}", "poison": poison})


def drive(root: Path, address: str, workers: int) -> None:
    """Watch the folder for ever."""
    say = (root / "said.txt").open("a", encoding="utf-8", buffering=1)
    driver = Driver(
        cluster.connect(address), JobFolder(root), task_of, lambda _task: 0.0, lambda text: print(text, file=say),
        lambda: time.monotonic() * FASTER,
    )  # fmt: skip
    driver.start_workers(workers, Drawn(root), {"num_cpus": 1})
    driver.watch()


@contextmanager
def nodes_of(count: int) -> Any:
    """A head that runs nothing and ``count`` nodes with room for two workers each, on loopback, with a token."""
    paths = [TESTS, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # the workers import this file
    os.environ.update({**cluster.LOOPBACK, **cluster.QUIET, cluster.TOKEN: "token", "RAY_AUTH_TOKEN": "6" * 64})
    from ray.cluster_utils import Cluster

    system = {"health_check_period_ms": 2000, "health_check_timeout_ms": 60_000, "health_check_failure_threshold": 6}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": system}
    started = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield started, [started.add_node(num_cpus=2, object_store_memory=80_000_000) for _ in range(count)]
    finally:
        started.shutdown()


def workers_alive() -> list[psutil.Process]:
    """The processes of workers."""
    own = psutil.Process().children(recursive=True)
    return [one for one in own if "ray::Worker" in " ".join(value_or(one.cmdline, []))]


def main() -> int:
    """Run the crowd; 1 where something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng, ways, poisoned = random.Random(arguments.seed), list(POISONS), arguments.jobs // 20
    lines = [line_of(n, ways[n % len(ways)] if n < poisoned else "") for n in range(arguments.jobs)]
    rng.shuffle(lines)
    killed, memory, started = Counter[str](), list[float](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="anygpu-crowd-") as text, nodes_of(arguments.workers // 2) as (ray, nodes):
        root, folder = Path(text), JobFolder(Path(text))
        for part in range(10):
            folder.write_jobs(f"part {part}", lines[part::10])
        words = [sys.executable, __file__, "--drive", str(root), ray.address, str(arguments.workers)]

        def begin() -> subprocess.Popen[bytes]:
            return subprocess.Popen(words, stderr=(root / "errors.txt").open("ab"), cwd=root)  # not beside our farm/

        driver, ended, said, fresh = begin(), 0, -1, 0
        (root / "said.txt").touch()
        plan = [kind for kind, share in KINDS.items() for _ in range(max(1, round(share * arguments.kills)))]
        rng.shuffle(plan)
        at = sorted(rng.uniform(0.02, 0.9) * arguments.jobs for _ in plan)
        while (done := ended_in(folder, poisoned, ways)) < arguments.jobs:
            time.sleep(0.5)
            if driver.poll() is not None:  # `watch` never ends by itself
                ended, driver, fresh = ended + 1, begin(), done
            if said != done // 50:
                said = done // 50
                if done >= fresh + 40:  # all that it imports is there
                    memory.append(psutil.Process(driver.pid).memory_info().rss / 2**20)
                print(f"{time.monotonic() - started:.0f} s: {done} ended, {dict(killed)}, {memory[-1:]} MB", flush=True)
            if not at or done < at[0] or not (alive := workers_alive()):
                continue
            kind = plan.pop()
            at, _ = at[1:], killed.update([kind])
            if kind == "worker":
                rng.choice(alive).kill()
            elif kind == "driver":
                driver.send_signal(signal.SIGKILL)
                driver.wait()
                driver, fresh = begin(), done
            else:
                ray.remove_node(nodes.pop(0), allow_graceful=False)
                nodes.append(ray.add_node(num_cpus=2, object_store_memory=80_000_000))
        driver.kill()
        wrong = faults(folder, arguments.jobs, poisoned, ways)
        twice = Counter((root / "renders.txt").read_text().split())
    if ended:
        wrong.append(f"the driver ended {ended} times by itself")
    if memory and max(memory) - min(memory) > GROWTH_MB:
        wrong.append(f"memory of the driver from {min(memory):.0f} to {max(memory):.0f} MB")
    again = sum(count - 1 for count in twice.values())
    least, most = min(memory, default=0), max(memory, default=0)
    print(
        f"{arguments.jobs} jobs, {poisoned} poisoned in {min(poisoned, len(ways))} ways, {dict(killed)} killed, "
        f"{time.monotonic() - started:.0f} s, driver {least:.0f} to {most:.0f} MB, {again} renders again "
        f"after a kill: {'; '.join(wrong[:20]) or 'all right'}"
    )
    return 1 if wrong else 0


def ended_in(folder: JobFolder, poisoned: int, ways: list[str]) -> int:
    """How many jobs are done, have failed, or are of a model that `watch` waits for, as it has said."""
    return len(folder.done_keys()) + sum(bool(note_of(folder, n, ways)) for n in range(poisoned))


def note_of(folder: JobFolder, number: int, ways: list[str]) -> str:
    """Why a poisoned job failed; or what is said of a model that cannot be loaded where only such jobs are left."""
    way = ways[number % len(ways)]
    said = (folder.root / "said.txt").read_text(encoding="utf-8").splitlines() if POISONS[way][0] == MODEL else []
    mine = (line for line in said if f"{way} in {number};" in line or line.endswith(f"{way} in {number}"))
    return folder.failure(f"{number:064x}") or next(mine, "")


def faults(folder: JobFolder, jobs: int, poisoned: int, ways: list[str]) -> list[str]:
    """What is wrong with the results and the notes."""
    found = list[str]()
    for number in range(jobs):
        key, way = f"{number:064x}", ways[number % len(ways)]
        note = note_of(folder, number, ways) if number < poisoned else folder.failure(key)
        if number < poisoned:
            own = "workers died at this job" in note if way == "death" else f"{way} in {number}" in note
            found += [] if own and "\n" not in note.strip() else [f"{way} in {number}: {note!r}"]
            continue
        record = value_or(lambda key=key: json.loads((folder.results / f"{key}.json").read_text()), {})
        if note or record.get("pixels_sha256") != pixels_of(number):
            found.append(f"sound job {number}: {note!r} {record}")
    return found


if __name__ == "__main__":
    from farm import crowd  # by whose name Ray knows what it sends

    if sys.argv[1:2] == ["--drive"]:
        crowd.drive(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    sys.exit(crowd.main())
