"""Fused decoders of VAEs: every site of every published one, never further from fp64 than upstream, and put back."""

import copy
import functools
from typing import Any

import diffusers
import pytest
import torch
from anygpu.compat.transforms import fused_vae
from anygpu.compat.transforms.conv3d import swap_conv3d
from anygpu.compat.transforms.conv3d_methods import Conv3dMethod
from anygpu.compat.transforms.fused_attention import FORM
from anygpu.compat.transforms.fused_vae import FUSION_POINT, FUSIONS, fuse_vae
from anygpu.kernels import group_norm
from anygpu.pipelines.registry import FAMILIES
from compat.transforms.test_fused import on_cuda
from convolutions import always
from tiny import parts
from tiny.weights import randomise
from torch import nn

REFERENCE = "reference"
CLASSES = {
    "ltx": "AutoencoderKLLTXVideo",
    "hunyuan_video": "AutoencoderKLHunyuanVideo",
    "hunyuan_video_15": "AutoencoderKLHunyuanVideo15",
    "mochi": "AutoencoderKLMochi",
}
SIZES = {
    "ltx_vae": (1, 128, 2, 2, 2), "ltx_vae_095": (1, 128, 2, 2, 2), "hunyuan_vae": (1, 16, 2, 3, 3),
    "hunyuan15_vae": (1, 32, 2, 2, 2), "mochi_vae": (1, 12, 2, 3, 3),
}  # fmt: skip
OPERATIONS = ("group_norm_silu_pad", "rms_silu_pad")


@functools.cache
def made(name: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        vae = getattr(parts, name)()
    randomise(vae, 0)
    return vae.eval().requires_grad_(False)


def tiny(name: str) -> Any:
    return copy.deepcopy(made(name))


def all_but(names: Any, quick: tuple[str, ...]) -> list[Any]:
    """``names`` as parameters, those that are not quick for the full run."""
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.full]) for name in names]


def decoded(vae: Any, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    latents = torch.randn(SIZES[name], generator=torch.Generator().manual_seed(1)).to(dtype)
    time = (torch.tensor([0.05], dtype=dtype),) if name == "ltx_vae_095" else ()
    with torch.no_grad():
        return vae.decode(latents, *time, return_dict=False)[0]


@pytest.mark.full
@pytest.mark.parametrize("family", CLASSES)
def test_every_site_of_a_published_decoder_is_fused(family):
    with torch.device("meta"):
        vae = getattr(diffusers, CLASSES[family])()
    before = {id(p) for p in vae.parameters()}
    found = fuse_vae(vae, REFERENCE)
    points = FAMILIES[family].rewrites.published_vae_fusion_points
    assert dict(found.points) == {FUSION_POINT: points} and not found.left
    assert str(found) == f"{points} of {points} fusion points (reference)"
    assert {id(p) for p in vae.parameters()} == before, "weights were copied"
    norms = [m for n, m in vae.decoder.named_modules() if "norm" in n.lower() and "attentions" not in n]
    leaves = [m for m in norms if type(m).__name__ in ("GroupNorm", "RMSNorm", "HunyuanVideo15RMS_norm")]
    assert len(leaves) == points, "a norm in front of a convolution was forgotten"


@pytest.mark.parametrize("name", all_but(SIZES, ("ltx_vae_095",)))
def test_no_decoder_is_further_from_fp64_than_upstream(name):
    vae = tiny(name)
    truth = decoded(copy.deepcopy(vae).double(), name, torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        model = copy.deepcopy(vae).to(dtype)
        stock = (decoded(model, name, dtype) - truth).norm()
        assert fuse_vae(model, REFERENCE).points
        ours = (decoded(model, name, dtype) - truth).norm()
        # Two draws of as many rounding errors; upstream's fp32 norms limit how exact the truth itself is.
        assert ours <= stock * (1 + truth.numel() ** -0.5 * 4) + torch.finfo(torch.float32).eps * truth.norm(), dtype


@pytest.mark.parametrize("form", [Conv3dMethod.CHANNELS_LAST, Conv3dMethod.FRAMES])
@pytest.mark.parametrize("name", all_but(("ltx_vae", "hunyuan_vae"), ("ltx_vae",)))
def test_the_convolution_gets_the_layout_it_reads(name, form, monkeypatch):
    vae, seen = tiny(name), []
    expected = decoded(vae, name)
    swap_conv3d(vae, always(form))
    fuse_vae(vae, REFERENCE)
    for operation in OPERATIONS:
        whole = getattr(fused_vae, operation)

        def noted(*args: Any, whole: Any = whole, **named: Any) -> torch.Tensor:
            seen.append(named["layout"])
            return whole(*args, **named)

        monkeypatch.setattr(fused_vae, operation, noted)
    found = decoded(vae, name)
    assert set(seen) == {"channels_last" if form is Conv3dMethod.CHANNELS_LAST else "frames_first"}
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_restore_gives_back_the_very_objects():
    vae = tiny("mochi_vae")

    def state() -> list[Any]:
        return [(id(m), vars(m).get("forward"), hasattr(m, FORM)) for m in vae.modules()]

    before, stock = state(), decoded(vae, "mochi_vae")
    found = fuse_vae(vae, REFERENCE)
    assert state() != before
    again = fuse_vae(vae, REFERENCE)
    assert not again.points and "its forward has already been replaced" in str(again)
    found.restore()
    assert state() == before and torch.equal(decoded(vae, "mochi_vae"), stock)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda block: setattr(block, "nonlinearity", nn.GELU()), "nonlinearity is a GELU"),
        (lambda block: setattr(block, "norm2", nn.BatchNorm3d(8)), "norm2 is a BatchNorm3d"),
        (lambda block: setattr(block.conv1, "pad_mode", "constant"), "that pads constant"),
        (lambda block: setattr(block.conv2, "__class__", type("Own", (type(block.conv2),), {})), "conv2 is a Own"),
        (lambda block: block.train().dropout.__setattr__("p", 0.5), "it uses dropout"),
    ],
)
def test_what_the_rewrite_was_not_written_for_is_left_with_the_reason(change, reason):
    vae = tiny("hunyuan_vae")
    change(vae.decoder.mid_block.resnets[0])
    found = fuse_vae(vae, REFERENCE)
    assert list(found.left.values()) == [1] and reason in next(iter(found.left)) and found.left_points == 2


