"""LTX-Video as data."""

from __future__ import annotations

from ....compat.ranks import SplitPlan
from ... import family
from ...keys import layouts_beside

CONDITION = "LTXConditionPipeline"
DEV, DISTILLED, STOCHASTIC = "dev", "distilled", "distilled_0.9.6"
CHANNELS, SPATIAL_RATIO, TEMPORAL_RATIO = 128, 32, 8
# Written by `python benchmarks/runner.py memory_fits --write`.
FIT = family.FitFactors(tokens=13.47, latents=6.73, pixels=4.16, plain=3.95, text=4.35, streamed=9.25, attending=0.71)

SPEC = family.FamilySpec(
    id="ltx",
    title="LTX-Video",
    package=str(__package__),
    order=1,
    memory=family.MemoryTerms(FIT, reference_tokens=256),
    files=family.FamilyFiles(
        pipelines={"LTXPipeline": "text", "LTXImageToVideoPipeline": "image", CONDITION: "text"},
        transformer_classes=("LTXVideoTransformer3DModel",),
        parts={
            "text_encoder": ("transformers", "T5EncoderModel"),
            "transformer": ("diffusers", "LTXVideoTransformer3DModel"),
            "vae": ("diffusers", "AutoencoderKLLTXVideo"),
        },
        tools={"tokenizer": "transformers", "scheduler": "diffusers"},
        text_parts=("text_encoder",),
        text_width="caption_channels",
        layouts=layouts_beside(__file__),
        kinds={"text_encoder": family.FileKind("t5", "caption_channels"), "vae": family.FileKind("ltx/vae")},
        tokenizers={"tokenizer": "t5"},
    ),
    sizes=family.Sizes(
        multiple=SPATIAL_RATIO,
        ratio=SPATIAL_RATIO,
        stride=TEMPORAL_RATIO,
        picture_crf=29,
        defaults=family.Defaults(width=704, height=512, frames=121, steps=40, fps=25.0, cfg=3.0),
    ),
    recipes=family.Recipes(
        effective=family.GUIDED | {"guidance_rescale", "stg", "frame", "strength", "previous", "control", "prepare"},
        variants=(DEV, DISTILLED, STOCHASTIC),
        newer_variants=1,
        batched_cfg=True,
    ),
    rewrites=family.Rewrites(
        published_blocks=(("diffusers.models.transformers.transformer_ltx.LTXVideoTransformerBlock", 28, False),),
        published_vae_fusion_points=39,
        returns_alone=True,
        split=SplitPlan(("image_rotary_emb",), dim=1, rows=("temb",)),
    ),
    # Recipes: distilled models run 8 levels of the linear-quadratic schedule, of which the last belongs to the second
    # pass, and 0.9.6 the same levels unrounded. A published rescale of 1 is none: the publisher's loop leaves it out.
    # The configuration of 13B distilled 0.9.7, in the parent of commit 02844ce, has no tone map.
    # Parts of 0.9.5 are stored in bf16, but for its text encoder; its transformer's size there is derived.
    published=family.published_beside(__file__),
)
