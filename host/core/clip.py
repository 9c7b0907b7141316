"""AnyGPU Fit CLIP: core's text encoders with layers patched while ComfyUI has the fitted copy loaded."""

from __future__ import annotations

import functools
import inspect
import logging
import types
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from comfy.patcher_extension import PatcherInjection
from comfy.sd import CLIP
from torch import Tensor, nn

from ...compat.decision import AUTO, CHOSEN, Decision
from ...compat.device.execution import add_hook
from ...compat.device.precision import FP32, SAFE
from ...compat.errors import InputError
from ...compat.memory.parts import Undo
from ...compat.output_check import fault_in_weight
from ...compat.transforms.fp16_layers import FULL, SETTINGS, AskedLinear
from ...compat.transforms.guard import around, forward_inside
from .attention import AttentionOverride
from .layers import (
    AMPLIFIES,
    BY_CORE,
    COUNTS,
    PROVIDER,
    ByNetwork,
    Counts,
    adapted_linear,
    cast_weights,
    left_of,
    safe_linear,
    settings_of,
)
from .machine import AS_LOADED, Fit, ModelDevice, fit_for, machine_of
from .ownership import adapted_layers, is_linear, is_replaced, left_class, left_decisions
from .packed import PackedFit, is_native, packed_fit

log = logging.getLogger(__name__)

KEY = "anygpu_fit"  # of our injections
ENCODE = "encode_token_weights"  # core's method for a prompt
CLIP_PRECISIONS = (AUTO, SAFE, AS_LOADED)  # grows at the end
ATTENTION = "optimized_attention"  # the argument by which core's encoders pass their attention on


