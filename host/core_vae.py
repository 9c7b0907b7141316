"""Our VAEs as core's VAE: its decode, encode and tiled nodes run the same checked passes as ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import comfy.model_management
import comfy.sd
import torch
from torch import nn

from ..compat.device.execution import placed, to_host
from ..pipelines import stages
from ..pipelines.latents import convert as latent_format
from ..pipelines.pipeline import Pipeline
from ..pipelines.vae.fallback import encoded
from .memory_manager import PartPatcher
from .progress import NodeProgress

LOADED_ON = ("_select_base_load_device", "_select_base_offload_device")  # by which core finds the way back


class ChannelStatistics:
    """Between latents as the VAE has them and normalised ones, as core's LTX-Video VAE names it."""

    def __init__(self, vae: Any) -> None:
        pair = (vae.latents_mean, vae.latents_std)
        self.mean, self.std = (to_host(t).float().view(1, -1, 1, 1, 1) for t in pair)

    def normalize(self, latents: torch.Tensor) -> torch.Tensor:
        return (latents - self.mean.to(latents)) / self.std.to(latents)

    def un_normalize(self, latents: torch.Tensor) -> torch.Tensor:
        return latents * self.std.to(latents) + self.mean.to(latents)


def _patcher_again(reload: Callable[[Mapping[str, Any]], Pipeline], **_dynamic: Any) -> PartPatcher:
    pipeline = reload({})
    return pipeline.offloader.patcher_of("vae")


class CoreVAE(comfy.sd.VAE):
    """A pipeline's VAE in core's own type; what core's class would read from a checkpoint is filled in."""

    def __init__(self, pipeline: Pipeline, reload: Callable[[Mapping[str, Any]], Pipeline] | None = None) -> None:
        self.pipeline, self.reload = pipeline, reload
        self.spatial, self.temporal = pipeline.spec.sizes.ratios
        self.latent_channels = int(pipeline.configs["vae"].get("latent_channels", 16))
        self.latent_dim, self.output_channels, self.pad_channel_value = 3, 3, None
        self.downscale_ratio = (lambda frames: math.ceil(frames / self.temporal), self.spatial, self.spatial)
        self.upscale_ratio = (lambda frames: (frames - 1) * self.temporal + 1, self.spatial, self.spatial)
        self.downscale_index_formula = self.upscale_index_formula = (self.temporal, self.spatial, self.spatial)
        self.process_input = lambda image: image * 2.0 - 1.0
        self.process_output = lambda image: ((image + 1.0) / 2.0).clamp(0.0, 1.0)
        self.vae_dtype, self.working_dtypes = pipeline.precision.vae, [pipeline.precision.vae]
        self.output_device = comfy.model_management.intermediate_device()
        self.disable_offload = self.not_video = self.handles_tiling = False
        self.crop_input, self.format_encoded, self.extra_1d_channel = True, None, None
        self.size = None

    @property
    def patcher(self) -> PartPatcher:
        """The pipeline's own patcher of the VAE; one of another device makes this the VAE of a pipeline there."""
        patcher = self.pipeline.offloader.patcher_of("vae")
        if self.reload is not None:
            patcher.cached_patcher_init = (_patcher_again, (self.reload,))
        return patcher

    @patcher.setter
    def patcher(self, value: PartPatcher) -> None:
        if self.reload is not None and value.load_device != self.pipeline.offloader.device_of("vae"):
            self.pipeline = self.reload({"vae": value.load_device})
            loaded_on = {name: device for name, device in vars(value.model).items() if name in LOADED_ON}
            vars(self.patcher.model).update(loaded_on)

    @property
    def device(self) -> torch.device:
        """Device of the VAE: the patcher's."""
        return self.pipeline.offloader.device_of("vae")

    @device.setter
    def device(self, value: torch.device) -> None:
        """Nothing: core sets the patcher first."""

    @property
    def first_stage_model(self) -> nn.Module:
        """The diffusers VAE, with the statistics of its latents where a latent upscaler of core's asks for them."""
        module = self.pipeline.parts.read("vae")
        if isinstance(getattr(module, "latents_mean", None), torch.Tensor):
            module.__dict__.setdefault("per_channel_statistics", ChannelStatistics(module))
        return module

    @first_stage_model.setter
    def first_stage_model(self, value: nn.Module) -> None:
        """Nothing: core sets the patcher first."""

    def memory_used_decode(self, shape: Any, dtype: torch.dtype) -> int:
        """Bytes of the frames in the dtype, a few dozen channels deep: the widest layer of these decoders."""
        return math.prod(shape[2:]) * self.temporal * self.spatial**2 * 64 * dtype.itemsize

    def memory_used_encode(self, shape: Any, dtype: torch.dtype) -> int:
        """Estimate the memory of an encode like that of a decode, from pixels."""
        return math.prod(shape[2:]) * 64 * dtype.itemsize

    def model_size(self) -> int:
        return self.patcher.model_size()

    def decode(self, samples_in: torch.Tensor, vae_options: Any = None) -> torch.Tensor:
        """Frames (B, F, H, W, 3) in 0..1."""
        return self._decoded(samples_in, "auto")

    def decode_tiled(self, samples: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Frames (B, F, H, W, 3), in tiles; their size is ours, since it decides how the seams look."""
        return self._decoded(samples, "tiled")

    def encode(self, pixel_samples: torch.Tensor) -> torch.Tensor:
        """Latents (1, C, T, H, W) of frames (F, H, W, 3) in 0..1, as AnyGPU Encode Video makes them with seed 0."""
        frames = self.vae_encode_crop_pixels(pixel_samples).reshape(-1, *pixel_samples.shape[-3:])
        progress = NodeProgress(None, self.pipeline.family)
        if self.pipeline.spec.code.encode_video is not None:
            latents = stages.encode_video(self.pipeline, frames, 0, 0, "crop", 0, progress).samples
        else:  # a family that starts from pictures alone
            frames = frames[: (frames.shape[0] - 1) // self.temporal * self.temporal + 1]
            latents = encoded(self.pipeline, frames, 0, progress)
        return self._returned(latents)

    def encode_tiled(self, pixel_samples: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.encode(pixel_samples)

    def _decoded(self, samples: torch.Tensor, method: str) -> torch.Tensor:
        progress = NodeProgress(None, self.pipeline.family)
        videos = []
        for one in samples.split(1):
            latents = latent_format.from_core(self.pipeline, {"samples": one}, lambda text: None)
            videos.append(stages.decode(self.pipeline, latents, progress, method))
        return self._returned(torch.stack(videos))

    def _returned(self, tensor: torch.Tensor) -> torch.Tensor:
        return placed(tensor, self.output_device, comfy.model_management.intermediate_dtype())
