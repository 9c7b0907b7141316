"""Scenes about texturing under ComfyUI's memory manager."""

from pathlib import Path
from typing import Any

import comfy.model_management as management
import torch
from anygpu.host import memory_manager
from anygpu.host.casting import CastLayer
from anygpu.paint import texturing
from anygpu.paint.loading import PaintRequest, load_paint
from anygpu.paint.sampling.delight import DelightSettings
from anygpu.paint.sampling.painting import PaintSettings
from paint.shapes import box
from simulated import accelerator

from host.inside.device import bytes_on_device
from host.inside.sight import state

PICTURE = torch.rand(48, 64, 4, generator=torch.Generator().manual_seed(0))
SETTINGS = texturing.OneStep(
    PaintSettings(size=64, steps=2, seed=3),
    texturing.BakeSettings(texture_size=64, view_size=128),
    delight=DelightSettings(size=64, steps=2),
)


def loaded_for(folder: str, device: Any = None) -> Any:
    """A pipeline as the load node makes it; on the CPU without ComfyUI's manager where ``device`` says so."""
    request = PaintRequest(Path(folder), precision="fp32", device=device or memory_manager.compute_device())
    return (
        load_paint(request)
        if device
        else load_paint(request, None, memory_manager.make_room, memory_manager.offloader_on)
    )


def textured(paint: Any, delight: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Views and texture."""
    texture, painted, _ = texturing.textured(box(), [PICTURE], paint, delight, SETTINGS)
    return painted.views, texture.colour


def streamed(paint: str, delight: str) -> dict[str, Any]:
    """Texturing with room for everything, for 60 % of that, and for nothing: what differs from the CPU, and peaks."""
    wanted = textured(loaded_for(paint, "cpu"), loaded_for(delight, "cpu"))
    pipelines = loaded_for(paint), loaded_for(delight)
    found: dict[str, Any] = {"offload": repr(pipelines[0].offloader)}

    def run(name: str) -> None:
        accelerator.reset_peak()
        given = textured(*pipelines)
        found[name] = max(float((a - b).abs().max()) for a, b in zip(given, wanted, strict=True))
        found[f"{name} peak"] = accelerator.memory().peak_bytes

    run("full")
    management.unload_all_models()
    found["left"] = bytes_on_device()
    parts = [module for one in pipelines for module in one.parts.values()]
    found["classes"] = sum(isinstance(leaf, CastLayer) for module in parts for leaf in module.modules())
    with accelerator.limit(int(0.6 * found["full peak"])):
        run("tight")
    management.unload_all_models()
    with state(vram_state=management.VRAMState.NO_VRAM):
        run("none")
    found["refusals"] = accelerator.memory().refusals
    return found
