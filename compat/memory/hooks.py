"""Weights that come to the device for one block or one layer and leave it again; their host weights stay in host
memory.

Nothing is copied back: a unit's tensors point at their host weights again, so a device that damages what it returns
does no
harm and the traffic is half of a move there and back. Hooks, not patched forwards: they survive what others wrap
around ``forward``, and a unit leaves the device after an error or a cancel too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .host_weights import Views, pin, views_of
from .parts import Silent, StageText
from .staging import sent_together
from .statistics import MemoryStats, amount
from .transfer import Transfer, transfer_for

MARK = "_anygpu_unit"  # on each module whose own tensors a unit brings
OWNER = "_anygpu_units"  # on a part whose units are on
REPORT_SECONDS = 1.0  # between two words on bytes: a step that is over sooner has a bar of its own


class Unit:
    """Tensors that come and go together.

    Args:
        tensors: the parameters and buffers of a block or a layer, whose data are the host weights.
        owner: whose device, account and progress it shares with the other units of the part.
    """

    def __init__(self, tensors: list[torch.Tensor], owner: Units) -> None:
        self.host_weights = [(tensor, tensor.data) for tensor in tensors]
        self.owner = owner
        self.total_bytes = sum(data.nbytes for _, data in self.host_weights)
        self.behind = owner.device if all(data.is_pinned() for _, data in self.host_weights) else None
        self.depth = 0

    @property
    def execution_device(self) -> torch.device:
        """Where its layers compute; by this name others ask a hook for it."""
        return self.owner.device

    def bring(self) -> None:
        """The tensors on the device, until :meth:`leave` was called as often."""
        if self.depth == 0:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                self.owner.memory_stats.moving(self.total_bytes, self.behind),
            ):
                try:
                    sources = [host_weight for _, host_weight in self.host_weights]
                    alone = enumerate(map(self.owner.sent, sources))  # a copy of locked memory is not waited for
                    for index, there in alone if self.behind else sent_together(sources, self.owner.sent):
                        self.host_weights[index][0].data = there
                except BaseException:
                    self._restore()
                    raise
        self.depth += 1

    def leave(self) -> None:
        """One use less; after the last one the tensors are their host weights again."""
        self.depth = max(0, self.depth - 1)
        if self.depth == 0:
            self._restore()

    def _restore(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for tensor, host_weight in self.host_weights:
                tensor.data = host_weight


class Units:
    """The units of one part, with their hooks on.

    Args:
        module: the part named ``part``, on the host. by_block: whether the members of its lists of blocks move whole;
            else each layer moves for itself.
        pinned: whether the host weights move into locked host memory. progress: hears of bytes in a forward that
            lasts, and is asked for a cancel before each tensor.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        by_block: bool,
        memory_stats: MemoryStats,
        *,
        part: str = "part",
        pinned: bool = False,
        progress: Any = None,
    ) -> None:
        self.module, self.device, self.by_block, self.memory_stats = module, device, by_block, memory_stats
        self.part, self.progress = part, progress or Silent()
        self.units: list[Unit] = []
        self._views: Views = views_of(module)
        self._ways: dict[torch.dtype, Transfer] = {}
        self._came, self._told = 0, time.monotonic()
        self._handles: list[Any] = []
        self._marked: list[nn.Module] = []
        if pinned:
            pin([*module.parameters(), *module.buffers()])
        self._attach()
        self.total_bytes = sum(unit.total_bytes for unit in self.units)
        module.__dict__[OWNER] = self

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest unit."""
        return max((unit.total_bytes for unit in self.units), default=0)

    def sent(self, host_weight: torch.Tensor) -> torch.Tensor:
        """A host weight on the device; a cancel is obeyed before it, and before each slice of a large one."""
        if host_weight.dtype not in self._ways:
            self._ways[host_weight.dtype] = transfer_for(self.device, host_weight.dtype)
        staged = self._views.staged and self._views.holds(host_weight)
        there = self._ways[host_weight.dtype].sent(host_weight, self.progress.check, staged)
        now = time.monotonic()
        if self._came + host_weight.nbytes > self.total_bytes:  # the next forward begins
            self._came, self._told = 0, now
        self._came += host_weight.nbytes
        if now - self._told >= REPORT_SECONDS:
            self._told = now
            text = f"{self.part} {amount(self._came, self.total_bytes)}"
            self.progress.step(self._came, self.total_bytes, StageText("moving", text, True))
        return there

    def home(self) -> None:
        """Every tensor is its host weight, whatever was cut short."""
        for unit in self.units:
            unit.depth = 1
            unit.leave()

    def remove(self) -> None:
        """Take the hooks off; the part is on the host, as it was."""
        self.home()
        for handle in self._handles:
            handle.remove()
        for member in self._marked:
            member.__dict__.pop(MARK, None)
        self.module.__dict__.pop(OWNER, None)
        self._handles, self._marked = [], []

    def _attach(self) -> None:
        brought_by: dict[int, Unit] = {}
        for owner, members in _members(self.module, self.by_block):
            tensors = {id(tensor): tensor for member in members for tensor in direct(member)}
            own = [tensor for key, tensor in tensors.items() if key not in brought_by]
            # T5 shares its embedding between two modules: whoever runs brings the unit that has it
            units = list(dict.fromkeys(brought_by[key] for key in tensors if key in brought_by))
            if own:
                units.append(Unit(own, self))
                self.units.append(units[-1])
                brought_by |= {id(tensor): units[-1] for tensor in own}
            for unit in units:
                self._handles.append(owner.register_forward_pre_hook(partial(_arriving, unit), with_kwargs=True))
                self._handles.append(owner.register_forward_hook(lambda *_, unit=unit: unit.leave(), always_call=True))
            for member in members if units else ():
                member.__dict__[MARK] = units[-1]
                self._marked.append(member)


def _arriving(unit: Unit, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Bring the unit; inputs that were made where its host weights are follow it, as T5's relative positions are."""
    unit.bring()
    device = unit.execution_device
    strays = any(isinstance(x, torch.Tensor) and x.device != device for x in (*inputs, *named.values()))
    if not strays:
        return None

    def here(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return tuple(map(here, inputs)), {name: here(value) for name, value in named.items()}


def units_on(module: nn.Module) -> Units | None:
    """The units of a part that have their hooks on; None without any."""
    found: Units | None = module.__dict__.get(OWNER)
    return found


def unit_of(module: nn.Module) -> Unit | None:
    """What brings the own tensors of ``module``; None where nothing does."""
    found: Unit | None = module.__dict__.get(MARK)
    return found


def direct(module: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters and buffers of ``module`` that belong to none of its children."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _members(module: nn.Module, by_block: bool) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Each module whose forward a unit goes with, and the modules whose own tensors it brings."""
    yield module, [module]
    for child in module.children():
        if by_block and isinstance(module, nn.ModuleList):
            yield child, list(child.modules())
        else:
            yield from _members(child, by_block)
