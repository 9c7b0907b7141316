"""The nodes that decode latents."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from ..compat.vae_care import METHODS
from ..host.api import InputImpl, Types, io
from ..host.progress import NodeProgress
from ..pipelines import exchange, stages
from .sockets import CATEGORY, Pipeline


class Decode(io.ComfyNode):
    """Decode latents to frames and video."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's inputs and outputs."""
        return io.Schema(
            node_id="AnyGPUDecode",
            display_name="AnyGPU Decode",
            category=CATEGORY,
            description="Decodes video latents to frames, and to a VIDEO that core's Save Video takes.",
            search_aliases=["vae decode", "latent to video"],
            inputs=[
                Pipeline.Input("pipeline", tooltip="The pipeline that made the latents."),
                io.Latent.Input("latent", tooltip="From AnyGPU Sample, or video latents of the same model from core nodes."),
                io.Float.Input(
                    "fps", default=0.0, min=0.0, max=240.0, step=0.01, optional=True, advanced=True,
                    tooltip="Frames per second of the VIDEO. 0 takes what sampling used.",
                ),
                io.Combo.Input(
                    "method", options=list(METHODS), default="auto", optional=True, advanced=True,
                    tooltip="auto: whole, in tiles where that does not fit or goes wrong. full: never in tiles, which is "
                    "exact. tiled: in tiles of 256 pixels, which needs far less memory and can show faint seams.",
                ),
            ],
            outputs=[io.Image.Output(display_name="images"), io.Video.Output(display_name="video")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, pipeline: Any, latent: Any, fps: float = 0.0, method: str = "auto") -> io.NodeOutput:
        """Frames, and the video."""
        progress = NodeProgress(cls.hidden.unique_id, pipeline.family)
        latents = exchange.from_core(pipeline, latent, progress.say)
        frames = stages.decode(pipeline, latents, progress, method)
        rate = Fraction(fps or latents.fps).limit_denominator(1001)
        progress.finish(f"{frames.shape[2]}x{frames.shape[1]}, {frames.shape[0]} frames at {float(rate):g} fps")
        video = InputImpl.VideoFromComponents(Types.VideoComponents(images=frames, frame_rate=rate))
        return io.NodeOutput(frames, video)
