"""Scenes about layers of other packs in core's networks: written from what is known of such packs, not their code."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import comfy.ops
import torch
from anygpu.host.core import clip as core_clip
from anygpu.host.core import model as core_model
from anygpu.host.core.layers import conv_forwards
from anygpu.host.core.ownership import is_linear, is_own_convolution, left_class
from torch import Tensor, nn
from torch.nn import functional

from host.inside.core_fit import traces, turing
from host.inside.core_fit_vaes import encoded, text_encoder
from host.inside.core_packs import CALLS, PACKS, of_pack
from host.inside.core_tiny import error, louder, made, output

aten = torch.ops.aten
Base = comfy.ops.manual_cast.Linear


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 by row, and the scales (rows, 1)."""
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scale).round().to(torch.int8), scale


class Holder:
    """The scopes in which packs define their classes, which give all of them the name Linear."""

    class OwnForward:
        class Linear(Base):
            """int8 weights and their scale, in a forward of its own."""

            def forward(self, x: Tensor) -> Tensor:
                CALLS.append(1)
                bias = None if self.bias is None else self.bias.to(x.dtype)
                return functional.linear(x, (self.weight.float() * self.weight_scale).to(x.dtype), bias)

    class OwnCast:
        class Linear(Base):
            """Core's forward, which calls a cast of its own."""

            def forward_comfy_cast_weights(self, x: Tensor) -> Tensor:
                CALLS.append(1)
                bias = None if self.bias is None else self.bias.to(x.dtype)
                return functional.linear(x, (self.weight.float() * self.weight_scale).to(x.dtype), bias)

    class Packed:
        class Linear(Base):
            """Bytes in attributes, and one value for a weight."""

            @torch.no_grad()
            def forward(self, x: Tensor) -> Tensor:
                CALLS.append(1)
                bias = None if self.bias is None else self.bias.to(x.dtype)
                return functional.linear(x, (self.packed.float() - 128).mul(self.absmax).to(x.dtype), bias)

    class Recorder:
        class Linear(Base):
            """Core's values, and a look at each input."""

            def forward(self, x: Tensor) -> Tensor:
                CALLS.append(1)
                return super().forward(x)

    class Wrapped:
        class Linear(Base):
            """Core's forward, wrapped: its name and module are core's."""

            @functools.wraps(Base.forward)
            def forward(self, *args: Any, **kwargs: Any) -> Tensor:
                CALLS.append(1)
                return Base.forward(self, *args, **kwargs)

    class Property:
        class Linear(nn.Linear):
            """torch's forward, and a weight that is made when it is asked for."""

            @property
            def weight(self) -> Tensor:
                CALLS.append(1)
                return self.held.float()


class QuantLinear(nn.Module):
    """Another name, no class of core's, and only bytes and scales."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = None  # core looks for it
        packed, scale = quantized(weight)
        self.register_buffer("qweight", packed)
        self.register_buffer("wscales", scale)
        self.bias = None if bias is None else nn.Parameter(bias.float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(1)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, (self.qweight.float() * self.wscales).to(x.dtype), bias)


class HalfOnly(nn.Linear):
    """A kernel for 16-bit input."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is torch.float16
        return super().forward(x)


