"""Mochi 1 as data."""

from __future__ import annotations

from ....compat.precision import BF16, FP32, ModelPrecision, Precision
from ...family import HUB, PIPELINE_FILES, Defaults, Download, FamilySpec, FileKind, MemoryTerms, Offer
from .fit import FIT
from .layouts import LAYOUTS

CHANNELS, SPATIAL_RATIO, TEMPORAL_RATIO = 12, 8, 6
IN_FP32 = Precision(BF16, BF16, FP32, "upstream's reference decodes Mochi in fp32")
BLOCK = "diffusers.models.transformers.transformer_mochi.MochiTransformerBlock"

SPEC = FamilySpec(
    id="mochi",
    title="Mochi 1",
    package=str(__package__),
    order=5,
    pipelines={"MochiPipeline": "text"},
    transformer_classes=("MochiTransformer3DModel",),
    parts={
        "text_encoder": ("transformers", "T5EncoderModel"),
        "transformer": ("diffusers", "MochiTransformer3DModel"),
        "vae": ("diffusers", "AutoencoderKLMochi"),
    },
    tools={"tokenizer": "transformers", "scheduler": "diffusers"},
    text_parts=("text_encoder",),
    multiple=16,
    ratio=SPATIAL_RATIO,
    stride=TEMPORAL_RATIO,
    defaults=Defaults(width=848, height=480, frames=85, steps=64, fps=30.0, cfg=4.5, max_tokens=256),
    effective=frozenset({"cfg", "cfg_start", "cfg_end", "negative", "shift", "sigmas", "latents", "noise_mask"}),
    min_steps=2,
    pages=("https://huggingface.co/genmo/mochi-1-preview",),
    text_width="text_embed_dim",
    memory=MemoryTerms(FIT, reference_tokens=256, cropped_frames=TEMPORAL_RATIO - 1),
    precision=ModelPrecision({"cuda-sm80+": IN_FP32, "rocm": IN_FP32, "xpu": IN_FP32}),
    causal_decoder=True,
    batched_cfg=True,
    layouts=LAYOUTS,
    files={"text_encoder": FileKind("t5", "text_embed_dim"), "vae": FileKind("mochi/vae")},
    tokenizers={"tokenizer": "t5"},
    offer=Offer(
        (Download(f"{HUB}genmo/mochi-1-preview", "14be5fcea23095ed330cb214647916a451e38b6e", PIPELINE_FILES),),
        {"text": 8.9, "transformer": 18.7, "vae": 0.9},
    ),
    published_blocks=((BLOCK, 47, False), (BLOCK, 1, True)),
    published_vae_sites=38,
)
