"""Writes names and shapes of published checkpoints to `shapes.json`, from the classes that read the files elsewhere.

    PYTHONPATH=$COMFYUI_PATH python tests/published/record.py
    python tests/published/record.py --framepack CLONE_OF_FRAMEPACK

ComfyUI's classes give what it reads itself: the releases, and its own repackaging, which renames nothing in these
models. FramePack's transformer is the publisher's own class, lllyasviel/FramePack. No weights are needed: the modules
are built without memory. `tests/published/__init__.py` makes sparse files of them.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

OUT = Path(__file__).with_name("shapes.json")
NUMBER = re.compile(r"\.(\d+)\.")


def packed(shapes: Mapping[str, Iterable[int]]) -> dict[str, list[Any]]:
    """``shapes`` with the first number of each name as ``#``: name to [shape, first and last number, ...]."""
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for name, shape in shapes.items():
        match = NUMBER.search(name)
        key = name if match is None else f"{name[: match.start()]}.#.{name[match.end() :]}"
        groups.setdefault((key, tuple(shape)), []).append(-1 if match is None else int(match[1]))
    rows: dict[str, list[Any]] = {}
    for (key, shape), numbers in groups.items():
        spans: list[list[int]] = []
        for number in sorted(numbers):
            if spans and number == spans[-1][1] + 1:
                spans[-1][1] = number
            else:
                spans.append([number, number])
        rows.setdefault(key, []).append([list(shape), [] if numbers == [-1] else spans])
    return rows


def shapes_of(make: Callable[[], Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a module that is built without memory."""
    with torch.device("meta"):
        module = make()
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def core_models() -> dict[str, Callable[[], Any]]:
    """The transformers and VAEs as ComfyUI's classes have them, with the settings that its detection finds."""
    from comfy.cli_args import args

    args.cpu = True
    import comfy.ops
    from comfy.ldm.genmo.joint_model.asymm_models_joint import AsymmDiTJoint
    from comfy.ldm.genmo.vae.model import VideoVAE as MochiVAE
    from comfy.ldm.hunyuan_video.model import HunyuanVideo
    from comfy.ldm.lightricks.av_model import LTXAVModel
    from comfy.ldm.lightricks.model import LTXVModel
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE as LtxVAE
    from comfy.ldm.wan.model import WanModel

    ops = {"operations": comfy.ops.disable_weight_init, "dtype": torch.bfloat16, "device": "meta"}

    def hunyuan(**changed: Any) -> Callable[[], Any]:
        first = {
            "image_model": "hunyuan_video", "in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2],
            "vec_in_dim": 768, "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24,
            "depth": 20, "depth_single_blocks": 40, "axes_dim": [16, 56, 56], "theta": 256, "qkv_bias": True,
            "guidance_embed": True, "byt5": False, "meanflow": False, "use_cond_type_embedding": False,
            "vision_in_dim": None, "meanflow_sum": False,
        }  # fmt: skip
        return lambda: HunyuanVideo(**{**first, **changed}, **ops)

    fifteen = {
        "in_channels": 65, "out_channels": 32, "patch_size": [1, 1, 1], "vec_in_dim": None, "context_in_dim": 3584,
        "hidden_size": 2048, "num_heads": 16, "depth": 54, "depth_single_blocks": 0, "guidance_embed": False,
        "byt5": True, "use_cond_type_embedding": True, "vision_in_dim": 1152, "meanflow_sum": True,
    }  # fmt: skip
    mochi = {
        "depth": 48, "patch_size": 2, "num_heads": 24, "hidden_size_x": 3072, "hidden_size_y": 1536,
        "mlp_ratio_x": 4.0, "mlp_ratio_y": 4.0, "learn_sigma": False, "in_channels": 12, "qk_norm": True,
        "qkv_bias": False, "out_bias": True, "attn_drop": 0.0, "patch_embed_bias": True, "posenc_preserve_area": True,
        "timestep_mlp_bias": True, "attend_to_padding": False, "timestep_scale": 1000.0, "use_t5": True,
        "t5_feat_dim": 4096, "t5_token_length": 256, "rope_theta": 10000.0,
    }  # fmt: skip
    wan = {
        "model_type": "t2v", "dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 30, "in_dim": 16,
        "out_dim": 16,
    }  # fmt: skip
    return {
        "ltx 2B": lambda: LTXVModel(num_layers=28, attention_head_dim=64, cross_attention_dim=2048, **ops),
        "ltx 13B": lambda: LTXVModel(num_layers=48, attention_head_dim=128, cross_attention_dim=4096, **ops),
        "ltx-2": lambda: LTXAVModel(num_layers=48, attention_head_dim=128, cross_attention_dim=4096, **ops),
        "hunyuan_video": hunyuan(),
        "hunyuan_video i2v 33": hunyuan(in_channels=33, guidance_embed=False),
        "skyreels i2v": hunyuan(in_channels=32),
        "hunyuan_video_15": hunyuan(**fifteen),
        "hunyuan_video_15 meanflow": hunyuan(**fifteen, meanflow=True),
        "hunyuan_video_15 sr": hunyuan(**{**fifteen, "in_channels": 98, "meanflow": True}),
        "mochi": lambda: AsymmDiTJoint(**mochi, **ops),
        "mochi vae": lambda: MochiVAE(),
        "wan": lambda: WanModel(**wan, **ops),
        "ltx vae 0.9.0": lambda: LtxVAE(version=0),
        "ltx vae 0.9.1": lambda: LtxVAE(version=1),
        "ltx vae 0.9.5": lambda: LtxVAE(version=2),
    }


def framepack(clone: Path) -> Callable[[], Any]:
    """FramePack's transformer, of the publisher's own class."""
    sys.path.insert(0, str(clone))
    from diffusers_helper.models.hunyuan_video_packed import HunyuanVideoTransformer3DModelPacked as Packed

    settings = {
        "in_channels": 16, "out_channels": 16, "num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 20,
        "num_single_layers": 40, "num_refiner_layers": 2, "mlp_ratio": 4.0, "patch_size": 2, "patch_size_t": 1,
        "qk_norm": "rms_norm", "guidance_embeds": True, "text_embed_dim": 4096, "pooled_projection_dim": 768,
        "rope_theta": 256.0, "rope_axes_dim": (16, 56, 56), "has_image_proj": True, "image_proj_dim": 1152,
        "has_clean_x_embedder": True,
    }  # fmt: skip
    return lambda: Packed(**settings)


def main() -> None:
    """Write the shapes of all models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framepack", type=Path)
    chosen = parser.parse_args()
    sys.argv = sys.argv[:1]  # ComfyUI reads it too
    makes = {"framepack": framepack(chosen.framepack)} if chosen.framepack else core_models()
    recorded = json.loads(OUT.read_text()) if OUT.is_file() else {}
    for name, make in makes.items():
        recorded[name] = packed(shapes_of(make))
    OUT.write_text(json.dumps(dict(sorted(recorded.items())), separators=(",", ":")).replace('},"', '},\n"') + "\n")


if __name__ == "__main__":
    main()
