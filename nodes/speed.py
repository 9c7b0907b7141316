"""The node that skips work between steps, and the inputs about speed that loading nodes share."""

from __future__ import annotations

from typing import Any

from ..compat.transforms import compile as compiling
from ..compat.transforms import fused, step_cache
from ..compat.transforms.compile import CompileSettings
from ..compat.transforms.step_cache import StepCacheSettings
from ..host import saved
from ..host.api import io
from ..host.progress import NodeProgress
from ..pipelines.profiling import Profile
from ..pipelines.speed import SpeedRequest, with_step_cache
from .sockets import CATEGORY, Pipeline


def speed_inputs() -> list[Any]:
    """The optional inputs of a loading node, in this order, last."""
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


def lossy_inputs() -> list[Any]:
    """The optional inputs of a loading node that change the video, after all others."""
    return [
        io.Boolean.Input(
            "fp16_accumulation", default=False, optional=True, advanced=True,
            tooltip="Sums of fp16 products in fp16, in AnyGPU's sample nodes: up to twice as fast on GeForce, lossy, can "
            "overflow. Only NVIDIA with precision fp16 or fp16-safe; anywhere else it is one line when you load.",
        ),
    ]


def speed_request(
    kernels: str = "auto", compile: bool = False, compile_mode: str = "default", compile_dynamic: str = "text",
    compile_cache_size: int = compiling.CACHE_SIZE, compile_vae: bool = False, profile: bool = False,
    fp16_accumulation: bool = False,
) -> SpeedRequest:
    """What those inputs ask for."""
    settings = CompileSettings(compile_mode, compile_dynamic, compile_cache_size, compile_vae) if compile else None
    folder, name = saved.target_folder("profiles/AnyGPU")
    traces = Profile(folder / f"{name}.json") if profile else None
    return SpeedRequest(kernels, settings, traces, fp16_accumulation)


class StepCache(io.ComfyNode):
    """Skip work between steps."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's inputs and outputs."""
        return io.Schema(
            node_id="AnyGPUStepCache",
            display_name="AnyGPU Step Cache",
            category=CATEGORY,
            description="Skips parts of steps that change little, for all samplings of this pipeline that follow. Faster and "
            "lossy: the video changes. How much was skipped is said under the sample node.",
            search_aliases=["TeaCache", "FasterCache", "first block cache", "FBCache", "TaylorSeer", "pyramid attention broadcast"],
            inputs=[
                Pipeline.Input("pipeline", tooltip="From AnyGPU Load Pipeline. It stays as it is: only the output has the cache."),
                io.Combo.Input(
                    "preset", options=list(step_cache.PRESET_CHOICES), default="balanced",
                    tooltip="off: every step is whole. "
                    + " ".join(f"{name}: threshold {t:g}, interval {n}." for name, (t, n) in step_cache.PRESETS.items())
                    + " custom: the two numbers below.",
                ),
                io.Combo.Input(
                    "kind", options=list(step_cache.KINDS), default="auto",
                    tooltip=" ".join(f"{kind}: {meaning}." for kind, meaning in step_cache.KINDS.items())
                    + " A kind that does nothing on the loaded family is one line when you run it.",
                ),
                io.Float.Input(
                    "threshold", default=0.1, min=0.0, max=1.0, step=0.01,
                    tooltip="custom, first_block: relative change of the first block's result below which the rest is skipped.",
                ),
                io.Int.Input(
                    "interval", default=3, min=2, max=10, tooltip="custom, taylor and pyramid: every so many steps are computed.",
                ),
                io.Float.Input(
                    "start_percent", default=0.0, min=0.0, max=1.0, step=0.01, advanced=True,
                    tooltip="Share of the steps after which it may skip.",
                ),
                io.Float.Input(
                    "end_percent", default=1.0, min=0.0, max=1.0, step=0.01, advanced=True,
                    tooltip="Share of the steps after which every step is whole again.",
                ),
                io.Combo.Input(
                    "cache_device", options=list(step_cache.DEVICES), default="device", advanced=True,
                    tooltip="Where results are kept between steps. cpu: costs copies each step, saves memory on the device.",
                ),
            ],
            outputs=[Pipeline.Output(display_name="pipeline")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, pipeline: Any, preset: str, kind: str, threshold: float, interval: int, start_percent: float,
        end_percent: float, cache_device: str,
    ) -> io.NodeOutput:
        """The pipeline with the cache."""
        progress = NodeProgress(cls.hidden.unique_id)
        asked = StepCacheSettings(kind, threshold, interval, start_percent, end_percent, cache_device)
        found = with_step_cache(pipeline, preset, asked)
        progress.finish(f"step cache {found.step_cache or 'off'}")
        return io.NodeOutput(found)
