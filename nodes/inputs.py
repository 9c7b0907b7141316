"""The sockets, and the inputs that several nodes share."""

from __future__ import annotations

from typing import Any

from ..compat.checkpoints import packed
from ..compat.memory import offloader
from ..compat.transforms import compile as compiling
from ..compat.transforms import fused
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


def speed_inputs() -> list[Any]:
    """Optional inputs of both nodes that load a video pipeline, before :func:`weight_inputs`."""
    return [
        io.Combo.Input(
            "kernels", options=list(fused.CHOICES), default="auto", optional=True, advanced=True,
            tooltip="Norms, rotary embedding and gated sums of the transformer's blocks, and norm, SiLU and border in the VAE's "
            "decoder, in one pass each; results differ by rounding only. "
            + " ".join(f"{choice}: {meaning}." for choice, meaning in fused.MEANINGS.items()),
        ),
        io.Boolean.Input(
            "compile", default=False, optional=True,
            tooltip="torch.compile for the transformer's blocks: the first run takes minutes, later ones are faster. Needs a "
            "working compiler, else runs without and says so. Not with offload sequential or comfyui.",
        ),
        io.Combo.Input(
            "compile_mode", options=list(compiling.MODES), default="default", optional=True, advanced=True,
            tooltip="; ".join(f"{mode}: {meaning}" for mode, meaning in compiling.MODES.items()) + ". Only with compile.",
        ),
        io.Combo.Input(
            "compile_dynamic", options=list(compiling.DYNAMIC), default="text", optional=True, advanced=True,
            tooltip="; ".join(f"{choice}: {meaning}" for choice, meaning in compiling.DYNAMIC.items()) + ". Only with compile.",
        ),
        io.Int.Input(
            "compile_cache_size", default=compiling.CACHE_SIZE, min=1, max=compiling.MOST_CACHED, optional=True,
            advanced=True, tooltip="Graphs kept per kind of block; one more size than that runs without. Only with compile.",
        ),
        io.Boolean.Input(
            "compile_vae", default=False, optional=True, advanced=True,
            tooltip="The VAE's blocks too: each size of tile is compiled again. Only with compile.",
        ),
        io.Boolean.Input(
            "profile", default=False, optional=True, advanced=True,
            tooltip="Writes a torch profiler trace of each stage into ComfyUI's output folder, profiles/. Slows the run.",
        ),
    ]


def weight_inputs() -> list[Any]:
    """The last inputs of both nodes that load a video pipeline: how weights are kept, where parts compute, lossy sums."""
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
        io.Boolean.Input(
            "fp16_accumulation", default=False, optional=True, advanced=True,
            tooltip="Sums of fp16 products in fp16, in AnyGPU's sample nodes: up to twice as fast on GeForce, lossy, can "
            "overflow. Only NVIDIA with precision fp16 or fp16-safe; anywhere else it is one line when you load.",
        ),
    ]
