"""ComfyUI core's view of each family, a row each; one without a row samples and decodes without preview and MODEL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import comfy.conds
import comfy.latent_formats
import comfy.model_base
import comfy.supported_models
import comfy.utils
import torch

from ..compat.device.execution import placed
from ..compat.errors import UnsupportedError
from ..pipelines.base import ImageCondition
from ..pipelines.pipeline import Pipeline
from ..pipelines.sampling.core_sampler import TIME
from .diffusion_model import PICTURE, TRANSFORMER, CoreModel


@dataclass(frozen=True, slots=True)
class CoreFamily:
    latent_format: type[Any]  # core's, for previews
    model: type[Any] | None = None  # our subclass of core's model class; None has no MODEL
    table: type[Any] | None = None  # core's ``supported_models`` class


class HunyuanVideo(CoreModel, comfy.model_base.HunyuanVideo):
    scaled = True

    def set_pipeline(self, pipeline: Pipeline) -> None:
        """Set the pipeline, and have core concatenate picture and mask to the noise as the transformer expects them."""
        super().set_pipeline(pipeline)
        code, picture = pipeline.spec.code, ("concat_image",)
        keys = {code.LATENT_CONCAT: (*picture, "mask_inverted"), code.PICTURE_CONCAT: picture}
        self.concat_keys = keys.get(code.image_condition(pipeline.configs[TRANSFORMER]), ())

    def _picture_conds(self, image: ImageCondition, noise: torch.Tensor) -> dict[str, Any]:
        if not self.concat_keys:
            return super()._picture_conds(image, noise)
        picture = self.process_latent_in(image.tensors["image_latents"])
        return {"c_concat": _first_frame(picture, noise, masked="mask_inverted" in self.concat_keys)}


class HunyuanVideo15(CoreModel, comfy.model_base.HunyuanVideo15):
    scaled = True

    def concat_cond(self, **given: Any) -> torch.Tensor:
        """Channels beside the noise: core's picture in its first frames, and a mask; an error for super-resolution."""
        if self.pipeline.configs[TRANSFORMER].get("in_channels") == self.pipeline.spec.code.SUPER_CHANNELS:
            found = "the MODEL of HunyuanVideo 1.5's super-resolution in one of core's samplers"
            expected = "its pipeline in AnyGPU Sample, behind AnyGPU Upscale Latents"
            fix = "Connect them, or load the file with core's Load Diffusion Model and AnyGPU Fit."
            raise UnsupportedError(found, expected=expected, fix=fix)
        noise, picture, mask = given["noise"], given.get("concat_latent_image"), given.get("concat_mask")
        channels = noise.new_zeros(noise.shape[0], noise.shape[1] + 1, *noise.shape[2:])
        if picture is not None:
            channels[:, :-1, : picture.shape[2]] = self.process_latent_in(_fitted(picture, noise))
            if mask is not None:
                channels[:, -1:, : mask.shape[2]] = 1.0 - _fitted(mask, noise)[:, :1]
        return channels

    def _picture_conds(self, image: ImageCondition, noise: torch.Tensor) -> dict[str, Any]:
        picture = _first_frame(self.process_latent_in(image.tensors["image_latents"]), noise)
        return {"c_concat": picture, "clip_fea": comfy.conds.CONDRegular(image.tensors["image_embeds"])}


class FramePack(CoreModel, comfy.model_base.HunyuanVideo):
    scaled = True

    def _picture_conds(self, image: ImageCondition, noise: torch.Tensor) -> dict[str, Any]:
        moments = image.tensors["start"]
        start = self.process_latent_in(_fitted(moments[:, : moments.shape[1] // 2], noise))  # the mean
        if "end" in image.tensors:
            self.diffusion_model.notify("no effect of the end image in one section: use AnyGPU Sample FramePack")
        return {PICTURE: comfy.conds.CONDRegular(start), "clip_fea": comfy.conds.CONDRegular(image.tensors["vision"])}


class LTX(CoreModel, comfy.model_base.LTXV):
    time_scale = TIME

    def extra_conds(self, **given: Any) -> dict[str, Any]:
        if given.get("keyframe_idxs") is not None:
            found, fix = "guides of LTXVAddGuide on AnyGPU's MODEL", "For a start picture use LTXVImgToVideo."
            raise UnsupportedError(found, expected="AnyGPU Encode Image and AnyGPU Sample", fix=fix)
        return super().extra_conds(**given)


class Mochi(CoreModel, comfy.model_base.GenmoMochi):
    time_scale = TIME


def _first_frame(picture: torch.Tensor, noise: torch.Tensor, masked: bool = True) -> Any:
    """A cond of the size of ``noise`` with ``picture`` in its first latent frame, ``masked`` by one more channel."""
    channels = picture.shape[1]
    cond = noise.new_zeros(noise.shape[0], channels + masked, *noise.shape[2:])
    cond[:, :channels, :1] = _fitted(picture, noise)
    cond[:, channels:, :1] = 1.0
    return comfy.conds.CONDNoiseShape(cond)


def _fitted(latents: torch.Tensor, noise: torch.Tensor) -> Any:
    """Latents (B, C, T, H, W), or a mask of them, resized as core does to the noise's H and W, and cut to its T."""
    near = placed(latents[:, :, : noise.shape[2]], noise.device, noise.dtype)
    return comfy.utils.common_upscale(near, noise.shape[-1], noise.shape[-2], "bilinear", "center")


FAMILIES: dict[str, CoreFamily] = {
    "ltx": CoreFamily(comfy.latent_formats.LTXV, LTX, comfy.supported_models.LTXV),
    "hunyuan_video": CoreFamily(comfy.latent_formats.HunyuanVideo, HunyuanVideo, comfy.supported_models.HunyuanVideo),
    "hunyuan_video_15": CoreFamily(
        comfy.latent_formats.HunyuanVideo15, HunyuanVideo15, comfy.supported_models.HunyuanVideo15
    ),
    "framepack": CoreFamily(comfy.latent_formats.HunyuanVideo, FramePack, comfy.supported_models.HunyuanVideo),
    "mochi": CoreFamily(comfy.latent_formats.Mochi, Mochi, comfy.supported_models.GenmoMochi),
}


def latent_format_of(family: str | None) -> Any:
    row = FAMILIES.get(family or "")
    return None if row is None else row.latent_format()
