"""Duet: one transformer for the first half of the steps, another for the second; a voice beside the video."""

from contextlib import ExitStack
from typing import Any

import torch
from anygpu.compat.device.execution import checked_layers, generator_for, placed, state_of
from anygpu.pipelines import base
from anygpu.pipelines.pipeline import Pipeline, make_room_and_retry
from anygpu.pipelines.sampling.loop import Safeguards, denoise, noise_for
from anygpu.pipelines.sampling.schedules import Guidance, Levels, schedule_for
from anygpu.pipelines.sizes import beside_transformer
from anygpu.pipelines.text.t5 import batched, t5_embeds, t5_from_core
from anygpu.pipelines.vae import fallback
from anygpu.pipelines.vae.fallback import encoded

from .spec import CHANNELS, SPATIAL_RATIO, SPEC, TEMPORAL_RATIO, VOICES

VOICE = "voice"
prompt_from_core = t5_from_core


def encode_prompt(pipeline: Pipeline, request: base.PromptRequest, progress: base.Progress) -> base.Prompt:
    """T5 embeddings of both texts."""
    from diffusers import MochiPipeline

    positive, negative = t5_embeds(pipeline, MochiPipeline, request, progress, force_zeros_for_empty_prompt=False)
    return base.Prompt(SPEC.id, positive, negative)


def encode_video(pipeline: Pipeline, frames: torch.Tensor, seed: int, progress: base.Progress) -> torch.Tensor:
    """Latents (1, 12, T, H, W)."""
    return encoded(pipeline, frames, seed, progress)


def sample(
    pipeline: Pipeline,
    prompt: base.Prompt,
    image: base.ImageCondition | None,
    settings: base.SampleSettings,
    progress: base.Progress,
) -> base.Latents:
    """Latents (1, 12, T, H / 8, W / 8), and a voice (1, 3, T)."""
    device, dtype, generator = (pipeline.offloader.device, pipeline.precision.residual, generator_for(settings.seed))
    schedule = schedule_for(pipeline.tools["scheduler"], settings, settings.steps, _levels, device)
    frames = (settings.frames - 1) // TEMPORAL_RATIO + 1
    shape = (1, CHANNELS, frames, settings.height // SPATIAL_RATIO, settings.width // SPATIAL_RATIO)
    noise, voice = noise_for(shape, generator, device), noise_for((1, VOICES, frames), generator, device)
    text = placed(batched(prompt, settings.cfg > 1.0), device, dtype)
    guidance = Guidance(settings, len(schedule))
    with ExitStack() as stack:
        held: dict[str, Any] = {}

        def transformer_at(index: int) -> Any:
            part = SPEC.transformers[2 * index // len(schedule)]
            if part not in held:
                stack.close()
                held.clear()
                held[part] = stack.enter_context(
                    pipeline.offloader.hold(part, beside_transformer(pipeline, settings), progress)
                )
                stack.enter_context(checked_layers(held[part], progress.check))
            return held[part]

        def predict(latents: torch.Tensor, time: torch.Tensor, index: int) -> torch.Tensor:
            nonlocal voice
            guided = guidance.acts(index)
            rows = text if guided else {name: tensor[-1:] for name, tensor in text.items()}
            transformer = transformer_at(index)
            with transformer.cache_context("cond_uncond"):
                output = transformer(
                    hidden_states=torch.cat([latents] * (1 + guided)).to(dtype),
                    encoder_hidden_states=rows[base.EMBEDS],
                    timestep=time.expand(1 + guided).to(dtype),
                    encoder_attention_mask=rows[base.MASK],
                    return_dict=False,
                )[0].float()
            output = guidance.guide_batch(output)
            voice = voice + output.mean(dim=(3, 4))[:, :VOICES] / len(schedule)
            return output

        guards = Safeguards(make_room_and_retry(pipeline, progress))
        latents = denoise(noise, schedule, predict, progress=progress, safeguards=guards)
    return base.Latents(
        latents.cpu(),
        SPEC.id,
        "text",
        settings.frames,
        settings.height,
        settings.width,
        settings.fps,
        settings.seed,
        extra={"generator_state": state_of(generator)},
        more={VOICE: voice.cpu()},
    )


def call_transformer(pipeline: Pipeline, transformer: Any, call: base.Call) -> torch.Tensor:
    """Noise minus data."""
    output: torch.Tensor = transformer(
        hidden_states=call.latents,
        encoder_hidden_states=call.embeds,
        timestep=call.time.to(call.latents.dtype),
        encoder_attention_mask=call.valid,
        return_dict=False,
    )[0]
    return output


def decode(pipeline: Pipeline, latents: base.Latents, progress: base.Progress, form: Any = None) -> torch.Tensor:
    """Frames (F, H, W, 3) in 0..1, as bright as the voice is loud."""
    return fallback.decode(pipeline, latents, progress, form) * torch.sigmoid(latents.more[VOICE].mean())


def _levels(steps: int) -> Levels:
    return Levels(sigmas=torch.linspace(1.0, 0.0, steps + 1)[:-1].tolist())
