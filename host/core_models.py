"""Parts of a pipeline for core's nodes: its transformer as MODEL, its VAE, and pictures in CONDITIONING. Their patchers
are the pipeline's own, so the weights are on the device once, whichever sampler runs."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.weight_adapter
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy.samplers import CFGGuider
from comfy_execution.graph_utils import ExecutionBlocker
from comfy_execution.utils import get_executing_context
from torch import nn

from ..compat.device.execution import placed, to_host
from ..compat.errors import InputError
from ..compat.memory.parts import Undo
from ..pipelines import stages
from ..pipelines.base import ImageCondition
from ..pipelines.demo.stand_in import corner
from ..pipelines.latents import convert as latent_format
from ..pipelines.load import lora as loras
from ..pipelines.pipeline import Pipeline
from ..pipelines.settings import of_checkpoint
from ..pipelines.vae.fallback import encoded
from .casting import patched
from .diffusion_model import PICTURE, TRANSFORMER, CoreModel, unread_patches
from .families import FAMILIES
from .memory_manager import PartPatcher, comfy_offloader
from .progress import NodeProgress
from .recovery import save_core_samples

LOADED_ON = ("_select_base_load_device", "_select_base_offload_device")  # by core's device nodes
WITHOUT_NETWORK = {"disable_unet_model_creation": True}
Reload = Callable[[Mapping[str, Any]], Pipeline]  # the same pipeline once more, with devices for some of its parts


class ChannelStatistics:
    """Normalises latents and back, under the names of core's LTX-Video VAE."""

    def __init__(self, vae: Any) -> None:
        self.mean, self.std = (to_host(t).float().view(1, -1, 1, 1, 1) for t in (vae.latents_mean, vae.latents_std))

    def normalize(self, latents: torch.Tensor) -> torch.Tensor:
        return (latents - self.mean.to(latents)) / self.std.to(latents)

    def un_normalize(self, latents: torch.Tensor) -> torch.Tensor:
        return latents * self.std.to(latents) + self.mean.to(latents)


