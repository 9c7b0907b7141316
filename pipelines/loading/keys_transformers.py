"""Tensor names of transformers in their original releases and in ComfyUI's, beside diffusers' own.

Sources: diffusers' conversion scripts of each model, and ComfyUI's ``supported_models`` for the names it saves.
"""

from __future__ import annotations

from collections.abc import Iterable

from .keys import SAME, Layout, Row

REFINED = "txt_in.individual_token_refiner.blocks.#"
REFINER = "context_embedder.token_refiner.refiner_blocks.#"


def _embedder(source: str, target: str, names: str = "mlp.0 mlp.2") -> tuple[Row, ...]:
    """Two layers under the names of the release; ComfyUI calls them in and out."""
    return tuple(
        Row(f"{source}.{name}.*|{source}.{comfy}.*", f"{target}.{ours}.*")
        for name, comfy, ours in zip(names.split(), ("in_layer", "out_layer"), ("linear_1", "linear_2"), strict=True)
    )


def _norms(source: str, plain: str, query: str, key: str) -> Iterable[Row]:
    """Query and key norms: ``_q_norm.weight`` in the release, ``.norm.query_norm.scale`` or ``.weight`` in ComfyUI."""
    for letter, word, target in (("q", "query", query), ("k", "key", key)):
        ways = (
            f"{source}{plain}{letter}_norm.weight",
            *(f"{source}.norm.{word}_norm.{end}" for end in ("weight", "scale")),
        )
        yield Row("|".join(ways), target)


def _double(stream: str, norm: str, names: tuple[str, ...], feed: str) -> Iterable[Row]:
    """One stream of a double block."""
    source, target = f"double_blocks.#.{stream}", "transformer_blocks.#"
    q, k, v, out, norm_q, norm_k = (f"{target}.attn.{name}" for name in names)
    yield Row(f"{source}_mod.linear.*|{source}_mod.lin.*", f"{target}.{norm}.linear.*")
    yield Row(f"{source}_attn_qkv.*|{source}_attn.qkv.*", f"{q}.* {k}.* {v}.*")
    for letter, one in zip("qkv", (q, k, v), strict=True):
        yield Row(f"{source}_attn_{letter}.*", f"{one}.*")
    yield from _norms(f"{source}_attn", "_", f"{norm_q}.weight", f"{norm_k}.weight")
    yield Row(f"{source}_attn_proj.*|{source}_attn.proj.*", f"{out}.*")
    yield Row(f"{source}_mlp.fc1.*|{source}_mlp.0.*", f"{target}.{feed}.net.0.proj.*")
    yield Row(f"{source}_mlp.fc2.*|{source}_mlp.2.*", f"{target}.{feed}.net.2.*")


HUNYUAN_COMMON: tuple[Row, ...] = (
    Row("img_in.*", "x_embedder.*"),
    Row("txt_in.input_embedder.*", "context_embedder.proj_in.*"),
    *_embedder("txt_in.t_embedder", "context_embedder.time_text_embed.timestep_embedder"),
    *_embedder("txt_in.c_embedder", "context_embedder.time_text_embed.text_embedder", "linear_1 linear_2"),
    Row(f"{REFINED}.norm1.*", f"{REFINER}.norm1.*"),
    Row(f"{REFINED}.norm2.*", f"{REFINER}.norm2.*"),
    Row(
        f"{REFINED}.self_attn_qkv.*|{REFINED}.self_attn.qkv.*",
        f"{REFINER}.attn.to_q.* {REFINER}.attn.to_k.* {REFINER}.attn.to_v.*",
    ),
    Row(f"{REFINED}.self_attn_proj.*|{REFINED}.self_attn.proj.*", f"{REFINER}.attn.to_out.0.*"),
    Row(f"{REFINED}.mlp.fc1.*|{REFINED}.mlp.0.*", f"{REFINER}.ff.net.0.proj.*"),
    Row(f"{REFINED}.mlp.fc2.*|{REFINED}.mlp.2.*", f"{REFINER}.ff.net.2.*"),
    Row(f"{REFINED}.adaLN_modulation.1.*", f"{REFINER}.norm_out.linear.*"),
    *_double("img", "norm1", ("to_q", "to_k", "to_v", "to_out.0", "norm_q", "norm_k"), "ff"),
    *_double(
        "txt",
        "norm1_context",
        ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "norm_added_q", "norm_added_k"),
        "ff_context",
    ),
    Row("final_layer.linear.*", "proj_out.*"),
    Row("final_layer.adaLN_modulation.1.*", "norm_out.linear.*", turned=True),
)

