"""Devices that are less kind: one memory for host and device, no set_data, a largest buffer, shortage in other words,
and streams that belong to the current device."""

import gc
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.device.facts import DeviceFacts, device_fault, facts_for
from anygpu.compat.device.failures import is_shortage
from anygpu.compat.errors import parts_of
from anygpu.compat.memory.offloader import OffloadOptions
from anygpu.compat.memory.parts import Parts
from anygpu.compat.memory.standalone import StandaloneOffloader
from anygpu.compat.memory.transfer import set_data
from anygpu.compat.transforms import attention, attention_kernels
from anygpu.pipelines import stages
from anygpu.pipelines.base import PromptRequest, SampleSettings, Silent
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from hostile.words import MESSAGES
from torch import nn
from torch.nn import functional

from simulated import accelerator
from simulated.test_families import MODES, ROUNDING, SMALL, loaded_for, rendered

MEBIBYTE = 1024**2


def same(result: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=ROUNDING)


# ---- set_data is refused, as behind torch_xla ---------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("offload", MODES)
@pytest.mark.parametrize("name", SMALL)
def test_weights_reach_a_device_that_refuses_set_data(acc, tiny_folder, on_host, name, offload):
    with accelerator.without_set_data():
        parameter = nn.Parameter(torch.ones(2), requires_grad=False)
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            parameter.data = torch.ones(2, device=acc)
        pipeline = loaded_for(SMALL[name], tiny_folder, "acc:0", offload)
        for _ in range(2):
            same(rendered(pipeline, SMALL[name]), on_host(name))
        held = {id(tensor) for part in pipeline.parts.values() for tensor in part.parameters()}
        for part in pipeline.parts:
            pipeline.offloader.release(part)
    assert held == {id(tensor) for part in pipeline.parts.values() for tensor in part.parameters()}
    assert accelerator.memory().peak_bytes > 0
    del pipeline
    gc.collect()
    assert accelerator.memory().allocated_bytes == 0


def test_a_parameter_stays_the_object_that_others_hold(acc):
    shared = nn.Parameter(torch.arange(4.0), requires_grad=False)
    shared.note = "kept"
    table = torch.arange(3)
    with accelerator.without_set_data():
        for tensor in (shared, table):
            values = tensor.clone()
            for place in (acc, torch.device("cpu"), acc):
                set_data(tensor, tensor.data.to(place))
                assert tensor.device == place and torch.equal(tensor.cpu(), values)
    assert type(shared) is nn.Parameter and shared.note == "kept" and not shared.requires_grad
    assert type(table) is torch.Tensor


# ---- host and device share one memory -----------------------------------------------------------------------------


def unified(device: torch.device) -> DeviceFacts:
    return replace(facts_for(device), unified=True, total_bytes=64 << 30)


