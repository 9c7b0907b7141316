"""A profile names stages, blocks and operations. Cancels have a process of their own, since tracing is native code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from anygpu.pipelines import stages
from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
from anygpu.pipelines.load.folder import LoadRequest, load
from anygpu.pipelines.speed import Profile, SpeedRequest

STEPS = 2
SETTINGS = SampleSettings(64, 64, 9, steps=STEPS, seed=3, cfg=1.0)
RUN = """
import gc
import sys
from pathlib import Path

import torch
from anygpu.pipelines import stages
from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
from anygpu.pipelines.load.folder import LoadRequest, load
from anygpu.pipelines.speed import Profile, SpeedRequest

model, trace, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
settings = SampleSettings(64, 64, 9, steps=steps, seed=3, cfg=1.0)
speed = SpeedRequest(profile=Profile(trace))
cancelled = []


def profiled(meanwhile):
    pipeline = load(LoadRequest(model, precision="fp32", device="cpu", speed=speed), Silent())
    block = pipeline.parts["transformer"].transformer_blocks[1]
    block.attn2.to_q.register_forward_pre_hook(meanwhile)
    prompt = stages.encode_prompt(pipeline, PromptRequest("a red fox", "blurry"), Silent())
    try:
        stages.sample(pipeline, prompt, None, settings, Silent())
    except KeyboardInterrupt:
        cancelled.append(pipeline)


def cancel(*_):
    raise KeyboardInterrupt


def free(*_):  # what it held of its trace ends in another's
    cancelled.clear()
    gc.collect()


with torch.no_grad():
    for _ in range(2):
        profiled(cancel)
        profiled(free)
print(*sorted(path.name for path in trace.parent.glob("trace-*")))
"""


def names_in(trace: Path) -> list[str]:
    return [event.get("name", "") for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]]


def test_a_profile_names_stages_blocks_and_operations_and_costs_nothing_without(tiny_folder: Path, tmp_path: Path):
    model, profile = tiny.build("ltx", tiny_folder), Profile(tmp_path / "trace.json")
    pipeline = load(LoadRequest(model, precision="fp32", device="cpu", speed=SpeedRequest(profile=profile)))
    with torch.no_grad():
        prompt = stages.encode_prompt(pipeline, PromptRequest("a red fox", "blurry"), Silent())
        stages.sample(pipeline, prompt, None, SETTINGS, Silent())
        written = sorted(tmp_path.iterdir())
        assert [path.name for path in written] == ["trace-encode-prompt-001.json", "trace-sample-001.json"]
        names = names_in(written[-1])
        assert names.count("anygpu stage: sample") == 1
        assert names.count("anygpu block: transformer.transformer_blocks.1") == STEPS
        assert names.count("anygpu op: transformer.transformer_blocks.1.attn2") == STEPS
        assert names.count("aten::addmm") > STEPS
    plain = load(LoadRequest(model, device="cpu"), Silent()).parts["transformer"]
    assert not any(block._forward_pre_hooks or block._forward_hooks for block in plain.transformer_blocks)


@pytest.mark.full
def test_a_cancelled_run_leaves_no_range_that_ends_in_a_later_trace(tiny_folder: Path, tmp_path: Path):
    command = [sys.executable, "-c", RUN, tiny.build("ltx", tiny_folder), tmp_path / "trace.json", str(STEPS)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    traces = done.stdout.split()
    assert traces[0] == "trace-encode-prompt-001.json" and "trace-sample-001.json" in traces
    names = names_in(tmp_path / traces[-1])
    assert names.count("anygpu block: transformer.transformer_blocks.1") == STEPS
