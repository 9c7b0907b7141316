"""Core's own model classes with tiny configurations, made by core's own code, driven by core's own guider."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import comfy.model_patcher
import comfy.nested_tensor
import comfy.quant_ops as quant_ops
import comfy.samplers
import comfy.supported_models as supported
import torch
from torch import nn

HOST = torch.device("cpu")
TOKENS = 12
LARGEST = 6e4  # of a weight in fp16
NORMS = ("gamma", "scale", "beta")  # names of norms' weights beside the usual ones
GROUP = 64  # columns that the packed formats here take together at most
VIDEO, PICTURE = (3, 8, 8), (8, 8)  # latent frames, rows, columns


class MissingError(Exception):
    """A class or format that this ComfyUI does not have; the test that asks for it is skipped."""


@dataclass(frozen=True)
class Case:
    """One class of core's.

    Args:
        table: its row in ``comfy.supported_models``. config: of the network. shapes: of the latents, one or several.
        width: of the text. conds: what else its CONDITIONING holds. loud: the layer whose output is scaled until the
            residual leaves fp16's range. files: draws of what else core reads; :func:`made` takes the first.
        seed: of the weights.
    """

    table: str
    config: Mapping[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    width: int
    loud: str
    conds: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[Mapping[str, torch.Tensor]] = ({},)
    seed: int = 0


def _text(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


HUNYUAN = {
    "image_model": "hunyuan_video", "in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2], "vec_in_dim": 16,
    "context_in_dim": 32, "hidden_size": 64, "mlp_ratio": 4.0, "num_heads": 2, "depth": 1, "depth_single_blocks": 1,
    "axes_dim": [8, 12, 12], "theta": 256, "qkv_bias": True, "guidance_embed": True, "byt5": False, "meanflow": False,
    "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
}  # fmt: skip
WAN = {
    "image_model": "wan2.1", "model_type": "t2v", "dim": 64, "out_dim": 16, "num_heads": 2, "ffn_dim": 128,
    "num_layers": 2, "patch_size": (1, 2, 2), "freq_dim": 32, "window_size": (-1, -1), "qk_norm": True,
    "cross_attn_norm": True, "eps": 1e-6, "in_dim": 16, "text_dim": 32, "text_len": 16,
}  # fmt: skip
LUMINA = {
    "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "cap_feat_dim": 32, "n_layers": 2, "qk_norm": True,
    "dim": 72, "n_heads": 2, "n_kv_heads": 1, "axes_dims": [12, 12, 12], "axes_lens": [300, 512, 512],
    "rope_theta": 10000.0, "ffn_dim_multiplier": 4.0, "norm_eps": 1e-5, "n_refiner_layers": 1, "multiple_of": 16,
}  # fmt: skip
COSMOS = {
    "image_model": "cosmos", "max_img_h": 16, "max_img_w": 16, "max_frames": 16, "in_channels": 16, "out_channels": 16,
    "patch_spatial": 2, "patch_temporal": 1, "model_channels": 64, "block_config": "FA-CA-MLP", "num_blocks": 2,
    "num_heads": 2, "concat_padding_mask": True, "pos_emb_cls": "rope3d", "pos_emb_learnable": False,
    "pos_emb_interpolation": "crop", "block_x_format": "THWBD", "affline_emb_norm": True, "use_adaln_lora": True,
    "adaln_lora_dim": 16, "crossattn_emb_channels": 32, "mlp_ratio": 4.0, "extra_per_block_abs_pos_emb": True,
    "rope_h_extrapolation_ratio": 1.0, "rope_w_extrapolation_ratio": 1.0, "rope_t_extrapolation_ratio": 2.0,
    "extra_per_block_abs_pos_emb_type": "learnable",
}  # fmt: skip
OF_COSMOS_1 = ("block_config", "block_x_format", "affline_emb_norm", "extra_per_block_abs_pos_emb_type")
FLUX = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "patch_size": 2, "vec_in_dim": 16,
    "context_in_dim": 32, "hidden_size": 64, "mlp_ratio": 4.0, "num_heads": 2, "depth": 1, "depth_single_blocks": 2,
    "axes_dim": [8, 12, 12], "theta": 10000, "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": [],
}  # fmt: skip
LTX = {
    "image_model": "ltxv", "in_channels": 128, "cross_attention_dim": 64, "attention_head_dim": 32,
    "num_attention_heads": 2, "caption_channels": 32, "num_layers": 2,
}  # fmt: skip
LTXAV = {
    **LTX, "image_model": "ltxav", "audio_in_channels": 128, "audio_cross_attention_dim": 32,
    "audio_attention_head_dim": 16, "audio_num_attention_heads": 2, "attention_head_dim": 32,
    "connector_attention_head_dim": 16, "connector_num_attention_heads": 2, "connector_num_layers": 1,
}  # fmt: skip
MASK = {"attention_mask": torch.ones(1, TOKENS, dtype=torch.long)}
GUIDED = {"guidance": 3.5, "pooled_output": _text(1, 16)}
CASES: dict[str, Case] = {
    "LTXV": Case("LTXV", LTX, ((1, 128, *VIDEO),), 32, "transformer_blocks.0.ff.net.2", MASK),
    "LTX-2": Case(
        "LTXAV", LTXAV, ((1, 128, *VIDEO), (1, 8, 6, 16)), 32 + 32, "transformer_blocks.0.ff.net.2", {}
    ),
    "Wan 2.1": Case("WAN21_T2V", WAN, ((1, 16, *VIDEO),), 32, "blocks.0.ffn.2"),
    "Wan 2.2": Case(
        "WAN22_T2V", {**WAN, "in_dim": 48, "out_dim": 48}, ((1, 48, *VIDEO),), 32, "blocks.0.ffn.2"
    ),
    "HunyuanVideo": Case("HunyuanVideo", HUNYUAN, ((1, 16, *VIDEO),), 32, "double_blocks.0.img_mlp.2", GUIDED),
    "HunyuanVideo 1.5": Case(
        "HunyuanVideo15",
        {
            **HUNYUAN, "in_channels": 65, "out_channels": 32, "patch_size": [1, 1, 1], "depth": 2,
            "depth_single_blocks": 0, "use_cond_type_embedding": True, "guidance_embed": False, "vec_in_dim": None,
            "vision_in_dim": 16, "byt5": True,
        },
        ((1, 32, *VIDEO),), 32, "double_blocks.0.img_mlp.2", {"pooled_output": _text(1, 16)},
    ),
    "Mochi": Case(
        "GenmoMochi",
        {
            "image_model": "mochi_preview", "depth": 2, "patch_size": 2, "num_heads": 2, "hidden_size_x": 64,
            "hidden_size_y": 32, "mlp_ratio_x": 192.0, "mlp_ratio_y": 4.0, "learn_sigma": False, "in_channels": 12,
            "qk_norm": True, "qkv_bias": False, "out_bias": True, "attn_drop": 0.0, "patch_embed_bias": True,
            "posenc_preserve_area": True, "timestep_mlp_bias": True, "attend_to_padding": False,
            "timestep_scale": 1000.0, "use_t5": True, "t5_feat_dim": 32, "t5_token_length": TOKENS,
            "rope_theta": 10000.0,
        },
        ((1, 12, *VIDEO),), 32, "blocks.0.mlp_x.w1", MASK,
    ),
    "MiniMax H3": Case(
        "MiniMaxH3",
        {
            "image_model": "minimax_h3", "hidden_size": 64, "num_layers": 2, "token_refiner_num_layers": 1,
            "num_attention_heads": 2, "attention_head_dim": 96, "ffn_hidden_size": 64, "text_dim": 32,
            "timestep_input_dim": 32, "time_embed_hidden_size": 64, "time_embed_dim": 32,
        },
        ((1, 24, *VIDEO), (1, 32, 2, 6)), 32, "blocks.0.mlp.fc2",
    ),
    "Kandinsky 5": Case(
        "Kandinsky5",
        {
            "image_model": "kandinsky5", "in_visual_dim": 16, "out_visual_dim": 16, "in_text_dim": 32,
            "in_text_dim2": 16, "time_dim": 32, "model_dim": 128, "ff_dim": 128, "visual_embed_dim": 132,
            "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (16, 24, 24),
        },
        ((1, 16, *VIDEO),), 32, "visual_transformer_blocks.0.feed_forward.out_layer", {"pooled_output": _text(1, 16)},
    ),
    "Cosmos": Case("CosmosT2V", COSMOS, ((1, 16, *VIDEO),), 32, "blocks.block0.blocks.2.block.layer2", MASK),
    "Cosmos Predict2": Case(
        "CosmosT2IPredict2",
        {
            **{name: value for name, value in COSMOS.items() if name not in OF_COSMOS_1},
            "image_model": "cosmos_predict2", "extra_per_block_abs_pos_emb": False, "min_fps": 1, "max_fps": 30,
        },
        ((1, 16, *VIDEO),), 32, "blocks.0.mlp.layer2",
    ),
    "Flux": Case("Flux", FLUX, ((1, 16, *PICTURE),), 32, "double_blocks.0.img_mlp.2", {**GUIDED, "guidance": 8.5}),
    "Qwen-Image": Case(
        "QwenImage",
        {
            "image_model": "qwen_image", "in_channels": 64, "out_channels": 16, "num_layers": 2,
            "attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 32,
            "axes_dims_rope": (8, 12, 12),
        },
        ((1, 16, 1, *PICTURE),), 32, "transformer_blocks.0.img_mlp.net.2",
    ),
    "Z-Image": Case(
        "ZImage",
        {
            **LUMINA, "dim": 256, "n_heads": 8, "n_kv_heads": 8, "axes_dims": [8, 12, 12], "z_image_modulation": True,
            "time_scale": 1000.0, "pad_tokens_multiple": 32, "n_refiner_layers": 1,
        },
        ((1, 16, *PICTURE),), 32, "layers.0.feed_forward.w2",
    ),
    "Lumina 2": Case("Lumina2", LUMINA, ((1, 16, *PICTURE),), 32, "layers.0.feed_forward.w2"),
    "SD3": Case(
        "SD3",
        {
            "in_channels": 16, "patch_size": 2, "depth": 2, "input_size": None, "adm_in_channels": 16,
            "context_embedder_config": {
                "target": "torch.nn.Linear", "params": {"in_features": 32, "out_features": 128}
            },
            "num_patches": 64, "pos_embed_max_size": 8, "pos_embed_scaling_factor": None,
            "context_processor_layers": None,
        },
        ((1, 16, *PICTURE),), 32, "joint_blocks.0.x_block.mlp.fc2", {"pooled_output": _text(1, 16)},
    ),
    "SDXL": Case(
        "SDXL",
        {
            "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "num_res_blocks": [1, 1],
            "channel_mult": [1, 2], "num_head_channels": 32, "use_spatial_transformer": True,
            "use_linear_in_transformer": True, "transformer_depth": [0, 2], "transformer_depth_output": [0, 0, 2, 2],
            "transformer_depth_middle": 2, "context_dim": 32, "adm_in_channels": 16 + 6 * 256,
            "num_classes": "sequential", "use_temporal_attention": False, "legacy": False,
        },
        ((1, 4, 16, 16),), 32, "middle_block.1.transformer_blocks.0.ff.net.2", {"pooled_output": _text(1, 16)},
    ),
    "Hunyuan3D 2": Case(
        "Hunyuan3Dv2",
        {
            "image_model": "hunyuan3d2", "in_channels": 8, "context_in_dim": 32, "hidden_size": 64, "mlp_ratio": 4.0,
            "num_heads": 2, "depth": 1, "depth_single_blocks": 1, "qkv_bias": True, "guidance_embed": False,
        },
        ((1, 8, 16),), 32, "double_blocks.0.img_mlp.2",
    ),
    "Hunyuan3D 2.1": Case(  # casts its stream to the dtype of its weights, and passes no options to its attention
        "Hunyuan3Dv2_1",
        {
            "image_model": "hunyuan3d2_1", "in_channels": 8, "context_dim": 32, "hidden_size": 64, "num_heads": 2,
            "depth": 3, "num_moe_layers": 0, "guidance_cond_proj_dim": None,
        },
        ((1, 8, 16),), 32, "blocks.0.mlp.fc2",
    ),
    "Ernie": Case(  # passes no options to its attention
        "ErnieImage",
        {
            "image_model": "ernie", "hidden_size": 64, "num_attention_heads": 2, "num_layers": 2,
            "ffn_hidden_size": 128, "text_in_dim": 32, "rope_axes_dim": (8, 12, 12),
        },
        ((1, 128, *PICTURE),), 32, "layers.0.mlp.linear_fc2",
    ),
}  # fmt: skip


def row_of(name: str) -> Any:
    """The row of a case in core's list of models; MissingError where this ComfyUI has none."""
    if not hasattr(supported, CASES[name].table):
        raise MissingError(CASES[name].table)
    return getattr(supported, CASES[name].table)


