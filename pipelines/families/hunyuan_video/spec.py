"""HunyuanVideo as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....compat.device.precision import HALF_TEXT
from ....compat.ranks import SplitPlan
from ... import family
from .layouts import LAYOUTS

CHANNELS, SPATIAL_RATIO, TEMPORAL_RATIO = 16, 8, 4
TOKEN_REPLACE, LATENT_CONCAT, PICTURE_CONCAT = "token_replace", "latent_concat", "picture_concat"
TENCENT, SKYREELS, DYNAMIC = "hunyuan_video", "skyreels", "i2v_dynamic"
BLOCKS = (
    ("diffusers.models.transformers.transformer_hunyuan_video.HunyuanVideoTransformerBlock", 20, False),
    ("diffusers.models.transformers.transformer_hunyuan_video.HunyuanVideoSingleTransformerBlock", 40, False),
)
FILES = {
    "text_encoder": family.FileKind("llama", "text_embed_dim"),
    "text_encoder_2": family.FileKind("clip_l", "pooled_projection_dim"),
    "vae": family.FileKind("hunyuan_video/vae"),
}
TOOLS = dict.fromkeys(("tokenizer", "tokenizer_2"), "transformers") | {"scheduler": "diffusers"}
# Written by `python benchmarks/runner.py memory_fits --write`.
FIT = family.FitFactors(tokens=12.25, latents=3.83, pixels=4.81, plain=3.35, text=4.08, streamed=13.29, attending=0.85)


def image_condition(config: Mapping[str, Any]) -> str | None:
    """Kind of picture input in a transformer's ``config.json``: its name, else by further channels; None for none."""
    named = config.get("image_condition_type")
    out = config.get("out_channels", CHANNELS)
    beside = config.get("in_channels", CHANNELS) - out
    return {out: PICTURE_CONCAT, out + 1: LATENT_CONCAT}.get(beside) if named is None else named


SPEC = family.FamilySpec(
    id=TENCENT,
    title="HunyuanVideo",
    package=str(__package__),
    order=2,
    memory=family.MemoryTerms(FIT, reference_tokens=351, text_tokens=64, decode_window=65),
    files=family.FamilyFiles(
        pipelines={"HunyuanVideoPipeline": "text", "HunyuanVideoImageToVideoPipeline": "image"},
        transformer_classes=("HunyuanVideoTransformer3DModel",),
        parts={
            "text_encoder": ("transformers", "LlamaModel", "LlavaForConditionalGeneration"),
            "text_encoder_2": ("transformers", "CLIPTextModel"),
            "transformer": ("diffusers", "HunyuanVideoTransformer3DModel"),
            "vae": ("diffusers", "AutoencoderKLHunyuanVideo"),
        },
        tools={**TOOLS, "image_processor": "transformers"},
        text_parts=("text_encoder", "text_encoder_2"),
        optional=("image_processor",),
        text_width="text_embed_dim",
        image_required=True,
        layouts=LAYOUTS,
        kinds=FILES,
        tokenizers={"tokenizer": "llama", "tokenizer_2": "clip_l"},
        text_vision="llava_vision",
    ),
    sizes=family.Sizes(
        multiple=16,
        ratio=SPATIAL_RATIO,
        stride=TEMPORAL_RATIO,
        defaults=family.Defaults(width=1280, height=720, frames=129, steps=50, fps=24.0, guidance=6.0),
        picture_filter="BILINEAR",
        picture_floor=True,
        # Tencent's script decodes in windows of 64 frames, 48 apart; diffusers' 16 and 12 show as a rhythm in motion.
        vae_tile=256,  # of the same script
        most_whole_cells=32 * 32 * 17,  # of such a tile in one window
    ),
    recipes=family.Recipes(
        effective=family.GUIDED | {"guidance", "template", "image", "prepare"},
        variants=(TENCENT, SKYREELS, DYNAMIC),
        newer_variants=3,
    ),
    rewrites=family.Rewrites(
        precision=HALF_TEXT,
        vae_settings={"tile_sample_min_num_frames": 64, "tile_sample_stride_num_frames": 48},
        published_blocks=BLOCKS,
        published_vae_fusion_points=29,
        split=SplitPlan(("freqs_cis", "image_rotary_emb"), dim=0, leading=("num_tokens",)),
    ),
    published=family.published_beside(__file__),
)
