"""The layers of safe fp16: Linears with fp16 operands and fp32 results, norms, rotation, and attention's operands."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.terms import power_of_two
from ..device.execution import to_host
from ..device.failures import is_unfit
from ..memory.hooks import weights_on
from .attention_processors import CrossProcessor

HALF, FULL = torch.float16, torch.float32
LIMIT = 2.0**15  # half of fp16's range: room for the rounding of operands and products
RESIDUAL_SCALE = 2.0**8  # divides a residual where products come out in fp32: room up to 1.6e7
DIGITS = 2.0**11  # an fp16 number has 11 bits
SETTINGS, SCALE = "_anygpu_fp16", "_anygpu_value_scale"  # attributes of a layer; SCALE is the divisor of its output
# Largest scaled score in fp16. Rounded operands move it by at most 1/4; kernels that form scores in fp16, some of them
# before the scale, are far from overflow; and no operand leaves fp16's range, since |q| |k| bounds each product.
MOST_SCORE = 256.0
MOST_VALUE = 512.0  # kernels that add 64 products with values in fp16 (SageAttention's Triton) overflow at 1024
SPREAD = 2.0**20  # between the largest and the smallest row of values: fp16 holds both to about a thousandth
HIDDEN = -1e4  # a mask's value up to which a key has no weight next to one that is seen
MASK_ERROR = 2.0**-7  # the most that rounding may change a mask by
ROUGH, ASKED = 0.25, 256  # relative error allowed in sums of packed products, in 8 and 4 bits; rows of noise to measure
FLOOR = 1e-15  # of a norm, so that the power of two that balances two norms is finite


class LayerKind(enum.Enum):
    """The computation of a Linear in a block."""

    NARROW = "fp16 in and out"  # its input is normalised and its output bounded by that
    WIDE = "fp16 operands, fp32 out"  # feeds the residual
    RESIDUAL = "fp16 operands from the fp32 residual, fp32 out"  # nothing has normalised its input
    ROTATED = "fp16 in, fp32 out where the GEMM can, else fp16"  # goes on to fp32 arithmetic before it is narrowed
    VALUE = "fp16 operands, fp16 out divided by a power of two"  # attention's values from text that nothing normalised
    FULL = "fp32"  # modulation: few rows, so its weights are kept as fp16 and widened for the call


@dataclass
class LayerSettings:
    """The settings of a rewritten layer."""

    fp32_output: bool  # a GEMM of fp16 operands can come out in fp32 here
    reach: Any  # of its weight, by :func:`reach_of`; None for a packed weight, which is measured in each call
    residual: bool = False  # it reads the residual in fp16, divided by RESIDUAL_SCALE
    values: nn.Module | None = None  # of an output projection: the VALUE layer whose power of two it multiplies back in
    leaves: bool = False  # it leaves that power of two for the block's sum to multiply in
    loud: bool = False  # a row of the weight is many times longer than most
    divided: bool = False  # the block's sum has divided the residual that it reads


PLAIN = LayerSettings(False, math.inf)  # of a layer that is not rewritten


def to_fp16(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """``x / scale`` in fp16, for powers of two, without a copy of ``x`` in fp32."""
    if scale is None:
        return x.to(HALF)
    return torch.mul(x, scale.reciprocal(), out=torch.empty_like(x, dtype=HALF))


def reach_of(weight: Tensor, known: Any = None) -> Any:
    """The largest L2 norm of the rows of ``weight``, at least 1 (fp32, 0-d); or ``known``, the same measured before."""
    return torch.linalg.vector_norm(weight, dim=1, dtype=FULL).amax().clamp_(min=1.0) if known is None else known


def row_scales(x: Tensor, reach: Any) -> Tensor:
    """The power of two, at least 1, that keeps a row of ``x`` and its products within fp16: (..., 1), fp32.
    A row longer than 1.8e19 overflows here as it does in the fp32 model itself, whose norms square the same values."""
    return scales_for(torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=FULL), reach)


def scales_for(size: Tensor, reach: Any) -> Tensor:
    """The power of two, at least 1, that brings values of at most ``size`` (fp32) times ``reach`` into fp16's range."""
    return power_of_two(size * (2.0 * reach / LIMIT)).clamp_(min=1.0)


