"""Pictures and clips at chosen frames of an LTX video: encoded once, drawn and laid out when the video is sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....compat.errors import InputError
from ....compat.memory.transfer import Transfer
from ...base import ImageCondition, ImageRequest, Progress, ProgressStage, SampleSettings
from ...pictures import signed
from ...pipeline import Pipeline
from ...sampling.loop import NoiseMask, latent_shape, noise_for, noise_mask_for
from ...sampling.schedules import TRAIN_TIMESTEPS, Schedule
from ...text.t5 import bare_pipeline
from ...vae import fallback
from .spec import CHANNELS, SPATIAL_RATIO, SPEC, TEMPORAL_RATIO

MOMENTS, MEAN, STD = "moments", "latents_mean", "latents_std"
CONTROL = "control"  # how the moments of a control clip are named
LAST = -1
LEVEL_TOLERANCE = 1e-6  # upstream's tolerance in asking whether a token is noisier than the picture in it


@dataclass(frozen=True, slots=True)
class Keyframe:
    """One picture or clip at its place."""

    moments: Tensor  # mean and log variance, (1, 256, T, H / 32, W / 32), fp32, on the CPU
    frame: int  # pixel frame at which it starts
    strength: float  # 0..1
    controls: bool  # whether it is a control clip of an IC-LoRA, which stands beside the video instead of in it


@dataclass(frozen=True, slots=True)
class VideoInput:
    """The video that is to be sampled."""

    settings: SampleSettings
    device: torch.device
    clean: Tensor | None  # latents to start from, on the device; None to start from noise
    level: float  # share of noise on ``clean``

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Of the latents: (1, 128, T, H / 32, W / 32)."""
        return latent_shape(SPEC, CHANNELS, self.settings)

    @property
    def size(self) -> dict[str, int]:
        """Size under the names that upstream's ``prepare_latents`` takes."""
        size = {"height": self.settings.height, "width": self.settings.width, "num_frames": self.settings.frames}
        return {"batch_size": 1, "num_channels_latents": CHANNELS, **size}


@dataclass(frozen=True, slots=True)
class InitialTokens:
    """Start of sampling, as tokens: pictures that stand outside the latent grid, the video, control clips."""

    tokens: Tensor  # (1, N, 128), fp32, on the device
    noise: Tensor  # (1, N, 128), all noise that is in the video's own tokens
    place: Mapping[str, Any]  # the transformer's arguments that say where the tokens are in space and time
    held: Tensor | None = None  # (1, N), strength of the picture in each token, 0 for none; None without pictures
    outside: int = 0  # how many tokens come before the video's own
    shares: Tensor | None = None  # (1, N), of a step that each token takes; None without control clips


@dataclass(frozen=True, slots=True)
class TokenStepper:
    """The way from noise to video where pictures hold some of the tokens."""

    schedule: Schedule
    start: InitialTokens
    image_noise: float  # share of noise put on whole pictures before each step; 0 leaves them as they are
    generator: torch.Generator
    renews: bool = False  # whether each step removes all noise and puts new noise on

    def times(self, time: Tensor) -> Tensor:
        """The timestep of all tokens (1, 1), or of each (1, N): a token is never noisier than the picture in it, and
        one of a control clip has its share of the step's noise."""
        column = time.expand(1).unsqueeze(-1).float()
        if self.start.held is not None:
            column = torch.min(column, (1 - self.start.held) * TRAIN_TIMESTEPS)
        return column if self.start.shares is None else column * self.start.shares

    def step(self, output: Tensor, index: int, tokens: Tensor) -> Tensor:
        """The tokens before the next step; those of a less noisy picture, or of share 0, stay as they are."""
        state = self.generator.get_state()
        try:
            stepped = (self._with_new_noise if self.renews else self.schedule.step)(output, index, tokens)
            if self.start.shares is not None:
                stepped = torch.where(self.start.shares.unsqueeze(-1) > 0, stepped, tokens)
            if self.start.held is None:
                return stepped
            moves = self.schedule.timesteps[index] / TRAIN_TIMESTEPS - LEVEL_TOLERANCE < (1.0 - self.start.held)
            return self.with_image_noise(torch.where(moves.unsqueeze(-1), stepped, tokens), index + 1)
        except BaseException:
            self.generator.set_state(state)  # the step may be tried again, and draws the same noise then
            raise

    def _with_new_noise(self, output: Tensor, index: int, tokens: Tensor) -> Tensor:
        """The clean tokens that ``output`` implies, with new noise: each token's share of the next level."""
        share = 1.0 if self.start.shares is None else self.start.shares.unsqueeze(-1)
        level, noise = share * self.schedule.levels[index + 1], noise_for(tokens.shape, self.generator, tokens.device)
        return (1.0 - level) * self.schedule.clean(output, index, tokens) + level * noise

    def with_image_noise(self, tokens: Tensor, index: int) -> Tensor:
        """``tokens`` before step ``index``, with new noise on the pictures in them, if any; not at the end."""
        from diffusers import LTXConditionPipeline

        if not self.image_noise or self.start.held is None or index == len(self.schedule):
            return tokens
        with_noise, start = LTXConditionPipeline.add_noise_to_image_conditioning_latents, self.start
        time = self.schedule.timesteps[index] / TRAIN_TIMESTEPS
        return with_noise(time, start.tokens, tokens, self.image_noise, start.held, self.generator)


