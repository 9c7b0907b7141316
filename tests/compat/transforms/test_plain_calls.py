"""Calls that drivers get wrong reach them in forms that they get right; a device that has each fault shows it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from anygpu.compat.device.quirks import DevicePolicy, policy_for
from anygpu.compat.memory.offloader import PINNED
from anygpu.compat.transforms import guard
from anygpu.compat.transforms.plain_calls import plain_calls
from anygpu.pipelines import stages
from anygpu.pipelines.base import Latents, Silent
from anygpu.pipelines.load import reading
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.vae.plan import DecodeRequest
from simulated import accelerator, profiles
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode


@contextmanager
def wrong_above(operators: str, rows: int) -> Iterator[None]:
    """Results of more than so many rows lose the others."""

    def after(op: str, arguments: list, results: list) -> None:
        if results[0].ndim and len(results[0]) > rows:
            results[0][rows:].zero_()

    with accelerator.hook(operators, after=after):
        yield


def test_rows_are_multiplied_few_at_a_time(acc: torch.device) -> None:
    assert policy_for(profiles.facts_of("gfx1201")).product_rows == 2**19
    layer, x = nn.Linear(16, 8).requires_grad_(False), torch.randn(2, 150, 16)
    exact, there = layer(x), nn.Linear(16, 8).requires_grad_(False)
    there.load_state_dict(layer.state_dict())
    there, calls = there.to(acc), plain_calls(DevicePolicy(product_rows=100))
    assert calls is not None and plain_calls(DevicePolicy()) is None
    with wrong_above("aten::addmm", 100):
        assert not torch.equal(there(x.to(acc)).cpu(), exact), "the fault is there"
        with calls:
            torch.testing.assert_close(there(x.to(acc)).cpu(), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_norm_of_many_rows_is_not_torchs_own(acc: torch.device, dtype: torch.dtype) -> None:
    assert policy_for(profiles.facts_of("mps-like")).norm_rows == 2**20
    x, weight, calls = (
        torch.randn(3, 50, 16).to(dtype),
        torch.rand(16).to(dtype),
        plain_calls(DevicePolicy(norm_rows=100)),
    )
    exact = functional.rms_norm(x.float(), (16,), weight.float(), 1e-6).to(dtype)
    asked: list[int] = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            asked.extend([len(args[0])] * (function in (functional.rms_norm, Tensor.float)))
            return function(*args, **(kwargs or {}))

    with Seen(), calls:
        found = functional.rms_norm(x.to(acc), (16,), weight.to(acc), 1e-6).cpu()
        few = functional.rms_norm(x[:1].to(acc), (16,), weight.to(acc), 1e-6).cpu()
    assert asked == [3, 1], "many rows are taken to fp32; few get torch's own norm, without a copy"
    torch.testing.assert_close(found, exact)
    torch.testing.assert_close(few, exact[:1])
    with calls, torch.no_grad():
        assert torch.equal(functional.rms_norm(x, (16,)), functional.rms_norm(x, (16,), None, None))
        small = x / 512  # beside which an eps counts: torch's own is that of fp32
        found = functional.rms_norm(small, (16,))
    torch.testing.assert_close(found, functional.rms_norm(small, (16,)))


def test_operands_that_a_device_reads_wrongly_are_made_plain() -> None:
    """What reaches torch is looked at: its own calls get no other layout, and more than two axes never."""
    policy = policy_for(profiles.facts_of("mps-like"))
    assert policy.plain_operands
    calls, seen = plain_calls(policy), list[tuple[str, tuple[Tensor, ...]]]()
    assert calls is not None

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append((function.overloadpacket.__name__, args))
            return function(*args, **(kwargs or {}))

    left, right = torch.randn(16, 12), torch.randn(16, 8)
    x, weight = torch.randn(1, 6, 6, 8).permute(0, 3, 1, 2)[:, :4], torch.randn(3, 3, 5, 4).permute(2, 3, 0, 1)
    with torch.no_grad(), calls, Seen():
        product = left.T @ right
        turned = functional.linear(torch.randn(2, 3, 4, 16).transpose(1, 2), torch.randn(8, 16), torch.randn(8))
        picture = functional.conv2d(x, weight, padding=1)
    torch.testing.assert_close(product, left.T.matmul(right))
    torch.testing.assert_close(picture, functional.conv2d(x, weight, padding=1))
    assert turned.shape == (2, 4, 3, 8)
    of = {name: args for name, args in seen if name in ("mm", "addmm", "convolution")}
    assert of["mm"][0].is_contiguous() and of["addmm"][1].is_contiguous() and of["addmm"][1].ndim == 2
    assert all(each.is_contiguous() for each in of["convolution"][:2])


def test_a_streamed_decode_computes_by_these_calls(acc, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No forward of the decoder runs there."""
    monkeypatch.setattr(guard, "policy_for", lambda facts: DevicePolicy(product_rows=8))
    samples = torch.randn(1, 16, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    latents, frames = Latents(samples, "hunyuan_video", "text", 5, 32, 32, 24.0, 0), list[Tensor]()
    for device in ("cpu", acc):
        pipeline = load(LoadRequest(tiny.build("hunyuan_video", tiny_folder), precision="fp32", device=device))
        with wrong_above("aten::addmm", 8), torch.no_grad():
            frames.append(stages.decode(pipeline, latents, Silent(), form=DecodeRequest("streaming", tile=16)))
    torch.testing.assert_close(frames[1], frames[0], rtol=1e-3, atol=1e-3)


def test_no_memory_is_locked_where_kernels_read_it_wrongly(
    acc: torch.device, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "locks_host_memory", lambda device: True)
    locked = {}
    for name in ("gfx1151", "gfx1201"):
        facts = replace(profiles.facts_of(name, acc), unified=False)
        pipeline = load(LoadRequest(tiny.build("ltx", tiny_folder), precision="fp32", device=facts))
        locked[name] = pipeline.offloader.options.host_weights.of(PINNED)
    assert locked == {"gfx1151": (), "gfx1201": ("transformer",)}
