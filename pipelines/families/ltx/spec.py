"""LTX-Video as data."""

from __future__ import annotations

from dataclasses import replace

from ....compat.ranks import SplitPlan
from ... import family
from .layouts import LAYOUTS

CONDITION = "LTXConditionPipeline"
DEV, DISTILLED, STOCHASTIC = "dev", "distilled", "distilled_0.9.6"
LARGE = "13B"  # in the names of recipes: 48 blocks; else 28
OLDER = "0.9.7"  # in them: of 13B distilled
CHANNELS, SPATIAL_RATIO, TEMPORAL_RATIO = 128, 32, 8
# Written by `python benchmarks/runner.py memory_fits --write`.
FIT = family.FitFactors(tokens=13.47, latents=6.73, pixels=4.16, plain=3.95, text=4.35, streamed=9.25)

CONFIGS = "Lightricks/LTX-Video configs/"
ENHANCED_WORDS = 120  # in longer prompts the published script changes nothing
# Its 8 levels of the linear-quadratic schedule, of which the last belongs to the second pass.
TRAINED = (1.0, 0.9937, 0.9875, 0.9812, 0.975, 0.9094, 0.725, 0.4219)
LARGE_SIZE = (1216, 704, 30.0)  # what the published script makes, since 0.9.6
BASE = family.Recipe(
    name="2B dev",
    source=CONFIGS + "ltxv-2b-0.9.yaml, -0.9.1, -0.9.5, -0.9.6-dev",
    steps=40,
    guidance=(family.GuidanceStep(cfg=3.0, stg=1.0, rescale=0.7, blocks=(19,)),),
    image_noise=0.15,
    decode_timestep=0.05,
    decode_noise=0.025,
)


def distilled(name: str, source: str, block: int, tone_map: float = 0.0) -> family.Recipe:
    """The recipe of a distilled model, whose guidance names ``block``, with its second pass."""
    both = replace(BASE, guidance=(family.GuidanceStep(blocks=(block,)),))
    second = replace(both, name=f"{name}, second pass", steps=3, timesteps=TRAINED[5:], tone_map=tone_map)
    source, size = CONFIGS + source, LARGE_SIZE
    return replace(both, name=name, source=source, steps=7, timesteps=TRAINED[:7], size=size, second=second)


RECIPES = {
    DEV: BASE,
    # A published rescale of 1 is none: the publisher's loop leaves it out.
    f"{DEV} {LARGE}": replace(
        BASE,
        name="13B dev",
        source=CONFIGS + "ltxv-13b-0.9.8-dev.yaml, -0.9.7-dev",
        steps=30,
        skip_last=3,
        guidance=(
            family.GuidanceStep(1.0, cfg=1.0, stg=0.0),
            family.GuidanceStep(0.996, cfg=1.0, stg=0.0, blocks=(11, 25, 35, 39)),
            family.GuidanceStep(0.9933, cfg=6.0, stg=4.0, rescale=0.5, blocks=(22, 35, 39)),
            family.GuidanceStep(0.985, cfg=8.0, stg=4.0, rescale=0.5, blocks=(28,)),
            family.GuidanceStep(0.9767, cfg=6.0, stg=4.0, blocks=(28,)),
            family.GuidanceStep(0.9008, cfg=1.0, stg=2.0, blocks=(28,)),
            family.GuidanceStep(0.618, cfg=1.0, stg=1.0, blocks=(28,)),
        ),
        star=True,
        size=LARGE_SIZE,
        second=replace(
            BASE,
            name="13B dev, second pass",
            steps=30,
            skip_first=17,
            guidance=(family.GuidanceStep(1.0, cfg=1.0, stg=1.0, blocks=(27,)),),
            star=True,
        ),
    ),
    DISTILLED: distilled("2B distilled", "ltxv-2b-0.9.8-distilled.yaml", block=19),
    f"{DISTILLED} {LARGE}": distilled(
        "13B distilled",
        "ltxv-13b-0.9.8-distilled.yaml",
        block=42,
        tone_map=0.6,
    ),
    # Its configuration, in the parent of commit 02844ce, has no tone map.
    f"{DISTILLED} {LARGE} {OLDER}": distilled("13B distilled", "ltxv-13b-0.9.7-distilled.yaml", block=42),
    STOCHASTIC: replace(
        BASE,
        name="2B distilled 0.9.6",
        source=CONFIGS + "ltxv-2b-0.9.6-distilled.yaml",
        steps=8,
        guidance=(family.GuidanceStep(blocks=(19,)),),
        timesteps=(1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875),  # those, unrounded
        stochastic=True,
        size=LARGE_SIZE,
    ),
}

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
        layouts=LAYOUTS,
        kinds={"text_encoder": family.FileKind("t5", "caption_channels"), "vae": family.FileKind("ltx/vae")},
        tokenizers={"tokenizer": "t5"},
    ),
    sizes=family.Sizes(
        multiple=SPATIAL_RATIO,
        ratio=SPATIAL_RATIO,
        stride=TEMPORAL_RATIO,
        picture_crf=29,
        defaults=family.Defaults(width=704, height=512, frames=121, steps=BASE.steps, fps=25.0, cfg=3.0),
    ),
    recipes=family.Recipes(
        effective=family.GUIDED | {"guidance_rescale", "stg", "frame", "strength", "previous", "control", "prepare"},
        variants=(DEV, DISTILLED, STOCHASTIC),
        newer_variants=1,
        known=RECIPES,
        named={
            r"13b.?0\.9\.7.?distilled.?lora": f"{DISTILLED} {LARGE} {OLDER}",
            r"13b.?0\.9\.8.?distilled.?lora": f"{DISTILLED} {LARGE}",
        },
        batched_cfg=True,
    ),
    rewrites=family.Rewrites(
        published_blocks=(("diffusers.models.transformers.transformer_ltx.LTXVideoTransformerBlock", 28, False),),
        published_vae_fusion_points=39,
        returns_alone=True,
        split=SplitPlan(("image_rotary_emb",), dim=1, rows=("temb",)),
    ),
    # Parts of 0.9.5 are stored in bf16, but for its text encoder; its transformer's size there is derived.
    published=family.published_beside(__file__),
)
