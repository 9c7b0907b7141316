"""Core's layers as a device can compute them: Linear, Conv1d and Conv2d in safe fp16, Conv3d in the form that works."""

from __future__ import annotations

import functools
import math
import sys
import types
import weakref
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import comfy.model_management
import comfy.ops
import torch
from comfy.ldm.modules import attention
from comfy.quant_ops import QuantizedTensor
from torch import Tensor, nn
from torch.nn import functional

from ...compat.device.execution import add_hook, to_host
from ...compat.transforms.conv3d import geometry_of, layer_of, own_edges
from ...compat.transforms.conv3d_choice import Chooser, Conv3dChoice
from ...compat.transforms.conv3d_methods import convolve, padded
from ...compat.transforms.fp16_layers import (
    FULL,
    HALF,
    SETTINGS,
    AskedLinear,
    LayerSettings,
    fp32_linear,
    full_linear,
    scales_for,
)
from ..casting import cast_by_core
from .ownership import (
    adapted_layers,
    is_convolution,
    is_linear,
    is_own_convolution,
    is_replaced,
    left_class,
    offers_cast,
    takes_any_dtype,
)
from .packed import is_native

COUNTS = "_anygpu_counts"  # on a layer while its calls are counted
SAFE, PLAIN, EXACT, WIDE = "fp16-safe", "plain fp16", "fp32", "in float32 by core"
WRAPPER = attention.attention_basic.__code__  # of every attention function of core's: all are closures of one wrapper
PAST_FORWARD = getattr(getattr(comfy.ops, "linear_input_act", None), "__code__", None)  # computes packed layers itself
FEW = 4  # rows of a Linear, or channels of a convolution, up to which fp32 is cheap; all blocks see their rounding
LOUD = 10.0  # times the median row, and the usual 1: the length of a row that can amplify rounding
ByNetwork = weakref.WeakKeyDictionary[nn.Module, Any]  # network -> a value that all clones of its MODEL share
BY_CORE = {SETTINGS: LayerSettings(False, math.inf)}
AMPLIFIES = "; rows of its weights are so much longer than most that it would amplify what fp16 rounds"
AMPLIFIED = "txtfusion."  # prefix of Krea 2's text layers, whose rounding its blocks amplify; 1 % of its products
HOOK = "_conv_forward"  # the method that all of core's convolutions call with cast weights
PROVIDER = "weights_on"  # by which our own layers ask for weights
FITS = "_anygpu_fits"  # on a layer that was measured: whether it is computed in plain fp16


@dataclass
class Counts:
    """Counts of how the layers and the attention of one call of a network were computed; as text, the report."""

    layers: dict[nn.Module, str] = field(default_factory=dict)  # layer that was called -> how it was computed
    ways: Counter[str] = field(default_factory=Counter)  # how our override computed attention -> number of calls
    attention: int = 0  # all calls of attention: core's, and torch's own outside them
    complete: bool = False  # whether all calls were seen; False under another profiler
    _depth: int = 0

    @property
    def casts(self) -> bool:
        """True if the network cast its stream to fp16 by itself: no layer was given fp32."""
        return PLAIN in self.layers.values() and not {SAFE, EXACT, WIDE} & set(self.layers.values())

    @property
    def unreached(self) -> int:
        return max(0, self.attention - self.ways.total())

    def note(self, layer: nn.Module, way: str) -> None:
        """Note how a layer was computed; of several calls the first that was not in safe fp16 counts."""
        if self.layers.get(layer, SAFE) == SAFE:
            self.layers[layer] = way

    @contextmanager
    def inside_attention(self) -> Iterator[None]:
        """For the block, a call of attention, count it; calls inside it are parts of it and not counted."""
        self.attention += not self._depth
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextmanager
    def counting(self, left: Mapping[nn.Module, str]) -> Iterator[None]:
        """For the block, count this thread's calls of attention and of the layers ``left``, each with its reason."""
        self.complete = sys.getprofile() is None

        def profile(frame: Any, event: str, argument: Any) -> None:
            if frame.f_code is WRAPPER and event == "call":
                self.attention += not self._depth
                self._depth += 1
            elif frame.f_code is WRAPPER and event == "return":
                self._depth -= 1
            elif event == "c_call" and argument is functional.scaled_dot_product_attention and not self._depth:
                self.attention += 1
            elif event == "call" and frame.f_code is PAST_FORWARD:
                layer = frame.f_locals.get("linear")  # get: an error would end the sampling
                if layer in left:
                    self.note(layer, left[layer])

        with ExitStack() as stack:
            for layer, why in left.items():
                stack.enter_context(add_hook(layer, lambda layer, _, why=why: self.note(layer, why), before=True))
            if self.complete:
                stack.callback(sys.setprofile, None)
                sys.setprofile(profile)
            yield

    def __str__(self) -> str:
        ways = Counter(self.layers.values())
        ours = [f"{way} in {ways.pop(way)}" for way in (PLAIN, SAFE, EXACT) if way in ways] or [f"{SAFE} in 0"]
        layers = f"{' and '.join(ours)} of {len(self.layers)} layers called" if self.layers else ""
        if ways:
            layers += f" (left: {'; '.join(f'{count} {way}' for way, count in ways.most_common())})"
        if not (calls := max(self.ways.total(), self.attention)):
            return layers
        named = "; ".join(f"{count} {way}" for way, count in self.ways.most_common())
        of = f" of {calls}" if self.complete else ""  # under another profiler the rest is not seen
        message = f"attention {calls - self.unreached}{of}" + (f" ({named})" if named else "")
        if self.unreached:
            message += ", the rest is called without the options by which it could be reached"
        return ", ".join(filter(None, (layers, message)))


