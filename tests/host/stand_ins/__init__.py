"""A ComfyUI pack for tests: what core's text and vision loaders hand on, in the widths of the tiny checkpoints."""

from types import SimpleNamespace
from typing import Any

import comfy.model_patcher
import comfy.ops
import comfy.sd
import torch
from comfy.text_encoders.t5 import T5


class StandInConditioning:
    """CONDITIONING as CLIPTextEncode makes it: states of a few tokens, and a pooled vector."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("CONDITIONING",), "make", "testing"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """A seed for the values, and the widths."""
        numbers = ("INT", {"default": 0, "min": 0, "max": 9999})
        return {"required": dict.fromkeys(("seed", "tokens", "width", "pooled"), numbers)}

    def make(self, seed: int, tokens: int, width: int, pooled: int) -> tuple[Any]:
        """One prompt; ``pooled`` 0 means that there is no pooled vector."""
        generator = torch.Generator().manual_seed(seed)
        extra = {"pooled_output": torch.randn(1, pooled, generator=generator)} if pooled else {}
        return ([[torch.randn(1, tokens, width, generator=generator), extra]],)


T5_CONFIG = {
    "d_ff": 64, "d_kv": 16, "d_model": 32, "dense_act_fn": "gelu_pytorch_tanh", "is_gated_act": True,
    "num_heads": 2, "num_layers": 2, "vocab_size": 99, "model_type": "t5", "layer_norm_epsilon": 1e-6,
}  # fmt: skip


class StandInClip:
    """CLIP as CLIPLoader makes it, with a tiny T5 that holds no words."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("CLIP",), "make", "testing"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Nothing."""
        return {"required": {}}

    def make(self) -> tuple[Any]:
        """The text encoder without a tokenizer, on the CPU."""
        network = T5(dict(T5_CONFIG), torch.float16, "cpu", comfy.ops.manual_cast)
        for tensor in network.parameters():
            torch.nn.init.constant_(tensor, 0.1)
        clip = comfy.sd.CLIP(no_init=True)
        clip.cond_stage_model, clip.tokenizer = network.eval(), None
        clip.patcher = comfy.model_patcher.CoreModelPatcher(network, torch.device("cpu"), torch.device("cpu"))
        clip.layer_idx = clip.apply_hooks_to_conds = None
        clip.tokenizer_options, clip.use_clip_schedule = {}, False
        return (clip,)


class StandInVision:
    """CLIP_VISION_OUTPUT as CLIPVisionEncode makes it."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("CLIP_VISION_OUTPUT",), "make", "testing"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """A seed for the values, and the width."""
        numbers = ("INT", {"default": 0, "min": 0, "max": 9999})
        return {"required": dict.fromkeys(("seed", "tokens", "width"), numbers)}

    def make(self, seed: int, tokens: int, width: int) -> tuple[Any]:
        """States of one picture."""
        generator = torch.Generator().manual_seed(seed)
        return (SimpleNamespace(last_hidden_state=torch.randn(1, tokens, width, generator=generator)),)


class StandInVoxels:
    """VOXEL as core's Hunyuan3D decoder makes it: a ball, and beside it a speck that cleaning takes out."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("VOXEL",), "make", "testing"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The cells along each side."""
        return {"required": {"cells": ("INT", {"default": 24, "min": 8, "max": 256})}}

    def make(self, cells: int) -> tuple[Any]:
        """Cells above 0.6 are inside."""
        axis = torch.linspace(-1, 1, cells)
        distance = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij")).norm(dim=0)
        grid = (1.2 - distance).clamp(0, 1)
        grid[1, 1, 1] = 1
        return (SimpleNamespace(data=grid[None]),)


NODE_CLASS_MAPPINGS = {
    "StandInClip": StandInClip,
    "StandInConditioning": StandInConditioning,
    "StandInVision": StandInVision,
    "StandInVoxels": StandInVoxels,
}