def encode_image(pipeline: Pipeline, request: ImageRequest, progress: Progress) -> ImageCondition:
    """A picture (one frame) or a clip (8n + 1 frames) at frame ``frame``, beside those of ``previous``.

    Kept are mean and log variance: the draw is made when the video is sampled, by its seed and in upstream's order, so
    another seed encodes nothing again. InputError: a place off the grid, or a ``previous`` of another VAE."""
    frames = _on_grid(request, progress)
    known, anchors = ({}, ()) if request.previous is None else (request.previous.tensors, request.previous.anchors)
    encoded = encoded_moments(pipeline, frames, progress, ProgressStage("encoding", "image"))
    if MEAN in known and not torch.equal(known[MEAN], encoded[MEAN]):
        found, expected = "a previous image condition made by another LTX-Video VAE", "one model for all pictures"
        raise InputError(found, expected=expected, fix="Connect all Encode Image nodes to the same pipeline.")
    name = f"{CONTROL if request.control else MOMENTS}_{len(anchors)}"
    tensors = {**known, name: encoded[MOMENTS], MEAN: encoded[MEAN], STD: encoded[STD]}
    anchors = (*anchors, (name, request.frame, request.strength))
    beside = 0 if request.previous is None else request.previous.beside
    if request.control:
        beside += math.ceil(len(frames) / pipeline.model.control_factor**2)
    return ImageCondition(pipeline.family, tensors, request.width, request.height, anchors=anchors, beside=beside)


def scaling(pipeline: Pipeline) -> float:
    """The factor of the VAE's latents."""
    return float(pipeline.configs["vae"].get("scaling_factor", 1.0))


def encoded_moments(pipeline: Pipeline, frames: Tensor, progress: Progress, stage: ProgressStage) -> dict[str, Tensor]:
    """``moments`` (1, 256, T, H / 32, W / 32) and the VAE's ``latents_mean`` and ``latents_std`` (128,); fp32, CPU."""
    statistics: dict[str, Tensor] = {}

    def run(vae: Any, transfer: Transfer) -> Tensor:
        moments: Tensor = vae.encode(transfer.to_device(signed(frames))).latent_dist.parameters
        statistics[MEAN] = transfer.to_host_fp32(vae.latents_mean)
        statistics[STD] = transfer.to_host_fp32(vae.latents_std)
        return moments

    return {MOMENTS: fallback.encoded_moments(pipeline, frames, progress, stage, run=run), **statistics}


