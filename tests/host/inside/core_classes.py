"""The other network classes of ``comfy.supported_models``, tiny: with core_tiny.py every class that core runs."""

import importlib
import inspect
import types
from collections.abc import Mapping
from typing import Any

import comfy.ldm.audio.embedders as embedders
import torch

from host.inside.core_tiny import CASES, FLUX, GUIDED, MASK, PICTURE, TOKENS, VIDEO, WAN, Case, _text

POOLED = {"pooled_output": _text(1, 16)}
POSE = _text(1, 16, 2, 8, 8)
SEEN = types.SimpleNamespace(penultimate_hidden_states=_text(1, 6, 1280))  # an image, as CLIP vision gives it
MOTION = (1, 16, *VIDEO)
LOUD_WAN = "blocks.0.ffn.2"
LOUD_DOUBLE = "double_blocks.0.img_mlp.2"
I2V = {**WAN, "in_dim": 36}
CHROMA = {
    **{key: value for key, value in FLUX.items() if key not in ("guidance_embed", "image_model")},
    "in_channels": 64, "out_channels": 64, "vec_in_dim": None, "in_dim": 64, "out_dim": 64, "hidden_dim": 64,
    "n_layers": 1,
}  # fmt: skip
OMNIGEN = {
    "hidden_size": 72, "num_attention_heads": 2, "num_kv_heads": 1, "num_layers": 2, "num_refiner_layers": 1,
    "axes_dim_rope": (12, 12, 12), "multiple_of": 16,
}  # fmt: skip
PIXEL = {
    "num_groups": 2, "hidden_size": 64, "pixel_hidden_size": 16, "pixel_attn_hidden_size": 64, "pixel_num_groups": 2,
    "patch_depth": 2, "pixel_depth": 1, "patch_size": 4, "txt_embed_dim": 32, "txt_max_length": 16,
}  # fmt: skip


WIDTHS = {512: 32, 256: 8, 128: 4, 64: 2, 32: 1}
SMALLER: Mapping[str, Mapping[str, Mapping[int, int]]] = {  # numbers that core wrote into classes of a module
    "wan.model_animate": {
        **dict.fromkeys(("EncoderApp", "Encoder", "Direction", "Generator"), WIDTHS), "AnimateWanModel": {512: 32},
    },
    "wan.model": {"HumoWanModel": {512: 32, 1536: 32}, "WanAttentionBlockAudio": {1536: 32}},
    "anima.model": {"LLMAdapter": {1024: 32, 16: 2, 6: 1, 32128: 64}},
    "minimax_music.dit": {
        "ContinuousTransformer": {2304: 320, 2048: 64, 8192: 128, 64: 32, 36: 2}, "RotaryEmbedding": {},
        "DiffusionTransformer": {2304: 320, 2048: 64}, "MiniMaxMusic3DiT": {4096: 64, 2048: 64},
    },
    "seedvr.model": {"NaDiT": {5120: 32}},
    "ace.lyric_encoder": {"ConformerEncoder": {1024: 64, 16: 2, 4096: 64, 6: 1}},
    "hydit.models": {"HunYuanDiT": {1024: 64}},
}  # fmt: skip


def _smaller(function: Any, numbers: Mapping[int, int]) -> None:
    """Replace numbers in a function of core's: in its defaults, in its code and in the functions inside it."""

    def replaced(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(replaced, value))
        if isinstance(value, types.CodeType):
            return value.replace(co_consts=tuple(map(replaced, value.co_consts)))
        return numbers.get(value, value) if type(value) is int else value

    function.__code__ = replaced(function.__code__)
    function.__defaults__ = tuple(map(replaced, function.__defaults__ or ()))


def _shrink() -> None:
    """Apply :data:`SMALLER` where this ComfyUI has the class."""
    for module, classes in SMALLER.items():
        try:
            held = importlib.import_module(f"comfy.ldm.{module}")
        except ModuleNotFoundError:
            continue
        for name, numbers in classes.items():
            kind = getattr(held, name, object)
            for function in filter(inspect.isfunction, list(vars(kind).values())):
                _smaller(function, numbers)


