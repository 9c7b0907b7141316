"""A driver with one group of ranks that keep every step, for ``test_group.py``: FOLDER MODELS RANKS [branches]."""

from __future__ import annotations

import sys
from pathlib import Path

import chaos
from anygpu.farm import cluster
from anygpu.farm.driver import Driver, lines_in
from anygpu.farm.group import GroupRenderer, loopback_name
from anygpu.farm.render import reached_in, task_of
from anygpu.pipelines.job_folder import JobFolder

if __name__ == "__main__":
    folder, size = JobFolder(Path(sys.argv[1])), int(sys.argv[3])
    ray = cluster.start_here(size, 0)
    from ray import cloudpickle
    from ray.util import placement_group

    cloudpickle.register_pickle_by_value(chaos)  # the workers cannot import tests
    place = placement_group([{"CPU": 1}] * size, strategy="PACK")
    renderer = chaos.Steady(folder.root, (Path(sys.argv[2]),), folder.root / "machine", "cpu")
    leader = GroupRenderer(renderer, size, {"num_cpus": 1}, place, "branches" in sys.argv, loopback_name())
    driver = Driver(ray, folder, task_of, lambda task: reached_in(folder, task), lambda text: print(text, flush=True))
    driver.start_workers(1, leader, {"num_cpus": 0})
    driver.add(lines_in(folder.job_files()), again=True)
    tally = driver.run()
    print(f"{tally.done} done, {len(tally.failed)} failed, {tally.deaths} workers died")
    sys.exit(len(tally.failed))
