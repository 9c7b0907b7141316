"""The parts of diffusers' transformers by name: their repeated blocks, a submodule, the exact class of a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

BLOCK_LISTS = ("transformer_blocks", "single_transformer_blocks")


def transformer_blocks(transformer: nn.Module) -> Iterator[nn.Module]:
    """The repeated blocks of a transformer, in the order in which they run."""
    for name in BLOCK_LISTS:
        yield from getattr(transformer, name, ())


def submodule_at(block: nn.Module, path: str) -> Any:
    """The submodule of ``block`` at ``path``; None where this configuration of the block has none."""
    module: Any = block
    for name in path.split("."):
        module = getattr(module, name, None)  # a list has its modules by number as attributes too
    return module


def full_name(thing: Any) -> str:
    """Module and name of the class of ``thing``, by which exact stock classes are known."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
