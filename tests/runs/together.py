"""Two ComfyUIs and a farm on one state folder, all at work at once: no failure, and each result as alone.

Run: python tests/runs/together.py [--count 24] [--seed 0]     (prompts of each ComfyUI; as many jobs for the farm)
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny
from anygpu.farm.render import Renderer, task_of
from anygpu.pipelines.base import Silent
from anygpu.pipelines.records.job_folder import JobFolder
from anygpu.pipelines.records.job_lists import Batch, queue_jobs
from host.client import Client
from host.prompts import PICTURES, pictured, text_to_video

from host import videos
from host.server import Server, served, tiny_home
from runs.subjects import arguments_of

MODELS = ("LTX-Video", "mochi-1-preview")
CANCELS = 0.25  # of the prompts
FARM = [sys.executable, "-c", "import sys; from anygpu.farm.cli import main; sys.exit(main())"]


def shared(first: Path) -> Callable[[Server], None]:
    """Give a server the user folder, the results and the models of another."""

    def link(server: Server) -> None:
        for name in ("user", "output", "models"):
            (first / name).mkdir(parents=True, exist_ok=True)
            (server.base / name).symlink_to(first / name, target_is_directory=True)

    return link


def drive(server: Server, count: int, rng: random.Random, ends: Counter[str], seen: dict[str, np.ndarray]) -> None:
    """Run prompts, some of them cancelled; the same one gives the same video, in whichever ComfyUI."""
    client = Client(server.url)
    for _ in range(count):
        model, seed = rng.choice(MODELS), rng.randrange(4)
        prompt = pictured(text_to_video(model, seed=seed, frames=9 if model == MODELS[0] else 7).prompt)
        prompt[PICTURES]["inputs"]["filename_prefix"] = client.id  # both write to one folder
        cancels, at = rng.random() < CANCELS, time.monotonic() + rng.uniform(0, 2)
        run = client.run(prompt, lambda *_: cancels and time.monotonic() > at, timeout=600)  # noqa: B023
        ends[run.ending] += 1
        if run.ending == "execution_error":
            ends[f"{model}: {run.message}"] += 1
        if run.ending == "execution_success" and run.files():
            shown = videos.pictures(server, run)
            if not np.array_equal(seen.setdefault(f"{model} {seed}", shown), shown):
                ends[f"{model} {seed}: another video"] += 1
        client.free()


def main() -> int:
    """Have all work at once; 1 where something failed or differs."""
    arguments = arguments_of(__doc__, 24)
    ends, seen, started = Counter[str](), dict[str, np.ndarray](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="anygpu-together-") as text:
        base, tinies = Path(text), tiny_home()
        (base / "two").mkdir()
        with (
            served(base / "one", tinies, before=shared_itself) as one,
            served(base / "two", tinies, before=shared(base / "one")) as two,
        ):
            one.every_model()
            size = {"width": 64, "height": 64, "frames": 9, "steps": 2}
            folder, state = JobFolder(base / "one" / "output" / "farm"), base / "one" / "user" / "anygpu"
            jobs = queue_jobs(
                folder,
                "a",
                tiny.build("ltx", tinies),
                Batch(["a fox"], range(arguments.count), settings=size),
                state=state,
            )
            words = [
                "run",
                str(folder.root),
                "--local",
                "1",
                "--device",
                "cpu",
                "--models",
                str(tinies),
                "--state",
                str(state),
            ]
            farm = subprocess.Popen([*FARM, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            with ThreadPoolExecutor(2) as threads:
                rngs = (random.Random(f"{arguments.seed}/{number}") for number in range(2))
                given = (arguments.count, arguments.count), rngs, (ends, ends), (seen, seen)
                list(threads.map(drive, (one, two), *given))
            said, _ = farm.communicate(timeout=1800)
            left = [str(path) for path in state.rglob("*.part")]
        alone = Renderer(base / "alone", (tinies,), base / "state", "cpu")
        for line in jobs.lines:
            record = json.loads((folder.results / f"{task_of(line).key}.json").read_text(encoding="utf-8"))
            if record["pixels_sha256"] != alone.render(line, Silent())["pixels_sha256"]:
                ends[f"job {task_of(line).key[:12]}: another video"] += 1
    if farm.returncode or f"{arguments.count} done" not in said:
        ends[f"farm: {said[-500:]}"] += 1
    ends.update(f"left: {path}" for path in left)
    wrong = [end for end in ends if ": " in end or end == "execution_error"]
    print(f"{time.monotonic() - started:.0f} s, prompts {dict(ends)}, farm {said.strip().splitlines()[-1:]}")
    print("; ".join(wrong) or "0 failures")
    return 1 if wrong else 0


def shared_itself(server: Server) -> None:
    """Make the folders that the other ComfyUI links to."""
    for name in ("user", "output", "models"):
        (server.base / name).mkdir(parents=True, exist_ok=True)


if __name__ == "__main__":
    sys.exit(main())