_shrink()


def _seconds(seed: int) -> dict[str, torch.Tensor]:
    """What core reads beside Stable Audio's network, with rows of length about 1."""
    generator, weights = torch.Generator().manual_seed(seed), embedders.NumberConditioner(768).state_dict()
    return {
        f"conditioner.conditioners.seconds_{name}.{key}": torch.randn(value.shape, generator=generator)
        / (value.shape[-1] ** 0.5 if value.ndim > 1 else 1.0)
        for name in ("start", "total")
        for key, value in weights.items()
    }


def _wan(table: str, loud: str = LOUD_WAN, conds: Mapping[str, Any] | None = None, **changed: Any) -> Case:
    """One of Wan's relatives."""
    return Case(table, {**WAN, **changed}, (MOTION,), 32, loud, conds or {})


CASES |= {
    "CausVid": _wan("WAN21_CausalAR_T2V"),
    "Wan VACE": _wan("WAN21_Vace", model_type="vace", vace_layers=1, vace_in_dim=96),
    "Wan Camera": _wan(
        "WAN21_Camera", conds={"clip_vision_output": SEEN, "camera_conditions": _text(1, 24, 3, 64, 64)},
        model_type="camera", in_dim=32,
    ),
    "Wan S2V": _wan(
        "WAN22_S2V", conds={"audio_embed": _text(1, 25, 16, 12), "reference_latents": [_text(1, 16, 1, 8, 8)]},
        model_type="s2v", audio_dim=16, num_audio_token=2, audio_inject_layers=[0, 1],
    ),
    "HuMo": _wan("WAN21_HuMo", conds={"audio_embed": _text(1, 3, 8, 5, 1280)}, model_type="humo", audio_token_num=16),
    "Wan Animate": _wan(
        "WAN22_Animate", model_type="animate", in_dim=36, num_layers=5, motion_encoder_dim=32, conds={
            "clip_vision_output": SEEN, "face_video_pixels": _text(1, 3, 4, 512, 512), "pose_video_latent": POSE,
        },
    ),
    "Wan Animate 2": _wan(
        "WAN_Animate2", model_type="animate2", in_dim=36,
        conds={"clip_vision_output": SEEN, "pose_video_latent": POSE},
    ),
    "SCAIL": _wan(
        "WAN21_SCAIL", model_type="scail", in_dim=20,
        conds={"clip_vision_output": SEEN, "pose_video_latent": _text(1, 16, 3, 4, 4)},
    ),
    "SCAIL 2": _wan(
        "WAN21_SCAIL2", model_type="scail2", in_dim=20, conds={
            "clip_vision_output": SEEN, "pose_video_latent": _text(1, 16, 3, 4, 4),
            "driving_mask_28ch": _text(1, 3, 28, 4, 4),
        },
    ),
    "WanDancer": _wan(
        "WAN22_WanDancer", conds={"clip_vision_output": SEEN, "audio_embed": _text(1, 12, 35)}, model_type="wandancer",
        in_dim=36, audio_inject_layers=[0, 1], music_dim=64, music_latent_dim=64, music_heads=2,
    ),
    "SD 1.5": Case(
        "SD15", {
            **CASES["SDXL"].config, "num_classes": None, "adm_in_channels": None, "num_heads": 2, "model_channels": 64,
        },
        ((1, 4, 16, 16),), 32, "middle_block.1.transformer_blocks.0.ff.net.2",
    ),
    "Stable Cascade C": Case(
        "Stable_Cascade_C",
        {
            "c_cond": 32, "c_hidden": [32, 32], "nhead": [2, 2], "blocks": [[1, 1], [1, 1]], "c_clip_text": 32,
            "c_clip_text_pooled": 16, "stable_cascade_stage": "c",
        },
        ((1, 16, 4, 4),), 32, "down_blocks.0.0.channelwise.4", POOLED,
    ),
    "Stable Cascade B": Case(
        "Stable_Cascade_B",
        {
            "c_cond": 32, "c_hidden": [32, 32, 32, 32], "nhead": [-1, -1, 2, 2], "blocks": [[1, 1, 1, 1], [1, 1, 1, 1]],
            "block_repeat": [[1, 1, 1, 1], [1, 1, 1, 1]], "c_clip": 16, "stable_cascade_stage": "b",
        },
        ((1, 4, 64, 64),), 32, "down_blocks.2.0.channelwise.4",
        {**POOLED, "stable_cascade_prior": _text(1, 16, 4, 4)},
    ),
    "Stable Audio": Case(
        "StableAudio",
        {
            "audio_model": "dit1.0", "embed_dim": 64, "depth": 2, "num_heads": 2, "cond_token_dim": 768,
            "project_cond_tokens": True, "global_cond_dim": 1536,
        },
        ((1, 64, 24),), 768, "transformer.layers.0.ff.ff.2", {}, [*map(_seconds, range(5))],
    ),
    "AuraFlow": Case(
        "AuraFlow",
        {
            "dim": 64, "n_layers": 2, "n_double_layers": 1, "n_heads": 2, "global_conddim": 64, "cond_seq_dim": 32,
            "max_seq": 64,
        },
        ((1, 4, *PICTURE),), 32, "double_layers.0.mlpX.c_proj",
    ),
    "PixArt": Case(
        "PixArtSigma",
        {
            "image_model": "pixart_sigma", "hidden_size": 64, "depth": 2, "num_heads": 2, "caption_channels": 32,
            "micro_condition": False, "model_max_length": TOKENS,
        },
        ((1, 4, 64, 64),), 32, "blocks.0.mlp.fc2",
    ),
    "HunyuanDiT": Case(
        "HunyuanDiT",
        {
            "image_model": "hydit", "hidden_size": 64, "depth": 2, "num_heads": 2, "text_states_dim": 32,
            "text_states_dim_t5": 32, "text_len": TOKENS, "text_len_t5": TOKENS,
        },
        ((1, 4, *PICTURE),), 32, "blocks.0.mlp.fc2", {
            **MASK, "attention_mask_mt5xl": MASK["attention_mask"], "conditioning_mt5xl": _text(1, TOKENS, 32),
        },
    ),
    "FLUX.2": Case(
        "Flux2",
        {
            **FLUX, "image_model": "flux2", "in_channels": 128, "out_channels": 128, "patch_size": 1,
            "vec_in_dim": None, "guidance_embed": False, "axes_dim": [8, 8, 8, 8], "global_modulation": True,
            "mlp_silu_act": True, "qkv_bias": False, "ops_bias": False, "mlp_ratio": 3.0,
            "theta": 2000, "txt_ids_dims": [3],
        },
        ((1, 128, 4, 4),), 32, LOUD_DOUBLE,
    ),
    "Lens": Case(
        "Lens",
        {
            "image_model": "lens", "num_layers": 2, "attention_head_dim": 32, "num_attention_heads": 2,
            "enc_hidden_dim": 16, "axes_dims_rope": (8, 12, 12), "selected_layer_index": (0, 1),
        },
        ((1, 128, 4, 4),), 32, "transformer_blocks.0.img_mlp.w2", MASK,
    ),
    "Anima": Case(
        "Anima",
        {**CASES["Cosmos Predict2"].config, "image_model": "anima"},
        ((1, 16, 1, *PICTURE),), 32, "blocks.0.mlp.layer2",
        {"t5xxl_ids": torch.arange(TOKENS), "t5xxl_weights": torch.ones(TOKENS)},
    ),
    "Z-Image, pixels": Case(
        "ZImagePixelSpace",
        {
            **CASES["Z-Image"].config, "image_model": "zimage_pixel", "in_channels": 3, "patch_size": 4,
            "decoder_hidden_size": 32, "decoder_num_res_blocks": 1,
        },
        ((1, 3, 16, 16),), 32, "layers.0.feed_forward.w2",
    ),
    "PixelDiT": Case(
        "PixelDiTT2I", {**PIXEL, "image_model": "pixeldit_t2i"}, ((1, 3, 16, 16),), 32, "patch_blocks.0.mlp_x.w2",
    ),
    "PiD": Case(
        "PiD", {**PIXEL, "image_model": "pid", "lq_hidden_dim": 16, "lq_num_res_blocks": 1, "sr_scale": 4},
        ((1, 3, 64, 64),), 32, "patch_blocks.0.mlp_x.w2",
        {"lq_latent": _text(1, 16, 2, 2), "degrade_sigma": torch.tensor([0.5])},
    ),
    "TripoSplat": Case(
        "TripoSplat",
        {
            "image_model": "triposplat", "q_token_length": 16, "model_channels": 64, "cond_channels": 32,
            "num_blocks": 2, "num_refiner_blocks": 1, "num_head_channels": 32, "cond2_channels": 16,
        },
        ((1, 16, 16), (1, 1, 5)), 32, "blocks.0.mlp.mlp.2", {"reference_latents": [_text(1, 16, 2, 2)]},
    ),
    "HiDream": Case(
        "HiDream",
        {
            "image_model": "hidream", "patch_size": 2, "in_channels": 16, "num_layers": 1, "num_single_layers": 1,
            "attention_head_dim": 32, "num_attention_heads": 2, "caption_channels": [32, 32], "text_emb_dim": 16,
            "num_routed_experts": 2, "num_activated_experts": 1, "axes_dims_rope": (16, 8, 8),
            "max_resolution": (16, 16), "llama_layers": [0, 1],
        },
        ((1, 16, *PICTURE),), 32, "double_stream_blocks.0.block.ff_t.w2",
        {**POOLED, "conditioning_llama3": _text(1, 2, TOKENS, 32)},
    ),
    "HiDream O1": Case(
        "HiDreamO1",
        {
            "image_model": "hidream_o1",
            "text_config_overrides": {
                "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "rope_dims": [6, 5, 5],
            },
            "vision_config_overrides": {
                "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "depth": 1, "num_position_embeddings": 16,
            },
        },
        ((1, 3, 96, 96),), 32, "language_model.layers.0.mlp.down_proj", {"text_input_ids": torch.arange(TOKENS)[None]},
    ),
    "Chroma": Case("Chroma", {**CHROMA, "image_model": "chroma"}, ((1, 16, *PICTURE),), 32, LOUD_DOUBLE, GUIDED),
    "Chroma Radiance": Case(
        "ChromaRadiance",
        {
            **CHROMA, "image_model": "chroma_radiance", "in_channels": 3, "out_channels": 3, "patch_size": 4,
            "nerf_hidden_size": 8, "nerf_mlp_ratio": 2, "nerf_depth": 1, "nerf_max_freqs": 2, "nerf_tile_size": 0,
            "nerf_final_head_type": "conv", "nerf_embedder_dtype": torch.float32, "use_x0": False,
            "use_sequential_txt_ids": False,
        },
        ((1, 3, 16, 16),), 32, LOUD_DOUBLE, GUIDED,
    ),
    "SeedVR2": Case(
        "SeedVR2",
        {
            "image_model": "seedvr2", "norm_eps": 1e-5, "num_layers": 2, "mlp_type": "swiglu", "vid_dim": 64,
            "txt_in_dim": 32, "heads": 2, "head_dim": 32, "mm_layers": 1, "rope_dim": 24, "vid_out_norm": True,
        },
        (MOTION,), 32, "blocks.0.mlp.vid.proj_out", {"condition": _text(1, 17, *VIDEO)},
    ),
    "ACE-Step": Case(
        "ACEStep",
        {
            "audio_model": "ace", "num_layers": 2, "inner_dim": 64, "attention_head_dim": 32, "num_attention_heads": 2,
            "text_embedding_dim": 32, "lyric_encoder_vocab_size": 64, "lyric_hidden_size": 64, "max_width": 64,
            "max_position": 256, "ssl_latent_dims": [16, 16],
        },
        ((1, 8, 16, 24),), 32, "transformer_blocks.0.cross_attn.to_out.0",
        {"conditioning_lyrics": torch.arange(TOKENS)[None]},
    ),
    "ACE-Step 1.5": Case(
        "ACEStep15",
        {
            "audio_model": "ace1.5", "hidden_size": 64, "text_hidden_dim": 32, "num_dit_layers": 2,
            "num_lyric_layers": 1, "num_timbre_layers": 1, "num_tokenizer_layers": 1, "num_heads": 2, "num_kv_heads": 1,
            "head_dim": 32, "intermediate_size": 128, "fsq_dim": 64, "encoder_hidden_size": 64,
            "encoder_intermediate_size": 64,
            "encoder_num_heads": 2,
        },
        ((1, 64, 40),), 32, "decoder.layers.0.mlp.down_proj", {"conditioning_lyrics": _text(1, TOKENS, 32)},
    ),
    "MiniMax Music 3": Case(
        "MiniMaxMusic3", {"audio_model": "minimax_music3"}, ((1, 128, 24),), 8 * 64,
        "diffusion_transformer.transformer.layers.0.ff.ff.2", {"conditioning_scale": torch.ones(1, 1, 1)},
    ),
    "OmniGen2": Case(
        "Omnigen2", {**OMNIGEN, "image_model": "omnigen2", "text_feat_dim": 32}, ((1, 16, *PICTURE),), 32,
        "layers.0.feed_forward.linear_2", MASK,
    ),
    "Boogu": Case(
        "Boogu", {**OMNIGEN, "image_model": "boogu", "instruction_feat_dim": 32, "num_double_stream_layers": 1},
        ((1, 16, *PICTURE),), 32, "single_stream_layers.0.feed_forward.linear_2", MASK,
    ),
    "Mage-Flow": Case(
        "MageFlow",
        {
            "image_model": "mage_flow", "num_layers": 2, "attention_head_dim": 32, "num_attention_heads": 2,
            "joint_attention_dim": 32, "axes_dims_rope": (8, 12, 12),
        },
        ((1, 128, 4, 4),), 32, "transformer_blocks.0.img_mlp.net.2",
    ),
    "JoyImage": Case(
        "JoyImage",
        {
            "image_model": "joyimage", "hidden_size": 64, "num_attention_heads": 2, "text_dim": 32, "num_layers": 2,
            "rope_dim_list": [8, 12, 12],
        },
        ((1, 16, 1, *PICTURE),), 32, "double_blocks.0.img_mlp.net.2",
    ),
    "Ideogram 4": Case(
        "Ideogram4",
        {
            "image_model": "ideogram4", "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32,
            "intermediate_size": 128, "adaln_dim": 32, "llm_features_dim": 32, "mrope_section": (6, 5, 5),
        },
        ((1, 128, 4, 4),), 32, "layers.0.feed_forward.w2",
    ),
    "Krea 2": Case(
        "Krea2",
        {
            "image_model": "krea2", "features": 64, "tdim": 32, "txtdim": 16, "heads": 2, "kvheads": 1, "layers": 2,
            "txtlayers": 2, "txtheads": 2, "txtkvheads": 2,
        },
        ((1, 16, 1, *PICTURE),), 32, "blocks.0.mlp.down",
    ),
    "CogVideoX": Case(
        "CogVideoX_T2V",
        {
            "image_model": "cogvideox", "num_attention_heads": 2, "attention_head_dim": 64, "time_embed_dim": 32,
            "text_embed_dim": 32, "num_layers": 2, "use_rotary_positional_embeddings": True,
        },
        (MOTION,), 32, "blocks.0.ff_out",
    ),
    "Trellis 2": Case(
        "Trellis2",
        {
            "image_model": "trellis2", "resolution": 8, "model_channels": 64, "cond_channels": 32, "num_blocks": 2,
            "num_heads": 2,
        },
        ((1, 32, 24, 1),), 32, "img2shape.blocks.0.self_attn.to_out", {
            "embeds": _text(1, TOKENS, 32), "trellis2_generation_mode": "shape_generation",
            "trellis2_coords": torch.cat([torch.zeros(24, 1), torch.arange(72).view(24, 3) % 8], 1).int(),
            "trellis2_coord_counts": torch.tensor([24]),
        },
    ),
}  # fmt: skip
