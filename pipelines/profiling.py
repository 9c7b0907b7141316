"""Traces for torch's profiler: a range per stage, block and operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from torch import nn

from ..compat.device.execution import COMPILED
from ..compat.transforms.order import Order, Step

RANGE = "anygpu"  # begins the name of every range of ours


class Profile:
    """Traces of runs, and the ranges in them.

    Args:
        path: the trace file. A stage that runs by itself writes one of its own beside it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.running = path, False
        self.written: list[Path] = []
        self._open: list[tuple[nn.Module, Any]] = []  # modules that run now, and their ranges

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
        """The step that gives the modules of a part that was just read their ranges; after all other changes."""
        return Step(Order.COMPILE, "profile ranges", self._ranged)

    def _free(self, stage: str) -> Path:
        """The next numbered file of a stage; a person compares runs, so none is written over."""
        paths = (self.path.with_stem(f"{self.path.stem}-{stage}-{number:03}") for number in count(1))
        return next(path for path in paths if not path.exists())

    @contextmanager
    def _traced(self, target: Path) -> Iterator[None]:
        """A trace of the block in ``target``.

        Ranges end before their trace does, also those that a cancel left open: torch writes the end of a range into
        the trace that began it, and where that one is gone already, the process dies at a later trace's end.
        """
        from torch.profiler import profile, supported_activities

        target.parent.mkdir(parents=True, exist_ok=True)
        with profile(activities=supported_activities()) as trace:
            self.running = True
            try:
                yield
            finally:
                self.running = False
                self._close_down_to(0)
        trace.export_chrome_trace(str(target))
        self.written.append(target)

    def _ranged(self, part: str, module: nn.Module) -> Callable[[], None] | None:
        """Give the blocks of ``module`` and their children ranges; returns what takes them off, None without blocks.

        Blocks are the members of its lists. A compiled block is one range: its inside is one graph.
        """
        handles: list[Any] = []
        for name, owner in module.named_modules():
            for index, block in enumerate(owner if isinstance(owner, nn.ModuleList) else ()):
                handles += self._range(f"{RANGE} block: {part}.{name}.{index}", block)
                if not hasattr(block, COMPILED):
                    for child_name, child in block.named_children():
                        if not isinstance(child, nn.ModuleList):
                            handles += self._range(f"{RANGE} op: {part}.{name}.{index}.{child_name}", child)
        if not handles:
            return None

        def removed() -> None:
            for handle in handles:
                handle.remove()

        return removed

    def _range(self, text: str, module: nn.Module) -> tuple[Any, Any]:
        """Hooks, not a patched forward: they survive every offloader's own re-wrapping of it."""
        before = module.register_forward_pre_hook(partial(self._enter, text), prepend=True)
        return before, module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, text: str, module: nn.Module, inputs: Any) -> None:
        from torch.profiler import record_function

        if self.running:
            self._open.append((module, record_function(text)))
            self._open[-1][1].__enter__()

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """End the range of ``module`` and those inside it that an exception left open."""
        depth = max((place for place, (owner, _) in enumerate(self._open) if owner is module), default=len(self._open))
        self._close_down_to(depth)

    def _close_down_to(self, depth: int) -> None:
        """End the open ranges above the first ``depth``, innermost first."""
        while len(self._open) > depth:
            self._open.pop()[1].__exit__(None, None, None)
