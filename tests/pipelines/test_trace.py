"""A run of tiny LTX-Video on the CPU, followed call by call: few of our frames and few of our files take part."""

import sys
from pathlib import Path
from typing import Any

import anygpu
import pytest
import tiny
import torch
from anygpu.pipelines import stages
from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest

ROOT = Path(anygpu.__path__[0]).resolve()
MOST_FRAMES = 7  # of ours between stages.sample and the transformer's forward
MOST_FILES = 40  # of ours that run while a model loads, encodes, samples and decodes


class Trace:
    """Files of ours whose code ran, and our frames between ``stages.sample`` and the transformer's forward."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.frames: list[str] = []

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event != "call":
            return
        if name := ours(frame.f_code):
            self.files.add(name)
        elif not self.frames and type(frame.f_locals.get("self")).__name__ == "LTXVideoTransformer3DModel":
            self.frames = list(above(frame)) if frame.f_code.co_name == "forward" else []


def ours(code: Any) -> str:
    """The file of ``code`` under our root; empty for other people's."""
    path = code.co_filename.removeprefix(f"{ROOT}/")
    return "" if path == code.co_filename or path.startswith((".venv", "tests")) else path


def above(frame: Any) -> Any:
    """Our functions above ``frame``, up to ``stages.sample``."""
    while (frame := frame.f_back) is not None:
        name = ours(frame.f_code)
        if name == "pipelines/stages.py" and frame.f_code.co_name == "sample":
            return
        if name:
            yield f"{name}: {frame.f_code.co_name}"


@pytest.fixture(scope="module")
def trace(tiny_folder) -> Trace:
    folder, found, before = tiny.build("ltx", tiny_folder), Trace(), sys.getprofile()
    warm = load(LoadRequest(folder, device="cpu"), Silent())
    for part in warm.parts.readers:  # what is imported for it would take minutes under a profile
        warm.parts.read(part)
    sys.setprofile(found)
    try:
        with torch.no_grad():
            pipeline = load(LoadRequest(folder, device="cpu"), Silent())
            prompt = stages.encode_prompt(pipeline, PromptRequest("a fox", ""), Silent())
            settings = SampleSettings(64, 64, 9, steps=2, seed=1)
            stages.decode(pipeline, stages.sample(pipeline, prompt, None, settings, Silent()), Silent())
    finally:
        sys.setprofile(before)
    return found


def test_few_frames_lie_between_the_stage_and_the_transformer(trace):
    assert 0 < len(trace.frames) <= MOST_FRAMES, trace.frames


def test_few_files_take_part(trace):
    assert 20 < len(trace.files) <= MOST_FILES, "\n".join(sorted(trace.files))
