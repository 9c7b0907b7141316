"""Tensor names of text and image encoders as single files: as published, as ComfyUI has them, and in GGUF's names."""

from __future__ import annotations

from collections.abc import Iterable

from .keys import SAME, Layout, Row

UNDER_MODEL = (Row("model.*", "*"),)
GGUF_LAYER = (
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
)
GGUF_ENDS = (
    Row("token_embd.weight", "embed_tokens.weight"),
    Row("output_norm.weight", "norm.weight"),
    *(Row(f"blk.#.{source}.*", f"layers.#.{target}.*") for source, target in GGUF_LAYER),
)


def gguf_llama(heads: int, key_heads: int) -> tuple[Row, ...]:
    """Llama in GGUF's names, where query and key rows of each head are in another order; with 0 heads they are not."""
    return (
        *GGUF_ENDS,
        Row("blk.#.attn_q.*", "layers.#.self_attn.q_proj.*", heads=heads),
        Row("blk.#.attn_k.*", "layers.#.self_attn.k_proj.*", heads=key_heads),
    )


def _llama(_: Iterable[str]) -> tuple[Row, ...]:
    return gguf_llama(32, 8)  # of Llama 3 8B, the only one these models use


T5_LAYER = (
    ("attn_q", "layer.0.SelfAttention.q"),
    ("attn_k", "layer.0.SelfAttention.k"),
    ("attn_v", "layer.0.SelfAttention.v"),
    ("attn_o", "layer.0.SelfAttention.o"),
    ("attn_rel_b", "layer.0.SelfAttention.relative_attention_bias"),
    ("attn_norm", "layer.0.layer_norm"),
    ("ffn_gate", "layer.1.DenseReluDense.wi_0"),
    ("ffn_up", "layer.1.DenseReluDense.wi_1"),
    ("ffn_down", "layer.1.DenseReluDense.wo"),
    ("ffn_norm", "layer.1.layer_norm"),
)
T5_GGUF = (
    Row("token_embd.weight", "shared.weight"),
    Row("enc.output_norm.weight", "encoder.final_layer_norm.weight"),
    *(Row(f"enc.blk.#.{source}.*", f"encoder.block.#.{target}.*") for source, target in T5_LAYER),
)
T5_MARK = "encoder.block.0.layer.0.SelfAttention.q.weight"
HEADS = (r"^lm_head\.", r"^model\.lm_head\.", r"^output\.weight$", r"rope_freqs\.weight$", r"rotary_emb\.inv_freq$")
POSITIONS = r"position_ids$"

TEXT: tuple[Layout, ...] = (
    Layout(
        "t5", "a T5 encoder", (T5_MARK, "shared.weight"), SAME, ignored=(r"^encoder\.embed_tokens\.", r"^decoder\.")
    ),
    Layout(
        "t5",
        "a T5 encoder",
        (T5_MARK, "encoder.embed_tokens.weight"),
        (Row("encoder.embed_tokens.weight", "shared.weight"), *SAME),
        absent=("shared.weight",),
    ),
    Layout("t5", "a T5 encoder in GGUF's names", ("enc.blk.0.attn_q.weight", "token_embd.weight"), T5_GGUF),
    Layout(
        "clip_l",
        "CLIP-L's text encoder",
        ("text_model.encoder.layers.0.self_attn.q_proj.weight", "text_model.embeddings.token_embedding.weight"),
        SAME,
        ignored=(r"^text_projection", r"^logit_scale$", POSITIONS, r"^vision_model\.", r"^visual_projection"),
    ),
    Layout(
        "qwen2_5_vl",
        "Qwen 2.5 VL",
        ("model.layers.0.self_attn.q_proj.bias", "model.embed_tokens.weight"),
        UNDER_MODEL,
        ignored=(*HEADS, r"^visual\.", r"^model\.visual\."),
    ),
    Layout(
        "qwen2_5_vl",
        "Qwen 2.5 VL",
        ("model.language_model.layers.0.self_attn.q_proj.bias", "model.language_model.embed_tokens.weight"),
        (Row("model.language_model.*", "*"),),
        ignored=(*HEADS, r"^visual\.", r"^model\.visual\."),
    ),
    Layout(
        "qwen2_5_vl",
        "Qwen 2.5 VL in GGUF's names",
        ("blk.0.attn_q.bias", "token_embd.weight"),
        gguf_llama(0, 0),
        ignored=HEADS,
    ),
    Layout(
        "qwen2_5_vl",
        "Qwen 2.5 VL's text model",
        ("layers.0.self_attn.q_proj.bias", "embed_tokens.weight"),
        SAME,
        ignored=HEADS,
    ),
    Layout(
        "llama",
        "Llama 3",
        ("model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"),
        UNDER_MODEL,
        absent=("model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.q_norm.weight"),
        ignored=HEADS,
    ),
    Layout(
        "llama",
        "Llama 3's text model",
        ("layers.0.self_attn.q_proj.weight", "embed_tokens.weight"),
        SAME,
        absent=("layers.0.self_attn.q_proj.bias", "layers.0.self_attn.q_norm.weight"),
        ignored=HEADS,
    ),
    Layout(
        "llama",
        "Llama 3 in GGUF's names",
        ("blk.0.attn_q.weight", "token_embd.weight"),
        _llama,
        absent=("blk.0.attn_q.bias", "blk.0.attn_q_norm.weight"),
        ignored=HEADS,
    ),
    Layout(
        "llava_vision",
        "the picture half of Llava",
        ("vision_model.embeddings.class_embedding", "multi_modal_projector.linear_1.weight"),
        (
            Row("vision_model.*", "vision_tower.vision_model.*"),
            Row("multi_modal_projector.*", "multi_modal_projector.*"),
        ),
        ignored=(POSITIONS,),
    ),
    Layout(
        "siglip",
        "SigLIP's picture encoder",
        ("vision_model.embeddings.patch_embedding.bias", "vision_model.head.probe"),
        SAME,
        ignored=(POSITIONS, r"^text_model\.", r"^logit_"),
    ),
)
