"""Core's patches of weights, such as its LoRAs, on layers that are packed or have one of our adapters around them.

A packed layer makes its weight at each use, and there its patch acts; an adapter's layer is found below it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from comfy.model_patcher import LowVramPatch, ModelPatcher
from torch import nn

from ..compat.checkpoints.packed import StoredLinear
from .casting import PackedLayer

BASE_LAYER = ".base_layer"  # where peft has the layer that it was put around
WEIGHT = ".weight"


def named(tensors: Mapping[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    """``tensors`` of ``module`` under the names that patches have, without adapters' own; packed weights on meta."""
    around = {name.removesuffix(BASE_LAYER) for name, _ in module.named_modules() if name.endswith(BASE_LAYER)}
    packed = {
        f"{name}{WEIGHT}": torch.empty(owner.out_features, owner.in_features, dtype=owner.dense_dtype, device="meta")
        for name, owner in module.named_modules()
        if isinstance(owner, StoredLinear)
    }
    return {
        key.replace(BASE_LAYER, ""): tensor
        for key, tensor in {**tensors, **packed}.items()
        if key.rsplit(".", 3)[0] not in around
    }


@contextmanager
def patches_by_layer(patcher: ModelPatcher) -> Iterator[dict[str, Any]]:
    """The patches under the names that layers have now; for the block the patcher has all but those of packed ones."""
    modules, own = dict(patcher.model.named_modules()), patcher.patches
    by_layer = {_key_of_layer(key, modules): patch for key, patch in own.items()}
    packed = {f"{name}{WEIGHT}" for name, owner in modules.items() if isinstance(owner, PackedLayer)}
    patcher.patches = {key: patch for key, patch in by_layer.items() if key not in packed}
    try:
        yield by_layer
    finally:
        patcher.patches = own


def attach(patcher: ModelPatcher, patches: dict[str, Any]) -> None:
    """Give packed layers their patches, wherever their rows are."""
    for name, layer in patcher.model.named_modules():
        if isinstance(layer, PackedLayer):
            key = f"{name}{WEIGHT}"
            patch = [LowVramPatch(key, patches)] if key in patches else []
            layer.weight_function = patch + patcher.weight_wrapper_patches.get(key, [])


def patched(patcher: ModelPatcher, patches: Mapping[str, Any], strength: float) -> ModelPatcher:
    """A clone with patches by the names of weights, which are assumed to exist: checking would load them."""
    clone = patcher.clone()
    clone.patches_uuid = uuid.uuid4()
    for name, patch in patches.items():
        clone.patches.setdefault(name, []).append((strength, patch, 1.0, None, None))
    return clone


def _key_of_layer(key: str, modules: Mapping[str, nn.Module]) -> str:
    layer, _, tensor = key.rpartition(".")
    return f"{layer}{BASE_LAYER}.{tensor}" if f"{layer}{BASE_LAYER}" in modules else key
