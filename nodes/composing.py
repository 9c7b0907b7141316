"""The node that composes a pipeline of single files, and the inputs about weights that loading nodes share."""

from __future__ import annotations

from typing import Any

from ..compat import precision
from ..compat.checkpoints import packed
from ..compat.memory import offloader
from ..compat.transforms import attention
from ..host import core_outputs, folders, memory_manager, model_files
from ..host.api import io
from ..host.progress import NodeProgress
from ..pipelines.decisions import status_of
from ..pipelines.loading.folder import LoadRequest, load, variant_choices
from .memory import device_inputs
from .sockets import CATEGORY, Pipeline
from .speed import lossy_inputs, speed_inputs, speed_request

TASKS = ("auto", "text", "image")


def weight_inputs() -> list[Any]:
    """The optional inputs of a loading node about how weights are kept, in this order, last."""
    meanings = " ".join(f"{choice}: {meaning}." for choice, meaning in packed.MEANINGS.items())
    return [
        io.Combo.Input(
            "weights", options=list(packed.CHOICES), default="auto", optional=True, advanced=True,
            tooltip="How the transformer's weights are kept in memory, apart from what computes. " + meanings
            + " In HunyuanVideo: 24 GB as bf16, about 15 as fp8 or int8. Every offload mode takes them; precision fp16-safe "
            "takes only auto.",
        ),
        io.Combo.Input(
            "text_weights", options=list(packed.CHOICES), default="auto", optional=True, advanced=True,
            tooltip="The same for the text encoders. T5-XXL: 9.5 GB as bf16, about 5 as fp8 or int8. Every offload mode takes "
            "them.",
        ),
    ]


class ComposePipeline(io.ComfyNode):
    """Compose a pipeline of single files."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's inputs and outputs."""
        return io.Schema(
            node_id="AnyGPUComposePipeline",
            display_name="AnyGPU Compose Pipeline",
            category=CATEGORY,
            description="Makes a pipeline of single files as ComfyUI's folders have them: original releases, ComfyUI's "
            "repackaging, scaled fp8, GGUF. What a file is, is read from the file. Nothing is downloaded.",
            search_aliases=["unet loader", "load diffusion model", "single file", "gguf", "fp8", "dual clip loader", "vae loader"],
            inputs=[
                io.Combo.Input(
                    "transformer", options=model_files.file_choices("transformer"),
                    tooltip="The diffusion model, in models/diffusion_models (or checkpoints). It decides the family.",
                ),
                io.Combo.Input(
                    "vae", options=model_files.file_choices("vae"), default="auto",
                    tooltip="In models/vae. auto: of the transformer's file, else the first file of models/vae that fits.",
                ),
                io.Combo.Input(
                    "text_encoder", options=model_files.file_choices("text_encoder"), default="auto",
                    tooltip="In models/text_encoders: T5-XXL (LTX-Video, Mochi), llava_llama3 (HunyuanVideo, FramePack), "
                    "Qwen 2.5 VL 7B (HunyuanVideo 1.5). auto: the first file that fits.",
                ),
                io.Combo.Input(
                    "text_encoder_2", options=model_files.file_choices("text_encoder_2"), default="auto",
                    tooltip="CLIP-L (HunyuanVideo, FramePack), ByT5 (HunyuanVideo 1.5). auto: the first file that fits.",
                ),
                io.Combo.Input(
                    "image_encoder", options=model_files.file_choices("image_encoder"), default="auto",
                    tooltip="In models/clip_vision: SigLIP (FramePack, HunyuanVideo 1.5), llava_llama3_vision (HunyuanVideo "
                    "image to video). auto: the first file that fits.",
                ),
                io.Combo.Input(
                    "base", options=folders.provider_choices(), default="auto", advanced=True,
                    tooltip="A diffusers folder that lends what the files lack, such as tokenizers. auto: tokenizers that "
                    "ComfyUI ships.",
                ),
                io.Combo.Input(
                    "task", options=list(TASKS), default="auto", advanced=True,
                    tooltip="Text or image to video, where shapes do not tell: auto goes by the file's name and says so.",
                ),
                io.Combo.Input(
                    "precision", options=list(precision.CHOICES), default="auto",
                    tooltip="What computes; as in AnyGPU Load Pipeline.",
                ),
                io.Combo.Input(
                    "offload", options=list(offloader.CHOICES), default="auto",
                    tooltip="auto: the fastest that fits. "
                    + " ".join(f"{mode}: {cost}." for mode, cost in offloader.COSTS.items()),
                ),
                io.Combo.Input(
                    "variant", options=variant_choices(), default="auto", advanced=True,
                    tooltip="What files cannot tell. auto assumes it from the file's name and says so under the node.",
                ),
                io.Combo.Input(
                    "attention", options=list(attention.CHOICES), default="auto", optional=True, advanced=True,
                    tooltip="Which kernel the transformer's attention runs; as in AnyGPU Load Pipeline.",
                ),
                *speed_inputs(),
                *weight_inputs(),
                *device_inputs(),
                *lossy_inputs(),
            ],
            outputs=[
                Pipeline.Output(display_name="pipeline"),
                io.Model.Output(display_name="MODEL", tooltip="The transformer for core's samplers; same weights, loaded once."),
                io.Vae.Output(display_name="VAE", tooltip="The VAE for core's decode and encode nodes; same weights."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, transformer: str) -> bool:
        """Always true: a file that is not there is explained when the node runs, with the folders searched."""
        return True

    @classmethod
    def fingerprint_inputs(
        cls, transformer: str, vae: str, text_encoder: str, text_encoder_2: str, image_encoder: str, **_: Any
    ) -> Any:
        """Changes when a chosen file changes."""
        named = dict(vae=vae, text_encoder=text_encoder, text_encoder_2=text_encoder_2, image_encoder=image_encoder)
        return model_files.stamp_of(transformer=transformer, **named)

    @classmethod
    def execute(
        cls, transformer: str, vae: str, text_encoder: str, text_encoder_2: str, image_encoder: str, base: str, task: str,
        precision: str, offload: str, variant: str, attention: str = "auto", weights: str = "auto", text_weights: str = "auto",
        transformer_device: str = "auto", text_device: str = "auto", vae_device: str = "auto", keep_free_gb: float = 0.0,
        **speed: Any,
    ) -> io.NodeOutput:
        """The pipeline."""
        progress = NodeProgress(cls.hidden.unique_id)
        named = dict(vae=vae, text_encoder=text_encoder, text_encoder_2=text_encoder_2, image_encoder=image_encoder)
        files = model_files.chosen_files(task, transformer=transformer, **named)
        request = LoadRequest(
            files.parts["transformer"], folders.provider_folder(base), None, variant, precision, offload,
            memory_manager.compute_device(), attention=attention, state=folders.state_folder(), files=files,
            weights=weights, text_weights=text_weights, devices=offloader.part_devices(transformer_device, text_device, vae_device),
            keep_free_gb=keep_free_gb, speed=speed_request(**speed),
        )
        pipeline = load(request, progress, memory_manager.make_room, memory_manager.offloader_on)
        progress.finish("\n".join((status_of(pipeline), *pipeline.notes)))
        return io.NodeOutput(pipeline, *core_outputs.beside(pipeline))
