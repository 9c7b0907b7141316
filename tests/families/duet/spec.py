"""Duet as data."""

from anygpu.compat.device.precision import ALL_BF16, BF16, FP32, ModelPrecision, Precision
from anygpu.pipelines import family
from anygpu.pipelines.keys import TRANSFORMER, Layout, Row

CHANNELS, SPATIAL_RATIO, TEMPORAL_RATIO, VOICES = 12, 8, 6, 3
WHY = "Duet decodes in fp32"

SPEC = family.FamilySpec(
    id="duet",
    title="Duet",
    package=str(__package__),
    order=99,
    memory=family.MemoryTerms(
        family.FitFactors(tokens=16.88, latents=3.16, pixels=4.15, plain=0.0, text=4.31, streamed=6.82, chunked=1.46),
        reference_tokens=256,
    ),
    files=family.FamilyFiles(
        pipelines={"DuetPipeline": "text"},
        transformer_classes=("DuetTransformer",),
        parts={
            "text_encoder": ("transformers", "T5EncoderModel"),
            "transformer": ("diffusers", "MochiTransformer3DModel"),
            "transformer_2": ("diffusers", "MochiTransformer3DModel"),
            "vae": ("diffusers", "AutoencoderKLMochi"),
        },
        tools={"tokenizer": "transformers", "scheduler": "diffusers"},
        text_parts=("text_encoder",),
        text_width="text_embed_dim",
        layouts=(
            Layout(
                f"duet{TRANSFORMER}",
                "Duet as released",
                ("voice.0.query.weight",),
                (Row("voice.#.query.*", "transformer_blocks.#.attn1.to_q.*"),),
            ),
        ),
    ),
    sizes=family.Sizes(
        multiple=16,
        ratio=SPATIAL_RATIO,
        stride=TEMPORAL_RATIO,
        defaults=family.Defaults(width=64, height=64, frames=7, steps=4, fps=24.0, cfg=2.0),
    ),
    recipes=family.Recipes(
        effective=frozenset({"cfg", "cfg_start", "cfg_end", "negative", "shift", "sigmas"}), batched_cfg=True
    ),
    rewrites=family.Rewrites(
        precision=ModelPrecision({ALL_BF16: Precision(BF16, BF16, FP32, WHY)}), causal_decoder=True
    ),
)