@dataclass(frozen=True)
class FittedEncoder:
    """Patches the layers of an encoder with a fit when ComfyUI loads it, and restores them when it unloads it."""

    fit: Fit
    machine: ModelDevice
    packed: PackedFit = field(default_factory=PackedFit)
    tell: Callable[[str], None] = log.info
    hooks: ByNetwork = field(default_factory=ByNetwork)
    counted: ByNetwork = field(default_factory=ByNetwork)  # encoders -> counts of their first prompt
    asked: ByNetwork = field(default_factory=ByNetwork)  # encoders -> version of weights, other packs' layers

    def attach(self, patcher: Any) -> None:
        try:
            self._attach(patcher)
        except BaseException:  # core then never calls detach
            self.detach(patcher)
            raise

    def _attach(self, patcher: Any) -> None:
        """Put the fit's hooks and patches on the patcher's encoders, and have their first prompt counted."""
        encoders, counts, override = patcher.model, None, None
        undo = self.hooks[encoders] = Undo()
        if encoders not in self.counted and hasattr(encoders, ENCODE) and ENCODE not in vars(encoders):
            counts = Counts()
            encoders.__dict__[ENCODE] = functools.partial(self._encode_first, encoders, counts)
        if self.fit.attention is not None:
            override = AttentionOverride(self.fit.attention, self.fit.safe, counts=counts)
            swap = functools.partial(_with_attention, override)
            for module in [each for each in encoders.modules() if _takes_attention(type(each))]:
                undo.append(add_hook(module, swap, before=True, with_kwargs=True).remove)
        undo.append(self.packed.attach(encoders).restore)
        if self.fit.safe:
            self._make_safe(encoders, override, patcher.patches_uuid)
        if (self.machine.guard, self.machine.calls) != (None, None):
            inside = functools.partial(around, self.machine.guard, self.machine.calls)
            for child in encoders.children():
                undo.set(child, "forward", forward_inside(child, inside))

    def _make_safe(self, encoders: nn.Module, override: AttentionOverride | None, version: Any) -> None:
        """Patch the layers that nobody else has patched; other packs' are asked once per ``version`` of the weights."""
        for layer in filter(is_linear, encoders.modules()):
            if not is_replaced(layer, "forward"):
                forward = functools.partial(self._linear, encoders, override, layer)
                layer.__dict__ |= {"forward": forward, PROVIDER: types.MethodType(cast_weights, layer), SETTINGS: None}
        known, asked = self.asked.get(encoders, (None, {}))
        asked = asked if known == version else {}
        self.asked[encoders] = version, asked
        for layer in adapted_layers(encoders):
            if not is_replaced(layer, "forward"):
                own = asked.setdefault(layer, AskedLinear(types.MethodType(type(layer).forward, layer)))
                layer.__dict__ |= {"forward": functools.partial(adapted_linear, layer, own, FULL), SETTINGS: own}

    def _linear(
        self, encoders: nn.Module, override: AttentionOverride | None, layer: Any, x: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The product of a Linear; the first call measures all, and if one is loud, leaves all to core in fp32."""
        if SETTINGS not in layer.__dict__:  # a bypass LoRA of core's put this back after the fit had gone
            return type(layer).forward(layer, x, *args, **kwargs)  # type: ignore[no-any-return]
        if layer.__dict__[SETTINGS] is None and not is_native(layer):  # core may change that between prompts
            patched = [each for each in encoders.modules() if SETTINGS in each.__dict__]
            for each in patched:
                if each.__dict__[SETTINGS] is None and not is_native(each):
                    each.__dict__[SETTINGS] = settings_of(each, x, self.machine.fp32_output)
            if any(getattr(each.__dict__[SETTINGS], "loud", False) for each in patched):
                for each in patched:
                    each.__dict__.update(BY_CORE)
                if override is not None:
                    override.exact = True
        return safe_linear(layer, x, *args, **kwargs)

    def _encode_first(self, encoders: nn.Module, counts: Counts, *args: Any, **kwargs: Any) -> Any:
        """Encode a prompt as ``encoders`` do, and report how the layers and attention of the first were computed."""
        encode = functools.partial(getattr(type(encoders), ENCODE), encoders)
        self._remove_counting(encoders)
        if encoders in self.counted:  # called by another pack's method around this one
            return encode(*args, **kwargs)
        ours = {layer for layer in encoders.modules() if SETTINGS in layer.__dict__}
        left = left_of(encoders, ours) if self.fit.safe else {}
        with Undo() as undo, counts.counting(left):
            for layer in ours:
                undo.set(layer, COUNTS, counts)
            result = encode(*args, **kwargs)
        self.counted[encoders] = counts
        if str(counts):
            self.tell(f"{counts}{AMPLIFIES * any(layer.__dict__[SETTINGS] is BY_CORE[SETTINGS] for layer in ours)}")
        return result

    def detach(self, patcher: Any) -> None:
        self._remove_counting(patcher.model)
        self.hooks.pop(patcher.model, Undo()).restore()
        for layer in patcher.model.modules():
            if SETTINGS in layer.__dict__:
                for name in ("forward", PROVIDER, SETTINGS):
                    layer.__dict__.pop(name, None)

    def _remove_counting(self, encoders: nn.Module) -> None:
        if getattr(vars(encoders).get(ENCODE), "func", None) == self._encode_first:  # another pack's stays
            del encoders.__dict__[ENCODE]


class FittedCLIP(CLIP):
    """A CLIP that computes with its patcher's encoders, also after Select CLIP Device has replaced those."""

    @property
    def cond_stage_model(self) -> Any:
        """The patcher's encoders."""
        return self.patcher.model

    @cond_stage_model.setter
    def cond_stage_model(self, encoders: Any) -> None:
        """Do nothing: core's clone sets the encoders that it began with."""

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        cloned = of_fitted_class(super().clone(*args, **kwargs))
        cloned.patcher.is_injected = False  # core copies it, but what was injected is the original's
        return cloned


def of_fitted_class(clip: Any) -> Any:
    """``clip`` itself, made a :class:`FittedCLIP` unless its class is another pack's."""
    if type(clip) is CLIP:
        clip.__class__ = FittedCLIP
    return clip


def fit_clip(
    clip: Any, precision: str = AUTO, attention: str = AUTO, machine: ModelDevice | None = None,
    tell: Callable[[str], None] = log.info,
) -> tuple[Any, Sequence[Decision]]:  # fmt: skip
    """``clip`` fitted to its device, and what was decided; the very object where nothing is needed. An earlier fit is
    taken back. InputError for no CLIP, UnsupportedError for an explicit choice that cannot be had here."""
    if not hasattr(clip, "cond_stage_model") or not hasattr(clip, "patcher"):
        raise InputError(f"a {type(clip).__name__} without encoders", expected="a CLIP", fix="Connect a CLIP.")
    machine = machine or machine_of(clip.patcher.load_device)
    fit = fit_for(machine, FP32, precision if precision == SAFE else AS_LOADED, attention, offered=CLIP_PRECISIONS)
    why = "core computes text in fp32, which is finite everywhere" if precision == AUTO else ""
    as_loaded = Decision("precision", "fp32 as loaded", why, AUTO if precision == AUTO else CHOSEN)
    decisions = [fit.decisions[0] if fit.safe else as_loaded, fit.decisions[1], *_faults(clip.cond_stage_model)]
    if clip.patcher.get_injections(KEY):
        clip = clip.clone()
        clip.patcher.remove_injections(KEY)
        clip.patcher.is_injected = False  # core's clone copies that too
        clip.patcher.patches_uuid = uuid.uuid4()  # or core would keep what is loaded
        decisions.insert(0, Decision("an earlier fit", "taken back"))
    packed = packed_fit(clip.cond_stage_model, machine.facts, machine.probes.known(), fit.safe)
    care = machine.care(FP32)
    decisions += *packed.decisions, *care
    if not (fit.needed or packed.needed or care):
        return clip, decisions
    decisions += left_decisions(clip.cond_stage_model, safe=True) if fit.safe else ()
    fitted = of_fitted_class(clip.clone())
    encoder = FittedEncoder(fit, machine, packed, tell)
    fitted.patcher.set_injections(KEY, [PatcherInjection(inject=encoder.attach, eject=encoder.detach)])
    return fitted, decisions


def _faults(encoders: nn.Module) -> Iterator[Decision]:
    """A decision on the CPU's first damaged weight, which no dtype mends: core casts bf16 to fp16, which overflows."""
    for name, tensor in encoders.named_parameters():
        owner = encoders.get_submodule(name.rpartition(".")[0])
        if tensor.device.type == "cpu" and type(tensor.data) is Tensor and not left_class(owner):
            fault = fault_in_weight(name, tensor.data)
            if fault:
                why = "another file of this encoder may be whole"
                yield Decision("weights", f"{name} holds {fault}", why, alarming=True)
                return


@functools.cache
def _takes_attention(kind: type[nn.Module]) -> bool:
    return ATTENTION in inspect.signature(kind.forward).parameters


def _with_attention(
    override: AttentionOverride, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer with ``override`` around the attention among them; unchanged where there is none."""
    call = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    if call.arguments.get(ATTENTION) is None:
        return args, kwargs
    call.arguments[ATTENTION] = functools.partial(override, call.arguments[ATTENTION])
    return call.args[1:], call.kwargs
