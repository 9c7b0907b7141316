"""Our transformers as core's MODEL: its samplers, schedulers, context windows and guidance nodes drive them.

The shell is a class of ComfyUI's own for the family, without its network: noise schedule, latent format and the reading
of CONDITIONING are core's. In the network's place stands a :class:`Driver` over the diffusers transformer. The MODEL's
patcher is the pipeline's own, so the weights are on the device once whoever samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import comfy.conds
import comfy.ldm.lightricks.symmetric_patchifier
import comfy.model_base
import comfy.supported_models
import comfy.supported_models_base
import comfy.weight_adapter
import torch
from torch import nn

from ..compat.errors import UnsupportedError
from ..pipelines.base import ImageCondition, Pipeline, SampleSettings
from ..pipelines.loading import lora as loras
from ..pipelines.memory.needs import beside_transformer
from ..pipelines.registry import family_named
from ..pipelines.sampling.core_sampler import TIME, BlockPatches, Call, velocity
from .memory_manager import PartPatcher, Shell, comfy_offloader
from .patches import patched

PICTURE = "anygpu_image"  # key of our image condition in a CONDITIONING
TRANSFORMER = "transformer"
WITHOUT_NETWORK = {"disable_unet_model_creation": True}


class Driver(nn.Module):
    """What core takes for the network: calls the transformer of ``pipeline`` as core calls its own."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self.pipeline, self.dtype = pipeline, pipeline.precision.residual
        self.patchifier = comfy.ldm.lightricks.symmetric_patchifier.SymmetricPatchifier(1)

    def forward(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        context: torch.Tensor | None = None,
        transformer_options: dict[str, Any] | None = None,
        **conds: Any,
    ) -> torch.Tensor:
        """The velocity for ``x`` (B, C, T, H, W); ``timestep`` is what core's schedule makes of a level."""
        active_adapters = self.pipeline.parts.active_adapters.get(TRANSFORMER)
        if active_adapters is not None and active_adapters.in_weights:
            raise UnsupportedError(
                "a MODEL whose weights hold the merged LoRA of an AnyGPU pipeline",
                expected="weights without it",
                fix="Use core's LoRA nodes on the MODEL, or keep the LoRA apart instead of merging it.",
            )
        options = transformer_options or {}
        time = timestep * TIME_OF.get(self.pipeline.family, 1.0)
        call = Call(
            x,
            time.squeeze(-1) if time.ndim == 3 else time,
            context,
            conds.get("attention_mask"),
            pooled=conds.get("y"),
            guidance=conds.get("guidance"),
            quotes=conds.get("txt_byt5"),
            vision=conds.get("clip_fea"),
            picture=conds.get(PICTURE),
            later=_later(options, time),
            fps=float(conds.get("frame_rate", 25.0)),
            branch="_".join("uncond" if side else "cond" for side in options.get("cond_or_uncond", [0])),
        )
        return velocity(self.pipeline, self.__dict__["held"], call, _steering(options))


TIME_OF = {"ltx": TIME, "mochi": TIME}  # core's schedules of these two count noise levels from 0 to 1