def test_a_voxel_of_zeros_stays_zero():
    """HunyuanVideo 1.5 divides by the length of a voxel, but never by less than 1e-12."""
    vae = tiny("hunyuan15_vae")
    norm = vae.decoder.norm_out
    x = torch.zeros(1, norm.gamma.shape[0], 1, 1, 2)
    x[..., 1] = 1e-3
    with fused_vae._norm_terms(norm, x) as terms:
        found = group_norm.rms_silu_pad(x, terms, silu=False)
    torch.testing.assert_close(found, norm(x), rtol=1e-5, atol=0)


def test_noise_is_drawn_as_upstream_draws_it():
    from diffusers.models.autoencoders.autoencoder_kl_ltx import LTXVideoResnetBlock3d

    with torch.random.fork_rng(devices=[]):
        block = LTXVideoResnetBlock3d(8, inject_noise=True, timestep_conditioning=True).eval().requires_grad_(False)
        randomise(block, 0)
        x, time = torch.randn(1, 8, 2, 3, 3), torch.randn(1, 32, 1, 1, 1)
    block.per_channel_scale1.fill_(0.5)
    expected = block(x, time, torch.Generator().manual_seed(5))
    holder = nn.Module()
    holder.decoder = nn.ModuleList([block])
    assert fuse_vae(holder, REFERENCE).points.total() == 2
    torch.testing.assert_close(block(x, time, torch.Generator().manual_seed(5)), expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(block(x, time, torch.Generator().manual_seed(6)), expected)


BLOCKS = [name for name in FUSIONS if "Decoder" not in name]


@pytest.mark.parametrize("name", all_but(BLOCKS, tuple(name for name in BLOCKS if "Mochi" in name)))
def test_a_block_on_a_gpu_is_one_graph_with_an_operation_per_site(name):
    import importlib

    from torch._subclasses.fake_tensor import FakeTensorMode

    torch._dynamo.reset()
    module, _, cls = name.rpartition(".")
    seen: list[Any] = []

    def compiler(graph: Any, _inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    with torch.random.fork_rng(devices=[]):
        block = getattr(importlib.import_module(module), cls)(64).eval()
    with FakeTensorMode(), torch.no_grad():
        on_cuda(block)
        holder = nn.Module()
        holder.decoder = nn.ModuleList([block])
        assert fuse_vae(holder).points.total() == 2
        x = torch.empty(1, 64, 3, 8, 8, dtype=torch.bfloat16, device="cuda")
        torch.compile(block.forward, fullgraph=True, backend=compiler)(x)
    torch._dynamo.reset()
    assert len(seen) == 1, "the graph was broken"
    ours = [str(node.target) for node in seen[0].graph.nodes if "anygpu" in str(node.target)]
    assert len(ours) == 2 and all(any(operation in target for operation in OPERATIONS) for target in ours)
    assert not [n for n in seen[0].graph.nodes if "pad" in str(n.target) and "anygpu" not in str(n.target)]
