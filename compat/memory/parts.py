"""The modules of a pipeline by name, each read from disk on first use."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

Reader = Callable[[Any], nn.Module]
Prepare = Callable[[str, nn.Module], Callable[[], Any]]


def role_of(part: str) -> str:
    """The part without the number that diffusers gives to further ones: ``transformer`` for ``transformer_2``."""
    return re.sub(r"_\d+$", "", part)


def denoises(part: str) -> bool:
    """Whether a part is what a sampler calls at each step."""
    return role_of(part) in ("transformer", "unet")


class StageText(str):
    """A stage in words, such as ``moving vae 0.1 of 0.3 GB``, which knows its name and whether it tells its own count.

    Args:
        name: what times are kept by, such as ``moving``.
        detail: what is said behind it.
        counted: whether the detail tells how far it is.
    """

    name: str
    counted: bool

    def __new__(cls, name: str, detail: str = "", counted: bool = False) -> StageText:
        made = super().__new__(cls, f"{name} {detail}" if detail else name)
        made.name, made.counted = str(getattr(name, "name", name)), counted or getattr(name, "counted", False)
        return made


class Silent:
    """A progress that reports nothing and is never cancelled."""

    def step(self, done: int, total: int, stage: str, preview: Any = None) -> None:
        """Nothing."""

    def check(self) -> None:
        """Nothing."""

    def notify(self, text: str) -> None:
        """Nothing."""


class Hosted:
    """What a host's caches recognise a pipeline by; its offloader knows the host's models."""

    __slots__ = ()
    offloader: Any

    def get_models(self) -> list[Any]:
        """The host's own handles of all parts that were used."""
        return list(self.offloader.get_models())

    def is_dynamic(self) -> bool:
        """Whether the host pages the weights by itself: never."""
        return False


class Parts(dict[str, nn.Module]):
    """The modules of a pipeline by name, each read from disk on first use.

    A part that is not in memory costs nothing: text encoders come and go without the transformer ever being read
    twice, and the peak is the largest part, not the sum.

    Args:
        readers: part name to what reads it.
        prepare: rewrites a part that was just read, on the CPU and before any offloader hooks it, and returns what
            takes that back: ``transforms.order.Preparation``.

    ``fallbacks`` holds, by part name, what makes the next reading a safer one; only for parts whose precision was
    decided and not chosen. ``active_adapters`` holds, by part name, the adapters that are on it:
    ``adapters.ActiveAdapters``.
    """

    def __init__(self, readers: Mapping[str, Reader], prepare: Prepare | None = None) -> None:
        super().__init__()
        self.readers, self.prepare = dict(readers), prepare
        self.undo: dict[str, Callable[[], Any]] = {}
        self.fallbacks: dict[str, Callable[[], None]] = {}
        self.active_adapters: dict[str, Any] = {}

    def read(self, name: str, progress: Any = None) -> nn.Module:
        """The part ``name``, from memory or from disk, prepared."""
        if name not in self:
            module = self.readers[name](progress or Silent())
            if self.prepare is not None:
                self.undo[name] = self.prepare(name, module)
            self[name] = module
        return dict.__getitem__(self, name)

    def __missing__(self, name: str) -> nn.Module:
        return self.read(name)

    def drop(self, name: str) -> None:
        """Forget the part; it is read again when it is next wanted."""
        self.pop(name, None)
        self.undo.pop(name, None)
        self.active_adapters.pop(name, None)
