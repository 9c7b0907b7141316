"""One forward of a transformer on several devices: each has a run of the video's tokens, and in attention of the heads.
Text stays whole on every rank; around attention, tokens are exchanged for heads, so that padding, masks and kernels are
as on one device. Source: Jacobs et al., DeepSpeed Ulysses (2023). diffusers' own context parallelism acts inside its
processors, in whose place stand ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..device.execution import add_hook
from ..errors import UnsupportedError
from ..memory.parts import Undo, denoises, transformer_blocks
from ..ranks import Group, SplitPlan
from .attention_processors import Attend
from .order import Back, Order, Step
from .sparse_attention import SparseAttention

STATES = "hidden_states"  # of the video, in every block


@dataclass(slots=True)
class TokenSplit:
    """The split of one transformer over the ranks of ``group``."""

    group: Group
    plan: SplitPlan  # what else is cut with the tokens
    count: int = 0  # the video's tokens in the forward that runs
    run: slice = field(default_factory=lambda: slice(0, 0))  # the part of these tokens that is this rank's
    _tables: tuple[Any, Any] = (None, None)  # of this forward: the whole rotary tables, and this rank's part of them

    def attach(self, transformer: nn.Module) -> Back:
        """Split every forward of ``transformer``; returns an undo. UnsupportedError where a block cannot be split."""
        undo, blocks = Undo(), list(transformer_blocks(transformer))
        try:
            for block in blocks:
                attention = getattr(block, "attn1", None) or getattr(block, "attn", None)  # of the video's tokens
                processor: Any = getattr(attention, "processor", None)
                require_splittable(block, attention, self.group.world.size)
                undo.set(processor, "attend", SplitAttention(self, processor.attend))
                names = tuple(inspect.signature(type(block).forward).parameters)[1:]
                cut = partial(self._cut, block is blocks[0], names)
                undo.append(add_hook(block, cut, before=True, with_kwargs=True).remove)
            undo.append(add_hook(blocks[-1], self._join).remove)
        except BaseException:
            undo.restore()
            raise
        return undo.restore

    def begin(self, count: int) -> None:
        """Split the ``count`` tokens of this forward's video; UnsupportedError for fewer tokens than ranks."""
        ranks = self.group.tokens
        if count < ranks.size:
            found, expected = f"{count} tokens for {ranks.size} devices", "at least one token for each"
            raise UnsupportedError(found, expected=expected, fix="Use fewer devices per video, or a larger video.")
        self.count, self.run = count, ranks.runs(count)[ranks.rank]

    @property
    def length(self) -> int:
        return self.run.stop - self.run.start

    def tables(self, tables: Any) -> Any:
        """This rank's part of the rotary ``tables``, cut once for all blocks of a forward; None for None."""
        if tables is None:
            return None
        if self._tables[0] is not tables:
            run = type(tables)(table.narrow(self.plan.dim, self.run.start, self.length) for table in tables)
            self._tables = (tables, run)
        return self._tables[1]

    def rows(self, rows: Any) -> Any:
        """This rank's part of ``rows`` (B, N, D); whatever has no row for each token stays as it is."""
        several = isinstance(rows, torch.Tensor) and rows.ndim == 3 and rows.shape[1] > 1
        return rows[:, self.run] if several else rows

    def leading(self, number: Any) -> Any:
        """The count of the video's first ``number`` tokens that are in this rank's part; None for None."""
        return None if number is None else min(max(number - self.run.start, 0), self.length)

    def _cut(
        self, first: bool, names: tuple[str, ...], _block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cut those arguments of a block that have an entry per token, and before the ``first`` block the tokens."""
        arguments = dict(zip(names, given, strict=False)) | named
        if first:
            self.begin(arguments[STATES].shape[1])
        if self.group.tokens.size == 1:
            return given, named
        cuts: dict[str, Callable[[Any], Any]] = {STATES: lambda tokens: tokens[:, self.run]} if first else {}
        cuts |= dict.fromkeys(self.plan.rotary, self.tables)
        cuts |= dict.fromkeys(self.plan.rows, self.rows) | dict.fromkeys(self.plan.leading, self.leading)
        arguments |= {name: cut(arguments[name]) for name, cut in cuts.items() if name in arguments}
        return tuple(arguments.pop(name) for name in names[: len(given)]), arguments

    def _join(self, _block: nn.Module, _given: Any, output: Any) -> Any:
        """Gather the video's tokens of all ranks after the last block, and let this forward's tables go."""
        ranks = self.group.tokens
        self._tables = (None, None)
        if ranks.size == 1:
            return output
        if isinstance(output, torch.Tensor):
            return ranks.gathered(output, 1, self.count)
        return (ranks.gathered(output[0], 1, self.count), *output[1:])


@dataclass(frozen=True, slots=True)
class SplitAttention:
    """Attention of this rank's tokens, computed by ``attend`` with all tokens and this rank's heads."""

    split: TokenSplit
    attend: Attend

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention (B, H, n, D) of this rank's tokens of the video, and of the text behind them."""
        if self.split.group.tokens.size == 1:
            return self.attend(query, key, value, mask)
        heads = query.shape[1]
        query, key, value = (self._tokens_for_heads(tensor) for tensor in (query, key, value))
        return self._heads_for_tokens(self.attend(query, key, value, self._over_all_keys(mask, key)), heads)

    def _tokens_for_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Exchange (B, H, n, D), all heads of this rank's tokens, for (B, h, N, D), its heads of all tokens."""
        split, ranks = self.split, self.split.group.tokens
        batch, heads, _, width = tensor.shape
        runs = ranks.runs(heads)
        mine = runs[ranks.rank]
        video, text = tensor[:, :, : split.length], tensor[:, mine, split.length :]  # every rank has the whole text
        shapes = [(batch, mine.stop - mine.start, run.stop - run.start, width) for run in ranks.runs(split.count)]
        return torch.cat([*ranks.exchange([video[:, run] for run in runs], shapes), text], dim=2)

    def _heads_for_tokens(self, result: torch.Tensor, heads: int) -> torch.Tensor:
        """Exchange (B, h, N, D), this rank's heads of all tokens, for (B, H, n, D), all heads of its tokens."""
        split, ranks = self.split, self.split.group.tokens
        video, text = result[:, :, : split.count], result[:, :, split.count :]
        pieces = [torch.cat([video[:, :, run], text], dim=2) for run in ranks.runs(split.count)]
        batch, _, _, width = result.shape
        length = split.length + text.shape[2]
        shapes = [(batch, run.stop - run.start, length, width) for run in ranks.runs(heads)]
        return torch.cat(ranks.exchange(pieces, shapes), dim=1)

    def _over_all_keys(self, mask: torch.Tensor | None, key: torch.Tensor) -> torch.Tensor | None:
        """``mask`` (..., M) over all keys: one over this rank's gets all keys of the video, which are all valid."""
        if mask is None or mask.shape[-1] == key.shape[2]:
            return mask
        text = mask[..., self.split.length :]
        return functional.pad(text, (self.split.count, 0), value=True if mask.dtype is torch.bool else 0.0)


def require_splittable(block: nn.Module, attention: Any, size: int) -> None:
    """Raise UnsupportedError for a block whose attention is none of ours, or has fewer heads than there are ranks."""
    processor, name = getattr(attention, "processor", None), type(block).__name__
    attend = getattr(processor, "attend", None)
    if attend is None or isinstance(attend, SparseAttention):
        found = f"{name} with {type(processor).__name__}, on {size} devices"
        raise UnsupportedError(found, expected="attention that AnyGPU knows", fix="Render this model on one device.")
    if attention.heads < size:
        found, expected = f"{attention.heads} attention heads on {size} devices", "at least one head for each device"
        raise UnsupportedError(found, expected=expected, fix=f"Use at most {attention.heads} devices per video.")


def split_step(group: Group, plan: SplitPlan | None, title: str) -> Step:
    """The step that splits a family's denoisers over all ranks of ``group``; UnsupportedError without ``plan``."""
    if plan is None:
        found = f"{title} on {group.world.size} devices"
        raise UnsupportedError(found, expected="one device", fix="Leave out --group for this model.")

    def apply(part: str, module: nn.Module) -> Back | None:
        return TokenSplit(group, plan).attach(module) if denoises(part) else None

    return Step(Order.SPLIT, f"split over {group.world.size} ranks", apply)
