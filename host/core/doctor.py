"""The doctor beside core's samplers and VAE nodes, for any MODEL and VAE."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP
from comfy_execution.graph_utils import ExecutionBlocker
from comfy_execution.progress import get_progress_state
from torch import nn

from ...compat.device.execution import to_host
from ...compat.doctor import SHOWN, STUCK, Doctor, lifeless, not_finite, one_colour, stuck, unshrunk
from ...compat.output_check import ZEROS, fault_in_weight, is_flat
from ...compat.repairs import ATTENTION, FP32, Repair, repaired
from ..diffusion_model import CoreModel
from ..progress import NodeProgress
from .attention import with_override
from .step_watch import StepWatch
from .vae_window import agree, fault_in_pictures
from .weight_check import LoadedWeights

KEY, NODE = "anygpu_doctor", "AnyGPUDoctor"
NETWORK, VAE = "diffusion_model", "vae"
COMPILED = "torch.compile"  # core's key of the wrapper that puts compiled modules in the place of others
BRANCHES = {(0,): "positive prompt", (1,): "negative prompt"}


def teller(node_id: str | None) -> Callable[[str], None]:
    """Takes lines for the log and for the node ``node_id``, which has run by then."""

    def tell(text: str) -> None:
        progress = NodeProgress(_shown(node_id))
        progress.notify(text)
        progress.show()

    return tell


def _shown(node_id: str | None) -> str | None:
    """``node_id``, or None where that node of the running prompt is no doctor: ComfyUI's cache outlives prompts."""
    prompt = get_progress_state().dynprompt
    is_doctor = prompt.has_node(node_id) and prompt.get_node(node_id)["class_type"] == NODE
    return node_id if is_doctor else None


def missing(name: str, node: str = "AnyGPU Doctor") -> ExecutionBlocker:
    """Blocker for the nodes after an output of ``node`` whose input was not connected."""
    return ExecutionBlocker(f"AnyGPU: connect {name} to {node} to use its {name} output.")


def watched_model(model: Any, doctor: Doctor, node_id: str | None) -> Any:
    """A clone of ``model`` whose every call is checked; what is found is shown on the node ``node_id``.

    The first call of a sampling looks at each product, attention call and weight on the device, later ones at a
    fiftieth of the weights.
    """
    if not isinstance(model.model, CoreModel):
        LoadedWeights.of(model)
        doctor.instead = "put AnyGPU Fit Model before the sampler"
        for name, weight in model.model.diffusion_model.named_parameters():
            if type(weight.data) is torch.Tensor and not weight.is_meta and fault_in_weight(name, weight.data) == ZEROS:
                doctor.tell(f"{name} holds nothing but zeros: the file is damaged, unless the model was made so")
    begun: list[bool] = []  # empty until the first call of a sampling

    def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
        network = executor.class_obj.diffusion_model
        networks = nn.ModuleDict({NETWORK: getattr(network, "_orig_mod", network)})
        patcher, first = executor.class_obj.current_patcher or model, not begun
        compiled = network is not networks[NETWORK] or patcher.get_wrappers(WrappersMP.APPLY_MODEL, COMPILED)
        watch, begun[:] = StepWatch(networks, bool(compiled)), [True]

        def again(closely: bool = True) -> Any:  # under repairs, some of which want another attention
            with watch.on(closely) as override:
                if not (closely or any(repair.way == ATTENTION for repair in doctor.repairs)):
                    return executor(*args, **kwargs)
                given, named = with_override(override, args, kwargs)
                return executor(*given, **named)

        if first:
            healed(patcher, doctor, every=True)
        with doctor.repaired(networks):
            output = again(first)
            wrong = watch.fault(output)
            doubt = bool(wrong) or watch.loud
            if healed(patcher, doctor, every=doubt, streamed=True, since=not first) or (doubt and not wrong):
                output = again()
                wrong = watch.fault(output)
            if not wrong:
                watch.keep()
                return output
            options = kwargs.get("transformer_options") or (args[5] if len(args) > 5 else {})
            local, found = stuck if wrong == STUCK else lifeless, lambda: watch.finding
            return doctor.checked(output, networks, again, where_of(options), watch.fault, local=local, found=found)

    def sampled(executor: Any, *args: Any, **kwargs: Any) -> Any:
        begun.clear()
        result = executor(*args, **kwargs)
        noise, sigmas = args[0], args[3] if len(args) > 3 else kwargs.get("sigmas")
        message = ""
        if isinstance(result, torch.Tensor) and sigmas is not None and float(sigmas[-1]) == 0.0:
            message = unshrunk(noise, executor.class_obj.model_patcher.model.process_latent_in(result))
        steps = len(sigmas) - 1 if sigmas is not None else 0
        NodeProgress(_shown(node_id)).finish(message or f"no fault in {steps} steps")
        return result

    watched = model.clone()
    for kind, wrapper in ((WrappersMP.APPLY_MODEL, call), (WrappersMP.OUTER_SAMPLE, sampled)):
        watched.remove_wrappers_with_key(kind, KEY)
        watched.add_wrapper_with_key(kind, KEY, wrapper)
    return watched


