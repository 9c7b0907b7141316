"""Calls of a transformer by core's samplers: latents and a noise level in, velocity out, for every video family.

A sampler of core's has its own names for levels, text and pictures, which ``host/core_models.py`` puts into a ``Call``.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from ...compat.errors import InputError
from ..base import Call
from ..pipeline import Pipeline
from .block_patches import BlockPatches, with_block_patches

TIME = 1000.0  # what the transformers call the highest noise level


def velocity(
    pipeline: Pipeline, transformer: Any, call: Call, block_patches: BlockPatches | None = None
) -> torch.Tensor:
    """Noise minus data, shaped as the sampled latents, fp32.

    Raises:
        InputError: the text is not this family's, or something the family needs is not there.
    """
    if call.embeds is None:
        raise InputError("a MODEL call without text", expected="CONDITIONING", fix="Connect a text encoder.")
    width = pipeline.configs["transformer"].get(pipeline.spec.files.text_width)
    if width is not None and call.embeds.shape[-1] != width:
        raise InputError(
            f"CONDITIONING of width {call.embeds.shape[-1]}",
            expected=f"width {width}",
            fix="Use positive and negative of AnyGPU Encode Prompt, or this model's own text encoder files.",
        )
    alone = pipeline.spec.rewrites.returns_alone
    with ExitStack() as stack:
        stack.enter_context(transformer.cache_context(call.branch))
        if block_patches is not None:
            stack.enter_context(with_block_patches(transformer, replace(block_patches, returns_alone=alone)))
        output: torch.Tensor = pipeline.spec.code.call_transformer(pipeline, transformer, call)
    return output.float()


def guidance_of(pipeline: Pipeline, call: Call) -> torch.Tensor | None:
    """The distilled guidance (B,) as a transformer takes it; None for one that takes none."""
    if not pipeline.configs["transformer"].get("guidance_embeds", True):
        return None
    given = call.guidance if call.guidance is not None else call.latents.new_full((1,), 6.0)
    return given.to(call.latents.dtype).reshape(-1).expand(call.latents.shape[0]) * TIME


def required(value: torch.Tensor | None, name: str, fix: str) -> torch.Tensor:
    """``value``, which the CONDITIONING must have."""
    if value is None:
        raise InputError(f"no {name} in the CONDITIONING", expected="CONDITIONING that carries it", fix=fix)
    return value
