"""The references against what diffusers computes, and against their own promises; no Triton here."""

from typing import Any

import pytest
import torch
from anygpu.kernels import activation, group_norm, norm, residual, rope, self_tests, terms
from anygpu.kernels.library import DTYPES, REFERENCE, KernelError
from anygpu.kernels.terms import LAYER, RMS, Gate, GroupNorm, Modulation, Norm, Pair, Tables
from torch import Tensor
from torch.nn import functional

FP32 = torch.float32


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def near(found: Tensor, expected: Tensor) -> None:
    """fp32 sums of at most 64 terms in another order."""
    torch.testing.assert_close(found, expected, rtol=8 * torch.finfo(FP32).eps, atol=8 * torch.finfo(FP32).eps)


def test_norms_equal_those_of_diffusers_and_torch() -> None:
    from diffusers.models.normalization import MochiRMSNorm, RMSNorm

    x, weight = some(2, 5, 48), some(48, seed=1)
    for module in (RMSNorm(48, 1e-6), MochiRMSNorm(48, 1e-6), torch.nn.RMSNorm(48, 1e-6)):
        module.weight.data.copy_(weight)
        near(norm.normalized(x, Norm(RMS, 1e-6, weight)), module(x))
    near(norm.normalized(x, Norm(RMS, 1e-6)), RMSNorm(48, 1e-6, elementwise_affine=False)(x))
    near(norm.normalized(x, Norm(LAYER, 1e-6, weight, x[0, 0])), functional.layer_norm(x, (48,), weight, x[0, 0], 1e-6))


def test_modulation_reads_rows_chunks_and_the_first_tokens() -> None:
    x, rows = some(2, 5, 8), some(2, 2, 3, 8, seed=1).unbind(2)
    plain = norm.normalized(x, Norm(LAYER, 1e-6))
    near(norm.normalized(x, Norm(LAYER, 1e-6), Modulation(rows[0][:, :1])), plain * (1 + rows[0][:, :1]))
    found = norm.normalized(x, Norm(LAYER, 1e-6), Modulation(rows[0], rows[1], split=2))
    near(found[:, :2], plain[:, :2] * (1 + rows[0][:, :1]) + rows[1][:, :1])
    near(found[:, 2:], plain[:, 2:] * (1 + rows[0][:, 1:]) + rows[1][:, 1:])


def test_gated_sum_equals_eager_bit_for_bit_in_fp32_and_is_rounded_once_below() -> None:
    x, branch, gate = some(2, 5, 16), some(2, 5, 16, seed=1), some(2, 1, 16, seed=2)
    assert torch.equal(residual.gated_residual(x, branch, Gate(gate)), x + branch * gate)
    for dtype in (torch.float16, torch.bfloat16):
        narrow = [t.to(dtype) for t in (x, branch, gate)]
        exact = narrow[0].double() + narrow[1].double() * narrow[2].double()
        assert torch.equal(residual.gated_residual(narrow[0], narrow[1], Gate(narrow[2])), exact.float().to(dtype))


def test_mochis_branch_is_normed_before_its_tanh_gate() -> None:
    from diffusers.models.transformers.transformer_mochi import MochiModulatedRMSNorm

    x, branch, gate = some(2, 5, 16), some(2, 5, 16, seed=1), some(2, 16, seed=2)
    expected = x + MochiModulatedRMSNorm(1e-6)(branch, torch.tanh(gate).unsqueeze(1))
    near(residual.gated_residual(x, branch, Gate(gate.unsqueeze(1), True, 1e-6)), expected)


def test_residual_norm_is_its_two_halves() -> None:
    x, branch, gate = (t.bfloat16() for t in (some(2, 5, 16), some(2, 5, 16, seed=1), some(2, 1, 16, seed=2)))
    new, normed = residual.residual_norm(x, branch, Gate(gate), Norm(RMS, 1e-6), out_dtype=torch.float16)
    assert torch.equal(new, residual.gated_residual(x, branch, Gate(gate)))
    assert torch.equal(normed, norm.normalized(new, Norm(RMS, 1e-6), out_dtype=torch.float16))


