"""A matrix product that adds its bias and applies GELU with tanh before it writes: the wide tensor passes memory once.
The launch is torch's own ``_addmm_activation``, whose epilogue has the tanh form on CUDA and ROCm and nowhere else."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .library import AUTO, launches, operation


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, form: str = AUTO) -> Tensor:
    """``gelu(x @ weight.T + bias, approximate="tanh")``, rounded once; ``weight`` (out, in), ``bias`` (out,)."""
    return _LINEAR_GELU(x, weight, bias) if launches(x, form) else linear_gelu_reference(x, weight, bias)


def linear_gelu_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """:func:`linear_gelu` as two operations, as upstream runs it: rounded after each."""
    return functional.gelu(functional.linear(x, weight, bias), approximate="tanh")


def _launch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True).unflatten(0, x.shape[:-1])


def _fake(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """An empty result; also tells torch's FlopCounterMode how to count the product's operations, unless it knows."""
    from torch.utils.flop_counter import flop_registry  # imports Triton, which only a count of operations needs

    flop_registry.setdefault(_LINEAR_GELU.overloadpacket, lambda x, weight, *_, **__: 2 * x.numel() * weight.shape[0])
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_LINEAR_GELU = operation(
    "linear_gelu(Tensor x, Tensor weight, Tensor bias) -> Tensor", _fake, linear_gelu_reference, launch=_launch
)