def note_call(layer: nn.Module, way: str) -> None:
    if not torch.compiler.is_compiling() and COUNTS in layer.__dict__:
        layer.__dict__[COUNTS].note(layer, way)


@dataclass(frozen=True, slots=True)
class ConvForward:
    """Replaces the ``_conv_forward`` of ``layer``, or of its copies on other devices: the same sums in another form."""

    layer: nn.Module
    choice: Conv3dChoice

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, autopad: str | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if autopad == "causal_zero":
            weight = weight[:, :, -x.shape[2] :]  # as core: the taps before see nothing but zeros
        edges, mode = own_edges(self.layer)
        x = x if edges is None else padded(x, edges, mode)
        return convolve(self.choice.form, x, weight, bias, geometry_of(self.layer), self.choice.chunk_bytes)


def conv_forwards(network: nn.Module, choose: Chooser, dtype: torch.dtype) -> Iterator[tuple[str, ConvForward]]:
    """(name, new ``_conv_forward``) of each 3-D convolution for which ``choose`` has another form in ``dtype``."""
    for name, layer in network.named_modules():
        if not isinstance(layer, nn.Conv3d) or HOOK in layer.__dict__ or not is_own_convolution(layer):
            continue
        if (choice := choose(layer_of(name, layer, dtype))) is not None:
            yield name, ConvForward(layer, choice)


def takes_fp16(network: nn.Module) -> bool:
    """True if every layer of ``network`` is core's, and casts its weights to its input's dtype or has fp16 weights."""
    for module in network.modules():
        if left_class(module) or type(module) is nn.Linear:
            return False
        weight = module._parameters.get("weight")
        fixed = isinstance(module, comfy.ops.CastWeightBiasOp) and not getattr(module, "comfy_cast_weights", True)
        if fixed and weight is not None and weight.dtype is not HALF:
            return False
    return True