class CoreShell(Shell):
    """What our shells add to core's classes."""

    pipeline: Pipeline
    diffusion_model: Driver

    def furnish(self, pipeline: Pipeline) -> None:
        """Put the driver in the network's place, and this checkpoint's own numbers into core's tables."""
        pipeline = replace(pipeline, offloader=None)  # which has the patcher that has this
        self.pipeline, self.parts, self.part = pipeline, pipeline.parts, TRANSFORMER
        self.diffusion_model = Driver(pipeline)
        scale = pipeline.configs["vae"].get("scaling_factor")
        if scale is not None and pipeline.family in ("hunyuan_video", "hunyuan_video_15", "framepack"):
            self.latent_format.scale_factor = float(scale)

    def place(self) -> nn.Module:
        """The driver: core names weights by the network's attribute."""
        return self.diffusion_model

    def extra_conds(self, **given: Any) -> dict[str, Any]:
        """Core's own reading of a CONDITIONING, and our pictures in it."""
        given.setdefault("pooled_output", None)
        found: dict[str, Any] = super().extra_conds(**given)  # type: ignore[misc]
        picture = given.get(PICTURE)
        if picture is not None:
            found.update(self._pictured(picture, given["noise"]))
        return {name: cond for name, cond in found.items() if getattr(cond, "cond", cond) is not None}

    def memory_required(self, input_shape: Any, cond_shapes: Any = None) -> float:
        """Bytes that one forward needs beside the weights, for latents (B, C, T, H, W)."""
        spatial, temporal = family_named(self.pipeline.family).ratios(self.pipeline)
        rows, _, frames, height, width = input_shape
        size = SampleSettings(width * spatial, height * spatial, (frames - 1) * temporal + 1)
        return float(rows * beside_transformer(self.pipeline, size, window=frames))

    def _pictured(self, image: ImageCondition, noise: torch.Tensor) -> dict[str, Any]:
        return {}


class HunyuanVideo(CoreShell, comfy.model_base.HunyuanVideo):
    """HunyuanVideo, text to video and both ways of image to video."""

    def furnish(self, pipeline: Pipeline) -> None:
        """As all; the 33-channel checkpoint is given picture and mask beside the noise."""
        super().furnish(pipeline)
        from ..pipelines.families.hunyuan_video.pipeline import LATENT_CONCAT, image_condition

        if image_condition(pipeline.configs[TRANSFORMER]) == LATENT_CONCAT:
            self.concat_keys = ("concat_image", "mask_inverted")

    def _pictured(self, image: ImageCondition, noise: torch.Tensor) -> dict[str, Any]:
        if not self.concat_keys:
            return {}
        return {"c_concat": _beside(self.process_latent_in(image.tensors["image_latents"]), noise)}


class HunyuanVideo15(CoreShell, comfy.model_base.HunyuanVideo15):
    """HunyuanVideo 1.5."""

    def concat_cond(self, **given: Any) -> torch.Tensor:
        """Picture and mask beside the noise (B, 33, T, H, W); zeros without a picture."""
        noise, picture = given["noise"], given.get("concat_latent_image")
        beside = noise.new_zeros(noise.shape[0], noise.shape[1] + 1, *noise.shape[2:])
        if picture is not None:
            count = min(picture.shape[2], noise.shape[2])
            beside[:, :-1, :count] = self.process_latent_in(picture[:, :, :count]).to(noise)
            mask = given.get("concat_mask")
            kept = torch.zeros_like(noise[:, :1]) if mask is None else 1.0 - mask.to(noise)
            beside[:, -1:, : kept.shape[2]] = kept[:, :1]
        return beside

    def _pictured(self, image: ImageCondition, noise: torch.Tensor) -> dict[str, Any]:
        picture = _beside(self.process_latent_in(image.tensors["image_latents"]), noise)
        return {"c_concat": picture, "clip_fea": comfy.conds.CONDRegular(image.tensors["image_embeds"])}


