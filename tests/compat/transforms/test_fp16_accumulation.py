"""fp16 accumulation: refused where it does nothing, on for sampling alone, and torch's switch is as it was."""

from dataclasses import replace

import pytest
import tiny
import torch
from anygpu.compat.device.facts import facts_for
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.transforms import fp16 as sums
from anygpu.pipelines import stages
from anygpu.pipelines.base import PromptRequest, SampleSettings
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.speed import SpeedRequest

CPU = facts_for("cpu")
CUDA = replace(CPU, backend="cuda")


def switch() -> bool:
    return torch.backends.cuda.matmul.allow_fp16_accumulation


@pytest.mark.parametrize(
    ("facts", "dtype", "reason"),
    [
        (CPU, torch.float16, "cpu does not support it"),
        (replace(CPU, backend="rocm"), torch.float16, "rocm does not support it"),
        (CUDA, torch.bfloat16, "the transformer's products are in bfloat16"),
    ],
)
def test_refused_in_one_line_where_it_does_nothing(facts, dtype, reason):
    with pytest.raises(UnsupportedError, match=f"fp16_accumulation on cpu: {reason}; expected an NVIDIA GPU"):
        sums.require_fp16_sums(facts, dtype)


def test_refused_where_torch_lacks_it(monkeypatch):
    sums.require_fp16_sums(CUDA, torch.float16)
    monkeypatch.setattr(sums, "SUMS_SWITCH", "allow_what_is_not_there")
    with pytest.raises(UnsupportedError, match="has no switch for it"):
        sums.require_fp16_sums(CUDA, torch.float16)


@pytest.mark.parametrize("before", [False, True])
def test_the_switch_comes_back_after_an_error_too(before):
    try:
        torch.backends.cuda.matmul.allow_fp16_accumulation = before
        with pytest.raises(RuntimeError, match="inside"), sums.fp16_sums():
            assert switch()
            raise RuntimeError("inside")
        assert switch() is before
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False


def test_of_two_samplings_in_two_threads_the_last_puts_the_switch_back():
    first, second = sums.fp16_sums(), sums.fp16_sums()
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert switch(), "the second still samples"
    second.__exit__(None, None, None)
    assert not switch()


def test_a_load_refuses_it_and_a_sampling_has_it(tiny_folder, recorded):
    folder = tiny.build("ltx", tiny_folder)
    asked = SpeedRequest(fp16_sums=True)
    with pytest.raises(UnsupportedError, match="fp16_accumulation on cpu"):
        load(LoadRequest(folder, precision="fp32", device="cpu", speed=asked))
    pipeline, seen, progress = load(LoadRequest(folder, precision="fp32", device="cpu")), [], recorded()
    pipeline.plan.speed.request = asked  # as on a GPU that has it
    with torch.no_grad():
        prompt = stages.encode_prompt(pipeline, PromptRequest("a red fox"), progress)
        pipeline.parts.read("transformer").register_forward_hook(lambda *_: seen.append(switch()))
        stages.sample(pipeline, prompt, None, SampleSettings(64, 64, 9, steps=2, seed=3), progress)
    assert seen == [True, True] and not switch()
    assert any("compile off, fp16 accumulation" in line for line in progress.said)
