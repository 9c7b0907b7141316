"""Tiny files that core's own loaders read: a video model whose residual leaves fp16's range, and its VAE."""

import json
from pathlib import Path
from typing import Any

import comfy.ldm.wan.vae as wan
import torch
from safetensors.torch import save_file

from host.inside import core_tiny, core_tiny_vaes

NAME, MODEL, VAE = "Wan 2.1", "tiny_wan.safetensors", "tiny_wan_vae.safetensors"
PEAK = 3e5
AS_LOADED = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}  # which core's loader takes for granted


def write(models: str) -> dict[str, Any]:
    """Write both into ComfyUI's folder of models; their names, and the width of the text."""
    folder_of = Path(models)
    model = core_tiny.made(NAME)
    core_tiny.louder(model, NAME, PEAK)
    case = core_tiny.CASES[NAME]
    config = {name: value for name, value in case.config.items() if name != "window_size"}
    weights = {name: tensor.contiguous() for name, tensor in model.model.diffusion_model.state_dict().items()}
    vae = wan.WanVAE(**{**core_tiny_vaes.WAN, **AS_LOADED}, image_channels=3, conv_out_channels=3)
    core_tiny.fill(vae)
    for folder, name, tensors, metadata in (
        ("diffusion_models", MODEL, weights, {"config": json.dumps({"transformer": config})}),
        ("vae", VAE, {name: tensor.half().contiguous() for name, tensor in vae.state_dict().items()}, {}),
    ):
        (folder_of / folder).mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder_of / folder / name, metadata)
    assert torch.isfinite(next(iter(weights.values()))).all()
    return {"model": MODEL, "vae": VAE, "width": case.width}
