"""Core's 3-D convolutions by the exact implementations that work on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.transforms.conv3d import geometry_of, layer_of, own_edges
from ...compat.transforms.conv3d_choice import Chooser, Conv3dChoice
from ...compat.transforms.conv3d_methods import convolve, padded
from .ownership import is_own_convolution

HOOK = "_conv_forward"  # gets the cast weights, whichever class of core's called


@dataclass(frozen=True, slots=True)
class ConvForward:
    """In the place of a layer's ``_conv_forward``: the same sums by the implementation that was chosen.

    It has no weights, so copies of a patcher for other devices can share it.
    """

    layer: nn.Module
    choice: Conv3dChoice

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, autopad: str | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Convolve; ``causal_zero`` is core's, for an input with fewer frames than the kernel."""
        if autopad == "causal_zero":
            weight = weight[:, :, -x.shape[2] :]
        edges, mode = own_edges(self.layer)
        x = x if edges is None else padded(x, edges, mode)
        return convolve(self.choice.form, x, weight, bias, geometry_of(self.layer), self.choice.chunk_bytes)


def conv_forwards(network: nn.Module, choose: Chooser, dtype: torch.dtype) -> Iterator[tuple[str, ConvForward]]:
    """(name, what replaces its ``_conv_forward``) of each 3-D convolution that is not best left alone in ``dtype``."""
    for name, layer in network.named_modules():
        if not isinstance(layer, nn.Conv3d) or HOOK in layer.__dict__ or not is_own_convolution(layer):
            continue
        choice = choose(layer_of(name, layer, dtype))
        if choice is not None:
            yield name, ConvForward(layer, choice)
