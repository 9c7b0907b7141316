"""LTX-Video: text to video; images and clips at chosen frames with strength; video to video.

``LTXPipeline`` for a folder of it (0.9.0, 0.9.1), with a start image ``LTXImageToVideoPipeline``; else, and for other
images and clips, ``LTXConditionPipeline``. Recipes are Lightricks' own: ``published.json``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....compat.device.execution import HOST, generator_for, placed, state_of, to_host
from ....compat.errors import CheckpointError
from ....compat.memory.parts import Undo, tell_once
from ....compat.memory.transfer import Transfer
from ....compat.ranks import BOTH, PROMPTED, Group
from ... import base
from ...base import Call, ImageCondition, Latents, Progress, ProgressStage, Prompt, PromptRequest, SampleSettings
from ...family import GuidanceStep, Recipe
from ...files.evidence import Evidence
from ...pipeline import Pipeline
from ...sampling import loop
from ...sampling.schedules import (
    TRAIN_TIMESTEPS,
    Levels,
    Schedule,
    classifier_free_guidance,
    read_between,
    schedule_for,
)
from ...settings import recipe_of
from ...text.t5 import batched, t5_embeds, t5_forwards, t5_from_core
from ...vae.chunked import SPATIAL_PADDING
from ...vae.fallback import decoding, unsigned
from ...vae.plan import DecodeRequest
from . import conditions
from .spec import CONDITION, DEV, DISTILLED, SPATIAL_RATIO, SPEC, STOCHASTIC, TEMPORAL_RATIO
from .upscaler import enlarged as enlarged
from .upscaler import upscale as upscale

NOTHING = 1e-8  # added to a square norm before it divides
LARGEST_2B = 28  # blocks of its transformer
LARGE = "13B"  # in the names of recipes: more blocks
OLDER = "0.9.6", "0.9.7"  # in them: 2B dev; 13B
LARGER = "dev 0.9.6"  # its key: with another size than 2B dev
ENHANCED_WORDS = 120  # in longer prompts the published script changes nothing
VERSION = r"(?<!\d)0[._-]?9[._-]?([1-8])(?!\d)"
PADDINGS = ("zeros", "reflect", "replicate")  # a circular one would need the other side of the picture in each tile


def recipe_for(pipeline: Pipeline) -> Recipe:
    """The published recipe of variant, size and named version; without STG for a transformer that lacks its blocks."""
    count, recipes = int(pipeline.configs["transformer"].get("num_layers", 0)), SPEC.published.recipes
    name = f"{pipeline.variant} {LARGE}" if count > LARGEST_2B else pipeline.variant
    digits = re.findall(VERSION, Evidence(names=pipeline.model.names).name_with(VERSION))[:1]  # the last of 0.9.x
    older = [f"{name} {version}" for version in OLDER if version[-1] in digits]
    return _within(next(recipes[key] for key in (*older, name, pipeline.variant) if key in recipes), count)


def guess_variant(evidence: Evidence) -> tuple[str, str]:
    """The variant that was trained, guessed by names and metadata, and the reason for it."""
    name = evidence.name_with(r"distil(?!l?er)|(?<![a-z])(dist|dev)(?![a-z])")
    name = name if "dist" in name.lower() else ""
    version, trained = evidence.name_with(VERSION), evidence.note("config", "allowed_inference_steps")
    if (name or trained) and "6" in re.findall(VERSION, version):
        return STOCHASTIC, f"the name {'/'.join(dict.fromkeys((version, name or version)))!r} says so"
    assumed = "" if version else ", and no name its version: 0.9.8 is assumed"
    if isinstance(trained, list) and trained:
        return DISTILLED, f"its file says that it was trained for {len(trained)} noise levels{assumed}"
    if name:
        return DISTILLED, f"the name {name!r} says so{assumed}"
    if evidence.note("config", "scheduler"):
        return DEV, "its file names no noise levels that it was trained for"
    released = evidence.name_with(r"\bdev\b|[-_]dev|v?0\.9")
    hint = f"the name {released!r} does not say {DISTILLED!r}" if released else f"no name around it says {DISTILLED!r}"
    return DEV, f"assumed, since its file says nothing and {hint}"


def settings_in(evidence: Evidence) -> dict[str, dict[str, Any]]:
    """Changes to ``index`` and ``scheduler`` for the sampler that a file was made for; empty if it names none."""
    sampler = evidence.note("config", "scheduler", "sampler")
    if sampler is None:
        return {}
    later = str(sampler).lower() == "linearquadratic"  # since 0.9.5
    shifts = {"use_dynamic_shifting": False, "shift_terminal": None} if later else {}
    return {"index": {"_class_name": CONDITION if later else "LTXPipeline"}, "scheduler": shifts}


def vae_settings_in(evidence: Evidence, place: Path) -> dict[str, str]:
    """Padding of rows and columns by the VAE at ``place``, empty if its file names none, which means zeros; raises
    CheckpointError for an unknown one. Source: Lightricks/LTX-Video, ``CausalVideoAutoencoder.from_config``."""
    mode = evidence.config.get(SPATIAL_PADDING, evidence.note("config", "vae", SPATIAL_PADDING))
    if mode is None:
        return {}
    if mode not in PADDINGS:
        found, expected = f"{SPATIAL_PADDING} {repr(mode)[:60]} of the VAE in {str(place)!r}", ", ".join(PADDINGS)
        raise CheckpointError(found, expected=f"one of {expected}", fix="Choose another VAE.")
    return {SPATIAL_PADDING: mode}


def encode_prompt(pipeline: Pipeline, request: PromptRequest, progress: Progress) -> Prompt:
    """T5 embeddings of both texts under their mask, as the publisher has it for every version.

    ``LTXPipeline`` pads without a mask; only the demo model was trained so. Source: Lightricks/LTX-Video 5260738
    ``encode_prompt``."""
    from diffusers import LTXConditionPipeline, LTXPipeline

    if not pipeline.is_demo and len(request.text.split()) < ENHANCED_WORDS:
        progress.notify(
            f"the published script rewrites prompts under {ENHANCED_WORDS} words (Florence-2, Llama-3.2-3B); "
            "this one is taken as it is"
        )
    if not (pipeline.is_demo or _is_condition(pipeline)):
        tell_once(progress, "the prompt is encoded under its mask, as its publisher does; earlier versions had none")
    pipe = LTXPipeline if pipeline.is_demo else LTXConditionPipeline
    positive, negative = t5_embeds(pipeline, pipe, request, progress)
    return Prompt(SPEC.id, positive, negative)


text_forwards = t5_forwards
prompt_from_core = t5_from_core
encode_image = conditions.encode_image


def encode_video(pipeline: Pipeline, frames: Tensor, seed: int, progress: Progress) -> Tensor:
    """Latents (1, 128, T, H / 32, W / 32), drawn by ``seed``, in core's space, which for LTX-Video is normalised."""
    from diffusers import LTXPipeline
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    encoded = conditions.encoded_moments(pipeline, frames, progress, ProgressStage("encoding", "video"))
    drawn = DiagonalGaussianDistribution(encoded[conditions.MOMENTS]).sample(generator_for(seed))
    scale = conditions.scaling(pipeline)
    return LTXPipeline._normalize_latents(drawn, encoded[conditions.MEAN], encoded[conditions.STD], scale)


