"""Latents of LTX-Video at twice the width and height, for the second pass of a recipe, or at twice the frame rate.

Source: Lightricks/LTX-Video ``LTXMultiScalePipeline``; ComfyUI 0.33 ``comfy_extras/nodes_lt_upsampler.py``, where the
temporal one has no second pass and its channels stay."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ....compat.checkpoints.headers import TensorEntry
from ....compat.device.execution import to_host
from ....compat.errors import CheckpointError
from ...base import Latents, Progress
from ...files.formats import entries_in
from ...latents.upscaler import upscaled
from ...pipeline import Pipeline
from ...settings import SECOND_PASS
from .conditions import scaling
from .spec import CHANNELS

FIRST = "initial_conv.weight"


def config_of(entries: dict[str, TensorEntry], path: Path) -> dict[str, Any]:
    """The configuration of an upscaler, by its shapes; raises CheckpointError for another model or way to enlarge."""
    shapes = {name: entry.shape for name, entry in entries.items()}
    first, doubling = shapes.get(FIRST, ()), shapes.get("upsampler.0.weight", ())
    if len(first) < 4 or first[1] != CHANNELS or not doubling:
        found = f"{str(path)!r} holds no latent upscaler of LTX-Video"
        fix = "Download it from https://huggingface.co/Lightricks/LTX-Video."
        raise CheckpointError(found, expected="such as ltxv-spatial-upscaler-0.9.8.safetensors", fix=fix)
    blocks = {name.split(".")[1] for name in shapes if name.startswith("res_blocks.")}
    sizes = {"in_channels": CHANNELS, "mid_channels": first[0], "num_blocks_per_stage": len(blocks)}
    wider, more = (len(doubling), doubling[0]) == (4, 4 * first[0]), (len(doubling), doubling[0]) == (5, 2 * first[0])
    if wider == more:
        found = f"{str(path)!r} enlarges in a way that no published upscaler of LTX-Video does"
        fix = "Choose the spatial or the temporal upscaler of https://huggingface.co/Lightricks/LTX-Video."
        raise CheckpointError(found, expected="twice the width and height, or twice the frames", fix=fix)
    return {**sizes, "dims": len(first) - 2, "spatial_upsample": wider, "temporal_upsample": more}


def enlarged(latents: Latents, path: Path) -> Latents:
    """``latents`` with the size, rate and mark of :func:`upscale`, but their own samples."""
    if config_of(entries_in(path), path)["temporal_upsample"]:  # the first frame stays one: T latents become 2 T - 1
        return replace(latents, frames=2 * latents.frames - 1, fps=2 * latents.fps)
    marked = {**latents.extra, SECOND_PASS: True}
    return replace(latents, height=2 * latents.height, width=2 * latents.width, extra=marked)


def upscale(pipeline: Pipeline, latents: Latents, path: Path, progress: Progress) -> Latents:
    """``latents`` at twice the width and height, with their channels' old mean and deviation, marked for the second
    pass; or with twice the frames per second."""
    from diffusers import LTXLatentUpsamplePipeline as Upstream
    from diffusers import LTXPipeline
    from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel as Network

    entries = entries_in(path)
    config = config_of(entries, path)
    vae: Any = pipeline.parts.read("vae", progress)
    low, scale, dtype = latents.samples, scaling(pipeline), pipeline.precision.vae
    mean, std = (to_host(tensor).float() for tensor in (vae.latents_mean, vae.latents_std))
    plain = LTXPipeline._denormalize_latents(low, mean, std, scale)
    high = upscaled(pipeline, plain, partial(Network, **config), entries, 4 * config["mid_channels"], dtype, progress)
    high = LTXPipeline._normalize_latents(high, mean, std, scale)
    match: Any = Upstream.adain_filter_latent
    return replace(enlarged(latents, path), samples=match(None, high, low, 1.0) if config["spatial_upsample"] else high)