SINGLE = "single_transformer_blocks.#"
HUNYUAN: tuple[Row, ...] = (
    *HUNYUAN_COMMON,
    *_embedder("time_in", "time_text_embed.timestep_embedder"),
    *_embedder("guidance_in", "time_text_embed.guidance_embedder"),
    *_embedder("vector_in", "time_text_embed.text_embedder", "in_layer out_layer"),
    Row("single_blocks.#.modulation.linear.*|single_blocks.#.modulation.lin.*", f"{SINGLE}.norm.linear.*"),
    Row(
        "single_blocks.#.linear1.*",
        f"{SINGLE}.attn.to_q.* {SINGLE}.attn.to_k.* {SINGLE}.attn.to_v.* {SINGLE}.proj_mlp.*",
        first_square=True,
    ),
    Row("single_blocks.#.linear2.*", f"{SINGLE}.proj_out.*"),
    *_norms("single_blocks.#", ".", f"{SINGLE}.attn.norm_q.weight", f"{SINGLE}.attn.norm_k.weight"),
)

HUNYUAN_15: tuple[Row, ...] = (
    *HUNYUAN_COMMON,
    *_embedder("time_in", "time_embed.timestep_embedder"),
    *_embedder("time_r_in", "time_embed.timestep_embedder_r"),
    Row("byt5_in.layernorm.*", "context_embedder_2.norm.*"),
    *(Row(f"byt5_in.fc{n}.*", f"context_embedder_2.linear_{n}.*") for n in (1, 2, 3)),
    Row("vision_in.proj.0.*", "image_embedder.norm_in.*"),
    Row("vision_in.proj.1.*", "image_embedder.linear_1.*"),
    Row("vision_in.proj.3.*", "image_embedder.linear_2.*"),
    Row("vision_in.proj.4.*", "image_embedder.norm_out.*"),
    Row("cond_type_embedding.weight", "cond_type_embed.weight"),
)

BLOCK = "transformer_blocks.#"
MOCHI: tuple[Row, ...] = (
    Row("x_embedder.proj.*", "patch_embed.proj.*"),
    *_embedder("t_embedder", "time_embed.timestep_embedder"),
    Row("t5_y_embedder.*", "time_embed.pooler.*"),
    Row("t5_yproj.*", "time_embed.caption_proj.*"),
    Row("pos_frequencies", "pos_frequencies"),
    Row("blocks.#.mod_x.*", f"{BLOCK}.norm1.linear.*"),
    Row("blocks.#.mod_y.*", f"{BLOCK}.norm1_context.linear.*", last=f"{BLOCK}.norm1_context.linear_1.*"),
    Row("blocks.#.attn.qkv_x.*", f"{BLOCK}.attn1.to_q.* {BLOCK}.attn1.to_k.* {BLOCK}.attn1.to_v.*"),
    Row("blocks.#.attn.qkv_y.*", f"{BLOCK}.attn1.add_q_proj.* {BLOCK}.attn1.add_k_proj.* {BLOCK}.attn1.add_v_proj.*"),
    Row("blocks.#.attn.q_norm_x.*", f"{BLOCK}.attn1.norm_q.*"),
    Row("blocks.#.attn.k_norm_x.*", f"{BLOCK}.attn1.norm_k.*"),
    Row("blocks.#.attn.q_norm_y.*", f"{BLOCK}.attn1.norm_added_q.*"),
    Row("blocks.#.attn.k_norm_y.*", f"{BLOCK}.attn1.norm_added_k.*"),
    Row("blocks.#.attn.proj_x.*", f"{BLOCK}.attn1.to_out.0.*"),
    Row("blocks.#.attn.proj_y.*", f"{BLOCK}.attn1.to_add_out.*"),
    Row("blocks.#.mlp_x.w1.*", f"{BLOCK}.ff.net.0.proj.*", turned=True),
    Row("blocks.#.mlp_x.w2.*", f"{BLOCK}.ff.net.2.*"),
    Row("blocks.#.mlp_y.w1.*", f"{BLOCK}.ff_context.net.0.proj.*", turned=True),
    Row("blocks.#.mlp_y.w2.*", f"{BLOCK}.ff_context.net.2.*"),
    Row("final_layer.mod.*", "norm_out.linear.*", turned=True),
    Row("final_layer.linear.*", "proj_out.*"),
)

