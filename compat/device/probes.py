"""Short tests of the device, a few milliseconds each.
A probe returns an empty string if the device is right, a sentence if its result is wrong, and raises if the device
cannot run it. It computes with small integers or compares with fp64, on the host, so a lazy backend must compute."""

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
# Odd sizes, and a transformer's, where faults begin. Source: intel/compute-runtime#1000 and #1001, ROCm/rocBLAS#1680.
PRODUCTS = ((33, 64, 40), (512, 2048, 2048))  # rows, inner size, columns
SAMPLED = 64  # rows of a product that are compared, spread evenly
NARROW_HEADS, WIDE_HEADS = (64, 128), (384, 512)  # of transformers, and of the one head in the middle of VAEs
TOKENS, FEW_TOKENS = 77, 5  # CLIP's number, which no kernel's tile divides; fewer than any tile has
ATTENTION_BOUND = {FP32: 0.02, BF16: 0.2, FP16: 0.05}


class Loose(str):
    """A remark on a correct result, such as that small values are flushed to zero."""


def cast(source: torch.dtype, target: torch.dtype, device: torch.device) -> str:
    """Casts on the device, by ``to`` and by methods such as ``float``, against the host's on patterns that matter."""
    values = _patterns(source)
    expected = values.to(target)
    there = values.to(device)
    for convert in (lambda x: x.to(target), {FP32: Tensor.float, BF16: Tensor.bfloat16, FP16: Tensor.half}[target]):
        fault = _differences(bits_of(convert(there)).view(target), expected, source)
        if fault and not isinstance(fault, Loose):
            return fault
    return fault


def move(source: torch.dtype, target: torch.dtype, device: torch.device) -> str:
    """Device and dtype changed in one call, which some backends get wrong (pytorch#16448)."""
    values = _patterns(source)
    return _differences(bits_of(values.to(device, target)).view(target), values.to(target), source)


def copy_to_host(dtype: torch.dtype, device: torch.device) -> str:
    """Values copied to the device and back, which must keep every bit."""
    values, bits = _patterns(dtype), _bits_dtype(dtype)
    wrong = int((values.to(device).cpu().view(bits) != values.view(bits)).sum())
    return f"{wrong} of {values.numel()} values change when copied to the device and back" if wrong else ""


def shifted_bits(device: torch.device) -> str:
    """bf16 to fp32 by shifting its bits, which replaces a broken cast."""
    values = _patterns(BF16)
    widened = (values.to(device).view(torch.int16).to(torch.int32) << 16).cpu().view(FP32)
    return _differences(widened, values.float(), BF16)


def conv3d(dtype: torch.dtype, layout: torch.memory_format, device: torch.device) -> str:
    """A 3-D convolution against a sum of 2-D ones on the host; and a patch embedding, which oneDNN's AMX kernels get
    wrong in bf16 (pytorch#169688), against the host's in fp64."""
    faults = []
    for inner, outer in CHANNELS if dtype is FP32 else CHANNELS[1:2]:
        x, weight = _random_integers(1, inner, 3, 4, 4), _random_integers(outer, inner, 3, 3, 3, span=2)
        expected = sum(F.conv2d(x[:, :, t], weight[:, :, t], padding=1) for t in range(3)).unsqueeze(2)  # type: ignore[union-attr]
        a, b = (tensor.to(dtype).to(device).contiguous(memory_format=layout) for tensor in (x, weight))
        if fault := _off(home(F.conv3d(a, b, padding=(0, 1, 1))), expected, dtype):
            faults.append(f"{inner}>{outer} channels: {fault}")
    x, weight, stride = _random_integers(1, 16, 4, 8, 8), _random_integers(64, 16, 2, 4, 4, span=2), (2, 4, 4)
    a, b = (tensor.to(dtype).to(device).contiguous(memory_format=layout) for tensor in (x, weight))
    expected = F.conv3d(x.double(), weight.double(), stride=stride).float()
    if fault := _off(home(F.conv3d(a, b, stride=stride)), expected, dtype):
        faults.append(f"a patch embedding: {fault}")
    return "; ".join(faults)


def conv2d(dtype: torch.dtype, device: torch.device) -> str:
    """A 2-D convolution, of which the replacements of 3-D ones are made."""
    x, weight = _random_integers(1, 32, 6, 6), _random_integers(32, 32, 3, 3, span=2)
    result = home(F.conv2d(x.to(dtype).to(device), weight.to(dtype).to(device), padding=1))
    return _off(result, F.conv2d(x, weight, padding=1), dtype)


