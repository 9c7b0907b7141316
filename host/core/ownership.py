"""Layers of a network that are core's or torch's own, so that ours may replace them: what counts is where the functions
that compute a layer were defined, and what its weight is, since other packs keep core's class names."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import comfy.ops
import torch
from comfy.quant_ops import QuantizedTensor
from torch import nn

from ...compat.decision import Decision

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
FEW = 0.1  # share of weights outside Linears from which a network is a U-Net: those are published to run in plain fp16
MOST_LEFT = 0.1  # share of products from which a network stays in core's dtype
HOME = ("comfy", "torch")  # packages whose functions compute what they say
STEPS = ("forward", "forward_comfy_cast_weights", "_conv_forward")  # methods in which a layer computes
OWN_CAST = "cast_bias_weight"  # the method by which GGUF's layers return their dense values
OFFERED = {"dtype", "device", "bias_dtype"}  # its arguments


def is_linear(module: nn.Module) -> bool:
    """True for a Linear, nn.Linear or not, that core or torch computes, or that can return its dense values."""
    if not isinstance(module, nn.Linear) and not _is_core_linear(module):
        return False
    if offers_cast(type(module)):
        return True
    from_core = all(_module_of(step) == "comfy.ops" for step in _steps(module, "forward_comfy_cast_weights"))
    computed = type(module).forward is nn.Linear.forward or _module_of(type(module).forward) == "comfy.ops"
    return computed and from_core and _holds_values(module, (module.out_features, module.in_features))


def is_own_convolution(module: nn.Module) -> bool:
    """True for a convolution that core or torch computes in ``_conv_forward``, or that can return its dense values."""
    if not isinstance(module, CONVOLUTIONS):
        return False
    if offers_cast(type(module)):
        return True
    shape = (module.out_channels, module.in_channels // module.groups, *module.kernel_size)
    return not any(map(is_foreign, _steps(module, *STEPS))) and _holds_values(module, shape)


def is_convolution(module: nn.Module) -> bool:
    cast = isinstance(module, (nn.Conv1d, nn.Conv2d)) and isinstance(module, comfy.ops.CastWeightBiasOp)
    return cast and is_own_convolution(module)


def offers_cast(kind: type[nn.Module]) -> bool:
    """True if layers of the class ``kind`` can return their dense values, as those for GGUF files do."""
    own = getattr(kind, OWN_CAST, None)
    if own is None or not _arguments(own) >= OFFERED:
        return False
    return _module_of(kind.forward) in (_module_of(own), "comfy.ops")  # another pack's forward comes with other values


def is_replaced(module: nn.Module, *names: str) -> bool:
    """True if one of the methods ``names`` is another's; core's bypass LoRAs leave the module's own behind on it."""
    given = ((vars(module)[name], getattr(type(module), name, None)) for name in names if name in vars(module))
    return any(getattr(now, "__func__", now) is not own for now, own in given)


def left_class(module: nn.Module) -> str:
    """The name of the class of a layer with a matrix that another pack computes, to show; empty for other layers."""
    if is_linear(module) or is_own_convolution(module) or isinstance(module, nn.Embedding):
        return ""
    kind = type(module)
    linear = isinstance(module, nn.Linear) or _is_core_linear(module)
    product = linear or isinstance(module, CONVOLUTIONS)
    foreign = any(map(is_foreign, _steps(module, *STEPS)))
    if linear and not foreign and _holds_values(module, (module.out_features, module.in_features)):
        return ""  # a forward of core's network around core's own
    bare = next(module.children(), None) is None and next(_matrices(module), None) is not None
    if not product and not (foreign and bare):
        return ""
    weight = None if foreign else _weight(module)
    named = f"{kind.__module__.rpartition('.')[2]}.{kind.__qualname__.replace('<locals>.', '')}"
    if not isinstance(weight, torch.Tensor):
        return named
    plain = type(weight) in (nn.Parameter, torch.Tensor)
    return f"{named} with {str(weight.dtype).removeprefix('torch.') if plain else type(weight).__name__} weights"


def adapted_layers(network: nn.Module) -> set[nn.Module]:
    """The layers of other packs with packed weights in a network of core's; none in another pack's own network, where
    16-bit values may be passed around the forward of such layers."""
    modules = list(network.modules())
    if any(is_foreign(type(each).forward) for each in modules if next(each.children(), None) is not None):
        return set()
    return set(filter(_is_packed, modules))


def _is_packed(module: nn.Module) -> bool:
    """True for another pack's layer whose weight is no floating matrix; not for a convolution, or a computed weight."""
    weight = _weight(module)
    matrix = type(weight) in (nn.Parameter, torch.Tensor) and weight.is_floating_point() and weight.ndim > 1
    excluded = matrix or hasattr(type(module), "weight") or isinstance(module, CONVOLUTIONS)
    return not excluded and bool(left_class(module))


