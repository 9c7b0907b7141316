"""A driver with one group of ranks that keep every step, for ``test_group.py``: FOLDER MODELS RANKS PATIENCE."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import chaos
import numpy as np
from anygpu.farm import cluster, group
from anygpu.farm.driver import Driver, lines_in
from anygpu.farm.group import GroupRenderer, loopback_name
from anygpu.farm.render import reached_in, task_of
from anygpu.pipelines.records.job_folder import JobFolder

HANG, LOOK = "hang", "preview.npy"
ENDLESS_STEPS = 500  # of the job in whose third step all ranks compute for ever
CANCEL_SECONDS = group.CANCEL_SECONDS  # as shipped


class Stuck:
    """A progress that comes to no end where the file ``hang`` is; the next process does not find it any more."""

    def __init__(self, inner: Any, hang: Path) -> None:
        self.inner, self.hang, self.check, self.notify = inner, hang, inner.check, inner.notify

    def step(self, done: int, total: int, stage: Any, preview: Any = None) -> None:
        if stage.name == "sampling" and done > 2 and self.hang.exists():
            self.hang.unlink()
            time.sleep(3600)
        self.inner.step(done, total, stage, preview)


class Endless(Stuck):
    """A progress that comes to no end, and writes the file ``hang`` when it is there."""

    def step(self, done: int, total: int, stage: Any, preview: Any = None) -> None:
        if stage.name == "sampling" and done > 2:
            self.hang.touch()
            time.sleep(3600)
        self.inner.step(done, total, stage, preview)


class HangsOnce(chaos.Steady):
    """Its last rank computes for ever where the folder has a file ``hang``, and all ranks do in an endless job."""

    def render(self, line: str, progress: Any) -> dict[str, Any]:
        if is_endless(line) and self.group is not None:
            return super().render(line, Endless(progress, self.folder / f"endless{self.group.world.rank}"))
        last = self.group is not None and self.group.world.rank == self.group.world.size - 1
        return super().render(line, Stuck(progress, self.folder / HANG) if last else progress)


class Unhurried(GroupRenderer):
    """Waits for a step of the ranks that are to end as long as it takes on a busy machine; not in an endless job."""

    def render(self, line: str, progress: Any) -> dict[str, Any]:
        group.CANCEL_SECONDS = CANCEL_SECONDS if is_endless(line) else 60.0
        return super().render(line, progress)


def is_endless(line: str) -> bool:
    """Whether this is the job that comes to no end."""
    return bool(json.loads(line)["settings"].get("steps") == ENDLESS_STEPS)


def look(driver: Driver, path: Path) -> None:
    """Work until the first job that samples has shown a picture, and keep that."""
    (worker,) = driver.workers
    while worker.task is None:
        driver.turn()
    pixels, call = None, worker.actor.preview.remote()
    while pixels is None:
        driver.turn()
        if driver.ray.wait([call], timeout=0)[0]:
            pixels = driver.ray.get(call)
            call = worker.actor.preview.remote() if pixels is None else call
    np.save(path, pixels)


if __name__ == "__main__":
    folder, size = JobFolder(Path(sys.argv[1])), int(sys.argv[3])
    ray = cluster.start_here(size, 0)
    from ray import cloudpickle
    from ray.util import placement_group

    cloudpickle.register_pickle_by_value(chaos)  # the workers cannot import tests
    place = placement_group([{"CPU": 1}] * size, strategy="PACK")
    renderer = HangsOnce(folder.root, (Path(sys.argv[2]),), folder.root / "machine", "cpu")
    leader = Unhurried(renderer, size, {"num_cpus": 1}, place, False, loopback_name(), float(sys.argv[4]))
    driver = Driver(ray, folder, task_of, lambda task: reached_in(folder, task), lambda text: print(text, flush=True))
    driver.start_workers(1, leader, {"num_cpus": 0})
    driver.add(lines_in(folder.job_files(), print), again=True)
    if not (folder.root / HANG).exists():
        look(driver, folder.root / LOOK)
    tally = driver.run()
    print(f"{tally.done} done, {len(tally.failed)} failed, {tally.deaths} workers died")
    sys.exit(len(tally.failed))
