"""AnyGPU Fit Model: what a loader of core's made, given back so that it runs well on this device.

Everything happens in one wrapper around the call of the network: it patches layers for the length of that call and
leaves nothing behind, so a clone, a save, a merge or an unload finds the model as it was.
"""

from __future__ import annotations

import functools
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import comfy.model_management
import torch
from comfy.cli_args import args as options
from comfy.patcher_extension import WrappersMP
from torch import nn

from ...compat.decision import AUTO, Decision
from ...compat.device.precision import SAFE
from ...compat.errors import InputError, UnsupportedError
from ...compat.memory.parts import Undo
from ..diffusion_model import CoreModel
from ..recovery import WRAPPER, save_core_samples
from .attention import AttentionOverride, with_override
from .convolutions import HOOK, conv_forwards
from .counts import Counts
from .layers import ByNetwork, SafeLayers, left_alone, reached_by_safe, unfit_for_safe
from .machine import AS_LOADED, Fit, ModelDevice, fit_for, machine_of
from .ownership import fixed_in_dtype, is_linear, left_decisions, why_left
from .weights import clone_cast_on_host, damage_to_bf16, fp16_or_fp32, weights_decision

log = logging.getLogger(__name__)

KEY = "anygpu_fit"  # of our wrappers
CAST = "manual_cast_dtype"  # core's name for the dtype in which a network computes
CASTS = "; this network casts its stream by itself, and computes as loaded"
KEEP = (AUTO, "always", "never")  # grows at the end
LOSSY = {  # parts of ComfyUI's --fast, and what becomes of them in layers that are in safe fp16
    "fp16_accumulation": "sums in fp16 stay on: bounded too, but less exact",
    "cublas_ops": "its kernels are not used in layers in safe fp16",
    "fp8_matrix_mult": "its kernels are not used in layers in safe fp16",
}


@dataclass
class Seen:
    """Facts about one network.

    Args:
        layers: its layers in safe fp16.
        counted: whether a call of it has been counted.
        casts: whether that showed a stream that it casts by itself.
    """

    layers: SafeLayers
    counted: bool = False
    casts: bool = False


