"""Tokens exchanged for heads: each rank's share is that of attention over everything, here with threads for ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from anygpu.compat.errors import UnsupportedError
from anygpu.compat.ranks import Group, Ranks, SplitPlan
from anygpu.compat.transforms.context_parallel import SplitAttention, TokenSplit
from torch.nn import functional

PLAN = SplitPlan(("rotary",), dim=0, rows=("temb",), leading=("first",))


class Threads:
    """The ranks of one process."""

    def __init__(self, rank: int, size: int, table: dict[int, Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.table, self.barrier = rank, size, table, barrier

    def runs(self, count: int) -> list[slice]:
        return Ranks(None, self.rank, self.size).runs(count)

    def exchange(self, pieces: list[torch.Tensor], shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
        self.table[self.rank] = pieces
        self.barrier.wait(20)
        received = [self.table[rank][self.rank] for rank in range(self.size)]
        self.barrier.wait(20)
        assert [tuple(piece.shape) for piece in received] == list(shapes)
        return received


def on_threads(size: int, call: Any) -> list[Any]:
    """What ``call`` returns for the group of each rank."""
    table: dict[int, Any] = {}
    barrier = threading.Barrier(size)
    groups = [Group(Threads(rank, size, table, barrier)) for rank in range(size)]  # type: ignore[arg-type]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, groups))


def test_runs_are_in_order_whole_and_even() -> None:
    for count in range(1, 12):
        for size in range(1, 6):
            runs = Ranks(None, 0, size).runs(count)
            assert [index for run in runs for index in range(count)[run]] == list(range(count))
            lengths = [run.stop - run.start for run in runs]
            assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(("size", "heads", "tokens", "text"), [(2, 2, 7, 3), (3, 5, 7, 0), (4, 6, 9, 2)])
@pytest.mark.parametrize("masked", ["", "whole", "own", "own, added"])
def test_attention_of_each_rank_is_its_share(size: int, heads: int, tokens: int, text: int, masked: str) -> None:
    """``own``: a mask that a processor made for this rank's keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, tokens + text, 4, generator=generator) for _ in range(3))
    valid = torch.ones(2, 1, 1, tokens + text, dtype=torch.bool)
    valid[0, ..., tokens + 1 :] = False
    added = torch.zeros(valid.shape).masked_fill(~valid, -1.5)
    mask = (added if "added" in masked else valid) if masked and text else None
    whole = functional.scaled_dot_product_attention(q, k, v, mask)

    def own(group: Group) -> torch.Tensor:
        split = TokenSplit(group, PLAN)
        split.begin(tokens)
        keep = [*range(tokens)[split.run], *range(tokens, tokens + text)]
        given = mask[..., keep] if "own" in masked and mask is not None else mask
        attend = SplitAttention(split, functional.scaled_dot_product_attention)
        result = attend(q[:, :, keep], k[:, :, keep], v[:, :, keep], given)
        torch.testing.assert_close(result, whole[:, :, keep], rtol=0, atol=1e-6 if "added" in masked else 0)
        return result[:, :, : split.length]

    assert torch.equal(torch.cat(on_threads(size, own), dim=2), whole[:, :, :tokens])


def test_what_goes_by_token_is_cut_with_the_tokens() -> None:
    tables, rows = (torch.arange(7.0)[:, None], -torch.arange(7.0)[:, None]), torch.arange(7.0).view(1, 7, 1)

    def own(group: Group) -> tuple[Any, ...]:
        split = TokenSplit(group, PLAN)
        split.begin(7)
        cut = split.tables(tables)
        assert split.tables(tables) is cut, "cut once for all blocks"
        assert split.rows(rows[:, :1]) is not None and split.rows(rows[:, :1]).shape[1] == 1, "one row for all tokens"
        return cut[0], split.rows(rows), split.leading(4)

    firsts, seconds, leading = zip(*on_threads(3, own), strict=True)
    assert torch.equal(torch.cat(firsts), tables[0]) and torch.equal(torch.cat(seconds, dim=1), rows)
    assert leading == (3, 1, 0)


def test_more_devices_than_tokens_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="2 tokens for 3 devices; expected at least one token for each"):
        TokenSplit(Group(Ranks(None, 0, 3)), PLAN).begin(2)


def test_a_mask_of_a_rank_s_own_keys_says_that_all_of_the_video_counts():
    split = TokenSplit(None, None, count=5, run=slice(0, 3))
    attention, key = SplitAttention(split, None), torch.zeros(1, 1, 7, 4)
    text = torch.tensor([True, False])
    own = torch.cat([torch.ones(3, dtype=torch.bool), text])[None, None, None]
    assert attention._over_all_keys(own, key)[0, 0, 0].tolist() == [True] * 5 + [True, False]
    assert attention._over_all_keys(-9.0 * ~own, key)[0, 0, 0].tolist() == [0.0] * 6 + [-9.0]
    assert (
        attention._over_all_keys(None, key) is None
        and attention._over_all_keys(key[:, :, 0, :1].expand(1, 1, 7), key).shape[-1] == 7
    )