def made(
    name: str,
    weights: torch.dtype = torch.float16,
    compute: torch.dtype | None = torch.float32,
    device: torch.device = HOST,
) -> Any:
    """A MODEL of the class with random weights, computed in ``compute`` as core casts; None computes in ``weights``."""
    case = CASES[name]
    config = row_of(name)(dict(case.config))
    config.unet_config |= case.config  # some rows insist on the published numbers
    config.set_inference_dtype(weights, compute)
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        model = config.get_model(dict(case.files[0]), "")
        fill(model.diffusion_model)
    model.diffusion_model.eval()
    return comfy.model_patcher.CoreModelPatcher(model, device, HOST)


def fill(network: nn.Module) -> None:
    """Weights as after training: rows of length about 1, norms about 1, small biases."""
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if name.endswith(("rope.inv_freq", "rotary_pos_emb.inv_freq")):  # which core leaves empty, for the file to fill
            tensor.copy_(10000.0 ** -torch.linspace(0, 1, len(tensor)))
        plain = name.endswith(("weight", "bias", *NORMS)) or tensor.ndim > 1 or isinstance(tensor, nn.Parameter)
        if not tensor.is_floating_point() or not plain or 0 in tensor.stride():
            continue
        if tensor.ndim > 1:
            value = torch.randn(tensor.shape) / max(1, tensor[0].numel()) ** 0.5
        else:
            value = 0.02 * torch.randn(tensor.shape) + (1.0 if name.endswith(("weight", *NORMS[:2])) else 0.0)
        with torch.no_grad():
            tensor.copy_(value)