def fp32_linear(layer: Any, x: Tensor) -> Tensor:
    """The product of ``layer`` in fp32 from fp16 operands; ``x`` (..., features) is fp32 of any size, or fp16, which is
    already divided by RESIDUAL_SCALE where the layer reads the residual. A packed layer that multiplies as stored runs
    its own forward on fp32 instead. The divisor of attention's values is multiplied in, or with ``leaves`` left in
    SCALE for the block's sum."""
    if "multiply" in layer.__dict__ and not getattr(layer, "weight_function", ()):  # as stored: without scales of ours
        return type(layer).forward(layer, x.float())
    settings: LayerSettings = getattr(layer, SETTINGS)
    divisor: Any = None if settings.values is None else settings.values.__dict__.pop(SCALE, None)
    left: Any = divisor if settings.leaves else None
    total: Any = None if settings.leaves else divisor  # multiplies the product
    if left is not None:
        layer.__dict__[SCALE] = left
    if settings.residual:
        total = RESIDUAL_SCALE
        if not settings.divided and x.dtype is not HALF:
            # One pass over x. In rows with values of 0.03 or more, denormals lose less than fp16's rounding does.
            x = torch.mul(x, 1 / RESIDUAL_SCALE, out=torch.empty_like(x, dtype=HALF))
    with weights_on(layer, like=x.new_empty(0, dtype=HALF)) as (weight, bias):
        if not settings.fp32_output or x.dtype is not HALF:
            scale = row_scales(x, 1.0 if settings.fp32_output else reach_of(weight, settings.reach))
            x, total = to_fp16(x, scale), scale if total is None else scale * total
        if bias is not None and left is not None:
            bias = bias.float() / left
        if settings.fp32_output:
            return fp32_product(x, weight, bias, total)
        y = functional.linear(x, weight)
        return y * total if bias is None else torch.addcmul(bias.float(), y, total)


@dataclass
class AskedLinear:
    """A Linear whose weight is packed and known to its own ``forward`` alone; its reach and bias are measured."""

    forward: Callable[[Tensor], Tensor]  # from and to fp16, (..., features)
    reach: float = 0.0  # as in LayerSettings; 0 before it was measured, infinite where ``forward`` is no product
    bias: Tensor | float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """The result in fp32, from rows divided so that fp16 holds their products."""
        scale = row_scales(x, self.reach)
        return (self.forward(to_fp16(x, scale)).float() - self.bias) * scale + self.bias

    def is_product(self, like: Tensor) -> bool:
        """True if ``forward`` is linear but for a bias and takes inputs such as ``like`` (fp32). The first call asks it
        on their device, and remembers how much it multiplies (``reach``) and its bias."""
        if not self.reach:
            try:
                self._ask(like)
            except Exception as failure:
                if not is_unfit(failure):
                    raise
                self.reach = math.inf
        return math.isfinite(self.reach)

    def _ask(self, like: Tensor) -> None:
        """Measure ``bias`` and ``reach`` on rows of noise x: a product f with bias b has f(-x) = 2 b - f(x), and maps
        sums of rows to sums. The root mean square of an output estimates its weight row's length within a fifth."""
        shape = (*[1] * (like.ndim - 2), ASKED, like.shape[-1])
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like.device) / RESIDUAL_SCALE
        inputs = (noise, -noise, noise + noise.roll(1, -2))
        result, opposite, sums = (self.forward(each.to(HALF)).float() for each in inputs)
        self.bias = (result + opposite).flatten(0, -2).mean(0) / 2
        result, sums = result - self.bias, sums - self.bias
        adds_up = (sums - result - result.roll(1, -2)).norm() <= ROUGH * result.norm()
        length = result.square().mean(-2).amax().sqrt() * RESIDUAL_SCALE
        self.reach = max(1.0, float(to_host(torch.where(adds_up, length, math.inf))))


