"""The sockets, and the inputs that several nodes share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..compat.checkpoints import packed
from ..compat.device import precision
from ..compat.memory import offloader
from ..compat.transforms import attention, fused
from ..compat.transforms import compile as compiling
from ..host.api import io
from ..pipelines.family import SCHEDULERS
from ..pipelines.files.evidence import variant_choices
from ..pipelines.latents.batch import MOST_VIDEOS

Pipeline = io.Custom("ANYGPU_PIPELINE")
Prompt = io.Custom("ANYGPU_PROMPT")
Image = io.Custom("ANYGPU_IMAGE")
Paint = io.Custom("ANYGPU_PAINT")
Cameras = io.Custom("ANYGPU_CAMERAS")

CATEGORY = "video/AnyGPU"
DEFAULT = "0 takes the model's own default."
SEED_LIMIT = 2**64 - 1
DEVICES = (  # input, what it places, and what the CPU costs
    ("transformer_device", "the transformer computes", ""),
    ("text_device", "the text encoders compute", " cpu: they need no GPU memory, and take seconds to minutes per prompt."),
    ("vae_device", "the VAE computes", " cpu: decoding needs no GPU memory, and is very slow."),
)


def schema(**given: Any) -> io.Schema:
    """A node's schema, in our category and given its id for its progress; ``given`` may replace either.

    From the first advanced input on nothing has to be given, so that an export of today runs after an input is added.
    """
    inputs = given.get("inputs", [])
    first = next((index for index, each in enumerate(inputs) if getattr(each, "advanced", None)), len(inputs))
    for each in inputs[first:]:
        each.optional = True
    return io.Schema(**{"category": CATEGORY, "hidden": [io.Hidden.unique_id], **given})


mesh_schema = partial(schema, category="3d/AnyGPU")


def seed_input() -> Any:
    return io.Int.Input(
        "seed", default=0, min=0, max=SEED_LIMIT, control_after_generate=True,
        tooltip="The same seed gives the same noise on every device.",
    )


def size_inputs(width: int = 0, height: int = 0) -> list[Any]:
    tip = "Pixels, rounded to the nearest size the model can make; the node shows the result. "
    return [
        io.Int.Input("width", default=width, min=0, max=4096, step=16, tooltip=tip + DEFAULT),
        io.Int.Input("height", default=height, min=0, max=4096, step=16, tooltip=tip + DEFAULT),
    ]


def prompt_input() -> Any:
    return io.MultiType.Input(
        "prompt", types=[Prompt, io.Conditioning],
        tooltip="From AnyGPU Encode Prompt, or core CONDITIONING from CLIP Text Encode.",
    )


def core_inputs() -> list[Any]:
    return [
        io.Conditioning.Input("negative", optional=True, tooltip="Negative CONDITIONING, when prompt is core CONDITIONING."),
        io.Sigmas.Input("sigmas", optional=True, tooltip="Noise levels from 1 to 0 that replace steps and shift."),
    ]


def sampling_inputs() -> list[Any]:
    """The inputs that both sample nodes share, in the order of both."""
    return [
        io.Int.Input("steps", default=0, min=0, max=1000, tooltip="Denoising steps. " + DEFAULT),
        io.Float.Input(
            "cfg", default=0.0, min=0.0, max=30.0, step=0.1,
            tooltip="True classifier-free guidance with the negative prompt. Above 1 it takes a second forward per "
                    "step, which doubles the time. HunyuanVideo and FramePack were made for 1. " + DEFAULT,
        ),
        io.Float.Input(
            "guidance", default=0.0, min=0.0, max=30.0, step=0.1,
            tooltip="Distilled guidance, built into HunyuanVideo and FramePack. It costs no time. " + DEFAULT,
        ),
        seed_input(),
        io.Combo.Input(
            "scheduler", options=list(SCHEDULERS), default="auto", advanced=True,
            tooltip="The solver. auto is the one published with the model (Euler; FramePack unipc_bh1).",
        ),
        io.Float.Input(
            "shift", default=0.0, min=0.0, max=100.0, step=0.1, advanced=True,
            tooltip="Timestep shift. Higher values spend more steps on layout and fewer on detail. " + DEFAULT,
        ),
        io.Float.Input(
            "cfg_start", default=0.0, min=0.0, max=1.0, step=0.01, advanced=True,
            tooltip="Fraction of the steps after which true guidance (cfg) starts.",
        ),
        io.Float.Input(
            "cfg_end", default=1.0, min=0.0, max=1.0, step=0.01, advanced=True,
            tooltip="Fraction of the steps after which true guidance (cfg) ends. The remaining steps take half the "
                    "time.",
        ),
    ]


def batch_input() -> Any:
    return io.Int.Input(
        "batch_size", default=1, min=1, max=MOST_VIDEOS, optional=True, advanced=True,
        tooltip="How many videos to sample, one after the other, with seed, seed + 1 and so on. Takes the memory of one.",
    )


def speed_inputs() -> list[Any]:
    """Optional inputs of both nodes that load a video pipeline, before :func:`weight_inputs`."""
    return [
        io.Combo.Input(
            "kernels", options=list(fused.CHOICES), default="auto", optional=True, advanced=True,
            tooltip="Fused kernels: norms, rotary embeddings and gated sums of the transformer's blocks, and norm, "
                    "SiLU and padding in the VAE's decoder, take one pass each. Results differ only by rounding. "
            + " ".join(f"{choice}: {meaning}." for choice, meaning in fused.MEANINGS.items()),
        ),
        io.Boolean.Input(
            "compile", default=False, optional=True, advanced=True,
            tooltip="torch.compile for the transformer's blocks. The first run takes minutes, later ones are faster. "
                    "Without a working compiler the run continues without it and says so. Does not work with offload "
                    "sequential or comfyui.",
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
            advanced=True, tooltip="How many graphs to keep per kind of block; further sizes run without compile. "
                                   "Only with compile.",
        ),
        io.Boolean.Input(
            "compile_vae", default=False, optional=True, advanced=True,
            tooltip="Compiles the VAE's blocks too, once for each tile size. Only with compile.",
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
            tooltip="How the transformer's weights are stored in memory, independent of the dtype that computes. " + meanings
            + " HunyuanVideo takes 24 GB as bf16, about 15 GB as fp8 or int8. All of them work in every offload "
              "mode; precision fp16-safe works only with auto.",
        ),
        io.Combo.Input(
            "text_weights", options=list(packed.CHOICES), default="auto", optional=True, advanced=True,
            tooltip="The same for the text encoders. T5-XXL takes 9.5 GB as bf16, about 5 GB as fp8 or int8. All of "
                    "them work in every offload mode.",
        ),
        *(
            io.Combo.Input(
                name, options=list(offloader.DEVICE_CHOICES), default="auto", optional=True, advanced=True,
                tooltip=f"Where {computes}. auto: ComfyUI's device, or a second card where that helps.{cpu}",
            )
            for name, computes, cpu in DEVICES
        ),
        io.Float.Input(
            "keep_free_gb", default=0.0, min=0.0, max=1023.0, step=0.1, optional=True, advanced=True,
            tooltip="GB of the device's memory to leave to other programs.",
        ),
        io.Boolean.Input(
            "fp16_accumulation", default=False, optional=True, advanced=True,
            tooltip="Adds fp16 products in fp16 while AnyGPU's sample nodes run: up to twice as fast on GeForce, but "
                    "lossy, and can overflow. Only on NVIDIA with precision fp16 or fp16-safe; otherwise loading "
                    "stops with a one-line error.",
        ),
        io.Boolean.Input(
            "stored_products", default=False, optional=True, advanced=True,
            tooltip="Multiplies 8-bit weights as they are stored, with activations rounded to 8 bits too: faster, but "
                    "lossy. int8 on NVIDIA RTX 20 and newer, fp8 on RTX 40 and newer; otherwise loading stops with a "
                    "one-line error.",
        ),
    ]


def precision_input() -> Any:
    return io.Combo.Input(
        "precision", options=list(precision.CHOICES), default="auto",
        tooltip="auto: what this device runs best; fp16, as published, on GPUs that have it. fp32: "
                "exact, twice the memory. bf16: the range of fp32. fp16-safe: multiplies in fp16 but "
                "keeps the residual in fp32; not on a CPU.",
    )


def variant_input() -> Any:
    return io.Combo.Input(
        "variant", options=variant_choices(), default="auto", advanced=True,
        tooltip="Which variant of the model it is, if the files cannot tell. auto goes by the file's metadata, then by "
                "the names of file and folders, and says by which under the node.",
    )


def offload_input(limit: str = "") -> Any:
    costs = " ".join(f"{mode}: {cost}." for mode, cost in offloader.COSTS.items())
    return io.Combo.Input(
        "offload", options=list(offloader.CHOICES), default="auto", tooltip=f"auto: the fastest that fits. {costs}{limit}",
    )


def attention_input(whose: str = "", limit: str = "", choices: Sequence[str] = attention.CHOICES) -> Any:
    meanings = " ".join(f"{choice}: {attention.MEANINGS[choice]}." for choice in choices)
    return io.Combo.Input(
        "attention", options=list(choices), default="auto", optional=True, advanced=True,
        tooltip=f"Which kernel computes {whose}attention, for this pipeline only. {meanings}{limit}",
    )
