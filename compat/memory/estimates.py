"""Bytes that a part has on the device under each offload mode, from the names and sizes of its tensors alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

BLOCK = re.compile(r"^(.*?(?:blocks|layers|layer|block)\.\d+)\.")
DOUBLE_SPARES = 0.35  # of a single block's activations, which a double block does not have
BY_BLOCK = ("transformer", "unet", "text_encoder")  # under offload group; other parts come layer by layer
WHOLE = "image_encoder"  # in every mode: its attention pooling reads weights that hooks on its layers do not see


@dataclass(frozen=True, slots=True)
class PartBytes:
    """Bytes of one part on the device: all of it, its largest block, its largest layer.

    Args:
        total: all tensors.
        block: the largest block.
        layer: the largest layer.
        inner: the largest layer inside a block; 0 where nobody counted them apart.
        outer: the largest layer outside the blocks, such as an embedding.
        single: the largest single-stream block, in which the activations are most; 0 where a model has none.
        dense: what making the largest packed weight dense takes while it is used; 0 where none is packed.
    """

    total: int
    block: int
    layer: int
    inner: int = 0
    outer: int = 0
    single: int = 0
    dense: int = 0

    def resident(self, mode: str, part: str, activations: int = 0) -> int:
        """Bytes on the device at the peak under ``mode``, where a forward of the part needs ``activations``.

        What is outside the blocks runs before or after most of the activations exist.
        """
        if mode in ("none", "model") or part == WHOLE:
            return self.total
        by_block = mode == "group" and part.startswith(BY_BLOCK)
        if not self.inner:
            return self.block if by_block else self.layer
        largest = self.block if by_block else self.inner
        if by_block and self.single:
            largest = max(self.single, self.block - int(DOUBLE_SPARES * activations))
        return max(largest, self.outer - activations // 2)


def part_bytes(entries: Mapping[str, int], block: re.Pattern[str] = BLOCK, buffers: int = 0) -> PartBytes:
    """The bytes of a part.

    Args:
        entries: tensor name to bytes.
        block: its first group is the block of a tensor that is inside one.
        buffers: bytes that are in no file.
    """
    layers: dict[str, int] = {}
    blocks: dict[str, int] = {}
    outside: set[str] = set()
    for name, size in entries.items():
        layer = name.rpartition(".")[0]
        layers[layer] = layers.get(layer, 0) + size
        inside = block.match(name)
        if inside is None:
            outside.add(layer)
        else:
            blocks[inside[1]] = blocks.get(inside[1], 0) + size
    largest = max(layers.values(), default=0)
    return PartBytes(
        total=sum(entries.values()) + buffers,
        block=max(blocks.values(), default=largest),
        layer=largest,
        inner=max((size for layer, size in layers.items() if layer not in outside), default=0),
        outer=max((layers[layer] for layer in outside), default=0),
        single=max((size for name, size in blocks.items() if name.startswith("single_")), default=0),
    )
