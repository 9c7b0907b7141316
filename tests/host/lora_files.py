"""LoRA files for a running ComfyUI: three layers of the first block of a tiny HunyuanVideo."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from host.server import Server

WIDTH, RANK = 32, 4


def write(server: Server, name: str) -> Path:
    """A file among the LoRAs, with kohya's keys and an alpha per layer."""
    rng, tensors = np.random.default_rng(0), {}
    for index, layer in enumerate(("to_q", "to_k", "to_v")):
        base = f"lora_unet_transformer_blocks_0_attn_{layer}"
        tensors[f"{base}.lora_down.weight"] = rng.standard_normal((RANK, WIDTH)).astype(np.float32)
        tensors[f"{base}.lora_up.weight"] = rng.standard_normal((WIDTH, RANK)).astype(np.float32)
        tensors[f"{base}.alpha"] = np.array(index + 1, dtype=np.float32)
    path = server.base / "models" / "loras" / name
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path)
    return path


def install(server: Server, prompt: dict[str, dict[str, Any]]) -> None:
    """Give the LoRA nodes of a prompt that name no file one each, and write the files."""
    nodes = [node["inputs"] for node in prompt.values() if node["class_type"] == "AnyGPULoRA"]
    for inputs, name in zip(nodes, ("style.safetensors", "motion.safetensors"), strict=False):
        inputs["lora"] = name if inputs["lora"] == "none" else inputs["lora"]
        write(server, inputs["lora"])
