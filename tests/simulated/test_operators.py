"""Every operator gives the CPU's result bit for bit, with the CPU's strides."""

import pytest
import torch
import torch.nn.functional as F

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _on(value, device):
    """`value` with every tensor in it moved to `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [_on(item, device) for item in value] if isinstance(value, list) else value


def _assert_equal_to_cpu(operator, arguments, device):
    expected, found = operator(*arguments), operator(*_on(list(arguments), device))
    pairs = [(expected, found)] if isinstance(expected, torch.Tensor) else list(zip(expected, found, strict=True))
    for host, other in pairs:
        assert other.device == device and other.dtype == host.dtype and other.stride() == host.stride()
        assert torch.equal(other.cpu(), host)


def _random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


QUERY, KEY, VALUE = _random(2, 4, 33, 16), _random(2, 4, 47, 16, seed=1), _random(2, 4, 47, 16, seed=2)
MASK = _random(2, 1, 1, 47, seed=3) > -0.5
VIDEO, KERNEL, BIAS = _random(1, 4, 5, 6, 8), _random(8, 4, 3, 3, 3, seed=1), _random(8, seed=2)
POSITIVE = VIDEO > 0

OPERATORS = {
    "attention": (F.scaled_dot_product_attention, QUERY, KEY, VALUE),
    "attention_masked": (F.scaled_dot_product_attention, QUERY, KEY, VALUE, MASK),
    "attention_biased": (F.scaled_dot_product_attention, QUERY, KEY, VALUE, _random(2, 1, 33, 47)),
    "attention_causal": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), QUERY),
    "attention_grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        *(QUERY, KEY[:, :2], VALUE[:, :2]),
    ),
    "conv1d": (F.conv1d, VIDEO[:, :, 0, 0], KERNEL[:, :, 0, 0], BIAS),
    "conv2d": (F.conv2d, VIDEO[:, :, 0], KERNEL[:, :, 0], BIAS, 1, 1),
    "conv3d": (F.conv3d, VIDEO, KERNEL, BIAS, 2, 1),
    "conv3d_groups": (lambda x, w: F.conv3d(x, w[:, :2], None, 1, 1, 1, 2), VIDEO, KERNEL),
    "conv3d_channels_last": (
        lambda x, w: F.conv3d(x.to(memory_format=torch.channels_last_3d), w, padding="same"),
        *(VIDEO, KERNEL),
    ),
    "conv_transpose3d": (lambda x, w: F.conv_transpose3d(x, w.transpose(0, 1).contiguous(), stride=2), VIDEO, KERNEL),
    "linear": (F.linear, VIDEO, _random(3, 8), _random(3)),
    "linear_without_bias": (F.linear, VIDEO.mT, _random(3, 6)),
    "group_norm": (F.group_norm, VIDEO, 2, _random(4), _random(4)),
    "layer_norm": (F.layer_norm, VIDEO, (8,), _random(8), _random(8)),
    "rms_norm": (F.rms_norm, VIDEO, (8,), _random(8), 1e-6),
    "batch_norm": (F.batch_norm, VIDEO, _random(4), _random(4).square()),
    "instance_norm": (F.instance_norm, VIDEO),
    "replication_pad3d": (lambda x: F.pad(x, (1, 1, 2, 0, 2, 0), mode="replicate"), VIDEO),
    "reflection_pad2d": (lambda x: F.pad(x[0], (1, 1, 1, 1), mode="reflect"), VIDEO),
    "constant_pad": (lambda x: F.pad(x, (1, 2), value=3.0), VIDEO),
    "upsample_nearest3d": (lambda x: F.interpolate(x, scale_factor=2.0), VIDEO),
    "upsample_trilinear3d": (lambda x: F.interpolate(x, scale_factor=2.0, mode="trilinear"), VIDEO),
    "embedding": (F.embedding, torch.tensor([[0, 3], [1, 3]]), _random(4, 8)),
    "silu": (F.silu, VIDEO),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), VIDEO),
    "softmax": (torch.softmax, VIDEO, -1),
    "logsumexp": (torch.logsumexp, VIDEO, -1),
    "sum": (torch.sum, VIDEO),
    "mean": (torch.mean, VIDEO, 2),
    "var": (torch.var, VIDEO, 2),
    "cumsum": (torch.cumsum, VIDEO, 1),
    "vector_norm": (torch.linalg.vector_norm, VIDEO),
    "einsum": (lambda x, w: torch.einsum("bcthw,ocxyz->both", x, w), VIDEO, KERNEL),
    "bmm": (lambda x: torch.bmm(x[0, :, 0], x[0, :, 0].mT), VIDEO),
    "baddbmm": (lambda x: torch.baddbmm(x[0, :, 0, :, :6], x[0, :, 0], x[0, :, 0].mT, alpha=0.5), VIDEO),
    "cat": (lambda x: torch.cat([x, x[:, :2]], 1), VIDEO),
    "stack": (lambda x: torch.stack([x, x], 1), VIDEO),
    "where": (torch.where, POSITIVE, VIDEO, VIDEO * 2),
    "clamp": (torch.clamp, VIDEO, -1, 1),
    "nonzero": (torch.nonzero, POSITIVE),
    "boolean_index": (lambda x, mask: x[mask], VIDEO, POSITIVE),
    "masked_scatter": (lambda x, mask, source: x.masked_scatter(mask, source), VIDEO, POSITIVE, _random(960)),
    "masked_fill": (lambda x, mask: x.masked_fill(mask, 2.0), VIDEO, POSITIVE),
    "index": (lambda x, index: x[:, index], VIDEO, torch.tensor([2, 0])),
    "index_select": (torch.index_select, VIDEO, 1, torch.tensor([2, 0])),
    "gather": (lambda x: torch.gather(x, 1, x.argsort(1)), VIDEO),
    "topk": (torch.topk, VIDEO, 2),
    "sort": (torch.sort, VIDEO),
    "argmax": (torch.argmax, VIDEO, 1),
    "roll": (torch.roll, VIDEO, 1, 2),
    "repeat_interleave": (torch.repeat_interleave, VIDEO, 2, 1),
    "chunks": (lambda x: x.permute(0, 2, 1, 3, 4).reshape(1, 5, -1).unflatten(-1, (4, -1)).chunk(2, -1), VIDEO),
    "foreach": (lambda x: torch._foreach_mul([x, x + 1], 2.0), VIDEO),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_equals_cpu_bit_for_bit(acc, name, dtype):
    operator, *arguments = OPERATORS[name]
    cast = [x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]
    _assert_equal_to_cpu(operator, cast, acc)


FLOAT32_OPERATORS = {  # the CPU has some of these in float32 only
    "avg_pool3d": (F.avg_pool3d, VIDEO, 2),
    "upsample_bicubic2d_antialiased": (
        lambda x: F.interpolate(x[:, :, 0], scale_factor=0.5, mode="bicubic", antialias=True),
        VIDEO,
    ),
    "fft": (torch.fft.fftn, QUERY),
    "complex": (lambda x: torch.view_as_real(torch.view_as_complex(x).conj() * 2), _random(3, 2)),
    "solve": (torch.linalg.solve, torch.eye(3) * 2, _random(3, 2)),
    "unique": (lambda x: torch.unique(x, return_counts=True), torch.tensor([3, 1, 3])),
    "multihead_attention": (
        lambda x: F.multi_head_attention_forward(
            *(x, x, x, 8, 2, _random(24, 8).to(x.device), _random(24).to(x.device), None, None, False, 0.0),
            *(_random(8, 8).to(x.device), _random(8).to(x.device)),
        )[0],
        _random(4, 1, 8),
    ),
}


@pytest.mark.parametrize("name", FLOAT32_OPERATORS)
def test_float32_operators_equal_cpu(acc, name):
    operator, *arguments = FLOAT32_OPERATORS[name]
    _assert_equal_to_cpu(operator, arguments, acc)


def test_factories_build_on_the_device(acc):
    for build in (
        lambda device: torch.arange(0, 1, 0.3, device=device),
        lambda device: torch.linspace(0, 1, 5, device=device),
        lambda device: torch.full((2, 2), 3, device=device),
        lambda device: torch.eye(3, device=device),
        lambda device: torch.tril_indices(3, 3, device=device),
        lambda device: torch.tensor([[1, 2], [3, 4]], device=device),
    ):
        assert build("acc:1").device == torch.device("acc:1")
        assert torch.equal(build("acc:1").cpu(), build("cpu"))


def test_comparison_notices_a_difference(acc):
    """The comparison above is worth something only if it can fail."""
    with pytest.raises(AssertionError):
        _assert_equal_to_cpu(lambda x: x + 1 if x.device.type == "cpu" else x.add(1).mul(1 + 1e-6), (VIDEO,), acc)
