"""Short tests of the device, a few milliseconds each.
A probe returns an empty string if the device is right, a sentence if its result is wrong, and raises if it cannot do
it. It computes with small integers or compares with fp64 on the host, where a lazy backend has to give its result."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import permutations, product

import torch
import torch.nn.functional as F
from torch import Tensor

from .execution import generator_for, to_host

SUITE = 5  # raise it when a probe asks something else: kept answers are then asked again
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
Probe = Callable[[torch.device], str]

CHANNELS = ((4, 4), (32, 32), (64, 128))  # MPS is right for some channel counts only (pytorch#197114)
PAD_SIDE = 256  # MPS corrupts a time pad from 65536 pixels per frame (pytorch#194922)
GROUPNORM_MEAN, GROUPNORM_BOUND = 200.0, 0.05  # the bound in deviations, beside how the mean is rounded
# Rows, inner size and columns: odd sizes, and those of a transformer, where published faults begin.
# Source: intel/compute-runtime#1000 and #1001, ROCm/rocBLAS#1680.
PRODUCTS = ((33, 64, 40), (512, 2048, 2048))
SAMPLED = 64  # rows of a product that are compared, spread evenly
NARROW_HEADS, WIDE_HEADS = (64, 128), (384, 512)  # of transformers, and of the one head in the middle of VAEs
FEW_TOKENS = 5
ATTENTION_BOUND = {FP32: 0.02, BF16: 0.2, FP16: 0.05}


class Loose(str):
    """A remark on a correct result, such as that small values are flushed to zero."""


def cast(source: torch.dtype, target: torch.dtype, device: torch.device) -> str:
    """P1: ``.to(dtype)`` on the device, both ways of asking, against the host on every pattern that matters."""
    values = _patterns(source)
    expected = values.to(target)
    there = values.to(device)
    for asked in (lambda x: x.to(target), {FP32: Tensor.float, BF16: Tensor.bfloat16, FP16: Tensor.half}[target]):
        fault = _differences(bits_of(asked(there)).view(target), expected, source)
        if fault and not isinstance(fault, Loose):
            return fault
    return fault


def move(source: torch.dtype, target: torch.dtype, device: torch.device) -> str:
    """P1: device and dtype changed in one call, which some backends get wrong (pytorch#16448)."""
    values = _patterns(source)
    return _differences(bits_of(values.to(device, target)).view(target), values.to(target), source)


def copy_to_host(dtype: torch.dtype, device: torch.device) -> str:
    """P1: whether values come back from the device as they went."""
    values = _patterns(dtype)
    wrong = int((values.to(device).cpu().view(_integers(dtype)) != values.view(_integers(dtype))).sum())
    return f"{wrong} of {values.numel()} values change when copied to the device and back" if wrong else ""


def shifted_bits(device: torch.device) -> str:
    """P1: bf16 to fp32 by moving its bits, the rescue where the cast is broken."""
    values = _patterns(BF16)
    widened = (values.to(device).view(torch.int16).to(torch.int32) << 16).cpu().view(FP32)
    return _differences(widened, values.float(), BF16)


def conv3d(dtype: torch.dtype, layout: torch.memory_format, device: torch.device) -> str:
    """P2: nn.Conv3d against a sum of 2-D convolutions of the host; and a patch embedding, which oneDNN's kernels for
    AMX have wrong in bf16 (pytorch#169688), against the host's in fp64."""
    wrong = []
    for inner, outer in CHANNELS if dtype is FP32 else CHANNELS[1:2]:
        x, weight = _integers_of(1, inner, 3, 4, 4), _integers_of(outer, inner, 3, 3, 3, span=2)
        expected = sum(F.conv2d(x[:, :, t], weight[:, :, t], padding=1) for t in range(3)).unsqueeze(2)  # type: ignore[union-attr]
        a, b = (tensor.to(dtype).to(device).contiguous(memory_format=layout) for tensor in (x, weight))
        result = home(F.conv3d(a, b, padding=(0, 1, 1)))
        wrong += [f"{inner}>{outer} channels: {_off(result, expected, dtype)}"] * bool(_off(result, expected, dtype))
    x, weight, stride = _integers_of(1, 16, 4, 8, 8), _integers_of(64, 16, 2, 4, 4, span=2), (2, 4, 4)
    a, b = (tensor.to(dtype).to(device).contiguous(memory_format=layout) for tensor in (x, weight))
    fault = _off(
        home(F.conv3d(a, b, stride=stride)), F.conv3d(x.double(), weight.double(), stride=stride).float(), dtype
    )
    return "; ".join([*wrong, *[f"a patch embedding: {fault}"] * bool(fault)])


def conv2d(dtype: torch.dtype, device: torch.device) -> str:
    """P2: a 2-D convolution, which the forms without conv3d rest on."""
    x, weight = _integers_of(1, 32, 6, 6), _integers_of(32, 32, 3, 3, span=2)
    result = home(F.conv2d(x.to(dtype).to(device), weight.to(dtype).to(device), padding=1))
    return _off(result, F.conv2d(x, weight, padding=1), dtype)


def matmul(dtype: torch.dtype, device: torch.device) -> str:
    """P3: products of small integers, which every accumulation wide enough gets exactly right."""
    for rows, inner, columns in PRODUCTS if device.type != "cpu" else PRODUCTS[:1]:  # what all are compared with
        a, b = _integers_of(rows, inner), _integers_of(inner, columns)
        some = torch.linspace(0, rows - 1, min(rows, SAMPLED)).long()
        result = home(a.to(dtype).to(device) @ b.to(dtype).to(device))
        if fault := _off(result[some], a[some] @ b, dtype):
            return f"{rows}x{inner} by {inner}x{columns}: {fault}"
    return ""


def fp32_sums(dtype: torch.dtype, device: torch.device) -> str:
    """P3: whether products are summed in fp32: partial sums that overflow fp16, and ones that fp16 cannot count."""
    swing = torch.tensor([240.0] * 32 + [-240.0] * 32)  # half way 32 * 240 * 240, beyond 65504
    count = torch.ones(4096)
    count[0] = 2048.0  # to which fp16 cannot add 1
    for row, column, expected, symptom in (
        (swing, torch.full((64,), 240.0), 0.0, "partial sums overflow"),
        (count, torch.ones(4096), 6143.0, "sums stick"),
    ):
        x, y = (side.to(dtype).to(device) for side in (row.repeat(16, 1), column.unsqueeze(1).repeat(1, 16)))
        result = home(x @ y)
        wrong = result[~result.isclose(torch.tensor(expected), rtol=2 * torch.finfo(dtype).eps, atol=1.0)]
        if len(wrong):
            return f"{symptom}: {expected:g} became {wrong[0]:g}"
    return ""


def fp32_output_probe(device: torch.device) -> str:
    """P3: a product of fp16 operands that is written in fp32, beyond what fp16 can hold."""
    ones = torch.full((16, 16), 300.0, dtype=FP16).to(device)
    product = torch.mm(ones, ones, out_dtype=FP32).cpu()
    return "" if torch.equal(product, torch.full((16, 16), 1_440_000.0)) else f"1440000 became {product[0, 0]:g}"


def attention(
    dtype: torch.dtype, device: torch.device, masked: bool = False, widths: tuple[int, ...] = NARROW_HEADS
) -> str:
    """P4: scaled dot product attention with steep scores, or with a mask that hides one row altogether.
    Without a mask also of few tokens, as views that MPS took for contiguous (pytorch#163597, pytorch#181133). Radeons
    gave zeros (ROCm/aotriton#210), or what memory held for heads wider than 256 (pytorch#189849, ROCm/TheRock#6561)."""
    for width, tokens in product(widths, (77,) if masked else (77, FEW_TOKENS)):
        mask = torch.ones(tokens, tokens, dtype=torch.bool)
        if masked:
            mask[:, 70:] = False
            mask[5] = False
        heads = (2, 3) if tokens == FEW_TOKENS else (1, 2)
        q, k, v = (torch.randn(*heads, tokens, width, generator=generator_for(seed)).to(dtype) for seed in range(3))
        q = q * 4
        given = mask.to(device) if masked else None
        if tokens == FEW_TOKENS:  # views, as models give them
            query, key, value = (each.transpose(1, 2).contiguous().to(device).transpose(1, 2) for each in (q, k, v))
        else:
            query, key, value = (each.to(device) for each in (q, k, v))
        result = home(F.scaled_dot_product_attention(query, key, value, given))
        scores = (q.double() @ k.double().mT / math.sqrt(width)).masked_fill(~mask, float("-inf"))
        expected = torch.softmax(scores, -1) @ v.double()
        seen = mask.any(-1)
        error = float((result[:, :, seen] - expected[:, :, seen]).abs().max())
        if not error <= ATTENTION_BOUND[dtype]:  # a NaN is not
            views = "views of few tokens, " * (tokens == FEW_TOKENS)
            return f"{views}head width {width}: off by {error:.3g}"
        if not result.isfinite().all():
            return "a fully masked row becomes NaN"
    return ""


def groupnorm(dtype: torch.dtype, device: torch.device) -> str:
    """P5: GroupNorm far from zero, where E[x^2] - E[x]^2 cancels. That the kernel of torch 2.11 keeps the mean in the
    dtype of its input (on an H100; group_norm_kernel.cu, ROCm's too) is no fault: the input is rounded as far."""
    x = (GROUPNORM_MEAN + torch.randn(1, 32, 4, 8, 8, generator=generator_for(0))).to(dtype)
    ones = torch.ones(32, dtype=dtype)
    result = home(F.group_norm(x.to(device), 8, ones.to(device), (0 * ones).to(device)))
    error = float((result - F.group_norm(x.double(), 8)).abs().max())
    bound = GROUPNORM_BOUND + GROUPNORM_MEAN * torch.finfo(dtype).eps / 2
    return "" if error <= bound else f"at mean {GROUPNORM_MEAN:g} off by {error:.3g} of a deviation of 1"


def time_pad(dtype: torch.dtype, device: torch.device) -> str:
    """P6: a zero frame put before a clip by ``F.pad``, and an edge frame repeated."""
    x = (torch.arange(2 * PAD_SIDE**2) % 251).reshape(1, 1, 2, PAD_SIDE, PAD_SIDE).to(dtype)
    there = x.to(device)
    corrupted = not torch.equal(home(F.pad(there, (0, 0, 0, 0, 1, 0))), torch.cat([0 * x[:, :, :1], x], 2).float())
    edges = home(F.pad(there[..., :8, :8].contiguous(), (0, 0, 0, 0, 1, 0), mode="replicate"))
    host = x[..., :8, :8]
    wrong = not torch.equal(edges, torch.cat([host[:, :, :1], host], 2).float())
    faults = ["zero padding in time corrupts the clip"] * corrupted + ["replicated frames are wrong"] * wrong
    return "; ".join(faults)


def double(device: torch.device) -> str:
    total = (torch.full((4,), 2.0**-40, dtype=torch.float64).to(device) + 1).cpu()
    return "" if bool((total == 1 + 2.0**-40).all()) else "computed in a dtype with fewer bits"


def eight_bits(device: torch.device) -> str:
    values = torch.tensor([0.5, -2.0, 448.0, 0.0])
    back = values.to(torch.float8_e4m3fn).to(device).to(FP32).cpu()
    return "" if torch.equal(back, values) else f"{values.tolist()} became {back.tolist()}"


def bits_of(there: Tensor) -> Tensor:
    return to_host(there).contiguous().view(_integers(there.dtype))


def home(there: Tensor) -> Tensor:
    """A result on the host in fp32, without a cast on the device: a broken cast is not blamed on the operator."""
    return bits_of(there).view(there.dtype).float()


def standard() -> dict[str, Probe]:
    """Every probe of this file by name: what it asks, then the dtype or dtypes."""
    suite: dict[str, Probe] = {}
    for (first, source), (second, target) in permutations(DTYPES.items(), 2):
        suite[f"cast.{first}_to_{second}"] = partial(cast, source, target)
    suite["move.fp32_to_bf16"] = partial(move, FP32, BF16)
    suite["move.bf16_to_fp32"] = partial(move, BF16, FP32)
    suite |= {f"copy.{name}": partial(copy_to_host, dtype) for name, dtype in DTYPES.items()}
    suite["bits.bf16_to_fp32"] = shifted_bits
    for name, dtype in DTYPES.items():
        suite[f"matmul.{name}"] = partial(matmul, dtype)
        suite[f"conv2d.{name}"] = partial(conv2d, dtype)
        suite[f"conv3d.{name}"] = partial(conv3d, dtype, torch.contiguous_format)
        suite[f"conv3d_channels_last.{name}"] = partial(conv3d, dtype, torch.channels_last_3d)
        suite[f"attention.{name}"] = partial(attention, dtype)
        suite[f"wide_attention.{name}"] = partial(attention, dtype, widths=WIDE_HEADS)
        suite[f"masked_attention.{name}"] = partial(attention, dtype, masked=True)
        suite[f"groupnorm.{name}"] = partial(groupnorm, dtype)
        suite[f"pad3d.{name}"] = partial(time_pad, dtype)
    suite |= {f"sums.{name}": partial(fp32_sums, DTYPES[name]) for name in ("bf16", "fp16")}
    return suite | {"output.fp16_to_fp32": fp32_output_probe, "float64": double, "float8": eight_bits}


def _patterns(dtype: torch.dtype) -> Tensor:
    """All 65 536 values of a 16-bit dtype, or 4096 of fp32 over its whole range with every kind of rounding."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    spread = torch.linspace(-38, 38, 2048, dtype=torch.float64)
    values = torch.cat([10**spread, -(10 ** spread.flip(0))]) * torch.linspace(1, 1.9, 4096, dtype=torch.float64)
    special = torch.tensor([0.0, 1.0, 1 + 2**-8, 1 + 2**-9, 65504.0, 65520.0, math.inf, -math.inf])
    return torch.cat([values.float(), special])


def _differences(result: Tensor, expected: Tensor, source: torch.dtype) -> str:
    """Describe the wrong values, or return a :class:`Loose` remark on flushed subnormals and directed rounding."""
    a, b = result.double(), expected.double()
    tiny = max(torch.finfo(expected.dtype).tiny, torch.finfo(source).tiny)
    same = (a == b) | (a.isnan() & b.isnan())
    flushed = ~same & (a == 0) & (b.abs() < tiny)
    near = ~same & ((a - b).abs() <= torch.finfo(expected.dtype).eps * b.abs().clamp(min=tiny)) & b.isfinite()
    largest = torch.finfo(expected.dtype).max
    near |= ~same & b.isinf() & (a == b.sign() * largest)  # rounded toward zero at the end of the range
    wrong = ~(same | flushed | near)
    if wrong.any():
        zeros = int((wrong & (a == 0)).sum())
        return f"{int(wrong.sum())} of {a.numel()} values are wrong" + f", {zeros} of them zero" * (zeros > 0)
    remarks = [f"{int(flushed.sum())} subnormal values are flushed to zero"] if flushed.any() else []
    remarks += [f"{int(near.sum())} values are rounded differently"] if near.any() else []
    return Loose("; ".join(remarks))


def _integers(dtype: torch.dtype) -> torch.dtype:
    return torch.int16 if dtype.itemsize == 2 else torch.int32


def _integers_of(*shape: int, span: int = 3) -> Tensor:
    return torch.randint(1 - span, span, shape, generator=generator_for(len(shape))).float()


def _off(result: Tensor, expected: Tensor, dtype: torch.dtype) -> str:
    """Empty when two results agree up to one rounding of ``dtype``; sums of small integers are exact before it."""
    error = float((result - expected).abs().max())
    if math.isnan(error):
        return f"{int(result.isnan().sum())} of {result.numel()} values are NaN"
    bound = 2 * torch.finfo(dtype).eps * float(expected.abs().max())
    return "" if error <= bound else f"off by {error:.3g} where the largest value is {float(expected.abs().max()):.3g}"
