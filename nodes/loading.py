"""The nodes that load a pipeline."""

from __future__ import annotations

from typing import Any

from ..compat import attention, offload, precision
from ..host import folders, memory
from ..host.api import io
from ..host.progress import NodeProgress
from ..pipelines.loading import LoadRequest, load, variant_choices
from .sockets import CATEGORY, Pipeline


class LoadPipeline(io.ComfyNode):
    """Load a model folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's inputs and outputs."""
        lenders = folders.lender_choices()
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
                ),
                io.Combo.Input(
                    "precision", options=list(precision.CHOICES), default="auto",
                    tooltip="auto: what this device runs best. fp32: exact, twice the memory of bf16. bf16: needs a GPU "
                    "with bf16 units (NVIDIA RTX 30 and newer). fp16: half the memory, can overflow to black video. "
                    "fp16-safe: fp16 operands around an fp32 residual, for GPUs without bf16; not on a CPU.",
                ),
                io.Combo.Input(
                    "offload", options=list(offload.CHOICES), default="auto",
                    tooltip="auto: the fastest that fits. "
                    + " ".join(f"{mode}: {cost}." for mode, cost in offload.COSTS.items())
                    + " On a CPU only auto and none work.",
                ),
                io.Combo.Input(
                    "variant", options=variant_choices(), default="auto", advanced=True,
                    tooltip="What files cannot tell. auto assumes it from the folder's name and says so under the node.",
                ),
                io.Combo.Input(
                    "base", options=lenders, default="auto", advanced=True,
                    tooltip="FramePack: the HunyuanVideo folder that lends text encoders and VAE. auto searches.",
                ),
                io.Combo.Input(
                    "image_encoder", options=lenders, default="auto", advanced=True,
                    tooltip="FramePack, HunyuanVideo 1.5: the folder with image_encoder and feature_extractor. "
                    "auto searches.",
                ),
                io.Combo.Input(
                    "attention", options=list(attention.CHOICES), default="auto", optional=True, advanced=True,
                    tooltip="Which kernel the transformer's attention runs, in this pipeline alone. "
                    + " ".join(f"{choice}: {meaning}." for choice, meaning in attention.MEANINGS.items())
                    + " What this machine cannot do is one line when you run it.",
                ),
            ],
            outputs=[Pipeline.Output(display_name="pipeline")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, model: str, **_: Any) -> Any:
        """Changes when the model's files change."""
        folder = folders.models().get(model)
        return folder and sorted((str(f), f.stat().st_mtime, f.stat().st_size) for f in folder.rglob("*.*"))

    @classmethod
    def execute(
        cls, model: str, precision: str, offload: str, variant: str = "auto", base: str = "auto",
        image_encoder: str = "auto", attention: str = "auto",
    ) -> io.NodeOutput:
        """The pipeline."""
        progress = NodeProgress(cls.hidden.unique_id)
        request = LoadRequest(
            folders.model_folder(model), folders.lender_folder(base), folders.lender_folder(image_encoder), variant,
            precision, offload, memory.compute_device(), (*folders.model_roots(), *folders.encoder_roots()),
            attention=attention, state=folders.state_folder(),
        )
        pipeline = load(request, progress, memory.make_room)
        progress.finish("\n".join((f"{pipeline.family}, {pipeline.facts}", *pipeline.notes)))
        return io.NodeOutput(pipeline)
