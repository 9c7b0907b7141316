"""Traces for torch's profiler: a range per stage, block and operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ..compat.device.execution import COMPILED
from ..compat.transforms.order import Order, Step

RANGE = "anygpu"  # begins the name of every range of ours


class Profile:
    """Where traces go, and the ranges in them.

    Args:
        path: the trace file. A stage that runs by itself writes one of its own beside it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.running = path, False
        self.written: list[Path] = []

    @contextmanager
    def whole(self) -> Iterator[None]:
        """One trace of everything in the block, in ``path``."""
        with self._traced(self.path):
            yield

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A range for a stage, and a trace of its own where no other runs."""
        from torch.profiler import record_function

        if self.running:
            with record_function(f"{RANGE} stage: {name}"):
                yield
            return
        with self._traced(self._free(name.replace(" ", "-"))), record_function(f"{RANGE} stage: {name}"):
            yield

    def step(self) -> Step:
        """What gives the modules of a part that was just read their ranges; after all other changes."""
        return Step(Order.COMPILE, "profile ranges", ranged)

    def _free(self, stage: str) -> Path:
        """The next numbered file of a stage; a person compares runs, so none is written over."""
        number = 1
        while (path := self.path.with_name(f"{self.path.stem}-{stage}-{number:03}{self.path.suffix}")).exists():
            number += 1
        return path

    @contextmanager
    def _traced(self, target: Path) -> Iterator[None]:
        from torch.profiler import profile, supported_activities

        target.parent.mkdir(parents=True, exist_ok=True)
        self.running = True
        try:
            with profile(activities=supported_activities()) as trace:
                yield
        finally:
            self.running = False
        trace.export_chrome_trace(str(target))
        self.written.append(target)


def ranged(part: str, module: nn.Module) -> Callable[[], None] | None:
    """Ranges around the blocks of ``module`` and what they are made of; what takes them off, None where it has none.

    Blocks are the members of its lists. A compiled block is one range: its inside is one graph.
    """
    handles: list[Any] = []
    for name, owner in module.named_modules():
        if not isinstance(owner, nn.ModuleList):
            continue
        for index, block in enumerate(owner):
            handles += _range(f"{RANGE} block: {part}.{name}.{index}", block)
            if not hasattr(block, COMPILED):
                for child_name, child in block.named_children():
                    if not isinstance(child, nn.ModuleList):
                        handles += _range(f"{RANGE} op: {part}.{name}.{index}.{child_name}", child)
    if not handles:
        return None

    def removed() -> None:
        for handle in handles:
            handle.remove()

    return removed


def _range(text: str, module: nn.Module) -> tuple[Any, Any]:
    """Hooks, not a patched forward: they survive every offloader's own re-wrapping of it."""
    opened: list[Any] = []
    before = module.register_forward_pre_hook(partial(_open, text, opened), prepend=True)
    return before, module.register_forward_hook(partial(_close, opened), always_call=True)


def _open(text: str, opened: list[Any], module: nn.Module, inputs: Any) -> None:
    from torch.profiler import record_function

    opened.append(record_function(text))
    opened[-1].__enter__()


def _close(opened: list[Any], module: nn.Module, inputs: Any, output: Any) -> None:
    if opened:
        opened.pop().__exit__(None, None, None)
