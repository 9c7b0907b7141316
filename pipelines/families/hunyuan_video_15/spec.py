"""HunyuanVideo 1.5 as data."""

from __future__ import annotations

from ....compat.ranks import SplitPlan
from ... import family
from ...base import EMBEDS, EMBEDS_2
from .layouts import LAYOUTS

CHANNELS, SPATIAL_RATIO, TEMPORAL_RATIO = 32, 16, 4
WAN2GP = "deepbeepmeep/Wan2GP 8681e9f7"
NO_CFG, CFG = (family.GuidanceStep(),), (family.GuidanceStep(cfg=6.0),)
# Written by `python benchmarks/runner.py memory_fits --write`.
FIT = family.FitFactors(tokens=8.33, latents=2.27, pixels=6.01, plain=0.0, text=3.42, streamed=13.18, chunked=1.26)
BLOCK = "diffusers.models.transformers.transformer_hunyuan_video15.HunyuanVideo15TransformerBlock"
FEW_STEPS = "few steps"
SUPER_CHANNELS = 2 * (CHANNELS + 1) + CHANNELS  # noise, picture and small video, the last two with a mask
SMALL, LARGE = 960, 1440  # sides of squares of as many pixels as 720p and 1080p have
SOURCE = "Tencent-Hunyuan/HunyuanVideo-1.5 hyvideo/commons/__init__.py, PIPELINE_CONFIGS"
SUPER_SOURCE = SOURCE.replace("PIPELINE", "SR_PIPELINE")

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
        layouts=LAYOUTS,
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
    recipes=family.Recipes(
        effective=family.GUIDED | {"guidance_rescale", "template", "vision", "prepare"},
        known={
            "": family.Recipe("published settings, also where it needs no cfg", SOURCE, steps=50),
            FEW_STEPS: family.Recipe("480p i2v step distilled", SOURCE, steps=12),  # 8 work too, says the README
            **{
                f"super-resolution {side}": family.Recipe(
                    f"super-resolution to {name}", SUPER_SOURCE, steps=steps, guidance=NO_CFG, shift=2.0
                )
                for side, name, steps in ((SMALL, "720p", 6), (LARGE, "1080p", 8))
            },
            "capybara": family.Recipe("capybara", WAN2GP, steps=20, guidance=CFG, shift=7.0),
            "lightx2v": family.Recipe(
                "LightX2V, 4 steps",
                "lightx2v/Hy1.5-Distill-Models card; ModelTC/LightX2V f8aee98b examples/hunyuan_video",
                steps=4,
                guidance=NO_CFG,
                size=(848, 480, 16.0),
                frames=81,
                shift=9.0,
            ),
            "lightx2v LoRA": family.Recipe("LightX2V's LoRA, 8 steps", WAN2GP, steps=8, guidance=NO_CFG, shift=3.0),
            "step distilled LoRA": family.Recipe(
                "i2v step distilled LoRA, 8 steps", WAN2GP, steps=8, guidance=NO_CFG, shift=4.0
            ),
        },
        named={
            r"capybara": "capybara",
            r"1_5_lig[th]{2}x2v.*rank": "lightx2v LoRA",
            r"1_5_i2v_step_distilled.*rank": "step distilled LoRA",
            r"(hy|hunyuan.?video).?1.?5.*lightx2v.*4.?step": "lightx2v",
            r"480p_i2v_step_distilled": FEW_STEPS,
        },
    ),
    rewrites=family.Rewrites(
        causal_decoder=True,
        published_blocks=((BLOCK, 54, False),),
        published_vae_fusion_points=35,
        split=SplitPlan(("freqs_cis",), dim=0),
        sparse=True,
    ),
    # Core multiplies the latents of LightTAE by the scale that its publisher divides them by.
    published=family.published_beside(
        __file__,
        family.MusubiCache(
            "hv15", "hunyuan_video_1_5", ratio=16, text={"varlen_vl_embed": EMBEDS, "varlen_byt5_embed": EMBEDS_2}
        ),
    ),
)
