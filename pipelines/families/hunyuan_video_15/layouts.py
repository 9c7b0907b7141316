"""Tensor names of HunyuanVideo 1.5 in single files: as released, as ComfyUI saves them, in diffusers' names.

Sources: diffusers' conversion scripts, and ComfyUI's ``supported_models`` for the names it saves.
"""

from __future__ import annotations

from ...keys import SAME, Layout, Row, embedder_rows
from ..hunyuan_video.layouts import ATTENTION, COMMON, REFINER_MARK

TRANSFORMER: tuple[Row, ...] = (
    *COMMON,
    *embedder_rows("time_in", "time_embed.timestep_embedder"),
    *embedder_rows("time_r_in", "time_embed.timestep_embedder_r"),
    Row("byt5_in.layernorm.*", "context_embedder_2.norm.*"),
    *(Row(f"byt5_in.fc{n}.*", f"context_embedder_2.linear_{n}.*") for n in (1, 2, 3)),
    Row("vision_in.proj.0.*", "image_embedder.norm_in.*"),
    Row("vision_in.proj.1.*", "image_embedder.linear_1.*"),
    Row("vision_in.proj.3.*", "image_embedder.linear_2.*"),
    Row("vision_in.proj.4.*", "image_embedder.norm_out.*"),
    Row("cond_type_embedding.weight", "cond_type_embed.weight"),
)

VAE: tuple[Row, ...] = tuple(
    row
    for coder, kind in (("encoder", "down"), ("decoder", "up"))
    for row in (
        *(Row(f"{coder}.{end}.*", f"{coder}.{end}.*") for end in ("conv_in", "conv_out", "norm_out")),
        Row(f"{coder}.{kind}.#.block.#.nin_shortcut.*", f"{coder}.{kind}_blocks.#.resnets.#.conv_shortcut.*"),
        Row(f"{coder}.{kind}.#.block.#.*", f"{coder}.{kind}_blocks.#.resnets.#.*"),
        Row(f"{coder}.{kind}.#.{kind}sample.*", f"{coder}.{kind}_blocks.#.{kind}samplers.0.*"),
        Row(f"{coder}.mid.block_1.*", f"{coder}.mid_block.resnets.0.*"),
        Row(f"{coder}.mid.block_2.*", f"{coder}.mid_block.resnets.1.*"),
        *(Row(f"{coder}.mid.attn_1.{one}.*", f"{coder}.mid_block.attentions.0.to_{one}.*") for one in ATTENTION),
        Row(f"{coder}.mid.attn_1.*", f"{coder}.mid_block.attentions.0.*"),
    )
)

LAYOUTS: tuple[Layout, ...] = (
    Layout(
        "hunyuan_video_15/transformer",
        "HunyuanVideo 1.5 as released or as ComfyUI saves it",
        (REFINER_MARK, "byt5_in.fc1.weight", "cond_type_embedding.weight"),
        TRANSFORMER,
        absent=("single_blocks.0.linear1.weight",),
    ),
    Layout(
        "hunyuan_video_15/transformer",
        "HunyuanVideo 1.5 in diffusers' names",
        ("transformer_blocks.0.norm1_context.linear.weight", "cond_type_embed.weight"),
        SAME,
    ),
    Layout(
        "hunyuan_video_15/vae",
        "the VAE of HunyuanVideo 1.5 as released",
        ("decoder.mid.block_1.norm1.gamma", "encoder.down.0.block.0.norm1.gamma"),
        VAE,
    ),
    Layout(
        "hunyuan_video_15/vae",
        "the VAE of HunyuanVideo 1.5 in diffusers' names",
        ("decoder.mid_block.resnets.0.norm1.gamma", "encoder.down_blocks.0.resnets.0.conv1.conv.weight"),
        SAME,
    ),
)
