"""AnyGPU Fit Model: what a loader of core's made, given back so that it runs well on this device.

Everything happens in one wrapper around the call of the network: it patches leaves for the length of that call and
leaves nothing behind, so a clone, a save, a merge or an unload finds the model as it was.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import comfy.model_management
import torch
from comfy.cli_args import args as options
from comfy.patcher_extension import WrappersMP
from torch import nn

from ...compat.decision import AUTO, Decision
from ...compat.errors import InputError, UnsupportedError
from ...compat.precision import SAFE
from ..diffusion_model import CoreModel
from ..recovery import keep_what_core_samples
from .attention import AttentionOverride, with_override
from .convolutions import HOOK, conv_forwards
from .leaves import ByNetwork, SafeLeaves, has_packed, is_linear, left_alone, reached_by_safe, unfit_for_safe
from .machine import AS_LOADED, Fit, Machine, fit_for, machine_of
from .weights import clone_cast_on_host, damage_to_bf16, fp16_or_fp32, weights_decision

KEY = "anygpu_fit"  # of our wrappers
KEEP = (AUTO, "always", "never")  # grows at the end
LOSSY = {  # parts of ComfyUI's --fast, and what becomes of them in layers that are in safe fp16
    "fp16_accumulation": "sums in fp16 stay on: bounded too, but less exact",
    "cublas_ops": "its kernels are not used in layers in safe fp16",
    "fp8_matrix_mult": "its kernels are not used in layers in safe fp16",
}


@dataclass(frozen=True)
class FittedNetwork:
    """The wrapper around core's call of a network.

    Args:
        fit: what the network is given.
        machine: the device.
    """

    fit: Fit
    machine: Machine
    leaves: ByNetwork = field(default_factory=ByNetwork)
    convolutions: ByNetwork = field(default_factory=ByNetwork)

    def __call__(self, executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What core's own call returns; ``x`` is the noisy latent."""
        if comfy.model_management.in_training:
            return executor(x, *args, **kwargs)
        model = executor.class_obj
        network = _plain(model.diffusion_model)
        with ExitStack() as stack:
            if self.fit.safe:
                stack.enter_context(self._leaves_of(network, model, x).patches_on())
            stack.enter_context(self._convolutions_on(network, model.get_dtype_inference()))
            if self.fit.attention is None:
                return executor(x, *args, **kwargs)
            override = functools.partial(AttentionOverride, self.fit.attention, self.fit.safe)
            given, named = with_override(override, args, kwargs)
            return executor(x, *given, **named)

    def _leaves_of(self, network: nn.Module, model: Any, x: torch.Tensor) -> SafeLeaves:
        leaves: SafeLeaves = self.leaves.setdefault(
            network, SafeLeaves(self.machine.fp32_output, self.machine.fp16_convolutions)
        )
        hooked = getattr(getattr(model, "current_patcher", None), "current_hooks", None)
        leaves.measure(network, x, None if hooked else model.current_weight_patches_uuid)
        return leaves

    @contextmanager
    def _convolutions_on(self, network: nn.Module, dtype: torch.dtype) -> Iterator[None]:
        """The 3-D convolutions of ``network``, patch embeddings mostly, in the forms chosen for this device."""
        if network not in self.convolutions:
            self.convolutions[network] = [each for _, each in conv_forwards(network, self.machine.convolutions, dtype)]
        forwards = self.convolutions[network]
        try:
            for forward in forwards:
                forward.leaf.__dict__[HOOK] = forward
            yield
        finally:
            for forward in forwards:
                forward.leaf.__dict__.pop(HOOK, None)


def fit_model(
    model: Any, precision: str = AUTO, attention: str = AUTO, keep_latents: str = AUTO, machine: Machine | None = None
) -> tuple[Any, Sequence[Decision]]:
    """``model`` fitted to its device, and what was decided; the very object where nothing is needed.

    Args:
        model: a MODEL.
        precision, attention, keep_latents: as on the node.
        machine: what is known of the device; None asks the one that the model loads on.

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
    machine = machine or machine_of(model.load_device)
    dtype = model.get_model_object("manual_cast_dtype") or model.model_dtype()
    if precision == SAFE and not reached_by_safe(network):
        why = "the network has no layers that core casts"
        raise UnsupportedError(f"precision {SAFE} here: {why}", expected="Linear layers of core's", fix="Choose auto.")
    fit = fit_for(machine, dtype, precision, attention, unfit_for_safe(network))
    stream = torch.float32 if fit.safe else fit.dtype or dtype
    forms = Counter(each.choice.form.value for _, each in conv_forwards(network, machine.convolutions, stream))
    if not fit.needed and machine.convolves(stream):
        forms.clear()  # they would only be faster, in the smallest layers of the network
    damage = damage_to_bf16(network, machine)
    sound = _sound_clone(model, fit.safe) if damage and precision != AS_LOADED else None
    decisions = [*fit.decisions, *_convolutions(forms), *_left(network, fit), *weights_decision(damage, sound)]
    needed = fit.needed or bool(forms) or sound is not None
    keeps = keep_latents == "always" or (keep_latents == AUTO and needed)
    kept = "kept" if keeps else "not kept"
    decisions.append(Decision("latents", kept, "of each sampling, for AnyGPU Recover Latents"))
    if not needed and not keeps:
        return model, decisions
    fitted = sound or model.clone()
    _compute_in(fitted, fit.dtype, network)
    fitted.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
    if needed:
        fitted.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, FittedNetwork(fit, machine))
    if keeps:
        keep_what_core_samples(fitted)
    return fitted, decisions


def _compute_in(fitted: Any, dtype: torch.dtype | None, network: nn.Module) -> None:
    """Have core compute in ``dtype``, as its own node does; None leaves its choice.

    Core would unpack every packed layer for it. Those cast to the dtype of their input anyway, and so do the layers
    beside them, so there it is enough to name the dtype.
    """
    if dtype is None:
        return
    if has_packed(network):
        fitted.add_object_patch("manual_cast_dtype", dtype)
    else:
        fitted.set_model_compute_dtype(dtype)


def _convolutions(forms: Counter[str]) -> Iterator[Decision]:
    if forms:
        named = ", ".join(f"{count} as {form}" for form, count in forms.items())
        yield Decision("Conv3d", named, "exact forms that this device has", AUTO)


def _left(network: nn.Module, fit: Fit) -> Iterator[Decision]:
    """What safe fp16 does not reach, and what becomes of ComfyUI's --fast."""
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
