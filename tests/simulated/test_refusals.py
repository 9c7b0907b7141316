"""One request for memory is refused, at any moment of a run: the run goes on, gives the same, and loses no step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import tiny
import torch
from anygpu.compat.transforms.compile import CompileSettings
from anygpu.pipelines import stages
from anygpu.pipelines.base import SampleSettings, Silent
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sampling.loop import Safeguards, denoise
from anygpu.pipelines.sampling.schedules import Levels, schedule_for
from anygpu.pipelines.speed import SpeedRequest

from simulated import accelerator
from simulated.test_families import CASES, ROUNDING, loaded_for, rendered

FULL = pytest.mark.full
FAMILIES = ("ltx image", "hunyuan_video image", "hunyuan_video_15 image", "framepack", "mochi")
STAGES = ("encode_image", "encode_prompt", "sample", "sample_framepack", "decode")
MODES = ("none", "model", "group", "sequential")
QUICK = ("ltx image", "model")


@dataclass
class Requests(Silent):
    """How many requests for memory there were when each stage and each step ended, and what was said."""

    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    last: int = 0

    def step(self, done, total, stage, preview=None):
        if stage.name == "sampling":
            now = accelerator.memory().allocations
            self.spans[f"step {len(self.steps)}"] = self.last, now
            self.steps.append(done)
            self.last = now
            if preview is not None:
                preview()

    def notify(self, text):
        self.said.append(text)


@contextmanager
def counted(monkeypatch, requests: Requests) -> Iterator[None]:
    """Each stage notes the requests before and after it."""

    def wrapped(name, stage):
        def run(*args, **named):
            before = requests.last = accelerator.memory().allocations
            found = stage(*args, **named)
            requests.spans[name] = before, accelerator.memory().allocations
            return found

        return run

    with monkeypatch.context() as patched:
        for name in STAGES:
            patched.setattr(stages, name, wrapped(name, getattr(stages, name)))
        yield


def moments(spans: dict[str, tuple[int, int]], each: int) -> list[tuple[str, int]]:
    """Of each stage and each step the first request, the last one, and some between."""
    found = []
    for name, (before, after) in spans.items():
        count = after - before
        at = {1, count, *(1 + count * part // each for part in range(1, each))}
        found += [(name, before + index) for index in sorted(at) if 0 < index <= count]
    return found


def same(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=ROUNDING)


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        pytest.param(family, mode, marks=[] if (family, mode) == QUICK else [FULL])
        for family in FAMILIES
        for mode in MODES
    ],
)
def test_a_refusal_at_any_moment_loses_nothing(acc, tiny_folder, monkeypatch, family, mode):
    case, plain = CASES[family], Requests()
    pipeline = loaded_for(case, tiny_folder, "acc:0", mode)
    with counted(monkeypatch, plain):
        begun = accelerator.memory().allocations
        expected = rendered(pipeline, case, plain)
    quick = (family, mode) == QUICK
    wanted = moments(plain.spans, 1 if quick else 3)
    assert {"encode_prompt", "decode", "step 0", "step 1"} <= {name for name, _ in wanted}
    for name, at in wanted[:: 4 if quick else 1]:
        torch.acc.manual_seed_all(accelerator.DEFAULT_SEED)
        pipeline, requests, before = loaded_for(case, tiny_folder, "acc:0", mode), Requests(), accelerator.memory()
        with accelerator.refusal(at - begun):
            found = rendered(pipeline, case, requests)
        told = f"{name}, request {at - begun}: {requests.said}"
        assert accelerator.memory().refusals == before.refusals + 1, told
        same(found, expected)
        if name.startswith("step"):
            assert requests.steps == plain.steps, f"a finished step ran again at {told}"
        for part in list(pipeline.parts):
            pipeline.offloader.release(part)
            pipeline.parts.drop(part)


@FULL
def test_a_compiled_run_goes_on_without_graphs_when_memory_runs_out(acc, tiny_folder):
    """From `none` by block to by layer, in which no block is one graph: its hooks are outside of what was compiled."""
    case = CASES["ltx"]
    expected = rendered(loaded_for(case, tiny_folder, "cpu"), case)
    model, speed = tiny.build("ltx", tiny_folder), SpeedRequest(compile=CompileSettings(backend="eager"))
    pipeline = load(LoadRequest(model, precision="fp32", offload="none", device=acc, speed=speed))
    progress, refused = Requests(), []

    def refuse(_name, _arguments):
        if len(progress.steps) == 1 and len(refused) < 2:  # in the second step, twice
            refused.append(1)
            raise torch.OutOfMemoryError("no room")

    with accelerator.hook("aten::addmm*", before=refuse):
        found = rendered(pipeline, case, progress)
    assert len(refused) == 2 and pipeline.offloader.mode == "sequential", progress.said
    assert progress.steps == [1, 2], "a finished step ran again"
    same(found, expected)
    same(rendered(pipeline, case), expected)


@pytest.mark.parametrize(
    ("name", "stage"), [("ltx", "encoding the prompt"), pytest.param("ltx image", "encoding the image", marks=FULL)]
)
def test_a_stage_that_never_fits_says_so_in_one_line(acc, tiny_folder, name, stage):
    before = accelerator.memory().allocated_bytes  # of whatever lived on after other tests
    pipeline, progress = loaded_for(CASES[name], tiny_folder, "acc:0", "none"), Requests()
    with accelerator.limit(10_000), pytest.raises(torch.OutOfMemoryError) as raised:
        rendered(pipeline, CASES[name], progress)
    assert str(raised.value).startswith(f"out of memory while {stage}"), raised.value
    assert sum("again with offload" in text for text in progress.said) == 2, progress.said
    assert accelerator.memory().allocated_bytes == before


@pytest.mark.parametrize("scheduler", ["euler", "unipc"])
def test_a_step_that_fails_after_its_solver_moved_is_taken_again_the_same(scheduler):
    """What a solver remembers of its steps is put back, so that no step counts twice."""

    def sampled(fails: bool) -> torch.Tensor:
        settings, calls = SampleSettings(64, 64, 9, steps=4, scheduler=scheduler), []
        levels = Levels(sigmas=[1.0, 0.75, 0.5, 0.25])
        schedule = schedule_for({}, settings, 4, lambda _: levels, torch.device("cpu"))

        def step(output: torch.Tensor, index: int, latents: torch.Tensor) -> torch.Tensor:
            found = schedule.step(output, index, latents)
            calls.append(index)
            if fails and len(calls) == 3:
                raise torch.OutOfMemoryError("no room")
            return found

        start = torch.linspace(-1, 1, 8).reshape(1, 1, 2, 2, 2)
        found = denoise(
            start, schedule, lambda x, *_: x.sin(), progress=Silent(), step=step, safeguards=Safeguards(lambda _: True)
        )
        assert calls == ([0, 1, 2, 2, 3] if fails else [0, 1, 2, 3])
        return found

    assert torch.equal(sampled(True), sampled(False))
