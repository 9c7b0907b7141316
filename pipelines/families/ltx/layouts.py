"""Tensor names of LTX-Video in single files: as released, as ComfyUI saves them, in diffusers' names.

Sources: diffusers' conversion scripts, and ComfyUI's ``supported_models`` for the names it saves.
"""

from __future__ import annotations

from ...keys import SAME, Layout, Row

TRANSFORMER: tuple[Row, ...] = (
    Row("patchify_proj.*", "proj_in.*"),
    Row("adaln_single.*", "time_embed.*"),
    Row("transformer_blocks.#.attn#.q_norm.*", "transformer_blocks.#.attn#.norm_q.*"),
    Row("transformer_blocks.#.attn#.k_norm.*", "transformer_blocks.#.attn#.norm_k.*"),
    Row("transformer_blocks.#.*", "transformer_blocks.#.*"),
    Row("caption_projection.*", "caption_projection.*"),
    Row("scale_shift_table", "scale_shift_table"),
    Row("proj_out.*", "proj_out.*"),
)

WORDS = (
    ("res_blocks", "resnets"),
    ("conv_shortcut", "conv_shortcut.conv"),
    ("norm3.norm", "norm3"),
    ("per_channel_statistics.mean-of-means", "latents_mean"),
    ("per_channel_statistics.std-of-means", "latents_std"),
)
IGNORED = (r"^per_channel_statistics\.(channel|mean-of-stds|mean-of-stds_over_std-of-means)$",)
# Where each block of the release's two lists is in diffusers' model: first release, 0.9.1, and 0.9.5 and later.
ENCODER_090 = (
    "down_blocks.0 down_blocks.0.downsamplers.0 down_blocks.0.conv_out down_blocks.1 down_blocks.1.downsamplers.0 "
    "down_blocks.1.conv_out down_blocks.2 down_blocks.2.downsamplers.0 down_blocks.3 mid_block"
)
ENCODER_095 = (
    "down_blocks.0 down_blocks.0.downsamplers.0 down_blocks.1 down_blocks.1.downsamplers.0 down_blocks.2 "
    "down_blocks.2.downsamplers.0 down_blocks.3 down_blocks.3.downsamplers.0 mid_block"
)
DECODER_090 = (
    "mid_block up_blocks.0 up_blocks.1.upsamplers.0 up_blocks.1 up_blocks.2.conv_in up_blocks.2.upsamplers.0 "
    "up_blocks.2 up_blocks.3.conv_in up_blocks.3.upsamplers.0 up_blocks.3"
)
DECODER_091 = (
    "mid_block up_blocks.0.upsamplers.0 up_blocks.0 up_blocks.1.upsamplers.0 up_blocks.1 up_blocks.2.upsamplers.0 "
    "up_blocks.2 up_blocks.3.upsamplers.0 up_blocks.3"
)


def _vae(encoder: str, decoder: str) -> tuple[Row, ...]:
    rows = [Row(f"encoder.down_blocks.{n}.*", f"encoder.{name}.*") for n, name in enumerate(encoder.split())]
    rows += [Row(f"decoder.up_blocks.{n}.*", f"decoder.{name}.*") for n, name in enumerate(decoder.split())]
    ends = ("conv_in", "conv_out")
    rows += [Row(f"{coder}.{end}.*", f"{coder}.{end}.*") for coder in ("encoder", "decoder") for end in ends]
    rows.append(Row("decoder.last_time_embedder.*", "decoder.time_embedder.*"))
    rows.append(Row("decoder.last_scale_shift_table", "decoder.scale_shift_table"))
    rows.append(Row("decoder.timestep_scale_multiplier", "decoder.timestep_scale_multiplier"))
    return (*rows, *(Row(name, name) for name in ("latents_mean", "latents_std")))


MARKS = ("decoder.up_blocks.0.res_blocks.0.conv1.conv.weight", "per_channel_statistics.mean-of-means")
TIMED = "decoder.last_time_embedder.timestep_embedder.linear_1.weight"
STRIDED = "encoder.down_blocks.1.conv.weight|encoder.down_blocks.1.conv.bias"  # until 0.9.1
RELEASES = (  # of the VAE: further marks, what is absent, rows
    ("0.9.0", (), (TIMED,), _vae(ENCODER_090, DECODER_090)),
    ("0.9.1", (TIMED, STRIDED), (), _vae(ENCODER_090, DECODER_091)),
    ("0.9.5 and later", (TIMED,), tuple(STRIDED.split("|")), _vae(ENCODER_095, DECODER_091)),
)

LAYOUTS: tuple[Layout, ...] = (
    Layout(
        "ltx/transformer",
        "LTX-Video as released",
        ("patchify_proj.weight", "adaln_single.linear.weight"),
        TRANSFORMER,
        absent=("audio_adaln_single.linear.weight",),
    ),
    Layout(
        "ltx/transformer",
        "LTX-Video in diffusers' names",
        ("time_embed.emb.timestep_embedder.linear_1.weight", "caption_projection.linear_1.weight"),
        SAME,
        absent=("audio_time_embed.linear.weight", "single_transformer_blocks.0.proj_mlp.weight"),
    ),
    *(
        Layout(
            kind="ltx/vae",
            name=f"the VAE of LTX-Video {release} as released",
            marks=(*MARKS, *marks),
            rows=rows,
            absent=absent,
            words=WORDS,
            ignored=IGNORED,
        )
        for release, marks, absent, rows in RELEASES
    ),
    Layout(
        "ltx/vae",
        "the VAE of LTX-Video in diffusers' names",
        ("latents_mean", "decoder.mid_block.resnets.0.conv1.conv.weight"),
        SAME,
    ),
)
