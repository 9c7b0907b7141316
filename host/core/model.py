"""AnyGPU Fit Model: a wrapper around the call of a network that patches its layers for the length of that call."""

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
from comfy.latent_formats import LatentFormat
from comfy.patcher_extension import CallbacksMP, WrappersMP
from torch import nn

from ...compat.decision import AUTO, Decision
from ...compat.device.execution import add_hook
from ...compat.device.precision import SAFE
from ...compat.device.quirks import works
from ...compat.errors import InputError, UnsupportedError
from ...compat.memory.parts import Undo
from ...compat.transforms.guard import around
from ..diffusion_model import CoreModel
from ..recovery import WRAPPER, save_core_samples
from . import ownership
from .attention import AttentionOverride, Preference, compute_next, with_override
from .calibration import Calibration, as_level, kept_at
from .layers import AMPLIFIES, HOOK, ByNetwork, Counts, SafeLayers, conv_forwards, left_alone, left_of, takes_fp16
from .machine import AS_LOADED, Fit, ModelDevice, fit_for, machine_of
from .packed import FAILED, PackedFit, packed_fit
from .weights import clone_cast_on_host, damage_to_bf16, float8_decision, fp16_or_fp32, lack_of_float8, weights_decision

log = logging.getLogger(__name__)

MISSING = object()
KEY = "anygpu_fit"  # of our wrappers
CAST = "manual_cast_dtype"  # core's name for the dtype in which a network computes
COMPILED = WrappersMP.APPLY_MODEL, "torch.compile"  # core's wrapper for it
MEASURED = "; plain where eight times the values of a first step fit"
LOUDER = "values beyond those measured in safe fp16: this step is computed again in it"
CASTS = "; the network or a node behind this one casts its stream, and it computes as without this fit"
CACHE = "animate2_cache"  # Wan Animate 2's: it knows a pose by its values, which another dtype would change
KEEP = (AUTO, "always", "never")  # grows at the end
LOSSY = {  # parts of ComfyUI's --fast, and what becomes of them in layers that are in safe fp16
    "fp16_accumulation": "sums in fp16 stay on: bounded too, but less exact",
    **dict.fromkeys(("cublas_ops", "fp8_matrix_mult"), "its kernels are not used in layers in safe fp16"),
}


@dataclass
class Seen:
    """Facts that calls of one network have shown, for the calls after them."""

    layers: SafeLayers  # in safe fp16
    graph: Any  # (version of the weights, dtype of the stream), for which alone the rest holds
    reached: bool  # whether plain fp16 is possible: layers take it, and our override gets all attention
    counted: bool = False  # whether a call of this sampling has been counted
    line: str = ""  # the last line that was reported of a count
    casts: bool = False  # whether a count showed that the network casts its stream by itself
    calibration: Calibration | None = None  # the sizes of its values

    @property
    def takes_plain(self) -> bool:
        return self.reached and not self.layers.loud


