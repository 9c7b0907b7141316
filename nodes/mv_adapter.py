"""The node that loads MV-Adapter on a checkpoint of Stable Diffusion."""

from __future__ import annotations

from typing import Any

from ..host import folders, memory_manager
from ..host.api import io
from ..host.painting import PaintProgress
from ..host.requests import adapter_request
from ..paint.choices import ADAPTER_VARIANTS
from .inputs import Paint, attention_input, offload_input, precision_input, schema
from .mesh import CATEGORY


class LoadMVAdapter(io.ComfyNode):
    """Load MV-Adapter on a checkpoint of Stable Diffusion."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPULoadMVAdapter",
            display_name="AnyGPU Load MV-Adapter",
            category=CATEGORY,
            description="Opens MV-Adapter ig2mv (after a picture) or tg2mv (after words) on your own checkpoint of SDXL or "
                        "SD2.1. It paints six views in colour, with their light. The adapter is Apache-2.0; a checkpoint "
                        "has its own licence. Nothing is downloaded.",
            search_aliases=["mvadapter", "mv-adapter", "ig2mv", "tg2mv", "sdxl texture", "texture model"],
            inputs=[
                io.Combo.Input(
                    "model", options=folders.base_choices(),
                    tooltip="A .safetensors of SDXL or SD2.1 in models/checkpoints, or a diffusers folder.",
                ),
                io.Combo.Input(
                    "adapter", options=folders.adapter_choices(),
                    tooltip="mvadapter_ig2mv_sdxl.safetensors, or the one for tg2mv or sd21, in models/diffusion_models. "
                            "Its base must be that of the checkpoint.",
                ),
                precision_input(),
                offload_input(),
                io.Combo.Input(
                    "lora", options=folders.base_lora_choices(), default=folders.NONE,
                    tooltip="A LoRA of the checkpoint's base. It is merged into the weights as they are read.",
                ),
                io.Float.Input(
                    "lora_strength", default=1.0, min=-10.0, max=10.0, step=0.05, tooltip="How much the LoRA counts. 1: as made.",
                ),
                io.Combo.Input(
                    "variant", options=list(ADAPTER_VARIANTS), default="auto", advanced=True,
                    tooltip="auto reads it off the file's name. i2mv and t2mv have the same tensors and do not work: "
                            "choose one only for a renamed file.",
                ),
                io.Combo.Input(
                    "vae", options=folders.paint_provider_choices(), default="auto", advanced=True,
                    tooltip="The folder of another VAE, such as SDXL's with its fp16 fix. auto: the checkpoint's own, "
                            "for SDXL in fp32.",
                ),
                attention_input(),
            ],
            outputs=[Paint.Output(display_name="pipeline")],
        )

    @classmethod
    def validate_inputs(cls, model: str, adapter: str) -> bool:
        """Always true: a file that is not there is explained when the node runs, with where to get it."""
        return True

    @classmethod
    def fingerprint_inputs(
        cls, model: str, adapter: str, lora: str = folders.NONE, vae: str = folders.AUTO, **_: Any,
    ) -> Any:
        """Changes when a file of the model, of the adapter or of the LoRA changes."""
        found = (folders.base_models().get(model), folders.adapters().get(adapter), folders.loras().get(lora))
        return folders.stamp(*found, folders.paint_providers().get(vae))

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """The pipeline."""
        from ..paint.adapter_loading import load_adapter

        progress = PaintProgress(cls.hidden.unique_id)
        pipeline = load_adapter(adapter_request(inputs), progress, memory_manager.make_room, memory_manager.offloader_on)
        progress.chosen(f"{pipeline.family} {pipeline.variant}, {pipeline.facts}", pipeline.decisions)
        return io.NodeOutput(pipeline)
