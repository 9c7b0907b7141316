"""Tiny random MV-Adapter files and the Stable Diffusion checkpoints under them: folders as diffusers saves them, and
single files with the names of the original code.
"""

import copy
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import vocabulary
from tiny.weights import randomise
from torch import Tensor

WIDTHS = {"sdxl": (64, 64, 128), "sd21": (64, 64, 128, 128)}
DEPTHS = {"sdxl": (1, 1, 2), "sd21": (1, 1, 1, 1)}
TEXT, POOLED = 64, 64  # width of each text encoder, and of SDXL's pooled text
VAE_WIDTHS = (32, 32, 64, 64)
SCALES = {"sdxl": 0.13025, "sd21": 0.18215}
FILES = {(v, b): f"mvadapter_{v}_{b}.safetensors" for v in ("ig2mv", "tg2mv") for b in WIDTHS}


def unet_config(base: str) -> dict[str, Any]:
    levels = len(WIDTHS[base])
    attends = [level > 0 if base == "sdxl" else level < levels - 1 for level in range(levels)]
    common = {
        "in_channels": 4, "out_channels": 4, "block_out_channels": list(WIDTHS[base]), "layers_per_block": 2,
        "down_block_types": ["CrossAttnDownBlock2D" if each else "DownBlock2D" for each in attends],
        "up_block_types": ["CrossAttnUpBlock2D" if each else "UpBlock2D" for each in attends[::-1]],
        "attention_head_dim": [width // 64 for width in WIDTHS[base]], "use_linear_projection": True,
        "cross_attention_dim": 2 * TEXT if base == "sdxl" else TEXT, "norm_num_groups": 32,
        "transformer_layers_per_block": list(DEPTHS[base]),
    }  # fmt: skip
    if base == "sdxl":
        common |= {
            "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": POOLED + 6 * 256,
        }  # fmt: skip
    return common


def full_size(base: str) -> dict[str, Any]:
    """The configuration of the published UNet."""
    config = unet_config(base)
    sdxl = base == "sdxl"
    widths = [320, 640, 1280] if sdxl else [320, 640, 1280, 1280]
    config |= {"block_out_channels": widths, "attention_head_dim": [width // 64 for width in widths]}
    config["transformer_layers_per_block"] = [1, 2, 10] if sdxl else [1, 1, 1, 1]
    config["cross_attention_dim"] = 2048 if sdxl else 1024
    return config | ({"projection_class_embeddings_input_dim": 2816} if sdxl else {})


def vae_config(base: str) -> dict[str, Any]:
    return {
        "in_channels": 3, "out_channels": 3, "latent_channels": 4, "layers_per_block": 2,
        "block_out_channels": list(VAE_WIDTHS), "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4, "norm_num_groups": 32, "scaling_factor": SCALES[base],
        "force_upcast": base == "sdxl",
    }  # fmt: skip


@cache
def parts(base: str) -> dict[str, torch.nn.Module]:
    """The modules of a checkpoint, random."""
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    def text(cls: Any, layers: int, act: str) -> torch.nn.Module:
        rows = vocabulary.clip().rows
        return cls(
            CLIPTextConfig(
                vocab_size=rows, hidden_size=TEXT, intermediate_size=96, num_hidden_layers=layers, hidden_act=act,
                num_attention_heads=TEXT // 64, projection_dim=POOLED, eos_token_id=2,
            )
        )  # fmt: skip

    made = {
        "unet": UNet2DConditionModel.from_config(unet_config(base)),
        "vae": AutoencoderKL.from_config(vae_config(base)),
        "text_encoder": text(CLIPTextModel, 3, "quick_gelu") if base == "sdxl" else text(CLIPTextModel, 2, "gelu"),
    }
    if base == "sdxl":
        made["text_encoder_2"] = text(CLIPTextModelWithProjection, 3, "gelu")
    for index, module in enumerate(made.values()):
        randomise(module.eval(), index + 7)
    if base == "sd21":  # by the spread of this one a checkpoint of velocities is told
        made["unet"].up_blocks[-1].attentions[-1].transformer_blocks[0].norm1.bias.data.mul_(0.3)
    return made


def folder(base: str, root: Path, name: str = "") -> Path:
    """A checkpoint as diffusers saves it."""
    place = root / (name or f"tiny-{base}")
    for part, module in parts(base).items():
        module.save_pretrained(place / part)
    tokenizer(place / "tokenizer")
    if base == "sdxl":
        tokenizer(place / "tokenizer_2")
    (place / "scheduler").mkdir()
    (place / "scheduler" / "scheduler_config.json").write_text(json.dumps({"prediction_type": "epsilon"}))
    return place


def tokenizer(place: Path) -> Path:
    vocabulary.clip().save_pretrained(place)
    return place


def single_file(base: str, path: Path, dtype: torch.dtype = torch.float32, **more: Tensor) -> Path:
    """The same checkpoint as one file."""
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in original(base).items()}
    save_file({**tensors, **more}, path)
    return path


def original(base: str) -> dict[str, Tensor]:
    """All tensors by the names of the original code."""
    found: dict[str, Tensor] = {}
    for part, module in parts(base).items():
        tensors = module.state_dict()
        if part == "unet":
            found |= {f"model.diffusion_model.{unet_name(name, base)}": tensor for name, tensor in tensors.items()}
        elif part == "vae":
            found |= {f"first_stage_model.{vae_name(name)}": shaped(name, tensor) for name, tensor in tensors.items()}
        elif (base, part) == ("sdxl", "text_encoder"):
            prefix = "conditioner.embedders.0.transformer.text_model."
            found |= {prefix + name.removeprefix("text_model."): tensor for name, tensor in tensors.items()}
        else:
            prefix = "conditioner.embedders.1.model." if base == "sdxl" else "cond_stage_model.model."
            found |= {prefix + name: tensor for name, tensor in open_clip(tensors).items()}
    if base == "sd21":  # its last layer, which nothing reads, and the projection
        last = {name: tensor for name, tensor in found.items() if ".resblocks.1." in name}
        found |= {name.replace(".resblocks.1.", ".resblocks.2."): torch.zeros_like(each) for name, each in last.items()}
        found["cond_stage_model.model.text_projection"] = torch.zeros(TEXT, TEXT)
    return found


def shaped(name: str, tensor: Tensor) -> Tensor:
    """Original files hold the VAE's attention as 1x1 convolutions."""
    return tensor[:, :, None, None] if ".attentions." in name and tensor.ndim == 2 else tensor


RESNET = (("norm1", "in_layers.0"), ("conv1", "in_layers.2"), ("norm2", "out_layers.0"), ("conv2", "out_layers.3"),
          ("time_emb_proj", "emb_layers.1"), ("conv_shortcut", "skip_connection"))  # fmt: skip
OUTER = (("time_embedding.linear_1", "time_embed.0"), ("time_embedding.linear_2", "time_embed.2"),
         ("add_embedding.linear_1", "label_emb.0.0"), ("add_embedding.linear_2", "label_emb.0.2"),
         ("conv_in", "input_blocks.0.0"), ("conv_norm_out", "out.0"), ("conv_out", "out.2"))  # fmt: skip


def unet_name(name: str, base: str) -> str:
    """The name in the original code of a tensor of diffusers' UNet with two layers per block."""
    for new, old in OUTER:
        if name.startswith(f"{new}."):
            return name.replace(new, old)
    if ".resnets." in name:
        for new, old in RESNET:
            name = name.replace(f".{new}.", f".{old}.")
    if found := re.match(r"(down|up)_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.*)", name):
        way, block, kind, index, rest = found.groups()
        number = 3 * int(block) + int(index) + (way == "down")
        return f"{'input' if way == 'down' else 'output'}_blocks.{number}.{int(kind == 'attentions')}.{rest}"
    if found := re.match(r"down_blocks\.(\d+)\.downsamplers\.0\.conv\.(.*)", name):
        return f"input_blocks.{3 * int(found[1]) + 3}.0.op.{found[2]}"
    if found := re.match(r"up_blocks\.(\d+)\.upsamplers\.0\.conv\.(.*)", name):
        place = 1 if found[1] == "0" and base == "sd21" else 2  # behind a transformer, where the level has one
        return f"output_blocks.{3 * int(found[1]) + 2}.{place}.conv.{found[2]}"
    found = re.match(r"mid_block\.(resnets|attentions)\.(\d+)\.(.*)", name)
    number = 1 if found[1] == "attentions" else 2 * int(found[2])
    return f"middle_block.{number}.{found[3]}"


def vae_name(name: str) -> str:
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda found: f"mid.block_{int(found[1]) + 1}", name)
    name = name.replace("mid_block.attentions.0", "mid.attn_1").replace("conv_norm_out", "norm_out")
    if ".attn_1." in name:
        for new, old in (("group_norm", "norm"), ("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out")):
            name = name.replace(f".{new}.", f".{old}.")
    name = name.replace("conv_shortcut", "nin_shortcut")
    name = re.sub(r"down_blocks\.(\d)\.resnets\.(\d)", r"down.\1.block.\2", name)
    name = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", name)
    name = re.sub(r"up_blocks\.(\d)\.resnets\.(\d)", lambda found: f"up.{3 - int(found[1])}.block.{found[2]}", name)
    return re.sub(r"up_blocks\.(\d)\.upsamplers\.0", lambda found: f"up.{3 - int(found[1])}.upsample", name)


def open_clip(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("text_model.")
        if ".q_proj." in name:
            leaf = name.rpartition(".")[2]
            each = [tensors[key] for key in _siblings(name, tensors)]
            found[f"transformer.resblocks.{name.split('.')[2]}.attn.in_proj_{leaf}"] = torch.cat(each)
        elif name == "text_projection.weight":
            found["text_projection"] = tensor.T
        elif not re.search(r"\.[kv]_proj\.", name):
            for new, old in (
                ("encoder.layers.", "transformer.resblocks."), ("layer_norm", "ln_"), ("mlp.fc1", "mlp.c_fc"),
                ("mlp.fc2", "mlp.c_proj"), ("self_attn", "attn"), ("embeddings.token_embedding", "token_embedding"),
                ("embeddings.position_embedding.weight", "positional_embedding"), ("final_ln_", "ln_final"),
            ):  # fmt: skip
                name = name.replace(new, old)
            found[name.replace("final_layer_norm", "ln_final")] = tensor
    return found


def _siblings(name: str, tensors: dict[str, Tensor]) -> list[str]:
    whole = next(key for key in tensors if key.endswith(name))
    return [whole.replace(".q_proj.", f".{part}_proj.") for part in "qkv"]


def adapter_parts(variant: str, base: str) -> dict[str, torch.nn.Module]:
    """The UNet with the adapter's layers, and the map encoder, random; a test may change them."""
    return copy.deepcopy(_adapter_parts(variant, base))


@cache
def _adapter_parts(variant: str, base: str) -> dict[str, torch.nn.Module]:
    from anygpu.paint.networks.mv_adapter import encoder_for, unet_for

    made = {"unet": unet_for(unet_config(base), variant), "adapter": encoder_for(base, WIDTHS[base])}
    for index, module in enumerate(made.values()):
        randomise(module.eval(), index + 31)
    made["unet"].load_state_dict(parts(base)["unet"].state_dict(), strict=False)
    return made


def adapter_tensors(variant: str, base: str) -> dict[str, Tensor]:
    made = _adapter_parts(variant, base)
    own = {name: tensor for name, tensor in made["unet"].state_dict().items() if ".processor." in name}
    return {name: tensor.contiguous() for name, tensor in {**own, **made["adapter"].state_dict()}.items()}


def adapter_file(variant: str, base: str, root: Path, name: str = "") -> Path:
    """The flat file of an adapter."""
    path = root / (name or FILES[variant, base])
    save_file(adapter_tensors(variant, base), path)
    return path


def lora_file(path: Path, kohya: bool, base: str = "sdxl", width: int = 0) -> tuple[str, Tensor, Tensor]:
    """Write a LoRA of a layer, in kohya's names of a text encoder too; the layer, and what is added to each weight."""
    generator = torch.Generator().manual_seed(1)
    place = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
    width = width or WIDTHS[base][1]
    down, up = torch.randn(4, width, generator=generator), torch.randn(width, 4, generator=generator)
    text_down, text_up = torch.randn(4, 64, generator=generator), torch.randn(64, 4, generator=generator)
    if kohya:
        names = {f"lora_unet_{place.replace('.', '_')}": (down, up)}
        for leaf in ("q_proj", "out_proj"):
            names[f"lora_te1_text_model_encoder_layers_0_self_attn_{leaf}"] = (text_down, text_up)
        tensors = {f"{name}.lora_down.weight": pair[0].clone() for name, pair in names.items()}
        tensors |= {f"{name}.lora_up.weight": pair[1].clone() for name, pair in names.items()}
        tensors |= {f"{name}.alpha": torch.tensor(2.0) for name in names}
    else:
        tensors = {f"unet.{place}.lora_A.weight": down, f"unet.{place}.lora_B.weight": up}
    save_file(tensors, path)
    return place, up @ down * (0.5 if kohya else 1.0), text_up @ text_down * 0.5
