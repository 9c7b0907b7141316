"""Forecast of the time of each stage of painting and delighting, made as for any pipeline.

The work of a stage is counted on tensors without data: of one picture for the VAE, of one step for the UNet.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..compat.device.work import META, Work, counted_once, counting_on_meta, empty, text_of
from ..pipelines.forecast import times
from ..pipelines.forecast.times import StageTime, TimeForecast, Times, key_of, known_or_why, room_now, times_by_mode
from .estimates import STEPPING, PaintRun, paint_needs
from .loading import PaintPipeline
from .networks import vae
from .networks.encoders import CROPPED, TOKENS, encoder_without_weights
from .networks.layers import Dtypes
from .networks.multiview import LATENT_CHANNELS, StreamInputs
from .networks.pbr import MATERIALS
from .networks.published import DELIGHT_CHANNELS, networks_for, stored_dtype
from .networks.unet import set_attention

STATES, STATE_WIDTH = 257, 1536  # of DINOv2-giant
PARTS = {"text": "text_encoder", "image": "image_encoder", "reference": "reference"}  # others: the UNet or the VAE


def paint_times(pipeline: PaintPipeline, run: PaintRun, mode: str = "", room: int | None = None) -> TimeForecast:
    """Forecast the time of each stage under ``mode``, by default the pipeline's own.

    Args:
        room: bytes of the device that the run may take; None for all that it needs.

    Raises:
        UnsupportedError: the rates of the device are unknown.
    """
    mode = mode or pipeline.offloader.mode
    needs = paint_needs(pipeline, run, mode)
    return TimeForecast(mode, tuple(stage_time(pipeline, need.name, run, mode, room) for need in needs))


def times_of(pipeline: PaintPipeline, run: PaintRun, modes: tuple[str, ...], room: int | None = None) -> Times:
    """The same for each mode that can be; without those whose time is unknown, and why."""
    return times_by_mode(pipeline, modes, lambda mode: paint_times(pipeline, run, mode, room))


def work_key(pipeline: PaintPipeline) -> str:
    """The key of all that changes the work of a stage or its rate, as that of a video pipeline."""
    return key_of(
        precision=str(pipeline.precision),
        demo=pipeline.stands_in_for,
        torch=pipeline.facts.torch_version,
        attention=pipeline.attention,
        compiled={part: blocks.settings for part, blocks in pipeline.compiled.items()},
    )


def expected(pipeline: PaintPipeline, stage: str, run: PaintRun) -> dict[str, Any]:
    """Arguments of ``stage_cost`` for a stage that begins now: modelled time, forecast, key; empty if unknown."""
    room = room_now(pipeline)
    time, _ = known_or_why(lambda: stage_time(pipeline, stage, run, pipeline.offloader.mode, room))
    if time is None:
        return {}
    return {"modelled_seconds": time.modelled, "forecast_seconds": time.seconds, "work": work_key(pipeline)}


def stage_time(pipeline: PaintPipeline, stage: str, run: PaintRun, mode: str, room: int | None) -> StageTime:
    """Forecast the time of one stage.

    Raises:
        UnsupportedError: the rates of the device are unknown.
    """
    part, precision = PARTS.get(stage, "unet" if stage in STEPPING.values() else "vae"), pipeline.precision
    dtypes = {"text_encoder": precision.text, "image_encoder": precision.text, "vae": precision.vae}
    computes = precision.compute if part == "unet" else None
    planned = times.PlannedStage(
        name=stage,
        facts=pipeline.facts,
        probes=pipeline.probes,
        dtype=computes or dtypes.get(part, precision.transformer),
        work=partial(stage_work, pipeline, stage, run),
        weights=pipeline.weights[part].total,
        key=work_key(pipeline),
        calls=run.steps if part == "unet" else 1,
    )
    return times.stage_time(pipeline, planned, mode, room)


def stage_work(pipeline: PaintPipeline, stage: str, run: PaintRun) -> Work:
    """The work of one stage."""
    delight, materials = pipeline.family == "delight", MATERIALS if pipeline.family == "paint_pbr" else 1
    views = 1 if delight else run.views * materials
    if stage in PARTS and stage != "reference":
        config = pipeline.configs[PARTS[stage]]
        return counted_once((stage, text_of(config)), partial(_encoder_work, pipeline, PARTS[stage]))
    if stage == "encoding":
        return _vae_work(pipeline, run.size, "encode").times(1 if delight else run.references + 2 * run.views)
    if stage == "decoding":
        return _vae_work(pipeline, run.size, "decode").times(views)
    key = (pipeline.family, text_of(pipeline.configs["unet"]), str(pipeline.precision), run.size, run.references)
    reference, step = counted_once((*key, run.views, run.rows), partial(_unet_work, pipeline, run))
    return reference if stage == "reference" else step.times(run.steps)


def _vae_work(pipeline: PaintPipeline, size: int, direction: str) -> Work:
    """The work of one picture to latents, or back."""
    config, dtype = pipeline.configs["vae"], pipeline.precision.vae
    side = size // vae.REDUCTION

    def count() -> Work:
        with META:
            module = vae.autoencoder(config).to(dtype)
        vae.set_vae_attention(module, functional.scaled_dot_product_attention)
        with counting_on_meta() as work:
            if direction == "encode":
                posterior = module.encode(empty(1, 3, size, size, dtype=dtype)).latent_dist
                posterior.mean, posterior.std  # noqa: B018 - made when they are asked for
            else:
                module.decode(empty(1, LATENT_CHANNELS, side, side, dtype=dtype))
        return work

    return counted_once(("paint", direction, text_of(config), size, str(dtype)), count)


def _unet_work(pipeline: PaintPipeline, run: PaintRun) -> tuple[Work, Work]:
    """The work of looking at the reference, and of one step."""
    family, side = pipeline.family, run.size // vae.REDUCTION
    dtypes = Dtypes(pipeline.precision.compute, pipeline.precision.residual)
    with META:
        made = networks_for(family, pipeline.configs["unet"], dtypes)
    for network in made.values():
        for name, weight in network.named_parameters():
            weight.data = weight.data.to(stored_dtype(name, dtypes))
        set_attention(network, functional.scaled_dot_product_attention)
    looked, step = Work(), empty(1)
    if family == "delight":
        text = empty(run.rows, TOKENS, pipeline.shape.text_width)
        given: tuple[Any, ...] = (empty(run.rows, DELIGHT_CHANNELS, side, side), step, text)
    else:
        with counting_on_meta() as looked:
            kept = made["reference"](empty(1, run.references, LATENT_CHANNELS, side, side))
        materials = MATERIALS if family == "paint_pbr" else 1
        shared = StreamInputs(run.views, kept, (0.0, 1.0)[-run.rows :], materials=materials)
        sample, maps = (run.views, LATENT_CHANNELS, side, side), empty(1, run.views, 2 * LATENT_CHANNELS, side, side)
        if family == "paint_pbr":
            given = (empty(run.rows, materials, *sample), step, maps, empty(run.rows, STATES, STATE_WIDTH), shared)
        else:
            cameras = torch.zeros(run.views, dtype=torch.long, device=META)
            given = (empty(run.rows, *sample), step, maps, cameras, shared)
    with counting_on_meta() as work:
        made["unet"](*given)
    return looked, work


def _encoder_work(pipeline: PaintPipeline, part: str) -> Work:
    dtype = pipeline.precision.text
    with META:
        module: nn.Module = encoder_without_weights(part, pipeline.configs[part]).to(dtype)
    if part == "image_encoder":
        given = empty(1, 3, CROPPED, CROPPED, dtype=dtype)
    else:
        given = torch.zeros(1, TOKENS, dtype=torch.long, device=META)
    with counting_on_meta() as work:
        module(given)
    return work
