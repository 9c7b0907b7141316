"""What core's nodes get of a pipeline: MODEL and VAE beside it, and prompts and pictures as CONDITIONING."""

from __future__ import annotations

from typing import Any

from comfy_execution.graph_utils import ExecutionBlocker

from ..compat.errors import InputError
from ..pipelines.contract import ImageCondition, Loaded
from .core_models import PICTURE, model_of
from .core_vae import vae_of


def beside(loaded: Loaded) -> tuple[Any, Any]:
    """MODEL and VAE of a pipeline that was just loaded.

    With an offload that is not ComfyUI's own they stop the nodes they are connected to, with the reason.
    """
    model, vae = model_of(loaded), vae_of(loaded)
    if model is None:
        found = f"AnyGPU: MODEL and VAE need offload auto or comfyui; found {loaded.residency}"
        told = f"{found}. Choose auto on the load node."
        return ExecutionBlocker(told), ExecutionBlocker(told)
    return model, vae


def pictured(conditioning: Any, image: ImageCondition) -> list[Any]:
    """A CONDITIONING with our encoded picture in it, which our MODEL reads.

    Raises:
        InputError: no CONDITIONING.
    """
    if not conditioning:
        raise InputError(
            "an empty CONDITIONING",
            expected="encoded text",
            fix="Connect positive or negative of AnyGPU Encode Prompt.",
        )
    return [[embeds, {**extra, PICTURE: image}] for embeds, extra in conditioning]