@dataclass(frozen=True)
class FittedNetwork:
    """The wrapper around core's call of a network.

    Args:
        fit: what the network is given.
        machine: the device.
        loaded: the dtype in which core computes it without us; None where that is the dtype of its weights.
        tell: takes the line that says what the first call did.
    """

    fit: Fit
    machine: ModelDevice
    loaded: torch.dtype | None = None
    tell: Callable[[str], None] = log.info
    seen: ByNetwork = field(default_factory=ByNetwork)
    convolutions: ByNetwork = field(default_factory=ByNetwork)

    def __call__(self, executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the result of core's own call on the noisy latent ``x``; the first call is counted and reported."""
        if comfy.model_management.in_training:
            return executor(x, *args, **kwargs)
        network = _plain(executor.class_obj.diffusion_model)
        layers = SafeLayers(self.machine.fp32_output, self.machine.fp16_convolutions)
        seen: Seen = self.seen.setdefault(network, Seen(layers))
        if seen.counted:
            return self._run(executor, network, seen, None, (x, *args), kwargs)
        counts = Counts()
        with counts.attention_counted() if self.fit.attention is not None else nullcontext():
            output = self._run(executor, network, seen, counts, (x, *args), kwargs)
        seen.counted, seen.casts = True, counts.unused
        if seen.casts:
            output = self._run(executor, network, seen, None, (x, *args), kwargs)
        if str(counts):
            self.tell(f"{counts}{CASTS if seen.casts else ''}")
        return output

    def _run(
        self, executor: Any, network: nn.Module, seen: Seen, counts: Counts | None, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        model, safe = executor.class_obj, self.fit.safe and not seen.casts
        with ExitStack() as stack:
            if safe:
                hooked = getattr(getattr(model, "current_patcher", None), "current_hooks", None)
                seen.layers.measure(network, args[0], None if hooked else model.current_weight_patches_uuid)
                stack.enter_context(seen.layers.patches_on(counts))
            elif seen.casts:
                undo = Undo()
                stack.callback(undo.restore)
                undo.set(model, CAST, self.loaded)
            stack.enter_context(self._convolutions_on(network, model.get_dtype_inference()))
            if self.fit.attention is None:
                return executor(*args, **kwargs)
            override = functools.partial(AttentionOverride, self.fit.attention, safe, counts=counts)
            given, named = with_override(override, args, kwargs)
            return executor(*given, **named)

    @contextmanager
    def _convolutions_on(self, network: nn.Module, dtype: torch.dtype) -> Iterator[None]:
        """The 3-D convolutions of ``network``, patch embeddings mostly, in the forms chosen for this device."""
        if network not in self.convolutions:
            self.convolutions[network] = [each for _, each in conv_forwards(network, self.machine.convolutions, dtype)]
        forwards = self.convolutions[network]
        try:
            for forward in forwards:
                forward.layer.__dict__[HOOK] = forward
            yield
        finally:
            for forward in forwards:
                forward.layer.__dict__.pop(HOOK, None)


def fit_model(
    model: Any,
    precision: str = AUTO,
    attention: str = AUTO,
    keep_latents: str = AUTO,
    machine: ModelDevice | None = None,
    tell: Callable[[str], None] = log.info,
) -> tuple[Any, Sequence[Decision]]:
    """``model`` fitted to its device, and what was decided; the very object where nothing is needed.

    A fit that ``model`` already has is taken back first.

    Args:
        model: a MODEL.
        precision, attention, keep_latents: as on the node.
        machine: what is known of the device; None asks the one that the model loads on.
        tell: takes a line, once the first call of the network has been counted.

    Raises:
        InputError: no MODEL. UnsupportedError: an explicit choice that cannot be had here.
    """
    if isinstance(getattr(model, "model", None), CoreModel):
        why = "a pipeline of AnyGPU decides this on its load node"
        return model, (Decision("model", "as it is", why),)
    network = _plain(getattr(getattr(model, "model", None), "diffusion_model", None))
    if not isinstance(network, nn.Module) or not hasattr(model.model, "get_dtype_inference"):
        raise InputError(
            f"a {type(model).__name__} without a network that core runs", expected="a MODEL", fix="Connect a MODEL."
        )
    decisions: list[Decision] = []
    if KEY in model.attachments:
        model = _unfitted(model)
        network = _plain(model.model.diffusion_model)
        decisions.append(Decision("an earlier fit", "taken back"))
    machine = machine or machine_of(model.load_device)
    loaded = model.get_model_object(CAST)
    left = why_left(network)
    fit = _fit_of(network, machine, loaded or model.model_dtype(), precision, attention, left)
    stream = torch.float32 if fit.safe else fit.dtype or loaded or model.model_dtype()
    forms = Counter(each.choice.form.value for _, each in conv_forwards(network, machine.convolutions, stream))
    if not fit.needed and machine.convolves(stream):
        forms.clear()  # they would only be faster, in the smallest layers of the network
    damage = damage_to_bf16(network, machine)
    sound = _sound_clone(model, fit.safe) if damage and precision != AS_LOADED else None
    decisions += [*fit.decisions, *_convolutions(forms), *_left(network, fit, left), *weights_decision(damage, sound)]
    needed = fit.needed or bool(forms) or sound is not None
    keeps = keep_latents == "always" or (keep_latents == AUTO and needed)
    kept = "kept" if keeps else "not kept"
    decisions.append(Decision("latents", kept, "of each sampling, for AnyGPU Recover Latents"))
    if not needed and not keeps:
        return model, decisions
    fitted = sound or model.clone()
    fitted.set_attachments(KEY, Before.of(model, fit, sound))
    _compute_in(fitted, fit.dtype, network)
    if needed:
        fitted.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, FittedNetwork(fit, machine, loaded, tell))
    if keeps:
        save_core_samples(fitted)
    return fitted, decisions


def _fit_of(
    network: nn.Module, machine: ModelDevice, dtype: torch.dtype, precision: str, attention: str, left: str
) -> Fit:
    """Run :func:`fit_for` on a network parts of which may belong to other packs.

    Args:
        dtype: in which core computes it.
        left: why ``auto`` leaves it as loaded; empty where it does not.
    """
    if precision == SAFE and not reached_by_safe(network):
        why = "the network has no layers that core casts"
        raise UnsupportedError(f"precision {SAFE} here: {why}", expected="Linear layers of core's", fix="Choose auto.")
    fit = fit_for(machine, dtype, precision, attention, left or unfit_for_safe(network))
    fixed = fixed_in_dtype(network, fit.safe) if fit.dtype is not None else ""
    if precision != AUTO and fixed:
        raise UnsupportedError(
            f"precision {precision} with layers of {fixed}",
            expected="layers that compute in the dtype of their input",
            fix=f"Choose auto or {AS_LOADED}.",
        )
    why = left or (f"{fixed} takes no other dtype" if fixed else "")
    if precision != AUTO or not why or not (fit.safe or fit.dtype):
        return fit
    plain = fit_for(machine, dtype, AS_LOADED, attention)
    return replace(plain, decisions=(replace(plain.decisions[0], why=why, source=AUTO), *plain.decisions[1:]))


MISSING = object()


@dataclass(frozen=True)
class Before:
    """Settings of a MODEL before a fit, apart from the fit's own wrappers, so that a later fit can restore them.

    Args:
        dtype: the compute dtype that it set.
        patched: the one that was set before, or :data:`MISSING`.
        forced: whether weights were cast before.
        copy: the network with other weights that it made.
        network: the one before that, with what core keeps of its weights.
    """

    dtype: torch.dtype | None
    patched: Any
    forced: bool
    copy: nn.Module | None = None
    network: Any = None

    @classmethod
    def of(cls, model: Any, fit: Fit, sound: Any) -> Before:
        """Record the settings before ``fit``; ``sound`` is the clone with other weights, or None."""
        patched = model.object_patches.get(CAST, MISSING)
        if sound is None:
            return cls(fit.dtype, patched, model.force_cast_weights)
        network = model.model, (model.backup, model.backup_buffers, model.object_patches_backup, model.pinned)
        return cls(fit.dtype, patched, model.force_cast_weights, sound.model, network)


def _unfitted(fitted: Any) -> Any:
    """A clone without our fit; what other nodes have put on since stays."""
    before: Before = fitted.attachments[KEY]
    copied = before.copy is not None and fitted.model is before.copy
    clean = fitted.clone(model_override=before.network) if copied else fitted.clone()
    clean.size = 0 if copied else clean.size  # counted again
    clean.remove_attachments(KEY)
    clean.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
    clean.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, WRAPPER)
    if before.dtype is not None and clean.object_patches.get(CAST) is before.dtype:
        del clean.object_patches[CAST]
        if before.patched is not MISSING:
            clean.object_patches[CAST] = before.patched
        clean.force_cast_weights = before.forced
        clean.patches_uuid = uuid.uuid4()  # or core would not load the weights anew
    return clean


