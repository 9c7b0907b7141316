"""A driver whose workers keep every step and take a while for each, for ``test_chaos.py``: FOLDER MODELS ADDRESS."""

import sys
import time
from pathlib import Path
from typing import Any

from anygpu.farm import cluster
from anygpu.farm.driver import Driver, lines_in
from anygpu.farm.render import Renderer, reached_in, task_of
from anygpu.pipelines.records.job_folder import JobFolder

STEP_SECONDS = 0.1


class Slow:
    """A progress under which a step takes as long as on a GPU that has something to do; writes down what it is told."""

    def __init__(self, inner: Any, log: Path) -> None:
        self.inner, self.log = inner, log
        self.check = inner.check

    def step(self, done: int, total: int, stage: Any, preview: Any = None) -> None:
        time.sleep(STEP_SECONDS if stage.name == "sampling" else 0)
        self.inner.step(done, total, stage, preview)

    def notify(self, text: str) -> None:
        if "goes on after" in text:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")


class Steady(Renderer):
    """Keeps each step, however short: by itself it keeps as many as cost next to nothing."""

    def render(self, line: str, progress: Any) -> dict[str, Any]:
        from anygpu.pipelines.latents import steps

        steps.SavedSteps.due = lambda self: True
        return super().render(line, Slow(progress, self.folder / "resumed.txt"))


if __name__ == "__main__":
    folder = JobFolder(Path(sys.argv[1]))
    renderer = Steady(folder.root, (Path(sys.argv[2]),), folder.root / "machine", "cpu")
    driver = Driver(
        cluster.connect(sys.argv[3]), folder, task_of, lambda task: reached_in(folder, task), lambda text: print(text)
    )
    driver.start_workers(2, renderer, {"num_cpus": 1})
    driver.add(lines_in(folder.job_files(), print), again=True)
    sys.exit(len(driver.run().failed))
