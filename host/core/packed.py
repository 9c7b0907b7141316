"""The packed layers of core's networks: while a fitted network is used its weights name a layout of ours, by which
comfy-kitchen finds no product, or one that is watched, and values dequantised in fp32 and rounded once."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import comfy.quant_ops as quant_ops
import torch
from comfy.quant_ops import QuantizedTensor
from torch import Tensor, nn
from torch.nn import functional

from ...compat.checkpoints.unpacking import PACKINGS, SCALED, float8_values, laid_out, unpacked
from ...compat.decision import AUTO, Decision
from ...compat.device.execution import to_host
from ...compat.device.facts import DeviceFacts
from ...compat.device.failures import DEVICE_ERRORS, KERNEL, failure_kind
from ...compat.device.packed_paths import CORE, DEQUANTISE, FORMATS, FP4, FP8, INTEGERS, Answers, path_for
from ...compat.errors import first_line
from ...compat.memory.parts import Undo

log = logging.getLogger(__name__)
UNPACKED = "_full_precision_mm"  # core's switch of a layer to multiply dequantised, with inputs unrounded
SMALLEST = torch.finfo(torch.float16).smallest_normal
HELD = ("weight", "_v_weight")  # names of a layer's weight: its own, and the one that core has paged in
COARSE = "in fp32 and rounded once; core would multiply by scales that fp16 holds in part"
NARROW = "its sums come out in 16 bits, and safe fp16 around fp32 is as fast and more exact"
PREFIX = "anygpu {} "  # of the names of our layouts, with the path
BYTES = "bytes"  # the path of float8 weights on a device without float8
FAILED: dict[str, str] = {}  # by layout: why its product is not tried again


class _StandIn(type):
    """Metaclass of our layouts, which take all that they do not define from the layout for which they stand in."""

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.__dict__["stands_for"], name)


@functools.cache
def _layout(name: str, path: str) -> str:
    """The name of our layout in place of ``name``, registered by the first call; only path ``CORE`` computes packed."""
    original = quant_ops.get_layout_class(name)
    members = {
        "stands_for": original,
        "name": name,
        "dequantize": staticmethod(functools.partial(_values, original)),
        "supports_fast_matmul": staticmethod(lambda: path == CORE and original.supports_fast_matmul()),
    }
    if path == BYTES:
        each = next(each for each, about in quant_ops.QUANT_ALGOS.items() if about["comfy_tensor_layout"] == name)
        members["dequantize"] = staticmethod(functools.partial(_values_of_bytes, original, each))
        members["quantize"] = staticmethod(functools.partial(_quantised_to_bytes, original))
    ours = PREFIX.format(path) + name
    layout = _StandIn(ours, (), members)
    quant_ops.register_layout_class(ours, layout)
    if path == CORE:
        quant_ops.register_layout_op(torch.ops.aten.linear.default, layout)(_watched_linear)
        quant_ops.register_layout_op(torch.ops.aten.t.default, layout)(lambda _, args, kwargs: _original(args[0]).t())
    return ours


def _values(original: Any, packed: Tensor, params: Any) -> Tensor:
    """``dequantize`` of our layouts: by ``original`` in fp32, rounded once to the dtype that ``params`` ask for."""
    rows = original is quant_ops.TensorWiseINT8Layout and params.scale.ndim == 1  # would broadcast over columns
    wide = dataclasses.replace(params, scale=params.scale[:, None] if rows else params.scale, orig_dtype=torch.float32)
    return original.dequantize(packed, wide).to(params.orig_dtype)


def holds_float8(tensor: Any) -> bool:
    parts = [tensor._qdata, *vars(tensor._params).values()] if isinstance(tensor, QuantizedTensor) else [tensor]
    return any(str(getattr(part, "dtype", "")).startswith("torch.float8") for part in parts)


def as_bytes(weight: Any) -> Any:
    """A packed weight of our layout over the same memory, with float8 viewed as uint8, which any device can hold."""
    fields = {name: _bytes(value) for name, value in vars(weight._params).items()}
    return QuantizedTensor(_bytes(weight._qdata), _layout(weight._layout_cls, BYTES), type(weight._params)(**fields))


def in_bytes(layer: nn.Module) -> bool:
    return any(weight._layout_cls.startswith(PREFIX.format(BYTES)) for weight in _weights(layer))


def with_float8_saved(network: Any, weights: dict[str, Any], **others: Any) -> Any:
    """``state_dict_for_saving`` of a core model, given as a weak reference, whose layers may hold float8 as bytes."""
    for name, layer in network().diffusion_model.named_modules():
        if in_bytes(layer):
            dtype = quant_ops.QUANT_ALGOS[layer.quant_format]["storage_t"]
            weights[f"{name}.weight"] = to_host(weights[f"{name}.weight"]).view(dtype)
    return type(network()).state_dict_for_saving(network(), weights, **others)


def _bytes(value: Any) -> Any:
    return value.view(torch.uint8) if isinstance(value, Tensor) and holds_float8(value) else value


def _values_of_bytes(original: Any, layer_format: str, packed: Tensor, params: Any) -> Tensor:
    """``dequantize`` of the layouts of :func:`as_bytes`: the values of a weight held as uint8, decoded without any
    float8 tensor and rounded once to ``params.orig_dtype``. ``original`` is core's layout, which has one format."""
    codec = SCALED if layer_format in FP8 else layer_format
    packing, tensors = PACKINGS[codec], original.state_dict_tensors(packed, params)
    rows, columns = packed.shape[0], packed.shape[1] * packing.values
    sides = {}  # scales and whatever else the codec stores beside its values
    for side, how in packing.sides.items():
        if (tensor := tensors.get(f"_{side}")) is not None:
            sides[side] = laid_out(tensor, how, rows, columns)
    dtype = quant_ops.QUANT_ALGOS[layer_format]["storage_t"]
    stored = float8_values(packed, dtype) if str(dtype).startswith("torch.float8") else packed
    return unpacked(codec, stored, sides, getattr(params, "convrot_groupsize", 0), params.orig_dtype)