LTX: tuple[Row, ...] = (
    Row("patchify_proj.*", "proj_in.*"),
    Row("adaln_single.*", "time_embed.*"),
    Row("transformer_blocks.#.attn#.q_norm.*", "transformer_blocks.#.attn#.norm_q.*"),
    Row("transformer_blocks.#.attn#.k_norm.*", "transformer_blocks.#.attn#.norm_k.*"),
    Row("transformer_blocks.#.*", "transformer_blocks.#.*"),
    Row("caption_projection.*", "caption_projection.*"),
    Row("scale_shift_table", "scale_shift_table"),
    Row("proj_out.*", "proj_out.*"),
)

REFINER_MARK = "txt_in.individual_token_refiner.blocks.0.norm1.weight"
TRANSFORMERS: tuple[Layout, ...] = (
    Layout(
        "hunyuan_video/transformer",
        "HunyuanVideo as released or as ComfyUI saves it",
        (REFINER_MARK, "single_blocks.0.linear1.weight", "vector_in.in_layer.weight"),
        HUNYUAN,
    ),
    Layout(
        "hunyuan_video_15/transformer",
        "HunyuanVideo 1.5 as released or as ComfyUI saves it",
        (REFINER_MARK, "byt5_in.fc1.weight", "cond_type_embedding.weight"),
        HUNYUAN_15,
        absent=("single_blocks.0.linear1.weight",),
    ),
    Layout(
        "framepack/transformer",
        "FramePack",
        ("clean_x_embedder.proj.weight", "single_transformer_blocks.0.proj_mlp.weight"),
        SAME,
    ),
    Layout(
        "hunyuan_video/transformer",
        "HunyuanVideo in diffusers' names",
        ("transformer_blocks.0.norm1_context.linear.weight", "single_transformer_blocks.0.proj_mlp.weight"),
        SAME,
        absent=("clean_x_embedder.proj.weight",),
    ),
    Layout(
        "hunyuan_video_15/transformer",
        "HunyuanVideo 1.5 in diffusers' names",
        ("transformer_blocks.0.norm1_context.linear.weight", "cond_type_embed.weight"),
        SAME,
    ),
    Layout("mochi/transformer", "Mochi 1 as released", ("t5_yproj.weight", "blocks.0.mod_x.weight"), MOCHI),
    Layout(
        "mochi/transformer",
        "Mochi 1 in diffusers' names",
        ("time_embed.caption_proj.weight", "transformer_blocks.0.norm1_context.linear.weight"),
        SAME,
    ),
    Layout(
        "ltx/transformer",
        "LTX-Video as released",
        ("patchify_proj.weight", "adaln_single.linear.weight"),
        LTX,
        absent=("audio_adaln_single.linear.weight",),
    ),
    Layout(
        "ltx/transformer",
        "LTX-Video in diffusers' names",
        ("time_embed.emb.timestep_embedder.linear_1.weight", "caption_projection.linear_1.weight"),
        SAME,
        absent=("audio_time_embed.linear.weight", "single_transformer_blocks.0.proj_mlp.weight"),
    ),
)
