"""The sockets, and the inputs that several nodes share."""

from __future__ import annotations

from typing import Any

from ..host.api import io
from ..pipelines.family import SCHEDULERS

Pipeline = io.Custom("ANYGPU_PIPELINE")
Prompt = io.Custom("ANYGPU_PROMPT")
Image = io.Custom("ANYGPU_IMAGE")
Paint = io.Custom("ANYGPU_PAINT")
Cameras = io.Custom("ANYGPU_CAMERAS")

CATEGORY = "video/AnyGPU"
DEFAULT = "0 takes the model's own default."
SEED_LIMIT = 2**64 - 1


def size_inputs(width: int = 0, height: int = 0) -> list[Any]:
    tip = "Pixels; rounded to the nearest size the model can make, which is said under the node. "
    return [
        io.Int.Input("width", default=width, min=0, max=4096, step=16, tooltip=tip + DEFAULT),
        io.Int.Input("height", default=height, min=0, max=4096, step=16, tooltip=tip + DEFAULT),
    ]


def sampling_inputs() -> list[Any]:
    """The inputs that both sample nodes share, in the order of both."""
    return [
        io.Int.Input("steps", default=0, min=0, max=1000, tooltip="Denoising steps. " + DEFAULT),
        io.Float.Input(
            "cfg", default=0.0, min=0.0, max=30.0, step=0.1,
            tooltip="True classifier-free guidance with the negative prompt: a second forward per step, so twice the "
            "time, above 1. HunyuanVideo and FramePack are made for 1. " + DEFAULT,
        ),
        io.Float.Input(
            "guidance", default=0.0, min=0.0, max=30.0, step=0.1,
            tooltip="Distilled guidance, an input of HunyuanVideo and FramePack that costs nothing. " + DEFAULT,
        ),
        io.Int.Input(
            "seed", default=0, min=0, max=SEED_LIMIT, control_after_generate=True,
            tooltip="The same seed gives the same noise on every device.",
        ),
        io.Combo.Input(
            "scheduler", options=list(SCHEDULERS), default="auto",
            tooltip="The solver. auto is the one the model was published with (Euler).",
        ),
        io.Float.Input(
            "shift", default=0.0, min=0.0, max=100.0, step=0.1, advanced=True,
            tooltip="Timestep shift: more spends more steps on layout, less on detail. " + DEFAULT,
        ),
        io.Float.Input(
            "cfg_start", default=0.0, min=0.0, max=1.0, step=0.01, advanced=True,
            tooltip="Share of the steps after which true guidance (cfg) begins.",
        ),
        io.Float.Input(
            "cfg_end", default=1.0, min=0.0, max=1.0, step=0.01, advanced=True,
            tooltip="Share of the steps after which true guidance (cfg) ends; the rest runs twice as fast.",
        ),
    ]
