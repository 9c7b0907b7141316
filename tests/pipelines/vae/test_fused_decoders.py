"""Fused decoders however a decode is cut: in time, in tiles, layer by layer; and with compiled blocks."""

import copy
from typing import Any

import pytest
import tiny
import torch
from anygpu.compat.transforms import fused_vae
from anygpu.compat.transforms.compile import Compilation, CompileSettings
from anygpu.compat.transforms.fused_vae import fuse_vae
from anygpu.pipelines import stages
from anygpu.pipelines.base import Latents
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.speed import SpeedRequest
from anygpu.pipelines.vae.plan import DecodeMethod
from pipelines.vae.test_forms import CASES, CAUSAL, HOST, close, made, sampled, work_for

assert made, "a fixture"
BY_GROUPS = ("hunyuan_vae", "mochi_vae")  # their streams open the blocks, since the norms see the whole plane
CUTS = {
    "whole": {}, "chunks": {"frames": 2}, "tiles": {"tile": 32}, "stream": {"stream": 16},
    "stream of chunks": {"stream": 16, "frames": 2},
}  # fmt: skip
QUICK = {("mochi_vae", "chunks"), ("ltx_vae", "stream")}
CELLS = [
    pytest.param(name, cut, marks=[] if (name, cut) in QUICK else [pytest.mark.full])
    for name in CASES
    for cut in CUTS
    if "chunks" not in cut or name in CAUSAL
]  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """Borders of the operations that ran."""
    seen: list[Any] = []
    for name in ("group_norm_silu_pad", "rms_silu_pad"):
        whole = getattr(fused_vae, name)

        def noted(x: Any, *rest: Any, whole: Any = whole, **named: Any) -> torch.Tensor:
            seen.append(rest[-1])
            return whole(x, *rest, **named)

        monkeypatch.setattr(fused_vae, name, noted)
    return seen


@pytest.mark.parametrize(("name", "cut"), CELLS)
def test_fused_equals_upstreams_operations_in_every_cut(made, calls, name, cut):
    module, time = copy.deepcopy(made(name)), torch.tensor([0.05]) if name == "ltx_vae_095" else None
    way = (module, HOST, DecodeMethod(torch.float32, **CUTS[cut]), time)
    expected = work_for(name).frames(*way)
    found = fuse_vae(module, "reference")
    close(work_for(name).frames(*way), expected)
    assert bool(calls) == (name not in BY_GROUPS or "stream" not in cut)
    if "chunks" in cut:  # what stands before a chunk is remembered, not replicated
        assert not any(any(pad) for pad in calls)
    found.restore()


@pytest.mark.parametrize("name", sampled(("mochi_vae", "hunyuan_vae", "ltx_vae")))
def test_compiled_blocks_follow_when_a_decode_is_cut(made, name):
    """A graph expects the border from the operation; the frames that are remembered come without one."""
    torch._dynamo.reset()
    module = copy.deepcopy(made(name))
    expected = work_for(name).frames(module, HOST, DecodeMethod(torch.float32))
    fuse_vae(module, "reference")
    compiled = Compilation(CompileSettings(vae=True, backend="eager"))
    compiled.attach(module)
    for cut in ("whole", "chunks", "whole") if name in CAUSAL else ("whole", "stream", "whole"):
        close(work_for(name).frames(module, HOST, DecodeMethod(torch.float32, **CUTS[cut])), expected)
    assert not compiled.failure and compiled.graphs
    torch._dynamo.reset()


def test_the_decode_says_what_was_fused_and_off_is_upstream(tiny_folder, recorded, calls):
    samples = torch.randn(1, 128, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    found = {}
    for kernels in ("off", "auto", "reference"):
        request = LoadRequest(
            tiny.build("ltx", tiny_folder), precision="fp32", device="cpu", speed=SpeedRequest(kernels)
        )
        pipeline, progress = load(request), recorded()
        latents = Latents(samples, "ltx", "text", frames=9, height=64, width=64, fps=24.0, seed=0)
        with torch.no_grad():
            found[kernels] = stages.decode(pipeline, latents, progress)
        said = [line for line in progress.said if line.startswith("VAE kernels")]
        assert said == (["VAE kernels: 13 of 13 fusion points (reference)"] if kernels == "reference" else []), said
        assert bool(calls) == (kernels == "reference")
    assert torch.equal(found["off"], found["auto"])
    close(found["reference"], found["off"])