def value_linear(layer: Any, x: Tensor) -> Tensor:
    """Attention's values in fp16, all divided by one power of two, which is left in SCALE for the output projection."""
    settings: LayerSettings = getattr(layer, SETTINGS)
    with weights_on(layer, like=x.new_empty(0, dtype=HALF)) as (weight, bias):
        scale = row_scales(x, reach_of(weight, settings.reach)).amax()
        layer.__dict__[SCALE] = scale
        return functional.linear(to_fp16(x, scale), weight, None if bias is None else to_fp16(bias, scale))


def adapted_value(layer: Any, x: Tensor) -> Tensor:
    """:func:`value_linear` with the LoRAs that peft put around it, whose part is divided by the same power of two."""
    y: Tensor = layer.base_layer(x)
    if layer.disable_adapters:
        return y
    scale, upcast = layer.base_layer.__dict__[SCALE], x.float()
    for name in (name for name in layer.active_adapters if name in layer.lora_A):
        y = y + to_fp16(layer.lora_B[name](layer.lora_A[name](upcast)) * layer.scaling[name], scale)
    return y


def adapted_out(layer: Any, x: Tensor) -> Tensor:
    """The output projection of divided values with the LoRAs that peft put around it: their sum is multiplied by the
    divisor, or with ``leaves`` stays divided, for the block's sum to do that."""
    settings: LayerSettings = getattr(layer.base_layer, SETTINGS)
    leaves, settings.leaves = settings.leaves, True
    y: Tensor = type(layer).forward(layer, x)
    settings.leaves, divisor = leaves, layer.base_layer.__dict__.get(SCALE, 1.0)
    for name in () if layer.disable_adapters else layer.active_adapters:
        if name in layer.lora_B and layer.lora_B[name].bias is not None:  # which peft adds undivided
            y = y + layer.lora_B[name].bias * (layer.scaling[name] * (1 / divisor - 1))
    return y if leaves else y * layer.base_layer.__dict__.pop(SCALE, 1.0)


def full_linear(layer: Any, x: Tensor) -> Tensor:
    """The fp32 product of ``layer``, whose weights are fp16, with the few rows of ``x``. Where a GEMM of fp16 operands
    can come out in fp32, x is split into three fp16 numbers; elsewhere the weight in fp32 is the peak extra memory."""
    x, settings = x.float(), getattr(layer, SETTINGS)
    if not settings.fp32_output:
        with weights_on(layer, like=x.new_empty(0, dtype=HALF), bias_dtype=FULL) as (weight, bias):
            return functional.linear(x, weight.float(), bias)
    scale, parts = row_scales(x, 1.0), list[Tensor]()
    rest = x / scale
    for _ in range(3):  # of 11 bits each, for the 24 of fp32
        parts.append(rest.to(HALF))
        rest = (rest - parts[-1]) * DIGITS
    with weights_on(layer, like=parts[0], bias_dtype=FULL) as (weight, bias):
        first, second, third = fp32_product(torch.stack(parts), weight)
        y = ((third / DIGITS + second) / DIGITS + first) * scale
        return y if bias is None else y + bias


def rms_norm(norm: Any, x: Tensor, narrow: bool = True) -> Tensor:
    """``x`` divided by its root mean square, times the weight, in fp32; then cast to fp16 if ``narrow``."""
    x = x.float()
    if norm.weight is None:
        y = functional.rms_norm(x, x.shape[-1:], None, norm.eps)
    else:
        with weights_on(norm, like=x) as (weight, _):
            y = functional.rms_norm(x, x.shape[-1:], weight, norm.eps)
    return y.to(HALF) if narrow else y


def fp32_swiglu(gated: Any, x: Tensor) -> Tensor:
    """Upstream's ``SwiGLU.forward`` in fp32 from fp16: a gated product leaves fp16's range."""
    value, gate = gated.proj(x).chunk(2, dim=-1)
    return functional.silu(gate.float(), inplace=True).mul_(value)


class RotaryTables(tuple):
    """Cosine and sine tables as diffusers makes them, also as complex numbers, which are made once per forward."""

    def pairs(self) -> Tensor:
        """cos + i sin for each pair of features, (..., features / 2), complex64."""
        if "made" not in self.__dict__:
            self.made = torch.complex(*(table.float()[..., ::2].contiguous() for table in self))
        return self.made


