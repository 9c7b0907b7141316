"""The nodes that load a pipeline, and the one that puts a LoRA on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..compat.requirements import package_problem
from ..compat.transforms import attention
from ..host import core_models, folders, memory_manager, model_files, requests, saved
from ..host.api import io
from ..host.progress import NodeProgress
from ..host.server import panel
from ..pipelines.decisions import status_of
from ..pipelines.load import lora as adapters
from ..pipelines.load.folder import load, load_placed
from ..pipelines.registry import FAMILIES
from ..pipelines.requests import LORA_MODES, PRECISIONS, LoadRequest
from .inputs import Pipeline, attention_input, offload_input, schema, speed_inputs, variant_input, weight_inputs


class LoadPipeline(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        providers = folders.provider_choices()
        return schema(
            node_id="AnyGPULoadPipeline",
            display_name="AnyGPU Load Pipeline",
            description="Opens an LTX-Video, HunyuanVideo, HunyuanVideo 1.5, FramePack or Mochi model folder and "
                        "chooses precision and offload for this machine. Weights are read when a stage first needs "
                        "them.",
            search_aliases=[
                "diffusers loader", "load video model", "load checkpoint", "model loader", "low vram", "block swap", "offload", "fp8",
                *(name.replace("_", " ") for name in FAMILIES), *(f"{name.replace('_', ' ')} model loader" for name in FAMILIES),
            ],
            inputs=[
                io.Combo.Input(
                    "model", options=folders.model_choices(),
                    tooltip="A diffusers folder, or a FramePack transformer folder, in models/diffusers.",
                    extra_dict={"anygpu_first_run": panel.first_run(), "anygpu_offers": panel.offers()},
                ),
                io.Combo.Input(
                    "precision", options=list(PRECISIONS), default="auto",
                    tooltip="auto: what this device runs best. fp32: exact, twice the memory of bf16. bf16: needs a "
                            "GPU with bf16 units (NVIDIA RTX 30 and newer). fp16: half the memory of fp32, can "
                            "overflow to a black video. fp16-safe: multiplies in fp16 but keeps the residual in "
                            "fp32, for GPUs without bf16; not on a CPU. fp8_e4m3fn, fp8_e4m3fn_fast: auto, with "
                            "weights fp8. fp8_scaled: auto, with weights as in the file." + panel.limit_tooltip("precision"),
                ),
                offload_input(panel.limit_tooltip("offload")),
                variant_input(),
                io.Combo.Input(
                    "base", options=providers, default="auto", advanced=True,
                    tooltip="FramePack: the HunyuanVideo folder to take text encoders and VAE from. auto looks for one.",
                ),
                io.Combo.Input(
                    "image_encoder", options=providers, default="auto", advanced=True,
                    tooltip="FramePack, HunyuanVideo 1.5: the folder with image_encoder and feature_extractor. auto "
                            "looks for one.",
                ),
                attention_input("the transformer's ", panel.limit_tooltip("attention")),
                *speed_inputs(),
                *weight_inputs(),
            ],
            outputs=[
                Pipeline.Output(display_name="pipeline"),
                io.Model.Output(
                    display_name="MODEL",
                    tooltip="The transformer for core's samplers, schedulers and guidance nodes; same weights, loaded once.",
                ),
                io.Vae.Output(display_name="VAE", tooltip="The VAE for core's decode and encode nodes; same weights."),
            ],
        )

    validate_inputs = classmethod(lambda cls, model: True)  # a name that is gone is explained by the run

    @classmethod
    def fingerprint_inputs(cls, model: str, base: str = folders.AUTO, image_encoder: str = folders.AUTO, **_: Any) -> Any:
        return folders.stamp(*requests.used_folders(model, base, image_encoder))

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        progress = NodeProgress(cls.hidden.unique_id)
        return load_outputs(requests.folder_request(inputs, trace_file(inputs)), progress)


class ComposePipeline(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUComposePipeline",
            display_name="AnyGPU Compose Pipeline",
            description="Builds a pipeline from the single files in ComfyUI's model folders: original releases, "
                        "ComfyUI's repackaging, scaled fp8, GGUF. Files are recognised by their headers. Nothing is "
                        "downloaded.",
            search_aliases=[
                "unet loader", "load diffusion model", "single file", "gguf", "fp8", "dual clip loader", "vae loader", "low vram",
            ],
            inputs=[
                io.Combo.Input(
                    "transformer", options=model_files.file_choices("transformer"),
                    tooltip="The diffusion model, in models/diffusion_models (or checkpoints). It determines the "
                            "family.",
                ),
                io.Combo.Input(
                    "vae", options=model_files.file_choices("vae"), default="auto",
                    tooltip="In models/vae. auto: the VAE inside the transformer's file, otherwise the first file "
                            "that fits.",
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
                    tooltip="A diffusers folder that supplies whatever the files lack, such as tokenizers. auto: the "
                            "tokenizers that ship with ComfyUI.",
                ),
                io.Combo.Input(
                    "task", options=list(requests.TASKS), default="auto", advanced=True,
                    tooltip="Text to video or image to video, if the shapes cannot tell. auto guesses from the "
                            "file's name and says so.",
                ),
                io.Combo.Input(
                    "precision", options=list(PRECISIONS), default="auto",
                    tooltip="The dtype that computes, as on AnyGPU Load Pipeline.",
                ),
                offload_input(),
                variant_input(),
                io.Combo.Input(
                    "attention", options=list(attention.CHOICES), default="auto", optional=True, advanced=True,
                    tooltip="Which kernel computes the transformer's attention, as on AnyGPU Load Pipeline.",
                ),
                *speed_inputs(),
                *weight_inputs(),
            ],
            outputs=[
                Pipeline.Output(display_name="pipeline"),
                io.Model.Output(display_name="MODEL", tooltip="The transformer for core's samplers; same weights, loaded once."),
                io.Vae.Output(display_name="VAE", tooltip="The VAE for core's decode and encode nodes; same weights."),
            ],
        )

    validate_inputs = classmethod(lambda cls, transformer: True)  # a name that is gone is explained by the run

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> Any:
        files = model_files.stamp_of(**{part: inputs[part] for part in requests.FILES})
        return files + folders.stamp(folders.providers().get(inputs.get("base")))

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        progress = NodeProgress(cls.hidden.unique_id)
        return load_outputs(requests.files_request(inputs, trace_file(inputs)), progress)


def trace_file(inputs: Mapping[str, Any]) -> Path | None:
    folder, name = saved.target_folder("profiles/AnyGPU")
    return folder / f"{name}.json" if inputs.get("profile") else None


def load_outputs(request: LoadRequest, progress: NodeProgress) -> io.NodeOutput:
    """Pipeline, MODEL and VAE; what was decided is said under the node."""
    here = (memory_manager.make_room, memory_manager.offloader_on)
    if problem := package_problem():
        progress.notify(problem)
    pipeline = load_placed(request, progress, *here)
    progress.chosen(status_of(pipeline), pipeline.plan.decisions)

    def reload(devices: Mapping[str, Any]) -> Any:
        same = pipeline.model.request
        return load(replace(same, devices={**same.devices, **devices}), None, *here)

    return io.NodeOutput(pipeline, *core_models.beside(pipeline, reload))


class ApplyLoRA(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPULoRA",
            display_name="AnyGPU LoRA",
            description="Applies a LoRA to the pipeline's transformer; understands keys of diffusers, kohya and "
                        "ComfyUI. Chain several nodes for several LoRAs. Changing or removing one does not reload "
                        "the model.",
            search_aliases=["lora", "load lora", "lora loader", "lora block weight"],
            inputs=[
                Pipeline.Input("pipeline", tooltip="From AnyGPU Load Pipeline, or from another AnyGPU LoRA."),
                io.Combo.Input(
                    "lora", options=folders.lora_choices(),
                    tooltip="A .safetensors file in ComfyUI/models/loras. Press R after adding one. none: the pipeline as it is. demo: made for the demo model.",
                ),
                io.Float.Input(
                    "strength", default=1.0, min=-10.0, max=10.0, step=0.05,
                    tooltip="A factor: 1 is what the LoRA was trained for, 0 switches it off.",
                ),
                io.String.Input(
                    "blocks", default="", optional=True, advanced=True,
                    tooltip="Which blocks the LoRA acts on, separated by commas: double and single, each optionally "
                            "with a number or a range, and rest for everything outside the blocks. Empty means all. "
                            "Example: double 0-9, single",
                ),
                io.Combo.Input(
                    "mode", options=list(LORA_MODES), default="separate", optional=True, advanced=True,
                    tooltip="separate: computed beside each layer at each step; works with all kinds of weights. "
                            "merged: added to the weights, so as fast as without a LoRA; keeps a copy of the "
                            "original weights in host memory and does not work with packed weights.",
                ),
            ],
            outputs=[
                Pipeline.Output(display_name="pipeline"),
                io.Model.Output(
                    display_name="MODEL",
                    tooltip="The transformer with these LoRAs for core's samplers, schedulers and guidance nodes; same weights, loaded once.",
                ),
            ],
        )

    validate_inputs = classmethod(lambda cls, lora: True)  # a name that is gone is explained by the run
    fingerprint_inputs = classmethod(lambda cls, lora, **_: folders.stamp(folders.loras().get(lora)))

    @classmethod
    def execute(cls, pipeline: Any, lora: str, strength: float, blocks: str = "", mode: str = "separate") -> io.NodeOutput:
        progress = NodeProgress(cls.hidden.unique_id, pipeline.family)
        if lora == folders.NONE:
            progress.finish("no LoRA chosen")
            return io.NodeOutput(pipeline, core_models.adapted(pipeline))
        changed = adapters.with_lora(pipeline, folders.lora_file(lora), strength, blocks, mode, progress)
        progress.finish(str(changed.plan.decisions[-1]) if changed is not pipeline else "no effect")
        return io.NodeOutput(changed, core_models.adapted(changed))
