"""FramePack as data."""

from __future__ import annotations

from ....compat.device.precision import HALF_TEXT
from ....compat.ranks import SplitPlan
from ... import family
from ...keys import layouts_beside
from ..hunyuan_video import layouts as hunyuan_video
from ..hunyuan_video.spec import BLOCKS, FILES, TOOLS

SPATIAL_RATIO, TEMPORAL_RATIO = 8, 4
I2V, F1 = "framepack", "framepack_f1"
UPRIGHT = ((416, 960), (448, 864), (480, 832), (512, 768), (544, 704), (576, 672), (608, 640))  # it was trained on
# Written by `python benchmarks/runner.py memory_fits --write`.
FIT = family.FitFactors(tokens=13.17, latents=1.31, pixels=4.81, plain=3.35, text=4.08, streamed=13.29, attending=0.85)

SPEC = family.FamilySpec(
    id="framepack",
    title="FramePack",
    package=str(__package__),
    order=4,
    memory=family.MemoryTerms(
        FIT,
        reference_tokens=351,
        text_tokens=64,
        history_tokens=729,  # of the start picture
        section_context=(2.5, 21),  # two clean frames, and eighteen more at lower scales
        clip=family.ClipTerms(frames=108, batch=16, seen={I2V: 6, F1: 3}),  # three on each side that it looks to
        decode_window=17,
    ),
    files=family.FamilyFiles(
        pipelines={"HunyuanVideoFramepackPipeline": "image"},
        transformer_classes=("HunyuanVideoFramepackTransformer3DModel", "HunyuanVideoTransformer3DModelPacked"),
        parts={
            "text_encoder": ("transformers", "LlamaModel"),
            "text_encoder_2": ("transformers", "CLIPTextModel"),
            "image_encoder": ("transformers", "SiglipVisionModel"),
            "transformer": ("diffusers", "HunyuanVideoFramepackTransformer3DModel"),
            "vae": ("diffusers", "AutoencoderKLHunyuanVideo"),
        },
        tools={**TOOLS, "feature_extractor": "transformers"},
        text_parts=("text_encoder", "text_encoder_2"),
        base="hunyuan_video",
        lone_task="image",
        text_width="text_embed_dim",
        image_required=True,
        layouts=layouts_beside(__file__),
        lora_layouts=hunyuan_video.LAYOUTS,
        kinds={**FILES, "image_encoder": family.FileKind("siglip", "image_proj_dim")},
        tokenizers={"tokenizer": "llama", "tokenizer_2": "clip_l"},
    ),
    sizes=family.Sizes(
        multiple=16,
        ratio=SPATIAL_RATIO,
        stride=TEMPORAL_RATIO,
        defaults=family.Defaults(width=640, height=608, frames=145, steps=25, fps=30.0, guidance=10.0),
        picture_filter="LANCZOS",
        buckets=(*UPRIGHT, *((high, wide) for wide, high in reversed(UPRIGHT))),
    ),
    recipes=family.Recipes(
        effective=family.GUIDED - {"negative", "latents", "noise_mask"}
        | {"guidance", "template", "sections", "frame", "strength", "vision", "previous", "prepare"},
        variants=(I2V, F1),
        sections=True,
    ),
    rewrites=family.Rewrites(
        precision=HALF_TEXT,
        published_blocks=BLOCKS,
        published_vae_fusion_points=29,
        split=SplitPlan(("freqs_cis", "image_rotary_emb"), dim=0),
    ),
    # The scale of its caches is of its VAE, whose encoder's result that trainer multiplies for FramePack.
    published=family.published_beside(__file__),
)
