"""Memory that runs out while a part moves, is hooked or steps down: the next run is as the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from anygpu.compat.device.failures import is_shortage
from anygpu.compat.memory.hooks import GROUP, HOOKS, is_hooked_by_others
from anygpu.compat.memory.host_weights import PINNED, HostWeights
from anygpu.compat.memory.offloader import STEP_DOWN, OffloadOptions, StandaloneOffloader
from anygpu.compat.memory.parts import Parts
from torch import nn

from simulated.shortages import shortage
from simulated.test_families import MODES

PART = "transformer"
Run = Callable[[StandaloneOffloader, torch.Tensor], torch.Tensor]


class Small(nn.Module):
    """Two blocks between layers of their own, a buffer, and a weight that two modules have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.table
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def small(mode: str, acc: torch.device, kept: HostWeights) -> tuple[StandaloneOffloader, nn.Module]:
    torch.manual_seed(0)
    module = Small().requires_grad_(False)
    return StandaloneOffloader(Parts({PART: lambda _: module}), acc, mode, OffloadOptions(host_weights=kept)), module


def plain(own: StandaloneOffloader, x: torch.Tensor) -> torch.Tensor:
    """Two forwards in one use of the part."""
    with torch.no_grad(), own.hold(PART) as module:
        return torch.stack([module(x), module(x)]).cpu()


def stepping(own: StandaloneOffloader, x: torch.Tensor) -> torch.Tensor:
    """A forward, a step down as a stage that ran out of memory asks for it, and another forward."""
    with torch.no_grad(), own.hold(PART) as module:
        before = module(x)
        while own.mode in STEP_DOWN:
            own.step_down(PART)
        return torch.stack([before, module(x)]).cpu()


def require_whole(module: nn.Module) -> None:
    """Hooks on every module that has a group, and a mark on the part, or nothing of it anywhere."""
    hooked = [m for m in module.modules() if m._forward_pre_hooks or m._forward_hooks]
    assert not any(map(is_hooked_by_others, hooked))
    if HOOKS in module.__dict__:
        assert len(hooked) >= 3 and all(m._forward_pre_hooks and m._forward_hooks for m in hooked)
        assert module.__dict__[HOOKS].total_bytes > 0
    else:
        assert not hooked and not any(GROUP in m.__dict__ for m in module.modules())


def sweep(acc: torch.device, mode: str, run: Run, kept: HostWeights, **options: Any) -> int:
    """Run out of memory at each step of ``run``, on a part that is new, until none is left; returns how many there are.

    Args:
        options: of :func:`shortage`.
    """
    x = torch.arange(8.0).view(2, 4).to(acc)
    own, _ = small(mode, acc, kept)
    wanted, at = run(own, x), 0
    while True:
        at += 1
        own, module = small(mode, acc, kept)
        with shortage(at, **options) as short:
            try:
                assert torch.equal(run(own, x), wanted), f"step {at} of {mode}"
            except Exception as error:
                assert is_shortage(error), f"step {at} of {mode}: {error!r}"
        require_whole(module)
        if short.count < at:
            return at - 1
        assert torch.equal(run(own, x), wanted), f"the run after step {at} of {mode}"


@pytest.mark.parametrize("mode", ["none", "group"])
def test_a_shortage_while_a_part_steps_down_leaves_it_whole(acc, mode):
    """Before and behind each swap of values, hook, stream and event; operators are in the long test."""
    for behind in (False, True):
        assert sweep(acc, mode, stepping, HostWeights({PART: PINNED}), behind=behind, operators=False) > 20


@pytest.mark.full
@pytest.mark.parametrize(("times", "behind"), [(1, False), (1, True), (2, False), (3, True)])
@pytest.mark.parametrize("kept", [HostWeights(), HostWeights({PART: PINNED}), HostWeights(shared=True)])
@pytest.mark.parametrize("run", [plain, stepping])
@pytest.mark.parametrize("mode", MODES)
def test_a_shortage_at_any_step_leaves_the_part_whole(acc, mode, run, kept, times, behind):
    assert sweep(acc, mode, run, kept, times=times, behind=behind) > 20
