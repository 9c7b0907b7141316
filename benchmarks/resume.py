"""The cost of saving the steps of a sampling: one state at published sizes, and its share of real samplings.

States are of the latents' published shapes with as many tensors as the solver has; each is on the disk (fsync) when
it counts as written. `every_step_from_s` is the length of a step from which every step is saved; shorter ones are saved
less often. The last rows sample with the demo model that ships. ``--folder`` lies on the disk to measure.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from anygpu.pipelines import stages
from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
from anygpu.pipelines.demo import demo_models
from anygpu.pipelines.latents.steps import SHARE, KeptSteps
from anygpu.pipelines.load.folder import LoadRequest, load
from anygpu.pipelines.sampling.resume import StepState
from runner import Case, Row, spent

SHAPES = {  # of the largest latents of the shipped workflows and of 720p
    "ltx 704x480x97": (1, 4290, 128),
    "hunyuan_video 1280x720x129": (1, 16, 33, 90, 160),
    "hunyuan_video_15 1280x720x121": (1, 32, 31, 45, 80),
    "framepack 640x608, section": (1, 16, 9, 76, 80),
    "mochi 848x480x163": (1, 12, 28, 60, 106),
}
HISTORY = {"euler": 0, "unipc": 3, "dpm++_2m": 2}  # tensors of the latents' shape beside them
REPEATS, STEPS = 7, 400


def states(folder: Path) -> Iterator[Row]:
    """A row per shape and solver."""
    for name, shape in SHAPES.items():
        for solver, count in HISTORY.items():
            fields = {"_step_index": 3, "model_outputs": [torch.randn(shape) for _ in range(count)]}
            state = StepState(3, 0, torch.randn(shape), fields, torch.Generator().get_state().numpy().tobytes())
            saved, costs = KeptSteps(folder, print), []
            for _ in range(REPEATS):
                saved.keep("benchmark", state)
                costs.append(saved.cost)
            saved.drop("benchmark")
            seconds = statistics.median(costs)
            megabytes = 4 * (count + 1) * state.latents.numel() / 1e6
            yield row(name, solver, f"{1e3 * seconds:.1f}", f"{megabytes:.1f}", f"{seconds / SHARE:.2f}")


class Counted(KeptSteps):
    """Steps that are counted when they are saved."""

    count = 0

    def keep(self, *given: object) -> None:
        """Save a step."""
        self.count += 1
        super().keep(*given)


def samplings(folder: Path) -> Iterator[Row]:
    """A row per solver: the share of the time of a real sampling that saving its steps took."""
    (name, model), *_ = demo_models().items()
    pipeline = load(LoadRequest(model, device="cpu", precision="fp32"))
    prompt = stages.encode_prompt(pipeline, PromptRequest("a red circle moves left on blue"), Silent())
    for solver in HISTORY:
        saved, settings = Counted(folder, print), SampleSettings(64, 64, 9, STEPS, scheduler=solver)
        seconds = spent(lambda: stages.sample(pipeline, prompt, None, settings, Silent(), saved))  # noqa: B023
        cost, share = f"{1e3 * saved.spent / max(saved.count, 1):.1f}", f"{100 * saved.spent / seconds:.2f}"
        yield row(f"{name}, {STEPS} steps in {seconds:.1f} s, {saved.count} kept", solver, cost, share=share)


def row(name: str, solver: str, cost: str, megabytes: str = "", length: str = "", share: str = "") -> Row:
    """One line of the table."""
    columns = {"sampling": name, "solver": solver, "state_mb": megabytes, "write_ms": cost}
    return {**columns, "every_step_from_s": length, "share_percent": share}


def rows(folder: str) -> Iterator[Row]:
    """All rows."""
    with tempfile.TemporaryDirectory(dir=folder or None) as home:
        yield from states(Path(home))
        yield from samplings(Path(home))


CASES = [Case("resume", rows, {"folder": ""}, "resume", threads=0)]
