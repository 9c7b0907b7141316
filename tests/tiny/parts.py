"""Models of the tiny checkpoints: the real classes with the published structure, ratios and switches, narrow.

What a caller can see from outside is as published: latent channels, compression ratios, patch sizes, conditioning
types, sequence lengths, special token ids. What costs memory is not: widths are 32 and stacks are 2 to 4 deep.
"""

from collections.abc import Mapping
from typing import Any

from . import vocabulary

WIDTH = 32
HEADS: Mapping[str, int] = {"num_attention_heads": 2, "attention_head_dim": 16}
ENCODER: Mapping[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": 4}


def scheduler(**settings: Any) -> Any:
    """The flow-matching scheduler that all published checkpoints name."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**settings)


def guider() -> Any:
    """The guidance of HunyuanVideo 1.5, which its pipelines keep as a part of their own."""
    from diffusers import ClassifierFreeGuidance

    return ClassifierFreeGuidance(guidance_scale=6.0)


# Text and image encoders ------------------------------------------------------------------------------------------


def t5(tokenizer: vocabulary.TokenizerFiles) -> Any:
    """A T5 v1.1 encoder: hidden states (B, N, 32)."""
    return _t5(tokenizer.rows)


def byt5() -> Any:
    """The glyph encoder of HunyuanVideo 1.5: one row per byte, hidden states (B, N, 32)."""
    return _t5(384, tokenizer_class="ByT5Tokenizer")


def _t5(rows: int, **settings: Any) -> Any:
    """An encoder of two gated layers over ``rows`` tokens."""
    from transformers import T5Config, T5EncoderModel

    settings |= {"vocab_size": rows, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    return T5EncoderModel(T5Config(d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4, **settings))


def _llama_config() -> Any:
    """Llama 3 in small; four layers, because the pipelines take hidden state -3, which must not be the embedding."""
    from transformers import LlamaConfig

    tokenizer = vocabulary.llama3()
    rotation: dict[str, Any] = {"rope_theta": 500000.0}
    return LlamaConfig(
        vocab_size=tokenizer.rows,
        **ENCODER,
        num_hidden_layers=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        **rotation,
        bos_token_id=tokenizer.ids["<|begin_of_text|>"],
        eos_token_id=tokenizer.ids["<|end_of_text|>"],
        pad_token_id=tokenizer.ids["<pad>"],
    )


def llama() -> Any:
    """The text encoder of HunyuanVideo: hidden states (B, N, 32), without a language head."""
    from transformers import LlamaModel

    return LlamaModel(_llama_config())


def llava() -> Any:
    """The text and image encoder of HunyuanVideo I2V; a 336 px picture fills 24 x 24 = 576 ``<image>`` positions."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    ids = vocabulary.llama3().ids
    vision = CLIPVisionConfig(**ENCODER, num_hidden_layers=3, image_size=336, patch_size=14, projection_dim=WIDTH)
    tokens: dict[str, Any] = {"image_token_index": ids["<image>"], "pad_token_id": ids["<pad>"]}
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision, text_config=_llama_config(), **tokens, image_seq_length=576,
            vision_feature_layer=-2, vision_feature_select_strategy="default",
        )
    )  # fmt: skip


def llava_images() -> Any:
    """The image processor of HunyuanVideo I2V: 336 x 336 px."""
    from transformers import CLIPImageProcessor

    return CLIPImageProcessor(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})


def clip_text() -> Any:
    """The second text encoder of HunyuanVideo: a pooled vector (B, 32)."""
    from transformers import CLIPTextConfig, CLIPTextModel

    tokenizer = vocabulary.clip()
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=tokenizer.rows, **ENCODER, num_hidden_layers=2, projection_dim=WIDTH, hidden_act="quick_gelu",
            bos_token_id=tokenizer.ids["<|startoftext|>"], eos_token_id=tokenizer.ids["<|endoftext|>"],
            pad_token_id=tokenizer.ids["<|endoftext|>"],
        )
    )  # fmt: skip


def qwen2_vl_text() -> Any:
    """The text half of Qwen 2.5 VL: hidden states (B, N, 32); four layers, because state -3 is taken."""
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    tokenizer = vocabulary.qwen2()
    rotation: dict[str, Any] = {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]}}
    return Qwen2_5_VLTextModel(
        Qwen2_5_VLTextConfig(
            vocab_size=tokenizer.rows, **ENCODER, num_hidden_layers=4, num_key_value_heads=2, **rotation,
            bos_token_id=tokenizer.ids["<|endoftext|>"], eos_token_id=tokenizer.ids["<|im_end|>"],
            pad_token_id=tokenizer.ids["<|endoftext|>"],
        )
    )  # fmt: skip