CHOSEN: dict[str, dict[str, Any]] = {  # how a tiny weight is quantized where the format's own groups are larger
    "convrot_w4a4": {"convrot_groupsize": 64},
    "asym_w4a8_int8": {"convrot_groupsize": 64, "group_size": 16},
}


def layout_of(kind: str) -> str:
    """The name of the layout of a packed format; MissingError where this ComfyUI has no such format."""
    if kind not in quant_ops.QUANT_ALGOS:
        raise MissingError(kind)
    return str(quant_ops.QUANT_ALGOS[kind]["comfy_tensor_layout"])


def pack(file: dict[str, torch.Tensor], path: str, kind: str, **chosen: Any) -> torch.Tensor:
    """The values of a Linear's weight after it was quantized in ``file``, as core saves and loads such layers."""
    chosen = chosen or CHOSEN.get(kind, {})
    layout = quant_ops.get_layout_class(layout_of(kind))
    scale = {"scale": "recalculate"} if kind.startswith("float8") else {}  # of other formats that is what none means
    packed, params = layout.quantize(file.pop(f"{path}.weight").float(), **scale, **chosen)
    tensors = layout.state_dict_tensors(packed, params)
    file |= {f"{path}.weight{key}": value for key, value in tensors.items()}
    conf = json.dumps({"format": kind, **chosen}).encode()
    file[f"{path}.comfy_quant"] = torch.frombuffer(bytearray(conf), dtype=torch.uint8).clone()
    values: torch.Tensor = layout.dequantize(packed, params)
    return values