def where_of(options: dict[str, Any]) -> str:
    """Step and prompt of one call, from what core's sampler says of it."""
    levels, level = options.get("sample_sigmas"), options.get("sigmas")
    step = "a step"
    if levels is not None and level is not None and len(levels) > 1:
        index = int((to_host(levels) > float(level.max()) * (1 + 1e-4)).sum())
        step = f"step {index + 1} of {len(levels) - 1}"
    branch = BRANCHES.get(tuple(sorted(set(options.get("cond_or_uncond", ())))), "")
    return f"{step}, {branch}" if branch else step


def healed(patcher: Any, doctor: Doctor, every: bool, streamed: bool = False, since: bool = False) -> bool:
    """True if weights had changed on the device; they are loaded again where they can be, and it is said.

    ``since``: steps have been computed since the weights were last looked at; ``every``, ``streamed``: as for
    :meth:`LoadedWeights.wrong`.
    """
    if isinstance(patcher.model, CoreModel):
        return False
    weights = LoadedWeights.of(patcher)
    names = weights.wrong(patcher, every, streamed)
    done = weights.restore(patcher, names)
    shown = ", ".join(name.removeprefix(f"{NETWORK}.") for name in names[:SHOWN]) + "…" * (len(names) > SHOWN)
    if not names:
        return False
    remedy = "loaded again" if len(done) == len(names) else "its file cannot be read from here: load the model again"
    earlier = "; run again, earlier steps may be wrong" * since
    twice = "; if it happens again, start ComfyUI with --disable-dynamic-vram" * (weights.healed > 1)
    doctor.tell(f"the copy of {shown} on the card is not what was loaded; {remedy}{earlier}{twice}")
    return True


def watched_vae(vae: Any, doctor: Doctor) -> Any:
    """A copy of ``vae`` whose decoded frames are checked; the original stays as it is."""
    watched = copy.copy(vae)
    watched.__class__ = _watched_class(type(vae))
    watched.__dict__["doctor"] = doctor
    return watched


class WatchedVAE:
    """Methods of a watched VAE that replace those of its class."""

    def decode(self, samples_in: Any, *args: Any, **kwargs: Any) -> Any:
        return self._checked(samples_in, functools.partial(super().decode, samples_in, *args, **kwargs))  # type: ignore[misc]

    def decode_tiled(self, samples: Any, *args: Any, **kwargs: Any) -> Any:
        return self._checked(samples, functools.partial(super().decode_tiled, samples, *args, **kwargs))  # type: ignore[misc]

    def _checked(self, samples: Any, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        doctor: Doctor = self.__dict__["doctor"]
        networks = nn.ModuleDict({VAE: self.first_stage_model})  # type: ignore[attr-defined]
        doctor.instead = "put AnyGPU Fit VAE before the decode"
        plain = not isinstance(samples, torch.Tensor) or is_flat(samples)  # such latents may well be one colour

        def fault(frames: torch.Tensor) -> str:
            return not_finite(frames) if plain else fault_in_pictures(self, frames, samples)

        patcher = self.patcher  # type: ignore[attr-defined]
        spoilt = healed(patcher, doctor, every=True)
        with doctor.repaired(networks):
            frames = run()
            wrong = fault(frames)
            if wrong and healed(patcher, doctor, every=True, streamed=True):
                spoilt, frames = True, run()
                wrong = fault(frames)
            if wrong and not spoilt and not not_finite(frames):  # it may really look so
                with repaired(networks, (Repair(VAE, FP32),)):
                    if agree(frames, run(), self.vae_dtype):  # type: ignore[attr-defined]
                        return frames
            return doctor.checked(frames, networks, run, "decode", fault, local=one_colour)


@functools.cache
def _watched_class(kind: type[Any]) -> type[Any]:
    return kind if issubclass(kind, WatchedVAE) else type(kind.__name__, (WatchedVAE, kind), {"__module__": __name__})
