"""Tiny files under the names that the templates of core's models ask for; core's loaders tell each by its keys.

The text encoders and VAEs whose sizes core has in its code are as in `small_core`; the transformers, and all of LTX-2
but its text encoder, take theirs from the file, as published ones do. Each transformer has a residual that leaves
fp16's range.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.ldm.lightricks.vae.audio_vae as audio_vae
import comfy.ops
import torch
from anygpu.host.core.ownership import is_linear
from safetensors.torch import load_file, save_file
from torch import nn

from host.inside import core_tiny, core_tiny_vaes
from host.inside.core_fit import PEAK
from host.small_core import ENCODERS, TEXT, VOCABULARY, named, small

Tensors = dict[str, torch.Tensor]
WAN_VAE, CHECKPOINT = "vae/wan2.2_vae.safetensors", "ltx-2-19b-dev-fp8.safetensors"
LOUD = 6e4  # of one weight: each alone is finite in fp16, and no sum of their products is
AUDIO = {
    "model": {
        "params": {
            "ddconfig": {
                "double_z": True, "mel_bins": 64, "z_channels": 8, "resolution": 64, "in_channels": 2, "out_ch": 2,
                "ch": 16, "ch_mult": [1, 1, 1], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
                "mid_block_add_attention": False, "norm_type": "pixel", "causality_axis": "height",
            },
            "sampling_rate": 16000,
        }
    },
    "preprocessing": {"stft": {"filter_length": 1024, "hop_length": 160}},
}  # fmt: skip
NOTHING: Mapping[str, Any] = {}
VIDEO_TO_WORLD = {"table": "CosmosI2VPredict2", "in_channels": 17}
POOLED = {"in_text_dim2": 768, "conds": {"pooled_output": torch.zeros(1, 768)}}
WIDE = {  # as core reads it from a file
    "hidden_size": 128, "num_heads": 1, "axes_dim": [16, 56, 56], "meanflow_sum": True, "vision_in_dim": 1152,
}  # fmt: skip
ANIMATE = {"table": "WAN_Animate2", "model_type": "animate2", "in_dim": 36}
CONVROT = {"per_channel": True, "convrot": True, "convrot_groupsize": 64}
T5: dict[str, Any] = {"model_type": "t5", "relative_attention_num_buckets": 32}
WAN_21 = {
    "dim": 16, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [],
    "temperal_downsample": [False, True, True], "image_channels": 3, "conv_out_channels": 3, "dropout": 0.0,
}  # fmt: skip
VOCODER = {"upsample_initial_channel": 64, "upsample_rates": [5, 4, 2, 2, 2], "resblock_kernel_sizes": [3],
           "resblock_dilation_sizes": [[1, 3, 5]]}  # fmt: skip


def write(models: str) -> list[str]:
    """Write all of them into ComfyUI's folder of models; their names."""
    files = {
        "diffusion_models/wan2.2_ti2v_5B_fp16.safetensors": transformer("Wan 2.2"),
        "text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors": (of_wan(), {}),
        WAN_VAE: (
            made("comfy.ldm.wan.vae2_2.WanVAE", half=True, z_dim=48, temperal_downsample=[False, True, True]),
            {},
        ),
        f"checkpoints/{CHECKPOINT}": of_ltx2(),
        "text_encoders/gemma_3_12B_it_fp4_mixed.safetensors": (of_gemma(), {}),
        "diffusion_models/minimax_h3_fl2va_pruned_int8_convrot.safetensors": (
            transformer("MiniMax H3", kind="int8_tensorwise", **CONVROT)[0],
            {},
        ),
        "text_encoders/qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors": (of_qwen(), {}),
        "vae/minimax_h3_video_vae_fp16.safetensors": (made("comfy.ldm.minimax.vae.MiniMaxH3VideoVAE", half=True), {}),
        "vae/minimax_h3_audio_vae_fp32.safetensors": (made("comfy.ldm.minimax.audio_vae.MiniMaxH3AudioVAE"), {}),
        "diffusion_models/cosmos_predict2_2B_video2world_480p_16fps.safetensors": (
            transformer("Cosmos Predict2", VIDEO_TO_WORLD)[0],
            {},
        ),
        "text_encoders/oldt5_xxl_fp8_e4m3fn_scaled.safetensors": (of_cosmos(), {}),
        "vae/wan_2.1_vae.safetensors": (made("comfy.ldm.wan.vae.WanVAE", half=True, **WAN_21), {}),
        "diffusion_models/kandinsky5lite_t2v_sft_5s.safetensors": (transformer("Kandinsky 5", POOLED)[0], {}),
        "text_encoders/qwen_2.5_vl_7b_fp8_scaled.safetensors": (
            encoder("comfy.text_encoders.llama.Qwen25_7BVLI", {}, "float8_e4m3fn"),
            {},
        ),
        "text_encoders/clip_l.safetensors": (of_clip("CLIPTextModel", "sd1_clip_config.json"), {}),
        "vae/hunyuan_video_vae_bf16.safetensors": (
            made("comfy.sd.AutoencoderKL", half=True, ddconfig={}, embed_dim=16),
            {},
        ),
        "diffusion_models/hunyuanvideo1.5_720p_t2v_fp16.safetensors": (transformer("HunyuanVideo 1.5", WIDE)[0], {}),
        "text_encoders/byt5_small_glyphxl_fp16.safetensors": (of_byt5(), {}),
        "vae/hunyuanvideo15_vae_fp16.safetensors": (rolling(), {}),
        "diffusion_models/wan_animate_2_int8_convrot.safetensors": transformer(
            "Wan 2.1", ANIMATE, "int8_tensorwise", **CONVROT
        ),
        "loras/lightx2v_I2V_14B_480p_cfg_step_distill_rank64_bf16.safetensors": (of_lora(), {}),
        "vae/Wan2_1_VAE_bf16.safetensors": (made("comfy.ldm.wan.vae.WanVAE", half=True, **WAN_21), {}),
        "clip_vision/clip_vision_h.safetensors": (of_vision(), {}),
    }
    for name, (tensors, metadata) in files.items():
        path = Path(models) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: tensor.clone().contiguous() for key, tensor in tensors.items()}, path, metadata)
    return list(files)


