"""AnyGPU: diffusers video and 3D-texture pipelines in ComfyUI that run on any GPU."""

from __future__ import annotations

from typing import Any

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> Any:
    """The node extension, imported only when ComfyUI asks for it."""
    from .nodes import AnyGPUExtension

    return AnyGPUExtension()
