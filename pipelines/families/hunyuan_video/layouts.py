"""Tensor names of HunyuanVideo's VAE in Stable Diffusion's names, as ComfyUI's ``diffusers_convert`` has them: they
depend on one another. All others are in ``layouts.json``."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...keys import Layout, Row, layouts_beside

ATTENTION = ("q", "k", "v")


def _vae(names: Iterable[str]) -> tuple[Row, ...]:
    """Rows from Stable Diffusion's names, whose decoder counts its blocks from the other end, to diffusers'."""
    numbers = (re.match(r"decoder\.up\.(\d+)\.", name) for name in names)
    blocks = 1 + max((int(match[1]) for match in numbers if match), default=3)
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


LAYOUTS: tuple[Layout, ...] = (
    *layouts_beside(__file__),
    Layout(
        "hunyuan_video/vae",
        "the VAE of HunyuanVideo in Stable Diffusion's names",
        ("decoder.mid.block_1.norm1.weight", "encoder.down.0.block.0.conv1.conv.weight"),
        _vae,
    ),
)
