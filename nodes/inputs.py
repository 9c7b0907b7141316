"""The sockets, and the inputs that several nodes share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..compat.checkpoints import packed
from ..compat.device import precision
from ..compat.errors import json_file
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
GLB_OUTPUT = "The textured mesh as a GLB with its receipt, for core's Save 3D Model. AnyGPU Replay paints it again."
SEED_LIMIT = 2**64 - 1
TEXTS = json_file(Path(__file__).with_name("tooltips.json"))  # in English, of what no other table words; locales/ has the others
DEVICES = (  # input, what it places, and what the CPU costs
    ("transformer_device", "the transformer computes", ""),
    ("text_device", "the text encoders compute", " cpu: they need no GPU memory, and take seconds to minutes per prompt."),
    ("vae_device", "the VAE computes", " cpu: decoding needs no GPU memory, and is very slow."),
)


def schema(**given: Any) -> io.Schema:
    """A node's schema with its texts, our category and its hidden id, unless ``given`` has others. All inputs from the
    first advanced one on become optional, so that an API export still runs after an input is added."""
    inputs, texts = given.get("inputs", []), TEXTS.get(given["node_id"], {})
    tooltips = TEXTS["shared"]["inputs"] | texts.get("inputs", {})
    first = next((index for index, each in enumerate(inputs) if getattr(each, "advanced", None)), len(inputs))
    for each in inputs:
        each.tooltip = each.tooltip or tooltips[each.id]  # on a KeyError, add the input to nodes/tooltips.json
    for each in inputs[first:]:
        each.optional = True
    of_node = {name: text for name, text in texts.items() if name != "inputs"}
    return io.Schema(**{"category": CATEGORY, "hidden": [io.Hidden.unique_id], **of_node, **given})


mesh_schema = partial(schema, category="3d/AnyGPU")


def textured_outputs(**more: Any) -> list[Any]:
    """The outputs mesh, base_color, ``more`` (name -> socket), and the textured mesh as a GLB."""
    kinds = {"mesh": io.Mesh, "base_color": io.Image, **more}
    file = io.File3DGLB.Output(display_name="model_3d", tooltip=GLB_OUTPUT)
    return [*(kind.Output(display_name=name) for name, kind in kinds.items()), file]


def seed_input() -> Any:
    return io.Int.Input("seed", default=0, min=0, max=SEED_LIMIT, control_after_generate=True)


def size_inputs(width: int = 0, height: int = 0) -> list[Any]:
    return [io.Int.Input(side, default=size, min=0, max=4096, step=16) for side, size in (("width", width), ("height", height))]


def core_inputs() -> list[Any]:
    return [io.Conditioning.Input("negative", optional=True), io.Sigmas.Input("sigmas", optional=True)]


def sampling_inputs() -> list[Any]:
    """The inputs that both sample nodes share, in the order of both."""
    return [
        io.Int.Input("steps", default=0, min=0, max=1000),
        io.Float.Input("cfg", default=0.0, min=0.0, max=30.0, step=0.1),
        io.Float.Input("guidance", default=0.0, min=0.0, max=30.0, step=0.1),
        seed_input(),
        io.Combo.Input("scheduler", options=list(SCHEDULERS), default="auto", advanced=True),
        io.Float.Input("shift", default=0.0, min=0.0, max=100.0, step=0.1, advanced=True),
        io.Float.Input("cfg_start", default=0.0, min=0.0, max=1.0, step=0.01, advanced=True),
        io.Float.Input("cfg_end", default=1.0, min=0.0, max=1.0, step=0.01, advanced=True),
    ]


def batch_input() -> Any:
    return io.Int.Input("batch_size", default=1, min=1, max=MOST_VIDEOS, optional=True, advanced=True)


def speed_inputs() -> list[Any]:
    """Optional inputs of both nodes that load a video pipeline, before :func:`weight_inputs`."""
    return [
        io.Combo.Input(
            "kernels", options=list(fused.CHOICES), default="auto", optional=True, advanced=True,
            tooltip="Fused kernels: norms, rotary embeddings and gated sums of the transformer's blocks, and norm, "
                    "SiLU and padding in the VAE's decoder, take one pass each. Results differ only by rounding. "
            + " ".join(f"{choice}: {meaning}." for choice, meaning in fused.MEANINGS.items()),
        ),
        io.Boolean.Input("compile", default=False, optional=True, advanced=True),
        io.Combo.Input(
            "compile_mode", options=list(compiling.MODES), default="default", optional=True, advanced=True,
            tooltip="; ".join(f"{mode}: {meaning}" for mode, meaning in compiling.MODES.items()) + ". Only with compile.",
        ),
        io.Combo.Input(
            "compile_dynamic", options=list(compiling.DYNAMIC), default="text", optional=True, advanced=True,
            tooltip="; ".join(f"{choice}: {meaning}" for choice, meaning in compiling.DYNAMIC.items()) + ". Only with compile.",
        ),
        io.Int.Input("compile_cache_size", default=compiling.CACHE_SIZE, min=1, max=compiling.MOST_CACHED, optional=True, advanced=True),
        io.Boolean.Input("compile_vae", default=False, optional=True, advanced=True),
        io.Boolean.Input("profile", default=False, optional=True, advanced=True),
    ]


def weight_inputs() -> list[Any]:
    """The last inputs of both nodes that load a video pipeline: weights, devices of parts, memory kept free, sums."""
    meanings = " ".join(f"{choice}: {meaning}." for choice, meaning in packed.MEANINGS.items())
    return [
        io.Combo.Input(
            "weights", options=list(packed.CHOICES), default="auto", optional=True, advanced=True,
            tooltip="How the transformer's weights are stored in memory, independent of the dtype that computes. " + meanings
            + " HunyuanVideo takes 24 GB as bf16, about 15 GB as fp8 or int8. All of them work in every offload mode.",
        ),
        io.Combo.Input("text_weights", options=list(packed.CHOICES), default="auto", optional=True, advanced=True),
        *(
            io.Combo.Input(
                name, options=list(offloader.DEVICE_CHOICES), default="auto", optional=True, advanced=True,
                tooltip=f"Where {computes}. auto: ComfyUI's device, or a second card where that helps.{cpu}",
            )
            for name, computes, cpu in DEVICES
        ),
        io.Float.Input("keep_free_gb", default=0.0, min=0.0, max=1023.0, step=0.1, optional=True, advanced=True),
        io.Boolean.Input("fp16_accumulation", default=False, optional=True, advanced=True),
        io.Boolean.Input("stored_products", default=False, optional=True, advanced=True),
    ]


def precision_input() -> Any:
    return io.Combo.Input("precision", options=list(precision.CHOICES), default="auto")


def variant_input() -> Any:
    return io.Combo.Input("variant", options=variant_choices(), default="auto", advanced=True)


def offload_input(limit: str = "") -> Any:
    costs = " ".join(f"{mode}: {cost}." for mode, cost in offloader.COSTS.items())
    tooltip = f"auto: {offloader.HOSTED} unless compile is on. {costs}{limit}"
    return io.Combo.Input("offload", options=list(offloader.CHOICES), default="auto", tooltip=tooltip)


def attention_input(whose: str = "", limit: str = "", choices: Sequence[str] = attention.CHOICES) -> Any:
    """The choice of an attention kernel; ``whose`` ("the transformer's ") and ``limit``, a last sentence, go into its tooltip."""
    meanings = " ".join(f"{choice}: {attention.MEANINGS[choice]}." for choice in choices)
    return io.Combo.Input(
        "attention", options=list(choices), default="auto", optional=True, advanced=True,
        tooltip=f"Which kernel computes {whose}attention, for this pipeline only. {meanings}{limit}",
    )
