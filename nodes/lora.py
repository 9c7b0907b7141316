"""The node that puts a LoRA on a pipeline."""

from __future__ import annotations

from typing import Any

from ..host import core_outputs, loras
from ..host.api import io
from ..host.progress import NodeProgress
from ..pipelines.loading import lora as adapters
from .sockets import CATEGORY, Pipeline


class LoRA(io.ComfyNode):
    """Put a LoRA on a pipeline."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's inputs and outputs."""
        return io.Schema(
            node_id="AnyGPULoRA",
            display_name="AnyGPU LoRA",
            category=CATEGORY,
            description="Puts a LoRA on the pipeline's transformer: keys of diffusers, kohya and ComfyUI. Chain several. "
            "Changing or removing one does not load the model again.",
            search_aliases=["lora", "load lora", "lora loader", "lora block weight"],
            inputs=[
                Pipeline.Input("pipeline", tooltip="From AnyGPU Load Pipeline, or from another AnyGPU LoRA."),
                io.Combo.Input("lora", options=loras.choices(), tooltip="A .safetensors file in ComfyUI/models/loras. Press R after adding one."),
                io.Float.Input(
                    "strength", default=1.0, min=-10.0, max=10.0, step=0.05,
                    tooltip="Times what it was trained for. 0 leaves the pipeline as it is.",
                ),
                io.String.Input(
                    "blocks", default="", optional=True, advanced=True,
                    tooltip="Which blocks take part, separated by commas: double, single, each with a number or a range, "
                    "and rest for everything outside blocks. Empty means all. Example: double 0-9, single",
                ),
                io.Combo.Input(
                    "mode", options=list(adapters.MODES), default="separate", optional=True, advanced=True,
                    tooltip="separate: computed beside each layer at each step, works with every weight. merged: "
                    "added to the weights, as fast as without, keeps a copy of the changed weights in host memory; not "
                    "for weights that are kept packed.",
                ),
            ],
            outputs=[
                Pipeline.Output(display_name="pipeline"),
                io.Model.Output(
                    display_name="MODEL",
                    tooltip="The transformer with these LoRAs for core's samplers, schedulers and guidance nodes; same weights, loaded once.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, lora: str) -> bool:
        """Always: a name that is gone gets the error that says what to do."""
        return True

    @classmethod
    def fingerprint_inputs(cls, lora: str, **_: Any) -> Any:
        """Changes when the file changes."""
        return loras.stamp(lora)

    @classmethod
    def execute(cls, pipeline: Any, lora: str, strength: float, blocks: str = "", mode: str = "separate") -> io.NodeOutput:
        """The pipeline with one LoRA more."""
        progress = NodeProgress(cls.hidden.unique_id, pipeline.family)
        found = adapters.with_lora(pipeline, loras.file_named(lora), strength, blocks, mode, progress)
        progress.finish(str(found.decisions[-1]) if found is not pipeline else "no effect")
        return io.NodeOutput(found, core_outputs.adapted(found))
