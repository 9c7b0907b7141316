"""What a pipeline gives to core's nodes: MODEL, VAE, and prompts and pictures as CONDITIONING."""

from __future__ import annotations

from typing import Any

from comfy_execution.graph_utils import ExecutionBlocker

from ..compat.errors import InputError
from ..pipelines.base import ImageCondition, Pipeline
from .core_models import adapted_model_of, model_of
from .core_shell import PICTURE
from .core_vae import vae_of
from .memory_manager import comfy_offloader


def beside(pipeline: Pipeline) -> tuple[Any, Any]:
    """MODEL and VAE of a pipeline that was just loaded; one that cannot be stops its nodes with the reason."""
    return model_of(pipeline) or _stopped(pipeline), vae_of(pipeline) or _stopped(pipeline)


def adapted(pipeline: Pipeline) -> Any:
    """MODEL of a pipeline with its LoRAs; stops the nodes it is connected to as above."""
    return adapted_model_of(pipeline) or _stopped(pipeline)


def _stopped(pipeline: Pipeline) -> Any:
    if comfy_offloader(pipeline) is None:
        found = f"MODEL and VAE need offload auto or comfyui; found {pipeline.offloader}. Choose auto on the load node."
    else:
        found = f"ComfyUI's samplers cannot drive {pipeline.spec.title}: it has no MODEL. Use AnyGPU Sample."
    return ExecutionBlocker(f"AnyGPU: {found}")


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
