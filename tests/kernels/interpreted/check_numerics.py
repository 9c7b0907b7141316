"""Every launch, interpreted on the CPU: error against fp64 no larger than eager's, odd shapes, exactness.

Run by ``test_interpreted.py`` in a process of its own, since Triton decides at import whether it interprets.
"""

from collections.abc import Callable

import pytest
import torch
import triton  # noqa: F401 - interpreted only where it was imported before the first launch
from anygpu.kernels import activation, group_norm, norm, residual, rope, terms
from anygpu.kernels.library import DTYPES, TRITON, interpreting
from anygpu.kernels.self_tests import self_tests
from anygpu.kernels.terms import LAYER, RMS, Gate, GroupNorm, Modulation, Norm, Pair, Tables
from torch import Tensor
from torch.nn import functional

FP32, FP16, BF16 = DTYPES
NARROW = (FP16, BF16)


def some(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def doubled(terms: object) -> object:
    """``terms`` with every tensor in fp64."""
    if isinstance(terms, Tensor):
        return terms.double()
    if isinstance(terms, tuple):
        return tuple(doubled(term) for term in terms)
    if hasattr(terms, "__dataclass_fields__"):
        return type(terms)(*(doubled(getattr(terms, name)) for name in terms.__dataclass_fields__))
    return terms


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def test_interprets() -> None:
    assert interpreting()


# ---- eager: what diffusers runs -----------------------------------------------------------------------------


def eager_rms(x: Tensor, eps: float) -> Tensor:
    """diffusers' RMSNorm without a weight."""
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return (x * torch.rsqrt(variance + eps)).to(x.dtype)


def eager_rms_weight(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """diffusers' RMSNorm with a weight."""
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return (x * torch.rsqrt(variance + eps)).to(weight.dtype) * weight


def eager_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """diffusers' rotary embedding with half tables."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(x.dtype)


def cases(dtype: torch.dtype) -> dict[str, tuple[Callable[..., object], Callable[..., object], tuple, Callable]]:
    """By name: the operation, its reference, their terms, and what eager makes of them."""
    width, tokens = 64, 24
    x, branch = some(dtype, 2, tokens, width), some(dtype, 2, tokens, width, seed=1)
    rows = some(dtype, 2, 1, 6, width, seed=2).unbind(2)
    weight = 1 + some(dtype, width, seed=3) / 8
    q, k = some(dtype, 1, tokens, 3, 16, seed=4), some(dtype, 1, tokens, 3, 16, seed=5)
    text = some(dtype, 1, 4, 3, 16, seed=6)
    head = 1 + some(dtype, 16, seed=7) / 8
    angle = some(FP32, tokens, 1, 8, seed=8)
    tables = Tables(angle.cos(), angle.sin())
    clip, channel = some(dtype, 1, 8, 2, 6, 8, seed=9), 1 + some(dtype, 8, seed=10) / 8
    pad = (1, 1, 1, 1, 2, 0)

    def modulated(normed: Tensor) -> Tensor:
        return normed * (1 + rows[0]) + rows[1]

    def mochi() -> Tensor:
        return x + (eager_rms(branch.float(), 1e-6) * torch.tanh(rows[2]).float()).to(dtype)

    def joint(one: Tensor) -> Tensor:
        return torch.cat(
            [eager_turned(eager_rms_weight(one, head, 1e-6), *angles), eager_rms_weight(text, head, 1e-6)], 1
        )

    angles = (angle.cos(), angle.sin())
    layer, rms, modulation = Norm(LAYER, 1e-6), Norm(RMS, 1e-6), Modulation(rows[0], rows[1])
    frames = GroupNorm(2, 1e-6, channel, channel, per_frame=True)

    def eager_frames() -> Tensor:
        found = functional.group_norm(clip.transpose(1, 2).flatten(0, 1), 2, channel, channel, 1e-6)
        found = functional.silu(found.unflatten(0, (1, 2)).transpose(1, 2))
        return functional.pad(found, pad, mode="replicate")

    def eager_channels() -> Tensor:
        found = functional.silu(eager_rms(clip.movedim(1, -1), 1e-8).movedim(-1, 1))
        return functional.pad(found, (0, 0, 0, 0, 1, 1), mode="replicate")

    return {
        "rms": (
            norm.normalized, norm.normalized_reference, (x, rms, modulation), lambda: modulated(eager_rms(x, 1e-6)),
        ),
        "layer": (
            norm.normalized, norm.normalized_reference, (x, Norm(LAYER, 1e-6, weight, weight)),
            lambda: functional.layer_norm(x, (width,), weight, weight, 1e-6),
        ),
        "gated": (
            residual.gated_residual, residual.gated_residual_reference, (x, branch, Gate(rows[2])),
            lambda: x + branch * rows[2],
        ),
        "gated mochi": (
            residual.gated_residual, residual.gated_residual_reference, (x, branch, Gate(rows[2], True, 1e-6)), mochi,
        ),
        "residual_norm": (
            residual.residual_norm, residual.residual_norm_reference, (x, branch, Gate(rows[2]), layer, modulation),
            lambda: (
                x + branch * rows[2],
                modulated(functional.layer_norm(x + branch * rows[2], (width,), None, None, 1e-6)),
            ),
        ),
        "per head": (
            rope.qk_norm_rope, rope.qk_norm_rope_reference,
            (Pair(q, k, head, head), tables, 1e-6, Pair(text, text, head, head)), lambda: (joint(q), joint(k)),
        ),
        "across heads": (
            rope.qk_norm_rope, rope.qk_norm_rope_reference,
            (Pair(x, branch, weight, weight), Tables(*(table[:, 0].repeat(1, 4) for table in angles)), 1e-6),
            lambda: tuple(
                eager_turned(eager_rms_weight(one, weight, 1e-6), *(table[:, 0].repeat(1, 4) for table in angles))
                for one in (x, branch)
            ),
        ),
        "swiglu": (
            activation.swiglu, activation.swiglu_reference, (x,),
            lambda: x.chunk(2, -1)[0] * functional.silu(x.chunk(2, -1)[1]),
        ),
        "group norm of frames": (
            group_norm.group_norm_silu_pad, group_norm.group_norm_silu_pad_reference, (clip, frames, pad), eager_frames,
        ),
        "rms of channels": (
            group_norm.rms_silu_pad, group_norm.rms_silu_pad_reference,
            (clip, Norm(RMS, 1e-8), Modulation(), (0, 0, 0, 0, 1, 1)), eager_channels,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(cases(FP32)))
def test_error_is_not_above_eagers(name: str, dtype: torch.dtype) -> None:
    """16 bits: rounded once, so at most eager's, which also rounds once at best; fp32: sums in another order."""
    call, reference, terms, eager = cases(dtype)[name]
    exact = reference(*doubled(terms))
    found, plain = call(*terms, form=TRITON), eager()
    slack = 1 + 1e-3 if dtype in NARROW else 1.25  # a sum in another order tips one tie in a thousand
    floor = 0.0 if dtype in NARROW else torch.finfo(FP32).eps / 2
    for got, stock, truth in zip(*(t if isinstance(t, tuple) else (t,) for t in (found, plain, exact)), strict=True):
        assert got.dtype == dtype and got.shape == truth.shape
        assert error(got, truth) <= slack * error(stock, truth) + floor


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_trial_is_right(dtype: torch.dtype) -> None:
    """What ``anygpu report --kernels`` and the probe run."""
    from anygpu.kernels import self_tests as module

    found = [trial for trial in self_tests(torch.device("cpu"), TRITON) if trial.dtype == dtype]
    assert [trial.name for trial in found] == [*module._calls(torch.device("cpu"), dtype, module.SHAPES[0])]
    assert all(trial.launched and trial.right for trial in found), [str(trial) for trial in found]


# ---- exactness ----------------------------------------------------------------------------------------------


def test_bf16_is_rounded_to_nearest_even() -> None:
    """The interpreter's own cast cuts off; the helper equals torch on every kind of number."""
    values = some(FP32, 1, 64, 64) * torch.tensor([1e-40, 1e-3, 1.0, 1e38]).repeat(16)
    values[0, 0, :3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    found = residual.gated_residual(values.to(BF16), torch.zeros(1, 64, 64), form=TRITON)
    assert torch.equal(found.isnan(), values.isnan())
    assert torch.equal(found.nan_to_num(7.0), values.to(BF16).nan_to_num(7.0))
    sums = residual.gated_residual(values.to(BF16), values[:, :1].expand(1, 64, 64), form=TRITON)
    expected = (values.to(BF16).float() + values[:, :1]).to(BF16)
    assert torch.equal(sums.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_fp32_residual_equals_eager_bit_for_bit() -> None:
    x, branch, gate = some(FP32, 2, 9, 40), some(FP32, 2, 9, 40, seed=1), some(FP32, 2, 1, 40, seed=2)
    assert torch.equal(residual.gated_residual(x, branch, Gate(gate), form=TRITON), x + branch * gate)


def test_tanh_of_a_gate_is_rounded_in_its_last_two_bits() -> None:
    x = torch.linspace(-1.5, 1.5, 256)[None, None]
    found = residual.gated_residual(torch.zeros_like(x), torch.ones_like(x), Gate(x, tanh=True), form=TRITON)
    exact = x.double().tanh()
    assert bool(((found - exact).abs() <= 3 * torch.finfo(FP32).eps * exact.abs()).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_norm_equals_its_two_halves(dtype: torch.dtype) -> None:
    """The norm reads the residual that was stored."""
    x, branch, rows = some(dtype, 2, 9, 40), some(dtype, 2, 9, 40, seed=1), some(dtype, 2, 1, 3, 40, seed=2).unbind(2)
    how, modulation = Norm(RMS, 1e-6), Modulation(rows[1], rows[2])
    both = residual.residual_norm(x, branch, Gate(rows[0]), how, modulation, form=TRITON)
    first = residual.gated_residual(x, branch, Gate(rows[0]), form=TRITON)
    assert torch.equal(both[0], first)
    assert torch.equal(both[1], norm.normalized(first, how, modulation, form=TRITON))


def test_safe_fp16_reads_an_fp32_residual_and_writes_fp16() -> None:
    x, branch = 1e6 * some(FP32, 1, 6, 40), some(FP16, 1, 6, 40, seed=1)
    new, normed = residual.residual_norm(x, branch, Gate(), Norm(LAYER, 1e-6), out_dtype=FP16, form=TRITON)
    assert new.dtype == FP32 and normed.dtype == FP16 and torch.equal(new, x + branch)
    assert normed.isfinite().all()


# ---- shapes and strides -------------------------------------------------------------------------------------


def same(function: Callable, reference: Callable, *terms: object, **more: object) -> None:
    """The launch on tensors where they lie equals the launch on plain copies, and is near the reference."""
    found = function(*terms, form=TRITON, **more)
    expected = reference(*terms, **more)
    found, expected = (t if isinstance(t, tuple) else (t,) for t in (found, expected))
    for got, wanted in zip(found, expected, strict=True):
        assert got.stride() == wanted.stride() and got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=8 * torch.finfo(FP32).eps, atol=8 * torch.finfo(FP32).eps)


AWKWARD = {
    "transposed": lambda: some(FP32, 2, 20, 6).transpose(1, 2),
    "every other": lambda: some(FP32, 2, 6, 40)[..., ::2],
    "a slice": lambda: some(FP32, 2, 9, 60)[:, 2:8, 20:40],
    "expanded batch": lambda: some(FP32, 1, 6, 20).expand(2, 6, 20),
    "expanded features": lambda: some(FP32, 2, 6, 1).expand(2, 6, 20),
    "empty": lambda: some(FP32, 2, 0, 20),
    "no batch": lambda: some(FP32, 0, 6, 20),
}


@pytest.mark.parametrize("name", list(AWKWARD))
def test_strides_and_sizes(name: str) -> None:
    x = AWKWARD[name]()
    rows = some(FP32, x.shape[0], 1, 3, 20, seed=2).unbind(2)
    modulation = Modulation(rows[0], rows[1])
    same(norm.normalized, norm.normalized_reference, x, Norm(RMS, 1e-6), modulation)
    same(residual.gated_residual, residual.gated_residual_reference, x, x, Gate(rows[2]))
    same(residual.residual_norm, residual.residual_norm_reference, x, x, Gate(rows[2]), Norm(LAYER, 1e-6), modulation)
    same(activation.swiglu, activation.swiglu_reference, x)
    same(rope.qk_norm_rope, rope.qk_norm_rope_reference, Pair(x, x), None, 1e-6)


def test_more_and_fewer_dimensions() -> None:
    for x in (some(FP32, 2, 3, 4, 20), some(FP32, 7, 20), some(FP32, 20)):
        same(norm.normalized, norm.normalized_reference, x, Norm(RMS, 1e-6, some(FP32, 20, seed=1)))
        same(activation.swiglu, activation.swiglu_reference, x)


@pytest.mark.parametrize("per_token", [False, True])
def test_modulation_of_each_token_and_of_the_first_tokens(per_token: bool) -> None:
    x, count = some(FP32, 2, 7, 20), 7 if per_token else 2
    rows = some(FP32, 2, count, 3, 20, seed=2).unbind(2)
    split = 0 if per_token else 3
    factor = some(FP32, 2, 7, 2, seed=3)[..., :1]
    modulation, gate = Modulation(rows[0], rows[1], split), Gate(rows[2], split=split, factor=factor)
    same(norm.normalized, norm.normalized_reference, x, Norm(LAYER, 1e-6), modulation)
    same(residual.residual_norm, residual.residual_norm_reference, x, x, gate, Norm(RMS, 1e-6), modulation)
    same(residual.gated_residual, residual.gated_residual_reference, x, x, gate)


def test_tables_shared_per_head_and_per_sample() -> None:
    """HunyuanVideo's tables are for all heads, Mochi's for each, LTX-Video's may be for each sample."""
    q, k = some(FP32, 2, 6, 3, 12), some(FP32, 2, 6, 3, 12, seed=1).transpose(1, 2).contiguous().transpose(1, 2)
    for shape in ((6, 1, 6), (6, 3, 6), (2, 6, 3, 6), (1, 6, 1, 6), (4, 1, 6)):
        angle = some(FP32, *shape, seed=2)
        same(rope.qk_norm_rope, rope.qk_norm_rope_reference, Pair(q, k), Tables(angle.cos(), angle.sin()), 1e-6)
    flat = q.flatten(2)
    for shape in ((6, 18), (2, 6, 18), (5, 18)):
        angle = some(FP32, *shape, seed=2)
        same(rope.qk_norm_rope, rope.qk_norm_rope_reference, Pair(flat, flat), Tables(angle.cos(), angle.sin()), 1e-6)


def test_keys_of_another_length_and_text_without_weights() -> None:
    same(rope.qk_norm_rope, rope.qk_norm_rope_reference, Pair(some(FP32, 2, 9, 20), some(FP32, 2, 4, 20)), None, 1e-5)
    angle = some(FP32, 9, 1, 10)
    pair, text = Pair(*some(FP32, 2, 1, 9, 2, 20, seed=1)), Pair(*some(FP32, 2, 1, 4, 2, 20, seed=2))
    same(rope.qk_norm_rope, rope.qk_norm_rope_reference, pair, Tables(angle.cos(), angle.sin()), 1e-6, text)


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last_3d),
    "neither": lambda x: x.transpose(3, 4).contiguous().transpose(3, 4),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("wanted", terms.LAYOUTS)
def test_layouts_of_clips(layout: str, wanted: str) -> None:
    x, channel = LAYOUTS[layout](some(FP32, 2, 6, 2, 2, 3)), some(FP32, 6, seed=1)
    same(
        group_norm.group_norm_silu_pad, group_norm.group_norm_silu_pad_reference,
        x, GroupNorm(2, 1e-6, channel, channel), (1, 1, 1, 1, 2, 0), layout=wanted,
    )  # fmt: skip
    same(
        group_norm.rms_silu_pad, group_norm.rms_silu_pad_reference,
        x, Norm(RMS, 1e-8, channel), Modulation(some(FP32, 2, 6), some(FP32, 2, 6)), (0, 2, 0, 1, 1, 1),
        layout=wanted,
    )  # fmt: skip


def test_group_norm_far_from_zero() -> None:
    """Mean 200, deviation 1, of every second frame: a mean of squares minus a squared mean would lose six digits."""
    x = (200 + some(FP32, 1, 4, 4, 8, 16))[:, :, ::2]
    how, pad = GroupNorm(2, 1e-6, torch.tensor((1.0, 0.5, 0.25, 1.0))), (1, 1, 1, 1, 2, 0)
    found = group_norm.group_norm_silu_pad(x, how, pad, silu=False, form=TRITON)
    exact = group_norm.group_norm_silu_pad_reference(x.double(), doubled(how), pad, silu=False)
    # (x - mean) is off by what the mean is off: at most one last place of 200, which is 2**-16.
    assert float((found - exact).abs().max()) < 2**-16
    assert not group_norm.group_norm_silu_pad(torch.full_like(x, 3.0), how, form=TRITON).any(), "what has no variance"


def test_group_norm_in_several_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    from anygpu.kernels._triton import group_norm as launches

    monkeypatch.setattr(launches, "STRIP", 16)
    monkeypatch.setattr(launches, "STRIPS", 2)
    x = some(FP32, 1, 4, 3, 5, 9)
    for how in (GroupNorm(2, 1e-6), GroupNorm(2, 1e-6, per_frame=True)):
        same(group_norm.group_norm_silu_pad, group_norm.group_norm_silu_pad_reference, x, how)