class Both(Silent):
    """The most bytes that host and device held together while parts moved."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    def step(self, done: int, total: int, stage: Any, preview: Any = None) -> None:
        if stage.name == "moving":
            self.peak_bytes = max(self.peak_bytes, accelerator.host_bytes() + accelerator.memory().allocated_bytes)


@pytest.mark.full
@pytest.mark.parametrize("offload", ["none", "model"])
def test_weights_have_no_second_copy_where_memory_is_shared(acc, offload):
    weights = 16 * MEBIBYTE
    part = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).requires_grad_(False)
    values = [layer.weight.clone() for layer in part]
    peaks = {}
    for shared in (False, True):
        parts = Parts({"transformer": lambda _progress: part})
        kept = replace(OffloadOptions().host_weights, shared=shared)
        own = StandaloneOffloader(parts, acc, offload, OffloadOptions(host_weights=kept))
        before, progress = accelerator.host_bytes() - weights, Both()
        for _ in range(2):
            with own.hold("transformer", 0, progress):
                assert all(layer.weight.device == acc for layer in part)
                now = accelerator.host_bytes() - before + accelerator.memory().allocated_bytes
                assert (now >= 2 * weights) == (offload == "model" and not shared)
            own.release("transformer")
            assert all(torch.equal(layer.weight, value) for layer, value in zip(part, values, strict=True))
        peaks[shared] = progress.peak_bytes - before
    assert peaks[True] <= weights + 8 * MEBIBYTE, "one tensor at a time is on both sides"
    assert peaks[False] >= 2 * weights - 4 * MEBIBYTE, "the count sees no second copy at all"


def test_a_cancel_while_shared_memory_moves_leaves_everything_on_the_host(acc, recorded):
    part = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).requires_grad_(False)
    values = [tensor.clone() for tensor in part.parameters()]
    kept = replace(OffloadOptions().host_weights, shared=True)
    own = StandaloneOffloader(Parts({"vae": lambda _progress: part}), acc, "none", OffloadOptions(host_weights=kept))
    for after in (1, 2 * MEBIBYTE):
        with pytest.raises(recorded.Cancelled), own.hold("vae", 0, recorded(lambda done, _, after=after: done > after)):
            pass
        assert all(torch.equal(tensor, value) for tensor, value in zip(part.parameters(), values, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("offload", MODES)
@pytest.mark.parametrize("name", SMALL)
def test_shared_memory_gives_the_same_video(acc, tiny_folder, on_host, name, offload):
    pipeline = loaded_for(SMALL[name], tiny_folder, unified(acc), offload)
    assert pipeline.offloader.options.host_weights.shared
    for _ in range(2):
        same(rendered(pipeline, SMALL[name]), on_host(name))


# ---- a largest buffer ---------------------------------------------------------------------------------------------

CAP = 3 * MEBIBYTE
DECODE = """
import sys
sys.path.insert(0, {tests!r})
import torch
from dataclasses import replace
from pathlib import Path
from anygpu.compat.memory import transfer
from anygpu.pipelines import stages
from anygpu.pipelines.base import Silent
from anygpu.pipelines.vae import plan
from anygpu.compat.device.quirks import policy_for
from simulated import accelerator, profiles
from simulated.test_vae_policy import latents_for, loaded_on
torch.set_num_threads(1)
transfer.STAGING_BYTES = {cap} // 2  # as small beside this cap as 16 MB beside 4 GB
apple = profiles.facts_of("mps-like")
assert policy_for(apple).allocation_bytes == 4 << 30
plan.policy_for = lambda facts: replace(policy_for(apple), allocation_bytes={cap})
with accelerator.fresh() as device, accelerator.buffer_cap({cap}, ends_process=True):
    pipeline = loaded_on(replace(apple, device=device), "hunyuan_video", Path({folder!r}), dtype=torch.float32)
    frames = stages.decode(pipeline, latents_for(pipeline, side=128), Silent(), {method!r})
    print("finite", bool(frames.isfinite().all()))