def test_rotation_equals_diffusers_of_ltx_hunyuan_and_mochi() -> None:
    from diffusers.models.embeddings import apply_rotary_emb
    from diffusers.models.transformers.transformer_ltx import apply_rotary_emb as ltx

    q, k, weight = some(2, 6, 3, 8), some(2, 6, 3, 8, seed=1), some(8, seed=2)
    angle = some(6, 4, seed=3).repeat_interleave(2, -1)
    half = Tables(angle.cos()[:, None, ::2], angle.sin()[:, None, ::2])
    found = rope.qk_norm_rope(Pair(q, k, weight, weight), half, 1e-6)
    for got, x in zip(found, (q, k), strict=True):
        near(
            got,
            apply_rotary_emb(functional.rms_norm(x, (8,), weight, 1e-6), (angle.cos(), angle.sin()), sequence_dim=1),
        )
    flat, row = q.flatten(2), some(24, seed=4)
    angle = some(6, 12, seed=5).repeat_interleave(2, -1).expand(2, 6, 24)
    half = Tables(angle.cos()[0, :, ::2], angle.sin()[0, :, ::2])
    found = rope.qk_norm_rope(Pair(flat, flat, row, row), half, 1e-5)
    near(found[0], ltx(functional.rms_norm(flat, (24,), row, 1e-5), (angle.cos(), angle.sin())))


def test_text_follows_and_tokens_past_the_tables_are_not_turned() -> None:
    q, text = some(1, 6, 2, 8), some(1, 3, 2, 8, seed=1)
    angle = some(4, 1, 4, seed=2)
    found, _ = rope.qk_norm_rope(Pair(q, q), Tables(angle.cos(), angle.sin()), 1e-6, Pair(text, text))
    assert found.shape == (1, 9, 2, 8)
    near(found[:, 4:6], functional.rms_norm(q[:, 4:], (8,), None, 1e-6))
    near(found[:, 6:], functional.rms_norm(text, (8,), None, 1e-6))
    rotated = functional.rms_norm(q[:, :4], (8,), None, 1e-6).unflatten(-1, (4, 2))
    expected = torch.view_as_complex(rotated) * torch.polar(torch.ones_like(angle), angle)
    near(found[:, :4], torch.view_as_real(expected).flatten(-2))


@pytest.mark.parametrize(
    ("width", "table", "tokens", "said"),
    [(7, 3, 4, "7 wide"), (8, 8, 4, "8 wide for a head of 8; expected 4"), (8, 4, 9, "tables for 9 tokens")],
)
def test_a_width_that_cannot_be_turned_is_refused_by_name(width: int, table: int, tokens: int, said: str) -> None:
    x, tables = some(1, 6, 2, width), Tables(some(tokens, 1, table), some(tokens, 1, table))
    with pytest.raises(KernelError, match=said):
        rope.qk_norm_rope(Pair(x, x), tables, 1e-6)


def test_swiglu_takes_the_halves_of_diffusers() -> None:
    from diffusers.models.activations import SwiGLU

    x, module = some(2, 5, 16), SwiGLU(16, 8)
    module.proj = torch.nn.Identity()
    near(activation.swiglu(x), module(x))
    loud = (x * torch.logspace(-3, 3, 5)[:, None]).half()
    scaled, powers = activation.scaled_swiglu(loud, 128.0)
    rounded = 2**-24 * float(powers.max())
    torch.testing.assert_close(scaled.float() * powers, module(loud.float()), rtol=2**-11, atol=rounded)
    assert (torch.frexp(powers)[0] == 0.5).all() and powers.min() == 1 < powers.max()
    assert (scaled.float().norm(dim=-1) < 128.5).all()