def write_loud_vae(models: str) -> None:
    """Put a VAE that overflows in fp16, and in no wider dtype, in the place of Wan's."""
    tensors = load_file(Path(models) / WAN_VAE)
    loud = tensors["decoder.conv1.weight"]
    tensors["decoder.conv1.weight"] = loud * (LOUD / loud.float().abs().amax())
    new = Path(models) / "new.safetensors"
    save_file(tensors, new)
    new.replace(Path(models) / WAN_VAE)


def transformer(
    name: str, more: Mapping[str, Any] = NOTHING, kind: str = "", **chosen: Any
) -> tuple[Tensors, dict[str, str]]:
    """The transformer of a class, and its configuration as metadata.

    Args:
        more: of its configuration, beside that of the case; ``table`` and ``conds`` are of the case itself.
        kind: the format of its Linears; empty for fp16. A Linear shorter than a group stays, as in published files.
    """
    case = core_tiny.CASES[name]
    config = {**case.config, **more}
    others = {field: config.pop(field) for field in ("table", "conds") if field in config}
    case = replace(case, config=config, **others)
    with mock.patch.dict(core_tiny.CASES, {name: case}):
        model = core_tiny.made(name)
        core_tiny.louder(model, name, PEAK)
    network = model.model.diffusion_model
    file = dict(network.state_dict())
    for path, leaf in network.named_modules() if kind else ():
        if is_linear(leaf) and leaf.in_features % core_tiny.GROUP == 0 == leaf.out_features % core_tiny.GROUP:
            core_tiny.pack(file, path, kind, **chosen)
    config.pop("window_size", None)
    return file, {"config": json.dumps({"transformer": config})}


def of_ltx2() -> tuple[Tensors, dict[str, str]]:
    """A checkpoint with transformer, VAE, VAE of sound, vocoder and the projection of the text."""
    network, metadata = transformer("LTX-2", kind="float8_e4m3fn")
    config = json.loads(metadata["config"])
    config |= {"vae": core_tiny_vaes.LTX2, "audio_vae": AUDIO, "vocoder": VOCODER}
    video = filled(core_tiny_vaes.lightricks_vae(core_tiny_vaes.LTX2, 2))
    sound = filled(audio_vae.AudioVAE({"config": json.dumps(config)}))
    names = {"autoencoder.": "audio_vae.", "vocoder.": "vocoder."}
    width = (
        ENCODERS["comfy.text_encoders.llama.Gemma3_12B"]["hidden_size"] * 3
    )  # the states before and after two layers
    file = {
        **{f"model.diffusion_model.{key}": tensor for key, tensor in network.items()},
        **{f"vae.{key}": tensor.bfloat16() for key, tensor in video.items()},
        **{
            new + key.removeprefix(old): tensor
            for key, tensor in sound.items()
            for old, new in names.items()
            if key.startswith(old)
        },
        "text_embedding_projection.aggregate_embed.weight": torch.randn(TEXT, width) / width**0.5,
    }
    return file, {"config": json.dumps(config)}


def of_wan() -> Tensors:
    """UMT5 with scaled fp8 weights."""
    file = encoder("comfy.text_encoders.t5.T5", {"is_gated_act": True, "dense_act_fn": "gelu_pytorch_tanh",
                   "model_type": "umt5", "relative_attention_num_buckets": 32}, "float8_e4m3fn")  # fmt: skip
    told_by = {"encoder.block.23.layer.1.DenseReluDense.wi_1.weight": torch.zeros(10240, 1)}
    return {**file, **told_by, "spiece_model": words(unk_id=2, eos_id=1, bos_id=-1, pad_id=0)}


