"""Layers made native to ComfyUI's memory manager: what is elsewhere, packed or patched comes through core's own cast
for one forward, in the dtype it is stored in; all else is ``fixed`` and comes as a whole."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import comfy.ops
import torch
from comfy.model_patcher import LowVramPatch, ModelPatcher
from torch import nn

from ..compat.checkpoints.packed import StoredLinear
from ..compat.device.execution import HOST, placed
from ..compat.memory.statistics import MemoryStats
from ..compat.memory.transfer import set_data, transfer_for

OWN = ("weight", "bias")
WHOLE: tuple[type[nn.Module], ...] = (nn.MultiheadAttention,)  # one fused call reads the weights of their children
LEFT_BEHIND = (  # attributes that core's patcher and `install_cast_layers` set on a layer
    *("comfy_cast_weights", "prev_comfy_cast_weights", "comfy_force_cast_weights", "comfy_patched_weights"),
    *("weight_function", "bias_function", "memory_stats", "rows", "runs_on", "computes_in"),
)
BASE_LAYER = ".base_layer"  # peft's name, in its adapter, for the adapted layer
WEIGHT = ".weight"


@contextmanager
def cast_by_core(layer: Any, **kinds: Any) -> Iterator[tuple[Any, Any]]:
    """For the block, ``layer``'s weight and bias as core casts them to ``kinds``, by functions older than core 0.32."""
    weight, bias, offloaded = comfy.ops.cast_bias_weight(layer, offloadable=True, **kinds)
    try:
        yield weight, bias
    finally:
        comfy.ops.uncast_bias_weight(layer, weight, bias, offloaded)


class CastLayer(comfy.ops.CastWeightBiasOp):
    """A layer whose forward is that of its class, run with weights that core has cast to the device of the input."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        comfy.ops.run_every_op()
        like = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        return self._run(like, *args, **kwargs)

    @contextmanager
    def weights_on(self, like: torch.Tensor, bias_dtype: Any = None) -> Iterator[tuple[torch.Tensor, Any]]:
        """For the block, weight and bias as ``like`` (device, dtype), for ``compat.memory.hooks.weights_on``."""
        here = "fetched" in self.__dict__ or not self._must_fetch(like.device)
        with nullcontext((self.weight, self.bias)) if here else self._fetched(like) as (weight, bias):
            yield weight.to(like.dtype), None if bias is None else bias.to(bias_dtype or like.dtype)

    def _run(self, like: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The class's forward, with fetched weights where the layer's own cannot compute on the device of ``like``."""
        if not self._must_fetch(like.device):
            return super().forward(*args, **kwargs)
        with self._fetched(like) as (weight, bias):
            own = dict(self._parameters)
            self._parameters["weight"] = weight
            if own.get("bias") is not None:
                self._parameters["bias"] = bias
            self.__dict__["fetched"] = True
            try:
                return super().forward(*args, **kwargs)
            finally:
                self.__dict__.pop("fetched")
                self._parameters.update(own)

    def _must_fetch(self, device: torch.device) -> bool:
        """True if the stored weights cannot compute on ``device`` as they are: 8 bits, patched or elsewhere."""
        narrow, patched = self.weight.dtype.itemsize == 1, self.weight_function or self.bias_function
        return bool(narrow or patched or self.comfy_cast_weights or self.weight.device != device)

    def _fetched(self, like: torch.Tensor) -> Any:
        """For the block, weight and bias from core's cast: in their own dtypes, or in that of ``like`` for 8 bits."""
        kinds = [t.dtype if t is not None else like.dtype for t in (self.weight, self.bias)]
        weight, bias = (like.dtype if kind.itemsize == 1 and like.is_floating_point() else kind for kind in kinds)
        if self.memory_stats is not None and self.weight.device != like.device:
            self.memory_stats.add(bytes_of(t for t in (self.weight, self.bias) if t is not None), 0.0)
        return cast_by_core(self, dtype=weight, bias_dtype=bias, device=like.device)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """Move by :func:`send`, so that weights return to their own host memory; torch alone changes a dtype."""
        for tensor in (*self._parameters.values(), *self._buffers.values()):
            if tensor is not None:
                target = fn(tensor.data[:0] if tensor.ndim else tensor.data)
                if target.dtype != tensor.dtype:
                    return super()._apply(fn, recurse)  # type: ignore[misc]
                send(tensor, target.device)
        return super()._apply(fn, recurse)  # type: ignore[misc]