class Fp32RotaryProcessor(CrossProcessor):
    """LTX-Video's attention of video tokens among themselves: queries and keys are normalised and rotated in fp32."""

    def queries_and_keys(self, attn: Any, tokens: Tensor, seen: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
        turns = rotary if isinstance(rotary, RotaryTables) else RotaryTables(rotary)
        query = turn(attn.norm_q(attn.to_q(tokens), narrow=False), turns.pairs())
        return query, turn(attn.norm_k(attn.to_k(seen), narrow=False), turns.pairs())


def turn(x: Tensor, pairs: Tensor) -> Tensor:
    """``x`` (B, N, D) with each pair of features rotated, as fp16; overwrites ``x``, which is fp32."""
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(pairs)
    return to_fp16(x)


FORWARD_OF = dict.fromkeys((LayerKind.WIDE, LayerKind.RESIDUAL, LayerKind.ROTATED), fp32_linear)
FORWARD_OF |= {LayerKind.VALUE: value_linear, LayerKind.FULL: full_linear}


def fp32_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, total: Tensor | float | None = None) -> Tensor:
    """``x @ weight.T * total + bias`` in fp32 from fp16. A ``bias`` with more than one axis is a sum of the result's
    shape, contiguous: ``x @ weight.T``, without ``total``, is added to it in place."""
    rows, columns, shape = x.flatten(0, -2), weight.t(), x.shape[:-1]
    if bias is not None and bias.ndim > 1:
        y = bias.flatten(0, -2)
        torch.addmm(y, rows, columns, out_dtype=FULL, out=y)
        return bias
    if bias is None:
        y = torch.mm(rows, columns, out_dtype=FULL).unflatten(0, shape)
        return y if total is None else y.mul_(total)
    if isinstance(total, Tensor):
        y = torch.mm(rows, columns, out_dtype=FULL).unflatten(0, shape)
        return torch.addcmul(bias.float(), y, total)
    alpha = 1.0 if total is None else total
    return torch.addmm(bias.float(), rows, columns, alpha=alpha, out_dtype=FULL).unflatten(0, shape)


@dataclass(frozen=True, slots=True)
class Fp16Operands:
    """Operands (B, H, N, D) in fp16, divided or multiplied by powers of two."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: Tensor  # (B, H, 1, 1), fp32, by which the result is multiplied


def fp16_operands(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, gain: float = 1.0
) -> Fp16Operands | None:
    """The operands in fp16, by powers of two per head that change no product; None where fp16 would change the result.
    ``gain`` multiplies scores, besides 1 / sqrt(D). Reads one small tensor from the device."""
    query_norm, key_norm = (torch.linalg.vector_norm(each, dim=-1, dtype=FULL).amax(-1) for each in (query, key))
    rows = value.abs().amax(-1).float()
    largest = rows.amax(-1)
    smallest = torch.where(rows > 0, rows, torch.inf).amin(-1)
    score = (query_norm * key_norm).amax() * (abs(gain) * query.shape[-1] ** -0.5)
    checks, narrow = [(score, MOST_SCORE), ((largest / smallest).amax(), SPREAD)], mask
    if mask is not None and mask.is_floating_point() and mask.dtype is not HALF:
        narrow = mask.clamp(torch.finfo(HALF).min, torch.finfo(HALF).max).to(HALF)
        error = torch.where(mask > HIDDEN, (mask - narrow).abs(), 0.0)
        unseen = -mask.amax(-1).amin().float()  # a row that sees no key has no fp16 form
        checks += [(error.amax().float(), MASK_ERROR), (unseen, -HIDDEN)]
    numbers = to_host(torch.stack([number for number, _ in checks])).tolist()
    if not all(number <= limit for number, (_, limit) in zip(numbers, checks, strict=True)):  # false for NaN
        return None
    balance = power_of_two(query_norm.clamp_(min=FLOOR).sqrt_() / key_norm.clamp_(min=FLOOR).sqrt_())[..., None, None]
    scale = power_of_two((largest * (2 / MOST_VALUE)).clamp_(min=torch.finfo(FULL).tiny))[..., None, None]
    query, key, value = (each.to(HALF) for each in (query / balance, key * balance, value / scale))
    return Fp16Operands(query, key, value, mask=narrow, scale=scale)
