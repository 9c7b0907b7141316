"""Products of packed weights as they are stored: the activations are rounded to 8 bits too, a scale per token.
Lossy, and off by default. comfy-kitchen's kernels multiply int8, rotated or not, and W4A8; else torch does, int8 and
fp8. Layers with few tokens (modulations), other storage and patched weights compute as always."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.packed import EIGHT, SCALED, StoredLinear
from ..checkpoints.unpacking import rotated
from ..device.facts import DeviceFacts, value_or
from ..device.packed_paths import CORE, FP8, INT8, W4A8, path_for
from ..errors import UnsupportedError
from ..memory.parts import Undo
from ..packages import imported
from .blocks import is_ours
from .fp16_layers import PLAIN, SETTINGS, fp32_linear

# What is multiplied as stored, by the names of the input weights, and its name in the table of packed paths: by
# torch._int_mm or comfy-kitchen, by torch._scaled_mm, by comfy-kitchen alone.
PRODUCTS: Mapping[str, str] = {"int8": INT8, "fp8": FP8[0], "w4a8": W4A8}
LEAST_TOKENS = 17  # that torch._int_mm takes on CUDA
MULTIPLE = 16  # of both sides of a weight that torch._scaled_mm takes
LARGEST = {dtype: largest for dtype, largest in EIGHT.values()}


def formats_on(facts: DeviceFacts) -> tuple[str, ...]:
    """The formats in :data:`PRODUCTS` that the device of ``facts`` multiplies, by the table of packed paths."""
    known = (name for name in PRODUCTS if facts.backend == "cuda" and (name != "w4a8" or kitchen()))
    return tuple(name for name in known if path_for(facts, PRODUCTS[name], {}).path == CORE)


def format_of(codec: str, stored: torch.dtype) -> str:
    """The format in :data:`PRODUCTS` of weights in ``codec`` with values of dtype ``stored``; empty for all others."""
    plain = (name for name, (dtype, _) in EIGHT.items() if dtype is stored and codec in ("", SCALED))
    return "w4a8" if codec == W4A8 else next(plain, "")


def require_stored_matmuls(facts: DeviceFacts) -> tuple[str, ...]:
    """The formats whose products the device has; UnsupportedError for none."""
    if not (formats := formats_on(facts)):
        found = f"stored_products on {facts.device}: {facts.arch or facts.backend} does not multiply 8-bit weights"
        expected = "an NVIDIA GPU: RTX 30, or RTX 20 with comfy-kitchen's kernels, for int8, RTX 40 for fp8"
        raise UnsupportedError(found, expected=expected, fix="Switch off stored_products.")
    return formats


def multiply_as_stored(module: nn.Module, formats: tuple[str, ...]) -> tuple[int, Callable[[], None]]:
    """Make the packed layers of ``module`` in ``formats`` multiply as stored; returns their number and an undo."""
    layers = [each for each in module.modules() if isinstance(each, StoredLinear) and _multiplies(each, formats)]
    undo = Undo()
    for layer in layers:
        undo.set(layer, "multiply", product)
    return len(layers), undo.restore


def _multiplies(layer: Any, formats: tuple[str, ...]) -> bool:
    """True for a layer in one of ``formats`` with no forward from another rewrite and no scale of its inputs: neither
    ModelOpt's ``pre_scale`` nor safe fp16's values or residual."""
    settings, stored = getattr(layer, SETTINGS, PLAIN), format_of(layer.codec, layer.stored.dtype) in formats
    unscaled = settings.values is None and not settings.residual and "pre_scale" not in layer.sides
    return stored and unscaled and is_ours(layer, fp32_linear)


def product(layer: Any, x: Tensor) -> Tensor | None:
    """The output of a packed ``layer`` in the dtype of ``x`` (..., features), or None, where its own forward must run:
    for few tokens, sizes that 16 does not divide, and patched weights. Peak extra memory: two fp32 copies of ``x``, or
    ``x`` in 8 bits and the output in 32, twice for int8, whose sums are int32."""
    rows = x.reshape(-1, x.shape[-1])
    sizes = (layer.in_features, layer.out_features)
    if getattr(layer, "weight_function", None) or len(rows) < LEAST_TOKENS or any(size % MULTIPLE for size in sizes):
        return None
    stored: Tensor = layer.stored
    if stored.dtype is torch.int8 and kitchen():
        return _by_kitchen(layer, x)
    # A rotation may make a value sixteen times as large, which fp16 may not hold, so it is done in fp32.
    rows = rotated(rows.float(), layer.group) if layer.group else rows
    largest = LARGEST[stored.dtype]
    scale = (rows.abs().amax(1, keepdim=True).float() / largest).clamp(min=torch.finfo(torch.float32).tiny)
    narrow = rows.float() / scale
    del rows
    if stored.dtype is torch.int8:
        narrow = narrow.round_().to(torch.int8)
        y = torch._int_mm(narrow, stored.t()).float()
    else:
        one = torch.ones((), device=x.device)
        narrow = narrow.clamp_(-largest, largest).to(stored.dtype)
        y = torch._scaled_mm(narrow, stored.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    y.mul_(scale)
    if "scale" in layer.sides:
        y.mul_(layer.scale.float().view(1, -1))
    if layer.bias is not None:
        y.add_(layer.bias.float())
    return y.to(x.dtype).view(*x.shape[:-1], layer.out_features)


@cache
def kitchen() -> Any:
    """The package comfy_kitchen; None where it is absent or broken."""
    return value_or(lambda: imported("comfy_kitchen"), None)


def _by_kitchen(layer: Any, x: Tensor) -> Tensor:
    """:func:`product` by comfy-kitchen's kernel for this device; fp16 rows are upcast before they are rotated. The W4A8
    kernel takes the groups' scales in fp8 (files hold bytes), one row of the codebook, the correction transposed."""
    sides, dtype, group = layer.sides, x.dtype, layer.group
    x = (x.float() if dtype is torch.float16 and group else x).contiguous()
    bias = None if layer.bias is None else layer.bias.to(dtype)
    if layer.codec != W4A8:
        rotation = {"convrot": True, "convrot_groupsize": group} if group else {}
        return kitchen().int8_linear(x, layer.stored, sides["scale"].float(), bias, dtype, **rotation)
    codebook, correction, s_rel = sides.get("codebook"), sides.get("correction"), sides["s_rel"]
    s_rel = s_rel.view(torch.float8_e4m3fn) if s_rel.dtype is torch.uint8 else s_rel
    return kitchen().w4a8_int8_linear(
        x, layer.stored, s_rel, sides["s_channel"].float().flatten(), bias=bias, out_dtype=dtype,
        codebook=None if codebook is None else codebook[0], correction=None if correction is None else correction.t(),
        group_size=layer.in_features // s_rel.shape[1], convrot_groupsize=group,
    )  # fmt: skip
