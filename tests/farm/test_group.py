"""A group of Ray's processes renders one video: the file of one process, whichever rank dies or hangs."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tiny
from anygpu.compat.device.facts import value_or
from anygpu.farm.render import Renderer, task_of
from anygpu.pipelines.base import Silent
from anygpu.pipelines.records.job import Caching, job_in
from anygpu.pipelines.records.job_folder import JobFolder
from anygpu.pipelines.records.job_lists import Batch, JobList, queue_jobs, write_list

pytestmark = pytest.mark.farm
SIZE = {"width": 96, "height": 96, "frames": 17, "steps": 30, "cfg": 3.0}
SECONDS = 900
PATIENCE_SECONDS = 30  # that ranks wait for one another
HANG, LOOK, ENDLESS_STEPS = "hang", "preview.npy", 500  # as ``grouped.py`` has them
HERE = Path(__file__).parent


def queued(
    models: Path, folder: Path, seeds: list[int], changes: dict[str, int] | None = None, cache: Caching | None = None
) -> JobList:
    """Jobs of a tiny model, in a file of their own."""
    batch = Batch(["a fox"], seeds, settings={**SIZE, **(changes or {})})
    jobs = queue_jobs(JobFolder(folder.parent / "unused"), "plain", tiny.build("ltx", models), batch)
    made = [replace(job_in(json.loads(line)), step_cache=cache or Caching()) for line in jobs.lines]
    return write_list(JobFolder(folder), f"foxes{seeds[0]}", made)


def farm(jobs: JobList, models: Path) -> subprocess.Popen[str]:
    """A driver with one group of two, which keeps each step."""
    command = [sys.executable, str(HERE / "grouped.py"), str(jobs.folder.root), str(models), "2", str(PATIENCE_SECONDS)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ranks(farm: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of the farm's ranks, which Ray names after their class and the call that they are in."""
    own = value_or(lambda: psutil.Process(farm.pid).children(recursive=True), [])
    return [one for one in own if " ".join(value_or(one.cmdline, [])).startswith("ray::Rank")]


def last_step(folder: JobFolder) -> float:
    """When a step was last kept, 0 for never."""
    kept = folder.state.rglob("*.safetensors")
    return max((value_or(lambda path=path: path.stat().st_mtime, 0.0) for path in kept), default=0.0)


def finished(process: subprocess.Popen[str]) -> str:
    """What the command printed, once it ended well."""
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output[-3000:]
    return output


def equal_to_one_process(jobs: JobList, models: Path, scratch: Path) -> None:
    """Every result has the pixels that one process gives."""
    local = JobFolder(scratch / "local")
    renderer = Renderer(local.root, (models,), scratch / "state", "cpu")
    for line in jobs.lines:
        key = task_of(line).key
        record = json.loads((jobs.folder.results / f"{key}.json").read_text(encoding="utf-8"))
        assert (jobs.folder.results / record["file"]).is_file()
        assert record["pixels_sha256"] == renderer.render(line, Silent())["pixels_sha256"]


def wait(process: subprocess.Popen[str], reached: Callable[[], Any]) -> None:
    """Look again and again while ``process`` lives."""
    deadline = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.1)


def test_a_group_renders_what_one_process_does_and_goes_on_when_a_rank_hangs_or_dies(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """One computes for ever in a step; of the ranks that take over, one is killed."""
    jobs = queued(tiny_folder, tmp_path / "farm", [1, 2])
    hang = jobs.folder.root / HANG
    hang.touch()
    process = farm(jobs, tiny_folder)
    try:
        wait(process, lambda: not hang.exists())
        hung = {rank.pid for rank in ranks(process)}
        assert len(hung) == 2
        wait(process, lambda: len(ranks(process)) == 2 and hung.isdisjoint(rank.pid for rank in ranks(process)))
        since = time.time()  # before it the leader of those that hang may have kept a step
        wait(process, lambda: last_step(jobs.folder) > since)
        addresses = {
            at.laddr.ip for rank in ranks(process) for at in rank.net_connections() if at.status == psutil.CONN_LISTEN
        }
        assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}
        os.kill(ranks(process)[-1].pid, signal.SIGKILL)
        output = finished(process)
    finally:
        process.kill()
    assert "2 done, 0 failed, 2 workers died" in output
    said = [line for line in output.splitlines() if "the job goes on from its last step" in line]
    advice = "; expected every rank alive, and its part of each exchange in time. See Ray's logs of that machine; raise"
    assert len(said) == 2 and all(f" of 2 ({socket.gethostname()}, process " in one and advice in one for one in said)
    hangs = f"hangs: no answer to the others for {PATIENCE_SECONDS:g} s"
    assert ": rank 1 of 2 " in said[0] and hangs in said[0]
    assert ") died" in said[1]
    equal_to_one_process(jobs, tiny_folder, tmp_path)


def test_a_group_that_is_cancelled_or_refuses_a_job_does_the_next_one(tiny_folder: Path, tmp_path: Path) -> None:
    """One shows a picture and is cancelled as it samples, one in a step without end, one asks for a step cache."""
    root = tmp_path / "farm"
    long = queued(tiny_folder, root, [1], {"steps": 1000})
    endless = queued(tiny_folder, root, [2], {"steps": ENDLESS_STEPS})
    refused = queued(tiny_folder, root, [3], {}, Caching("balanced"))
    good = queued(tiny_folder, root, [4], {})
    process = farm(good, tiny_folder)
    try:
        picture = long.folder.root / LOOK
        wait(process, picture.exists)
        before = {rank.pid for rank in ranks(process)}
        long.folder.cancel(long.keys)
        wait(process, lambda: long.folder.failure(long.keys[0]))
        assert {rank.pid for rank in ranks(process)} == before, "they agreed to end, and go on with the next job"
        wait(process, lambda: all((root / f"endless{rank}").exists() for rank in range(2)))
        stuck = ranks(process)
        endless.folder.cancel(endless.keys)
        wait(process, lambda: endless.folder.failure(endless.keys[0]))
        _, alive = psutil.wait_procs(stuck, timeout=SECONDS)
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert "1 done, 3 failed, 0 workers died" in output, output[-3000:]
    assert {rank.pid for rank in stuck} == before and not alive, "a step without end is not waited for"
    pixels = np.load(picture)
    assert pixels.dtype == np.uint8 and pixels.shape[2] == 3 and np.ptp(pixels) > 100, "stretched latents, not black"
    assert "step cache 'first_block' on 2 devices" in refused.folder.failure(refused.keys[0])
    equal_to_one_process(good, tiny_folder, tmp_path)
