"""Mochi 1: text to video."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ....compat.device.execution import generator_for, placed, to_host
from ....compat.memory.parts import tell_once
from ....compat.ranks import BOTH, PROMPTED
from ... import base
from ...base import Call, Forwards, ImageCondition, Latents, Progress, Prompt, PromptRequest, SampleSettings
from ...pipeline import Pipeline
from ...sampling import loop
from ...sampling.core_sampler import TIME
from ...sampling.schedules import Guidance, Levels, read_between, schedule_for
from ...settings import recipe_of
from ...text.t5 import ZEROED, batched, t5_embeds, t5_forwards, t5_from_core
from ...vae.draft import statistics_of
from ...vae.fallback import decode as decode
from ...vae.fallback import encoded
from .spec import CHANNELS, FAST, SPEC

THRESHOLD_NOISE = 0.025


def encode_prompt(pipeline: Pipeline, request: PromptRequest, progress: Progress) -> Prompt:
    """T5 embeddings of both texts; an empty one is zeroed, as Genmo does, unless the index says otherwise."""
    from diffusers import MochiPipeline

    if _zeroed(pipeline) and not request.negative:
        progress.notify("an empty negative prompt is all zeros, as in Genmo's own code")
    positive, negative = t5_embeds(pipeline, MochiPipeline, request, progress, **{ZEROED: _zeroed(pipeline)})
    return Prompt(SPEC.id, positive, negative)


def text_forwards(pipeline: Pipeline, request: PromptRequest | None) -> Forwards:
    return t5_forwards(pipeline, request, _zeroed(pipeline))


def _zeroed(pipeline: Pipeline) -> bool:
    """True if an empty text is zeroed, as Genmo does; FastMochi and the demo model were trained without."""
    return bool(pipeline.tools["index"].get(ZEROED, not (pipeline.is_demo or pipeline.model.recipe == FAST)))


prompt_from_core = t5_from_core
encode_video = encoded  # (1, 12, T, H / 8, W / 8): core's space is the VAE's own


def sample(
    pipeline: Pipeline, prompt: Prompt, image: ImageCondition | None, settings: SampleSettings, progress: Progress
) -> Latents:
    """Latents (1, 12, T, H / 8, W / 8) in core's space. Source: diffusers ``MochiPipeline.__call__``, equal in fp32."""
    device, dtype = pipeline.offloader.device_of("transformer"), pipeline.precision.residual
    generator = generator_for(settings.seed)
    mean, std, scale = statistics_of(pipeline)
    recipe = recipe_of(pipeline, settings)
    trained = None if recipe is None else recipe.timesteps
    if trained is not None and settings.sigmas is None:
        tell_once(progress, "noise levels of FastVideo's own script; they were Genmo's before")
    schedule = schedule_for(pipeline.tools["scheduler"], settings, settings.steps, partial(_levels, trained), device)
    noise = loop.noise_for(loop.latent_shape(SPEC, CHANNELS, settings), generator, device)
    clean = None if settings.latents is None else ((settings.latents.samples - mean) * scale / std).to(device)
    text = placed(batched(prompt, settings.cfg > 1.0), device, dtype)
    guidance = Guidance(settings, len(schedule))
    with loop.held_transformer(pipeline, settings, progress) as transformer, warnings.catch_warnings():
        # Its rotary embedding asks the CPU for an fp32 autocast, which is a no-op there, with a warning per step.
        warnings.filterwarnings("ignore", message="In CPU autocast")

        def predict(latents: torch.Tensor, time: torch.Tensor, index: int) -> torch.Tensor:
            def run(rows: slice) -> torch.Tensor:
                texts = {name: tensor[rows] for name, tensor in text.items()}
                model_input = torch.cat([latents] * len(texts[base.EMBEDS])).to(dtype)
                with transformer.cache_context("cond_uncond"):
                    output: torch.Tensor = transformer(
                        hidden_states=model_input,
                        encoder_hidden_states=texts[base.EMBEDS],
                        timestep=time.expand(model_input.shape[0]).to(dtype),
                        encoder_attention_mask=texts[base.MASK],
                        return_dict=False,
                    )[0]
                return output.float()

            forward = run if pipeline.run.group is None else pipeline.run.group.by_halves(run)
            return guidance.guide_batch(forward(BOTH if guidance.acts(index) else PROMPTED))

        latents = loop.denoise(
            loop.start_from(clean, noise, schedule),
            schedule,
            predict,
            progress=progress,
            safeguards=loop.safeguards_of(pipeline, progress, generator),
            noise_mask=loop.noise_mask_for(settings, clean, noise),
        )
    return loop.sampled_latents(pipeline, to_host(latents) * std / scale + mean, settings, generator)


def call_transformer(pipeline: Pipeline, transformer: Any, call: Call) -> torch.Tensor:
    """The velocity, noise minus data, for a sampler of core's."""
    output: torch.Tensor = transformer(
        hidden_states=call.latents,
        encoder_hidden_states=call.embeds,
        timestep=(TIME - call.time).to(call.latents.dtype),
        encoder_attention_mask=call.valid,
        return_dict=False,
    )[0]
    return -output.float()  # the model predicts data minus noise


def _levels(trained: Sequence[float] | None, steps: int) -> Levels:
    """A distilled model's levels; else Genmo's: linear to a small noise for half of the steps, then quadratic."""
    from diffusers.pipelines.mochi.pipeline_mochi import linear_quadratic_schedule

    if trained is None:
        return Levels(sigmas=linear_quadratic_schedule(steps, THRESHOLD_NOISE))
    return Levels(sigmas=read_between(trained, steps))
