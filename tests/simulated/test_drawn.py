"""What a demo model draws stays what was asked, whatever happens to the run: the checker reads it back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from anygpu.pipelines import stages
from anygpu.pipelines.base import Latents, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.demo import demo_models
from anygpu.pipelines.demo.scenes import scene_of
from anygpu.pipelines.latents import convert, recovery
from anygpu.pipelines.latents.steps import SavedSteps
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.vae.plan import DecodeRequest

from simulated import accelerator
from simulated.test_families import MODES

pytestmark = pytest.mark.full

TEXT, STEPS = "a yellow triangle moves down on blue", 6


def opened(device: Any = "cpu", **chosen: Any) -> Pipeline:
    return load(LoadRequest(next(iter(demo_models().values())), device=device, **chosen))


def sampled(pipeline: Pipeline, progress: Any = None, kept: Path | None = None) -> Latents:
    with torch.no_grad():
        prompt = stages.encode_prompt(pipeline, PromptRequest(TEXT), Silent())
        steps = None if kept is None else SavedSteps(kept, print, share=float("inf"))
        return stages.sample(pipeline, prompt, None, SampleSettings(0, 0, 0, STEPS, 3), progress or Silent(), steps)


def seen(pipeline: Pipeline, latents: Latents, form: DecodeRequest | None = None) -> str:
    with torch.no_grad():
        return scene_of(stages.decode(pipeline, latents, Silent(), form=form)).caption


class Cut(Silent):
    """Ends the process's work after some steps, as a crash would."""

    def __init__(self, after: int) -> None:
        self.after = after

    def step(self, done: int, total: int, stage: Any, preview: Any = None) -> None:
        if str(stage) == "sampling" and done == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("weights", ["auto", "int8"])
@pytest.mark.parametrize("offload", MODES)
def test_in_every_offload_mode(acc: Any, offload: str, weights: str) -> None:
    pipeline = opened("acc:0", offload=offload, weights=weights)
    assert seen(pipeline, sampled(pipeline)) == TEXT
    assert accelerator.memory().peak_bytes > 0, "nothing ran on the device"


def test_with_memory_for_some_of_the_weights(acc: Any) -> None:
    """``auto`` goes on with less on the device until it fits."""
    with accelerator.limit(6_000_000):
        pipeline = opened("acc:0")
        assert seen(pipeline, sampled(pipeline)) == TEXT
    assert pipeline.offloader.mode != "none"


@pytest.mark.parametrize("after", range(1, STEPS))
def test_after_a_crash_at_any_step(tmp_path: Path, after: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        sampled(opened(), Cut(after), tmp_path)
    assert list(tmp_path.glob("*")), "nothing was kept"
    pipeline, first = opened(), []

    class Told(Silent):
        def step(self, done: int, total: int, stage: Any, preview: Any = None) -> None:
            first.append(done)

    latents = sampled(pipeline, Told(), tmp_path)
    assert min(step for step in first if step) >= after, "it began anew"
    assert seen(pipeline, latents) == TEXT


@pytest.mark.parametrize("method", ["full", "streaming", "cpu", "auto"])
def test_recovered_and_decoded_in_every_form(tmp_path: Path, method: str) -> None:
    assert recovery.save(tmp_path, sampled(opened()), print)
    pipeline = opened()
    latents = convert.from_core(pipeline, recovery.load(tmp_path, "newest", print), print)
    assert seen(pipeline, latents, DecodeRequest(method)) == TEXT