def left_decisions(network: nn.Module, safe: bool = False) -> Iterator[Decision]:
    """Counts of other packs' layers, by class; if ``safe``, :func:`adapted_layers` count as in safe fp16."""
    ours = adapted_layers(network) if safe else set()
    named = Counter(("in safe fp16 by" if each in ours else "left to", left_class(each)) for each in network.modules())
    for (subject, name), count in named.items():
        if name:
            yield Decision(subject, f"{name}: {count} layer{'s' if count > 1 else ''}")


def why_left(network: nn.Module) -> str:
    """The reason why ``auto`` leaves a network as loaded: other packs compute too much of it; else empty."""
    adapted = adapted_layers(network)
    left = sum(size_of(module) for module in network.modules() if left_class(module) and module not in adapted)
    own = (module for module in network.modules() if is_linear(module) or is_own_convolution(module))
    share = left / (left + sum(map(size_of, (*own, *adapted))) or 1)
    return f"{share:.0%} of its products are left to another pack" if share > MOST_LEFT else ""


def unfit_for_safe(network: nn.Module) -> str:
    """The reason why ``auto`` keeps ``network`` out of safe fp16; empty if over 90% is in Linears or Conv1ds."""
    linear, other, adapted = 0, 0, adapted_layers(network)
    for module in network.modules():
        linears = is_linear(module) or (isinstance(module, nn.Linear) and not left_class(module))
        if linears or module in adapted or (isinstance(module, nn.Conv1d) and is_convolution(module)):
            linear += size_of(module)
        elif not isinstance(module, nn.Embedding) and not left_class(module):
            other += sum(tensor.numel() for tensor in module.parameters(recurse=False))
    share = other / (linear + other or 1)
    return f"{share:.0%} of its weights are not in Linear layers, as in networks made for fp16" if share > FEW else ""


def fixed_in_dtype(network: nn.Module, safe: bool) -> str:
    """The class of the first layer that takes one dtype alone, with ``safe`` outside safe fp16; empty for none."""
    ours = {*adapted_layers(network), *filter(is_linear, network.modules())} if safe else set()
    fixed = (each for each in network.modules() if not takes_any_dtype(each) and each not in ours)
    return next((left_class(each) or type(each).__name__ for each in fixed), "")


def size_of(module: nn.Module) -> int:
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.in_features) * int(module.out_features)
    return sum(tensor.numel() for tensor in _matrices(module))


def takes_any_dtype(module: nn.Module) -> bool:
    """True if a layer computes in the dtype of its input, as core's do, or has no 16-bit weights to mix with it."""
    if isinstance(module, comfy.ops.CastWeightBiasOp) or not (left_class(module) or isinstance(module, nn.Linear)):
        return True
    return not any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in _tensors(module))


def _is_core_linear(module: nn.Module) -> bool:
    cast = isinstance(module, comfy.ops.CastWeightBiasOp) and "in_features" in vars(module)
    return cast and not hasattr(module, "expert_linear")


def _steps(module: nn.Module, *names: str) -> Iterator[Callable[..., Any]]:
    return (getattr(type(module), name) for name in names if hasattr(type(module), name))


def _module_of(function: Any) -> str:
    """The module that defines a function; of a wrapper and what it wraps, the one of another pack, if any."""
    modules = [str(getattr(function, "__globals__", {}).get("__name__", ""))]
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
        modules.append(str(getattr(function, "__globals__", {}).get("__name__", "")))
    return next((name for name in modules if name.partition(".")[0] not in HOME), modules[-1])


def is_foreign(function: Any) -> bool:
    return _module_of(function).partition(".")[0] not in HOME


def _weight(module: nn.Module) -> Any:
    return module._parameters.get("weight", vars(module).get("weight"))


def _holds_values(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """True if a layer's weight is as claimed: floating values of ``shape``, core's packed tensor, or not there yet."""
    if hasattr(type(module), "weight"):  # a property of another pack's
        return False
    weight = _weight(module)
    if weight is None or isinstance(weight, QuantizedTensor):
        return isinstance(module, comfy.ops.CastWeightBiasOp)
    plain = type(weight) in (nn.Parameter, torch.Tensor) and type(weight.data) is torch.Tensor
    return plain and weight.is_floating_point() and weight.shape == shape


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    own = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
    return (tensor for tensor in own if isinstance(tensor, torch.Tensor))


def _matrices(module: nn.Module) -> Iterator[torch.Tensor]:
    return (tensor for tensor in _tensors(module) if tensor.ndim > 1 or tensor.dtype is torch.uint8)  # packed bytes


@functools.cache
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
