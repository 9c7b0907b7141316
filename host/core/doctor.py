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
from ...compat.doctor import Doctor, lifeless, not_finite, one_colour, unshrunk
from ...compat.output_check import is_flat
from ...compat.repairs import ATTENTION, tensors_in
from ..diffusion_model import CoreModel
from ..progress import NodeProgress
from .attention import AttentionOnRequest, with_override

KEY, NODE = "anygpu_doctor", "AnyGPUDoctor"
NETWORK, VAE = "diffusion_model", "vae"
BRANCHES = {(0,): "positive prompt", (1,): "negative prompt"}


def teller(node_id: str | None) -> Callable[[str], None]:
    """Takes lines for the log and for the node ``node_id``, which has run by then."""

    def tell(text: str) -> None:
        progress = NodeProgress(_shown(node_id))
        progress.notify(text)
        progress.show()

    return tell


def _shown(node_id: str | None) -> str | None:
    """``node_id``, or None where that node of the running prompt is no doctor.

    What this one watches may come from ComfyUI's cache, for another prompt, in which the node has another id.
    """
    prompt = get_progress_state().dynprompt
    is_doctor = prompt.has_node(node_id) and prompt.get_node(node_id)["class_type"] == NODE
    return node_id if is_doctor else None


def missing(name: str) -> ExecutionBlocker:
    """Blocker for the nodes after an output whose input was not connected."""
    return ExecutionBlocker(f"AnyGPU: connect {name} to AnyGPU Doctor to use its {name} output.")


def name_of(model: Any) -> str:
    """Name of a MODEL or a VAE's patcher that is stable between runs: its file, or its class and size."""
    inner = model.model
    if isinstance(inner, CoreModel):
        return str(inner.pipeline.model.source)
    again = model.cached_patcher_init
    source = again[1][0] if again and again[1] else None
    return source if isinstance(source, str) else f"{type(inner).__name__}, {model.model_size()} bytes"


def watched_model(model: Any, doctor: Doctor, node_id: str | None) -> Any:
    """A clone of ``model`` whose every call is checked; what is found is shown on the node ``node_id``.

    The wrapper runs what is kept for the model, and one check of the output; all else only where that fails.
    """

    def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
        network = executor.class_obj.diffusion_model
        networks = nn.ModuleDict({NETWORK: getattr(network, "_orig_mod", network)})

        def again() -> Any:  # under repairs, some of which want another attention
            given, named = with_override(AttentionOnRequest, args, kwargs)
            return executor(*given, **named)

        kept = any(repair.way == ATTENTION for repair in doctor.repairs)
        with doctor.repaired(networks):
            output = again() if kept else executor(*args, **kwargs)
            if not _wrong(output):
                return output
            options = kwargs.get("transformer_options") or (args[5] if len(args) > 5 else {})
            return doctor.checked(output, networks, again, where_of(options), _wrong)

    def sampled(executor: Any, *args: Any, **kwargs: Any) -> Any:
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


def _wrong(output: Any) -> str:
    return next(filter(None, map(lifeless, tensors_in(output))), "")


def watched_vae(vae: Any, doctor: Doctor) -> Any:
    """A copy of ``vae`` whose decoded frames are checked; the original stays as it is."""
    watched = copy.copy(vae)
    watched.__class__ = _watched_class(type(vae))
    watched.__dict__["doctor"] = doctor
    return watched


class WatchedVAE:
    """Methods of a watched VAE that replace those of its class."""

    def decode(self, samples_in: Any, *args: Any, **kwargs: Any) -> Any:
        """Decode as usual, checked."""
        return self._checked(samples_in, functools.partial(super().decode, samples_in, *args, **kwargs))  # type: ignore[misc]

    def decode_tiled(self, samples: Any, *args: Any, **kwargs: Any) -> Any:
        """Decode in tiles as usual, checked."""
        return self._checked(samples, functools.partial(super().decode_tiled, samples, *args, **kwargs))  # type: ignore[misc]

    def _checked(self, samples: Any, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        doctor: Doctor = self.__dict__["doctor"]
        networks = nn.ModuleDict({VAE: self.first_stage_model})  # type: ignore[attr-defined]
        plain = isinstance(samples, torch.Tensor) and is_flat(samples)  # such latents may well be one colour
        with doctor.repaired(networks):
            return doctor.checked(run(), networks, run, "decode", not_finite if plain else one_colour)


@functools.cache
def _watched_class(kind: type[Any]) -> type[Any]:
    return kind if issubclass(kind, WatchedVAE) else type(kind.__name__, (WatchedVAE, kind), {"__module__": __name__})
