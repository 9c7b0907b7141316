"""A pipeline's transformer in the place of core's own network, and core's model class around it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import comfy.ldm.lightricks.symmetric_patchifier
import torch
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers
from torch import nn

from ..compat.errors import UnsupportedError
from ..pipelines.base import Call, ImageCondition, SampleSettings
from ..pipelines.pipeline import Pipeline
from ..pipelines.sampling.core_sampler import TIME, velocity
from ..pipelines.sizes import beside_transformer
from .core_patches import block_patches, unread
from .memory_manager import PartHolder

log = logging.getLogger(__name__)

PICTURE = "anygpu_image"  # key of our image condition in a CONDITIONING
TRANSFORMER = "transformer"


class DiffusionModel(nn.Module):
    """Network as core sees it; ``time_scale`` makes core's timestep a noise level times 1000."""

    def __init__(self, pipeline: Pipeline, time_scale: float) -> None:
        super().__init__()
        self.pipeline, self.dtype, self.time_scale = pipeline, pipeline.precision.residual, time_scale
        config = pipeline.configs[TRANSFORMER]
        self.in_channels, self.out_channels = config.get("in_channels"), config.get("out_channels")
        self.notify: Callable[[str], None] = log.info  # what the sampling under way has to say
        self.patchifier = comfy.ldm.lightricks.symmetric_patchifier.SymmetricPatchifier(1)

    def forward(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        context: torch.Tensor | None = None,
        transformer_options: dict[str, Any] | None = None,
        **conds: Any,
    ) -> torch.Tensor:
        """The velocity for ``x`` (B, C, T, H, W) at core's ``timestep``, inside the network's wrappers."""
        options = transformer_options or {}
        for text in unread(options, conds, self.pipeline.spec.title, self.__dict__["held"]):
            self.notify(text)
        wrappers = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, options)
        executor = WrapperExecutor.new_class_executor(self._velocity, self, wrappers)
        out: torch.Tensor = executor.execute(x, timestep, context, options, **conds)
        return out

    def _velocity(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        context: torch.Tensor | None,
        transformer_options: dict[str, Any],
        **conds: Any,
    ) -> torch.Tensor:
        active_adapters = self.pipeline.parts.active_adapters.get(TRANSFORMER)
        if active_adapters is not None and active_adapters.in_weights:
            raise UnsupportedError(
                "a MODEL whose weights hold the merged LoRA of an AnyGPU pipeline",
                expected="weights without it",
                fix="Use core's LoRA nodes on the MODEL, or set mode of AnyGPU LoRA to separate.",
            )
        options = transformer_options
        time = timestep * self.time_scale
        call = Call(
            x,
            time.squeeze(-1) if time.ndim == 3 else time,
            context,
            conds.get("attention_mask"),
            pooled=conds.get("y"),
            guidance=conds.get("guidance"),
            glyph_embeds=conds.get("txt_byt5"),
            vision=conds.get("clip_fea"),
            picture=conds.get(PICTURE),
            next_time=_next_time(options, time),
            fps=float(conds.get("frame_rate", 25.0)),
            branch="_".join("uncond" if side else "cond" for side in options.get("cond_or_uncond", [0])),
        )
        return velocity(self.pipeline, self.__dict__["held"], call, block_patches(options))


class CoreModel(PartHolder):
    """Additions to core's model classes."""

    pipeline: Pipeline
    diffusion_model: DiffusionModel
    time_scale = 1.0  # core's schedules of some families count noise levels from 0 to 1
    scaled = False  # whether the VAE's configuration has core's scale of the latents

    def set_pipeline(self, pipeline: Pipeline) -> None:
        """Put the transformer in the network's place, and this checkpoint's own numbers into core's tables."""
        pipeline = replace(pipeline, plan=replace(pipeline.plan, offloader=None))  # which has the patcher that has this
        self.pipeline, self.parts, self.part = pipeline, pipeline.parts, TRANSFORMER
        self.diffusion_model = DiffusionModel(pipeline, self.time_scale)
        if self.scaled and pipeline.configs["vae"].get("scaling_factor") is not None:
            self.latent_format.scale_factor = float(pipeline.configs["vae"]["scaling_factor"])

    def place(self) -> nn.Module:
        """The network: core names weights by the network's attribute."""
        return self.diffusion_model

    def extra_conds(self, **given: Any) -> dict[str, Any]:
        """Core's own reading of a CONDITIONING, and our pictures in it."""
        given.setdefault("pooled_output", None)
        conds: dict[str, Any] = super().extra_conds(**given)  # type: ignore[misc]
        picture = given.get(PICTURE)
        if picture is not None:
            conds.update(self._pictured(picture, given["noise"]))
        return {name: cond for name, cond in conds.items() if getattr(cond, "cond", cond) is not None}

    def memory_required(self, input_shape: Any, cond_shapes: Any = None) -> float:
        """Bytes that one forward needs beside the weights, for latents (B, C, T, H, W)."""
        spatial, temporal = self.pipeline.spec.sizes.ratios
        rows, _, frames, height, width = input_shape
        size = SampleSettings(width * spatial, height * spatial, (frames - 1) * temporal + 1)
        return float(rows * beside_transformer(self.pipeline, size, window=frames))

    def _pictured(self, image: ImageCondition, noise: torch.Tensor) -> dict[str, Any]:
        return {}


def _next_time(options: dict[str, Any], time: torch.Tensor) -> torch.Tensor | None:
    """The time of the next step, (B,), where the sampler tells its levels."""
    levels = options.get("sample_sigmas")
    if levels is None or time.ndim != 1:
        return None
    below = levels[levels * TIME < float(time.max()) - 1e-3]
    return torch.full_like(time, float(below.max()) * TIME if len(below) else 0.0)
