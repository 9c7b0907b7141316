"""Mochi 1 as data."""

from __future__ import annotations

from ....compat.device.precision import ALL_BF16, BF16, FP32, ModelPrecision, Precision
from ....compat.ranks import SplitPlan
from ... import family
from .layouts import LAYOUTS

CHANNELS, SPATIAL_RATIO, TEMPORAL_RATIO, FAST = 12, 8, 6, "FastMochi"
IN_FP32 = Precision(BF16, BF16, FP32, "upstream's reference decodes Mochi in fp32")
BLOCK = "diffusers.models.transformers.transformer_mochi.MochiTransformerBlock"
# Written by `python benchmarks/runner.py memory_fits --write`.
FIT = family.FitFactors(
    tokens=17.09, latents=3.2, pixels=4.18, plain=0.0, text=4.17, streamed=6.89, chunked=1.45, attending=0.51
)

SPEC = family.FamilySpec(
    id="mochi",
    title="Mochi 1",
    package=str(__package__),
    order=5,
    memory=family.MemoryTerms(FIT, reference_tokens=256),
    files=family.FamilyFiles(
        pipelines={"MochiPipeline": "text"},
        transformer_classes=("MochiTransformer3DModel",),
        parts={
            "text_encoder": ("transformers", "T5EncoderModel"),
            "transformer": ("diffusers", "MochiTransformer3DModel"),
            "vae": ("diffusers", "AutoencoderKLMochi"),
        },
        tools={"tokenizer": "transformers", "scheduler": "diffusers"},
        text_parts=("text_encoder",),
        text_width="text_embed_dim",
        layouts=LAYOUTS,
        kinds={"text_encoder": family.FileKind("t5", "text_embed_dim"), "vae": family.FileKind("mochi/vae")},
        tokenizers={"tokenizer": "t5"},
    ),
    sizes=family.Sizes(
        multiple=16,
        ratio=SPATIAL_RATIO,
        stride=TEMPORAL_RATIO,
        defaults=family.Defaults(width=848, height=480, frames=85, steps=64, fps=30.0, cfg=4.5),
        min_steps=2,
    ),
    recipes=family.Recipes(effective=family.GUIDED, batched_cfg=True),
    rewrites=family.Rewrites(
        precision=ModelPrecision({ALL_BF16: IN_FP32}),
        causal_decoder=True,
        published_blocks=((BLOCK, 47, False), (BLOCK, 1, True)),
        published_vae_fusion_points=38,
        split=SplitPlan(("image_rotary_emb",), dim=0),
    ),
    # Noise levels of its fast variant: of 1000 levels, 750 of them linear to 0.1, the nearest tenth to each eighth.
    # The size of its smallest file is derived: the bits a weight that HunyuanVideo's file of this format has.
    published=family.published_beside(__file__),
)
