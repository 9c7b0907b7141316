"""A ComfyUI pack for tests: what core's loaders hand on, in the widths of the tiny checkpoints."""

import hashlib
from types import SimpleNamespace
from typing import Any

import comfy.model_patcher
import comfy.ops
import comfy.sd
import comfy.supported_models as supported
import comfy.utils
import folder_paths
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


UNETS = {  # of the tiny checkpoints of MV-Adapter, in core's words
    "sdxl": {
        "channel_mult": [1, 1, 2], "num_res_blocks": [2] * 3, "transformer_depth": [0, 0, 1, 1, 2, 2],
        "transformer_depth_output": [0, 0, 0, 1, 1, 1, 2, 2, 2], "transformer_depth_middle": 2, "context_dim": 128,
        "adm_in_channels": 64 + 6 * 256, "num_classes": "sequential",
    },
    "sd21": {
        "channel_mult": [1, 1, 2, 2], "num_res_blocks": [2] * 4, "transformer_depth": [1] * 6 + [0, 0],
        "transformer_depth_output": [1] * 9 + [0] * 3, "transformer_depth_middle": 1, "context_dim": 64,
        "adm_in_channels": None,
    },
}  # fmt: skip
UNET = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 64, "num_head_channels": 64,
    "use_spatial_transformer": True, "use_linear_in_transformer": True, "use_temporal_attention": False,
    "legacy": False,
}  # fmt: skip
TEXT = {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 96, "num_hidden_layers": 3}
PICTURES = {
    "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32,
    "ch_mult": [1, 1, 2, 2], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip


class StandInCheckpoint:
    """MODEL, CLIP and VAE as CheckpointLoaderSimple makes them of a tiny file, whose widths core does not know."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL", "CLIP", "VAE"), "make", "testing"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The file in models/checkpoints, and its base."""
        return {"required": {"name": ("STRING", {}), "base": (list(UNETS),)}}

    def make(self, name: str, base: str) -> tuple[Any, Any, Any]:
        """Core's own classes, filled by core's own names."""
        path = folder_paths.get_full_path_or_raise("checkpoints", name)
        file = comfy.utils.load_torch_file(path)
        config = (supported.SDXL if base == "sdxl" else supported.SD20)({**UNET, **UNETS[base]})
        config.unet_config |= UNET | UNETS[base]
        config.set_inference_dtype(torch.float16, torch.float32)
        model = config.get_model(file, "model.diffusion_model.")
        unet = comfy.utils.state_dict_prefix_replace(dict(file), {"model.diffusion_model.": ""}, filter_keys=True)
        model.diffusion_model.load_state_dict(unet)
        options = {f"{each}_model_config": TEXT for each in ("clip_l", "clip_g", "clip_h")}
        target = config.clip_target()
        clip = comfy.sd.CLIP(target, model_options=options, state_dict=config.process_clip_state_dict(dict(file)))
        decoder = comfy.utils.state_dict_prefix_replace(dict(file), {"first_stage_model.": ""}, filter_keys=True)
        vae = comfy.sd.VAE(decoder, config={"params": {"ddconfig": PICTURES, "embed_dim": 4}})
        made = comfy.model_patcher.CoreModelPatcher(model, torch.device("cpu"), torch.device("cpu"))
        for patcher in (made, clip.patcher, vae.patcher):
            patcher.cached_patcher_init = (None, (path,))
        return made, clip, vae


class StandInWeights:
    """A hash of all weights of a pipeline that paints, by part."""

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "make", "testing", True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The pipeline."""
        return {"required": {"pipeline": ("ANYGPU_PAINT",)}}

    def make(self, pipeline: Any) -> dict[str, Any]:
        """Names, dtypes and bytes."""
        found = []
        for part in sorted(pipeline.parts.readers):
            whole = hashlib.sha256()
            for name, tensor in sorted(pipeline.parts.read(part).state_dict().items()):
                whole.update(f"{name} {tensor.dtype}".encode() + tensor.contiguous().numpy().tobytes())
            found.append(f"{part} {whole.hexdigest()}")
        return {"ui": {"text": found}}


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
    "StandInCheckpoint": StandInCheckpoint,
    "StandInClip": StandInClip,
    "StandInConditioning": StandInConditioning,
    "StandInVision": StandInVision,
    "StandInVoxels": StandInVoxels,
    "StandInWeights": StandInWeights,
}