def anchors_of(image: ImageCondition | None, frames: int, progress: Progress) -> tuple[Keyframe, ...]:
    """The pictures of ``image`` at their places among ``frames`` pixel frames; the user is told where a clip is cut.

    Raises InputError for a place behind the last frame."""
    if image is None:
        return ()
    anchors = []
    for name, frame, strength in image.anchors:
        moments = image.tensors[name]
        length = (moments.shape[2] - 1) * TEMPORAL_RATIO + 1
        start = max(frames - length, 0) if frame == LAST else frame
        if start >= frames:
            found = f"an image at frame {frame} of a video of {frames} frames"
            fix = f"The nearest valid value is {frames - 1}."
            raise InputError(found, expected=f"frame 0 to {frames - 1}, or -1", fix=fix)
        fits = (min(length, frames - start) - 1) // TEMPORAL_RATIO + 1
        if fits < moments.shape[2]:
            fitting = (fits - 1) * TEMPORAL_RATIO + 1
            progress.notify(f"clip at frame {start}: {length} -> {fitting} frames (the video has {frames})")
        # The encoder is causal: the first latents of a clip are those of its beginning alone.
        anchors.append(Keyframe(moments[:, :, :fits], start, strength, name.startswith(CONTROL)))
    return tuple(anchors)


def plain_start(
    video: VideoInput, image: ImageCondition | None, anchors: tuple[Keyframe, ...], generator: torch.Generator
) -> InitialTokens:
    """The initial tokens as ``LTXPipeline`` makes them, or with one anchor ``LTXImageToVideoPipeline``.

    ``video.clean`` is mixed in at its level, but not into the picture's tokens."""
    from diffusers import LTXImageToVideoPipeline, LTXPipeline

    held = None
    if image is None or not anchors:
        noise = LTXPipeline._pack_latents(noise_for(video.shape, generator, video.device))
    else:
        noise, held = bare_pipeline(LTXImageToVideoPipeline, vae=_Encoded(image, video.device)).prepare_latents(
            anchors[0].moments[:, :, 0], **video.size, dtype=torch.float32, device=video.device, generator=generator
        )
    tokens = noise
    if video.clean is not None:
        mixed = video.level * noise + (1.0 - video.level) * LTXPipeline._pack_latents(video.clean)
        tokens = mixed if held is None else torch.where(held.unsqueeze(-1) > 0, noise, mixed)
    frames, rows, columns = video.shape[2:]
    scale = (TEMPORAL_RATIO / video.settings.fps, SPATIAL_RATIO, SPATIAL_RATIO)
    place = {"num_frames": frames, "height": rows, "width": columns, "rope_interpolation_scale": scale}
    return InitialTokens(tokens, noise, place, held)


def conditioned_start(
    video: VideoInput, image: ImageCondition | None, anchors: tuple[Keyframe, ...], generator: torch.Generator
) -> InitialTokens:
    """The initial tokens as ``LTXConditionPipeline`` makes them; pictures outside the latent grid come first."""
    from diffusers import LTXConditionPipeline

    pipeline = bare_pipeline(LTXConditionPipeline, vae=_Encoded(image, video.device))
    twin = torch.Generator().set_state(generator.get_state())  # draws the noise that upstream mixes into ``clean``
    tokens, held, coordinates, outside = pipeline.prepare_latents(
        [anchor.moments for anchor in anchors],
        [anchor.strength for anchor in anchors],
        [anchor.frame for anchor in anchors],
        **video.size,
        sigma=torch.tensor([video.level]),
        latents=video.clean,
        generator=generator,
        device=video.device,
        dtype=torch.float32,
    )
    noise = tokens
    if video.clean is not None:
        noise = pipeline._pack_latents(noise_for(video.shape, twin, video.device))
        noise = torch.cat([tokens[:, :outside], noise], dim=1)
    coordinates = coordinates.float()
    coordinates[:, 0] = coordinates[:, 0] * (1.0 / video.settings.fps)
    return InitialTokens(tokens=tokens, noise=noise, place={"video_coords": coordinates}, held=held, outside=outside)


