"""The blocks of both UNets and of the VAE through `torch.compile`: one graph for each kind and size of block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from ...compat.transforms.compile import Compilation, CompileSettings
from ...compat.transforms.order import Order, Step, Undo
from ..choices import CACHE_LIMIT as CACHE_LIMIT
from .layers import Residual, Transformer

PARTS = ("unet", "reference", "vae")
VAE_BLOCKS = ("ResnetBlock2D",)


class Blocks(Compilation):
    """The compiled blocks of one part of a paint pipeline."""

    def blocks_in(self, module: nn.Module) -> Iterator[nn.Module]:
        """Residual blocks and transformers, none inside another."""
        for child in module.children():
            if isinstance(child, (Residual, Transformer)) or type(child).__name__ in VAE_BLOCKS:
                yield child
            else:
                yield from self.blocks_in(child)


def compile_step(compiled: Mapping[str, Blocks]) -> Step:
    """The blocks of each part of ``compiled`` through the compiler; graphs survive that a part is read again."""

    def apply(part: str, module: nn.Module) -> Undo | None:
        return compiled[part].attach(module) if part in compiled else None

    return Step(Order.COMPILE, "compiled blocks", apply)


def settings_for(limit: int, backend: str = "inductor") -> CompileSettings:
    """The settings of painting: sizes do not change while it paints, so each graph is made for one.

    Raises:
        InputError: a limit out of range.
    """
    return CompileSettings(dynamic="none", cache_size=limit, vae=True, backend=backend)
