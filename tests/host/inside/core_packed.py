"""Scenes about core's packed layers in a fitted model, and about layers that unpack their own bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import comfy.model_patcher
import comfy.supported_models as supported
import comfy_kitchen.backends.eager as eager
import torch
from anygpu.host.core import model as core_model
from anygpu.host.core.layers import is_native
from anygpu.host.core.ownership import is_linear
from torch import Tensor
from torch.nn import functional

from host.inside.core_fit import PEAK, traces, turing
from host.inside.core_tiny import CASES, GROUP, HOST, error, louder, made, output, pack

FULL = torch.float32


def packed_twin(name: str, kind: str) -> tuple[Any, Any]:
    """A MODEL whose Linears are packed as core's loader packs them, and one with the same values in fp32.

    A Linear whose rows are shorter than a group of the format stays as it is, as in published files.
    """
    plain = made(name)
    file = plain.model.diffusion_model.state_dict()
    config = getattr(supported, CASES[name].table)(dict(CASES[name].config))
    config.set_inference_dtype(torch.float16, torch.float32)
    config.quant_config = {"mixed_ops": True}
    model = config.get_model({}, "")
    for path, leaf in model.diffusion_model.named_modules():
        if is_linear(leaf) and leaf.in_features % GROUP == 0 == leaf.out_features % GROUP:
            plain.model.diffusion_model.get_submodule(path).weight.copy_(pack(file, path, kind))
    model.diffusion_model.load_state_dict(file)
    return comfy.model_patcher.CoreModelPatcher(model.eval(), HOST, HOST), plain


def nvfp4_product(
    a: Tensor, b: Tensor, tensor_scale_a: Tensor, tensor_scale_b: Tensor, block_scale_a: Tensor, block_scale_b: Tensor,
    bias: Tensor | None = None, out_dtype: torch.dtype = FULL, alpha: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """a (M, K) times b (N, K) transposed, as tensor cores give it: products of the values, sums in fp32."""
    left = eager.dequantize_nvfp4(a, tensor_scale_a, block_scale_a, FULL)
    right = eager.dequantize_nvfp4(b, tensor_scale_b, block_scale_b, FULL)
    return functional.linear(left, right, None if bias is None else bias.float()).to(out_dtype)


def mxfp8_product(
    a: Tensor, b: Tensor, block_scale_a: Tensor, block_scale_b: Tensor, bias: Tensor | None = None,
    out_dtype: torch.dtype = FULL,
) -> Tensor:  # fmt: skip
    """The same for MXFP8."""
    left, right = eager.dequantize_mxfp8(a, block_scale_a, FULL), eager.dequantize_mxfp8(b, block_scale_b, FULL)
    return functional.linear(left, right, None if bias is None else bias.float()).to(out_dtype)


@contextmanager
def block_scaled_products() -> Iterator[None]:
    """The two products that only Blackwell has; all around them is as on the card: packing, layouts, dispatch."""
    with (
        mock.patch.object(eager, "scaled_mm_nvfp4", nvfp4_product),
        mock.patch.object(eager, "scaled_mm_mxfp8", mxfp8_product),
    ):
        yield


def packed(name: str, kind: str, native: bool) -> dict[str, Any]:
    """The error against the same values unpacked, and which layers were left to core's own kernels."""
    with block_scaled_products():
        return _packed(name, kind, native)


def _packed(name: str, kind: str, native: bool) -> dict[str, Any]:
    model, plain = packed_twin(name, kind)
    leaves = [leaf for leaf in model.model.diffusion_model.modules() if getattr(leaf, "layout_type", None) is not None]
    for leaf in leaves:
        leaf._full_precision_mm = not native  # what core's loader decides by the card
    expected, own = output(plain, name), output(model, name)
    fitted, decisions = core_model.fit_model(model, keep_latents="never", machine=turing())
    found = output(fitted, name)
    newer, _ = core_model.fit_model(model, keep_latents="never", machine=turing(arch="sm100", arch_class="cuda-sm80+"))
    return {
        "same": newer is model,
        "core": error(own, expected),
        "error": error(found, expected),
        "native": sum(map(is_native, leaves)),
        "layers": len(leaves),
        "traces": traces(model.model.diffusion_model),
        "said": [str(decision) for decision in decisions],
    }


class PackedLinear(torch.nn.Linear):
    """As the layers of packs that read GGUF files: their bytes are unpacked by a method of their own."""

    casts = 0

    def cast_bias_weight(self, x: Any = None, dtype: Any = None, device: Any = None, bias_dtype: Any = None) -> Any:
        """Weight and bias; counts how often."""
        type(self).casts += 1
        return self.unpacked.to(device, dtype), None if self.bias is None else self.bias.to(device, bias_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As that pack computes."""
        weight, bias = self.cast_bias_weight(None, x.dtype, x.device, x.dtype)
        return torch.nn.functional.linear(x, weight, bias)


PackedLinear.__name__ = "Linear"


def unpacked_by_the_layer(name: str) -> dict[str, Any]:
    """The error with layers that unpack their own weights, whose stored bytes mean nothing to core."""
    model = made(name)
    louder(model, name, PEAK)
    expected = output(model, name)
    for leaf in list(filter(is_linear, model.model.diffusion_model.modules())):
        leaf.unpacked = leaf.weight.detach().clone()
        leaf.weight.fill_(float("nan"))
        leaf.__class__ = PackedLinear
    fitted, _ = core_model.fit_model(model, keep_latents="never", machine=turing())
    return {"error": error(output(fitted, name), expected), "casts": PackedLinear.casts}