def _compute_in(fitted: Any, dtype: torch.dtype | None, network: nn.Module) -> None:
    """Have core compute in ``dtype``, as its own node does; None leaves its choice.

    Core would unpack every packed layer for it. Those cast to the dtype of their input anyway, and so do the layers
    beside them, so there it is enough to name the dtype.
    """
    if dtype is None:
        return
    if any(getattr(module, "layout_type", None) is not None for module in network.modules()):
        fitted.add_object_patch(CAST, dtype)
    else:
        fitted.set_model_compute_dtype(dtype)


def _convolutions(forms: Counter[str]) -> Iterator[Decision]:
    if forms:
        named = ", ".join(f"{count} as {form}" for form, count in forms.items())
        yield Decision("Conv3d", named, "exact forms that this device has", AUTO)


def _left(network: nn.Module, fit: Fit, left: str) -> Iterator[Decision]:
    """Decisions on layers that safe fp16 does not reach or other packs compute, and on ComfyUI's --fast."""
    if fit.needed or (fit.decisions[0].source == AUTO and left):
        yield from left_decisions(network)
    if not fit.safe:
        return
    for kind, count in left_alone(network).items():
        yield Decision("left as it is", f"{count} {kind}")
    for feature in sorted(getattr(feature, "value", str(feature)) for feature in options.fast):
        if feature in LOSSY:
            yield Decision(f"--fast {feature}", LOSSY[feature])


def _sound_clone(model: Any, safe: bool) -> Any:
    """A clone whose bf16 weights were cast on the host; None where it cannot be had."""

    def target(module: nn.Module, weight: torch.Tensor) -> torch.dtype:
        return fp16_or_fp32(safe and is_linear(module) and weight.ndim > 1, weight)

    return clone_cast_on_host(model, target, "fp16 matrices" if safe else "fp32")


def _plain(network: Any) -> Any:
    """The network itself, without what torch.compile put around it."""
    return getattr(network, "_orig_mod", network)
