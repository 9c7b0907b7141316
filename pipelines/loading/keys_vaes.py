"""Tensor names of VAEs in their original releases and in ComfyUI's, beside diffusers' own.

Sources: diffusers' conversion scripts of each model; for HunyuanVideo's in Stable Diffusion's names, ComfyUI's
``diffusers_convert``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from .keys import SAME, Layout, Row

ATTENTION = ("q", "k", "v")


def _stable_diffusion(blocks: int) -> tuple[Row, ...]:
    """HunyuanVideo's VAE in the names of Stable Diffusion's, whose decoder counts its blocks from the other end."""
    rows: list[Row] = [Row("quant_conv.*", "quant_conv.*"), Row("post_quant_conv.*", "post_quant_conv.*")]
    for coder, down, kind in (("encoder", True, "down"), ("decoder", False, "up")):
        rows += [Row(f"{coder}.{end}.*", f"{coder}.{end}.*") for end in ("conv_in", "conv_out")]
        rows.append(Row(f"{coder}.norm_out.*", f"{coder}.conv_norm_out.*"))
        for index in range(blocks):
            source, target = f"{coder}.{kind}.{index}", f"{coder}.{kind}_blocks.{index if down else blocks - 1 - index}"
            rows.append(Row(f"{source}.block.#.nin_shortcut.*", f"{target}.resnets.#.conv_shortcut.*"))
            rows.append(Row(f"{source}.block.#.*", f"{target}.resnets.#.*"))
            rows.append(Row(f"{source}.{kind}sample.*", f"{target}.{kind}samplers.0.*"))
        rows += [Row(f"{coder}.mid.block_{n}.*", f"{coder}.mid_block.resnets.{n - 1}.*") for n in (1, 2)]
        middle = f"{coder}.mid_block.attentions.0"
        rows.append(Row(f"{coder}.mid.attn_1.norm.*", f"{middle}.group_norm.*"))
        rows += [Row(f"{coder}.mid.attn_1.{one}.*", f"{middle}.to_{one}.*", flat=True) for one in ATTENTION]
        rows.append(Row(f"{coder}.mid.attn_1.proj_out.*", f"{middle}.to_out.0.*", flat=True))
    return tuple(rows)


def _hunyuan(names: Iterable[str]) -> tuple[Row, ...]:
    found = (re.match(r"decoder\.up\.(\d+)\.", name) for name in names)
    return _stable_diffusion(1 + max((int(match[1]) for match in found if match), default=3))


HUNYUAN_15: tuple[Row, ...] = tuple(
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

STACK = (("0", "norm1.norm_layer"), ("2", "conv1.conv"), ("3", "norm2.norm_layer"), ("5", "conv2.conv"))


def _resnet(source: str, target: str) -> Iterable[Row]:
    """A residual block of Mochi, whose layers the release counts."""
    return (Row(f"{source}.stack.{number}.*", f"{target}.{name}.*") for number, name in STACK)


def _attended(source: str, target: str, index: str) -> Iterable[Row]:
    """The attention behind a residual block of Mochi's encoder."""
    yield from _resnet(source, f"{target}.resnets.{index}")
    inner = f"{target}.attentions.{index}"
    yield Row(f"{source}.attn_block.attn.qkv.*", f"{inner}.to_q.* {inner}.to_k.* {inner}.to_v.*")
    yield Row(f"{source}.attn_block.attn.out.*", f"{inner}.to_out.0.*")
    yield Row(f"{source}.attn_block.norm.*", f"{target}.norms.{index}.norm_layer.*")


def _mochi(names: Iterable[str]) -> tuple[Row, ...]:
    """Mochi's VAE: one list of layers each way, in which blocks of any depth follow one another."""
    layers = sorted({int(m[1]) for name in names if (m := re.match(r"encoder\.layers\.(\d+)\.layers\.", name))})
    first, behind = (layers[0], layers[-1] + 1) if layers else (4, 7)
    most = 1 + max((int(n) for name in names for n in re.findall(r"\.(\d+)\.", name)), default=16)
    rows = [
        Row("decoder.blocks.0.0.*", "decoder.conv_in.*"),
        Row("decoder.output_proj.*", "decoder.proj_out.*"),
        Row("encoder.layers.0.*", "encoder.proj_in.*"),
        Row("encoder.output_norm.*", "encoder.norm_out.norm_layer.*"),
        Row("encoder.output_proj.*", "encoder.proj_out.*"),
    ]
    # The number of a block is one more than its own where a plain layer stands before it.
    for index in range(most):
        rows += _resnet(f"decoder.blocks.0.{index + 1}", f"decoder.block_in.resnets.{index}")
        if index + 1 < first:
            rows += _resnet(f"encoder.layers.{index + 1}", f"encoder.block_in.resnets.{index}")
        rows += _attended(f"encoder.layers.{behind + index}", "encoder.block_out", str(index))
        for block, layer in enumerate(layers):
            source, target = f"encoder.layers.{layer}.layers", f"encoder.down_blocks.{block}"
            rows += _attended(f"{source}.{index + 1}", target, str(index))
    for block, layer in enumerate(layers):
        rows.append(Row(f"encoder.layers.{layer}.layers.0.*", f"encoder.down_blocks.{block}.conv_in.conv.*"))
    for block in range(3):
        source, target = f"decoder.blocks.{block + 1}", f"decoder.up_blocks.{block}"
        rows += [*_resnet(f"{source}.blocks.#", f"{target}.resnets.#"), Row(f"{source}.proj.*", f"{target}.proj.*")]
    return (*rows, *_resnet("decoder.blocks.4.#", "decoder.block_out.resnets.#"))


