"""What it costs to keep the steps of a sampling: one state at published sizes, and its share of real samplings.

    python benchmarks/resume.py --folder DISK     # appends rows to benchmarks/results/resume.csv

States are of the latents' published shapes with as many tensors as the solver has; each is on the disk (fsync) when
it counts as written. `every_step_from_s` is the length of a step from which every step is kept;
shorter ones are kept less often. The last rows sample with the demo model that ships.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from table import append, machine

SHAPES = {  # of the largest latents of the shipped workflows and of 720p
    "ltx 704x480x97": (1, 4290, 128),
    "hunyuan_video 1280x720x129": (1, 16, 33, 90, 160),
    "hunyuan_video_15 1280x720x121": (1, 32, 31, 45, 80),
    "framepack 640x608, section": (1, 16, 9, 76, 80),
    "mochi 848x480x163": (1, 12, 28, 60, 106),
}
HISTORY = {"euler": 0, "unipc": 3, "dpm++_2m": 2}  # tensors of the latents' shape beside them
REPEATS, STEPS = 7, 400


def states(folder: Path) -> list[dict[str, object]]:
    """A row per shape and solver."""
    from anygpu.pipelines.latents.steps import SHARE, SavedSteps
    from anygpu.pipelines.sampling.resume import StepState

    rows = []
    for name, shape in SHAPES.items():
        for solver, count in HISTORY.items():
            fields = {"_step_index": 3, "model_outputs": [torch.randn(shape) for _ in range(count)]}
            state = StepState(3, 0, torch.randn(shape), fields, torch.Generator().get_state().numpy().tobytes())
            kept, costs = SavedSteps(folder, print), []
            for _ in range(REPEATS):
                kept.keep("benchmark", state)
                costs.append(kept.cost)
            kept.drop("benchmark")
            seconds = statistics.median(costs)
            megabytes = 4 * (count + 1) * state.latents.numel() / 1e6
            rows.append(row(name, solver, f"{megabytes:.1f}", f"{1e3 * seconds:.1f}", f"{seconds / SHARE:.2f}", ""))
    return rows


def samplings(folder: Path) -> list[dict[str, object]]:
    """A row per solver: the share of the time of a real sampling that keeping its steps took."""
    from anygpu.pipelines import stages
    from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
    from anygpu.pipelines.demo import demo_models
    from anygpu.pipelines.latents.steps import SavedSteps
    from anygpu.pipelines.load.folder import load
    from anygpu.pipelines.requests import LoadRequest

    class Counted(SavedSteps):
        count = 0

        def keep(self, *given: object) -> None:
            Counted.count += 1
            super().keep(*given)

    (name, model), *_ = demo_models().items()
    pipeline = load(LoadRequest(model, device="cpu", precision="fp32"))
    prompt = stages.encode_prompt(pipeline, PromptRequest("a red circle moves left on blue"), Silent())
    rows = []
    for solver in HISTORY:
        Counted.count, kept = 0, Counted(folder, print)
        begun = time.perf_counter()
        settings = SampleSettings(64, 64, 9, STEPS, scheduler=solver)
        stages.sample(pipeline, prompt, None, settings, Silent(), kept)
        seconds = time.perf_counter() - begun
        cost, share = f"{1e3 * kept.spent / max(Counted.count, 1):.1f}", f"{100 * kept.spent / seconds:.2f}"
        sampled = f"{name}, {STEPS} steps in {seconds:.1f} s, {Counted.count} kept"
        rows.append(row(sampled, solver, "", cost, "", share))
    return rows


def row(name: str, solver: str, megabytes: str, cost: str, length: str, share: str) -> dict[str, object]:
    """One line of the table."""
    columns = {"sampling": name, "solver": solver, "state_mb": megabytes, "write_ms": cost}
    return {**machine(), **columns, "every_step_from_s": length, "share_percent": share}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="on the disk to measure; default: the system's temporary folder")
    with tempfile.TemporaryDirectory(dir=parser.parse_args().folder) as folder:
        append("resume", [*states(Path(folder)), *samplings(Path(folder))])
    return 0


if __name__ == "__main__":
    sys.exit(main())
