"""Tensor names of Mochi 1's VAE as released, which depend on one another; all others are in ``layouts.json``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from ...keys import Layout, Row, layouts_beside

STACK = (("0", "norm1.norm_layer"), ("2", "conv1.conv"), ("3", "norm2.norm_layer"), ("5", "conv2.conv"))
HALVES = {  # with the marks of each
    "decoder": ("blocks.0.1.stack.0.weight", "output_proj.weight"),
    "encoder": ("layers.1.stack.0.weight", "output_norm.weight"),
}


def _resnet(source: str, target: str) -> Iterable[Row]:  # the rows of one residual block
    return (Row(f"{source}.stack.{number}.*", f"{target}.{name}.*") for number, name in STACK)


def _resnet_and_attention(source: str, target: str, index: str) -> Iterable[Row]:  # of a block's layer ``index``
    yield from _resnet(source, f"{target}.resnets.{index}")
    inner = f"{target}.attentions.{index}"
    yield Row(f"{source}.attn_block.attn.qkv.*", f"{inner}.to_q.* {inner}.to_k.* {inner}.to_v.*")
    yield Row(f"{source}.attn_block.attn.out.*", f"{inner}.to_out.0.*")
    yield Row(f"{source}.attn_block.norm.*", f"{target}.norms.{index}.norm_layer.*")


def _vae(names: Iterable[str]) -> tuple[Row, ...]:
    """Rows from the released names of Mochi's VAE to diffusers'. Its encoder and decoder are flat lists, whose kinds
    of layers ``names`` tell by their numbers; rows without a tensor match nothing. The defaults are the release's."""
    names = list(names)
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
    # The number of a block is one more than its own where a plain layer comes before it.
    for index in range(most):
        rows += _resnet(f"decoder.blocks.0.{index + 1}", f"decoder.block_in.resnets.{index}")
        if index + 1 < first:
            rows += _resnet(f"encoder.layers.{index + 1}", f"encoder.block_in.resnets.{index}")
        rows += _resnet_and_attention(f"encoder.layers.{behind + index}", "encoder.block_out", str(index))
        for block, layer in enumerate(layers):
            source, target = f"encoder.layers.{layer}.layers", f"encoder.down_blocks.{block}"
            rows += _resnet_and_attention(f"{source}.{index + 1}", target, str(index))
    for block, layer in enumerate(layers):
        rows.append(Row(f"encoder.layers.{layer}.layers.0.*", f"encoder.down_blocks.{block}.conv_in.conv.*"))
    for block in range(3):
        source, target = f"decoder.blocks.{block + 1}", f"decoder.up_blocks.{block}"
        rows += [*_resnet(f"{source}.blocks.#", f"{target}.resnets.#"), Row(f"{source}.proj.*", f"{target}.proj.*")]
    return (*rows, *_resnet("decoder.blocks.4.#", "decoder.block_out.resnets.#"))


def _half(coder: str) -> Callable[[Iterable[str]], tuple[Row, ...]]:
    """A function from names to the rows of Mochi's encoder or decoder alone, whose file leaves out the prefix."""
    own = f"{coder}."

    def rows(names: Iterable[str]) -> tuple[Row, ...]:
        whole = _vae(own + name for name in names)
        return tuple(replace(row, source=row.source.removeprefix(own)) for row in whole if row.source.startswith(own))

    return rows


LAYOUTS: tuple[Layout, ...] = (
    *layouts_beside(__file__),
    Layout(
        "mochi/vae",
        "the VAE of Mochi 1 as released",
        ("decoder.blocks.0.0.weight", "encoder.layers.1.stack.0.weight"),
        _vae,
    ),
    *(
        Layout(f"mochi/vae_{half}", f"the {half} of Mochi 1's VAE as released", marks, _half(half), half_of="mochi/vae")
        for half, marks in HALVES.items()
    ),
)