def matmul(dtype: torch.dtype, device: torch.device) -> str:
    """Products of small integers, which every accumulation wide enough gets exactly right."""
    for rows, inner, columns in PRODUCTS if device.type != "cpu" else PRODUCTS[:1]:  # a CPU is its own reference
        a, b = _random_integers(rows, inner), _random_integers(inner, columns)
        some = torch.linspace(0, rows - 1, min(rows, SAMPLED)).long()
        result = home(a.to(dtype).to(device) @ b.to(dtype).to(device))
        if fault := _off(result[some], a[some] @ b, dtype):
            return f"{rows}x{inner} by {inner}x{columns}: {fault}"
    return ""


def fp32_sums(dtype: torch.dtype, device: torch.device) -> str:
    """Products that must be summed in fp32: partial sums overflow fp16, or begin at 2048, to which it cannot add 1."""
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
    """A product of fp16 operands that is written in fp32, beyond what fp16 can hold."""
    ones = torch.full((16, 16), 300.0, dtype=FP16).to(device)
    product = torch.mm(ones, ones, out_dtype=FP32).cpu()
    return "" if torch.equal(product, torch.full((16, 16), 1_440_000.0)) else f"1440000 became {product[0, 0]:g}"


def attention(
    dtype: torch.dtype, device: torch.device, masked: bool = False, widths: tuple[int, ...] = NARROW_HEADS
) -> str:
    """Scaled dot product attention of steep scores; ``masked`` hides padding and all of one row, which must be finite.
    Without a mask also of few tokens, as views that MPS took for contiguous (pytorch#163597, pytorch#181133). Radeons
    gave zeros (ROCm/aotriton#210), or what memory held for heads wider than 256 (pytorch#189849, ROCm/TheRock#6561)."""
    for width, tokens in product(widths, (TOKENS,) if masked else (TOKENS, FEW_TOKENS)):
        mask, as_views = torch.ones(tokens, tokens, dtype=torch.bool), tokens == FEW_TOKENS
        if masked:
            mask[:, -7:] = False  # the keys of padding
            mask[5] = False  # the row of one query
        batch, heads = (2, 3) if as_views else (1, 2)
        shape = batch, heads, tokens, width
        q, k, v = (torch.randn(*shape, generator=generator_for(seed)).to(dtype) for seed in range(3))
        q = q * 4  # makes scores steep
        if as_views:  # transposed, as models make them
            query, key, value = (each.transpose(1, 2).contiguous().to(device).transpose(1, 2) for each in (q, k, v))
        else:
            query, key, value = (each.to(device) for each in (q, k, v))
        result = home(F.scaled_dot_product_attention(query, key, value, mask.to(device) if masked else None))
        scores = (q.double() @ k.double().mT / math.sqrt(width)).masked_fill(~mask, float("-inf"))
        expected = torch.softmax(scores, -1) @ v.double()
        visible = mask.any(-1)
        error = float((result[:, :, visible] - expected[:, :, visible]).abs().max())
        if not error <= ATTENTION_BOUND[dtype]:  # also if the error is NaN
            views = "views of few tokens, " if as_views else ""
            return f"{views}head width {width}: off by {error:.3g}"
        if not result.isfinite().all():
            return "a fully masked row becomes NaN"
    return ""


def groupnorm(dtype: torch.dtype, device: torch.device) -> str:
    """GroupNorm far from zero, where E[x^2] - E[x]^2 cancels. That the kernel of torch 2.11 keeps the mean in the
    dtype of its input (on an H100; group_norm_kernel.cu, ROCm's too) is no fault: the input is rounded as far."""
    x = (GROUPNORM_MEAN + torch.randn(1, 32, 4, 8, 8, generator=generator_for(0))).to(dtype)
    ones = torch.ones(32, dtype=dtype)
    result = home(F.group_norm(x.to(device), 8, ones.to(device), (0 * ones).to(device)))
    error = float((result - F.group_norm(x.double(), 8)).abs().max())
    bound = GROUPNORM_BOUND + GROUPNORM_MEAN * torch.finfo(dtype).eps / 2
    return "" if error <= bound else f"at mean {GROUPNORM_MEAN:g} off by {error:.3g} of a deviation of 1"