def louder(model: Any, name: str, peak: float) -> float:
    """Scale the weights of one layer so that its output reaches ``peak``, or as far as fp16 goes; the factor."""
    leaf = model.model.diffusion_model.get_submodule(CASES[name].loud)
    seen: list[float] = []
    handle = leaf.register_forward_hook(lambda _m, _i, out: seen.append(float(out.abs().amax())))
    output(model, name)
    handle.remove()
    factor = min(peak / max(seen), LARGEST / float(leaf.weight.abs().amax()))
    with torch.no_grad():
        leaf.weight.mul_(factor)
        if leaf.bias is not None:
            leaf.bias.mul_(factor)
    return factor


def noise_of(name: str) -> Any:
    """The noise of a case, nested where it has several latents."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=generator) for shape in CASES[name].shapes]
    return tensors[0] if len(tensors) == 1 else comfy.nested_tensor.NestedTensor(tensors)


def conditioning(name: str, seed: int = 7) -> list[Any]:
    """A CONDITIONING of a case."""
    case = CASES[name]
    text = torch.randn(1, TOKENS, case.width, generator=torch.Generator().manual_seed(seed))
    return [[text, dict(case.conds)]]


def output(
    model: Any,
    name: str,
    sampler: Any = None,
    sigmas: tuple[float, ...] = (0.9, 0.0),
    cfg: float = 1.0,
    signal: float = 0.0,
) -> torch.Tensor:
    """What the network gives at the first level, flat and in fp32: through core's guider, conds and wrappers.

    Args:
        signal: the standard deviation of what lies below the noise, in the network's own units.
    """
    seen: list[torch.Tensor] = []

    def once(called: Any, x: torch.Tensor, levels: torch.Tensor, extra_args: Any = None, **_: Any) -> torch.Tensor:
        level = levels[:1].expand(x.shape[0])
        x = x + signal * x.roll(1, -1) / levels[0]
        seen.append((x - called(x, level, **(extra_args or {}))) / levels[0])
        return x

    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds(conditioning(name), conditioning(name, 8))
    guider.set_cfg(cfg)
    noise = noise_of(name)
    result = guider.sample(
        noise, noise * 0.0, sampler or comfy.samplers.KSAMPLER(once), torch.tensor(sigmas), disable_pbar=True, seed=3
    )
    if seen:
        return seen[0].float().flatten().cpu()
    tensors = result.unbind() if getattr(result, "is_nested", False) else [result]
    return torch.cat([tensor.float().flatten().cpu() for tensor in tensors])


def skipping(model: Any, run: Callable[[Any], torch.Tensor]) -> dict[str, bool]:
    """Whether ``run`` gives the same where core's EasyCache on ``model`` adds to copied latents; and if it skips."""
    from comfy_extras.nodes_easycache import EasyCacheHolder, EasyCacheNode

    cached, add = EasyCacheNode.execute(model, 3.0, 0.0, 1.0, False).result[0], EasyCacheHolder.apply_cache_diff
    found = run(cached)
    to_copy = lambda holder, x, *args, **named: add(holder, x.clone(), *args, **named)  # noqa: E731
    with mock.patch.object(EasyCacheHolder, "apply_cache_diff", to_copy):
        expected = run(cached)
    return {"equal": torch.equal(found, expected), "skips": not torch.equal(expected, run(model))}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative distance; infinite where anything is not finite."""
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found - expected).norm() / expected.norm())
