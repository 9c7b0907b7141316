"""Calls of torch that some drivers get wrong, in the forms that they get right: a mode around a part's forwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..device.quirks import DevicePolicy

PRODUCTS = (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__)
PLAIN_FORMS = frozenset(("plain_operands", "product_rows", "norm_rows"))  # DevicePolicy; product_rows is of fp32 alone


class PlainCalls(TorchFunctionMode):
    """A mode of products with a contiguous left operand, few rows at a time, and RMS norms in plain operations, where
    ``policy`` asks for that. Peak extra memory: a contiguous copy of an operand; for a norm, its input in fp32."""

    def __init__(self, policy: DevicePolicy) -> None:
        super().__init__()
        self.policy = policy
        self.forms: Mapping[Any, Callable[..., Tensor]] = {
            functional.linear: self._linear,
            functional.rms_norm: self._rms_norm,
            functional.conv2d: self._convolution,
            **({each: self._product(each) for each in PRODUCTS} if policy.plain_operands else {}),
        }

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.forms.get(function, function)(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``functional.linear`` of contiguous rows, at most ``product_rows`` at a time (0: all)."""
        rows = input.reshape(-1, input.shape[-1]).contiguous()
        parts = rows.split(self.policy.product_rows or max(1, len(rows)))
        results = [functional.linear(part, weight, bias) for part in parts]
        return (results[0] if len(results) == 1 else torch.cat(results)).view(*input.shape[:-1], weight.shape[0])

    def _rms_norm(
        self, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        """``functional.rms_norm``; for more than ``norm_rows`` rows (0: no limit) in plain operations, in fp32."""
        axes = tuple(range(-len(normalized_shape), 0))
        if not 0 < self.policy.norm_rows < input.shape[: -len(axes)].numel():
            return functional.rms_norm(input, normalized_shape, weight, eps)
        upcast = input.float()
        mean_square = upcast.square().mean(axes, keepdim=True)
        result = upcast * mean_square.add_(torch.finfo(torch.float32).eps if eps is None else eps).rsqrt_()
        return (result if weight is None else result * weight).to(input.dtype)

    def _convolution(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.policy.plain_operands:
            input, weight = input.contiguous(), weight.contiguous()
        return functional.conv2d(input, weight, *args, **kwargs)

    @staticmethod
    def _product(function: Any) -> Callable[..., Tensor]:
        return lambda input, *args, **kwargs: function(input.contiguous(), *args, **kwargs)


def plain_calls(policy: DevicePolicy) -> PlainCalls | None:
    """The mode that ``policy`` asks for; None where torch's own calls are right."""
    return PlainCalls(policy) if any(getattr(policy, form) for form in PLAIN_FORMS) else None
