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
# Transformer, VAE and ByT5 in fp32.
STORED = {
    "text_encoder": 14_141_274_960,
    "text_encoder_2": 877_273_128,
    "transformer": 33_306_642_968,
    "vae": 5_042_562_948,
}
FOLDERS = (*family.HUB_FILES, "text_encoder_2", "tokenizer_2", "guider")
PUBLISHER = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-"
DOWNLOAD = family.Download(f"{PUBLISHER}480p_t2v", "286be7ce72277246578a3e3cc2487e95ddae5bcf", FOLDERS, STORED)
DOWNLOAD_I2V = family.Download(
    f"{PUBLISHER}480p_i2v",
    "5a700ee883ff4c1b3d887ec4188755a7a5e2f698",
    (*FOLDERS, "image_encoder", "feature_extractor"),
    {**STORED, "image_encoder": 856_506_120},
)
PAGES = tuple(f"https://huggingface.co/{PUBLISHER}{p}_{task}" for p in ("480p", "720p") for task in ("t2v", "i2v"))
REPACKAGED = "Comfy-Org/HunyuanVideo_1.5_repackaged"
QWEN = (family.Quantised(REPACKAGED, "qwen_2.5_vl_7b_fp8_scaled.safetensors", 9.38),)
SOURCE = "Tencent-Hunyuan/HunyuanVideo-1.5 hyvideo/commons/__init__.py, PIPELINE_CONFIGS"
SUPER_SOURCE = SOURCE.replace("PIPELINE", "SR_PIPELINE")


def quantised(task: str) -> tuple[family.Quantised, ...]:
    """Published files of the 480p transformer that needs no cfg, in fewer bits. Args: task: ``t2v`` or ``i2v``."""
    name, repository = f"hunyuanvideo1.5_480p_{task}_cfg_distilled", f"jayn7/HunyuanVideo-1.5_{task.upper()}_480p-GGUF"
    return (
        family.Quantised(REPACKAGED, f"{name}_fp8_scaled.safetensors", 8.33),
        family.Quantised(repository, f"{name}-Q5_K_S.gguf", 5.94),
        family.Quantised(repository, f"{name}-Q4_K_S.gguf", 4.9),
    )


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
    ),
    published=family.Published(
        tiny_decoders=(
            family.TinyDecoder("taehv1_5", "madebyollin/taehv 1f14a568, MIT"),
            # Core multiplies its latents by the scale that its publisher divides them by.
            family.TinyDecoder("lighttaehy1_5", "lightx2v/Autoencoders", divisor=1.03682, slope=0.2, symmetric=True),
        ),
        cautions=(
            family.Caution(
                r"distilled.?sparse|sparse.?cfg",
                "",
                "it was trained with sparse attention (flex-block-attn); here every token sees all others",
                "Tencent-Hunyuan/HunyuanVideo-1.5 README",
            ),
            family.Caution(
                r"omni.?weaving",
                "",
                "OmniWeaving composes from several pictures and clips, which have no input here: it runs as plain "
                "HunyuanVideo 1.5",
                "Tencent-Hunyuan/OmniWeaving README",
            ),
            family.Caution(
                r"capybara",
                "",
                "capybara edits a picture or a clip, which has no input here: it runs as text to video",
                WAN2GP,
            ),
            family.Caution(
                r"_sr(?![a-z])",
                "",
                "the name says super-resolution, but its transformer has no place for the small video (98 channels)",
                "Tencent-Hunyuan/HunyuanVideo-1.5 60783e7 hyvideo/pipelines/hunyuan_video_sr_pipeline.py",
                channels=65,
            ),
        ),
        pages=PAGES,
        offer=family.Offer(
            (DOWNLOAD,),
            {"text": 13.2, "text 2": 0.4, "transformer": 15.5, "vae": 2.3},
            {"transformer": quantised("t2v"), "text": QWEN},
        ),
        more_offers={
            "HunyuanVideo 1.5 image to video": family.Offer(
                (DOWNLOAD_I2V,),
                {"text": 13.2, "text 2": 0.4, "image": 0.8, "transformer": 15.5, "vae": 2.3},
                {"transformer": quantised("i2v"), "text": QWEN},
            )
        },
        musubi=family.MusubiCache(
            "hv15", "hunyuan_video_1_5", ratio=16, text={"varlen_vl_embed": EMBEDS, "varlen_byt5_embed": EMBEDS_2}
        ),
    ),
)
