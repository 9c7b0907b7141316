"""A machine that is taken away, as spot machines are, keeps its steps for the one that comes next."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import tiny
from anygpu.farm.render import Renderer
from anygpu.pipelines.base import Silent
from anygpu.pipelines.records.job_folder import JobFolder
from anygpu.pipelines.records.job_lists import Batch, queue_jobs

SECONDS = 600  # until a step is kept on a busy machine
NOTICE_SECONDS = 25  # Kubernetes kills 30 s after SIGTERM, Slurm as its KillWait says, AWS after 2 minutes


@pytest.mark.farm
def test_sigterm_ends_the_command_in_time_and_the_next_one_goes_on(tiny_folder: Path, tmp_path: Path) -> None:
    size = {"width": 64, "height": 64, "frames": 9, "steps": 40}
    jobs = queue_jobs(
        JobFolder(tmp_path / "farm"), "a", tiny.build("ltx", tiny_folder), Batch(["a fox"], [1], settings=size)
    )
    root, kept = jobs.folder.root, jobs.folder.state / jobs.keys[0]
    words = ["run", str(root), "--local", "1", "--device", "cpu", "--models", str(tiny_folder)]
    command = [sys.executable, str(Path(__file__).with_name("steady.py")), *words, "--state", str(tmp_path / "state")]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + SECONDS
        while not list(kept.rglob("*.safetensors")):
            assert first.poll() is None and time.monotonic() < deadline, first.communicate()[1][-3000:]
            time.sleep(0.1)
        processes = psutil.Process(first.pid).children(recursive=True)
        first.send_signal(signal.SIGTERM)
        _, errors = first.communicate(timeout=NOTICE_SECONDS)
        _, alive = psutil.wait_procs(processes, timeout=NOTICE_SECONDS)
    finally:
        first.kill()
    assert first.returncode == 130 and errors.strip() == "anygpu-farm: stopped; run the same command again to resume"
    assert not alive, "nothing holds the GPU"
    assert list(kept.rglob("*.safetensors")) and not jobs.folder.failure(jobs.keys[0])
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert "1 done, 0 already done, 0 failed, 0 workers died" in done.stdout, done.stderr[-3000:]
    assert "goes on after" in (root / "resumed.txt").read_text(encoding="utf-8") and not kept.exists()
    record = json.loads((jobs.folder.results / f"{jobs.keys[0]}.json").read_text(encoding="utf-8"))
    alone = Renderer(tmp_path / "alone", (tiny_folder,), tmp_path / "state", "cpu").render(jobs.lines[0], Silent())
    assert record["pixels_sha256"] == alone["pixels_sha256"]
