"""The node that tells what a run will need."""

from __future__ import annotations

from typing import Any

from ..compat.memory import offloader
from ..host.api import io, ui
from ..host.progress import NodeProgress
from ..paint import estimates
from ..paint.networks.published import KINDS
from ..pipelines.memory import page as memory_plan
from ..pipelines.memory.estimates import Forecast
from .sockets import CATEGORY, Paint, Pipeline, size_inputs


def device_inputs() -> list[Any]:
    """Where the parts of a pipeline compute, and what is left free, for the nodes that load one."""
    return [
        io.Combo.Input(
            "transformer_device", options=list(offloader.DEVICE_CHOICES), default="auto", optional=True, advanced=True,
            tooltip="Where the transformer computes. auto: ComfyUI's device.",
        ),
        io.Combo.Input(
            "text_device", options=list(offloader.DEVICE_CHOICES), default="auto", optional=True, advanced=True,
            tooltip="Where the text encoders compute. auto: ComfyUI's device. cpu: they never need to fit, and take "
            "seconds to minutes per prompt.",
        ),
        io.Combo.Input(
            "vae_device", options=list(offloader.DEVICE_CHOICES), default="auto", optional=True, advanced=True,
            tooltip="Where the VAE computes. auto: ComfyUI's device. cpu: a decode never runs out of its memory, and is "
            "very slow.",
        ),
        io.Float.Input(
            "keep_free_gb", default=0.0, min=0.0, max=1023.0, step=0.1, optional=True, advanced=True,
            tooltip="GB of the device that are left to other programs when a mode and a decode are chosen.",
        ),
    ]


def paint_plan(pipeline: Any, pixels: int, views: int, guided: bool) -> tuple[str, Any]:
    """The forecast of a paint or delight pipeline, as :func:`memory_plan.shown` gives it; zeros take what it was taught."""
    found = (Forecast(mode, estimates.paint_needs(pipeline, pixels, views, guided or None, mode)) for mode in estimates.MODES)
    side, count = pixels or estimates.TAUGHT_SIZE, 1 if pipeline.family == "delight" else views or estimates.TAUGHT_VIEWS
    title = f"Hunyuan3D {pipeline.family} {pipeline.variant}, {count} view{'s' * (count > 1)} of {side} pixels"
    return memory_plan.shown(pipeline, title, ", with guidance" if guided else "", tuple(found))


class MemoryPlan(io.ComfyNode):
    """Forecast the memory of a run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's inputs and outputs."""
        return io.Schema(
            node_id="AnyGPUMemoryPlan",
            display_name="AnyGPU Memory Plan",
            category=CATEGORY,
            description="Says what a run will need on the device before anything is read: a bar per stage and offload mode "
            "against what is free now, and the fastest mode that fits.",
            search_aliases=["vram", "memory forecast", "oom", "out of memory", "offload plan", "will it fit"],
            inputs=[
                io.MultiType.Input(
                    "pipeline", types=[Pipeline, Paint],
                    tooltip="From AnyGPU Load Pipeline, Compose Pipeline or Load Paint Pipeline.",
                ),
                *size_inputs(),
                io.Int.Input(
                    "frames", default=0, min=0, max=4097,
                    tooltip="Video frames; rounded up to the next count the model can make. Of a paint pipeline: "
                    "views. 0 takes the model's own default.",
                ),
                io.Boolean.Input(
                    "guided", default=False, optional=True,
                    tooltip="With cfg above 1: LTX-Video and Mochi then run two videos at once.",
                ),
            ],
            outputs=[io.String.Output(display_name="text"), io.Image.Output(display_name="bars")],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        """Never the same: free memory changes."""
        return float("nan")

    @classmethod
    def execute(cls, pipeline: Any, width: int, height: int, frames: int, guided: bool = False) -> io.NodeOutput:
        """The forecast as text and as bars."""
        progress = NodeProgress(cls.hidden.unique_id, pipeline.family)
        if pipeline.family in KINDS:
            text, bars = paint_plan(pipeline, width, frames, guided)
        else:
            size = memory_plan.planned_size(pipeline, width, height, frames, guided)
            text, bars = memory_plan.memory_plan(pipeline, size)
        progress.finish(text)
        return io.NodeOutput(text, bars, ui=ui.PreviewImage(bars, cls=cls))
