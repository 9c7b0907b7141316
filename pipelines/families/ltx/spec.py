"""LTX-Video as data."""

from __future__ import annotations

from ...family import GUIDED, HUB_FILES, Defaults, Download, FamilySpec, FileKind, Fit, MemoryTerms, Offer
from .layouts import LAYOUTS

CONDITION = "LTXConditionPipeline"
DEV, DISTILLED = "dev", "distilled"
CHANNELS, SPATIAL_RATIO, TEMPORAL_RATIO = 128, 32, 8
# Written by `python benchmarks/memory_fits.py`.
FIT = Fit(tokens=13.47, latents=6.73, pixels=4.16, plain=6.2, text=4.34, streamed=9.25)

SPEC = FamilySpec(
    id="ltx",
    title="LTX-Video",
    package=str(__package__),
    order=1,
    pipelines={"LTXPipeline": "text", "LTXImageToVideoPipeline": "image", CONDITION: "text"},
    transformer_classes=("LTXVideoTransformer3DModel",),
    parts={
        "text_encoder": ("transformers", "T5EncoderModel"),
        "transformer": ("diffusers", "LTXVideoTransformer3DModel"),
        "vae": ("diffusers", "AutoencoderKLLTXVideo"),
    },
    tools={"tokenizer": "transformers", "scheduler": "diffusers"},
    text_parts=("text_encoder",),
    multiple=SPATIAL_RATIO,
    ratio=SPATIAL_RATIO,
    stride=TEMPORAL_RATIO,
    defaults=Defaults(width=704, height=512, frames=121, steps=50, fps=25.0, cfg=3.0, max_tokens=256),
    effective=GUIDED | {"guidance_rescale", "frame", "strength", "previous"},
    variants=(DEV, DISTILLED),
    pages=(
        "https://huggingface.co/Lightricks/LTX-Video",
        "https://huggingface.co/Lightricks/LTX-Video-0.9.8-13B-distilled",
    ),
    text_width="caption_channels",
    memory=MemoryTerms(FIT, reference_tokens=128),
    batched_cfg=True,
    layouts=LAYOUTS,
    files={"text_encoder": FileKind("t5", "caption_channels"), "vae": FileKind("ltx/vae")},
    tokenizers={"tokenizer": "t5"},
    offer=Offer(
        (Download("Lightricks/LTX-Video", "8984fa25007f376c1a299016d0957a37a2f797bb", HUB_FILES),),
        {"text": 8.9, "transformer": 3.6, "vae": 0.8},
    ),
    published_blocks=(("diffusers.models.transformers.transformer_ltx.LTXVideoTransformerBlock", 28, False),),
    published_vae_sites=39,
)
