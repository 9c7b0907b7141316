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


def loaded_outputs(users: str) -> list[Any]:
    """The outputs pipeline, MODEL and VAE; ``users``: core's nodes that take the MODEL, for the tooltip."""
    return [
        Pipeline.Output(display_name="pipeline"),
        io.Model.Output(display_name="MODEL", tooltip=f"The transformer for core's {users}; same weights, loaded once."),
        io.Vae.Output(display_name="VAE", tooltip="The VAE for core's decode and encode nodes; same weights."),
    ]


class LoadPipeline(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        providers = [folders.AUTO, *folders.providers()]
        return schema(
            node_id="AnyGPULoadPipeline",
            search_aliases=[
                "diffusers loader", "load video model", "load checkpoint", "model loader", "low vram", "block swap", "offload", "fp8",
                *(name.replace("_", " ") for name in FAMILIES), *(f"{name.replace('_', ' ')} model loader" for name in FAMILIES),
            ],
            inputs=[
                io.Combo.Input("model", options=folders.model_choices(), extra_dict={"anygpu_first_run": panel.first_run(), "anygpu_offers": panel.offers()}),
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
                io.Combo.Input("base", options=providers, default="auto", advanced=True),
                io.Combo.Input("image_encoder", options=providers, default="auto", advanced=True),
                attention_input("the transformer's ", panel.limit_tooltip("attention")),
                *speed_inputs(),
                *weight_inputs(),
            ],
            outputs=loaded_outputs("samplers, schedulers and guidance nodes"),
        )

    validate_inputs = classmethod(lambda cls, model: True)  # a name that is gone is explained by the run

    @classmethod
    def fingerprint_inputs(cls, model: str, base: str = folders.AUTO, image_encoder: str = folders.AUTO, **_: Any) -> Any:
        return folders.stamp(*requests.used_folders(model, base, image_encoder))

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        return load_outputs(requests.folder_request(inputs, trace_file(inputs)), NodeProgress(cls.hidden.unique_id))


class ComposePipeline(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUComposePipeline",
            inputs=[
                io.Combo.Input("transformer", options=model_files.file_choices("transformer")),
                io.Combo.Input("vae", options=model_files.file_choices("vae"), default="auto"),
                io.Combo.Input("text_encoder", options=model_files.file_choices("text_encoder"), default="auto"),
                io.Combo.Input("text_encoder_2", options=model_files.file_choices("text_encoder_2"), default="auto"),
                io.Combo.Input("image_encoder", options=model_files.file_choices("image_encoder"), default="auto"),
                io.Combo.Input("base", options=[folders.AUTO, *folders.providers()], default="auto", advanced=True),
                io.Combo.Input("task", options=list(requests.TASKS), default="auto", advanced=True),
                io.Combo.Input("precision", options=list(PRECISIONS), default="auto"),
                offload_input(),
                variant_input(),
                io.Combo.Input("attention", options=list(attention.CHOICES), default="auto", optional=True, advanced=True),
                *speed_inputs(),
                *weight_inputs(),
            ],
            outputs=loaded_outputs("samplers"),
        )

    validate_inputs = classmethod(lambda cls, transformer: True)  # a name that is gone is explained by the run

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> Any:
        files = model_files.stamp_of(**{part: inputs[part] for part in requests.FILES})
        return files + folders.stamp(folders.providers().get(inputs.get("base")))

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        return load_outputs(requests.files_request(inputs, trace_file(inputs)), NodeProgress(cls.hidden.unique_id))


def trace_file(inputs: Mapping[str, Any]) -> Path | None:  # of the profile, if one is asked for
    place = saved.target_folder("profiles/AnyGPU", "profile") if inputs.get("profile") else None
    return place and place[0] / f"{place[1]}.json"


def load_outputs(request: LoadRequest, progress: NodeProgress) -> io.NodeOutput:
    """Load the pipeline of ``request`` and return it with its MODEL and VAE; shows the decisions under the node."""
    host = (memory_manager.make_room, memory_manager.offloader_on)
    if problem := package_problem():
        progress.notify(problem)
    pipeline = load_placed(request, progress, *host)
    progress.chosen(status_of(pipeline), pipeline.plan.decisions, "model" if pipeline.is_demo else "")

    def reload(devices: Mapping[str, Any]) -> Any:  # loads it again with ``devices``, by part
        same = pipeline.model.request
        return load(replace(same, devices={**same.devices, **devices}), None, *host)

    return io.NodeOutput(pipeline, *core_models.beside(pipeline, reload))


class ApplyLoRA(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPULoRA",
            inputs=[
                Pipeline.Input("pipeline"),
                io.Combo.Input("lora", options=folders.lora_choices()),
                io.Float.Input("strength", default=1.0, min=-10.0, max=10.0, step=0.05),
                io.String.Input("blocks", default="", optional=True, advanced=True),
                io.Combo.Input("mode", options=list(LORA_MODES), default="separate", optional=True, advanced=True),
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
        added = [each for each in changed.plan.decisions if each.subject == "LoRA"]
        progress.finish(str(added[-1]) if changed is not pipeline else "no effect")
        return io.NodeOutput(changed, core_models.adapted(changed))
