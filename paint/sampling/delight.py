"""Delights a reference picture: an image-to-image model removes shading and highlights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...compat.device.execution import generator_for
from ...compat.errors import InputError
from ...compat.memory.parts import Silent
from ...pipelines.forecast.times import expected
from ..choices import DELIGHT_STEPS, GREY, WHITE
from ..forecast import ENCODED, PaintRun, vae_bytes
from ..loading import PaintPipeline
from ..networks import vae
from ..networks.encoders import encoded_prompt
from ..pictures import checked_pictures, over, recentred, resized
from .painting import decoded, denoised, explained, guided, noises, stage
from .solvers import schedule_for, solver_for

CORRECTION = 0.95  # share of the means that the colour correction moves
SOLID = 0.5  # alpha above which a pixel counts as the object
LARGEST = 2048  # pixels of a side: the widget's


@dataclass(frozen=True, slots=True)
class DelightSettings:
    """Settings of delighting a picture; the defaults are the published ones."""

    size: int = 512  # pixels, a multiple of 64
    steps: int = DELIGHT_STEPS
    image_guidance: float = 1.0  # 1 leaves it off, as the published pipeline does although it names 1.5
    seed: int = 42  # 0 to 2**64 - 1
    scheduler: str = "euler_ancestral"  # one of choices.SCHEDULERS
    spacing: str = "leading"
    correct: bool = True  # bring mean and contrast back to the picture's own where that is nearer to it
    text_guidance: float = 1.0  # how far from negative_prompt; 1 leaves it off, as published
    negative_prompt: str = ""  # what to avoid


def delight_image(pipeline: PaintPipeline, picture: Tensor, settings: DelightSettings, progress: Any = None) -> Tensor:
    """The picture in even light on white, (size, size, 3), fp32, 0..1, on the CPU.

    ``picture`` is (H, W, 3 or 4) or (1, H, W, 3 or 4), 0..1, best recentred: it is squeezed to a square, as published.
    The demo model returns it on grey. Raises InputError for another pipeline, an unusable picture, or a wrong size."""
    progress = progress or Silent()
    if pipeline.is_demo:
        progress.notify("the demo model leaves light and shadow in the picture, which is put on grey")
        plain = over(checked_pictures(picture, "picture to delight")[0], GREY)
        return resized(plain[None], settings.size, settings.size)[0]
    if pipeline.family != "delight":
        found = f"a {pipeline.family} pipeline for delighting"
        raise InputError(found, expected="a delight pipeline", fix="Load hunyuan3d-delight-v2-0.")
    if settings.size % 64 or not 64 <= settings.size <= LARGEST:
        found, fix = f"size {settings.size} for delighting", "The model was made for 512."
        raise InputError(found, expected=f"a multiple of 64 from 64 to {LARGEST} pixels", fix=fix)
    what = f"delighting a picture of {settings.size} pixels"
    with torch.no_grad(), explained(what, pipeline.facts.name, "Lower size."):
        given = checked_pictures(picture, "picture to delight")[0]
        given = resized(given[None], settings.size, settings.size)[0]
        avoided = settings.negative_prompt if settings.text_guidance != 1 else ""
        run = PaintRun(settings.steps, 3 if avoided else 1 + (settings.image_guidance != 1), settings.size, views=1)
        text = encoded_prompt(pipeline, "", progress, partial(expected, pipeline, "text", run))
        if avoided:
            negative = encoded_prompt(pipeline, avoided, progress)
            text = torch.cat((negative, negative, text))
        elif settings.text_guidance != 1:
            progress.notify("text_guidance has no effect without negative_prompt")
        device, dtype = pipeline.offloader.device, pipeline.precision.vae
        with stage(pipeline, "encoding", "vae", vae_bytes(ENCODED, settings.size, dtype), run, progress) as module:
            condition = vae.encoded(module, network_picture(given)[None], None, device)
        latents = sampled(pipeline, condition, text, settings, run, progress)
        evened = decoded(pipeline, latents, run, settings.seed, progress).views[0]
        return corrected(evened, given) if settings.correct else evened


def delight_images(
    pipeline: PaintPipeline, pictures: Sequence[Tensor], settings: DelightSettings, recenter: bool, progress: Any
) -> Tensor:
    """(B, size, size, 3): :func:`delight_image` of each picture (H, W, 3 or 4), put into the middle first if asked."""
    centred = [recentred(picture) if recenter else picture for picture in pictures]
    return torch.stack([delight_image(pipeline, picture, settings, progress) for picture in centred])


def network_picture(picture: Tensor) -> Tensor:
    """(H, W, 3) for the network: white outside the object, whose edge is one pixel further in."""
    if picture.shape[-1] == 3:
        return picture
    inside = eroded(picture[..., 3]) > 0
    return torch.where(inside[..., None], picture[..., :3], torch.full_like(picture[..., :3], WHITE))


def eroded(alpha: Tensor) -> Tensor:  # the least of each pixel and its eight neighbours
    return -functional.max_pool2d(-alpha[None, None], 3, stride=1, padding=1)[0, 0]


def sampled(
    pipeline: PaintPipeline, condition: Tensor, texts: Tensor, settings: DelightSettings, run: PaintRun, progress: Any
) -> Tensor:
    """Clean scaled latents (1, 4, h, w) from ``condition``, the picture's own, which are not scaled.

    A single guidance row has the picture; two are without and with it; three are without and with it under the negative
    prompt, and with it under the empty one. Guidance leads from each to the next."""
    solver = solver_for(settings.scheduler, schedule_for(settings.spacing, settings.steps, zero_snr=False))
    draw, device = noises(condition.shape, generator_for(settings.seed)), pipeline.offloader.device
    without = [torch.zeros_like(condition)] if run.rows > 1 else []
    conditions = torch.cat([*without, *[condition] * max(1, run.rows - 1)]).to(device)
    texts = texts.expand(run.rows, -1, -1).to(device)

    def step(unet: Any, noisy: Tensor, time: Tensor) -> Tensor:
        given = torch.cat((noisy.expand(run.rows, -1, -1, -1), conditions), dim=1)
        return guided(unet(given, time, texts), run.rows, settings.image_guidance, settings.text_guidance)

    return denoised(pipeline, run, solver, solver.begin(draw()), draw=draw, step=step, progress=progress)


def corrected(evened: Tensor, given: Tensor) -> Tensor:
    """``evened`` (H, W, 3) on white, with mean and contrast of ``given`` (H, W, 3 or 4) unless that is farther from it.

    In fp64, from values rounded to 8 bits to values floored to 8 bits, as upstream."""
    evened, given = ((picture.double() * 255).round() / 255 for picture in (evened, given))
    alpha = eroded(given[..., 3]) if given.shape[-1] == 4 else torch.ones_like(given[..., 0])
    solid, chosen, wanted = alpha > SOLID, evened, network_picture(given)
    source, target = evened[solid], wanted[solid]
    if len(source) > 1:
        ratio = target.std(0) / source.std(0).clamp(min=1e-6)
        changed = ((evened - CORRECTION * source.mean(0)) * ratio + CORRECTION * target.mean(0)).clamp(0, 1)
        # over the whole picture, outside the object too
        chosen = evened if (evened - wanted).square().mean() < (changed - wanted).square().mean() else changed
    alpha = alpha[..., None]
    return ((chosen * alpha + WHITE * (1 - alpha)) * 255).floor().float() / 255