def sample(
    pipeline: Pipeline, prompt: Prompt, image: ImageCondition | None, settings: SampleSettings, progress: Progress
) -> Latents:
    """Latents (1, 128, T, H / 32, W / 32) in core's space, the normalised one.

    A picture wins over ``settings.latents`` and its noise mask where both want the same frames. Source: diffusers
    ``LTXPipeline``, ``LTXImageToVideoPipeline`` and ``LTXConditionPipeline``; equal to them in fp32, but for the noise
    on pictures, which Lightricks' configurations have for every version."""
    from diffusers import LTXPipeline

    device, generator = pipeline.offloader.device_of("transformer"), generator_for(settings.seed)
    everything = conditions.anchors_of(image, settings.frames, progress)
    anchors = tuple(each for each in everything if not each.controls)
    controls = [each for each in everything if each.controls]
    given = [(anchor.frame, anchor.strength, anchor.moments.shape[2]) for anchor in anchors]
    usual = not controls and given in ([], [(0, 1.0, 1)])  # no picture, or one to start from
    conditioned = _is_condition(pipeline) or not usual
    recipe = recipe_of(pipeline, settings)
    assert recipe is not None  # each variant of LTX-Video has one
    if recipe == SPEC.published.recipes[LARGER] and (settings.width, settings.height, settings.fps) == recipe.size:
        tell_once(progress, "1216x704 at 30 fps, as its publisher's script; earlier versions took 704x512 at 25")
    schedule = _schedule(pipeline.tools["scheduler"], settings, conditioned, recipe, device)
    clean = None if settings.latents is None else settings.latents.samples.to(device)
    if clean is None and schedule.levels[0] < 1.0:
        clean = torch.zeros(loop.latent_shape(SPEC, conditions.CHANNELS, settings), device=device)  # as core has
    video = conditions.VideoInput(settings, device, clean, schedule.levels[0])
    start = (conditions.conditioned_start if conditioned else conditions.plain_start)(video, image, anchors, generator)
    if image is not None and controls:
        if {video.shape[-1] // each.moments.shape[-1] for each in controls} != {pipeline.model.control_factor}:
            progress.notify("the control clip has another size than its IC-LoRA's: connect that to Encode Image too")
        pictured = any(anchor.frame == 0 for anchor in anchors)
        start = conditions.with_controls(video, image, start, controls, pictured=pictured, generator=generator)
    stepper = conditions.TokenStepper(
        schedule=schedule,
        start=start,
        image_noise=0.0 if pipeline.is_demo else recipe.image_noise,  # the demo model was trained without
        generator=generator,
        renews=recipe.stochastic and settings.scheduler == "auto",
    )

    def unpacked(tokens: Tensor) -> Tensor:
        own = slice(start.outside, start.outside + math.prod(video.shape[2:]))
        return LTXPipeline._unpack_latents(tokens[:, own], *video.shape[2:])

    with loop.held_transformer(pipeline, settings, progress, beside=image.beside if image else 0) as transformer:
        guidance = LtxGuidance(settings, schedule.levels, recipe.star)
        predict = _predictor(transformer, pipeline.precision.residual, prompt, guidance, stepper, pipeline.run.group)
        tokens = loop.denoise(
            stepper.with_image_noise(start.tokens, 0),
            schedule,
            predict,
            progress=progress,
            safeguards=loop.safeguards_of(pipeline, progress, generator),
            noise_mask=conditions.noise_mask(video, start),
            preview=unpacked,
            step=stepper.step,
        )
    mapped = {"tone_map": recipe.tone_map} if recipe.tone_map else {}
    latents = loop.sampled_latents(pipeline, unpacked(to_host(tokens)), settings, generator, **mapped)
    return replace(latents, task="image" if everything else "text")


def batches(pipeline: Pipeline, settings: SampleSettings) -> Iterator[tuple[int, ...]]:
    """The batches of each step, without pictures or with one to start from: two with cfg, one more call with STG."""
    recipe = recipe_of(pipeline, settings)
    assert recipe is not None
    schedule = _schedule(pipeline.tools["scheduler"], settings, _is_condition(pipeline), recipe, HOST)
    guidance = LtxGuidance(settings, schedule.levels, recipe.star)
    for step in map(guidance.at, range(len(schedule))):
        rows = 2 if step.cfg > 1.0 else 1
        yield (rows, 1) if step.stg > 0.0 else (rows,)


def call_transformer(pipeline: Pipeline, transformer: Any, call: Call) -> Tensor:
    """The velocity, noise minus data, for a sampler of core's."""
    from diffusers import LTXPipeline

    count, height, width = call.latents.shape[2:]
    size = SampleSettings(width * SPATIAL_RATIO, height * SPATIAL_RATIO, (count - 1) * TEMPORAL_RATIO + 1, fps=call.fps)
    video = conditions.VideoInput(size, call.latents.device, call.latents[:1], 1.0)
    begin = conditions.conditioned_start if _is_condition(pipeline) else conditions.plain_start
    start = begin(video, None, (), torch.Generator())  # for the place of the tokens alone
    tokens = LTXPipeline._pack_latents(call.latents)
    output = transformer(**_arguments(start.place, tokens, call.time, call.embeds, call.valid))[0]
    return LTXPipeline._unpack_latents(output, count, height, width)


def decode(pipeline: Pipeline, latents: Latents, progress: Progress, form: DecodeRequest | None = None) -> Tensor:
    """Frames (F, H, W, 3) in 0..1; a VAE that removes the last noise gets it from the generator that sampled, and
    after it the noise that 0.9.1's layers draw.

    The noise goes onto the latents as they are sampled, as in Lightricks' own code; diffusers puts it onto those that
    its VAE takes, whose channels are scaled. Latents marked with a ``tone_map`` are compressed after it."""
    from diffusers import LTXLatentUpsamplePipeline, LTXPipeline

    generator = generator_for(latents.seed, latents.extra.get("generator_state"))
    recipe, samples, config = recipe_for(pipeline), latents.samples, pipeline.configs["vae"]
    removes = config.get("timestep_conditioning")
    timestep = latents.extra.get("decode_timestep", recipe.decode_timestep)
    if removes:
        level = torch.tensor(latents.extra.get("decode_noise_scale", recipe.decode_noise))
        samples = (1 - level) * samples + level * loop.noise_for(tuple(samples.shape), generator, HOST)
    if latents.extra.get("tone_map"):
        samples = LTXLatentUpsamplePipeline.tone_map_latents(None, samples, latents.extra["tone_map"])

    def prepare(vae: Any, transfer: Transfer) -> tuple[Tensor, Tensor | None]:
        mean, std = transfer.to_host_fp32(vae.latents_mean), transfer.to_host_fp32(vae.latents_std)
        time = transfer.to_device(torch.tensor([timestep])) if removes else None
        return LTXPipeline._denormalize_latents(samples, mean, std, conditions.scaling(pipeline)), time

    with decoding(pipeline, latents.samples.shape, progress, form) as passes:
        noise = state_of(generator) if any(config.get("decoder_inject_noise") or ()) else None
        return unsigned(passes.decode(latents.samples, prepare=prepare, noise=noise))


@dataclass(frozen=True, slots=True)
class LtxGuidance:
    """Guidance by the prompt, and away from a prediction in which some blocks do not attend (STG), by noise ``levels``.

    Source: Lightricks/LTX-Video, ``LTXVideoPipeline.__call__``; Hyung et al., Spatiotemporal Skip Guidance for Enhanced
    Video Diffusion Sampling (2024); Fan et al., CFG-Zero* (2025), for the projection of ``star``."""

    settings: SampleSettings
    levels: Sequence[float]
    star: bool

    def at(self, index: int) -> GuidanceStep:
        """The guidance of step ``index``; without cfg outside of ``cfg_start`` to ``cfg_end``."""
        rows, level, share = self.settings.guidance_steps, self.levels[index], index / (len(self.levels) - 1)
        row = next((row for row in rows if row.level <= level), rows[-1])
        return row if self.settings.cfg_start <= share < self.settings.cfg_end else replace(row, cfg=1.0)

    def guided(self, index: int, forward: Callable[[slice, tuple[int, ...]], Tensor]) -> Tensor:
        """The guided prediction (1, N, 128), fp32. ``forward`` goes from the rows of a batch of two, without the prompt
        and with it, and the blocks that do not attend, to the predictions (1 or 2, N, 128)."""
        from diffusers.guiders.guider_utils import rescale_noise_cfg

        step = self.at(index)
        output = forward(BOTH if step.cfg > 1.0 else PROMPTED, ())
        prompted = guided = output[-1:]
        if step.cfg > 1.0:
            plain = output[:1]
            if self.star:
                plain = plain * ((prompted * plain).sum() / (plain.square().sum() + NOTHING))
            guided = classifier_free_guidance(prompted, plain, step.cfg)
        if step.stg > 0.0:
            guided = guided + step.stg * (prompted - forward(PROMPTED, step.blocks))
        if step.rescale > 0.0 and guided is not prompted:
            guided = rescale_noise_cfg(guided, prompted, step.rescale)
        return guided


def _within(recipe: Recipe, count: int) -> Recipe:
    """``recipe`` for a transformer of ``count`` blocks: without STG where it has none of the blocks of a step."""

    def trimmed(step: GuidanceStep) -> GuidanceStep:
        blocks = tuple(block for block in step.blocks if block < count)
        return replace(step, blocks=blocks) if blocks else replace(step, blocks=(), stg=0.0, rescale=0.0)

    second = None if recipe.second is None else _within(recipe.second, count)
    return replace(recipe, guidance=tuple(map(trimmed, recipe.guidance)), second=second)


@contextmanager
def _without_attention(transformer: nn.Module, blocks: Sequence[int]) -> Iterator[None]:
    """``transformer`` whose ``blocks`` take each video token's own value in place of attention.

    Compiled graphs hold the attention: they run uncompiled meanwhile."""
    if not blocks:
        yield
        return
    layers: Any = transformer.transformer_blocks
    with Undo() as undo, torch.compiler.set_stance("force_eager"):
        for index in blocks:
            undo.patch(layers[index].attn1, _values)
        yield


def _values(attention: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """A forward of ``attention`` as if each token attended to itself alone."""
    values: Tensor = attention.to_v(hidden_states)
    for layer in attention.to_out:
        values = layer(values)
    return values


def _predictor(
    transformer: Any,
    dtype: torch.dtype,
    prompt: Prompt,
    guidance: LtxGuidance,
    stepper: conditions.TokenStepper,
    group: Group | None,
) -> loop.Predict:
    """The guided velocity of each token; text in another dtype is cast to the transformer's."""
    text = placed(batched(prompt, guidance.settings.cfg > 1.0), stepper.start.tokens.device, dtype)

    def predict(tokens: Tensor, time: Tensor, index: int) -> Tensor:
        times = stepper.times(time)

        def forward(rows: slice, blocks: tuple[int, ...]) -> Tensor:
            embeds, mask = text[base.EMBEDS][rows], text[base.MASK][rows]
            copies = len(embeds)
            inputs = torch.cat([tokens] * copies).to(dtype), torch.cat([times] * copies)
            branch = "without_attention" if blocks else "cond_uncond"
            with transformer.cache_context(branch), _without_attention(transformer, blocks):
                return transformer(**_arguments(stepper.start.place, *inputs, embeds, mask))[0].float()

        output = guidance.guided(index, forward if group is None else group.by_halves(forward))
        # Solvers and preview assume one noise level for all tokens: the output is scaled down for those with less.
        return output if times.shape[1] == 1 else output * (times / time).unsqueeze(-1)

    return predict


def _arguments(place: Mapping[str, Any], tokens: Tensor, times: Tensor, embeds: Tensor, mask: Tensor) -> dict[str, Any]:
    """The transformer's arguments for tokens (B, N, 128); the tensors of ``place``, of batch 1, are expanded to B."""
    rows = {name: value for name, value in place.items() if isinstance(value, Tensor)}
    return {
        "hidden_states": tokens,
        "encoder_hidden_states": embeds,
        "timestep": times,
        "encoder_attention_mask": mask,
        "return_dict": False,
        **{**place, **{name: value.expand(len(tokens), *value.shape[1:]) for name, value in rows.items()}},
    }


def _is_condition(pipeline: Pipeline) -> bool:
    """True if the checkpoint is of ``LTXConditionPipeline``; without an index, its schedule decides."""
    name = pipeline.tools["index"].get("_class_name")
    if name in SPEC.files.pipelines:
        return bool(name == CONDITION)
    return not pipeline.tools["scheduler"].get("use_dynamic_shifting", False)


def _schedule(
    config: Mapping[str, Any], settings: SampleSettings, conditioned: bool, recipe: Recipe, device: torch.device
) -> Schedule:
    """``LTXPipeline``'s schedule; if ``conditioned``, or with levels in the recipe, that of :func:`_fixed` levels."""
    if not conditioned and recipe.timesteps is None:
        levels: Callable[[int], Levels] = partial(_shifted, config, math.prod(loop.latent_shape(SPEC, 1, settings)))
    else:
        levels = partial(_fixed, recipe, bool(settings.shift))
        if config.get("use_dynamic_shifting"):
            config = {**config, "use_dynamic_shifting": False, "shift_terminal": None}
    return schedule_for(config, settings, settings.steps, levels, device)


def _shifted(config: Mapping[str, Any], tokens: int, steps: int) -> Levels:
    """Evenly spaced levels, moved by the scheduler's dynamic shift: ``LTXPipeline``'s schedule."""
    import numpy
    from diffusers.pipelines.ltx.pipeline_ltx import calculate_shift

    rows = (("base_image_seq_len", 256), ("max_image_seq_len", 4096), ("base_shift", 0.5), ("max_shift", 1.15))
    mu = calculate_shift(tokens, *(config.get(name, usual) for name, usual in rows))
    return Levels(sigmas=numpy.linspace(1.0, 1 / steps, steps).tolist(), mu=mu)


def _fixed(recipe: Recipe, shifted: bool, steps: int) -> Levels:
    """The recipe's own levels, else ``LTXConditionPipeline``'s; without the share of steps that the recipe skips."""
    from diffusers.pipelines.ltx.pipeline_ltx_condition import linear_quadratic_schedule

    if recipe.timesteps is None:
        times = (linear_quadratic_schedule(steps) * TRAIN_TIMESTEPS).tolist()
    else:
        times = [level * TRAIN_TIMESTEPS for level in read_between(recipe.timesteps, steps)]
    first, last = recipe.skips(steps)
    times = times[first : steps - last]
    # a shift acts on noise levels only: given as timesteps, the transformer would see other ones
    return Levels(sigmas=[time / TRAIN_TIMESTEPS for time in times]) if shifted else Levels(timesteps=times)
