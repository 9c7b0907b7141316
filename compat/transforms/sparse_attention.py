"""HunyuanVideo 1.5's sparse attention (SSTA): the video in tiles, each of which sees those around it, those most like
it and the text. Their keys are gathered for the pipeline's own attention, so that any device can.
Source: Tencent-Hunyuan/HunyuanVideo-1.5 ``ssta_attention.py``, whose own kernel needs Hopper. It masks text by whole
tiles, so that padding in the last one counts there; here padding has been left out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch.nn import functional

from .attention import Attention

Grid = tuple[int, int, int]  # frames, rows and columns of a video's tokens, or of tiles
TILE, PICTURE_TILE = (6, 8, 8), (1, 16, 24)  # tokens of a tile; of a single frame
AROUND = 1  # tiles on each side that a tile sees
ALIKE, SHORT = 64, 31  # other tiles that a tile sees; half as many in a video of at most so many latent frames
LIKENESS = 0.7  # weight of likeness in a tile's importance; the rest is how little it repeats the other tiles


@dataclass
class SparseAttention:
    """The attention of joint tokens, the video's first, as ``attend`` of :class:`JointProcessor`."""

    attention: Attention
    grid: Grid = (1, 1, 1)  # of the video in the forward that runs

    @torch.compiler.disable  # a graph would have a copy of every round of the loop
    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The attention (B, H, N, D) of joint tokens: a video tile sees the tiles that :func:`attended` picks, and the
        text; the text sees everything. A call with a ``mask`` is not sparse."""
        if mask is not None:
            return self.attention(query, key, value, mask)
        count, tile = math.prod(self.grid), PICTURE_TILE if self.grid[0] == 1 else TILE
        tiles = _tiles(self.grid, tile)
        queries, keys, values = (_tiled(each[:, :, :count], self.grid, tile) for each in (query, key, value))
        text = [each[:, :, count:].flatten(0, 1) for each in (query, key, value)]
        of_text = torch.stack([self._of_text(*each) for each in zip(*text, keys, values, strict=True)])
        of_queries, of_keys = (each.mean(2, dtype=torch.float32) for each in (queries, keys))
        places, counted = (each.flatten(0, 1) for each in attended(of_queries, of_keys, tiles, self.grid[0]))
        head_count, tile_count, size = keys.shape[:3]  # size: tokens of a tile
        heads = torch.arange(head_count, device=key.device).repeat_interleave(tile_count)  # of each tile
        gathered = 3 * keys.itemsize * places.shape[1] * math.prod(keys.shape[2:])  # bytes for one tile of one head
        step = max(1, self.attention.budget_bytes // gathered)
        video = queries.flatten(0, 1)  # a copy where the heads lie innermost; results replace the queries in it
        del queries
        for part in (slice(first, first + step) for first in range(0, len(places), step)):
            head, chosen = heads[part], places[part]
            seen_keys, seen_values = (
                torch.cat([tiled[head[:, None], chosen].flatten(1, 2), text_tokens[head]], dim=1)[None]
                for tiled, text_tokens in ((keys, text[1]), (values, text[2]))
            )
            shown = functional.pad(counted[part].repeat_interleave(size, dim=1), (0, text[1].shape[1]), value=True)
            video[part] = self.attention(video[None, part], seen_keys, seen_values, shown[None, :, None])[0]
        del keys, values
        video = _untiled(video.unflatten(0, (head_count, tile_count)), self.grid, tile, tiles)
        return torch.cat([video, of_text], dim=1).unflatten(0, query.shape[:2])

    def _of_text(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tiles: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """One head's results (M, D) of the text (M, D), which sees itself and all of the video: its keys in ``tiles``
        (tiles, tokens, D) and ``values``, with what pads its border tiles."""
        keys, values = (torch.cat([video.flatten(0, 1), text]) for video, text in ((tiles, key), (values, value)))
        return self.attention(query[None, None], keys[None, None], values[None, None])[0, 0]

    def note(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A pre-hook of the transformer: note the grid of its latents (B, C, T, H, W) in patches."""
        sides, config = (arguments or (named["hidden_states"],))[0].shape[2:], module.config
        patches = (config.patch_size_t, config.patch_size, config.patch_size)
        frames, rows, columns = (side // patch for side, patch in zip(sides, patches, strict=True))
        self.grid = frames, rows, columns


def attended(queries: torch.Tensor, keys: torch.Tensor, tiles: Grid, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices (R, n, m) of the tiles that each of the n ``tiles`` attends to, by the means (R, n, D) of their queries
    and keys, R being batch times heads; and a mask of that shape, False where a tile attends to fewer than m."""
    near = _around(tiles, 0 if frames == 1 else AROUND).to(keys.device)
    count, most = keys.shape[1], _most(frames)
    queries, keys = functional.normalize(queries, dim=-1), functional.normalize(keys, dim=-1)
    alike = (keys @ keys.mT + 1) / 2
    repeated = (alike.sum(1) - alike.diagonal(dim1=1, dim2=2)) / max(1, count - 1)
    importance = LIKENESS * (queries @ keys.mT + 1) / 2 - (1 - LIKENESS) * repeated.unsqueeze(1)
    shown = near.expand(len(keys), -1, -1).float().scatter(2, importance.topk(min(most, count)).indices, 1.0)
    counted, places = shown.topk(min(count, most + (2 * AROUND + 1) ** 3))
    return places, counted > 0


def shares(grid: Grid) -> tuple[float, float, float]:
    """Keys per query, keys gathered for all tiles together, and tokens in padded tiles, as shares of the tokens."""
    tile = PICTURE_TILE if grid[0] == 1 else TILE
    count, tokens = math.prod(_tiles(grid, tile)), math.prod(grid)
    gathered = min(count, _most(grid[0]) + (2 * AROUND + 1) ** 3) * math.prod(tile)
    return gathered / tokens, gathered * count / tokens, math.prod(tile) * count / tokens


def _most(frames: int) -> int:
    """The most tiles that a tile sees by likeness, in a video of so many latent frames."""
    return ALIKE // 2 if 1 < frames <= SHORT else ALIKE


@cache
def _around(tiles: Grid, reach: int) -> torch.Tensor:
    """The tiles j (columns) that tile i (rows) sees: those within ``reach`` of i, moved inside at the borders."""
    where = torch.tensor(list(product(*map(range, tiles))))
    centre = torch.minimum(where.clamp(min=reach), torch.tensor(tiles) - 1 - reach)
    return ((centre[:, None] - where[None]).abs() <= reach).all(-1)


def _tiles(grid: Grid, tile: Grid) -> Grid:
    """The tiles along each side of ``grid``, the last ones padded."""
    frames, rows, columns = (-(-side // part) for side, part in zip(grid, tile, strict=True))
    return frames, rows, columns


def _tiled(tokens: torch.Tensor, grid: Grid, tile: Grid) -> torch.Tensor:
    """Tokens (B, H, N, D) as (B H, tiles, tokens of a tile, D), with zeros behind the borders."""
    tiles = _tiles(grid, tile)
    frames, rows, columns = (part * count - side for side, part, count in zip(grid, tile, tiles, strict=True))
    video = tokens.flatten(0, 1).unflatten(1, grid)
    video = functional.pad(video, (0, 0, 0, columns, 0, rows, 0, frames))
    video = video.unflatten(3, (tiles[2], tile[2])).unflatten(2, (tiles[1], tile[1])).unflatten(1, (tiles[0], tile[0]))
    return video.permute(0, 1, 3, 5, 2, 4, 6, 7).flatten(4, 6).flatten(1, 3)


def _untiled(video: torch.Tensor, grid: Grid, tile: Grid, tiles: Grid) -> torch.Tensor:
    """Tokens (B H, N, D) of ``video`` (B H, tiles, tokens of a tile, D): the inverse of :func:`_tiled`."""
    video = video.unflatten(2, tile).unflatten(1, tiles).permute(0, 1, 4, 2, 5, 3, 6, 7)
    video = video.flatten(5, 6).flatten(3, 4).flatten(1, 2)
    return video[:, : grid[0], : grid[1], : grid[2]].flatten(1, 3)
