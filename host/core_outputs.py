"""What core's nodes get of a pipeline: MODEL and VAE beside it, and prompts and pictures as CONDITIONING."""

from __future__ import annotations

from typing import Any

from comfy_execution.graph_utils import ExecutionBlocker

from ..compat.errors import InputError
from ..pipelines.base import ImageCondition, Pipeline
from .core_models import PICTURE, adapted_model_of, model_of
from .core_vae import vae_of


def beside(pipeline: Pipeline) -> tuple[Any, Any]:
    """MODEL and VAE of a pipeline that was just loaded.

    With an offload that is not ComfyUI's own they stop the nodes they are connected to, with the reason.
    """
    model, vae = model_of(pipeline), vae_of(pipeline)
    return (_not_managed(pipeline), _not_managed(pipeline)) if model is None else (model, vae)


def adapted(pipeline: Pipeline) -> Any:
    """MODEL of a pipeline with its LoRAs; stops the nodes it is connected to as above."""
    return adapted_model_of(pipeline) or _not_managed(pipeline)


def _not_managed(pipeline: Pipeline) -> Any:
    found = f"AnyGPU: MODEL and VAE need offload auto or comfyui; found {pipeline.offloader}"
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