class FramePack(CoreShell, comfy.model_base.HunyuanVideo):
    """FramePack: one section, whose window is as long as the latents."""

    def _pictured(self, image: ImageCondition, noise: torch.Tensor) -> dict[str, Any]:
        moments = image.tensors["start"]
        start = self.process_latent_in(moments[:, : moments.shape[1] // 2])
        return {
            PICTURE: comfy.conds.CONDRegular(start),
            "clip_fea": comfy.conds.CONDRegular(image.tensors["vision"]),
        }


class LTX(CoreShell, comfy.model_base.LTXV):
    """LTX-Video."""


class Mochi(CoreShell, comfy.model_base.GenmoMochi):
    """Mochi 1."""


MODELS: dict[str, tuple[type[Any], type[Any]]] = {  # family -> our shell, core's table of the family
    "hunyuan_video": (HunyuanVideo, comfy.supported_models.HunyuanVideo),
    "hunyuan_video_15": (HunyuanVideo15, comfy.supported_models.HunyuanVideo15),
    "framepack": (FramePack, comfy.supported_models.HunyuanVideo),
    "ltx": (LTX, comfy.supported_models.LTXV),
    "mochi": (Mochi, comfy.supported_models.GenmoMochi),
}


def model_of(pipeline: Pipeline) -> PartPatcher | None:
    """The MODEL of a pipeline, whose weights are read when first needed; None where ComfyUI does not manage them.

    Made before the transformer is first held: the patcher is the one that our own stages use from then on.
    """
    offloader = comfy_offloader(pipeline)
    if offloader is None or pipeline.family not in MODELS:
        return None
    shell, table = MODELS[pipeline.family]
    config: comfy.supported_models_base.BASE = table(dict(WITHOUT_NETWORK))
    shift = float(pipeline.tools["scheduler"].get("shift") or 1.0)
    if shift != 1.0 and not pipeline.tools["scheduler"].get("use_dynamic_shifting"):
        config.sampling_settings["shift"] = shift
    made = shell(config)
    made.furnish(pipeline)
    return offloader.patcher_of(TRANSFORMER, made)


class Factors(comfy.weight_adapter.LoRAAdapter):
    """A layer's share of one of our LoRAs as core's patch; its tensors are read when a weight is first made of them."""

    def __init__(self, read: Callable[[], dict[str, Any]], name: str, scale: float) -> None:
        self.loaded_keys, self.read, self.name_of_layer, self.scale = set(), read, name, scale

    @property
    def weights(self) -> tuple[Any, ...]:
        """Up, down, alpha, and what a plain LoRA has none of: a middle, magnitudes, another shape."""
        down, up = self.read()[self.name_of_layer]
        return up.flatten(1), down.flatten(1), self.scale * down.shape[0], None, None, None


def adapted_model_of(pipeline: Pipeline) -> PartPatcher | None:
    """The MODEL of a pipeline with its LoRAs, as patches that core adds to the weights of the pipeline's own MODEL.

    None where ComfyUI does not manage them. No file is read before the weights are made.
    """
    offloader = comfy_offloader(pipeline)
    if offloader is None:
        return None
    known = offloader.patchers.get(TRANSFORMER)
    model = known if known is not None and isinstance(known.model, CoreShell) else model_of(pipeline)
    for lora in loras.on(pipeline) if model is not None else ():
        read = functools.cache(functools.partial(loras.factors_of, lora))
        patches = {f"diffusion_model.{name}.weight": Factors(read, name, scale) for name, scale in lora.scales.items()}
        model = patched(model, patches, lora.strength)
    return model


def _beside(picture: torch.Tensor, noise: torch.Tensor) -> Any:
    """The picture in the first latent frame and a mask that says so, to stand beside ``noise``."""
    beside = noise.new_zeros(noise.shape[0], picture.shape[1] + 1, *noise.shape[2:])
    beside[:, :-1, :1] = picture.to(noise)
    beside[:, -1:, :1] = 1.0
    return comfy.conds.CONDNoiseShape(beside)


def _later(options: dict[str, Any], time: torch.Tensor) -> torch.Tensor | None:
    """The time of the next step, (B,), where the sampler tells its levels."""
    levels = options.get("sample_sigmas")
    if levels is None or time.ndim != 1:
        return None
    below = levels[levels * TIME < float(time.max()) - 1e-3]
    return torch.full_like(time, float(below.max()) * TIME if len(below) else 0.0)


def _steering(options: dict[str, Any]) -> BlockPatches | None:
    """What nodes such as Skip Layer Guidance put in the place of blocks."""
    patches = options.get("patches_replace", {}).get("dit", {})
    double = {key[1]: patch for key, patch in patches.items() if key[0] == "double_block"}
    single = {key[1]: patch for key, patch in patches.items() if key[0] == "single_block"}
    return BlockPatches(double, single) if double or single else None