def siglip() -> Any:
    """The image encoder of FramePack and HunyuanVideo 1.5 I2V: 27 x 27 = 729 states of width 32 for 384 px."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return SiglipVisionModel(SiglipVisionConfig(**ENCODER, num_hidden_layers=2, image_size=384, patch_size=14))


def siglip_images() -> Any:
    """The image processor beside SigLIP: 384 x 384 px."""
    from transformers import SiglipImageProcessor

    return SiglipImageProcessor(size={"height": 384, "width": 384})


# LTX-Video --------------------------------------------------------------------------------------------------------


def ltx_transformer() -> Any:
    """LTX-Video: packed latents (B, N, 128), text (B, N, 32)."""
    from diffusers import LTXVideoTransformer3DModel

    return LTXVideoTransformer3DModel(**HEADS, num_layers=2, cross_attention_dim=WIDTH, caption_channels=WIDTH)


def ltx_vae() -> Any:
    """The autoencoder of LTX-Video 0.9: 128 channels, 32 x 32 px and 8 frames per latent."""
    from diffusers import AutoencoderKLLTXVideo

    widths, layers = (8, 16, 16, 16), (1, 1, 1, 1, 1)
    return AutoencoderKLLTXVideo(
        block_out_channels=widths,
        decoder_block_out_channels=widths,
        layers_per_block=layers,
        decoder_layers_per_block=layers,
    )


def ltx_vae_091() -> Any:
    """The autoencoder of LTX-Video 0.9.1: the encoder of 0.9, and a decoder that takes a timestep and draws noise."""
    from diffusers import AutoencoderKLLTXVideo

    return AutoencoderKLLTXVideo(
        block_out_channels=(8, 16, 32, 32),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 4,
        decoder_spatio_temporal_scaling=(True,) * 3,
        decoder_inject_noise=(True, True, True, False),
        upsample_residual=(True,) * 3,
        upsample_factor=(2,) * 3,
        timestep_conditioning=True,
    )


def ltx_vae_095() -> Any:
    """The autoencoder of LTX-Video 0.9.5 and later, whose decoder removes the last noise and takes a timestep."""
    from diffusers import AutoencoderKLLTXVideo

    return AutoencoderKLLTXVideo(
        block_out_channels=(8, 8, 16, 16, 16),
        down_block_types=("LTXVideo095DownBlock3D",) * 4,
        decoder_block_out_channels=(8, 16, 32),  # each the double of the one before: 0.9.5 has no other path
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 4,
        spatio_temporal_scaling=(True,) * 4,
        decoder_spatio_temporal_scaling=(True,) * 3,
        decoder_inject_noise=(False,) * 4,
        downsample_type=("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
        upsample_residual=(True,) * 3,
        upsample_factor=(2,) * 3,
        timestep_conditioning=True,
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )


# HunyuanVideo and FramePack ---------------------------------------------------------------------------------------

HUNYUAN: Mapping[str, Any] = {
    **HEADS, "num_layers": 2, "num_single_layers": 2, "num_refiner_layers": 2, "mlp_ratio": 2.0,
    "text_embed_dim": WIDTH, "pooled_projection_dim": WIDTH, "rope_axes_dim": (4, 6, 6),
}  # fmt: skip


def hunyuan_transformer(**settings: Any) -> Any:
    """HunyuanVideo: latents (B, 16 or 33, T, H, W), text (B, N, 32), pooled text (B, 32)."""
    from diffusers import HunyuanVideoTransformer3DModel

    return HunyuanVideoTransformer3DModel(**HUNYUAN, **settings)


def framepack_transformer() -> Any:
    """FramePack: HunyuanVideo with a history of clean latents at three scales and SigLIP states of width 32."""
    from diffusers import HunyuanVideoFramepackTransformer3DModel

    return HunyuanVideoFramepackTransformer3DModel(
        **HUNYUAN, guidance_embeds=True, has_image_proj=True, image_proj_dim=WIDTH, has_clean_x_embedder=True
    )


def hunyuan_vae() -> Any:
    """The autoencoder of HunyuanVideo: 16 channels, 8 x 8 px and 4 frames per latent."""
    from diffusers import AutoencoderKLHunyuanVideo

    return AutoencoderKLHunyuanVideo(block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4)


def hunyuan15_transformer(task: str) -> Any:
    """HunyuanVideo 1.5: latents (B, 65, T, H, W), text (B, N, 32), glyphs (B, N, 32), image (B, 729, 32).

    Its glyph projection is 2048 wide whatever the settings, so this one is 17 MB.

    Args:
        task: ``t2v`` or ``i2v``.
    """
    from diffusers import HunyuanVideo15Transformer3DModel

    return HunyuanVideo15Transformer3DModel(
        **HEADS,
        num_layers=2,
        num_refiner_layers=2,
        mlp_ratio=2.0,
        text_embed_dim=WIDTH,
        text_embed_2_dim=WIDTH,
        image_embed_dim=WIDTH,
        rope_axes_dim=(4, 6, 6),
        target_size=112,  # a 4:3 picture becomes 128 x 96 px
        task_type=task,
    )


def hunyuan15_vae() -> Any:
    """The autoencoder of HunyuanVideo 1.5: 32 channels, 16 x 16 px and 4 frames per latent."""
    from diffusers import AutoencoderKLHunyuanVideo15

    # The encoder averages groups of channels down to the 64 moments of the latents, so its last width is at least 64.
    return AutoencoderKLHunyuanVideo15(block_out_channels=(8, 8, 16, 16, 64), layers_per_block=1)


# Mochi ------------------------------------------------------------------------------------------------------------


def mochi_transformer() -> Any:
    """Mochi 1: latents (B, 12, T, H, W), text (B, 256, 32)."""
    from diffusers import MochiTransformer3DModel

    return MochiTransformer3DModel(**HEADS, num_layers=2, pooled_projection_dim=WIDTH, text_embed_dim=WIDTH)


def mochi_vae() -> Any:
    """The autoencoder of Mochi 1: 12 channels, 8 x 8 px and 6 frames per latent."""
    from diffusers import AutoencoderKLMochi

    # Its norms have 32 groups whatever the settings, so no width is smaller than 32.
    return AutoencoderKLMochi(
        encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4, layers_per_block=(1,) * 5
    )
