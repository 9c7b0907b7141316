"""How ComfyUI comes to take the simulated accelerator for its GPU. Imports nothing of the pack."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comfy.model_management as management
import torch
from simulated import accelerator

RESERVE = 1 << 16  # bytes that ComfyUI keeps free here: as small beside these models as 0.8 GB beside real ones


@contextmanager
def state(**values: Any) -> Iterator[None]:
    """Some of ComfyUI's own settings, as its flags would set them."""
    before = {name: getattr(management, name) for name in values}
    for name, value in values.items():
        setattr(management, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(management, name, value)


@contextmanager
def seen_by_comfyui(device: torch.device) -> Iterator[None]:
    """ComfyUI takes ``device`` for its GPU, and its free memory for what is free."""

    def free(dev: Any = None, torch_free_too: bool = False) -> Any:
        kind = device if dev is None else torch.device(dev)
        found = torch.acc.mem_get_info(kind)[0] if kind.type == accelerator.NAME else 8 << 30
        return (found, 0) if torch_free_too else found

    def total(dev: Any = None, torch_total_too: bool = False) -> Any:
        found = torch.acc.mem_get_info(device)[1]
        return (found, found) if torch_total_too else found

    answers = {
        "get_torch_device": lambda: device,
        "get_free_memory": free,
        "get_total_memory": total,
        "minimum_inference_memory": lambda: RESERVE,
        "extra_reserved_memory": lambda: 0,
        "soft_empty_cache": lambda force=False: None,
        "cpu_state": management.CPUState.GPU,
        "lora_compute_dtype": lambda device: torch.float32,
        "vram_state": management.VRAMState.NORMAL_VRAM,
        "current_loaded_models": management.current_loaded_models,
        "DISABLE_SMART_MEMORY": False,
    }
    with state(**answers):
        yield
