"""ComfyUI on the simulated accelerator: its questions about devices and memory get the simulated one's answers."""

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.model_management as management
import tiny
import torch
from anygpu.compat.checkpoints import unpacking
from anygpu.host import memory_manager
from anygpu.pipelines import stages
from anygpu.pipelines.base import FramePackSettings, ImageRequest, PromptRequest, SampleSettings, Silent
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from heavy import GREATER, build_heavy
from simulated import accelerator
from tiny import parts
from tiny.weights import randomise

from host.inside.sight import seen_by_comfyui

SIDE = 64  # pixels
# Modules of comfy-kitchen that keep their matrices on a device for good.
TABLES = (  # that comfy-kitchen keeps on the device
    ("comfy_kitchen.tensor.int8_utils", "_HADAMARD_CACHE"),
    ("comfy_kitchen.backends.eager.convrot_w4a4", "_HADAMARD_CACHE"),
    ("comfy_kitchen.backends.eager.quantization", "E2M1_LUT_CACHE"),
)
PICTURE = torch.rand(1, SIDE, SIDE, 3, generator=torch.Generator().manual_seed(0))
CASES: dict[str, tuple[tuple[str, ...], int, bool]] = {  # checkpoints, frames, whether it starts from a picture
    "ltx": (("ltx",), 9, False),
    "hunyuan_video": (("hunyuan_video",), 5, False),
    "hunyuan_video image": (("hunyuan_video_i2v",), 5, True),
    "hunyuan_video skyreels": (("skyreels", "hunyuan_video"), 5, True),
    "hunyuan_video_15": (("hunyuan_video_15",), 5, False),
    "hunyuan_video_15 image": (("hunyuan_video_15_i2v",), 5, True),
    "framepack": (("framepack", "hunyuan_video", "siglip"), 5, True),
    "mochi": (("mochi",), 7, False),
}
_folder: list[Path] = []
_on_host: dict[Any, Any] = {}


def ready(tiny_folder: Path) -> str:
    """Why nothing can be played here; empty where it can."""
    _folder[:] = [tiny_folder]
    return accelerator.reason() or ""


def played(scene: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """What a scene returns, on a fresh device, in inference mode as ComfyUI runs its nodes.

    Raises:
        AssertionError: the scene leaves something on the device, which a later one would be blamed for.
    """
    with accelerator.fresh() as device, seen_by_comfyui(device), torch.inference_mode():
        before = bytes_on_device()
        try:
            found = scene(**arguments)
        finally:
            management.unload_all_models()
            for module, table in TABLES:
                getattr(sys.modules.get(module), table, {}).clear()
            unpacking._table.cache_clear()
            gc.collect()
        assert bytes_on_device() <= before, f"{bytes_on_device() - before} bytes stay on the device"
        return found


def loaded_for(name: str, precision: str = "fp32", device: Any = None, heavy: bool = False, **chosen: Any) -> Pipeline:
    """The pipeline of a case, as the load node makes it; on the CPU without ComfyUI's manager where device says so.

    Args:
        heavy: with weights that outweigh the activations by far, as published ones do.
    """
    paths = [
        heavy_folder(checkpoint) if heavy and checkpoint in GREATER else folder_of(checkpoint)
        for checkpoint in CASES[name][0]
    ]
    base, encoder = (*paths[1:], None, None)[:2]
    request = LoadRequest(
        paths[0], base, encoder, precision=precision, device=device or memory_manager.compute_device(), **chosen
    )
    return load(request) if device else load(request, None, memory_manager.make_room, memory_manager.offloader_on)


def folder_of(checkpoint: str) -> Path:
    """Where a tiny checkpoint is, built unless it is there; SkyReels as Skywork publishes it, a transformer alone."""
    if checkpoint != "skyreels":
        return tiny.build(checkpoint, _folder[0])
    folder = _folder[0] / "SkyReels-V1-Hunyuan-I2V"
    if not folder.is_dir():
        transformer = parts.hunyuan_transformer(in_channels=32, out_channels=16, guidance_embeds=True)
        randomise(transformer, 3)
        transformer.save_pretrained(folder)
    return folder


def heavy_folder(checkpoint: str) -> Path:
    """Where a heavy checkpoint is, built unless it is there."""
    return build_heavy(checkpoint, _folder[0])


def encoded(pipeline: Pipeline, name: str, progress: Any = None, device: Any = "cpu") -> tuple[Any, Any]:
    """Prompt and picture of a case.

    Args:
        device: where the picture is: on the GPU under ComfyUI's ``--gpu-only``.
    """
    progress, image, picture = progress or Silent(), None, PICTURE.to(device)
    if CASES[name][2]:
        image = stages.encode_image(pipeline, ImageRequest(picture, SIDE, SIDE), "stretch", progress)
    looks = "image" in pipeline.spec.recipes.effective
    request = PromptRequest("a red fox", "blurry", image=picture if CASES[name][2] and looks else None)
    return stages.encode_prompt(pipeline, request, progress), image


def sampled(pipeline: Pipeline, name: str, progress: Any = None, device: Any = "cpu", **chosen: Any) -> Any:
    """Latents of a case."""
    progress = progress or Silent()
    prompt, image = encoded(pipeline, name, progress, device)
    settings = SampleSettings(SIDE, SIDE, CASES[name][1], **{"steps": 2, "seed": 3, "cfg": 2.0, **chosen})
    if pipeline.family == "framepack":
        framepack = FramePackSettings(CASES[name][1] / 30, window=2)
        return stages.sample_framepack(pipeline, prompt, image, settings, framepack, progress)
    return stages.sample(pipeline, prompt, image, settings, progress)


def rendered(
    pipeline: Pipeline, name: str, progress: Any = None, device: Any = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and frames of one short run; ``device`` is where pictures and latents come from."""
    latents = sampled(pipeline, name, progress, device)
    given = replace(latents, samples=latents.samples.to(device))
    return latents.samples, stages.decode(pipeline, given, progress or Silent())


def on_host(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What the CPU gives without ComfyUI's manager, in fp32."""
    if name not in _on_host:
        _on_host[name] = rendered(loaded_for(name, device="cpu"), name)
    return _on_host[name]


def distance(found: tuple[torch.Tensor, torch.Tensor], name: str) -> float:
    """The largest difference from the CPU's latents and frames."""
    return max(float((a - b).abs().max()) for a, b in zip(found, on_host(name), strict=True))


def bytes_on_device() -> int:
    """What the simulated device holds now."""
    return accelerator.memory().allocated_bytes