def time_pad(dtype: torch.dtype, device: torch.device) -> str:
    """``F.pad`` in time: a zero frame before a clip, and its first frame repeated."""
    x = (torch.arange(2 * PAD_SIDE**2) % 251).reshape(1, 1, 2, PAD_SIDE, PAD_SIDE).to(dtype)
    there, corner = x.to(device), x[..., :8, :8]
    with_zeros = home(F.pad(there, (0, 0, 0, 0, 1, 0)))
    with_edge = home(F.pad(there[..., :8, :8].contiguous(), (0, 0, 0, 0, 1, 0), mode="replicate"))
    corrupted = not torch.equal(with_zeros, torch.cat([0 * x[:, :, :1], x], 2).float())
    wrong = not torch.equal(with_edge, torch.cat([corner[:, :, :1], corner], 2).float())
    faults = {"zero padding in time corrupts the clip": corrupted, "replicated frames are wrong": wrong}
    return "; ".join(fault for fault, found in faults.items() if found)


def double(device: torch.device) -> str:
    """A sum in fp64 that a narrower dtype would round."""
    total = (torch.full((4,), 2.0**-40, dtype=torch.float64).to(device) + 1).cpu()
    return "" if bool((total == 1 + 2.0**-40).all()) else "computed in a dtype with fewer bits"


def eight_bits(device: torch.device) -> str:
    """Values of float8_e4m3fn widened to fp32 on the device."""
    values = torch.tensor([0.5, -2.0, 448.0, 0.0])
    back = values.to(torch.float8_e4m3fn).to(device).to(FP32).cpu()
    return "" if torch.equal(back, values) else f"{values.tolist()} became {back.tolist()}"


def bits_of(there: Tensor) -> Tensor:
    return to_host(there).contiguous().view(_bits_dtype(there.dtype))


def home(there: Tensor) -> Tensor:
    """A device's result on the host in fp32, cast there: a broken cast of the device is not blamed on the operator."""
    return bits_of(there).view(there.dtype).float()


def standard() -> dict[str, Probe]:
    """Every probe of this file by name: the operation, then its dtype or dtypes, such as ``cast.bf16_to_fp32``."""
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
    """All 65 536 values of a 16-bit dtype; of fp32, 4096 from 1e-38 to 1e38 with both signs, and the special ones:
    zero, ties of bf16, the largest of fp16 and the first beyond it, infinities."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    spread = torch.linspace(-38, 38, 2048, dtype=torch.float64)
    values = torch.cat([10**spread, -(10 ** spread.flip(0))]) * torch.linspace(1, 1.9, 4096, dtype=torch.float64)
    special = torch.tensor([0.0, 1.0, 1 + 2**-8, 1 + 2**-9, 65504.0, 65520.0, math.inf, -math.inf])
    return torch.cat([values.float(), special])


def _differences(result: Tensor, expected: Tensor, source: torch.dtype) -> str:
    """The wrong values in words, else a :class:`Loose` remark, empty for none, on flushed subnormals and rounding."""
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
        return f"{int(wrong.sum())} of {a.numel()} values are wrong{f', {zeros} of them zero' if zeros else ''}"
    remarks = [f"{int(flushed.sum())} subnormal values are flushed to zero"] if flushed.any() else []
    remarks += [f"{int(near.sum())} values are rounded differently"] if near.any() else []
    return Loose("; ".join(remarks))


def _bits_dtype(dtype: torch.dtype) -> torch.dtype:
    """The integer dtype as wide as ``dtype``."""
    return torch.int16 if dtype.itemsize == 2 else torch.int32


def _random_integers(*shape: int, span: int = 3) -> Tensor:
    """Integers between -``span`` and ``span``, both excluded, in fp32; the same at each call."""
    return torch.randint(1 - span, span, shape, generator=generator_for(len(shape))).float()


def _off(result: Tensor, expected: Tensor, dtype: torch.dtype) -> str:
    """The error of ``result`` in words; empty if it agrees with ``expected`` up to one rounding to ``dtype``."""
    error = float((result - expected).abs().max())
    if math.isnan(error):
        return f"{int(result.isnan().sum())} of {result.numel()} values are NaN"
    bound = 2 * torch.finfo(dtype).eps * float(expected.abs().max())
    return "" if error <= bound else f"off by {error:.3g} where the largest value is {float(expected.abs().max()):.3g}"