def _quantised_to_bytes(original: Any, tensor: Tensor, **options: Any) -> tuple[Tensor, Any]:
    """``quantize`` of :func:`as_bytes`: by ``original`` on the host, with float8 returned as bytes."""
    given = {name: to_host(value) if isinstance(value, Tensor) else value for name, value in options.items()}
    given |= {name: torch.float8_e4m3fn for name, value in options.items() if value is torch.uint8}  # of its scales
    packed, params = original.quantize(to_host(tensor), **given)
    fields = {name: _bytes(value) for name, value in vars(params).items()}
    return _bytes(packed).to(tensor.device), type(params)(**fields).to_device(tensor.device)


def _original(weight: Any) -> Any:
    return QuantizedTensor(weight._qdata, weight.layout_cls.name, weight._params)


def _watched_linear(_: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """A Linear by core's packed product; after a kernel of its layout has failed, for good, by dequantised values."""
    x, weight, *bias = args
    name = weight.layout_cls.name
    if name not in FAILED:
        try:
            return functional.linear(x, _original(weight), *bias)
        except DEVICE_ERRORS as error:
            if failure_kind(error) != KERNEL:
                raise
            FAILED[name] = f"{name}: {first_line(error)}; dequantised from here on"
            log.warning("AnyGPU: %s", FAILED[name])
    return functional.linear(x, weight.dequantize().to(x.dtype), *bias)


def packed_layers(network: nn.Module) -> Iterator[nn.Module]:
    return (module for module in network.modules() if next(_weights(module), None) is not None)


def _weights(layer: nn.Module) -> Iterator[Any]:
    held = (layer._parameters.get(name, vars(layer).get(name)) for name in HELD)
    return (weight for weight in held if isinstance(weight, QuantizedTensor))


def is_native(layer: Any) -> bool:
    """True if core multiplies the weight of ``layer`` packed, in int8 or fp8: no switch, patch or layout unpacks it."""
    if getattr(layer, "layout_type", None) is None or getattr(layer, UNPACKED, True):
        return False
    cast = getattr(layer, "comfy_force_cast_weights", False) or layer.weight_function or layer.bias_function
    return not (cast or any(weight._layout_cls.startswith(PREFIX.format(DEQUANTISE)) for weight in _weights(layer)))


def _is_coarse(layer: nn.Module) -> bool:
    """True if core dequantises ``layer`` in fp16 by a scale below fp16's normal numbers."""
    params = (weight._params for weight in _weights(layer) if weight._params.orig_dtype == torch.float16)
    scales = (getattr(each, "scale", None) for each in params)
    fp32 = (to_host(each) for each in scales if isinstance(each, Tensor) and each.dtype == torch.float32)
    return any(bool(((each > 0) & (each < SMALLEST)).any()) for each in fp32)


@dataclass(frozen=True)
class PackedFit:
    paths: Mapping[str, str] = field(default_factory=dict)  # format -> ``CORE`` or ``DEQUANTISE``
    decisions: Sequence[Decision] = ()
    needed: bool = False  # whether core would multiply a layer that is to be dequantised, or dequantise it coarsely

    def attach(self, network: nn.Module) -> Undo:
        """Give packed weights the layouts of their paths until the returned Undo is restored. On ``CORE`` float formats
        keep core's layout; on any path one whose product has failed is dequantised."""
        undo = Undo()
        for layer in packed_layers(network) if self.paths else ():
            path = self.paths.get(getattr(layer, "quant_format", ""))
            weights = [weight for weight in _weights(layer) if not isinstance(weight.layout_cls, _StandIn)]
            if path is None or not weights:
                continue
            undo.append(functools.partial(_restore_layouts, layer))
            path = DEQUANTISE if any(weight._layout_cls in FAILED for weight in weights) else path
            for weight in weights if path == DEQUANTISE or layer.quant_format in INTEGERS else ():
                weight._layout_cls = _layout(weight._layout_cls, path)
            if path == DEQUANTISE and hasattr(layer, UNPACKED):
                undo.set(layer, UNPACKED, True)
        return undo


def _restore_layouts(layer: nn.Module) -> None:
    for weight in _weights(layer):
        if isinstance(weight.layout_cls, _StandIn):
            weight._layout_cls = weight.layout_cls.__dict__["name"]


def packed_fit(
    network: nn.Module, facts: DeviceFacts, answers: Answers, safe: bool = False, choice: str = AUTO
) -> PackedFit:
    """The path of each packed format in ``network``: on ``auto`` those core does not multiply are dequantised, and so
    are float ones in a network fitted to ``safe`` fp16 around an fp32 stream."""
    formats = {layer: str(getattr(layer, "quant_format", "") or "unnamed") for layer in packed_layers(network)}
    # Core multiplies int8 and int4 as they are packed, whatever its switches say
    multiplied = {name for layer, name in formats.items() if name in INTEGERS or is_native(layer)}
    coarse = {layer_format for layer, layer_format in formats.items() if _is_coarse(layer)} - multiplied
    paths, decisions = dict[str, str](), list[Decision]()
    for layer_format, count in Counter(formats.values()).items():
        if layer_format not in FORMATS:
            decisions.append(Decision(f"{count} {layer_format} layers", "left as they are", "not a format known here"))
            continue
        chosen = path_for(facts, layer_format, answers, choice)
        if choice == AUTO and layer_format not in multiplied:
            why = COARSE if layer_format in coarse else "as core does on this device"
            chosen = dataclasses.replace(chosen, path=DEQUANTISE, why=why)
        elif choice == AUTO and safe and layer_format in (*FP8, *FP4):
            chosen = dataclasses.replace(chosen, path=DEQUANTISE, why=NARROW)
        paths[layer_format] = chosen.path
        decisions.append(chosen.decision(count))
    needed = any(path == DEQUANTISE and name in multiplied | coarse for name, path in paths.items())
    return PackedFit(paths, decisions, needed)
