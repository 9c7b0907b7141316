"""The same run as others do it: diffusers' own ways to offload a pipeline, for tables that compare bytes and peaks."""

from typing import Any

import torch

WAYS = ("none", "model", "group", "sequential")


def offloaded(pipe: Any, way: str, device: torch.device) -> None:
    """Make a diffusers pipeline run on ``device`` in one of :data:`WAYS`; group is by block, the VAE's by layer."""
    if way == "none":
        pipe.to(device)
    elif way == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif way == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    else:
        from diffusers.hooks import apply_group_offloading

        by_block = {"offload_type": "block_level", "num_blocks_per_group": 1}
        for part in ("transformer", "text_encoder", "vae"):
            kind: dict[str, Any] = {"offload_type": "leaf_level"} if part == "vae" else by_block
            apply_group_offloading(
                getattr(pipe, part), onload_device=device, offload_device=torch.device("cpu"), **kind
            )
