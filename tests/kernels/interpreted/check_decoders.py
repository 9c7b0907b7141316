"""The residual blocks of decoders on the launched operations, interpreted, against upstream's own."""

import copy
import importlib

import pytest
import torch
import triton  # noqa: F401 - interpreted only where it was imported before the first launch
from anygpu.compat.transforms.conv3d import swap_conv3d
from anygpu.compat.transforms.conv3d_methods import Conv3dMethod
from anygpu.compat.transforms.fused_vae import FUSIONS, fuse_vae
from convolutions import always
from tiny.weights import randomise
from torch import nn


@pytest.mark.parametrize("form", [None, Conv3dMethod.FRAMES])
@pytest.mark.parametrize("name", [name for name in FUSIONS if "Decoder" not in name])
def test_a_block_is_upstreams(name: str, form: Conv3dMethod | None) -> None:
    module, _, cls = name.rpartition(".")
    stock = nn.Module()
    stock.decoder = nn.ModuleList([getattr(importlib.import_module(module), cls)(32)])
    randomise(stock, 0)
    stock.eval().requires_grad_(False)
    changed = copy.deepcopy(stock)
    if form is not None:
        swap_conv3d(changed, always(form))
    assert fuse_vae(changed, "triton").points.total() == 2
    x = torch.randn(1, 32, 2, 3, 4, generator=torch.Generator().manual_seed(1))
    found, expected = (model.decoder[0](x) for model in (changed, stock))
    found, expected = (one[0] if isinstance(one, tuple) else one for one in (found, expected))
    # The same sums in another order: a few hundred products each.
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
