"""Latents of LTX-Video at twice the width and height, for the second pass of a recipe, or at twice the frame rate.

Source: Lightricks/LTX-Video ``LTXMultiScalePipeline``; ComfyUI 0.33 ``comfy_extras/nodes_lt_upsampler.py``, where the
temporal one has no second pass and its channels stay.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ....compat.checkpoints.headers import TensorEntry
from ....compat.checkpoints.weights import read_tensors
from ....compat.errors import CheckpointError
from ....compat.memory.transfer import transfer_for
from ...base import Latents, Progress, ProgressStage
from ...files.formats import entries_in
from ...files.part import construction, empty_weights
from ...keys import listed
from ...pipeline import Pipeline, held_once
from ...settings import SECOND_PASS
from .conditions import scaling
from .spec import CHANNELS, SPATIAL_RATIO

PART = "latent_upsampler"
COPIES = 4  # of its widest activation alive at once: a convolution's input, output and work, and the residual
FIRST = "initial_conv.weight"


def config_of(entries: dict[str, TensorEntry], path: Path) -> dict[str, Any]:
    """The configuration of an upscaler, by its shapes; CheckpointError for another model."""
    shapes = {name: entry.shape for name, entry in entries.items()}
    first, doubling = shapes.get(FIRST, ()), shapes.get("upsampler.0.weight", ())
    if len(first) < 4 or first[1] != CHANNELS or not doubling:
        raise CheckpointError(
            f"{str(path)!r} holds no latent upscaler of LTX-Video",
            expected="such as ltxv-spatial-upscaler-0.9.8.safetensors",
            fix="Download it from https://huggingface.co/Lightricks/LTX-Video.",
        )
    blocks = {name.split(".")[1] for name in shapes if name.startswith("res_blocks.")}
    sizes = {"in_channels": CHANNELS, "mid_channels": first[0], "num_blocks_per_stage": len(blocks)}
    wider, more = (len(doubling), doubling[0]) == (4, 4 * first[0]), (len(doubling), doubling[0]) == (5, 2 * first[0])
    if wider == more:
        raise CheckpointError(
            f"{str(path)!r} enlarges in a way that no published upscaler of LTX-Video does",
            expected="twice the width and height, or twice the frames",
            fix="Choose the spatial or the temporal upscaler of https://huggingface.co/Lightricks/LTX-Video.",
        )
    return {**sizes, "dims": len(first) - 2, "spatial_upsample": wider, "temporal_upsample": more}


def upscale(pipeline: Pipeline, latents: Latents, path: Path, progress: Progress) -> Latents:
    """``latents`` at twice the width and height, marked for the second pass; or with twice the frames per second."""
    from diffusers import LTXLatentUpsamplePipeline as Upstream
    from diffusers import LTXPipeline

    entries = entries_in(path)
    config = config_of(entries, path)
    device = pipeline.offloader.device_of(PART)
    transfer = transfer_for(device, pipeline.precision.vae)
    vae: Any = pipeline.parts.read("vae", progress)
    low, scale = latents.samples, scaling(pipeline)
    mean, std = transfer.to_host_fp32(vae.latents_mean), transfer.to_host_fp32(vae.latents_std)
    needed = COPIES * config["mid_channels"] * math.prod(low.shape[2:]) * 4 * pipeline.precision.vae.itemsize
    read = partial(_read, entries, config, pipeline.precision.vae)
    with held_once(pipeline, PART, read, needed, progress) as network:
        progress.step(0, 1, ProgressStage("upscaling", "latents"))
        high = network(transfer.to_device(LTXPipeline._denormalize_latents(low, mean, std, scale)))
        high = LTXPipeline._normalize_latents(transfer.to_host_fp32(high), mean, std, scale)
    progress.step(1, 1, ProgressStage("upscaling", "latents"))
    if config["temporal_upsample"]:  # the first frame stays one: T latents become 2 T - 1
        return replace(latents, samples=high, frames=2 * latents.frames - 1, fps=2 * latents.fps)
    match: Any = Upstream.adain_filter_latent
    rows, columns = high.shape[3:]
    return replace(
        latents,
        samples=match(None, high, low, 1.0),
        height=rows * SPATIAL_RATIO,
        width=columns * SPATIAL_RATIO,
        extra={**latents.extra, SECOND_PASS: True},
    )


def _read(entries: dict[str, TensorEntry], config: dict[str, Any], dtype: torch.dtype, progress: Progress) -> nn.Module:
    from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel

    with torch.inference_mode(False), torch.no_grad():
        file = next(iter(entries.values())).file
        with construction("latent upscaler", file, len(entries), progress.check), empty_weights():
            network: nn.Module = LTXLatentUpsamplerModel(**config)
        missing = sorted(network.state_dict().keys() - entries.keys())
        if missing:
            raise CheckpointError(
                f"no tensors {listed(missing)} in a latent upscaler",
                expected="a complete file, such as ltxv-spatial-upscaler-0.9.8.safetensors",
                fix="Download this file again.",
            )
        wanted = {name: entries[name] for name in network.state_dict()}
        network.load_state_dict(read_tensors(wanted, dtype, lambda _: progress.check()), assign=True)
        return network.eval().requires_grad_(False)