class Packed8(Tensor):
    """A weight that says it has the logical shape and a floating dtype, and holds int8: as torchao's."""

    @staticmethod
    def __new__(cls, packed: Tensor, scale: Tensor) -> Packed8:
        return Tensor._make_wrapper_subclass(cls, packed.shape, dtype=torch.float32, device=packed.device)

    def __init__(self, packed: Tensor, scale: Tensor) -> None:
        self.packed, self.scale = packed, scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            CALLS.append(1)
            x, weight, bias = args
            bias = None if bias is None else bias.to(x.dtype)
            return func(x, (weight.packed.float() * weight.scale).to(x.dtype), bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (aten.detach, aten.clone, aten.to, aten._to_copy, aten.alias):
            return Packed8(args[0].packed, args[0].scale)
        if func.overloadpacket is aten._has_compatible_shallow_copy_type:
            return False
        raise NotImplementedError(f"{func} of packed bytes")


def of_class(kind: type[nn.Module], old: Any) -> nn.Module:
    """A layer of ``kind`` with the values of a layer of core's."""
    new: Any = kind(old.in_features, old.out_features, bias=old.bias is not None)
    if old.bias is not None:
        new.bias = nn.Parameter(old.bias.detach().float(), requires_grad=False)
    packed, scale = quantized(old.weight.detach())
    if kind is Holder.Packed.Linear:
        new.packed, new.absmax = (packed.int() + 128).to(torch.uint8), scale
        new.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
    elif kind in (Holder.OwnForward.Linear, Holder.OwnCast.Linear):
        new.weight = nn.Parameter(packed, requires_grad=False)
        new.register_buffer("weight_scale", scale)
    elif kind is Holder.Property.Linear:
        del new._parameters["weight"]
        new.held = old.weight.detach().clone()
    else:
        new.weight = nn.Parameter(old.weight.detach().clone(), requires_grad=False)
    return new


def _subclass(kind: type[nn.Module], old: Any) -> nn.Module:
    new = of_class(kind, old)
    new.weight = nn.Parameter(Packed8(*quantized(old.weight.detach())), requires_grad=False)
    return new


FORMS: dict[str, Callable[[Any], nn.Module]] = {
    "A": functools.partial(of_class, Holder.OwnForward.Linear),
    "B": functools.partial(of_class, Holder.OwnCast.Linear),
    "C": functools.partial(of_class, Holder.Packed.Linear),
    "D": functools.partial(of_class, Holder.Recorder.Linear),
    "F": lambda old: QuantLinear(old.weight.detach(), old.bias),
    "wrapped": functools.partial(of_class, Holder.Wrapped.Linear),
    "property": functools.partial(of_class, Holder.Property.Linear),
    "subclass in torch's": functools.partial(_subclass, nn.Linear),
    "subclass in core's": functools.partial(_subclass, Base),
    **{name: functools.partial(of_pack, name) for name in PACKS},
}


def replaced(network: nn.Module, form: str, every: int = 1) -> int:
    """Put a foreign layer in the place of every so many Linears; how many."""
    leaves, count = [(name, leaf) for name, leaf in network.named_modules() if is_linear(leaf)], 0
    for name, leaf in leaves[every // 2 :: every]:
        parent, _, own = name.rpartition(".")
        new = FORMS[form](leaf) if form in FORMS else plain(leaf)
        setattr(network.get_submodule(parent), own, new)
        count += new is not leaf
    return count


def plain(old: Any) -> nn.Linear:
    """One of torch's, which casts nothing."""
    new = nn.Linear(old.in_features, old.out_features, bias=old.bias is not None)
    new.load_state_dict(old.state_dict())
    return new


def counted(run: Callable[[], Tensor]) -> tuple[Tensor, int]:
    CALLS.clear()
    found = run()
    return found, len(CALLS)


def in_a_model(
    name: str, form: str, every: int = 1, precision: str = "auto", peak: float = 0.0, around: bool = False
) -> dict[str, Any]:
    """A network with foreign layers by itself, in plain fp16 and fitted: its second step.

    Args:
        peak: of its residual. around: whether its pack has written the network around them too.
    """
    model, told = made(name, torch.float32 if form == "E" else torch.float16), list[str]()
    network = model.model.diffusion_model
    if peak:
        louder(model, name, peak)
    values = output(model, name)
    layers = replaced(network, form, every)
    if around:
        own = type(network).forward
        members = {"forward": lambda *args, **kwargs: own(*args, **kwargs)}
        network.__class__ = type("Around", (type(network),), members)
    alone, calls = counted(lambda: output(model, name))
    fitted, decisions = core_model.fit_model(model, precision, keep_latents="never", machine=turing(), tell=told.append)
    output(fitted, name)
    found, again = counted(lambda: output(fitted, name))
    plain = model.clone()
    plain.set_model_compute_dtype(torch.float16)
    return {
        "own": error(alone, values), "equal": torch.equal(found, alone), "error": error(found, alone),
        "calls": [calls, again], "layers": layers, "traces": traces(network), "told": told,
        "plain": error(output(plain, name), alone) if peak else 0.0, "said": [str(decision) for decision in decisions],
    }  # fmt: skip


def in_a_clip(form: str) -> dict[str, Any]:
    """The same for a text encoder in safe fp16."""
    clip, ids = text_encoder("T5")
    network, told, values = clip.cond_stage_model, list[str](), encoded(clip, ids)
    layers, kind = replaced(network, form), type(network)
    members = {"encode_token_weights": lambda own, given: encoded(types.SimpleNamespace(cond_stage_model=own), given)}
    network.__class__ = type("Encoders", (kind,), members)
    alone, calls = counted(lambda: encoded(clip, ids))
    fitted, decisions = core_clip.fit_clip(clip, "fp16-safe", attention="as loaded", machine=turing(), tell=told.append)
    encoded(fitted, ids)
    network.encode_token_weights(ids)
    asked = [layer for layer in network.modules() if hasattr(layer.__dict__.get("_anygpu_fp16"), "is_product")]
    found, again = counted(lambda: encoded(fitted, ids))
    return {
        "equal": torch.equal(found, alone), "error": error(found, alone), "calls": [calls, again], "layers": layers,
        "own": error(alone, values), "fp16": len(asked), "restored": torch.equal(encoded(clip, ids), alone),
        "told": "".join(told), "said": [str(decision) for decision in decisions],
    }  # fmt: skip


def convolutions() -> Iterator[nn.Module]:
    """Core's convolutions as packs change them; the last two are core's own."""
    for kind in (comfy.ops.manual_cast.Conv2d, comfy.ops.manual_cast.Conv3d):
        own = types.new_class("Own", (kind,), exec_body=lambda body: body.update(_conv_forward=lambda *_: None))
        yield own(4, 4, 3)
        layer = kind(4, 4, 3)
        layer.weight = nn.Parameter(torch.zeros(layer.weight.shape, dtype=torch.int8), requires_grad=False)
        yield layer
        layer = kind(4, 4, 3)
        layer.weight = nn.Parameter(Packed8(torch.zeros(4, 4), torch.ones(4, 1)), requires_grad=False)
        yield layer
    yield comfy.ops.manual_cast.Conv2d(4, 4, 3)
    yield comfy.ops.manual_cast.Conv3d(4, 4, 3)


def foreign_convolutions() -> dict[str, Any]:
    """Which of them we would compute, and how the others are named."""
    layers = nn.ModuleList(convolutions())
    return {
        "ours": [is_own_convolution(layer) for layer in layers],
        "hooked": [
            int(name) for name, _ in conv_forwards(layers, lambda _layer: types.SimpleNamespace(), torch.float32)
        ],
        "named": [left_class(layer) for layer in layers],
    }


def fixed_in_dtype(precision: str) -> dict[str, Any]:
    """A network that core computes in fp16, with a layer that takes nothing else."""
    model = made("Flux", compute=None)
    network = model.model.diffusion_model
    network.img_in = of_class(HalfOnly, network.img_in).half()
    try:
        fitted, decisions = core_model.fit_model(model, precision, keep_latents="never", machine=turing())
    except Exception as failure:
        return {"refused": f"{type(failure).__name__}: {failure}"}
    return {"same": fitted.model is model.model, "said": [str(decision) for decision in decisions]}