def _mochi_half(coder: str) -> Callable[[Iterable[str]], tuple[Row, ...]]:
    """The rows of Mochi's encoder or decoder alone, whose release leaves out which of both it is."""
    start = f"{coder}."

    def rows(names: Iterable[str]) -> tuple[Row, ...]:
        whole = _mochi(start + name for name in names)
        return tuple(
            replace(row, source=row.source.removeprefix(start)) for row in whole if row.source.startswith(start)
        )

    return rows


LTX_WORDS = (
    ("res_blocks", "resnets"),
    ("conv_shortcut", "conv_shortcut.conv"),
    ("norm3.norm", "norm3"),
    ("per_channel_statistics.mean-of-means", "latents_mean"),
    ("per_channel_statistics.std-of-means", "latents_std"),
)
LTX_IGNORED = (r"^per_channel_statistics\.(channel|mean-of-stds|mean-of-stds_over_std-of-means)$",)
# Where each block of the release's two lists stands in diffusers' model: first release, 0.9.1, and 0.9.5 and later.
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


def _ltx(encoder: str, decoder: str) -> tuple[Row, ...]:
    rows = [Row(f"encoder.down_blocks.{n}.*", f"encoder.{name}.*") for n, name in enumerate(encoder.split())]
    rows += [Row(f"decoder.up_blocks.{n}.*", f"decoder.{name}.*") for n, name in enumerate(decoder.split())]
    ends = ("conv_in", "conv_out")
    rows += [Row(f"{coder}.{end}.*", f"{coder}.{end}.*") for coder in ("encoder", "decoder") for end in ends]
    rows.append(Row("decoder.last_time_embedder.*", "decoder.time_embedder.*"))
    rows.append(Row("decoder.last_scale_shift_table", "decoder.scale_shift_table"))
    rows.append(Row("decoder.timestep_scale_multiplier", "decoder.timestep_scale_multiplier"))
    return (*rows, *(Row(name, name) for name in ("latents_mean", "latents_std")))


LTX_MARKS = ("decoder.up_blocks.0.res_blocks.0.conv1.conv.weight", "per_channel_statistics.mean-of-means")
LTX_TIMED = "decoder.last_time_embedder.timestep_embedder.linear_1.weight"
LTX_STRIDED = "encoder.down_blocks.1.conv.weight|encoder.down_blocks.1.conv.bias"  # until 0.9.1

VAES: tuple[Layout, ...] = (
    Layout(
        "ltx/vae",
        "the VAE of LTX-Video 0.9.0 as released",
        LTX_MARKS,
        _ltx(ENCODER_090, DECODER_090),
        (LTX_TIMED,),
        LTX_WORDS,
        LTX_IGNORED,
    ),
    Layout(
        "ltx/vae",
        "the VAE of LTX-Video 0.9.1 as released",
        (*LTX_MARKS, LTX_TIMED, LTX_STRIDED),
        _ltx(ENCODER_090, DECODER_091),
        (),
        LTX_WORDS,
        LTX_IGNORED,
    ),
    Layout(
        "ltx/vae",
        "the VAE of LTX-Video 0.9.5 and later as released",
        (*LTX_MARKS, LTX_TIMED),
        _ltx(ENCODER_095, DECODER_091),
        tuple(LTX_STRIDED.split("|")),
        LTX_WORDS,
        LTX_IGNORED,
    ),
    Layout(
        "ltx/vae",
        "the VAE of LTX-Video in diffusers' names",
        ("latents_mean", "decoder.mid_block.resnets.0.conv1.conv.weight"),
        SAME,
    ),
    Layout(
        "hunyuan_video_15/vae",
        "the VAE of HunyuanVideo 1.5 as released",
        ("decoder.mid.block_1.norm1.gamma", "encoder.down.0.block.0.norm1.gamma"),
        HUNYUAN_15,
    ),
    Layout(
        "hunyuan_video_15/vae",
        "the VAE of HunyuanVideo 1.5 in diffusers' names",
        ("decoder.mid_block.resnets.0.norm1.gamma", "encoder.down_blocks.0.resnets.0.conv1.conv.weight"),
        SAME,
    ),
    Layout(
        "hunyuan_video/vae",
        "the VAE of HunyuanVideo in Stable Diffusion's names",
        ("decoder.mid.block_1.norm1.weight", "encoder.down.0.block.0.conv1.conv.weight"),
        _hunyuan,
    ),
    Layout(
        "hunyuan_video/vae",
        "the VAE of HunyuanVideo",
        ("decoder.mid_block.attentions.0.group_norm.weight", "encoder.down_blocks.0.resnets.0.conv1.conv.weight"),
        SAME,
    ),
    Layout(
        "mochi/vae",
        "the VAE of Mochi 1 as released",
        ("decoder.blocks.0.1.stack.0.weight", "encoder.layers.1.stack.0.weight"),
        _mochi,
    ),
    Layout(
        "mochi/vae_decoder",
        "the decoder of Mochi 1's VAE as released",
        ("blocks.0.1.stack.0.weight", "output_proj.weight"),
        _mochi_half("decoder"),
        half_of="mochi/vae",
    ),
    Layout(
        "mochi/vae_encoder",
        "the encoder of Mochi 1's VAE as released",
        ("layers.1.stack.0.weight", "output_norm.weight"),
        _mochi_half("encoder"),
        half_of="mochi/vae",
    ),
    Layout(
        "mochi/vae",
        "the VAE of Mochi 1 in diffusers' names",
        ("decoder.block_in.resnets.0.norm1.norm_layer.weight", "encoder.proj_in.weight"),
        SAME,
    ),
)
