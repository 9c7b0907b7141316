"""What core's nodes get of a pipeline: MODEL and VAE beside it, and prompts and pictures as CONDITIONING."""

from __future__ import annotations

from typing import Any

from comfy_execution.graph_utils import ExecutionBlocker

from ..compat.errors import InputError
from ..pipelines.base import ImageCondition, Loaded
from .core_models import PICTURE, adapted_model_of, model_of
from .core_vae import vae_of


def beside(loaded: Loaded) -> tuple[Any, Any]:
    """MODEL and VAE of a pipeline that was just loaded.

    With an offload that is not ComfyUI's own they stop the nodes they are connected to, with the reason.
    """
    model, vae = model_of(loaded), vae_of(loaded)
    return (_not_managed(loaded), _not_managed(loaded)) if model is None else (model, vae)


def adapted(loaded: Loaded) -> Any:
    """MODEL of a pipeline with its LoRAs; stops the nodes it is connected to as above."""
    return adapted_model_of(loaded) or _not_managed(loaded)


def _not_managed(loaded: Loaded) -> Any:
    found = f"AnyGPU: MODEL and VAE need offload auto or comfyui; found {loaded.residency}"
    return ExecutionBlocker(f"{found}. Choose auto on the load node.")


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
