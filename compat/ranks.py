"""Processes with a device each that compute one video together, over ``torch.distributed``: gloo on CPUs, NCCL on CUDA.
Their group is formed where they are started (``farm/group.py``): nothing here opens a connection."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from .device.execution import placed
from .errors import PackError, first_line

Value = TypeVar("Value")
Branch = Callable[[], torch.Tensor]
BOTH, PROMPTED = slice(None), slice(-1, None)  # of a batch of two, without the prompt and with it
LEADER = 0  # the rank that decodes, writes and decides


class LeaderFailed(RuntimeError):
    """Raised on the other ranks when the leader fails; the leader's own error says why."""


class RankLost(PackError):
    """A process of the group did not take its part in an exchange: it died, hangs, or is cut off."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process group, seen from one of its processes; every exchange raises RankLost where one does not answer."""

    group: Any = None  # of ``torch.distributed``; None for this process alone
    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # from which the group takes tensors

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """The block of one exchange, whose RuntimeError becomes RankLost."""
        try:
            yield
        except RuntimeError as error:
            found = f"an exchange between {self.size} devices failed on rank {self.rank} ({first_line(error)})"
            fix = "Look for a process that died or hangs on these machines, and check the network between them."
            raise RankLost(found, expected="an answer of every process of the group in time", fix=fix) from error

    def runs(self, count: int) -> list[slice]:
        """``count`` things in order, split into one slice for each rank; the first slices are longer by one at most."""
        lengths = (count // self.size + (rank < count % self.size) for rank in range(self.size))
        return [slice(*ends) for ends in itertools.pairwise([0, *itertools.accumulate(lengths)])]

    def exchange(self, pieces: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """Send ``pieces[r]`` to each rank r; returns the pieces that the ranks sent here, in order, with ``shapes``."""
        from torch import distributed

        counts = [torch.Size(shape).numel() for shape in shapes]
        sent = placed(torch.cat([piece.reshape(-1) for piece in pieces]), self.device)
        received = sent.new_empty(sum(counts))
        size = sent.element_size()
        lengths = [count * size for count in counts], [piece.numel() * size for piece in pieces]  # received, sent
        as_bytes = received.view(torch.uint8), sent.view(torch.uint8)  # gloo does not know every dtype
        with self._exchanging():
            distributed.all_to_all_single(*as_bytes, *lengths, group=self.group)
        parts = placed(received, pieces[0].device).split(counts)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def gathered(self, own: torch.Tensor, dim: int, count: int) -> torch.Tensor:
        """The tensors of all ranks, of which ``own`` is this one's, joined along ``dim`` to ``count`` entries."""
        runs = self.runs(count)
        shapes = [(*own.shape[:dim], run.stop - run.start, *own.shape[dim + 1 :]) for run in runs]
        return torch.cat(self.exchange([own] * self.size, shapes), dim=dim)

    def any(self, flag: bool) -> bool:
        """True on every rank if ``flag`` is on any."""
        if self.size == 1:
            return flag
        from torch import distributed

        reported = torch.tensor([float(flag)], device=self.device)
        with self._exchanging():
            distributed.all_reduce(reported, op=distributed.ReduceOp.MAX, group=self.group)
            return bool(reported)

    def collected(self, value: Any) -> list[Any] | None:
        """The values of all ranks in order, on the leader; None on the others."""
        if self.size == 1:
            return [value]
        from torch import distributed

        values = [None] * self.size if self.rank == LEADER else None
        with self._exchanging():
            distributed.gather_object(value, values, group=self.group, group_dst=LEADER)
        return values

    def shared(self, value: Any) -> Any:
        """The ``value`` of the leader, on every rank: plain values and CPU tensors, also in dataclasses."""
        if self.size == 1:
            return value
        from torch import distributed

        box = [value]
        with self._exchanging():
            distributed.broadcast_object_list(box, group=self.group, group_src=LEADER, device=self.device)
        return box[0]


@dataclass(slots=True)
class Group:
    """All ranks of one video; where each half of them computes one branch of guidance, also this rank's ``half``."""

    world: Ranks
    half: Ranks | None = None
    _apart: bool = False  # a forward of one branch runs, in which only this half's ranks share tokens

    @property
    def tokens(self) -> Ranks:
        """The ranks that share the tokens of the forward that runs now."""
        return self.half if self._apart and self.half is not None else self.world

    @property
    def fewest(self) -> int:
        """The fewest ranks that ever share the tokens of a forward, for a forecast of memory."""
        return (self.half or self.world).size

    def on_leader(self, call: Callable[[], Value]) -> Value:
        """The result of ``call`` on the leader, on every rank; if it raises there, the others raise LeaderFailed."""
        failed: BaseException | None = None
        value: Any = None
        if self.leads:
            try:
                value = call()
            except Exception as error:  # whatever it is, the others must not wait for ever
                failed = error
        succeeded, value = self.world.shared((failed is None, value))
        if failed is not None:
            raise failed
        if not succeeded:
            raise LeaderFailed("the leader of the group failed")
        return value

    def both(self, first: Branch, second: Branch) -> tuple[torch.Tensor, torch.Tensor]:
        """The results of the two branches of guidance, equal in shape; with halves, each half computes one."""
        if self.half is None:
            return first(), second()
        with self.apart():
            own = (first, second)[self.branch]()
        return self.swapped(own)

    def by_halves(self, run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """``run``, from rows of a batch to their predictions, with :data:`BOTH` rows shared out, one to each half."""
        if self.half is None:
            return run

        def shared(rows: slice, *more: Any) -> torch.Tensor:
            if rows != BOTH:
                return run(rows, *more)
            return torch.cat(self.both(lambda: run(slice(0, 1), *more), lambda: run(PROMPTED, *more)))

        return shared

    def swapped(self, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The results of both halves' branches, in order; ``own`` is this half's, exchanged for the other's."""
        assert self.half is not None
        partner = (self.world.rank + self.half.size) % self.world.size
        pieces = [own if rank == partner else own.new_empty(0) for rank in range(self.world.size)]
        shapes = [tuple(own.shape) if rank == partner else (0,) for rank in range(self.world.size)]
        other = self.world.exchange(pieces, shapes)[partner]
        return (other, own) if self.branch else (own, other)

    @property
    def leads(self) -> bool:
        return self.world.rank == LEADER

    @property
    def branch(self) -> int:
        """The branch of guidance that this rank computes, 0 or 1; 0 without halves."""
        return 0 if self.half is None else int(self.world.rank >= self.world.size - self.half.size)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """The block of a forward of one branch, whose tokens are shared within each half alone."""
        self._apart = True
        try:
            yield
        finally:
            self._apart = False


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The names of those arguments of a family's blocks that have entries for the video's tokens."""

    rotary: tuple[str, ...]  # rotary tables
    dim: int  # the dimension of these tables that counts tokens
    rows: tuple[str, ...] = ()  # (B, N, D) with a row for each token; one row for all stays as it is
    leading: tuple[str, ...] = ()  # counts of the first tokens, which are treated differently