"""


@pytest.mark.full
@pytest.mark.parametrize(("method", "ending"), [("auto", (0, "finite True")), ("full", (-6, ""))])
def test_no_buffer_reaches_the_size_that_ends_a_process_on_apple(acc, tiny_folder, method, ending):
    tests = str(Path(__file__).resolve().parents[1])
    program = DECODE.format(tests=tests, folder=str(tiny_folder), cap=CAP, method=method)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == ending, done.stderr[-800:]


def test_a_buffer_that_is_refused_is_shortage(acc):
    with accelerator.buffer_cap(MEBIBYTE):
        torch.zeros(1000, device=acc)
        with pytest.raises(RuntimeError, match=r"Invalid buffer size: 4.00 MiB") as caught:
            torch.zeros(MEBIBYTE, device=acc)
    assert is_shortage(caught.value)


# ---- shortage in each back end's words ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ltx(tiny_folder):
    """A pipeline by whole parts, its prompt, and the latents of a run that nothing disturbs."""
    if reason := accelerator.reason():
        pytest.skip(reason)
    with accelerator.fresh():
        pipeline = load(LoadRequest(tiny.build("ltx", tiny_folder), precision="fp32", offload="none", device="acc:0"))
        prompt = stages.encode_prompt(pipeline, PromptRequest("a red fox", ""), Silent())
        return prompt, stages.sample(pipeline, prompt, None, SampleSettings(64, 64, 9, steps=2, seed=3), Silent())


@pytest.mark.full
@pytest.mark.parametrize(
    "message", [pytest.param(text, marks=[pytest.mark.full] * (index % 12 > 0)) for index, text in enumerate(MESSAGES)]
)
def test_sampling_goes_on_after_shortage_in_any_words(acc, tiny_folder, ltx, recorded, message):
    prompt, expected = ltx
    pipeline = load(LoadRequest(tiny.build("ltx", tiny_folder), precision="fp32", offload="none", device="acc:0"))
    progress, settings = recorded(), SampleSettings(64, 64, 9, steps=2, seed=3)
    with accelerator.shortage_called(message), accelerator.refusal(60):
        latents = stages.sample(pipeline, prompt, None, settings, progress)
    assert accelerator.memory().refusals == 1, "nothing ran out"
    assert any("ran out of memory" in line for line in progress.said)
    torch.testing.assert_close(latents.samples, expected.samples, atol=ROUNDING, rtol=ROUNDING)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_full_device_is_not_gone(acc, message):
    with accelerator.shortage_called(message), accelerator.refusal(1):
        assert not device_fault(acc)
    assert accelerator.memory().refusals == 1, "nothing ran out"


def test_a_load_on_a_full_device_says_that_it_is_full(acc, tiny_folder):
    with accelerator.limit(3), pytest.raises(torch.OutOfMemoryError) as caught:
        loaded_for(SMALL["ltx"], tiny_folder, "acc:0")
    told = parts_of(str(caught.value))
    assert told["found"] == "no free memory on acc:0" and "Close other programs" in told["fix"]


def test_a_quiet_load_asks_nothing_of_a_device_which_may_be_in_a_run(acc, tiny_folder, tmp_path):
    facts = facts_for(acc)
    for quiet in (False, True):
        accelerator.reset_traffic()
        loaded_for(SMALL["ltx"], tiny_folder, facts, state=tmp_path / str(quiet), quiet=quiet)
        assert quiet is not bool(accelerator.traffic().to_host_copies)


# ---- the current device -------------------------------------------------------------------------------------------


class Streams(nn.Linear):
    """A layer that waits as ComfyUI's streamed weights do: the current stream, of whichever device, for another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As usual."""
        offload = torch.acc.Stream(x.device)
        torch.acc.current_stream().wait_stream(offload)
        return super().forward(x)


def test_the_device_that_computes_is_the_one_that_waits(acc):
    part = Streams(4, 4).requires_grad_(False)
    places = {"transformer": torch.device("acc", 1)}
    own = StandaloneOffloader(
        Parts({"transformer": lambda _progress: part}), acc, "model", OffloadOptions(devices=places)
    )
    accelerator.take_waits()
    part.to("acc:1")(torch.ones(1, 4, device="acc:1"))
    assert accelerator.take_waits() == [(0, 1)], "nobody made its device the current one: the wrong one waits"
    part.to("cpu")
    with own.hold("transformer") as module:
        assert torch.accelerator.current_device_index() == 1
        module(torch.ones(1, 4, device="acc:1"))
    assert accelerator.take_waits() == [(1, 1)]
    assert torch.accelerator.current_device_index() == 0
    with pytest.raises(KeyError), own.hold("transformer"):
        raise KeyError
    assert torch.accelerator.current_device_index() == 0


def test_a_kernel_is_tried_and_timed_on_the_current_device_which_it_may_not_move(acc, monkeypatch):
    def careless(*operands):  # as SageAttention does
        seen.append(torch.accelerator.current_device_index())
        torch.accelerator.set_device_index(1)
        return functional.scaled_dot_product_attention(*operands)

    seen, facts = [], facts_for(torch.device("acc", 1))
    monkeypatch.setitem(attention_kernels.EXPLICIT, "native_flash", careless)
    monkeypatch.setattr(attention, "TOKENS", 64)
    attention.kernel_times(facts, torch.float32, 16)
    assert {*seen} == {1} and len(seen) > 2 and torch.accelerator.current_device_index() == 0