@pytest.mark.parametrize("layout", terms.LAYOUTS)
def test_group_norm_of_hunyuan_and_mochi(layout: str) -> None:
    from diffusers.models.autoencoders.autoencoder_kl_mochi import MochiChunkedGroupNorm3D

    x, weight, bias = some(2, 8, 3, 4, 5), some(8, seed=1), some(8, seed=2)
    pad = (1, 1, 1, 1, 2, 0)
    plain = functional.pad(functional.silu(functional.group_norm(x, 2, weight, bias, 1e-6)), pad, mode="replicate")
    found = group_norm.group_norm_silu_pad(x, GroupNorm(2, 1e-6, weight, bias), pad, layout=layout)
    near(found, plain)
    inner = {"contiguous": 4, "channels_last": 1, "frames_first": 4}[layout]
    assert found.stride(inner) == 1 and (found.stride(2) > found.stride(1)) == (layout != "contiguous")
    module = MochiChunkedGroupNorm3D(8, 2)
    module.norm_layer.weight.data.copy_(weight)
    module.norm_layer.bias.data.copy_(bias)
    frames = GroupNorm(2, module.norm_layer.eps, weight, bias, per_frame=True)
    near(group_norm.group_norm_silu_pad(x, frames, silu=False, layout=layout), module(x))


def test_rms_of_channels_of_ltx_and_hunyuan_15() -> None:
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15RMS_norm
    from diffusers.models.normalization import RMSNorm

    x, rows, weight = some(2, 8, 3, 4, 5), some(2, 2, 8, seed=1), some(8, seed=2)
    normed = RMSNorm(8, 1e-8, elementwise_affine=False)(x.movedim(1, -1)).movedim(-1, 1)
    scale, shift = rows[:, 0, :, None, None, None], rows[:, 1, :, None, None, None]
    expected = functional.silu(normed * (1 + scale) + shift)
    expected = torch.cat([expected[:, :, :1], expected, expected[:, :, -1:]], 2)
    modulation = Modulation(rows[:, 0], rows[:, 1])
    near(group_norm.rms_silu_pad(x, Norm(RMS, 1e-8), modulation, (0, 0, 0, 0, 1, 1)), expected)
    module = HunyuanVideo15RMS_norm(8, images=False)
    module.gamma.data.copy_(weight[:, None, None, None])
    near(group_norm.rms_silu_pad(x, Norm(RMS, 1e-24 / 8, weight), silu=False), module(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides_give_a_contiguous_result_of_the_dtype_asked_for(dtype: torch.dtype) -> None:
    x = some(2, 20, 6).to(dtype).transpose(1, 2)
    how, modulation = Norm(RMS, 1e-6), Modulation(x[:, :1], x[:, 1:2])
    for found, plain in (
        (norm.normalized(x, how, modulation, form=REFERENCE), norm.normalized(x.contiguous(), how, modulation)),
        (residual.gated_residual(x, x, Gate(x)), residual.gated_residual(x.contiguous(), x.contiguous(), Gate(x))),
        (activation.swiglu(x), activation.swiglu(x.contiguous())),
        (rope.qk_norm_rope(Pair(x, x), None, 1e-6)[0], rope.qk_norm_rope(Pair(x.contiguous(), x), None, 1e-6)[0]),
    ):
        assert found.is_contiguous() and found.dtype == dtype
        torch.testing.assert_close(found, plain, rtol=torch.finfo(dtype).eps, atol=8 * torch.finfo(FP32).eps)


def test_a_result_in_fp32_is_held_to_the_bound_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where operands are in fp16: a residual that is off by a fifth of what fp16 may be is wrong."""
    sound = residual.residual_norm

    def off(*terms: Any, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        total, normed = sound(*terms, **how)
        return (total * 1.0001 if total.dtype != normed.dtype else total), normed

    (found,) = self_tests.self_tests(torch.device("cpu"), REFERENCE, ("residual_norm",), (torch.float16,))
    assert found.right and found.bound > 1e-4
    monkeypatch.setattr(residual, "residual_norm", off)
    (found,) = self_tests.self_tests(torch.device("cpu"), REFERENCE, ("residual_norm",), (torch.float16,))
    assert not found.right, str(found)


def test_a_gated_product_is_tried_with_its_powers_in_fp16_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = activation.scaled_swiglu
    monkeypatch.setattr(activation, "scaled_swiglu", lambda *given, **how: tuple(2 * x for x in scaled(*given, **how)))
    found = self_tests.self_tests(torch.device("cpu"), REFERENCE, ("swiglu",))
    assert {each.dtype: each.right for each in found} == {dtype: dtype is not torch.float16 for dtype in DTYPES}
