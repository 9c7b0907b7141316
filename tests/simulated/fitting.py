"""Heavy pipelines on the simulated device: how they are loaded, run and measured, for tests and for docs/memory.md."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny
import torch
from anygpu.compat.memory.hooks import own_tensors
from anygpu.compat.memory.standalone import StandaloneOffloader
from anygpu.pipelines.forecast.memory import forecast
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.sizes import Size
from heavy import build_heavy

from simulated.test_families import CASES, rendered

FAMILIES = ("ltx", "hunyuan_video", "hunyuan_video_15", "framepack", "mochi")
SHARES = (100, 60, 40, 25, 15)
TOKENS = {"ltx": 7, "hunyuan_video": 5, "hunyuan_video_15": 9, "framepack": 5, "mochi": 7}  # of the prompt of a run


def size_of(family: str) -> Size:
    """The size of :func:`run`, which no fit was made at."""
    return Size(64, 64, CASES[family].frames, True, 2, TOKENS[family])


def heavy(family: str, folder: Path, device: Any, offload: str = "auto", **terms: Any) -> Pipeline:
    """The heavy pipeline of a family."""
    model, base, encoder = build_heavy(family, folder), None, None
    if family == "framepack":
        base, encoder = build_heavy("hunyuan_video", folder), tiny.build("siglip", folder)
    return load(LoadRequest(model, base, encoder, precision="fp32", offload=offload, device=device, **terms))


def run(pipeline: Pipeline, progress: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and frames of one short run."""
    return rendered(pipeline, CASES[pipeline.family], progress)


class LeafByLeaf(StandaloneOffloader):
    """The offloader that a person makes by hand of accelerate alone: each layer comes for its forward and goes.

    An image encoder comes as a whole, since its pooling reads weights that hooks on its layers do not see.
    """

    evicts = True  # nothing is planned by what is free

    @contextmanager
    def hold(self, part: str, activation_bytes: int = 0, progress: Any = None) -> Iterator[torch.nn.Module]:
        """The part with accelerate's hooks on."""
        from accelerate import cpu_offload
        from accelerate.hooks import remove_hook_from_module

        module = self.parts.read(part)
        if part == "image_encoder":
            yield module.to(self.device)
            module.to("cpu")
            return
        cpu_offload(module, self.device, offload_buffers=True)
        try:
            with own_tensors(module):  # a VAE's mean and deviation are read outside of its forward
                yield module
        finally:
            remove_hook_from_module(module, recurse=True)

    def release(self, part: str) -> None:
        """Nothing: it is on the host."""

    def reduce_memory(self, part: str, *beside: str) -> str:
        """Nothing: it has the least already."""
        return ""


def by_hand(family: str, folder: Path, device: torch.device) -> Pipeline:
    """The heavy pipeline of a family, held leaf by leaf by accelerate, without a plan or a forecast of ours."""
    pipeline = heavy(family, folder, device, "none")
    return replace(pipeline, plan=replace(pipeline.plan, offloader=LeafByLeaf(pipeline.parts, device, "by hand")))


def peak(pipeline: Pipeline) -> int:
    """The highest memory of a pipeline's stages so far."""
    return max(cost.peak_bytes for cost in pipeline.offloader.memory_stats.stages)


def full_offloader(pipeline: Pipeline) -> int:
    """Bytes of a run with all parts on the device: their weights and the largest activations."""
    weights = sum(part.total for part in pipeline.weights.values())
    return weights + max(need.activations for need in forecast(pipeline, size_of(pipeline.family), "none").stages)


def forget(pipeline: Pipeline) -> None:
    """Leave the device and host memory."""
    for part in list(pipeline.parts):
        pipeline.offloader.release(part)
        pipeline.parts.drop(part)
    gc.collect()
