"""The node that makes the video of a file again."""

from __future__ import annotations

from fractions import Fraction

from ..host import preview, saved
from ..host.api import io
from ..host.progress import NodeProgress
from ..host.requests import machine_of
from ..pipelines.jobs import replay
from ..pipelines.latents import convert as latent_format
from .inputs import schema
from .latents import FILES, Listed


class Replay(Listed):
    kind = saved.SIGNED

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="AnyGPUReplay",
            display_name="AnyGPU Replay",
            is_dev_only=True,
            category=FILES,
            description="Renders the video in a file again, from the receipt that AnyGPU writes into videos and latents: "
                        "same model, prompts, pictures and settings. Says whether the latents are the same bit for bit, and if "
                        "not, what differs between the machines.",
            search_aliases=["reproduce", "receipt", "same video again", "metadata", "repeat"],
            inputs=[
                io.Combo.Input(
                    "file", options=saved.choices(saved.SIGNED),
                    tooltip="A video or latents that AnyGPU made, in ComfyUI's input or output folder. Press R after adding one.",
                ),
            ],
            outputs=[
                io.Latent.Output(display_name="latent"),
                io.Video.Output(display_name="video"),
                io.String.Output(display_name="report"),
            ],
        )

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        progress, path = NodeProgress(cls.hidden.unique_id), saved.file_named(cls.kind, file)
        made = replay(path, machine_of(path.parent), progress)
        latents, frames = made.rendered.latents, made.rendered.frames
        rate = Fraction(latents.fps).limit_denominator(1001)
        progress.finish(made.text())
        video = saved.video(frames, rate, made.rendered.receipt)
        shown = preview.clips([frames], float(rate), cls)
        return io.NodeOutput(latent_format.to_core(latents), video, made.text(), ui=shown)