def with_controls(
    video: VideoInput,
    image: ImageCondition,
    start: InitialTokens,
    controls: Sequence[Keyframe],
    *,
    pictured: bool,
    generator: torch.Generator,
) -> InitialTokens:
    """``start`` of ``LTXConditionPipeline`` with the tokens of control clips after the video's own, for an IC-LoRA.

    Each has the place of the frames that it controls, whatever its size, the share 1 - strength of noise, and of each
    step. Where a picture stands at the video's start (``pictured``), the first latent of a control there is left out.
    Source: Lightricks/ComfyUI-LTXVideo ``iclora.py``; ComfyUI 0.33 ``comfy_extras/nodes_lt.py`` ``LTXVAddGuide``."""
    from diffusers import LTXConditionPipeline as Upstream

    mean, std = image.tensors[MEAN], image.tensors[STD]
    tokens, places, shares = [start.tokens], [start.place["video_coords"]], [torch.ones(1, start.tokens.shape[1])]
    for control in controls:
        latents = Upstream._normalize_latents(control.moments[:, :CHANNELS], mean, std).to(video.device)
        ids = Upstream._prepare_video_ids(1, *latents.shape[2:], device=video.device)
        place = Upstream._scale_video_ids(ids, SPATIAL_RATIO, TEMPORAL_RATIO, control.frame, video.device).float()
        place[:, 0] *= 1.0 / video.settings.fps
        place[:, 1:] *= video.shape[-1] // latents.shape[-1]  # of one that was encoded smaller
        own, share = Upstream._pack_latents(latents), 1.0 - control.strength
        if level := share * video.level:
            own = (1.0 - level) * own + level * noise_for(tuple(own.shape), generator, video.device)
        first = math.prod(latents.shape[3:]) if pictured and control.frame == 0 else 0
        tokens.append(own[:, first:])
        places.append(place[:, :, first:])
        shares.append(torch.full((1, own.shape[1] - first), share))
    added = torch.cat(tokens[1:], dim=1)
    held = start.held
    if held is not None:
        held = torch.cat([held, torch.zeros_like(added[..., 0])], dim=1)
    return replace(
        start,
        tokens=torch.cat(tokens, dim=1),
        noise=torch.cat([start.noise, added], dim=1),
        place={"video_coords": torch.cat(places, dim=2)},
        held=held,
        shares=torch.cat(shares, dim=1).to(video.device),
    )


def noise_mask(video: VideoInput, start: InitialTokens) -> NoiseMask | None:
    """The noise mask of all tokens, None without one; it preserves none of a picture or a control clip."""
    from diffusers import LTXPipeline

    if video.clean is None:
        return None
    given = noise_mask_for(video.settings, video.clean, start.noise)
    if given is None:
        return None
    sides = start.noise[:, : start.outside], start.noise[:, start.outside + math.prod(video.shape[2:]) :]
    free = [torch.ones_like(side[..., :1]) for side in sides]
    clean = torch.cat([sides[0], LTXPipeline._pack_latents(given.clean), sides[1]], dim=1)
    mask = torch.cat([free[0], LTXPipeline._pack_latents(given.mask), free[1]], dim=1)
    if start.held is not None:
        mask = torch.where(start.held.unsqueeze(-1) > 0, 1.0, mask)
    return NoiseMask(clean, start.noise, mask)


class _Encoded:
    """Stands in for the VAE while upstream lays out its latents: the pictures come as moments."""

    spatial_compression_ratio, temporal_compression_ratio = SPATIAL_RATIO, TEMPORAL_RATIO

    def __init__(self, image: ImageCondition | None, device: torch.device) -> None:
        tensors: Mapping[str, Tensor] = {} if image is None else image.tensors
        self.latents_mean, self.latents_std, self.device = tensors.get(MEAN), tensors.get(STD), device

    def encode(self, moments: Tensor) -> Any:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
        from diffusers.models.modeling_outputs import AutoencoderKLOutput

        return AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(moments.to(self.device)))


def _on_grid(request: ImageRequest, progress: Progress) -> Tensor:
    """The request's frames, cut to 8n + 1, which the user is told; raises InputError where a clip cannot start."""
    given, frame = request.frames.shape[0], request.frame
    if frame < LAST:
        raise InputError(f"frame {frame}", expected="0 or more, or -1: the end", fix="The nearest valid value is -1.")
    count = (given - 1) // TEMPORAL_RATIO * TEMPORAL_RATIO + 1
    if count != given:
        progress.notify(f"clip {given} -> {count} frames (LTX-Video needs {TEMPORAL_RATIO}n+1 frames)")
    if count > 1 and frame > 0 and frame % TEMPORAL_RATIO:
        nearest = round(frame / TEMPORAL_RATIO) * TEMPORAL_RATIO
        found = f"a clip at frame {frame}"
        fix = f"The nearest valid value is {nearest}. A single image may go at any frame."
        raise InputError(found, expected=f"a multiple of {TEMPORAL_RATIO}, where a clip can start", fix=fix)
    return request.frames[:count]