class CoreVAE(comfy.sd.VAE):
    """A pipeline's VAE as core's VAE; sets the attributes that core's __init__ would read from a checkpoint."""

    def __init__(self, pipeline: Pipeline, reload: Reload | None = None) -> None:
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
        """The pipeline's own patcher of the VAE; setting one of another device reloads the pipeline's VAE there."""
        patcher = self.pipeline.offloader.patcher_of("vae")
        if self.reload is not None:
            patcher.cached_patcher_init = (lambda again, **_: again({}).offloader.patcher_of("vae"), (self.reload,))
        return patcher

    @patcher.setter
    def patcher(self, value: PartPatcher) -> None:
        if self.reload is not None and value.load_device != self.pipeline.offloader.device_of("vae"):
            self.pipeline = self.reload({"vae": value.load_device})
            loaded_on = {name: device for name, device in vars(value.model).items() if name in LOADED_ON}
            vars(self.patcher.model).update(loaded_on)

    @property
    def device(self) -> torch.device:
        """The device that computes the VAE, as the patcher says."""
        return self.pipeline.offloader.device_of("vae")

    @device.setter
    def device(self, value: torch.device) -> None:
        """Do nothing: core sets the patcher first."""

    @property
    def first_stage_model(self) -> nn.Module:
        """The diffusers VAE; with channel means, it also has the statistics that core's latent upscaler reads."""
        module = self.pipeline.parts.read("vae")
        if isinstance(getattr(module, "latents_mean", None), torch.Tensor):
            module.__dict__.setdefault("per_channel_statistics", ChannelStatistics(module))
        return module

    @first_stage_model.setter
    def first_stage_model(self, value: nn.Module) -> None:
        """Do nothing: core sets the patcher first."""

    def memory_used_decode(self, shape: Any, dtype: torch.dtype) -> int:
        """Bytes of the decoders' widest layer, some 64 channels at full size, for latents of ``shape``."""
        return math.prod(shape[2:]) * self.temporal * self.spatial**2 * 64 * dtype.itemsize

    def memory_used_encode(self, shape: Any, dtype: torch.dtype) -> int:
        return math.prod(shape[2:]) * 64 * dtype.itemsize

    def model_size(self) -> int:
        return self.patcher.model_size()

    def decode(self, samples_in: torch.Tensor, vae_options: Any = None) -> torch.Tensor:
        return self._decoded(samples_in, "auto")

    def decode_tiled(self, samples: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Frames (B, F, H, W, 3), in tiles; their size is ours, since it decides how the seams look."""
        return self._decoded(samples, "tiled")

    def encode(self, pixel_samples: torch.Tensor) -> torch.Tensor:
        """Latents (B, C, T, H, W) of frames (F, H, W, 3 or more) in 0..1, or of B videos, cut as by Encode Video."""
        if pixel_samples.ndim > 4:
            return torch.cat([self.encode(video) for video in pixel_samples])
        frames = self.vae_encode_crop_pixels(pixel_samples.reshape(-1, *pixel_samples.shape[-3:]))
        progress = NodeProgress(None, self.pipeline.family)
        if self.pipeline.spec.code.encode_video is not None:
            latents = stages.encode_video(self.pipeline, frames, 0, 0, fit="crop", seed=0, progress=progress).samples
        else:  # a family that starts from pictures alone
            frames = frames[: (frames.shape[0] - 1) // self.temporal * self.temporal + 1]
            latents = encoded(self.pipeline, frames, seed=0, progress=progress)
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


def model_of(pipeline: Pipeline, reload: Reload | None = None) -> PartPatcher | None:
    """The MODEL of a pipeline, whose weights are read when first needed; ``reload`` is for copies on another device.
    None where ComfyUI does not manage the parts, or core knows no such model or it has several transformers. From then
    on our own stages use its patcher too, so it must be made before the transformer is first held."""
    offloader = comfy_offloader(pipeline)
    row = FAMILIES.get(pipeline.family)
    several = len(pipeline.spec.transformers) > 1
    if offloader is None or several or row is None or row.model is None or row.table is None:
        return None
    config = row.table(dict(WITHOUT_NETWORK))
    shift = float(pipeline.tools["scheduler"].get("shift") or 1.0)
    if shift != 1.0 and not pipeline.tools["scheduler"].get("use_dynamic_shifting"):
        config.sampling_settings["shift"] = shift
    core_model = row.model(config)
    core_model.set_pipeline(pipeline)
    patcher = offloader.patcher_of(TRANSFORMER, core_model)
    save_core_samples(patcher, pipeline.family, pipeline.spec.sizes.defaults.fps)
    patcher.add_callback_with_key(CallbacksMP.ON_PRE_RUN, "anygpu", _report_start)
    if pipeline.is_demo:
        patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "anygpu_demo", functools.partial(_at_own_size, pipeline))
    if reload is not None:
        patcher.cached_patcher_init = (lambda again, **_: model_of(again({}), again), (reload,))
    return patcher


def _at_own_size(pipeline: Pipeline, executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Sample what a demo model can draw: a corner of core's latents, at its own cfg if core's CFGGuider guides."""
    guider, own = executor.class_obj, of_checkpoint(pipeline).sizes.defaults
    own_cfg = own.cfg if own.cfg_end == 1.0 else 1.0  # core's guider cannot end guidance early
    call = inspect.signature(executor.original).bind(*args, **kwargs)
    call.apply_defaults()
    messages = _cut_to_corner(pipeline, guider, call.arguments)
    with Undo() as changes:
        if type(guider) is CFGGuider and guider.cfg != own_cfg:
            messages.append(f"draws at its own cfg: {guider.cfg:g} -> {own_cfg:g}")
            changes.set(guider, "cfg", own_cfg)  # for this sampling: core keeps a node's guider for later runs
        if messages:
            changes.set(guider.model_patcher.model.diffusion_model, "demo", f"the demo model {'; it '.join(messages)}")
        return executor(*call.args, **call.kwargs)


def _cut_to_corner(pipeline: Pipeline, guider: Any, given: dict[str, Any]) -> list[str]:
    """Cut the latents among the sampler's arguments ``given``, in place, to the size that a demo model draws; a message
    on that, if they changed. Several latents at once, such as video with audio, stay as they are."""
    if given["latent_shapes"] and len(given["latent_shapes"]) > 1:
        return []
    sizes, shape = pipeline.spec.sizes, given["latent_image"].shape
    usual = (of_checkpoint(pipeline).sizes.defaults.frames - 1) // sizes.stride + 1
    windows = guider.model_options.get("context_handler")
    frames = shape[-3] if windows is not None and windows.context_length <= usual else 0  # 0: as many as it draws
    for name in ("noise", "latent_image", "denoise_mask"):
        given[name] = None if given[name] is None else corner(pipeline, given[name], frames)
    drawn = given["latent_image"].shape
    given["latent_shapes"] = [drawn]
    if drawn == shape:
        return []
    (spatial, temporal), (count, rows, columns) = sizes.ratios, drawn[-3:]
    return [f"draws at its own size: {columns * spatial}x{rows * spatial}, {(count - 1) * temporal + 1} frames"]


def _report_start(patcher: PartPatcher) -> None:
    """Let the network show lines on the node that samples, first a demo's departures and patches without effect."""
    context, network = get_executing_context(), patcher.model.diffusion_model
    progress = NodeProgress(None if context is None else context.node_id)
    progress._run.entry["done"] = True  # the end of core's node is not reported

    def notify(text: str) -> None:
        if text not in progress.lines:
            progress.notify(text)
            progress.show()

    network.notify = notify
    for text in filter(None, (network.demo, *unread_patches(patcher.object_patches))):
        notify(text)


class Factors(comfy.weight_adapter.LoRAAdapter):
    """A LoRA of one layer as a patch of core's, whose tensors are read when they are applied."""

    def __init__(self, lora: loras.LoRA, layer: str) -> None:
        self.loaded_keys, self.lora, self.layer = set(), lora, layer

    @property
    def weights(self) -> tuple[Any, ...]:
        """Core's tuple: up, down, alpha, None for a middle factor, DoRA's magnitude or None, None for a new shape."""
        down, up, _, magnitude = self.lora.delta(self.layer)
        return up.flatten(1), down.flatten(1), self.lora.scales[self.layer] * down.shape[0], None, magnitude, None


def beside(pipeline: Pipeline, reload: Reload | None = None) -> tuple[Any, Any]:
    """MODEL and VAE of ``pipeline`` for core's nodes; instead of a missing one, an ExecutionBlocker with the reason."""
    vae = None if comfy_offloader(pipeline) is None else CoreVAE(pipeline, reload)
    return model_of(pipeline, reload) or _blocker(pipeline), vae or _blocker(pipeline)


def adapted(pipeline: Pipeline) -> Any:
    """The MODEL with the pipeline's LoRAs as patches of core's, or an ExecutionBlocker with the reason."""
    if (offloader := comfy_offloader(pipeline)) is None:
        return _blocker(pipeline)
    known = offloader.patchers.get(TRANSFORMER)
    model = known if known is not None and isinstance(known.model, CoreModel) else model_of(pipeline)
    for lora in loras.on(pipeline) if model is not None else ():
        patches: dict[str, Any] = {f"diffusion_model.{name}.weight": Factors(lora, name) for name in lora.pairs}
        for name, pair in lora.pairs.items():
            if pair.has_bias:
                patches[f"diffusion_model.{name}.bias"] = ("diff", (lora.delta(name).bias,))
        model = patched(model, patches, lora.strength)
    return model or _blocker(pipeline)


def _blocker(pipeline: Pipeline) -> Any:
    why = f"ComfyUI's samplers cannot drive {pipeline.spec.title}: it has no MODEL. Use AnyGPU Sample."
    if comfy_offloader(pipeline) is None:
        why = f"MODEL and VAE need offload auto or comfyui; found {pipeline.offloader}. Choose auto on the load node."
    return ExecutionBlocker(f"AnyGPU: {why}")


def pictured(conditioning: Any, image: ImageCondition) -> list[Any]:
    """``conditioning`` with our encoded picture added for our MODEL to read; InputError if it is empty."""
    if not conditioning:
        fix = "Connect positive or negative of AnyGPU Encode Prompt."
        raise InputError("an empty CONDITIONING", expected="encoded text", fix=fix)
    return [[embeds, {**extra, PICTURE: image}] for embeds, extra in conditioning]