class PackedLayer(CastLayer):
    """A layer whose weight moves packed and is made dense on the device, where patches change it."""

    rows: _Rows

    @property
    def weight(self) -> torch.Tensor:
        """The dense weight; on ``meta`` while the packed one is elsewhere, for forwards that only ask for its dtype."""
        stored_on, runs_on = self.stored.device, self.__dict__["runs_on"]
        here = stored_on.type == runs_on.type and runs_on.index in (None, stored_on.index)  # "mps" stands for "mps:0"
        if here or "outline" in self.__dict__:
            return super().weight  # type: ignore[misc]
        return torch.empty((self.out_features, self.in_features), dtype=self.dense_dtype, device="meta")

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight as ``dtype``, changed by the layer's patches, which get a copy where it is the stored one."""
        weight: torch.Tensor = super().dense(dtype)  # type: ignore[misc]
        if self.weight_function and weight is self.stored:
            weight = weight.clone()
        for function in self.weight_function:
            weight = function(weight)
        return weight

    @contextmanager
    def weights_on(self, like: torch.Tensor, bias_dtype: Any = None) -> Iterator[tuple[torch.Tensor, Any]]:
        with self._tensors_on(like.device):
            yield self.dense(like.dtype), None if self.bias is None else self.bias.to(bias_dtype or like.dtype)

    def _run(self, like: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with self._tensors_on(like.device):
            return super(CastLayer, self).forward(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _tensors_on(self, device: torch.device) -> Iterator[None]:
        """For the block, packed weight, scales and bias on ``device``, fetched if need be; once for nested blocks."""
        if "fetched" in self.__dict__ or (self.stored.device == device and not self.bias_function):
            yield
            return
        own, sides = dict(self._parameters), self.sides
        if self.stored.device != device and self.memory_stats is not None:
            self.memory_stats.add(bytes_of(t for t in (*own.values(), *sides.values()) if t is not None), 0.0)
        kinds = {"dtype": self.stored.dtype, "bias_dtype": None if self.bias is None else self.bias.dtype}
        with cast_by_core(self.rows, device=device, **kinds) as (stored, bias):
            self._buffers.update(placed(sides, device))  # first: if memory runs short here, nothing is replaced
            self._parameters.update(stored=stored, bias=bias)
            self.__dict__["fetched"] = True
            try:
                yield
            finally:
                self.__dict__.pop("fetched")
                self._parameters.update(own)
                self._buffers.update(sides)


class _Rows:
    """Stands in for a packed layer in core's cast, which moves its packed weight as if it were the weight."""

    weight_function = ()
    weight = property(lambda self: self.layer.stored)
    bias = property(lambda self: self.layer.bias)
    bias_function = property(lambda self: self.layer.bias_function)

    def __init__(self, layer: PackedLayer) -> None:
        self.layer = layer


class Placed:
    """A root module that reports the device on which it computes, wherever its weights are."""

    @property
    def device(self) -> torch.device:
        return self.__dict__["runs_on"]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that its class reports, unless that has 8 bits: nothing computes in those."""
        stored = super().dtype  # type: ignore[misc]
        return stored if stored.itemsize > 1 else self.__dict__["computes_in"]


def install_cast_layers(module: nn.Module, device: torch.device, memory_stats: MemoryStats | None = None) -> bool:
    """Make layers fetch weights, and roots report ``device``, where ``module`` is to run; True if any class changed."""
    changed = False
    for owner, whole in _walk(module):
        packed = isinstance(owner, StoredLinear)
        if not whole and not isinstance(owner, CastLayer) and (packed or _is_layer(owner)):
            if not hasattr(owner, "bias"):
                owner.__dict__.update(bias=None, lacks_bias=True)
            owner.weight_function, owner.bias_function, owner.memory_stats = [], [], memory_stats
            owner.__class__ = _subclass(type(owner), PackedLayer if packed else CastLayer)
            if packed:
                owner.__dict__.update(rows=_Rows(owner), runs_on=device)
            changed = True
        elif isinstance(getattr(type(owner), "device", None), property):
            if not isinstance(owner, Placed):
                owner.__class__, changed = _subclass(type(owner), Placed), True
            wide = (t.dtype for t in owner.parameters() if t.is_floating_point() and t.dtype.itemsize > 1)
            owner.__dict__.update(runs_on=device, computes_in=next(wide, torch.float32))
    return changed


def restore_layers(module: nn.Module) -> None:
    """Give each layer its own class back, without what :func:`install_cast_layers` and patchers wrote on it."""
    for owner in module.modules():
        if isinstance(owner, (CastLayer, Placed)):
            lacking = ("bias", "lacks_bias") if "lacks_bias" in owner.__dict__ else ()
            for name in (*LEFT_BEHIND, *lacking):
                owner.__dict__.pop(name, None)
            owner.__class__ = type(owner).__bases__[1]  # (rewrite, original), by :func:`_subclass`


def fixed_tensors(module: nn.Module) -> list[torch.Tensor]:
    """The tensors that no layer fetches: parameters of other modules, and all buffers but scales of packed weights."""
    tensors: dict[int, torch.Tensor] = {}  # by id: tied ones count once
    for owner in module.modules():
        held = () if isinstance(owner, CastLayer) else owner.parameters(recurse=False)
        tables = () if isinstance(owner, PackedLayer) else owner.buffers(recurse=False)
        for tensor in (*held, *tables):
            tensors[id(tensor)] = tensor
    return list(tensors.values())


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def send(tensor: torch.Tensor, device: torch.device, keep: bool = True) -> None:
    """Move ``tensor`` to ``device`` in place. With ``keep`` its host memory stays held, and it returns to those bytes:
    an eviction copies nothing, and weights survive devices that damage copies. ``keep`` is False where host and device
    share one memory, which would hold both."""
    data = tensor.data
    if data.device == device:
        return
    home: tuple[torch.Tensor, int] | None = tensor.__dict__.get("anygpu_home")
    with torch.inference_mode(False), torch.no_grad():
        if device.type == HOST.type and home is not None and home[1] == data.data_ptr():
            set_data(tensor, home[0])
        elif device.type == HOST.type:
            set_data(tensor, transfer_for(data.device, data.dtype).to_host(data))
        else:
            set_data(tensor, placed(data, device))
    tensor.__dict__.pop("anygpu_home", None)  # not before it moved: a failure leaves all as it was
    if keep and data.device.type == HOST.type != device.type:
        tensor.__dict__["anygpu_home"] = (data, tensor.data.data_ptr())


def send_home(module: nn.Module) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        send(tensor, HOST)


@functools.cache
def _subclass(original: type, rewrite: type) -> type:
    """A subclass of ``rewrite`` and ``original``, named as the latter; transformers finds a root by its full name."""
    # not a layer's: our rewrites go by its full name, and must not take one that fetches its weights for the original
    home = original.__module__ if rewrite is Placed else __name__
    return type(original.__name__, (rewrite, original), {"__module__": home, "__doc__": rewrite.__doc__})


def _is_layer(module: nn.Module) -> bool:
    """True for a module without children whose parameters are a weight and perhaps a bias."""
    held = [name for name, tensor in module._parameters.items() if tensor is not None]
    return "weight" in held and set(held) <= set(OWN) and next(module.children(), None) is None


def _walk(module: nn.Module, whole: bool = False) -> Iterator[tuple[nn.Module, bool]]:
    """Each module of ``module``, itself first, and True where a parent in :data:`WHOLE` reads its weights."""
    whole = whole or isinstance(module, WHOLE)
    yield module, whole
    for child in module.children():
        yield from _walk(child, whole)


def named_for_patches(tensors: Mapping[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    """``tensors`` under the names that patches use: adapters and their infix left out, packed weights dense on meta."""
    adapted = {name.removesuffix(BASE_LAYER) for name, _ in module.named_modules() if name.endswith(BASE_LAYER)}
    packed = {name: owner for name, owner in module.named_modules() if isinstance(owner, StoredLinear)}
    dense = {
        f"{name}{WEIGHT}": torch.empty(owner.out_features, owner.in_features, dtype=owner.dense_dtype, device="meta")
        for name, owner in packed.items()
    }
    return {  # an adapter's own tensors are LAYER.lora_A.NAME.weight
        key.replace(BASE_LAYER, ""): tensor
        for key, tensor in {**tensors, **dense}.items()
        if key.rsplit(".", 3)[0] not in adapted and (key.endswith(OWN) or key.rpartition(".")[0] not in packed)
    }


@contextmanager
def patches_by_layer(patcher: ModelPatcher) -> Iterator[None]:
    """For the block, the patcher's patches by the layers' present names, in adapters too; patches of hooks keep their
    names. Both leave out packed layers, on which :func:`attach_patches` sets them."""
    modules, own, hooked = dict(patcher.model.named_modules()), patcher.patches, patcher.hook_patches
    packed = {f"{name}{WEIGHT}" for name, owner in modules.items() if isinstance(owner, PackedLayer)}
    named = {key: _key_of_layer(key, modules) for each in (own, *hooked.values()) for key in each}
    patcher.patches = {named[key]: patch for key, patch in own.items() if named[key] not in packed}
    patcher.hook_patches = {
        hook: {key: patch for key, patch in each.items() if named[key] not in packed} for hook, each in hooked.items()
    }
    try:
        yield
    finally:
        patcher.patches, patcher.hook_patches = own, hooked


def attach_patches(patcher: ModelPatcher, hooks: Any = None) -> None:
    """Set the patches of ``patcher`` and of core's ``hooks`` on packed layers, which apply them to dense weights."""
    modules, own = dict(patcher.model.named_modules()), patcher.patches
    hooked = patcher.get_combined_hook_patches(hooks)
    patches = {_key_of_layer(key, modules): own.get(key, []) + hooked.get(key, []) for key in {*own, *hooked}}
    for name, layer in modules.items():
        if isinstance(layer, PackedLayer):
            key = f"{name}{WEIGHT}"
            patch = [LowVramPatch(key, patches)] if key in patches else []
            layer.weight_function = patch + patcher.weight_wrapper_patches.get(key, [])


def patched(patcher: ModelPatcher, patches: Mapping[str, Any], strength: float) -> ModelPatcher:
    """A clone with ``patches`` by name of a weight, unchecked: core's check of the names would load the weights."""
    clone = patcher.clone()
    clone.patches_uuid = uuid.uuid4()
    for name, patch in patches.items():
        clone.patches.setdefault(name, []).append((strength, patch, 1.0, None, None))
    return clone


def _key_of_layer(key: str, modules: Mapping[str, nn.Module]) -> str:
    """The name of a tensor as it is now, with peft's infix if the layer is inside an adapter."""
    layer, _, tensor = key.rpartition(".")
    return f"{layer}{BASE_LAYER}.{tensor}" if f"{layer}{BASE_LAYER}" in modules else key
