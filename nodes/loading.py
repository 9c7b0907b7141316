"""The nodes that load a pipeline."""

from __future__ import annotations

from typing import Any

from ..compat import precision
from ..compat.memory import offloader
from ..compat.transforms import attention
from ..host import core_outputs, folders, memory_manager
from ..host.api import io
from ..host.progress import NodeProgress
from ..host.server import panel
from ..pipelines.decisions import status_of
from ..pipelines.loading.folder import LoadRequest, load, variant_choices
from .composing import weight_inputs
from .memory import device_inputs
from .sockets import CATEGORY, Pipeline
from .speed import lossy_inputs, speed_inputs, speed_request


class LoadPipeline(io.ComfyNode):
    """Load a model folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's inputs and outputs."""
        providers = folders.provider_choices()
        return io.Schema(
            node_id="AnyGPULoadPipeline",
            display_name="AnyGPU Load Pipeline",
            category=CATEGORY,
            description="Loads an LTX-Video, HunyuanVideo, HunyuanVideo 1.5, FramePack or Mochi model folder and decides "
            "precision and offload for this machine. Weights are read when a stage first needs them.",
            search_aliases=["diffusers loader", "load video model", "ltx", "hunyuan video", "framepack", "mochi"],
            inputs=[
                io.Combo.Input(
                    "model", options=folders.model_choices(),
                    tooltip="A diffusers folder, or a FramePack transformer folder, in models/diffusers.",
                    extra_dict={"anygpu_first_run": panel.first_run()},
                ),
                io.Combo.Input(
                    "precision", options=list(precision.CHOICES), default="auto",
                    tooltip="auto: what this device runs best. fp32: exact, twice the memory of bf16. bf16: needs a GPU "
                    "with bf16 units (NVIDIA RTX 30 and newer). fp16: half the memory, can overflow to black video. "
                    "fp16-safe: fp16 operands around an fp32 residual, for GPUs without bf16; not on a CPU." + panel.limit_tooltip("precision"),
                ),
                io.Combo.Input(
                    "offload", options=list(offloader.CHOICES), default="auto",
                    tooltip="auto: the fastest that fits. "
                    + " ".join(f"{mode}: {cost}." for mode, cost in offloader.COSTS.items())
                    + panel.limit_tooltip("offload"),
                ),
                io.Combo.Input(
                    "variant", options=variant_choices(), default="auto", advanced=True,
                    tooltip="What files cannot tell. auto assumes it from the folder's name and says so under the node.",
                ),
                io.Combo.Input(
                    "base", options=providers, default="auto", advanced=True,
                    tooltip="FramePack: the HunyuanVideo folder that lends text encoders and VAE. auto searches.",
                ),
                io.Combo.Input(
                    "image_encoder", options=providers, default="auto", advanced=True,
                    tooltip="FramePack, HunyuanVideo 1.5: the folder with image_encoder and feature_extractor. "
                    "auto searches.",
                ),
                io.Combo.Input(
                    "attention", options=list(attention.CHOICES), default="auto", optional=True, advanced=True,
                    tooltip="Which kernel the transformer's attention runs, in this pipeline alone. "
                    + " ".join(f"{choice}: {meaning}." for choice, meaning in attention.MEANINGS.items())
                    + panel.limit_tooltip("attention"),
                ),
                *speed_inputs(),
                *weight_inputs(),
                *device_inputs(),
                *lossy_inputs(),
            ],
            outputs=[
                Pipeline.Output(display_name="pipeline"),
                io.Model.Output(
                    display_name="MODEL",
                    tooltip="The transformer for core's samplers, schedulers and guidance nodes; same weights, loaded once.",
                ),
                io.Vae.Output(display_name="VAE", tooltip="The VAE for core's decode and encode nodes; same weights."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, model: str) -> bool:
        """Always true: a model that is not there is explained when the node runs, with where to get it."""
        return True

    @classmethod
    def fingerprint_inputs(cls, model: str, **_: Any) -> Any:
        """Changes when the model's files change."""
        folder = folders.models().get(model)
        return folder and sorted((str(f), f.stat().st_mtime, f.stat().st_size) for f in folder.rglob("*.*"))

    @classmethod
    def execute(
        cls, model: str, precision: str, offload: str, variant: str = "auto", base: str = "auto",
        image_encoder: str = "auto", attention: str = "auto", weights: str = "auto", text_weights: str = "auto",
        transformer_device: str = "auto", text_device: str = "auto", vae_device: str = "auto", keep_free_gb: float = 0.0,
        **speed: Any,
    ) -> io.NodeOutput:
        """The pipeline."""
        progress = NodeProgress(cls.hidden.unique_id)
        request = LoadRequest(
            folders.model_folder(model), folders.provider_folder(base), folders.provider_folder(image_encoder), variant,
            precision, offload, memory_manager.compute_device(), (*folders.model_roots(), *folders.encoder_roots()),
            attention=attention, state=folders.state_folder(), speed=speed_request(**speed), weights=weights,
            text_weights=text_weights, devices=offloader.part_devices(transformer_device, text_device, vae_device),
            keep_free_gb=keep_free_gb,
        )
        pipeline = load(request, progress, memory_manager.make_room, memory_manager.offloader_on)
        progress.finish("\n".join((status_of(pipeline), *pipeline.notes, *panel.limit_lines())))
        return io.NodeOutput(pipeline, *core_outputs.beside(pipeline))
