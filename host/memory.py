"""ComfyUI's word on devices, and room on them: other models are asked to leave before ours arrive."""

from __future__ import annotations

import comfy.model_management
import torch


def compute_device() -> torch.device:
    """The device ComfyUI computes on; asked at each use, since other packs change it."""
    return torch.device(comfy.model_management.get_torch_device())


def make_room(needed_bytes: int) -> None:
    """Let ComfyUI unload other models until ``needed_bytes`` and its own reserve are free."""
    device = compute_device()
    if device.type != "cpu":
        comfy.model_management.free_memory(needed_bytes + comfy.model_management.minimum_inference_memory(), device)
