"""HunyuanVideo 1.5 as data."""

from __future__ import annotations

from ....compat.device.precision import HALF_VAE
from ....compat.ranks import SplitPlan
from ... import family
from ...keys import layouts_beside

CHANNELS, SPATIAL_RATIO, TEMPORAL_RATIO = 32, 16, 4
# Written by `python benchmarks/runner.py memory_fits --write`.
FIT = family.FitFactors(
    tokens=8.33, latents=2.76, pixels=6.01, plain=0.0, text=3.42, streamed=13.18, chunked=1.26, attending=0.82
)
BLOCK = "diffusers.models.transformers.transformer_hunyuan_video15.HunyuanVideo15TransformerBlock"
FEW_STEPS = "few steps"
SUPER_CHANNELS = 2 * (CHANNELS + 1) + CHANNELS  # noise, picture and small video, the last two with a mask
SMALL, LARGE = 960, 1440  # sides of squares of as many pixels as 720p and 1080p have

SPEC = family.FamilySpec(
    id="hunyuan_video_15",
    title="HunyuanVideo 1.5",
    package=str(__package__),
    order=3,
    memory=family.MemoryTerms(FIT, reference_tokens=160, text_tokens=64),
    files=family.FamilyFiles(
        pipelines={"HunyuanVideo15Pipeline": "text", "HunyuanVideo15ImageToVideoPipeline": "image"},
        transformer_classes=("HunyuanVideo15Transformer3DModel",),
        parts={
            "text_encoder": ("transformers", "Qwen2_5_VLTextModel"),
            "text_encoder_2": ("transformers", "T5EncoderModel"),
            "transformer": ("diffusers", "HunyuanVideo15Transformer3DModel"),
            "vae": ("diffusers", "AutoencoderKLHunyuanVideo15"),
            "image_encoder": ("transformers", "SiglipVisionModel"),
        },
        tools={
            **dict.fromkeys(("tokenizer", "tokenizer_2", "feature_extractor"), "transformers"),
            **dict.fromkeys(("scheduler", "guider"), "diffusers"),
        },
        text_parts=("text_encoder", "text_encoder_2"),
        optional=("image_encoder", "feature_extractor"),
        text_width="text_embed_dim",
        image_required=True,
        layouts=layouts_beside(__file__),
        kinds={
            "text_encoder": family.FileKind("qwen2_5_vl", "text_embed_dim"),
            "text_encoder_2": family.FileKind("t5", "text_embed_2_dim"),
            "image_encoder": family.FileKind("siglip", "image_embed_dim"),
            "vae": family.FileKind("hunyuan_video_15/vae"),
        },
        tokenizers={"tokenizer": "qwen2_5_vl", "tokenizer_2": "byt5"},
    ),
    sizes=family.Sizes(
        multiple=SPATIAL_RATIO,
        ratio=SPATIAL_RATIO,
        stride=TEMPORAL_RATIO,
        defaults=family.Defaults(width=848, height=480, frames=121, steps=50, fps=24.0, cfg=6.0, max_tokens=1000),
        picture_filter="LANCZOS",
        vae_tile=256,  # the VAE's own
        most_whole_cells=16 * 16 * 31,  # cells in one of the VAE's own tiles of the model's longest video
    ),
    recipes=family.Recipes(effective=family.GUIDED | {"guidance_rescale", "template", "vision", "prepare"}),
    rewrites=family.Rewrites(
        precision=HALF_VAE,
        causal_decoder=True,
        published_blocks=((BLOCK, 54, False),),
        published_vae_fusion_points=35,
        split=SplitPlan(("freqs_cis",), dim=0),
        sparse=True,
    ),
    # Of the step-distilled recipe 8 steps work too, says its README. Core multiplies the latents of LightTAE by the
    # scale that its publisher divides them by.
    published=family.published_beside(__file__),
)