@contextmanager
def cast_weights(layer: Any, like: Tensor, _bias_dtype: Any = None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """For the block, weight in fp16 and bias in fp32 on the device of ``like``, by core or the ``layer`` itself."""
    if offers_cast(type(layer)):  # GGUF's layers, whose bytes core's function would take for values
        weight, bias = layer.cast_bias_weight(None, dtype=HALF, device=like.device, bias_dtype=FULL)[:2]
        yield weight.as_subclass(Tensor).to(HALF), bias
        return
    if not isinstance(layer, comfy.ops.CastWeightBiasOp):  # torch's own, which core only moves
        yield layer.weight.to(like.device, HALF), None if layer.bias is None else layer.bias.to(like.device, FULL)
        return
    with cast_by_core(layer, dtype=HALF, device=like.device, bias_dtype=FULL, compute_dtype=FULL) as (weight, bias):
        yield weight.dequantize().to(HALF) if isinstance(weight, QuantizedTensor) else weight, bias


def safe_linear(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The product of a Linear: fp32 from scaled fp16 operands, for few rows from fp32 ones; core's for other inputs."""
    x = _in_measured_dtype(layer, x)
    plain = type(x) is Tensor and x.dtype is FULL and x.ndim > 1 and not (args or kwargs or x.requires_grad)
    safe = plain and not is_native(layer) and math.isfinite(getattr(layer, SETTINGS).reach)
    few = safe and x.shape[:-1].numel() <= FEW
    note_call(layer, EXACT if few else _computed_as(x, safe))
    if not safe:
        x = x if isinstance(layer, comfy.ops.CastWeightBiasOp) else x.to(layer.weight.dtype)  # torch's does not cast
        return type(layer).forward(layer, x, *args, **kwargs)
    comfy.ops.run_every_op()
    smoothing = getattr(layer, "pre_quant_scale", None)
    if smoothing is not None:
        x = x * comfy.model_management.cast_to_device(smoothing, x.device, x.dtype)
    return full_linear(layer, x) if few else fp32_linear(layer, x)


def adapted_linear(layer: Any, asked: AskedLinear, loaded: torch.dtype, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The product of another pack's ``layer``: in fp32 from fp16 operands where ``asked`` finds its forward linear;
    else by that forward, in the dtype in which the network was ``loaded`` if it takes no other."""
    plain = type(x) is Tensor and x.dtype is FULL and x.ndim > 1 and not (args or kwargs or x.requires_grad)
    safe = plain and getattr(layer, SETTINGS) is asked and asked.is_product(x)  # of a loud network it is BY_CORE's
    note_call(layer, SAFE if safe else left_class(layer))
    if safe:
        return asked(x)
    if takes_any_dtype(layer) or x.dtype is not FULL:
        return asked.forward(x, *args, **kwargs)
    return asked.forward(x.to(loaded), *args, **kwargs).float()


def settings_of(layer: Any, like: Tensor, fp32_output: bool = False) -> LayerSettings:
    """Settings by the longest row of the weights, cast once: in the L2 norm, for a convolution in L1, its bound."""
    order = 1 if is_convolution(layer) else 2
    with cast_weights(layer, like) as (weight, _):
        rows = torch.linalg.vector_norm(weight.flatten(1), order, dim=1, dtype=FULL)
        reach, middle = to_host(torch.stack([rows.amax(), rows.median()])).tolist()
    one = weight[0].numel() ** (1 / order - 1 / 2)  # the largest norm of a row whose L2 norm is 1
    loud = reach > LOUD * max(one, middle)
    return LayerSettings(fp32_output, max(1.0, reach) if math.isfinite(reach) else math.inf, loud=loud)


def _in_measured_dtype(layer: Any, x: Tensor) -> Tensor:
    """``x`` in fp16 where the layer was measured to fit it, else fp32; as it is for an unmeasured layer."""
    if FITS not in layer.__dict__ or type(x) is not Tensor or x.dtype not in (HALF, FULL):
        return x
    return x.to(HALF if layer.__dict__[FITS] else FULL)


def _computed_as(x: Tensor, safe: bool) -> str:
    return SAFE if safe else PLAIN if x.dtype is HALF else f"in {str(x.dtype).removeprefix('torch.')} by core"


def safe_convolution(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The fp32 result of a convolution from scaled fp16 operands; core's for few channels and other inputs."""
    forward, x = functools.partial(type(layer)._conv_forward, layer), _in_measured_dtype(layer, x)
    reach: float = getattr(layer, SETTINGS).reach
    safe = type(x) is Tensor and x.dtype is FULL and not x.requires_grad and math.isfinite(reach)
    few = safe and min(weight.shape[:2]) <= FEW
    note_call(layer, EXACT if few else _computed_as(x, safe))
    if few or not safe:  # the weights are in the dtype that the layer was given
        return forward(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))  # type: ignore[no-any-return]
    places = weight.ndim - 2
    scale = scales_for(torch.linalg.vector_norm(x, math.inf, dim=tuple(range(-1 - places, 0)), keepdim=True), reach)
    y = forward((x / scale).to(HALF), weight.to(HALF), None).float() * scale
    return y if bias is None else y + bias.view(-1, *[1] * places)


@dataclass
class SafeLayers:
    """The patches that compute the Linears, 1-D and 2-D convolutions of one network in safe fp16 during a call."""

    fp32_output: bool  # whether a GEMM of fp16 operands can return fp32
    convolutions: bool  # whether fp16 convolutions are right on this device; else they stay in fp32
    version: Any = None  # of the weights that were measured
    loud: bool = False  # whether a layer has a row many times longer than most: all then compute in fp32, by core
    patches: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)

    def measure(self, network: nn.Module, like: Tensor, version: Any, loaded: torch.dtype) -> None:
        """Make the patches anew, reading each weight once, unless ``version`` of the weights is the last one; None
        never is. ``like``: where inputs are; ``loaded``: in what core computes the layers that a node has adapted."""
        if version is not None and version == self.version:
            return
        earlier = self.patches if version is None else {}  # hooks change weights at each call: asked only once
        self.patches, self.version = {}, None
        for name, layer in network.named_modules():
            if not is_linear(layer) or is_native(layer):
                continue
            comfy.ops.run_every_op()  # where core obeys a cancel
            self.patches[layer] = {
                "forward": types.MethodType(safe_linear, layer),
                PROVIDER: types.MethodType(cast_weights, layer),
                **(BY_CORE if name.startswith(AMPLIFIED) else {SETTINGS: settings_of(layer, like, self.fp32_output)}),
            }
        for layer in filter(is_convolution, network.modules()) if self.convolutions else ():
            comfy.ops.run_every_op()
            self.patches[layer] = {HOOK: functools.partial(safe_convolution, layer), SETTINGS: settings_of(layer, like)}
        self.loud = any(patch[SETTINGS].loud for patch in self.patches.values())
        for layer in adapted_layers(network):
            asked = earlier.get(layer, {}).get(SETTINGS) or AskedLinear(types.MethodType(type(layer).forward, layer))
            self.patches[layer] = {"forward": functools.partial(adapted_linear, layer, asked, loaded), SETTINGS: asked}
        self.version = version  # not before: a cancel or a shortage ends it half way

    @property
    def free(self) -> list[nn.Module]:
        """The layers that no other node or pack has patched."""
        return [layer for layer in self.patches if not is_replaced(layer, "forward", HOOK)]

    @contextmanager
    def patches_on(self, counts: Counts | None = None) -> Iterator[None]:
        """For the block, patch all :attr:`free` layers, or if one is loud give them to core; ``counts`` notes calls."""
        shared = ({} if counts is None else {COUNTS: counts}) | (BY_CORE if self.loud else {})
        patches = {layer: self.patches[layer] | shared for layer in self.free}
        try:
            for layer, patch in patches.items():
                layer.__dict__.update(patch)
            yield
        finally:
            for layer, patch in patches.items():
                for name in patch:
                    layer.__dict__.pop(name, None)


def kind_left(module: Any) -> str:
    """The kind, in words, of a layer of core's that safe fp16 leaves alone; empty for others."""
    if hasattr(module, "expert_linear"):
        return "banks of experts"
    if is_linear(module) and is_native(module):
        return f"packed layers that compute as {getattr(module, 'quant_format', 'packed')}"
    replaced = is_linear(module) and is_replaced(module, "forward")
    return "layers whose forward another node has replaced" if replaced else ""


def left_of(network: nn.Module, ours: Container[nn.Module]) -> dict[nn.Module, str]:
    """Each layer with a product, but ``ours`` -> its kind in words, by which core or another pack computes it."""
    why = {}
    for each in network.modules():
        if each not in ours and not isinstance(each, nn.Embedding):
            holds_matrix = getattr(each._parameters.get("weight"), "ndim", 0) > 1  # unlike a norm
            why[each] = kind_left(each) or left_class(each) or (type(each).__name__ if holds_matrix else "")
    return {each: kind for each, kind in why.items() if kind}


def left_alone(network: nn.Module) -> Mapping[str, int]:
    unpacked = (module for module in network.modules() if not (is_linear(module) and is_native(module)))
    return Counter(filter(None, map(kind_left, unpacked)))
