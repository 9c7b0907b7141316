"""The blocks of both UNets and of the VAE through `torch.compile`: one graph for each kind and size of block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import nn

from ...compat.memory.parts import Prepare
from ...compat.transforms.compile import Compilation, CompileSettings
from .layers import Residual, Transformer

CACHE_LIMIT = 64  # graphs of one kind of block: a UNet has about 20 residual blocks of different sizes
PARTS = ("unet", "reference", "vae")
VAE_BLOCKS = ("ResnetBlock2D",)


class Blocks(Compilation):
    """The compiled blocks of one part of a paint pipeline."""

    def blocks_in(self, module: nn.Module) -> Iterator[nn.Module]:
        """Residual blocks and transformers."""
        return blocks_of(module)


@dataclass
class Compiler:
    """Compiles each part of one pipeline after it was read; graphs survive that a part is read again.

    Args:
        settings: of the compiler. before: another preparation, which runs first. parts: what was made, by part.
    """

    settings: CompileSettings
    before: Prepare | None = None
    parts: dict[str, Blocks] = field(default_factory=dict)

    def __call__(self, name: str, module: nn.Module) -> Callable[[], None]:
        """What takes both preparations back."""
        earlier = self.before(name, module) if self.before is not None else None
        mine = None
        if name in PARTS:
            mine = self.parts.setdefault(name, Blocks(self.settings)).attach(module)

        def restored() -> None:
            for back in (mine, earlier):
                if back is not None:
                    back()

        return restored

    def lines(self) -> list[str]:
        """What became of each part, for people."""
        return [f"{name}: {part}" for name, part in self.parts.items()]


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """Residual blocks and transformers, none inside another."""
    for child in module.children():
        if isinstance(child, (Residual, Transformer)) or type(child).__name__ in VAE_BLOCKS:
            yield child
        else:
            yield from blocks_of(child)


def settings_for(limit: int, backend: str = "inductor") -> CompileSettings:
    """The settings of painting: sizes do not change while it paints, so each graph is made for one.

    Raises:
        InputError: a limit out of range.
    """
    return CompileSettings(dynamic="none", cache_size=limit, vae=True, backend=backend)
