"""Core's weights for a device that changes bf16 or has no float8: made on the host, before they leave it.

Some Radeons turn bf16 into zeros when they cast it to fp32, one stack damaged it on its way back, and Apple's GPUs
refuse float8. A fitted model has its own copy of the network then, which shares all other weights.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from comfy.quant_ops import QuantizedTensor
from torch import Tensor, nn

from ...compat.decision import AUTO, Decision
from .layers import ByNetwork
from .machine import ModelDevice
from .ownership import left_class
from .packed import UNPACKED, as_bytes, holds_float8, in_bytes, packed_layers

BACKUPS = "_anygpu_backups"  # on a copy: what its patchers keep of the weights that they patch, shared as core does
LIMIT = torch.finfo(torch.float16).max
Target = Callable[[nn.Module, Tensor], torch.dtype]  # what a bf16 weight of a module becomes

_copies = ByNetwork()  # of each network, by the dtypes that are wanted, as long as the copy is used


def damage_to_bf16(network: nn.Module, machine: ModelDevice) -> str:
    """The damage done to bf16 weights of ``network`` when this device casts them; empty if there is none."""
    if not any(map(_is_bf16, (*network.parameters(), *network.buffers()))):
        return ""
    cast = machine.abilities.verdict("cast.bf16_to_fp32")
    return "" if cast.usable else cast.why


def lack_of_float8(network: nn.Module, machine: ModelDevice) -> str:
    """The reason why this device cannot hold float8 weights of ``network``; empty if it can, or there are none."""
    if not any(map(holds_float8, (*network.parameters(), *network.buffers()))):
        return ""
    held = machine.abilities.verdict("float8")
    return "" if held.usable else held.why


def float8_decision(lack: str, sound: Any) -> Iterator[Decision]:
    """Decide on float8 weights that this device cannot hold; ``sound`` is the clone that has others, or None."""
    if lack and sound is not None:
        yield Decision("float8 weights", "held as bytes, or as fp16 where they have no scale", lack, AUTO)
    elif lack:
        yield Decision("weights", "float8", f"{lack}; use a file in bf16, fp16 or int8", alarming=True)


def weights_decision(damage: str, sound: Any) -> Iterator[Decision]:
    """Decide on weights that this device would change; ``sound`` is the clone that has others, or None."""
    if damage and sound is not None:
        yield Decision("weights", "cast from bf16 on the host", f"this device changes bf16 ({damage})", AUTO)
    elif damage:
        why = f"this device changes them ({damage}); use a file in fp16, or weight_dtype fp8 on the loader"
        yield Decision("weights", "bf16", why, alarming=True)


def clone_cast_on_host(patcher: Any, target: Target, label: str, float8: bool = True) -> Any:
    """A clone of ``patcher`` over a copy of its network with other weights; None where it cannot be had on the host.

    Args:
        target: the dtype of each bf16 weight; those of layers of other packs stay.
        label: the name of ``target`` among the copies of a network.
        float8: whether float8 stays; else it becomes fp16, exactly, and in packed weights bytes.
    """
    if patcher.is_dynamic():
        return None  # core pages such weights by itself
    copies: dict[str, weakref.ref[nn.Module]] = _copies.setdefault(patcher.model, {})
    made = copies[label]() if label in copies else None
    if made is None:
        source = on_host(patcher)
        if source is None:
            return None
        made = _cast(source, target, float8)
        made.__dict__[BACKUPS] = ({}, {}, {}, set())
        copies[label] = weakref.ref(made)
    clone = patcher.clone(model_override=(made, made.__dict__[BACKUPS]))
    clone.size = 0  # counted again
    return clone


def fp16_or_fp32(matrix: bool, weight: Tensor) -> torch.dtype:
    """fp16 for a matrix that fits, which safe fp16 would make of it anyway; fp32, exactly, for all else."""
    return torch.float16 if matrix and float(weight.abs().amax()) <= LIMIT else torch.float32


def on_host(patcher: Any) -> nn.Module | None:
    """The network of ``patcher`` as it was loaded; another one from the same file where it has moved or is patched."""
    network: nn.Module = patcher.model
    patched = getattr(network, "current_weight_patches_uuid", None) is not None
    if not patched and all(tensor.device.type == "cpu" for tensor in network.parameters()):
        return network
    return from_file(patcher)


def from_file(patcher: Any) -> Any:
    """Another network from the same file as that of ``patcher``; None where core cannot read it again."""
    if patcher.cached_patcher_init is None:
        return None
    load, arguments, *place = patcher.cached_patcher_init
    again = load(*arguments)
    return (again[place[0]] if place else again).model


def _cast(network: nn.Module, target: Target, float8: bool) -> nn.Module:
    plain = (value for value in vars(network).values() if not isinstance(value, (nn.Module, dict, list, tuple, set)))
    memo: dict[int, Any] = {id(value): value for value in plain}  # core's configurations, which are not copies' own
    for module in network.modules():
        ours = not left_class(module)  # another pack alone knows what its tensors mean
        for tensor in filter(_is_plain, (*module._parameters.values(), *module._buffers.values())):
            values = tensor.detach()
            values = values.to(target(module, values)) if ours and values.dtype is torch.bfloat16 else values
            values = values.half() if ours and not float8 and holds_float8(values) else values
            kept = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(values, requires_grad=False) if kept else values
    for weight in network.parameters() if not float8 else ():
        if isinstance(weight, QuantizedTensor) and holds_float8(weight):
            memo[id(weight)] = nn.Parameter(as_bytes(weight), requires_grad=False)
    made = copy.deepcopy(network, memo)
    for layer in filter(in_bytes, packed_layers(made)):
        setattr(layer, UNPACKED, True)
    return made


def _is_plain(tensor: Tensor | None) -> bool:
    return tensor is not None and type(tensor.data) is Tensor


def _is_bf16(tensor: Tensor) -> bool:
    return _is_plain(tensor) and tensor.dtype is torch.bfloat16