@dataclass(frozen=True)
class FittedNetwork:
    """The wrapper around core's call of a network."""

    fit: Fit
    machine: ModelDevice
    loaded: torch.dtype | None = None  # the dtype in which core computes it without us; None: that of its weights
    tell: Callable[[str], None] = log.info  # takes what the first call did, and each failed packed product
    packed: PackedFit = field(default_factory=PackedFit)
    attached: ByNetwork = field(default_factory=ByNetwork)
    seen: ByNetwork = field(default_factory=ByNetwork)
    convolutions: ByNetwork = field(default_factory=ByNetwork)

    def __call__(self, executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Core's call on the noisy latent ``x``, fitted but in training; the first of each sampling is counted and
        reported. It is made again where it was measured for plain fp16, or plain fp16 did not hold."""
        if comfy.model_management.in_training:
            return executor(x, *args, **kwargs)
        model = executor.class_obj
        network = _plain(model.diffusion_model)
        seen = self._seen_of(model, network)
        run = functools.partial(self._run, executor, network, seen, (x, *args), kwargs)
        output, line, held, sizes = None, "", True, self._calibration(model, network, seen)
        if sizes is None or not sizes.sizes:  # nothing is measured yet, or nothing is to be
            output, line = self._run_safe(run, seen, network, sizes)
        if sizes is not None and seen.takes_plain and sizes.is_plain(network):
            again = output is not None  # this call was measured, and is made once more in plain fp16
            output, line, held = self._run_plain(run, seen, network, sizes)
            if again or not held:  # two for one step, which core's EasyCache would take for two steps
                compute_next(args, kwargs)
        elif output is None:  # measured, and too large for plain fp16
            output, line = self._run_safe(run, seen, network, None)
        if line and line != seen.line:
            self.tell(line)
            seen.line = line
        seen.counted = held
        return output

    def _seen_of(self, model: Any, network: nn.Module) -> Seen:
        """The facts on ``network``, new ones once its weights or its dtype have changed; measured layers are kept."""
        graph, seen = (model.current_weight_patches_uuid, model.get_dtype_inference()), self.seen.get(network)
        if seen is None or seen.graph != graph:  # a node behind this one may have changed either
            fp32_output, convolutions = self.machine.fp32_output, self.machine.fp16_convolutions
            layers = SafeLayers(fp32_output, convolutions) if seen is None else seen.layers
            seen = self.seen[network] = Seen(layers, graph, takes_fp16(network))
        return seen  # type: ignore[no-any-return]

    def _run_safe(
        self, run: Callable[..., Any], seen: Seen, network: nn.Module, sizes: Calibration | None
    ) -> tuple[Any, str]:
        """The result in safe fp16, or as core's where the network casts its stream, and a line on the count, if any.
        ``sizes``, unless None, measures the values, and is saved if plain fp16 is possible."""
        counts, why = None if seen.counted else Counts(), ""
        with nullcontext() if sizes is None else sizes.measured(network):
            output = run(counts, refused=None if sizes is None else sizes.refuse)
        if counts is not None:
            seen.casts = counts.casts
            seen.reached &= counts.complete and not counts.unreached and not counts.casts
            why = CASTS if seen.casts else AMPLIFIES if seen.layers.loud else ""
            output = run() if seen.casts else output
        if sizes is not None and seen.takes_plain:
            sizes.write()
        return output, f"{counts}{why}" if counts is not None and str(counts) else ""

    def _run_plain(
        self, run: Callable[..., Any], seen: Seen, network: nn.Module, sizes: Calibration
    ) -> tuple[Any, str, bool]:
        """The result in plain fp16, a line on the count, and True; in safe fp16 and False if values left their room."""
        counts = None if seen.counted else Counts()
        with sizes.trusted(network) as held:
            output = run(counts, plain=True)
        if held():
            return output, f"{counts}{MEASURED}" if counts is not None else "", True
        self.tell(LOUDER)
        seen.counted, seen.line = False, ""
        return *self._run_safe(run, seen, network, sizes), False

    def _calibration(self, model: Any, network: nn.Module, seen: Seen) -> Calibration | None:
        """The measured sizes for the network's present weights; None where plain fp16 is not wanted or possible."""
        version, patcher = model.current_weight_patches_uuid, getattr(model, "current_patcher", None)
        if not (self.fit.plain and seen.takes_plain) or version is None or patcher is None or patcher.current_hooks:
            return None
        compiled = network is not model.diffusion_model or patcher.get_wrappers(*COMPILED)
        if compiled or any(hasattr(each, "_orig_mod") for each in network.modules()):  # takes no :class:`Level`
            return None
        fp32 = model.get_dtype_inference() is torch.float32  # else a node behind this one has core compute otherwise
        if CACHE in patcher.model_options.get("transformer_options", {}) or not fp32:
            return None
        if seen.calibration is None:
            path = kept_at(patcher, self.machine.probes.folder, self.machine.probes.key)
            seen.calibration = Calibration(path, self.machine.fp16_convolutions)
        return seen.calibration

    def _run(
        self, executor: Any, network: nn.Module, seen: Seen, args: tuple[Any, ...], kwargs: dict[str, Any],
        counts: Counts | None = None, plain: bool = False, refused: Callable[[], None] | None = None,
    ) -> Any:  # fmt: skip
        """Core's call with all patches of the fit. ``counts`` notes how it computed, ``plain`` has core compute in
        fp16, and ``refused`` is called where attention must stay in fp32."""
        model, undo = executor.class_obj, Undo()
        safe, failed = self.fit.safe and not seen.casts, len(FAILED)
        with ExitStack() as stack:
            stack.callback(undo.restore)
            stack.callback(lambda: [*map(self.tell, list(FAILED.values())[failed:])])  # new failures
            stack.enter_context(self.packed.attach(network))
            if safe:
                hooked = getattr(getattr(model, "current_patcher", None), "current_hooks", None)
                version = None if hooked else model.current_weight_patches_uuid
                seen.layers.measure(network, args[0], version and (version, failed), model.get_dtype())
            if counts is not None:
                stack.enter_context(counts.counting(left_of(network, set(seen.layers.free)) if safe else {}))
            if safe:
                stack.enter_context(seen.layers.patches_on(counts))
            if plain:
                args = tuple(as_level(each, args[0]) for each in args)
                kwargs = {name: as_level(each, args[0]) for name, each in kwargs.items()}
            if plain or (seen.casts and model.get_dtype_inference() is torch.float32):
                undo.set(model, CAST, torch.float16 if plain else self.loaded)
            dtype = model.get_dtype_inference()
            for given in (*args, *kwargs.values()):  # core's SamplerARVideo makes its caches in the weights' dtype
                for cache in given["ar_state"]["kv_caches"] if isinstance(given, dict) and "ar_state" in given else ():
                    cache.update({name: cache[name].to(dtype) for name in ("k", "v")})
            stack.enter_context(self._convolutions_on(network, dtype))
            stack.enter_context(add_hook(model.diffusion_model, _with_own_latent, before=True))
            guard = self.machine.guard if network is model.diffusion_model else None  # not a compiled one
            stack.enter_context(around(guard, self.machine.calls, (network, args[0].shape, dtype)))
            if (attention := self.fit.attention) is None:
                if counts is not None:
                    stack.callback(setattr, counts, "attention", 0)  # left to core, as was decided
                return executor(*args, **kwargs)
            preference = Preference()
            stack.enter_context(preference.followed(network))

            def override(before: Callable[..., torch.Tensor] | None) -> AttentionOverride:
                asked = {"preference": preference, "refused": refused, "exact": seen.layers.loud}
                return AttentionOverride(attention, safe, before, counts, **asked)

            given, named = with_override(override, args, kwargs)
            return executor(*given, **named)

    def attach(self, patcher: Any) -> None:
        """Before a sampling, attach the paths of packed layers, as some compute the text before the network is called,
        and have the first call counted anew, since other nodes may have changed the model."""
        network = _plain(patcher.model.diffusion_model)
        if (seen := self.seen.get(network)) is not None:
            seen.counted = seen.casts  # then core computes it all: a count would only cost a forward
        self.attached.setdefault(network, Undo()).extend(self.packed.attach(network))
        getattr(network, "clear_kv_cache", int)()  # HiDream O1's keys and values of a prompt, in another dtype

    def detach(self, patcher: Any) -> None:
        network = _plain(patcher.model.diffusion_model)
        self.attached.pop(network, Undo()).restore()
        getattr(network, "clear_kv_cache", int)()

    @contextmanager
    def _convolutions_on(self, network: nn.Module, dtype: torch.dtype) -> Iterator[None]:
        """For the block, the network's convolutions use the forms chosen for ``dtype`` on this device, once a dtype."""
        known = self.convolutions.setdefault(network, {})
        if dtype not in known:
            known[dtype] = [each for _, each in conv_forwards(network, self.machine.convolutions, dtype)]
        with Undo() as undo:
            for forward in known[dtype]:
                undo.set(forward.layer, HOOK, forward)
            yield


def _with_own_latent(_network: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` with the latent copied: core's EasyCache adds to it in place, and in fp32 it is the sampler's own."""
    own = ([each.clone() for each in x] if isinstance(x, list) else x.clone() for x in args[:1])
    return *own, *args[1:]


def fit_model(
    model: Any, precision: str = AUTO, attention: str = AUTO, keep_latents: str = AUTO, packed_layers: str = AUTO,
    machine: ModelDevice | None = None, tell: Callable[[str], None] = log.info,
) -> tuple[Any, Sequence[Decision]]:  # fmt: skip
    """``model`` fitted to its device, and what was decided; the model without a fit where nothing is needed.
    A fit that ``model`` already has is taken back first. ``tell`` takes a line once the first call has been counted.
    Raises InputError for no MODEL, UnsupportedError for an explicit choice that cannot be had here."""
    if why := _why_as_it_is(getattr(model, "model", None)):
        return model, (Decision("model", "as it is", why),)
    network = _network_of(model)
    decisions: list[Decision] = []
    if KEY in model.attachments:
        model = _unfitted(model)
        network = _plain(model.model.diffusion_model)
        decisions.append(Decision("an earlier fit", "taken back"))
    machine = machine or machine_of(model.load_device)
    manual_cast = model.get_model_object(CAST)
    loaded = manual_cast or model.model_dtype()
    left = ownership.why_left(network)
    fit = _fit_of(network, machine, loaded, precision, attention, left)
    packed = packed_fit(network, machine.facts, machine.probes.known(), fit.safe, packed_layers)
    stream = torch.float32 if fit.safe else fit.dtype or loaded
    care, forms = machine.care(stream), _conv_forms(network, machine, stream, fit.needed)
    damage, no_float8 = damage_to_bf16(network, machine), lack_of_float8(network, machine)
    recasts = bool(damage) and precision != AS_LOADED
    recast = _recast_clone(model, fit.safe, recasts, not no_float8) if recasts or no_float8 else None
    named = ", ".join(f"{count} as {form}" for form, count in forms.items())
    convolved = [Decision("Conv3d", named, "exact forms that this device has", AUTO)] * bool(forms)
    decisions += [*fit.decisions, *packed.decisions, *convolved, *care, *_left_decisions(network, fit, left)]
    decisions += [*weights_decision(damage, recast if recasts else None), *float8_decision(no_float8, recast)]
    needed = fit.needed or packed.needed or bool(forms or care) or recast is not None
    keeps = keep_latents == "always" or (keep_latents == AUTO and needed)
    kept = "kept" if keeps else "not kept"
    decisions.append(Decision("latents", kept, "of each sampling, for AnyGPU Recover Latents"))
    if not needed and not keeps:
        return model, decisions
    fitted = recast or model.clone()
    fitted.set_attachments(KEY, Before.of(model, fit, recast))
    _compute_in(fitted, fit.dtype, network)
    if needed:
        wrapper = FittedNetwork(fit, machine, manual_cast, tell=tell, packed=packed)
        fitted.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, wrapper)
        fitted.add_callback_with_key(CallbacksMP.ON_PRE_RUN, KEY, wrapper.attach)
        fitted.add_callback_with_key(CallbacksMP.ON_CLEANUP, KEY, wrapper.detach)
    if keeps:
        save_core_samples(fitted)
    return fitted, decisions


def _conv_forms(network: nn.Module, machine: ModelDevice, stream: torch.dtype, needed: bool) -> Counter[str]:
    """Form -> number of convolutions in it; empty where forms would only be faster and no other fit is ``needed``."""
    if not needed and all(works(machine.able, name, stream) for name in ("conv3d", "pad3d")):
        return Counter()
    return Counter(each.choice.form.value for _, each in conv_forwards(network, machine.convolutions, stream))


def _network_of(model: Any) -> nn.Module:
    """The network of a MODEL, without torch.compile around it; InputError for anything else."""
    network = _plain(getattr(getattr(model, "model", None), "diffusion_model", None))
    if not isinstance(network, nn.Module) or not hasattr(model.model, "get_dtype_inference"):
        found = f"a {type(model).__name__} without a network that core runs"
        raise InputError(found, expected="a MODEL", fix="Connect a MODEL.")
    return network


def _why_as_it_is(model: Any) -> str:
    """The reason why nothing is decided for a model; empty where Fit Model decides."""
    if isinstance(model, CoreModel):
        return "a pipeline of AnyGPU decides this on its load node"
    unsampled = type(getattr(model, "latent_format", None)) is LatentFormat  # core's base class: detectors, depth
    return "core's nodes call this network by themselves, without the sampler" if unsampled else ""


def _fit_of(
    network: nn.Module, machine: ModelDevice, dtype: torch.dtype, precision: str, attention: str, left: str
) -> Fit:
    """The fit by :func:`fit_for`, mindful of other packs' layers; ``left``: why ``auto`` changes nothing, or empty.
    UnsupportedError for a chosen precision that no layer can take, or not all."""
    ours = (each for each in network.modules() if ownership.is_linear(each) or ownership.is_convolution(each))
    if precision == SAFE and next(ours, None) is None and not ownership.adapted_layers(network):
        why = left or "the network has no layers that core casts"
        raise UnsupportedError(f"precision {SAFE} here: {why}", expected="Linear layers of core's", fix="Choose auto.")
    fit = fit_for(machine, dtype, precision, attention, left or ownership.unfit_for_safe(network))
    fixed = ownership.fixed_in_dtype(network, fit.safe) if fit.dtype is not None else ""
    if precision != AUTO and fixed:
        expected, fix = "layers that compute in the dtype of their input", f"Choose auto or {AS_LOADED}."
        raise UnsupportedError(f"precision {precision} with layers of {fixed}", expected=expected, fix=fix)
    why = left or (f"{fixed} takes no other dtype" if fixed else "")
    if precision != AUTO or not why or not (fit.safe or fit.dtype):
        return fit
    plain = fit_for(machine, dtype, AS_LOADED, attention)
    return replace(plain, decisions=(replace(plain.decisions[0], why=why, source=AUTO), *plain.decisions[1:]))


@dataclass(frozen=True)
class Before:
    """Settings of a MODEL before a fit, apart from the fit's own wrappers, so that a later fit can restore them."""

    dtype: torch.dtype | None  # in which the fit computes
    patched: Any  # the dtype that was set before, or :data:`MISSING`
    forced: bool  # whether core was to cast all weights before
    copy: nn.Module | None = None  # the fit's network with recast weights
    network: Any = None  # the network before that, with core's backups of its weights

    @classmethod
    def of(cls, model: Any, fit: Fit, recast: Any) -> Before:
        """The settings of ``model`` before ``fit``; with its clone ``recast``, on other weights, also both networks."""
        patched = model.object_patches.get(CAST, MISSING)
        if recast is None:
            return cls(fit.dtype, patched, model.force_cast_weights)
        kept = model.backup, model.backup_buffers, model.object_patches_backup, model.pinned
        return cls(fit.dtype, patched, model.force_cast_weights, recast.model, (model.model, kept))


def _unfitted(fitted: Any) -> Any:
    """A clone of ``fitted`` with all settings from before its fit."""
    before: Before = fitted.attachments[KEY]
    copied = before.copy is not None and fitted.model is before.copy
    clean = fitted.clone(model_override=before.network) if copied else fitted.clone()
    clean.size = 0 if copied else clean.size  # counted again
    clean.remove_attachments(KEY)
    clean.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
    clean.remove_callbacks_with_key(CallbacksMP.ON_PRE_RUN, KEY)
    clean.remove_callbacks_with_key(CallbacksMP.ON_CLEANUP, KEY)
    clean.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, WRAPPER)
    if before.dtype is not None and clean.object_patches.get(CAST) is before.dtype:
        del clean.object_patches[CAST]
        if before.patched is not MISSING:
            clean.object_patches[CAST] = before.patched
        clean.force_cast_weights = before.forced
        clean.patches_uuid = uuid.uuid4()  # or core would not load the weights anew
    return clean


def _compute_in(fitted: Any, dtype: torch.dtype | None, network: nn.Module) -> None:
    """Have core compute in ``dtype`` if there is one, as its own node does, but without unpacking packed layers."""
    if dtype is None:
        return
    if any(getattr(module, "layout_type", None) is not None for module in network.modules()):
        fitted.add_object_patch(CAST, dtype)
    else:
        fitted.set_model_compute_dtype(dtype)


def _left_decisions(network: nn.Module, fit: Fit, left: str) -> Iterator[Decision]:
    """Decisions on layers that the fit leaves to other packs and to core, and on lossy parts of --fast."""
    if fit.needed or (fit.decisions[0].source == AUTO and left):
        yield from ownership.left_decisions(network, fit.safe)
    if not fit.safe:
        return
    for kind, count in left_alone(network).items():
        yield Decision("left as it is", f"{count} {kind}")
    for feature in sorted(getattr(feature, "value", str(feature)) for feature in options.fast):
        if feature in LOSSY:
            yield Decision(f"--fast {feature}", LOSSY[feature])


def _recast_clone(model: Any, safe: bool, damaged: bool, float8: bool) -> Any:
    """A clone, weights cast on the host: bf16 if ``damaged``, float8 unless ``float8`` works; None if that fails."""

    def target(module: nn.Module, weight: torch.Tensor) -> torch.dtype:
        matrix = safe and ownership.is_linear(module) and weight.ndim > 1
        return fp16_or_fp32(matrix, weight) if damaged else weight.dtype

    return clone_cast_on_host(model, target, f"{'fp16 matrices' if safe else 'fp32'}, {damaged}, {float8}", float8)


def _plain(network: Any) -> Any:
    """The network itself, without what torch.compile put around it."""
    return getattr(network, "_orig_mod", network)
