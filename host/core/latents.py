"""What core's samplers make of a fitted MODEL, kept for AnyGPU Recover Latents."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import comfy.utils
import torch

from .. import recovery

log = logging.getLogger(__name__)


def kept_sampling(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """What core's sampling returns; it is kept, and after a cancel or a failure the last step's estimate is.

    Around the whole sampling of any guider, so that no later decode can lose hours.
    """
    guider, steps = executor.class_obj, _Steps()
    call = inspect.signature(executor.original).bind(*args, **kwargs)
    call.apply_defaults()
    call.arguments["callback"] = steps.followed_by(call.arguments["callback"], guider)
    try:
        samples = executor(*call.args, **call.kwargs)
    except BaseException:
        if steps.last is not None:
            _keep(guider, steps.last, call.arguments, f"step {steps.done} of {steps.total}")
        raise
    _keep(guider, samples, call.arguments, "")
    return samples


class _Steps:
    """How far a sampling has come: the last estimate of its result, in the space that core returns."""

    def __init__(self) -> None:
        self.last: torch.Tensor | None = None
        self.done = self.total = 0

    def followed_by(self, callback: Callable[..., Any] | None, guider: Any) -> Callable[..., Any]:
        """Core's callback, with the step noted first."""

        def noted(step: int, estimate: torch.Tensor, x: torch.Tensor, total: int) -> Any:
            self.last = guider.inner_model.process_latent_out(estimate.to(torch.float32)).cpu()
            self.done, self.total = step + 1, total
            return None if callback is None else callback(step, estimate, x, total)

        return noted


def _keep(guider: Any, samples: torch.Tensor, arguments: dict[str, Any], unfinished: str) -> None:
    """Keep one sampling; whatever goes wrong here must not cost the sampling itself."""
    try:
        shapes: Sequence[Any] = arguments.get("latent_shapes") or [samples.shape]
        tensors = [tensor.cpu() for tensor in comfy.utils.unpack_latents(samples, shapes)]
        name = recovery.keep_samples(tensors, _record(guider, tensors[0], arguments, unfinished))
    except Exception:
        log.exception("AnyGPU: the latents of this sampling could not be kept")
        return
    if name:
        log.info("AnyGPU: latents kept as %s%s", name, f", {unfinished}" if unfinished else "")


def _record(guider: Any, samples: torch.Tensor, arguments: dict[str, Any], unfinished: str) -> dict[str, Any]:
    """What the list of kept latents shows of one sampling."""
    model = guider.model_patcher.model
    space, frames = model.latent_format, samples.shape[2] if samples.ndim == 5 else 1
    height, width = samples.shape[-2:] if samples.ndim > 3 else (0, 0)
    record = {
        "model": type(model).__name__,
        "frames": (frames - 1) * int(space.temporal_downscale_ratio) + 1,
        "width": int(width * space.spacial_downscale_ratio),
        "height": int(height * space.spacial_downscale_ratio),
        "seed": int(arguments.get("seed") or 0),
        "fps": 0.0,
    }
    return record | ({"unfinished": unfinished} if unfinished else {})