def of_cosmos() -> Tensors:
    """The first T5-XXL with scaled fp8 weights; its tokenizer is core's own."""
    config = {**T5, "is_gated_act": False, "dense_act_fn": "relu"}
    file = encoder("comfy.text_encoders.t5.T5", config, "float8_e4m3fn")
    return {**file, "encoder.block.23.layer.1.DenseReluDense.wi.weight": torch.zeros(1)}


def of_byt5() -> Tensors:
    """ByT5, which no prompt here asks for glyphs."""
    config = {
        "is_gated_act": True,
        "dense_act_fn": "gelu_pytorch_tanh",
        "model_type": "t5",
        "relative_attention_num_buckets": 32,
    }
    return encoder("comfy.text_encoders.t5.T5", config)


def of_clip(kind: str, config: str) -> Tensors:
    """A CLIP of few layers, in its published width."""
    text = Path(comfy.ops.__file__).with_name(config).read_text(encoding="utf-8")
    return encoder(f"comfy.clip_model.{kind}", json.loads(text))


def of_vision() -> Tensors:
    """CLIP ViT-H of few layers."""
    file = of_clip("CLIPVisionModelProjection", "clip_vision_config_h.json")
    return {**file, "vision_model.encoder.layers.30.layer_norm1.weight": torch.zeros(1)}


def of_lora() -> Tensors:
    """A LoRA on one layer of Wan."""
    layer = "diffusion_model.blocks.0.self_attn.q"
    return {f"{layer}.lora_A.weight": torch.randn(1, 64) / 64, f"{layer}.lora_B.weight": torch.ones(64, 1)}


def rolling() -> Tensors:
    """The VAE of HunyuanVideo 1.5."""
    config = {
        "in_channels": 3, "out_channels": 3, "ffactor_spatial": 16, "ffactor_temporal": 4, "z_channels": 32,
        "downsample_match_channel": True, "upsample_match_channel": True,
    }  # fmt: skip
    parts = {
        f"{part.lower()}_config": {"target": f"comfy.ldm.hunyuan_video.vae_refiner.{part}", "params": config}
        for part in ("Encoder", "Decoder")
    }
    none = {"target": "comfy.ldm.models.autoencoder.EmptyRegularizer"}
    return made("comfy.ldm.models.autoencoder.AutoencodingEngine", half=True, regularizer_config=none, **parts)


def of_gemma() -> Tensors:
    """Gemma 3 with nvfp4 weights."""
    file = encoder("comfy.text_encoders.llama.Gemma3_12B", {}, "nvfp4")
    told_by = dict.fromkeys(("47.self_attn.q_norm", "5.self_attn.v_proj"), torch.zeros(1))
    file |= {f"model.layers.{name}.weight": tensor for name, tensor in told_by.items()}
    return {**file, "spiece_model": words(unk_id=3, eos_id=1, bos_id=2, pad_id=0)}


def of_qwen() -> Tensors:
    """MiniMax H3's Qwen3-VL with nvfp4 weights; its tokenizer is core's own."""
    file = encoder("comfy.text_encoders.minimax.MiniMaxQwen3VL", {}, "nvfp4")
    return {**file, "model.layers.49.self_attn.q_proj.weight": torch.zeros(1)}


def encoder(place: str, config: Mapping[str, Any], kind: str = "") -> Tensors:
    """The weights of an encoder, those of its layers packed where a ``kind`` is named."""
    with small():
        network = named(place)(config, torch.float16, "cpu", comfy.ops.manual_cast)
        file = filled(network)
    for path, leaf in network.named_modules() if kind else ():
        sized = is_linear(leaf) and leaf.in_features % 32 == 0 == leaf.out_features % 32
        if sized and (".layers." in path or ".block." in path):
            core_tiny.pack(file, path, kind)
    return file


def made(place: str, half: bool = False, **given: Any) -> Tensors:
    """The weights of a VAE."""
    with small():
        file = filled(named(place)(**given))
    return {key: tensor.half() if half else tensor for key, tensor in file.items()}


def filled(network: nn.Module) -> Tensors:
    """Its weights, as after training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        core_tiny.fill(network)
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            if tensor.is_floating_point() and not name.endswith(("weight", "bias", "filter")) and tensor.ndim < 3:
                nn.init.constant_(tensor, 1.0 if "std" in name else 0.0 if "mean" in name else 0.5)
    return dict(network.state_dict())


def words(**ids: int) -> torch.Tensor:
    """A sentencepiece model that spells every English word."""
    import sentencepiece

    model = BytesIO()
    letters = [chr(code) for code in range(32, 127)]
    sentences = [" ".join(letters), *(first + second for first in letters for second in letters)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, vocab_size=VOCABULARY, hard_vocab_limit=False,
        character_coverage=1.0, minloglevel=2, **ids,
    )  # fmt: skip
    return torch.frombuffer(bytearray(model.getvalue()), dtype=torch.uint8).clone()
